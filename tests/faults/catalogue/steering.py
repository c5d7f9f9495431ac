"""Faults in vectors that requests add to hidden states, and in hidden states that they ask for."""

from tests.faults.fault import Fault

STEERED = "tests/engine/test_steering.py::"
TAPPED = "tests/engine/test_tapped_layers.py::"
SERVED = "tests/server/test_hidden_states.py::"

FAULTS = (
    Fault(
        "engine/steering-has-no-salt",
        "jaxinfer/engine/request.py",
        "(steering := self.steering) is not None",
        "(steering := self.steering) is not None and False",
        (STEERED + "test_pages_are_of_equal_vectors",),
        "a request reads keys and values that were made with the vectors of another one",
    ),
    Fault(
        "engine/steering-is-of-prompts-alone",
        "jaxinfer/engine/programs/paged.py",
        "decoder.for_rows(slots.adapters).steered(slots.steering)",
        "decoder.for_rows(slots.adapters)",
        (STEERED + "test_every_pass[plain]",),
        "an answer follows the model without the vectors, after a prompt with them",
    ),
    Fault(
        "engine/steering-is-left-out-of-checks-of-drafts",
        "jaxinfer/engine/programs/speculative.py",
        "for_rows(rows.adapters, slot).steered(rows.steering, slot)",
        "for_rows(rows.adapters, slot)",
        (STEERED + "test_every_pass[layers]",),
        "with a draft, answers are those of the model without the vectors",
    ),
    Fault(
        "engine/steering-is-of-the-first-slot",
        "jaxinfer/engine/programs/paged.py",
        "steered(slots.steering, slot)",
        "steered(slots.steering, 0 * slot)",
        (STEERED + "test_every_pass[plain]",),
        "prompts have the vectors of another request",
    ),
    Fault(
        "engine/steering-stays-in-its-slot",
        "jaxinfer/engine/model_runner.py",
        "if self.spec.steered_layers:\n            self._write_steering(",
        "if self.spec.steered_layers and sequence.request.steering is not None:\n            self._write_steering(",
        (STEERED + "test_pages_are_of_equal_vectors",),
        "a request without steering has the vectors of the one before it",
    ),
    Fault(
        "engine/steering-of-all-requests-is-replaced",
        "jaxinfer/engine/client.py",
        "return own + self._steering",
        "return own",
        (STEERED + "test_vectors_of_all_requests",),
        "a request with vectors of its own escapes those of the LLM",
    ),
    Fault(
        "engine/taps-are-a-token-late",
        "jaxinfer/engine/engine.py",
        "take_states(sequence, len(sequence.tokens) - 1,",
        "take_states(sequence, len(sequence.tokens),",
        (TAPPED + "test_every_pass[plain]",),
        "hidden states are said to be of the tokens after them",
    ),
    Fault(
        "engine/taps-of-later-rounds-overwrite-earlier-ones",
        "jaxinfer/engine/programs/speculative.py",
        "num_before[:, None] + steps, outputs.tokens.shape[0]",
        "steps, outputs.tokens.shape[0]",
        (TAPPED + "test_every_pass[trees of layers]",),
        "with a draft, hidden states of one dispatch are those of its last round",
    ),
    Fault(
        "engine/taps-lack-cached-tokens",
        "jaxinfer/engine/request.py",
        "or bool(self.options.tapped_layers)",
        "or False",
        (TAPPED + "test_cached_prompts_are_computed_again",),
        "hidden states of cached tokens are whatever was in memory",
    ),
    Fault(
        "server/hidden-states-are-unbounded",
        "jaxinfer/server/hidden_states.py",
        "> most_bytes",
        "> 2**60",
        (SERVED + "test_more_bytes_than_may_be",),
        "one request fills the server's memory",
    ),
    Fault(
        "server/hidden-states-need-no-flag",
        "jaxinfer/server/app.py",
        "HIDDEN_STATES_ROUTES if options.hidden_states else ()",
        "HIDDEN_STATES_ROUTES",
        (SERVED + "test_it_is_off_by_default_and_behind_the_keys",),
        "a server offers a route that nobody turned on",
    ),
)
