"""What dispatches must at least read and compute, and the time of that at rates measured here."""

from collections.abc import Iterable
from dataclasses import dataclass

from jaxinfer.engine.events import Dispatch
from jaxinfer.engine.paged import PagedEngine
from jaxinfer.measure.bench.rates import Ideal
from jaxinfer.planning.counted import Counted, count
from jaxinfer.planning.here import subject_of
from jaxinfer.planning.roofline import Rates, pass_flops


@dataclass(frozen=True)
class Needed:
    """Of one device: bytes of weights and cache, FLOPs of products, the least seconds; of those, where moving bytes
    takes longer than computing."""

    num_bytes: float = 0.0
    flops: float = 0.0
    seconds: float = 0.0
    memory_seconds: float = 0.0

    def __add__(self, other: "Needed") -> "Needed":
        return Needed(
            self.num_bytes + other.num_bytes,
            self.flops + other.flops,
            self.seconds + other.seconds,
            self.memory_seconds + other.memory_seconds,
        )

    @property
    def bound(self) -> str:
        return "memory" if self.memory_seconds > self.seconds / 2 else "compute"


def needed(
    counted: Counted, rates: Rates, spans: Iterable[tuple[int, int]], *, reads_all_logits: bool = False
) -> Needed:
    """A pass over the weights for spans (tokens before, tokens of it): each reads the keys before it and its own.
    Logits are needed of every token (`reads_all_logits`), or of a span's last."""
    spans = list(spans)
    if not spans:
        return Needed()
    num_tokens = sum(length for _, length in spans)
    moved = counted.read_weight_bytes(num_tokens)
    moved += counted.token_cache_bytes * sum(start + length for start, length in spans)
    flops = pass_flops(counted, spans, reads_all_logits=reads_all_logits)
    compute = rates.compute_seconds(flops)
    memory = moved / rates.hbm
    return Needed(moved, sum(flops.values()), max(memory, compute), memory if memory >= compute else 0.0)


class Model:
    """What an engine's dispatches need, a draft's part included."""

    def __init__(self, engine: PagedEngine, ideal: Ideal):
        self._target, self._rates = ideal.counted, ideal.measured.rates
        self._draft: Counted | None = None
        self._tree: tuple[int, ...] | None = None
        subject = subject_of("model", engine)
        if subject.draft_model is not None:  # one that is computed, not looked up
            config, _ = subject.draft_model
            # Its own layers where the target's draft have no cache of their own, and keep theirs in the first pages.
            cache = subject.draft_cache if subject.draft_cache is not None else subject.cache.first(config.num_layers)
            self._draft = count(subject, config, subject.placed_draft or {}, cache)
        if (settings := engine.options.speculation) is not None:
            self._tree = settings.tree

    def needs(self, dispatch: Dispatch) -> Needed:
        """Of all its steps. A round needs as many passes of the draft as its drafts are deep, and one of the target."""
        total = Needed()
        for step in range(dispatch.num_steps):
            if dispatch.kind != "rounds":
                spans = [
                    (work.start + step, 1) if work.is_decoding else (work.start, work.num_prompt_tokens)
                    for work in dispatch.work
                ]
                total += needed(self._target, self._rates, spans)
                continue
            width = dispatch.num_drafted + 1
            spans = [(work.start, width) for work in dispatch.work]
            total += needed(self._target, self._rates, spans, reads_all_logits=True)
            if self._draft is not None:
                depth = dispatch.num_drafted if self._tree is None else len(self._tree)
                one = needed(self._draft, self._rates, [(work.start, 1) for work in dispatch.work])
                total = sum([one] * depth, start=total)
        return total
