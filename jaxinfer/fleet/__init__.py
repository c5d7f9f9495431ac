"""Several engines: in Ray actors (`pool`), under Ray Serve (`ray_serve`), and servers behind one address (`front`)."""

from jaxinfer.lazy_names import first_with

_NAMES = ("RayPool", "RayDataGenerator", "WorkerLostError", "build")
__getattr__ = first_with(__name__, _NAMES, "pool", "ray_serve.app")
