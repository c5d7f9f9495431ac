"""The planted faults, by area. An anchor (`old`) is the shortest expression that survives a renaming around it."""

from tests.faults.catalogue import (
    batches,
    decoding,
    determinism,
    embedding,
    families,
    files,
    heavy_hitters,
    histories,
    kept,
    kernels,
    languages,
    policies,
    python_api,
    schemas,
    serving,
    store,
    tool_calls,
    weights,
)
from tests.faults.fault import Fault

FAULTS: tuple[Fault, ...] = (
    *batches.FAULTS,
    *decoding.FAULTS,
    *determinism.FAULTS,
    *embedding.FAULTS,
    *families.FAULTS,
    *files.FAULTS,
    *serving.FAULTS,
    *store.FAULTS,
    *languages.FAULTS,
    *schemas.FAULTS,
    *tool_calls.FAULTS,
    *weights.FAULTS,
    *kernels.FAULTS,
    *policies.FAULTS,
    *python_api.FAULTS,
    *heavy_hitters.FAULTS,
    *histories.FAULTS,
    *kept.FAULTS,
)
