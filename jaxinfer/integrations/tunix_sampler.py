"""`JaxinferSampler`: the asynchronous sampler of Tunix's next release (`tunix/experimental/rollout/sampler.py`, not in
0.1.7).

Its interface is a Protocol that still changes, and has been compared with its text alone: requests and answers are
taken and given by the names of their fields.
"""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from jaxinfer.api.async_engine import AsyncEngine
from jaxinfer.engine.scheduler import QueueFullError
from jaxinfer.sampling import SamplingParams

_UNSUPPORTED = ("return_logits", "return_routed_experts", "beam_size")


@dataclass(frozen=True)
class SampledAnswer:
    """Tunix's `SamplingResponse`: the answer to one request, or `error` with its kind and message."""

    request_id: str = ""
    text: str = ""
    prompt_token_ids: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int32))
    token_ids: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int32))
    logprobs: np.ndarray | None = None
    finish_reason: str = "stop"
    routed_experts: None = None
    error: "SamplingFailure | None" = None
    metadata: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class SamplingFailure:
    """Tunix's `ErrorInfo`."""

    error_type: str
    message: str
    retryable: bool = False
    traceback: str = ""


@dataclass(frozen=True)
class SamplerLoad:
    """Tunix's `LoadInfo`; the usage is the share of the fullest pool, 0 to 1."""

    num_requests_waiting: int
    num_requests_running: int
    kv_cache_usage_perc: float
    request_id: str = ""
    error: None = None
    metadata: dict[str, Any] = field(default_factory=dict)


class JaxinferSampler:
    """Answers many requests at once, with weights that are replaced between its steps.

    Weights come in the request (`WeightSyncRequest.weights`): `pre_weight_sync` sets what runs aside, `weight_sync`
    writes a tree as of `LLM.update_params`, `post_weight_sync` goes on with all of them, under `policy_version`. Raiden
    and LoRA are not supported.

    Args:
      model: `(config, params)` as of `LLM`, both of Tunix or ours.
      tokenizer: with `encode`, `decode`, `bos_id()` and `eos_id()`.
      **options: of `LLM`.
    """

    def __init__(self, model: tuple[Any, Any], tokenizer: Any, **options: Any):
        self._model, self._tokenizer, self._options = model, tokenizer, options
        self._engine: AsyncEngine | None = None

    @property
    def engine(self) -> AsyncEngine:
        """The engine. Raises RuntimeError before `initialize` and after `stop`."""
        if self._engine is None:
            raise RuntimeError("the sampler is not initialized, or was stopped")
        return self._engine

    def initialize(self) -> None:
        """Places the weights and makes the engine. Twice is harmless."""
        if self._engine is None:
            self._engine = AsyncEngine(self._model, **self._options)

    async def start(self, **kwargs: Any) -> None:
        """As `initialize`, in a thread."""
        await asyncio.to_thread(self.initialize)

    async def stop(self, **kwargs: Any) -> None:
        """Aborts what runs and frees the memory. Twice is harmless."""
        engine, self._engine = self._engine, None
        if engine is not None:
            await engine.close()

    async def pause(self, **kwargs: Any) -> None:
        """Computes nothing until `resume`; requests wait."""
        await self.engine.pause()

    async def resume(self, **kwargs: Any) -> None:
        """Goes on."""
        self.engine.resume()

    async def get_mesh(self, **kwargs: Any) -> Any:
        """The mesh; None for one device."""
        return self.engine.llm.mesh

    async def sample(self, sampling_requests: Any, **kwargs: Any) -> Any:
        """An answer for each request, in a list for a list. One that cannot be served has its `error`.

        A prompt is a text or token ids. Log-probabilities are the model's own. The answer has the token that ended it.
        """
        if not isinstance(sampling_requests, (list, tuple)):
            return await self._answer(sampling_requests)
        return list(await asyncio.gather(*map(self._answer, sampling_requests)))

    async def _answer(self, request: Any) -> SampledAnswer:
        name = getattr(request, "request_id", "")
        try:
            prompt, params = self._encode(request.prompt), self._params(request.sampling_params)
            output = None
            async for delta in self.engine.generate(prompt, params):
                output = delta.output or output
        except (ValueError, TypeError) as error:
            return SampledAnswer(name, finish_reason="error", error=SamplingFailure(type(error).__name__, str(error)))
        except QueueFullError as error:
            failure = SamplingFailure(type(error).__name__, str(error), retryable=True)
            return SampledAnswer(name, finish_reason="error", error=failure)
        if output is None:
            raise RuntimeError(f"request {name!r} ended without an answer: the sampler was stopped")
        (answer,) = output.outputs
        failure = None if answer.error is None else SamplingFailure("ComputationError", answer.error)
        logprobs = None
        if answer.logprobs is not None:
            each = zip(answer.token_ids, answer.logprobs, strict=True)
            logprobs = np.asarray([at[token].logprob for token, at in each], np.float32)
        return SampledAnswer(
            name,
            self._tokenizer.decode(list(answer.token_ids)),
            np.asarray(prompt, np.int32),
            np.asarray(answer.token_ids, np.int32),
            logprobs,
            answer.finish_reason or "error",
            error=failure,
            metadata={"policy_versions": [span.version for span in answer.weights]},
        )

    def _encode(self, prompt: Any) -> list[int]:
        if isinstance(prompt, str):
            first = [self._tokenizer.bos_id()] if self._tokenizer.bos_id() else []
            ids = list(self._tokenizer.encode(prompt))
            return ids if ids[: len(first)] == first else [*first, *ids]
        if isinstance(prompt, (Sequence, np.ndarray)) and not isinstance(prompt, (bytes, bytearray)):
            return [int(token) for token in np.asarray(prompt).reshape(-1)]
        raise TypeError(f"a prompt is a text or token ids, got {type(prompt).__name__}")

    def _params(self, given: Any) -> SamplingParams:
        if given is None:
            return SamplingParams(max_tokens=64, stop_token_ids=[self._tokenizer.eos_id()])
        if refused := [name for name in _UNSUPPORTED if getattr(given, name, None)]:
            raise ValueError(f"{', '.join(refused)} is not supported")
        return SamplingParams(
            max_tokens=given.max_tokens,
            temperature=given.temperature,
            top_p=1.0 if given.top_p is None else given.top_p,
            top_k=max(given.top_k or 0, 0),
            seed=given.seed,
            logprobs=0 if given.return_logprobs else None,
            stop_token_ids=[self._tokenizer.eos_id()],
        )

    async def get_weight_sync_metadata(self, **kwargs: Any) -> None:
        """None, for no transport: weights come in the requests."""

    async def bind_weight_sync(self, sync_request: Any = None, **kwargs: Any) -> None:
        """Nothing: weights come in the requests."""

    async def pre_weight_sync(self, sync_request: Any = None, **kwargs: Any) -> None:
        """Begins an update: nothing is computed until it ends."""
        await self.engine.begin_update()

    async def weight_sync(self, sync_request: Any = None, **kwargs: Any) -> None:
        """Writes the request's weights, all or some. Raises ValueError, with names, for what is not the model's;
        nothing is written then."""
        if getattr(sync_request, "weights", None) is None:
            raise ValueError("weight_sync needs the weights in the request: transports of Tunix are not supported")
        await self.engine.write_update(sync_request.weights)

    async def post_weight_sync(self, sync_request: Any = None, **kwargs: Any) -> str:
        """Ends the update; returns the version, the request's `policy_version`."""
        version = getattr(sync_request, "policy_version", None)
        return await self.engine.finish_update(None if version is None else str(version))

    async def get_transfer_status(self, req_id: Any, **kwargs: Any) -> str:
        """ "SUCCESS" where the weights are whole, else "PENDING"."""
        return "SUCCESS" if self.engine.llm.engine.weights.is_whole else "PENDING"

    async def migrate_kv_cache(
        self, source_server_id: str, target_server_id: str, token_ids: Sequence[int], **kwargs: Any
    ) -> bool:
        """False: no keys are moved."""
        return False

    async def get_load_info(self, **kwargs: Any) -> SamplerLoad:
        """Requests that wait and run, and how full the cache is."""
        schedulers = [engine.scheduler for engine in self.engine.llm.engine.engines]
        shares = [1 - pool.num_available / (pool.num_pages - 1) for each in schedulers for pool in each.pools.all]
        waiting = sum(len(scheduler.waiting) for scheduler in schedulers)
        return SamplerLoad(waiting, sum(len(scheduler.running) for scheduler in schedulers), max(shares))
