"""Services of one model, whose engine the test has."""

from jaxinfer.server.models import ModelSource, OneModel
from jaxinfer.server.options import ServerOptions
from jaxinfer.server.service import Service


def service_of(engine=None, name="tiny", **options):
    """A service with these options; without an engine it is still loading."""

    def open_engine(needs):
        raise AssertionError("the engine is given")

    service = Service(ServerOptions(**options), name, OneModel(ModelSource((name,), name, open_engine)))
    if engine is not None:
        service.default.attach(engine)
        service.state = "ready"
    return service
