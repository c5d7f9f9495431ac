"""Measures drafts one after another, over a model that is loaded once."""

import contextlib
import gc
import json
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib import resources
from typing import Any

from jaxinfer.api.llm import LLM
from jaxinfer.loading import LoadedModel, load_model
from jaxinfer.measure.speculation.report import (
    DraftReport,
    Run,
    compare,
    repeats_itself,
)
from jaxinfer.quantization.tree import num_bytes
from jaxinfer.sampling import SamplingParams
from jaxinfer.speculative import OWN_HEAD, SpeculationStats, draft_by_name, names_kind

OTHER = "text"  # kind of prompts that have none
NUM_WARM = 4  # answers before the clock starts: they compile, and an adaptive length makes its first trials


@dataclass(frozen=True)
class KindPrompt:
    """A prompt, text or token ids, with the kind of text that answers it and sampling parameters of its own.

    is_chat: a message, for the chat template of a model that has one.
    """

    prompt: str | list[int]
    kind: str = OTHER
    sampling: Mapping[str, Any] = field(default_factory=dict)
    is_chat: bool = False


@dataclass(frozen=True)
class DraftSettings:
    """Settings that all drafts share.

    Attributes:
      lengths: tokens drafted per round, one answer at a time. loads: numbers of answers at a time.
      sampling: parameters of all answers. engine, loading: arguments of `LLM`.
    """

    lengths: Sequence[int]
    loads: Sequence[int]
    sampling: Mapping[str, Any]
    acceptance: str = "exact"
    repeats: int = 3
    engine: Mapping[str, Any] = field(default_factory=dict)
    loading: Mapping[str, Any] = field(default_factory=dict)


def embedded_prompts() -> list[KindPrompt]:
    """64 prompts of four kinds: chat, code, list, summary. No model here was trained on them."""
    text = resources.files("jaxinfer").joinpath("data/speculation/prompts.jsonl").read_text(encoding="utf-8")
    records = [json.loads(line) for line in text.splitlines()]
    return [KindPrompt(record["prompt"], record["kind"], is_chat=True) for record in records]


class DraftReporter:
    """Measures plain decoding, then each draft. `close` frees the weights.

    Attributes:
      num_repetitive: prompts left out, since their plain answers repeat a run of tokens. plain: one answer at a time.
      plain_rates: tokens per second of all answers, by load.
    """

    def __init__(self, name: str, prompts: Sequence[KindPrompt], settings: DraftSettings):
        self.model, self._settings = load_model(name, **settings.loading), settings
        self.prompts = [self._encoded(prompt) for prompt in prompts]
        self.num_repetitive, self.plain_rates = 0, {}
        self.plain = Run(0, 0.0, 0.0, [], 0)

    def reports(self, drafts: Sequence[str], show: Callable[[str], None]) -> Iterator[DraftReport]:
        """One draft after the other; `show` is told what is measured."""
        settings = self._settings
        show("plain decoding")
        with self._llm() as llm:
            self._leave_out_loops([output.outputs[0].token_ids for output in self._outputs(llm)])
            self.plain = self._measured(llm, 0)
        self.plain_rates = {}
        for load in self.loads:
            show(f"plain decoding, {load} at a time")
            with self._llm(load) as llm:
                self.plain_rates[load] = self._rate(llm)
        for name in drafts:
            show(name)
            with self._opened(name) as draft:
                cost = self._draft_seconds(name, draft) / self.plain.seconds_per_token
                rows, loads, tokens = [], {}, None
                for length in settings.lengths:
                    show(f"{name}, {length} drafted tokens")
                    with self._llm(draft=_given(name, draft), num_draft_tokens=length) as llm:
                        rows.append(compare(self._measured(llm, length), self.plain, cost))
                        tokens = llm.engine.spec.draft.describe_own().get("tokens")
                for load in self.loads:
                    show(f"{name}, {load} at a time")
                    with self._llm(load, draft=_given(name, draft)) as llm:
                        loads[load] = self._rate(llm) / self.plain_rates[load]
                yield DraftReport(name, rows, loads, tokens)

    @property
    def loads(self) -> list[int]:
        """Those for which there are enough prompts."""
        return [load for load in self._settings.loads if load <= len(self.prompts)]

    def close(self) -> None:
        _free(self.model)

    def _encoded(self, prompt: KindPrompt) -> KindPrompt:
        tokenizer = self.model.tokenizer
        if not prompt.is_chat or tokenizer is None or not tokenizer.chat_templates:
            return prompt
        return replace(prompt, prompt=tokenizer.apply_chat_template([{"role": "user", "content": prompt.prompt}]))

    def _params(self, vocab_size: int) -> list[SamplingParams]:
        """With the end-of-sequence ids, which live parameters do not have."""
        ends = [token for token in self.model.eos_token_ids if token < vocab_size]
        shared = {**self._settings.sampling, "stop_token_ids": ends}
        return [SamplingParams.from_dict({**shared, **prompt.sampling}) for prompt in self.prompts]

    def _leave_out_loops(self, answers: Sequence[Sequence[int]]) -> None:
        kept = [prompt for prompt, answer in zip(self.prompts, answers, strict=True) if not repeats_itself(answer)]
        if kept:
            self.num_repetitive, self.prompts = len(self.prompts) - len(kept), kept

    @contextlib.contextmanager
    def _opened(self, name: str) -> Iterator[LoadedModel | None]:
        """A draft with weights of its own, for as long as it is measured."""
        loading = self._settings.loading
        dtype, draft = loading.get("dtype", "auto"), None
        if name == OWN_HEAD and self.model.source is not None:
            draft = load_model(self.model.source, dtype=dtype, is_mtp=True)
        elif not names_kind(name):
            draft = load_model(name, dtype=dtype, verify=loading.get("verify"), is_draft=True)
        try:
            yield draft
        finally:
            if draft is not None:
                _free(draft)

    def _llm(self, max_seqs: int = 1, model: Any = None, **drafting: Any) -> LLM:
        gc.collect()
        engine = {**self._settings.engine, "max_seqs": max_seqs}
        if "draft" in drafting:
            drafting["acceptance"] = self._settings.acceptance
        if model is None and str(engine.get("kv_dtype")).startswith("fp8"):  # live parameters have no scales
            drafting["kv_scales"] = self.model.kv_scales
        return LLM(model or live(self.model), **engine, **drafting)

    def _outputs(self, llm: LLM, count: int | None = None) -> list[Any]:
        """Those of the first `count` prompts; None for all. A draft with fewer tokens, of which alone only the time is
        measured, gets others for those that it lacks."""
        prompts: list[Any] = [prompt.prompt for prompt in self.prompts]
        if (size := llm.config.vocab_size) < self.model.config.vocab_size:
            prompts = [prompt if isinstance(prompt, str) else [token % size for token in prompt] for prompt in prompts]
        return llm.generate(prompts[:count], self._params(size)[:count], use_tqdm=False)

    def _draft_seconds(self, name: str, draft: LoadedModel | None) -> float:
        """Seconds per token of the draft alone; 0 for n-grams. Of a head, which cannot run alone, the share of the
        model's that it has in its bytes."""
        if draft is not None and draft.config.draft_head is not None:
            return self.plain.seconds_per_token * num_bytes(draft.params) / num_bytes(self.model.params)
        if draft is not None:
            models = [live(draft)]
        else:
            target = self.model.config, self.model.params
            kind = draft_by_name(name, *target)
            models = [] if kind is None else [(*own, self.model.tokenizer) for own in kind.models(*target)]
        seconds = 0.0
        for model in models:
            with self._llm(model=model) as llm:
                seconds += self._measured(llm, 0).seconds_per_token
        return seconds

    def _measured(self, llm: LLM, num_draft_tokens: int) -> Run:
        self._outputs(llm, NUM_WARM)
        before = llm.speculation_stats()
        seconds, shares, outputs, total = [], [], [], 0
        for _ in range(self._settings.repeats):
            wall, worked = time.perf_counter(), time.thread_time()
            outputs = self._outputs(llm)
            shares.append((time.thread_time() - worked) / (time.perf_counter() - wall))
            timings = [output.timings for output in outputs if output.timings is not None]
            spent = sum(timing.total_time - timing.time_to_first_token for timing in timings)
            num_tokens = sum(len(output.outputs[0].token_ids) - 1 for output in outputs)
            if num_tokens < 1:
                raise ValueError("every answer ends with its first token: try other prompts")
            seconds.append(spent / num_tokens)
            total += num_tokens
        after = llm.speculation_stats()
        answers = [output.outputs[0] for output in outputs]
        return Run(
            num_draft_tokens,
            statistics.median(seconds),
            statistics.median(shares),
            [answer.token_ids for answer in answers],
            total,
            None if after is None or before is None else after - before,
            {} if after is None else self._by_kind(answers),
        )

    def _by_kind(self, answers: Sequence[Any]) -> dict[str, SpeculationStats]:
        by_kind: dict[str, SpeculationStats] = defaultdict(SpeculationStats)
        for prompt, answer in zip(self.prompts, answers, strict=True):
            by_kind[prompt.kind] += answer.speculation or SpeculationStats()
        return dict(by_kind) if len(by_kind) > 1 else {}

    def _rate(self, llm: LLM) -> float:
        """Tokens per second of all answers."""
        self._outputs(llm, max(NUM_WARM, llm.engine.spec.max_seqs))
        rates = []
        for _ in range(self._settings.repeats):
            start = time.perf_counter()
            num_tokens = sum(len(output.outputs[0].token_ids) for output in self._outputs(llm))
            rates.append(num_tokens / (time.perf_counter() - start))
        return statistics.median(rates)


def live(model: LoadedModel) -> Any:
    """The model for `LLM`, which does not free live parameters."""
    return model.config, model.params, model.tokenizer


def _given(name: str, draft: LoadedModel | None) -> Any:
    return name if draft is None else live(draft)


def _free(model: LoadedModel) -> None:
    import jax

    for leaf in jax.tree.leaves(model.params):
        leaf.delete()
