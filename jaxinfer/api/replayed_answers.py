"""The methods of `LLM` that tell what an answer follows from, and make it again."""

import contextlib
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from jaxinfer.api.arguments import takes_other_names
from jaxinfer.api.coordinate import Coordinate, Fingerprints, WeightsOrigin, own_params
from jaxinfer.api.replay import AnswerCheck, Claim, ReplayModel, check_claims, end_of, program_of
from jaxinfer.engine.request import Request, RequestOutput, WeightsSpan
from jaxinfer.engine.weights import WeightsError
from jaxinfer.request_arrays import to_plain


class ReplayedAnswers(ReplayModel if TYPE_CHECKING else object):
    """The part of `LLM` for coordinates of answers."""

    name: str
    _fingerprints: Fingerprints
    _options_of_tokens: Any

    def fingerprint_of(self, version: str) -> str | None:
        """`fingerprint` of the model with the weights of that version, computed once for each of them. None for weights
        that are not there, if it was not computed before, and for several of one name."""
        if version == self.weights_version and self.engine.weights.is_whole:
            with contextlib.suppress(WeightsError):  # an update has begun meanwhile
                self._fingerprints.keep(version)
        return self._fingerprints.of(version)

    def coordinate(self, answers: RequestOutput | Request, index: int = 0) -> Coordinate:
        """Everything that the tokens of answer `index` of a request follow from, and the tokens (docs/replay.md); of a
        `Request` without tokens, as it would be answered now.

        The fingerprint of the weights is computed once for each version of them, the first time in some tenths of a
        second. That of weights which were replaced before any coordinate was made is not known. Raises ValueError for
        a request without such an answer, and for a vector or a score.
        """
        if isinstance(answers, Request):
            origin, prompt, output = answers.origin, answers.token_ids, None
            if answers.pooling is not None or not 0 <= index < answers.params.n:
                raise ValueError(f"index={index}: the request has no such answer, of n={answers.params.n}")
            seed = answers.row(index).seed
        else:
            origin, prompt = answers.origin, answers.prompt_token_ids
            output = next((output for output in answers.outputs if output.index == index), None)
            if output is None or answers.pooled is not None:
                raise ValueError(f"index={index}: the request has no such answer, only {len(answers.outputs)}")
            seed = output.seed
        if origin is None:
            raise ValueError("the output does not say what it follows from: only those of an LLM do")
        spans = (WeightsSpan(self.weights_version),) if output is None else output.weights
        return Coordinate(
            model=self.name,
            prompt_token_ids=tuple(prompt),
            params=own_params(origin, seed or 0),
            weights=tuple(
                WeightsOrigin(span.version, self.fingerprint_of(span.version), span.start, span.is_retained)
                for span in spans
            ),
            index=index,
            adapter=origin.adapter,
            options=self._options_of_tokens,
            program=program_of(self),
            arrays=to_plain(origin.arrays),
            steering=to_plain(origin.steering),
            **({} if output is None else end_of(output)),
        )

    @takes_other_names
    def replay(
        self, coordinates: Sequence[Coordinate], *, force: bool = False, use_tqdm: bool | None = None
    ) -> list[AnswerCheck]:
        """Generates answers again, all in one batch, each up to its first token that differs.

        Args:
          coordinates: of the answers. force: whether they are made again with other weights, or another adapter of the
            same name, than theirs; what these made is not checked otherwise, and the result says so.
          use_tqdm: as of `generate`.
        """
        claims = [Claim(coordinate) for coordinate in coordinates]
        return check_claims(self, claims, force=force, use_tqdm=use_tqdm)

    @takes_other_names
    def verify_answer(
        self, coordinate: Coordinate, start: int = 0, end: int | None = None, *, force: bool = False
    ) -> AnswerCheck:
        """Checks that each token of an answer from `start` up to `end` is the one that the sampler chooses there, after
        the prompt and the answer's tokens before it, under all of its parameters.

        The tokens before `start` are taken as they are. With `draft="claimed"` up to 31 tokens are checked in a pass
        over the model, otherwise one. Raises ValueError for no such range.
        """
        claim = Claim(coordinate, start, end, drafts=True)
        return check_claims(self, [claim], force=force, use_tqdm=False)[0]
