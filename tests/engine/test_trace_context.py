"""Nothing that happens after warm-up makes programs trace again: not `explain`, and not a late import of Pallas.

Since JAX 0.12 importing Pallas adds a value to the context of every trace. Pytest's own process has imported it long
ago, so this runs in a process of its own.
"""

import subprocess
import sys

import pytest

SCRIPT = """
import sys
import jax
from jaxinfer import LLM, SamplingParams
from jaxinfer.models import init_params
from tests.tiny import TINY

short = SamplingParams(max_tokens=4)
with LLM((TINY, init_params(TINY, jax.random.key(0))), max_seqs=1, max_model_len=16) as llm:
    llm.generate([5, 6, 7], short)
    llm.explain()
    assert "jax.experimental.pallas" not in sys.modules, "explain() imports Pallas on a CPU"
    llm.warm_up(use_tqdm=False)
    import jax.experimental.pallas.mosaic_gpu
    import jax.experimental.pallas.tpu
    with jax.no_tracing():
        llm.explain()
        llm.generate([5, 6, 7], short)
"""


@pytest.mark.slow
def test_explain_and_pallas_retrace_nothing():
    found = subprocess.run([sys.executable, "-W", "ignore", "-c", SCRIPT], capture_output=True, text=True, timeout=250)
    assert found.returncode == 0, found.stderr[-2000:]
