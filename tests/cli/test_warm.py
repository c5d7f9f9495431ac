"""`jaxinfer warm` fills the compilation cache, and the next start compiles nothing."""

import json
import os
import subprocess
import sys

import pytest

OPTIONS = ("--max-seqs", "1", "--max-model-len", "32", "--prefill-chunk", "16")
FIRST_REQUEST = """
import json, sys
from jaxinfer import LLM, SamplingParams, compilation_cache

compilation_cache.enable()
with compilation_cache.counting() as counts:
    with LLM(sys.argv[1], max_seqs=1, max_model_len=32, prefill_chunk=16) as llm:
        text = llm.generate("abc", SamplingParams(max_tokens=3))[0].outputs[0].text
print(json.dumps({"compiled": counts.compiled, "hits": counts.hits}))
"""


@pytest.mark.slow
def test_after_warming_nothing_compiles(jaxinfer_process, model, tmp_path, request):
    environment = {"JAXINFER_CACHE_DIR": str(tmp_path / "cache")}

    def warm():
        process = jaxinfer_process("warm", model, "--json", "--jobs", "2", *OPTIONS, env=environment)
        stdout, stderr = process.communicate(timeout=280)
        assert process.returncode == 0, stderr
        return json.loads(stdout)

    first = warm()
    assert first["compiled"] >= first["programs"] > 5
    assert first["folder"].startswith(str(tmp_path))
    if request.config.getoption("--slow"):
        again = warm()
        assert (again["compiled"], again["from_cache"]) == (0, first["compiled"])
    served = run(FIRST_REQUEST, model, environment)
    assert served["compiled"] == 0
    assert served["hits"] > 3


def run(code: str, model: str, environment: dict[str, str]) -> dict[str, int]:

    found = subprocess.run(
        [sys.executable, "-c", code, model],
        env={**os.environ, "JAX_NUM_CPU_DEVICES": "1", **environment},
        capture_output=True,
        text=True,
        check=True,
    )
    return json.loads(found.stdout.splitlines()[-1])
