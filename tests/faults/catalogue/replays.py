"""Faults in the coordinates of answers, and in how they are made again and checked."""

from tests.faults.fault import Fault

FAULTS = (
    Fault(
        "replays/the-coordinate-has-the-seed-of-the-request",
        "jaxinfer/api/replayed_answers.py",
        "            seed = output.seed\n",
        "            seed = origin.params.seed\n",
        ("tests/api/test_replay.py::test_answers_are_made_again_by_another_engine",),
        "the second of n answers, and answers without a seed of their own, are not those that are made again",
    ),
    Fault(
        "replays/a-range-begins-with-the-prompt-alone",
        "jaxinfer/api/replay.py",
        "begun = part.claim.coordinate.token_ids[: part.start]",
        "begun = part.claim.coordinate.token_ids[: part.start and 1]",
        ("tests/api/test_replay.py::test_tokens_before_a_range_are_taken_as_they_are",),
        "true answers are said to be wrong, or a wrong token is missed, since a range is compared with other tokens",
    ),
    Fault(
        "replays/the-last-token-is-not-compared",
        "jaxinfer/api/replay.py",
        "while self.compared < min(len(output), self.end):",
        "while self.compared < min(len(output), self.end) - 1:",
        ("tests/api/test_replay.py::test_spans_of_several_weights",),
        "an answer whose last token was changed passes",
    ),
    Fault(
        "replays/a-grammar-begins-anew-in-the-middle",
        "jaxinfer/engine/grammars.py",
        "for position, token in enumerate(sequence.output):",
        "for position, token in enumerate(sequence.output[:0]):",
        ("tests/api/test_replay.py::test_tokens_before_a_range_are_taken_as_they_are",),
        "ranges of structured answers are checked under the masks of other places",
    ),
    Fault(
        "replays/weights-are-known-by-their-name",
        "jaxinfer/api/replay.py",
        "if force or (span.fingerprint is not None and span.fingerprint == loaded.fingerprint):",
        "if force or span.version == loaded.version:",
        ("tests/api/test_replay.py::test_what_cannot_be_made_again_is_refused_by_name",),
        "answers of one model are compared with those of another, and differ without a reason",
    ),
    Fault(
        "cache/a-page-that-left-the-tree-is-taken-for-a-root",
        "jaxinfer/engine/prefix.py",
        "if node.salt is not None and self._roots.get(node.salt) is node:",
        "if self._roots.get(node.key.decode()) is node:",
        ("tests/engine/test_prefix.py::test_keys_and_salts_may_be_any",),
        "an engine stops with an error when it gives pages away whose token ids are no UTF-8",
    ),
)
