"""Faults in the events of cached blocks that routers index."""

from tests.faults.fault import Fault

BLOCKS, EVENTS = "tests/engine/test_prefix_blocks.py::", "tests/server/test_kv_events.py::"
LOST = EVENTS + "test_messages_that_are_lost_are_had_again[maps]"
TREE, PUBLISHER = "jaxinfer/engine/prefix_blocks.py", "jaxinfer/server/kv_events.py"

FAULTS = (
    Fault(
        "kv_events/messages-have-one-number",
        PUBLISHER,
        "self._num_sent, self._num_sent + 1",
        "self._num_sent, self._num_sent",
        (LOST,),
        "a router does not see that it missed a message, and routes by blocks that are gone",
    ),
    Fault(
        "kv_events/a-replay-begins-after-what-is-missing",
        PUBLISHER,
        'if number >= int.from_bytes(start, "big"):',
        'if number > int.from_bytes(start, "big"):',
        (LOST,),
        "the first of the messages that were lost stays lost",
    ),
    Fault(
        "kv_events/a-replay-ends-after-a-thousand-messages",
        PUBLISHER,
        "self._replay.setsockopt(zmq.SNDHWM, options.kv_events_buffer + 2)",
        "self._replay.setsockopt(zmq.SNDHWM, 1000)",
        (EVENTS + "test_a_replay_has_what_is_kept_and_takes_no_nonsense",),
        "a router that begins late waits for the end of a replay, which never comes",
    ),
    Fault(
        "kv_events/host-memory-is-the-device",
        PUBLISHER,
        'MEDIA = {False: "GPU", True: "CPU"}',
        'MEDIA = {False: "GPU", True: "GPU"}',
        (LOST,),
        "a block that leaves host memory is taken for one that leaves the device",
    ),
    Fault(
        "kv_events/salts-are-not-told",
        PUBLISHER,
        "if first.parent is None and name.extra_keys:",
        "if False:",
        (EVENTS + "test_what_separates_requests_is_in_their_events",),
        "a router that reads extra keys sends a tenant's prompt where only another tenant's is cached",
    ),
    Fault(
        "kv_events/tenants-have-the-same-blocks",
        TREE,
        "_hash(node.key, xxhash.xxh3_64_intdigest(before.salt.encode()))",
        "_hash(node.key, 0)",
        (BLOCKS + "test_blocks_of_two_salts_are_two_chains",),
        "when one tenant's block goes, a router forgets another's",
    ),
    Fault(
        "kv_events/the-parent-is-one-too-early",
        TREE,
        "_Block(_hash(node.key, parent.hash), parent.hash, parent.salt)",
        "_Block(_hash(node.key, parent.hash), parent.parent, parent.salt)",
        (BLOCKS + "test_an_index_that_hears_events_has_what_the_tree_has",),
        "a router takes blocks for those of other texts",
    ),
    Fault(
        "kv_events/blocks-outlive-their-weights",
        "jaxinfer/engine/prefix.py",
        "            self.observer.cleared()\n",
        "            pass\n",
        (BLOCKS + "test_pages_that_a_running_sequence_keeps_are_told_of_no_more",),
        "after an update of the weights a router goes on sending requests to blocks that nothing finds",
    ),
    Fault(
        "kv_events/anybody-may-listen",
        "jaxinfer/server/options.py",
        "if host not in LOOPBACK and not self.kv_events_any_address:",
        "if False:",
        (EVENTS + "test_options_that_contradict_each_other",),
        "everybody in the network reads all prompts",
    ),
)
