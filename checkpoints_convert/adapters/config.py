"""`adapter_config.json` of PEFT's LoRA (0.21): typed reading, and refusal by name of what is not applied."""

import math
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from checkpoints_convert.adapters.patterns import Matches, NameSet, end_of_name, is_plain, whole_name
from checkpoints_convert.errors import CheckpointError
from checkpoints_convert.files import read_json

MAX_CONFIG_BYTES = 10_000_000
"""With the names of 100,000 experts, each of 100 characters."""
MAX_RANK = 8192
"""Ranks above it are refused: they would be larger than the weights that they change."""
MAX_PATTERNS = 10_000
MAX_AUTOMATA = 32
"""Patterns that are no plain names: each may take up to a second to compile."""

# What changes answers and is not applied, with what it means.
_REFUSED = {
    "use_bdlora": "block-diagonal pairs",
    "use_qalora": "pairs on pooled inputs",
    "kasa_config": "a diagonal between A and B, on a base without its small singular values",
    "velora_config": "compressed activations",
    "monteclora_config": "pairs that are drawn anew at each step",
    "arrow_config": "routing between adapters",
    "layer_replication": "a base with repeated layers",
    "ensure_weight_tying": "pairs that embedding and head share",
    "megatron_config": "layers of Megatron",
}
# What only training reads.
_OF_TRAINING = frozenset((
    *("auto_mapping", "corda_config", "eva_config", "inference_mode", "init_lora_weights", "loftq_config"),
    *("lora_dropout", "lora_ga_config", "megatron_core", "peft_version", "qalora_group_size", "revision"),
    *("runtime_config", "task_type"),
))  # fmt: skip
# Ways to begin that leave the base's weights as they are; the others change them, so that an adapter is right only on
# the base that they leave.
_INITIAL = ("gaussian", "eva", "orthogonal", "mica")
_APPLIED = frozenset((
    *("peft_type", "base_model_name_or_path", "r", "lora_alpha", "rank_pattern", "alpha_pattern", "use_rslora"),
    *("use_dora", "target_modules", "exclude_modules", "layers_to_transform", "layers_pattern", "target_parameters"),
    *("modules_to_save", "trainable_token_indices", "bias", "lora_bias", "fan_in_fan_out", "alora_invocation_tokens"),
))  # fmt: skip
_LAYER_NUMBER = re.compile(r".*?\.[^.]*\.(?P<number>\d+)\.")


@dataclass(frozen=True)
class AdapterConfig:
    """The fields of `adapter_config.json` that are applied.

    Attributes:
      rank, alpha: where no pattern says otherwise. ranks, alphas: patterns with their values, of which the first that
        matches counts.
      is_rank_stabilized: the scale is alpha / sqrt(r), not alpha / r.
      is_all_linear: all Linears but the head are targets.
      modules: names of targets. pattern: a test for their names instead; None without.
      excluded: a test for names that are no targets.
      layers: the layers of targets; empty for all. number_of: the layer's number in a name.
      parameters: targets that are parameters, such as all experts of a layer in one. saved: names of saved modules.
      token_indices: the trained tokens, by the module's name; "" for the embedding.
    """

    base_model: str | None
    rank: int
    alpha: float
    ranks: tuple[tuple[Matches, int], ...]
    alphas: tuple[tuple[Matches, float], ...]
    is_rank_stabilized: bool
    is_dora: bool
    is_all_linear: bool
    modules: NameSet
    pattern: Matches | None
    excluded: Matches
    layers: frozenset[int]
    number_of: Callable[[str], int | None]
    parameters: NameSet
    saved: frozenset[str]
    token_indices: Mapping[str, tuple[int, ...]]
    bias: str
    has_lora_bias: bool
    invocation_tokens: tuple[int, ...]

    def rank_and_scale(self, name: str) -> tuple[int, float]:
        """Rank, and the scale of the pair, of a target."""
        rank = next((value for matches, value in self.ranks if matches(name)), self.rank)
        alpha = next((value for matches, value in self.alphas if matches(name)), self.alpha)
        return rank, alpha / (math.sqrt(rank) if self.is_rank_stabilized else rank)

    def is_saved(self, name: str) -> bool:
        """True for a module that the adapter brings whole."""
        return any(name[start:] in self.saved for start in range(len(name)))

    def is_target(self, name: str, *, is_table: bool = False) -> bool:
        """True for a module that `target_modules` means, as PEFT's `check_target_module_exists`. `is_table`: it is the
        embedding or the head, which "all-linear" leaves out."""
        parts = name.split(".")
        runs = (".".join(parts[i:j]) for i in range(len(parts)) for j in range(i + 1, len(parts) + 1))
        if self.excluded(name) or any(run in self.saved for run in runs):
            return False
        if self.is_all_linear:
            return not is_table
        if self.pattern is not None:
            return self.pattern(name)
        target = self.modules.matching(name)
        is_in_layers = not self.layers or self.number_of(name) in self.layers
        return target == name or (target is not None and is_in_layers)

    def is_target_parameter(self, name: str) -> bool:
        """True for a parameter that `target_parameters` means."""
        return self.parameters.matching(name) is not None


def read_config(path: Path) -> AdapterConfig:
    """Reads `adapter_config.json`.

    Raises CheckpointError, which names every field that is not applied or has a value that cannot be.
    """
    data = read_json(path, unique_keys=True, max_bytes=MAX_CONFIG_BYTES)
    kind = data.get("peft_type")
    if kind != "LORA":
        raise CheckpointError(path, f"peft_type {kind!r} is not supported: only 'LORA' is")
    problems = list(_not_applied(data))
    if problems:
        raise CheckpointError(path, *problems)
    reader = _Reader(data, problems)
    config = reader.config()
    if problems:
        raise CheckpointError(path, *problems)
    return config


def _not_applied(data: Mapping[str, Any]) -> Iterable[str]:
    for name, value in data.items():
        if name in _APPLIED or name in _OF_TRAINING or value is None or value is False or value in ("", [], {}):
            continue
        meaning = f" ({_REFUSED[name]})" if name in _REFUSED else ", a field that is not known,"
        yield f"{name}{meaning} is not supported, and is {value!r}"
    initial = data.get("init_lora_weights")
    if not (initial is None or isinstance(initial, bool) or initial in _INITIAL):
        yield (
            f"init_lora_weights {initial!r} is not supported: the adapter is for a base whose weights that changed; "
            "PEFT's path_initial_model_for_weight_conversion saves it for the base as it was"
        )
    if data.get("use_dora") and data.get("alora_invocation_tokens"):
        yield "use_dora and alora_invocation_tokens are not supported together, as in PEFT"
    if data.get("use_dora") and data.get("lora_bias"):
        yield "use_dora and lora_bias are not supported together, as in PEFT"


class _Reader:
    """Typed reading. What is wrong is appended to `problems`, and a valid value stands in its place."""

    def __init__(self, data: Mapping[str, Any], problems: list[str]):
        self.data, self.problems = data, problems
        self._num_patterns = self._num_automata = 0

    def config(self) -> AdapterConfig:
        target, excluded = self._targets("target_modules"), self._targets("exclude_modules")
        parameters = self._names("target_parameters")
        if target is None and not parameters:
            self._problem("target_modules", "is missing, and target_parameters too")
        is_all = isinstance(target, str) and target.lower() == "all-linear"
        layers = self._layers()
        self._flag("fan_in_fan_out")  # says how the base stores its weights, which the base's family says too
        if isinstance(target, str) and layers:
            self._problem("layers_to_transform", "cannot be used with a target_modules that is a string, as in PEFT")
        return AdapterConfig(
            base_model=self._text("base_model_name_or_path"),
            rank=self._rank("r", self.data.get("r", 8)),
            alpha=self._alpha("lora_alpha", self.data.get("lora_alpha", 8)),
            ranks=self._table("rank_pattern", self._rank),
            alphas=self._table("alpha_pattern", self._alpha),
            is_rank_stabilized=self._flag("use_rslora"),
            is_dora=self._flag("use_dora"),
            is_all_linear=is_all,
            modules=NameSet(frozenset(() if isinstance(target, str) else target or ())),
            pattern=self._pattern("target_modules", target) if isinstance(target, str) and not is_all else None,
            excluded=self._excluded(excluded),
            layers=layers,
            number_of=self._number_of(layers),
            parameters=NameSet(frozenset(parameters)),
            saved=frozenset(self._names("modules_to_save")),
            token_indices=self._token_indices(),
            bias=self._bias(),
            has_lora_bias=self._flag("lora_bias"),
            invocation_tokens=self._tokens("alora_invocation_tokens", self.data.get("alora_invocation_tokens")),
        )

    def _problem(self, name: str, text: str) -> None:
        self.problems.append(f"{name} {text}")

    def _text(self, name: str) -> str | None:
        value = self.data.get(name)
        if value is None or isinstance(value, str):
            return value or None
        self._problem(name, f"must be a string, got {value!r}")
        return None

    def _flag(self, name: str) -> bool:
        value = self.data.get(name)
        if value is not None and not isinstance(value, bool):
            self._problem(name, f"must be true or false, got {value!r}")
        return value is True

    def _rank(self, name: str, value: Any) -> int:
        if type(value) is int and 1 <= value <= MAX_RANK:
            return value
        self._problem(name, f"must be an integer from 1 to {MAX_RANK}, got {value!r}")
        return 1

    def _alpha(self, name: str, value: Any) -> float:
        if type(value) in (int, float) and abs(value) <= 1e15:  # a NaN is not
            return float(value)
        self._problem(name, f"must be a number of at most 1e15, got {value!r}")
        return 1.0

    def _names(self, name: str) -> tuple[str, ...]:
        value = self.data.get(name)
        if value is None:
            return ()
        if isinstance(value, list) and all(isinstance(part, str) and part for part in value):
            return tuple(value)
        self._problem(name, f"must be a list of names, got {value!r}")
        return ()

    def _targets(self, name: str) -> str | tuple[str, ...] | None:
        value = self.data.get(name)
        return value if value is None or (isinstance(value, str) and value) else self._names(name)

    def _pattern(self, name: str, pattern: str, make: Callable[[str], Matches] = whole_name) -> Matches:
        self._num_patterns += 1
        self._num_automata += not is_plain(pattern)
        for number, limit in ((self._num_patterns, MAX_PATTERNS), (self._num_automata, MAX_AUTOMATA)):
            if number > limit:
                if number == limit + 1:
                    kind = "patterns" if limit == MAX_PATTERNS else "patterns that are no plain names"
                    self._problem(name, f"is the field with {kind} beyond the {limit} that are allowed")
                return lambda text: False
        try:
            return make(pattern)
        except (ValueError, re.error, RecursionError) as error:
            self._problem(name, f"has the pattern {pattern[:200]!r}: {error}")
            return lambda text: False

    def _table(self, name: str, read: Callable[[str, Any], Any]) -> tuple[tuple[Matches, Any], ...]:
        value = self.data.get(name)
        if value is None:
            return ()
        if not isinstance(value, dict):
            self._problem(name, f"must map names to numbers, got {value!r}")
            return ()
        return tuple(
            (self._pattern(name, key, end_of_name), read(f"{name}[{key!r}]", number)) for key, number in value.items()
        )

    def _excluded(self, excluded: str | tuple[str, ...] | None) -> Matches:
        if isinstance(excluded, str):
            return self._pattern("exclude_modules", excluded)
        names = NameSet(frozenset(excluded or ()))
        return lambda name: names.matching(name) is not None

    def _layers(self) -> frozenset[int]:
        value = self.data.get("layers_to_transform")
        layers = value if isinstance(value, list) else [] if value is None else [value]
        if not all(type(layer) is int and layer >= 0 for layer in layers):
            self._problem("layers_to_transform", f"must be a layer or a list of them, got {value!r}")
            return frozenset()
        return frozenset(layers)

    def _number_of(self, layers: frozenset[int]) -> Callable[[str], int | None]:
        """A function from a module's name to its layer: the number after a name of `layers_pattern`, or the first."""
        value = self.data.get("layers_pattern")
        names = [value] if isinstance(value, str) and value else self._names("layers_pattern") if value else ()
        if names and not layers:
            self._problem("layers_pattern", "needs layers_to_transform, as in PEFT")
        if not names:
            return lambda name: int(match["number"]) if (match := _LAYER_NUMBER.match(name)) else None
        for name in names:
            if not is_plain(name):
                self._problem("layers_pattern", f"{name!r} is not supported: only plain names are")
                return lambda name: None
        patterns = [re.compile(rf"(?:^|.*?\.){name}\.(?P<number>\d+)\.") for name in names]

        def number_of(name: str) -> int | None:
            matches = (pattern.match(name) for pattern in patterns)
            return next((int(match["number"]) for match in matches if match), None)

        return number_of

    def _tokens(self, name: str, value: Any) -> tuple[int, ...]:
        if value is None:
            return ()
        if isinstance(value, list) and all(type(token) is int and 0 <= token < 2**31 for token in value):
            return tuple(value)
        self._problem(name, f"must be a list of token ids, got {value!r}")
        return ()

    def _token_indices(self) -> dict[str, tuple[int, ...]]:
        name, value = "trainable_token_indices", self.data.get("trainable_token_indices")
        by_module = value if isinstance(value, dict) else {"": value} if value else {}
        indices = {module: self._tokens(name, tokens) for module, tokens in by_module.items()}
        for tokens in indices.values():
            if len(set(tokens)) < len(tokens):
                self._problem(name, f"has the token {Counter(tokens).most_common(1)[0][0]} twice")
        return {module: tokens for module, tokens in indices.items() if tokens}

    def _bias(self) -> str:
        value = self.data.get("bias")
        if value not in (None, "none", "all", "lora_only"):
            self._problem("bias", f"must be 'none', 'all' or 'lora_only', got {value!r}")
        return value or "none"
