"""Caches compared with the full one: their names, figures, tables and JSON. Plain Python: no JAX here."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from jaxinfer.cache.policy.kinds import parse_policy
from jaxinfer.cache.policy.sinks_window import SinksWindow

SCHEMA, VERSION = "jaxinfer.kv_report", 1
ALL = "all"  # the policy that drops nothing
DEFAULT_KV_DTYPES = ("auto", "bfloat16", "int8", "fp8_e4m3", "int8_int4", "int4")
DEFAULT_SINKS = 4
TITLES = ("kv_dtype", "kv_policy", "KL nats", "perplexity", "same best", "answers", "B/token", "KiB/text", "ms/token")
# A cache bears the needle task at a depth if its gain is this share of the full cache's; that gain counts if it has at
# least so many nats per token.
BEARS, LEAST_GAIN = 0.5, 0.1
NEEDLE_HEAD = (
    "Needle: a line of code is repeated at the end of a text; by tokens of the text and depth of the first occurrence,",
    "the share of lines that are copied whole, and the nats per token by which the first occurrence helps",
)


@dataclass(frozen=True)
class CacheChoice:
    """A cache to measure: `kv_dtype` as of `LLM`, and `kv_policy` in the form of `str(policy)`, or "all"."""

    kv_dtype: str
    kv_policy: str = ALL

    @property
    def is_full(self) -> bool:
        return self.kv_dtype == "auto" and self.kv_policy == ALL

    @property
    def arguments(self) -> dict[str, Any]:
        """As arguments of `LLM`."""
        return {"kv_dtype": self.kv_dtype, "kv_policy": None if self.kv_policy == ALL else self.kv_policy}

    def __str__(self) -> str:
        return self.named(self.kv_dtype)

    def named(self, kv_dtype: str) -> str:
        """Name in reports where the dtype is this one."""
        return kv_dtype if self.kv_policy == ALL else f"{kv_dtype} {self.kv_policy}"


FULL = CacheChoice("auto")


@dataclass(frozen=True)
class NeedleCell:
    """Lines repeated at the end of texts of `num_tokens` tokens, first seen at `depth` (0 the start, 1 the end).

    Attributes:
      num_lines: of the cell. num_correct: those that greedy decoding would copy, whole. gain: what the first occurrence
        adds to the log-probability of a token of the copy, in nats, on the mean. full_gain: with the full cache.
    """

    num_tokens: int
    depth: float
    num_lines: int
    num_correct: int
    gain: float
    full_gain: float

    @property
    def share(self) -> float:
        """Share of correct copies."""
        return self.num_correct / self.num_lines

    @property
    def is_borne(self) -> bool:
        return self.gain >= BEARS * self.full_gain


@dataclass(frozen=True)
class CacheFigures:
    """Figures of one cache.

    Attributes:
      choice: what was asked for. kv_dtype: what the cache stored, where "auto" was asked for too.
      reason: why it was refused or failed; then nothing else is known.
      kl, max_kl: KL(full || this) of the next token's distribution over the texts in nats, its mean and the largest.
      perplexity: of the texts. top1_agreement: share of their tokens with the full cache's most probable one.
      num_equal, num_answers: greedy answers that are those of the full cache, token for token, and all.
      equal_tokens: mean share of an answer's tokens before the first that differs.
      token_bytes: of a stored token in all layers. sequence_bytes: of what stays of a text of the longest length.
      seconds_per_token: median over answers, one at a time, after the first token.
      needle: by length and depth; () where it was not measured.
    """

    choice: CacheChoice
    kv_dtype: str
    reason: str | None = None
    kl: float | None = None
    max_kl: float | None = None
    perplexity: float | None = None
    top1_agreement: float | None = None
    num_equal: int | None = None
    num_answers: int | None = None
    equal_tokens: float | None = None
    token_bytes: float | None = None
    sequence_bytes: int | None = None
    seconds_per_token: float | None = None
    needle: tuple[NeedleCell, ...] = field(default=())

    @property
    def name(self) -> str:
        return self.choice.named(self.kv_dtype)

    @property
    def needed(self) -> list[NeedleCell]:
        """The lengths and depths at which the line helps the full cache."""
        return [cell for cell in self.needle if cell.full_gain >= LEAST_GAIN]

    @property
    def bears_needle(self) -> bool | None:
        """True if the line helps wherever it helps the full cache; None where that is unknown or nowhere."""
        return all(cell.is_borne for cell in self.needed) if self.needed else None

    def to_dict(self) -> dict[str, Any]:
        values = {name: value for name, value in asdict(self).items() if name not in ("choice", "needle")}
        needle = [asdict(cell) | {"share": cell.share} for cell in self.needle]
        return {"kv_policy": self.choice.kv_policy, **values, "bears_needle": self.bears_needle, "needle": needle}


def read_policies(text: str) -> list[str]:
    """Policies separated by commas, "all" among them. Raises ValueError for names that are no policy, and for none."""
    names = [name.strip() for name in text.split(",") if name.strip()]
    policies = [ALL if name == ALL else str(parse_policy(name)) for name in names]
    if not policies:
        raise ValueError(f"{text!r} names no policy: give some, such as sinks(4)+window(256) or snapkv(256), or all")
    return list(dict.fromkeys(policies))


def default_policies(num_tokens: int) -> list[str]:
    """Everything, and windows of half and a quarter of a text's tokens."""
    windows = dict.fromkeys(max(num_tokens // part, 1) for part in (2, 4))
    return [ALL, *(str(SinksWindow(DEFAULT_SINKS, window)) for window in windows)]


def choices(kv_dtypes: Sequence[str], policies: Sequence[str], computed: str) -> list[CacheChoice]:
    """The full cache, and each combination once; `computed` is the kv_dtype for which "auto" stands."""
    names = list(dict.fromkeys("auto" if name == computed else name for name in kv_dtypes))
    return list(dict.fromkeys([FULL, *(CacheChoice(name, policy) for name in names for policy in policies)]))


def table(rows: Sequence[CacheFigures]) -> list[list[str]]:
    """A row of cells for each cache that was measured, under TITLES."""
    return [_cells(row) for row in rows if row.reason is None]


def _cells(row: CacheFigures) -> list[str]:
    return [
        row.kv_dtype,
        row.choice.kv_policy,
        _shown(row.kl, "{:.2e}") if row.kl else "0",
        _shown(row.perplexity, "{:.4g}"),
        _shown(row.top1_agreement, "{:.2%}"),
        "" if row.num_equal is None else f"{row.num_equal} of {row.num_answers}",
        _shown(row.token_bytes, "{:,.0f}"),
        "" if row.sequence_bytes is None else f"{row.sequence_bytes / 2**10:,.0f}",
        "" if row.seconds_per_token is None else f"{1e3 * row.seconds_per_token:.3g}",
    ]


def _shown(value: float | None, form: str) -> str:
    return "" if value is None else form.format(value)


def refusals(rows: Sequence[CacheFigures]) -> list[str]:
    """A line for each cache that was refused."""
    return [f"{row.name}: {row.reason}" for row in rows if row.reason is not None]


def needle_table(rows: Sequence[CacheFigures]) -> tuple[list[str], list[list[str]]]:
    """Titles and cells of the needle task by length and depth; ([], []) where it was not measured."""
    measured = [row for row in rows if row.needle]
    if not measured:
        return [], []
    titles = [f"{cell.num_tokens:,} at {cell.depth:.0%}" for cell in measured[0].needle]
    cells = [
        [
            row.kv_dtype,
            row.choice.kv_policy,
            *(f"{cell.share:.0%} {cell.gain:+.2f}" for cell in row.needle),
            f"{sum(cell.is_borne for cell in row.needed)} of {len(row.needed)}",
        ]
        for row in measured
    ]
    return ["kv_dtype", "kv_policy", *titles, "borne"], cells


def needle_lines(rows: Sequence[CacheFigures]) -> list[str]:
    """Which caches copy what the full one copies."""
    full = next((row for row in rows if row.choice.is_full and row.needle), None)
    if full is None:
        return []
    num_correct, num_lines = sum(cell.num_correct for cell in full.needle), sum(cell.num_lines for cell in full.needle)
    first = f"The full cache copies {num_correct} of {num_lines} lines"
    if not full.needed:
        return [f"{first}, and the line helps nowhere: the model does not bear the task, with any cache."]
    where = f"helps at {len(full.needed)} of {len(full.needle)} places"
    lines = [f"{first}; the line {where}. A cache bears the task if it keeps {BEARS:.0%} of this help at each of them."]
    others = [row for row in rows if row.needle and not row.choice.is_full]
    for what, is_wanted in (("Bear it", True), ("Do not bear it", False)):
        if names := [row.name for row in others if row.bears_needle is is_wanted]:
            lines.append(f"{what}: {', '.join(names)}.")
    return lines
