"""Faults in streams that another server continues."""

from tests.faults.fault import Fault

RELAY = "tests/fleet/front/test_relay.py::"
BEGUN = "tests/server/test_begun_answers.py::"

FAULTS = (
    Fault(
        "front/the-end-is-told-twice",
        "jaxinfer/fleet/front/sent.py",
        'self._rest = self._held = b""\n        self.error',
        'self._rest = b""\n        self.error',
        (RELAY + "test_another_replica_goes_on_after_the_last_whole_event[dies before the end]",),
        "a client counts the usage of an answer twice, where a server dies just before the end",
    ),
    Fault(
        "front/tokens-of-events-that-were-cut",
        "jaxinfer/fleet/front/sent.py",
        'array("i"))[:count]',
        'array("i"))',
        (RELAY + "test_another_replica_goes_on_after_the_last_whole_event[dies within an event]",),
        "tokens whose event never arrived are left out of the answer",
    ),
    Fault(
        "front/requests-that-kill-go-round",
        "jaxinfer/fleet/front/relay.py",
        "if self._num_deaths >= _MOST_DEATHS:",
        "if self._num_deaths > 9 * _MOST_DEATHS:",
        (RELAY + "test_a_request_that_ends_two_replicas_is_not_tried_again",),
        "one request that makes a server die takes all servers down",
    ),
    Fault(
        "front/long-streams-are-given-up",
        "jaxinfer/fleet/front/relay.py",
        "                    self._num_deaths = 0\n",
        "                    pass\n",
        (RELAY + "test_a_stream_may_lose_several_replicas_if_it_gets_on",),
        "a long stream ends with an error at the second server that dies, whatever it died of",
    ),
    Fault(
        "front/another-seed-after-the-headers",
        "jaxinfer/fleet/front/relay.py",
        "(_with_seed(self._body, self._seed),)",
        "(self._body,)",
        (RELAY + "test_before_the_first_event_the_request_is_sent_again",),
        "the answer is of another seed than the one in its headers",
    ),
    Fault(
        "front/servers-that-go-end-their-streams",
        "jaxinfer/fleet/front/relay.py",
        "return _UNAVAILABLE in event",
        "return False",
        (RELAY + "test_another_replica_goes_on_after_the_last_whole_event[drains]",),
        "the streams of a server that is shut down end with an error",
    ),
    Fault(
        "front/servers-of-different-answers",
        "jaxinfer/fleet/front/replicas.py",
        "replica.fingerprint != used[0].fingerprint",
        "False",
        (RELAY + "test_replicas_of_other_answers_get_no_requests",),
        "a stream is begun by one model and cannot be continued by another",
    ),
    Fault(
        "front/clients-hand-over-tokens",
        "jaxinfer/fleet/front/app.py",
        "if any(name == SENT_TOKENS.encode() for name, _ in headers):",
        "if False:",
        (RELAY + "test_what_the_front_does_not_pass_on",),
        "clients give the tokens with which the model's answer begins",
    ),
    Fault(
        "front/anybody-hands-over-tokens",
        "jaxinfer/server/http.py",
        "if not service.options.accept_sent_tokens:",
        "if False:",
        (BEGUN + "test_tokens_that_no_answer_begins_with_are_refused",),
        "clients of a server without a front give the tokens with which the model's answer begins",
    ),
    Fault(
        "front/tokens-that-the-id-does-not-count",
        "jaxinfer/server/resume.py",
        "if counts != given:",
        "if False:",
        (BEGUN + "test_tokens_that_no_answer_begins_with_are_refused",),
        "events are left out, or come twice, where tokens and text do not belong together",
    ),
    Fault(
        "front/tokens-are-made-again",
        "jaxinfer/engine/client.py",
        "answer.tokens += begun.token_ids",
        "answer.tokens += begun.token_ids[:0]",
        (BEGUN + "test_a_stream_goes_on_after_the_tokens_that_were_sent[two answers]",),
        "all tokens that were sent are made again, one at a time",
    ),
)
