"""Trained heads on meshes: the tokens of one device without a draft, and as many accepted drafts as on one device."""

from functools import cache

import pytest

from jaxinfer import LLM
from jaxinfer.quantization import quantize_params
from tests.engine.fitted_heads import Heads
from tests.pallas_kernels.quick import quick
from tests.scale_out.test_one_answer import GROUPED, OPTIONS, PARAMS, PROMPTS, TIED, params_of

pytestmark = pytest.mark.alone

TARGETS = {"grouped": GROUPED, "tied": TIED}
HEADS = ("eagle3", "eagle3 wide", "mtp", "dflash", "dflash2", "dspark rnn at root")
MESHES = ("model=2", "model=4", "data=2", "data=2,model=2", "sequence=2", "sequence=2,model=2")


@cache
def plain(name: str):
    """The answers of one device without a draft, and heads that are fitted to them."""
    target = TARGETS[name], params_of(name)
    with LLM(target, **OPTIONS) as llm:
        outputs = [one.outputs[0] for one in llm.generate(PROMPTS, PARAMS, use_tqdm=False)]
        texts = [(prompt, one.token_ids) for prompt, one in zip(PROMPTS, outputs, strict=True)]
        return [one.token_ids for one in outputs], Heads(llm, target, texts)


def drafted(name: str, head, **options):
    """The answers with a head, and how many tokens it drafted and had right for prompts that came one after another:
    which rounds draft in a batch depends on who else is there."""
    target = TARGETS[name], params_of(name)
    with LLM(target, draft=head, num_draft_tokens=4, **{**OPTIONS, **options}) as llm:
        together = [one.outputs[0] for one in llm.generate(PROMPTS, PARAMS, use_tqdm=False)]
        before = llm.speculation_stats()
        alone = [  # with cached prefixes
            llm.generate([prompt], [params], use_tqdm=False)[0].outputs[0]
            for prompt, params in zip(PROMPTS, PARAMS, strict=True)
        ]
        after = llm.speculation_stats()
        assert [one.token_ids for one in alone] == [one.token_ids for one in together]
        assert all(one.error is None for one in alone)
        counts = after.proposed - before.proposed, after.accepted - before.accepted
        return [one.token_ids for one in alone], counts


CASES = [
    *((target, head, mesh) for target in TARGETS for head in HEADS for mesh in ("model=2", "model=4")),
    *(("grouped", head, mesh) for head in ("eagle3 wide", "dflash2") for mesh in MESHES[2:]),
]


@pytest.mark.parametrize(("target", "head", "mesh"), quick(CASES, ("grouped", "dflash2", "model=2")))
def test_the_tokens_are_those_of_one_device(target, head, mesh):
    expected, heads = plain(target)
    found, counts = drafted(target, heads[head], mesh=mesh)
    assert found == expected
    assert counts == drafted(target, heads[head])[1]
    assert 20 < counts[1] < counts[0] - 20


@pytest.mark.slow
@pytest.mark.parametrize("mesh", ["model=2", "data=2"])
def test_quantized_heads_over_narrow_pages(mesh):
    _, heads = plain("grouped")
    config, params = heads["mtp"]
    options = {"quantize": "int8", "kv_dtype": "int8"}
    with LLM((GROUPED, params_of("grouped")), **OPTIONS, **options) as llm:
        expected = [one.outputs[0].token_ids for one in llm.generate(PROMPTS, PARAMS, use_tqdm=False)]
    found, counts = drafted("grouped", (config, quantize_params(params, "int8")), mesh=mesh, **options)
    assert found == expected
    assert 20 < counts[1] < counts[0] - 20
