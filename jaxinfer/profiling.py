"""The former place of `jaxinfer.measure.profiling`, kept for one release."""

import warnings

from jaxinfer.measure import profiling

warnings.warn("jaxinfer.profiling is now jaxinfer.measure.profiling", DeprecationWarning, stacklevel=2)
__path__ = profiling.__path__
