"""`JaxinferRollout`: a rollout engine for Tunix's reinforcement learning (`tunix.rl.rollout.base_rollout`, google-tunix
0.1.7)."""

import threading
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from jaxinfer.api.llm import LLM
from jaxinfer.loading import other_tree, own_config
from jaxinfer.sampling import SamplingParams
from jaxinfer.sampling.params import MAX_N

_MISSING: ImportError | None = None
_interface: Any = None
try:
    from tunix.rl.rollout import base_rollout as _interface  # pyright: ignore[reportMissingImports]
except ImportError as error:
    _MISSING = error
_Base: Any = object if _interface is None else _interface.BaseRollout

# The name of the adapter that LoRA's pairs are served as.
_ADAPTER = "tunix-lora"


class JaxinferRollout(_Base):
    """Answers and log-probabilities for `RLCluster`, with weights that follow its trainer.

    Give it to the cluster as `ClusterConfig(rollout_engine=functools.partial(JaxinferRollout, ...))`, which passes the
    first four arguments. The actor's parameters are copied. Where it has LoRA, the base stays as it is and the pairs
    are an adapter, as in the trainer: nothing is merged, and an update moves the pairs alone.

    Args:
      rollout_actor: the model of Tunix, Llama 3, Qwen 2 or 3 or Gemma 3.
      tokenizer: as Tunix takes it.
      mesh: its devices, over which the model is sharded along "model"; None for the default device. The option `mesh`
        says it in another way.
      rollout_config: Tunix's `RolloutConfig`. `data_type` is the dtype; `kv_cache_size`, or the longest prompt and
        answer if that is more, is `max_model_len`.
      config: a ModelConfig of jaxinfer, in place of what the actor's own says.
      lora_scale: alpha / rank of LoRA, which the parameters do not say.
      keep_eos: whether answers have the token that ended them, as with Tunix's vLLM; its vanilla rollout leaves it out.
      **options: of `LLM`, as `max_seqs` or `quantize`.

    Attributes:
      llm: what answers. num_updates: how often the trainer's parameters were taken.

    Raises ImportError without google-tunix, ValueError as `LLM`, and for LoRA without its scale.
    """

    def __init__(
        self,
        rollout_actor: Any,
        tokenizer: Any,
        mesh: Mesh | None,
        rollout_config: Any,
        *,
        config: Any = None,
        lora_scale: float | None = None,
        keep_eos: bool = False,
        **options: Any,
    ):
        if _MISSING is not None:
            raise ImportError(
                f"JaxinferRollout needs google-tunix: pip install google-tunix ({_MISSING})", name="tunix"
            ) from _MISSING
        if options.get("processors"):
            raise ValueError("processors change what is sampled, and not the log-probabilities that Tunix asks for")
        self._config = own_config(rollout_actor.config if config is None else config)
        self._tokenizer, self._lora_scale, self._keeps_eos = _adapted(tokenizer), lora_scale, keep_eos
        tree = self._read(rollout_actor)
        tree.check(has_pairs=True)
        self._has_adapter = bool(tree.pairs)
        longest = rollout_config.max_prompt_length + rollout_config.max_tokens_to_generate
        defaults: dict[str, Any] = {"max_model_len": max(rollout_config.kv_cache_size, longest)}
        if rollout_config.data_type is not None:
            defaults["dtype"] = jnp.dtype(rollout_config.data_type).name
        if mesh is not None and mesh.size and list(mesh.devices.flat) != jax.devices()[:1]:
            defaults["mesh"] = Mesh(mesh.devices.reshape(-1), ("model",))
        if self._has_adapter:
            defaults["adapters"] = {_ADAPTER: self._adapter(tree)}
        self.llm = LLM((self._config, tree.params(copies=True)), **{**defaults, **options})
        self._lock = threading.Lock()  # a cluster whose trainer has other devices generates in a thread
        self.num_updates = 0

    def _read(self, tree: Any) -> Any:
        if (other := other_tree(tree, self._config)) is None:
            raise ValueError(f"{type(tree).__name__}: none of its parameters has a name of Tunix's models")
        return other

    def _adapter(self, tree: Any) -> Any:
        if self._lora_scale is None:
            raise ValueError(
                f"the model has LoRA pairs of {len(tree.pairs)} weights: lora_scale=alpha / rank is needed"
            )
        return tree.adapter(self._lora_scale)

    def generate(self, prompts: Sequence[str], rollout_config: Any, **kwargs: Any) -> Any:
        """A `RolloutOutput` of one answer for each prompt; equal prompts are computed once, and sampled apart.

        A temperature of 0 is greedy. `seed`, an integer or a key, gives the same answers to the same prompts; without
        one each call gives others. Log-probabilities, if wanted, are of the logits divided by the temperature, before
        `top_p` and `top_k`, as the trainer's.

        Raises TypeError for further keywords, ValueError for a prompt that is too long, with its number.
        """
        if kwargs:
            raise TypeError(f"generate got unexpected keywords {', '.join(sorted(kwargs))}")
        given = rollout_config
        ids = [self._encode(prompt) for prompt in prompts]
        numbers: dict[tuple[int, ...], list[int]] = {}  # of equal prompts
        for number, prompt in enumerate(ids):
            numbers.setdefault(prompt, []).append(number)
        groups = [
            (prompt, equal[start : start + MAX_N])
            for prompt, equal in numbers.items()
            for start in range(0, len(equal), MAX_N)
        ]
        temperature = float(given.temperature)
        params = SamplingParams(
            temperature=temperature,
            top_p=1.0 if given.top_p is None else given.top_p,
            top_k=max(given.top_k or 0, 0),
            max_tokens=given.max_tokens_to_generate,
            stop_token_ids=given.eos_tokens or [self.eos_id()],
            logprobs=0 if given.return_logprobs else None,
        )
        each = [
            replace(params, n=1 if params.is_greedy else len(equal), seed=_seed_of(given.seed, number))
            for number, (_, equal) in enumerate(groups)
        ]
        with self._lock:
            outputs = self.llm.generate(
                [list(prompt) for prompt, _ in groups], each, adapter=self._name, use_tqdm=False
            )
        answers: list[Any] = [None] * len(ids)
        for (_, equal), output in zip(groups, outputs, strict=True):
            for place, number in enumerate(equal):
                answers[number] = output.outputs[0 if params.is_greedy else place]
        ends = frozenset(() if self._keeps_eos else params.stop_token_ids)
        tokens = [[*answer.token_ids[:-1], *(t for t in answer.token_ids[-1:] if t not in ends)] for answer in answers]
        logprobs = None
        if given.return_logprobs:
            logprobs = [
                np.asarray([at[token].logprob for at, token in zip(answer.logprobs, own, strict=False)], np.float32)
                for answer, own in zip(answers, tokens, strict=True)
            ]
            if temperature not in (0.0, 1.0):
                logprobs = self._scores(ids, tokens, SamplingParams(temperature=temperature))
        return _interface.RolloutOutput(
            text=[self._tokenizer.decode(own) for own in tokens],
            logits=None,
            tokens=[np.asarray(own, np.int32) for own in tokens],
            left_padded_prompt_tokens=_left_padded(ids, given.max_prompt_length, self.pad_id()),
            logprobs=logprobs,
        )

    def get_per_token_logps(self, prompt_tokens: Any, completion_tokens: Any) -> jax.Array:
        """Log-probabilities, float32 [B, C], of completions int32 [B, C], padded at their ends, after prompts int32
        [B, P], padded at their beginnings. After the first padding token of a row they are 0."""
        prompts, completions = np.asarray(prompt_tokens), np.asarray(completion_tokens)
        pad, width = self.pad_id(), completions.shape[1]
        ids = [tuple(row[_first(row != pad) :].tolist()) for row in prompts]
        lengths = [width - _first(row[::-1] != pad) for row in completions]
        # One token more, since padding may be a token that ends answers.
        rows = [row[: min(length + 1, width)].tolist() for row, length in zip(completions, lengths, strict=True)]
        scores = np.zeros(completions.shape, np.float32)
        for row, own in zip(scores, self._scores(ids, rows, SamplingParams()), strict=True):
            row[: len(own)] = own
        return jnp.asarray(scores)

    def _scores(self, prompts: Sequence[Sequence[int]], rows: Sequence[Sequence[int]], params: Any) -> list[np.ndarray]:
        """Log-probabilities of rows of tokens after their prompts; none of an empty row."""
        full = [number for number, row in enumerate(rows) if row]
        scores = [np.zeros(0, np.float32)] * len(rows)
        if full:
            pairs = [list(prompts[number]) for number in full], [list(rows[number]) for number in full]
            with self._lock:
                of_rows = self.llm.score(*pairs, params, adapter=self._name, use_tqdm=False)
            for number, score in zip(full, of_rows, strict=True):
                scores[number] = np.asarray(score.processed, np.float32)
        return scores

    def update_params(self, params: Any, filter_types: Any = None) -> None:
        """Takes the trainer's parameters, or those of `filter_types`, an `nnx.State`; LoRA's pairs become the adapter.
        Nothing is compiled. The weights' version is the number of the update, unless it was of the pairs alone.

        Raises ValueError, with names and counts, for parameters that are not the model's; nothing has changed then.
        Weights are taken before pairs.
        """
        tree = self._read(params)
        tree.check(is_partial=filter_types is not None or not tree.weights, has_pairs=True)
        if tree.pairs and not self._has_adapter:
            raise ValueError(
                f"the parameters have LoRA pairs of {len(tree.pairs)} weights, the model had none at first"
            )
        # Tunix forbids transfers on a CPU meanwhile, which is where packed weights are made.
        with self._lock, jax.transfer_guard("allow"):
            adapter = self._adapter(tree) if tree.pairs else None
            if tree.weights:
                version, weights = str(self.num_updates + 1), replace(tree, pairs={})
                self.llm.update_params(weights, version=version, partial=filter_types is not None)
            if adapter is not None:
                self.llm.load_adapter(_ADAPTER, adapter, replace=True)
        self.num_updates += 1

    def pad_id(self) -> int:
        """The padding token's id."""
        return self._tokenizer.pad_id()

    def eos_id(self) -> int:
        """The id of the token that ends answers."""
        return self._tokenizer.eos_id()

    def model(self) -> None:
        """None: the weights here are no module of Tunix's and none of the trainer's, so that it sends its own."""
        return None

    def close(self) -> None:
        """Frees the memory of weights and cache. Closing twice is harmless."""
        self.llm.close()

    @property
    def _name(self) -> str | None:
        return _ADAPTER if self._has_adapter else None

    def _encode(self, prompt: str) -> tuple[int, ...]:
        """Token ids as Tunix's samplers make them."""
        first = [self._tokenizer.bos_id()] if self._tokenizer.bos_id() else []
        return tuple(int(token) for token in self._tokenizer.dedup_bos_ids([*first, *self._tokenizer.encode(prompt)]))


def _adapted(tokenizer: Any) -> Any:
    """The tokenizer with the methods of Tunix's adapter of all kinds."""
    from tunix.generate.tokenizer_adapter import TokenizerAdapter  # pyright: ignore[reportMissingImports]

    return tokenizer if isinstance(tokenizer, TokenizerAdapter) else TokenizerAdapter(tokenizer)


def _seed_of(seed: Any, number: int) -> int | None:
    """A seed for prompt `number` from that of a call: an integer, or a key of JAX."""
    if seed is None:
        return None
    if hasattr(seed, "dtype") and jnp.issubdtype(seed.dtype, jax.dtypes.prng_key):
        seed = jax.random.key_data(seed)
    words = [int(word) for word in np.asarray(seed).astype(np.uint64).ravel()]
    return int(np.random.SeedSequence([*words, number]).generate_state(1)[0])


def _left_padded(ids: Sequence[Sequence[int]], width: int, pad: int) -> np.ndarray:
    """Prompts int32 [B, P], of that width, or else the next power of two that the longest one fits in."""
    longest = max(map(len, ids), default=0)
    if longest > width:
        width = 1 << (longest - 1).bit_length()
    return np.asarray([[pad] * (width - len(row)) + list(row) for row in ids], np.int32).reshape(len(ids), width)


def _first(mask: np.ndarray) -> int:
    """The place of the first True, or the length."""
    return int(np.argmax(mask)) if mask.any() else len(mask)
