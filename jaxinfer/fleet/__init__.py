"""Several engines: in Ray actors (`pool`), and servers behind one address (`front`)."""

from jaxinfer.lazy_names import first_with

_NAMES = ("RayPool", "RayDataGenerator", "WorkerLostError")
__getattr__ = first_with(__name__, _NAMES, "pool")
