"""The cache policies by their spelling, such as "sinks(4)+window(1024)", "snapkv(1024)" or "quest(1024)"."""

import re
from collections.abc import Callable
from functools import partial

from jaxinfer.cache.policy.contract import CachePolicy
from jaxinfer.cache.policy.h2o import H2O
from jaxinfer.cache.policy.prompt_budget import PROMPT_METHODS, PromptBudget
from jaxinfer.cache.policy.quest import Quest
from jaxinfer.cache.policy.sinks_window import SinksWindow

KEEPS_ALL = CachePolicy()
_CALL = re.compile(r"([a-z_0-9]+)\(([0-9]+)\)")

# By the names of its parts, what makes a policy of their numbers, in this order.
_KINDS: dict[tuple[str, ...], Callable[..., CachePolicy]] = {
    ("sinks", "window"): SinksWindow,
    ("h2o",): H2O,
    **{(method,): partial(PromptBudget, method) for method in PROMPT_METHODS},
    ("quest",): Quest,
}


def register(names: tuple[str, ...], make: Callable[..., CachePolicy]) -> None:
    """Adds a kind of policy: `kv_policy="a(1)+b(2)"` is `make(1, 2)` for the names ("a", "b"). Raises ValueError for
    names that a kind has."""
    if taken := [name for name in names if any(name in known for known in _KINDS)]:
        raise ValueError(f"{taken[0]!r} is a part of a kv_policy already")
    _KINDS[names] = make


def parse_policy(text: str) -> CachePolicy:
    """The policy of a text. Raises ValueError for any that none is spelled as."""
    kinds = ", ".join("+".join(f"{name}(N)" for name in names) for names in _KINDS)
    counts: dict[str, int] = {}
    for part in text.replace(" ", "").split("+"):
        call = _CALL.fullmatch(part)
        if call is None or call[1] in counts or not any(call[1] in names for names in _KINDS):
            raise ValueError(f"kv_policy={text!r}: {part!r} is not understood; give one of {kinds}, in tokens")
        counts[call[1]] = int(call[2])
    for names, make in _KINDS.items():
        if set(counts) == set(names):
            return make(*(counts[name] for name in names))
    for names in _KINDS:
        if set(counts) < set(names):
            missing = next(name for name in names if name not in counts)
            raise ValueError(f"kv_policy={text!r} lacks {missing}(N): give one of {kinds}, in tokens")
    raise ValueError(f"kv_policy={text!r} combines {' and '.join(counts)}: give one of {kinds}, in tokens")


def extends_length(text: str | None) -> bool:
    """Tells whether a `kv_policy` lets sequences be longer than what the model was trained for."""
    return text is not None and parse_policy(text).extends_length
