"""The programs that move pages to host memory and back, as the compilers of TPUs and GPUs make them."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import pytest

from jaxinfer.cache import abstract_paged_cache
from jaxinfer.engine.programs.tiers import abstract_rows, gather_pages, scatter_pages
from jaxinfer.quantization.tree import num_bytes
from pallas_kernels import ahead_of_time
from pallas_kernels.paged_attention import platform_layout
from tests.pallas_kernels.quick import quick
from tests.planning.plan_models import LLAMA_3_8B

NUM_PAGES, BATCH = 2049, 32
CASES = [("v6e", "bfloat16"), ("v6e", "int8"), ("h100", "bfloat16"), ("h100", "int8")]


@pytest.mark.slow
@pytest.mark.matrix
@pytest.mark.parametrize(("chip", "dtype"), quick(CASES, ("v6e", "bfloat16"), ("h100", "int8")))
def test_moves_copy_a_batch_and_not_the_cache(chip, dtype):
    """The cache is written in place; temporaries are at most a batch."""
    if (reason := ahead_of_time.missing_compiler(chip)) is not None:
        pytest.skip(reason)
    config = replace(LLAMA_3_8B, num_layers=2)
    layout = platform_layout("tpu" if chip == "v6e" else "gpu", dtype)
    parts = (abstract_paged_cache(config, NUM_PAGES, 64, dtype, layout).layers, ())
    ids = jax.ShapeDtypeStruct((BATCH,), jnp.int32)
    rows = tuple(jax.ShapeDtypeStruct((BATCH, *row.shape), row.dtype) for row in abstract_rows(None, parts))
    gathered = ahead_of_time.compile_for(chip, gather_pages, None, parts, ids)
    scattered = ahead_of_time.compile_for(chip, scatter_pages, None, parts, rows, ids)
    assert num_bytes(rows) == num_bytes(parts) // NUM_PAGES * BATCH
    assert gathered.output_bytes < 1.01 * num_bytes(rows) + 1024
    assert max(gathered.temporary_bytes, scattered.temporary_bytes) <= num_bytes(rows) + 2**16
    assert scattered.aliased_bytes == num_bytes(parts)
