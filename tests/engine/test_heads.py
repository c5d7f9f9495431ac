"""Trained heads draft and change no answer: tokens, finish reasons and log-probabilities are those of plain decoding,
for requests of every kind, alone and crowded, however prompts are cut, after prefix hits and preemption, whatever the
caches, weights and layers of target and head are. Heads are fitted a little, so that many drafts are accepted and many
are not (tests/engine/fitted_heads.py). What they draft: test_head_pages.py and tests/speculative/test_heads.py.
"""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import pytest

from jaxinfer import LLM, SamplingParams
from jaxinfer.engine.engine import Engine
from jaxinfer.engine.options import EngineOptions
from jaxinfer.engine.request import Request, SequenceState
from jaxinfer.grammar.structured import StructuredOutputs
from jaxinfer.quantization import quantize_params
from jaxinfer.speculative import NO_DRAFT, HeadDraft, head_for
from tests.engine.fitted_heads import Heads
from tests.engine.grammars import FORMS, make_compiler, make_sequence, random_params, run
from tests.engine.mixed_requests import random_prompts
from tests.engine.shared_rows import always_share_rows
from tests.engine.test_policies import NUM_PROMPTS, PROMPTS, check_everything, model_of
from tests.engine.test_policies import PARAMS as MIXED
from tests.engine.test_state_drafts import model_of as states_model_of
from tests.engine.test_states import MODELS
from tests.engine.test_windows import check_idle
from tests.pallas_kernels.quick import quick
from tests.speculative.tiny_heads import KINDS

OPTIONS = {"max_seqs": 8, "max_model_len": 128, "page_size": 8, "prefill_chunk": 40, "steps_per_dispatch": 6}
PARAMS = list(MIXED)
PARAMS[2] = replace(PARAMS[2], logprobs=3)
# No token of a head with a smaller vocabulary is allowed.
PARAMS[6] = replace(PARAMS[6], allowed_token_ids=[1, 4, 8, 11, 15], temperature=1.3)
PARAMS[11] = SamplingParams(max_tokens=45, temperature=0.3, seed=2, min_tokens=20, stop_token_ids=[3, 4, 5, 6, 7, 8])


def open_llm(model, **options: Any) -> LLM:
    return LLM(model, **{**OPTIONS, **options})


def answers(llm: LLM, numbers: Sequence[int] = range(NUM_PROMPTS)) -> list[list[tuple]]:
    """Tokens, finish reasons and log-probabilities of all answers to each prompt."""
    outputs = llm.generate(
        [PROMPTS[number] for number in numbers], [PARAMS[number] for number in numbers], use_tqdm=False
    )
    return [[answer_of(one) for one in output.outputs] for output in outputs]


def answer_of(one) -> tuple:
    entries = [{token: entry.logprob for token, entry in step.items()} for step in one.logprobs or ()]
    return one.token_ids, one.finish_reason, entries


def nearly(found: list[list[tuple]], tolerance: float = 1e-3) -> list[list[tuple]]:
    """The answers, equal to those with log-probabilities that differ by rounding."""

    def one(answer: tuple) -> tuple:
        tokens, reason, entries = answer
        return tokens, reason, [{token: pytest.approx(x, abs=tolerance) for token, x in e.items()} for e in entries]

    return [[one(answer) for answer in all_] for all_ in found]


def alone(llm: LLM) -> list[list[tuple]]:
    return [answers(llm, [number])[0] for number in range(NUM_PROMPTS)]


class Expected(dict):
    """What targets answer alone without a draft, by case, when it is first needed; and heads fitted to `full`."""

    def __init__(self):
        self.heads: dict[Any, Heads] = {}

    def __missing__(self, case: "Case") -> list[list[tuple]]:
        model = case.model()
        with open_llm(model, **{"prefill_chunk": 128, **case.options}) as llm:
            found = alone(llm)
            if case.is_fitted:
                texts = [(prompt, one[0]) for prompt, all_ in zip(PROMPTS, found, strict=True) for one in all_]
                self.heads[case.model] = Heads(llm, model, texts)
        assert len({str(one) for one in found}) > 9  # different enough to tell a mistake
        self[case] = nearly(found, case.tolerance)
        return self[case]

    def head(self, case: "Case"):
        """The case's head."""
        own = case if case.is_fitted else FULL
        self[own]
        config, params = self.heads[own.model][case.head]
        if case.head_recipe is not None:
            params = quantize_params(params, case.head_recipe)
        dtype = case.model()[0].dtype
        cast = jax.tree.map(lambda leaf: leaf.astype(dtype) if leaf.dtype == "float32" else leaf, params)
        return (config, params) if dtype == config.dtype else (replace(config, dtype=dtype), cast)


def full():
    return model_of((None, None, None))


def windows():
    return model_of((8, None, 16))


def windows_only():
    return model_of((13, 13, 13))


def in_bfloat16():
    config, params = full()
    return replace(config, dtype="bfloat16"), jax.tree.map(lambda leaf: leaf.astype("bfloat16"), params)


def quantized():
    config, params = full()
    return config, quantize_params(params, "int8")


def tied():
    config, params = full()
    params = {name: leaf for name, leaf in params.items() if name != "lm_head"}
    return replace(config, tie_word_embeddings=True, logit_softcap=4.0, embedding_multiplier=3.0), params


def recurrent():
    return states_model_of(replace(MODELS["delta"], vocab_size=97))


def recurrent_beside():
    return states_model_of(replace(MODELS["mamba"], layer_kinds=("attention_and_mamba2",) * 3, vocab_size=97))


@dataclass(frozen=True, eq=False)
class Case:
    """A target, options of its engine, a head, and options of the engine with the head. Unless `is_fitted`, the head is
    fitted to `full`. `tolerance` is of log-probabilities, `is_cut` says whether prompts lose tokens."""

    model: Callable[[], Any]
    options: dict[str, Any] = field(default_factory=dict)
    head: str = "eagle3"
    own: dict[str, Any] = field(default_factory=dict)
    is_fitted: bool = False
    head_recipe: str | None = None
    tolerance: float = 1e-3
    is_cut: bool = False


FULL = Case(full, is_fitted=True)


@pytest.fixture(scope="module")
def expected():
    return Expected()


def expect_cheap_drafts(llm: LLM) -> None:
    """An adaptive engine begins to draft, though these heads have as many bytes as their targets."""
    if llm.engine.spec.options.is_adaptive:
        llm.engine.speculation._controller.cost_ratio = 0.1


def check_accepted(llm: LLM) -> None:
    """Some drafts were accepted and some were rejected."""
    stats = llm.speculation_stats()
    if llm.engine.spec.options.is_adaptive:  # how often it drafts depends on what the machine has to do
        assert stats.proposed > 0 < stats.num_plain_tokens
    else:
        assert stats.proposed - 20 > stats.accepted > 20


VARIANTS = {
    "as it is": {},
    "adaptive, chunks of 16": {"num_draft_tokens": "auto", "prefill_chunk": 16},
    "a step a dispatch, chunks of 5": {"steps_per_dispatch": 1, "prefill_chunk": 5},
    "deterministic": {"deterministic": True},
    "without prefix reuse": {"prefix_cache": False},
    "bfloat16 pages of its own": {"draft_kv_dtype": "bfloat16"},
    "few drafts": {"num_draft_tokens": 1},
}
ONE_ANSWER = [
    *((name, "as it is") for name in KINDS),
    *((name, variant) for name in ("eagle3 wide", "dflash2") for variant in VARIANTS if variant != "as it is"),
]


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("name", "variant"), quick(ONE_ANSWER, ("eagle3 wide", "a step a dispatch, chunks of 5"), ("dflash", "as it is"))
)
def test_one_answer(expected, name, variant):
    """Alone, crowded, after prefix hits and preemption."""
    case = replace(FULL, head=name)
    with open_llm(full(), draft=expected.head(case), **{"num_draft_tokens": 4, **VARIANTS[variant]}) as llm:
        expect_cheap_drafts(llm)
        check_everything(llm, expected[FULL], answers)
        check_accepted(llm)
        check_idle(llm)


CASES = {
    "int8 pages": Case(full, {"kv_dtype": "int8"}, "mtp", {"draft_kv_dtype": "fp8_e4m3"}, tolerance=0.1),
    "int8 and int4 pages": Case(full, {"kv_dtype": "int8_int4"}, "eagle3 window", tolerance=0.1),
    # Rounding to 4 bits decides which of two tokens that tie is among the most likely, unless every bit is the same.
    "int4 pages": Case(full, {"kv_dtype": "int4", "deterministic": True}, "dspark gated", tolerance=0),
    "fp8 pages": Case(full, {"kv_dtype": "fp8_e4m3"}, "dflash", {"draft_kv_dtype": "int4"}, tolerance=0.1),
    "fp8 pages of the other kind": Case(full, {"kv_dtype": "fp8_e5m2"}, "mtp latent", tolerance=0.1),
    "bfloat16, deterministic": Case(in_bfloat16, {"deterministic": True}, "dspark rnn", tolerance=0),
    "float32, deterministic": Case(full, {"deterministic": True}, "dflash2", tolerance=0),
    "quantized": Case(quantized, {}, "mtp", head_recipe="int4-g32"),
    "quantized, by blocks": Case(quantized, {"kv_dtype": "int8"}, "dflash2", head_recipe="int8", tolerance=0.1),
    "quantized, a selector and places": Case(quantized, {}, "dspark rnn at root", head_recipe="int8"),
    "windows": Case(windows, {}, "dflash2"),
    "windows and int8 pages": Case(windows, {"kv_dtype": "int8"}, "dflash2", {"prefill_chunk": 16}, tolerance=0.1),
    "windows only": Case(windows_only, {}, "eagle3 wide"),
    "tied": Case(tied, {}, "eagle3", is_fitted=True),
    "tied, by blocks": Case(tied, {}, "dflash", is_fitted=True),
    "recurrent": Case(recurrent, {}, "eagle3", is_fitted=True),
    "recurrent, by blocks": Case(recurrent, {}, "dspark", {"prefill_chunk": 16}, is_fitted=True),
    "recurrent beside attention": Case(recurrent_beside, {}, "eagle3 wide", is_fitted=True),
    "snapkv": Case(full, {"kv_policy": "snapkv(40)"}, "eagle3", {"prefill_chunk": 16}, is_cut=True),
    "snapkv, by blocks": Case(full, {"kv_policy": "snapkv(40)"}, "dflash2", is_cut=True),
    "sinks and a window": Case(full, {"kv_policy": "sinks(4)+window(16)"}, "dflash", is_cut=True),
    "sinks and a window, pairs": Case(full, {"kv_policy": "sinks(4)+window(16)"}, "eagle3", is_cut=True),
}


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", quick(CASES, "recurrent", "quantized"))
def test_one_answer_over_other_targets(expected, name, monkeypatch):
    if name.startswith("quantized"):  # the quantized products themselves are to verify
        monkeypatch.setattr("jaxinfer.quantization.on_device.float32_copies.__defaults__", (0,))
    case = CASES[name]
    wanted = expected[case]
    with open_llm(
        case.model(), draft=expected.head(case), **{"num_draft_tokens": 4, **case.options, **case.own}
    ) as llm:
        check_crowded(llm, wanted, can_be_short=not case.is_cut)
        check_accepted(llm)


SHARED = {
    "dspark": replace(FULL, head="dspark"),
    "eagle3 wide": replace(FULL, head="eagle3 wide"),
    **{name: CASES[name] for name in ("recurrent, by blocks", "recurrent", "windows", "quantized, by blocks")},
    "snapkv": CASES["snapkv"],
}


@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", quick(SHARED, "dspark"))
def test_shared_rows_change_no_answer(expected, name, monkeypatch):
    """Rounds in which slots share rows: by a head's own confidence, and by what was accepted before."""
    case, used = SHARED[name], always_share_rows(monkeypatch)
    options = {"draft_lengths": (2, 4), "decode_slots": (1, 8), **case.options, **case.own}
    with open_llm(case.model(), draft=expected.head(case), **options) as llm:
        check_crowded(llm, expected[case], can_be_short=not case.is_cut)
        stats = llm.speculation_stats()
        assert stats.proposed > stats.accepted > 20
        if llm.engine.spec.draft.predicts_acceptance:
            assert len({drafted for drafted, _ in llm.engine.speculation.rounds}) > 2, "the program cuts drafts"
        else:
            assert sum(len(set(lengths)) > 1 for lengths in used) > 5


def check_crowded(llm: LLM, wanted, *, can_be_short: bool = True) -> None:
    """More requests than slots, again with prefix hits, and so short of pages that sequences are preempted."""
    scheduler = llm.engine.scheduler
    assert answers(llm) == wanted
    reused = scheduler.counters.reused_tokens
    assert answers(llm) == wanted
    assert scheduler.counters.reused_tokens > reused or llm.engine.spec.has_states  # saved after every 64 tokens
    if can_be_short:
        scheduler._num_spare = lambda: [0] * len(scheduler.pools.all)  # admits too many
        pool, least = scheduler.pools.all[0], scheduler.pools.least_pages(128)[0]
        pool.drop_idle()
        hidden = pool.allocate(pool.num_available - least - 1)
        assert answers(llm) == wanted
        pool.release(hidden)
        assert scheduler.counters.num_preemptions > 0
    check_idle(llm)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["eagle3 wide", "dflash2"])
def test_over_a_contiguous_cache(expected, name):
    head = expected.head(replace(FULL, head=name))
    options = {"cache": "contiguous", "page_size": None, "max_seqs": 4, "num_draft_tokens": 4}
    with open_llm(full(), draft=head, **options) as llm:
        for _ in range(2):
            assert answers(llm) == expected[FULL]
        check_accepted(llm)


@pytest.mark.slow
def test_streamed(expected):
    with open_llm(full(), draft=expected.head(replace(FULL, head="dflash")), num_draft_tokens=4) as llm:
        for number in (1, 6, 8, 11):
            tokens = [token for delta in llm.stream(PROMPTS[number], PARAMS[number]) for token in delta.token_ids]
            assert tokens == expected[FULL][number][0][0]


@pytest.mark.slow
@pytest.mark.parametrize("case", ["recurrent", "recurrent, by blocks"])
def test_drafts_go_on_from_saved_states(expected, case):
    """Prompts of which a part is known: found, restored and drafted, also under few pages."""
    numbers = random.Random(3)
    shared = [numbers.randrange(97) for _ in range(130)]
    prompts = [shared[: 66 + 12 * number] + [number] * (number + 1) for number in range(6)]
    params = [SamplingParams(max_tokens=24, temperature=0.2 * number, seed=number) for number in range(6)]
    options = {"max_model_len": 256, "page_size": 8, "max_seqs": 3, "prefill_chunk": 64}

    def tokens(llm: LLM) -> list[list[int]]:
        found = [output.outputs[0].token_ids for output in llm.generate(prompts, params, use_tqdm=False)]
        llm.engine.scheduler.check()
        return found

    with open_llm(recurrent(), prefix_cache=False, **options) as llm:
        wanted = tokens(llm)
    for more in ({}, {"num_pages": 48}):
        with open_llm(recurrent(), draft=expected.head(CASES[case]), num_draft_tokens=3, **options, **more) as llm:
            for _ in range(3):
                assert tokens(llm) == wanted
            assert llm.engine.scheduler.counters.reused_tokens >= 6 * 64
            stats = llm.speculation_stats()
            assert 0 < stats.accepted < stats.proposed


# Grammars.

GRAMMARS = {"tables on the device": {}, "masks from the host": {"grammar_memory": 0}}
NUM_GRAMMARS = 24


def under_grammars(target, draft, compiler, waits: bool, **options) -> tuple[list[list[int]], Any]:
    engine = Engine(*target, EngineOptions(**{**OPTIONS, **options}), draft=draft or NO_DRAFT)
    prompts = random_prompts(NUM_GRAMMARS, 30, seed=5)
    asked = [random_params(number) for number in range(NUM_GRAMMARS)]
    pairs = zip(prompts, asked, strict=True)
    found = run(engine, [make_sequence(compiler, prompt, one, waits=waits) for prompt, one in pairs])
    stats = engine.speculation_stats
    engine.close()
    return found, stats


@pytest.fixture(scope="module")
def by_grammar():
    """For a target, the answers under grammars without a draft, when they are first needed."""

    class ByGrammar(dict):
        def __missing__(self, target):
            self[target], _ = under_grammars(target(), None, make_compiler(), True)
            return self[target]

    return ByGrammar()


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("name", "masks"),
    quick(
        [(name, masks) for name in ("eagle3 wide", "dspark rnn", "dflash2", "recurrent") for masks in GRAMMARS],
        ("eagle3 wide", "tables on the device"),
        ("dspark rnn", "masks from the host"),
    ),
)
def test_one_answer_under_grammars(expected, by_grammar, name, masks):
    case = CASES["recurrent"] if name == "recurrent" else replace(FULL, head=name)
    target = case.model()
    config, params = expected.head(case)
    config, taps = head_for(config, target[0])
    draft = HeadDraft(name, config, params, taps)
    waits, options = masks == "tables on the device", GRAMMARS[masks]
    found, stats = under_grammars(target, draft, make_compiler(), waits, num_draft_tokens=3, **options)
    assert found == by_grammar[case.model]
    assert 0 < stats.accepted < stats.proposed


# Requests that were drawn.


def drawn_params(numbers: random.Random, number: int) -> SamplingParams:
    """Any of the sampling parameters together, a grammar, or several answers."""
    most = numbers.randint(2, 32)
    fields: dict[str, Any] = {
        "top_k": numbers.choice((1, 5, 40)),
        "top_p": numbers.uniform(0.5, 1),
        "min_p": numbers.uniform(0, 0.1),
        "presence_penalty": numbers.uniform(-1, 1),
        "frequency_penalty": numbers.uniform(-1, 1),
        "repetition_penalty": numbers.uniform(0.8, 1.5),
        "logit_bias": {numbers.randrange(97): numbers.uniform(-5, 5) for _ in range(4)},
        "stop_token_ids": numbers.sample(range(1, 97), 12),
        "min_tokens": numbers.randint(1, most),
        "logprobs": numbers.randint(0, 5),
        "prompt_logprobs": numbers.randint(0, 2),
        "ignore_eos": True,
        "allowed_token_ids": numbers.sample(range(97), 30),
    }
    fields = {name: value for name, value in fields.items() if numbers.random() < 0.25}
    temperature, form, count = numbers.choice((0, 0, 0.3, 0.7, 1.0, 1.6)), numbers.choice(FORMS), numbers.randint(2, 3)
    if numbers.random() < 0.25:
        excluding = ("ignore_eos", "allowed_token_ids", "min_tokens", "logit_bias")
        fields = {"structured": form, **{name: fields[name] for name in fields if name not in excluding}}
    elif temperature > 0 and numbers.random() < 0.25:
        fields["n"] = count
    return SamplingParams(max_tokens=most, temperature=temperature, seed=number, **fields)


def drawn_requests(count: int, compiler) -> list[Request]:
    """Requests whose prompts often begin alike, some with pairs of tokens that are excluded."""
    numbers, requests = random.Random(17), []
    beginnings = [prompt * (70 // len(prompt)) for prompt in random_prompts(6, 70, seed=18)]
    for number in range(count):
        beginning = numbers.choice(beginnings)
        prompt = beginning[: numbers.randint(0, len(beginning))]
        prompt = [*prompt, *(numbers.randrange(97) for _ in range(numbers.randint(1, 12)))]
        params, grammar = drawn_params(numbers, number), None
        if params.structured is not None:
            grammar = compiler.compile(StructuredOutputs.of(params.structured))
            grammar.wait()
        pairs = tuple((numbers.randrange(97), numbers.randrange(1, 97)) for _ in range(60))
        bad_words = pairs if numbers.random() < 0.1 else ()
        more = {"eos_token_ids": (0,), "bad_words": () if grammar else bad_words, "grammar": grammar}
        requests.append(Request(prompt, params, params.max_tokens or 16, number, **more))
    return requests


def answers_to(requests: Sequence[Request], target, draft, **options: Any) -> tuple[list[tuple], Any, Any]:
    """Tokens, finish reasons and log-probabilities of answer and prompt, of all answers to requests that come at once;
    counts of speculation and of the scheduler."""
    engine = Engine(*target, EngineOptions(**{**OPTIONS, **options}), draft=draft)
    if "num_pages" in options:
        engine.scheduler._num_spare = lambda: [0]  # admits too many
    sequences: list[SequenceState] = []
    for request in requests:
        first = SequenceState(request)
        sequences += [first, *(SequenceState(request, index, leader=first) for index in range(1, request.params.n))]
    run(engine, sequences)
    stats, counters = engine.speculation_stats, engine.scheduler.counters
    engine.close()
    found = [
        (one.output, one.finish_reason, *map(entries_of, (one.logprobs, one.prompt_logprobs))) for one in sequences
    ]
    return found, stats, counters


def entries_of(logprobs) -> list[dict[int, float]]:
    return [{token: entry.logprob for token, entry in (one or {}).items()} for one in logprobs]


DTYPES = {
    "float32": FULL,
    "bfloat16, deterministic": Case(in_bfloat16, {"deterministic": True}, tolerance=0),
}
NUM_DRAWN = 200


@pytest.fixture(scope="module")
def plainly():
    """By case, the requests that were drawn and what plain decoding answers to them, when it is first needed."""

    class Plainly(dict):
        def __missing__(self, case):
            requests = drawn_requests(NUM_DRAWN, make_compiler())
            found, *_ = answers_to(requests, case.model(), NO_DRAFT, **case.options)
            self[case] = requests, found
            return self[case]

    return Plainly()


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("name", "dtype"), quick([(name, dtype) for name in KINDS for dtype in DTYPES], ("mtp", "float32"))
)
def test_200_mixed_requests_with_a_head_have_the_answers_of_plain_decoding(expected, plainly, name, dtype):
    """Tokens, log-probabilities and finish reasons of requests with any parameters together, among preemption and
    prefix hits."""
    case = DTYPES[dtype]
    requests, wanted = plainly[case]
    config, params = expected.head(replace(case, head=name))
    config, taps = head_for(config, case.model()[0])
    draft = HeadDraft(name, config, params, taps)
    options = {"num_draft_tokens": 4, "num_pages": 28, **case.options}
    found, stats, counters = answers_to(requests, case.model(), draft, **options)
    for one, other in zip(found, wanted, strict=True):
        assert one[:2] == other[:2]
        for entries, others in zip(one[2:], other[2:], strict=True):
            close = [{token: pytest.approx(x, abs=case.tolerance) for token, x in each.items()} for each in others]
            assert entries == close
    assert {reason for _, reason, *_ in found} == {"stop", "length"}
    assert counters.num_preemptions > 10
    assert counters.reused_tokens > 1000
    assert stats.accepted > 100
    assert stats.proposed > stats.accepted + 100


# Other rules of acceptance, and other weights.


@pytest.mark.slow
@pytest.mark.parametrize("name", ["eagle3 wide", "dflash2", "mtp", "dspark rnn at root"])
def test_maximal_acceptance_keeps_greedy_answers_and_accepts_more(expected, name):
    """Also where no token that may be drafted is allowed (`PARAMS[6]`). How often it accepts is compared for answers to
    which the head was not fitted: of those, exact acceptance would draw the very ones that the head has right."""
    head, rates = expected.head(replace(FULL, head=name)), []
    params = [SamplingParams(max_tokens=40, seed=1000 + number, n=4, ignore_eos=True) for number in range(NUM_PROMPTS)]
    for acceptance in ("maximal", "exact"):
        with open_llm(full(), draft=head, num_draft_tokens=4, acceptance=acceptance) as llm:
            llm.generate(PROMPTS, params, use_tqdm=False)
            check_accepted(llm)
            rates.append(llm.speculation_stats().acceptance_rate)
            if acceptance == "maximal":
                found = answers(llm)
            check_idle(llm)
    assert rates[0] > 1.1 * rates[1]
    for number, one in enumerate(found):
        if PARAMS[number].is_greedy:
            assert one == expected[FULL][number]
        for tokens, reason, _ in one:
            assert reason == ("length" if len(tokens) == PARAMS[number].max_tokens else "stop")
            assert set(tokens) <= set(PARAMS[number].allowed_token_ids or tokens)
            assert len(tokens) >= PARAMS[number].min_tokens


@pytest.mark.slow
def test_a_head_goes_on_with_the_targets_new_weights(expected):
    """Its embedding and head are the target's: an engine at rest accepts what one does that was made with them."""
    config, params = full()
    others = {**params, "embed": params["embed"][::-1], "lm_head": params["lm_head"][:, ::-1]}
    head, options, found = expected.head(FULL), {"num_draft_tokens": 4, "max_seqs": 1}, []

    def accepted(llm: LLM) -> tuple:
        before = llm.speculation_stats()
        tokens = answers(llm, range(4))
        after = llm.speculation_stats()
        return tokens, after.proposed - before.proposed, after.accepted - before.accepted

    with open_llm((config, others), draft=head, **options) as llm:
        found.append(accepted(llm))
    with open_llm((config, params), draft=head, **options) as llm:
        found.append(accepted(llm))
        llm.engine.weights.replace(others)
        found.append(accepted(llm))
    assert found[0] == found[2] != found[1]


# Programs and what waits for them.


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", quick(["eagle3 wide", "dspark rnn"], "dspark rnn"))
def test_nothing_compiles_after_warm_up(expected, name):
    """Nor does anything else go to the device or come from it than arguments and results of programs."""
    head = expected.head(replace(FULL, head=name))
    with open_llm(full(), draft=head, num_draft_tokens="auto") as llm:
        llm.warm_up(use_tqdm=False)
        with jax.no_tracing(), jax.transfer_guard("disallow"):
            found = answers(llm)
            list(llm.stream(PROMPTS[0], PARAMS[0]))
            llm.score(PROMPTS[:3], [[5, 6]] * 3)
            pool = llm.engine.scheduler.pools.all[0]
            pool.drop_idle()
            llm.engine.scheduler._num_spare = lambda: [0]
            pool.allocate(pool.num_available - 20)
            assert answers(llm) == found
        assert llm.engine.scheduler.counters.num_preemptions > 0
        assert found == expected[FULL]


@pytest.mark.slow
def test_a_dispatch_is_read_once(expected, monkeypatch):
    """The host waits for tokens, and after rounds for how many were drafted and accepted, as with every draft."""
    head = expected.head(replace(FULL, head="dflash"))
    prompts, params = PROMPTS[:4], SamplingParams(max_tokens=20, temperature=1.0, seed=1)
    with open_llm(full(), draft=head, num_draft_tokens=4) as llm:
        num_read, get, kinds = 0, jax.device_get, []

        def counting(values):
            nonlocal num_read
            num_read += 1
            return get(values)

        monkeypatch.setattr(jax, "device_get", counting)
        with llm.engine.observe(lambda dispatch: kinds.append(dispatch.kind)):
            llm.generate(prompts, params, use_tqdm=False)
        assert kinds.count("rounds") > 2
        assert num_read == len(kinds) + kinds.count("rounds")
