"""Plans for people, as JSON and as a picture."""

import json
from dataclasses import replace

import jax.numpy as jnp
import pytest

from jaxinfer.engine.spec import EngineSpec
from jaxinfer.models import abstract_params
from jaxinfer.planning import MemoryPlan, changes, make_plan
from jaxinfer.planning.chips import chips
from jaxinfer.planning.compiled import compile_programs
from jaxinfer.planning.picture import draw
from jaxinfer.planning.plan import Memory
from jaxinfer.planning.planner import assemble
from jaxinfer.quantization.tree import num_bytes
from jaxinfer.speculative import ModelDraft, NgramDraft
from tests.planning.plan_models import LLAMA_3_8B, TINY


@pytest.fixture
def planned(ask, fake) -> MemoryPlan:
    """Of programs that a compiler which is none has made."""
    request = ask(TINY, "v6e:1x1", draft=NgramDraft(), num_draft_tokens=3)
    spec = EngineSpec(TINY, request.params, request.options, "cpu", None, request.draft)
    return assemble(request, spec, compile_programs(spec, fake), chips()["v6e"], 2**30, [], 0.0)


def test_the_parts_are_all_there_is(planned):
    memory = planned.memory
    assert memory.is_measured
    assert sum(memory.parts.values()) == memory.total
    assert memory.total == pytest.approx(max(one.figures.total_bytes for one in planned.programs.values()), abs=1)
    assert planned.fits == (memory.total <= memory.budget)
    assert memory.budget == int(0.9 * 2**30)


def test_tokens_that_fit_leave_out_the_null_page():
    memory = Memory({"weights": 100, "cache": 50}, "decode", 250, 200, 4, 10, planned_tokens=16, is_measured=True)
    assert memory.tokens == 4 * (100 // 10 - 1)
    assert memory.remaining_tokens == memory.tokens - 16


def test_a_draft_takes_room_for_its_weights_and_its_cache(ask):
    small = replace(TINY, num_layers=20)
    draft = ModelDraft("draft", small, abstract_params(small, jnp.bfloat16))
    alone, beside = (make_plan(ask(TINY, "v6e:1x1", draft=one), compiles=False).memory for one in (None, draft))
    assert beside.parts["draft weights"] == num_bytes(draft.params)
    assert beside.parts["draft cache"] * TINY.num_layers == beside.parts["cache"] * 20
    assert beside.tokens < alone.tokens


def test_json_has_what_machines_read(planned):
    data = json.loads(json.dumps(planned.to_dict()))
    assert data["fits"] is True
    assert data["bytes"]["total"] == planned.memory.total
    assert {"weights", "cache", "slots", "temporaries", "budget", "usable"} <= set(data["bytes"])
    assert [point["batch"] for point in data["roofline"]] == [1, 8, 16]
    assert {"seconds", "tokens_per_second", "hbm_bytes", "flops", "sent_bytes", "bound"} <= set(data["roofline"][0])
    assert set(data["programs"]) == {"prefill", "decode", "speculate"}
    assert data["programs"]["decode"]["layers_compiled"] == [2, 4]
    assert data["compile_seconds"] == pytest.approx(6)
    assert data["rounds"][0]["num_draft_tokens"] == 3
    assert data["cache"]["tokens_planned"] == 16 * 1024
    assert all(source["title"] for source in data["chip"]["sources"])


def test_text_says_the_verdict_first(planned, ask):
    lines = planned.to_text().splitlines()
    assert lines[0] == "model fits on v6e:1x1 (1 x TPU v6e (Trillium), model=1)"
    assert str(planned) == planned.to_text()
    for words in ("weights", "cache for ", "decode", "TPOT ms", "tokens/s", "accepted", "from programs of 2, 4 layers"):
        assert words in planned.to_text()
    tight = make_plan(ask(LLAMA_3_8B, "v6e:1x1", max_model_len=4096, max_seqs=64), compiles=False)
    text = tight.to_text(changes(tight, compiles=False))
    assert text.startswith("model does not fit on v6e:1x1")
    assert "fewer than planned" in text
    assert "cheapest change that fits: --max-seqs" in text
    assert "estimated" in text


def test_a_chip_without_a_compiler_is_counted(ask):
    found = make_plan(ask(LLAMA_3_8B, "l4x4"))
    assert found.programs == {}
    assert "no compiler for NVIDIA L4" in found.notes[0]
    assert found.roofline


@pytest.mark.matrix
@pytest.mark.parametrize("ending", ["png", "svg"])
def test_the_picture(planned, tmp_path, ending):
    pytest.importorskip("matplotlib")
    file = tmp_path / f"plan.{ending}"
    draw(planned, file)
    content = file.read_bytes()
    if ending == "png":
        assert content[:8] == b"\x89PNG\r\n\x1a\n"
        return
    text = content.decode()
    assert "<!-- program -->" in text
    assert "<!-- tokens/s at the roofline -->" in text
    draw(replace(planned, roofline=(), rounds=()), file)
    assert "roofline" not in file.read_text()  # a panel without rates would say nothing


def test_batches_are_as_asked(ask):
    found = make_plan(ask(TINY, "v6e:1x1", batches=(3, 5)), compiles=False)
    assert [point.batch for point in found.roofline] == [3, 5]
