"""Faults in the command for a machine with a chip, where an hour is lent once."""

from tests.faults.fault import Fault

FOLDER, TESTS = "benchmarks/on_chip/", "tests/benchmarks/test_on_chip.py::"

FAULTS = (
    Fault(
        "on_chip/worker-goes-on-in-a-poisoned-process",
        FOLDER + "worker.py",
        "not is_usable or piece.environment",
        "piece.environment",
        (TESTS + "test_a_process_is_left_after_an_exception_and_its_rows_are_kept",),
        "after one CUDA error every later piece fails in no time",
    ),
    Fault(
        "on_chip/errors-that-a-piece-caught-are-not-seen",
        FOLDER + "worker.py",
        "            free()\n",
        "",
        (TESTS + "test_a_device_that_no_longer_answers_fails_the_piece_that_caught_its_error",),
        "a peer that poisons the context is left out with a note, and all pieces after it fail",
    ),
    Fault(
        "on_chip/rows-of-a-piece-that-was-cut-off-are-dropped",
        FOLDER + "results.py",
        '"rows": self.found}',
        '"rows": self.found if status == DONE else []}',
        (TESTS + "test_rows_of_a_piece_that_was_cut_off_are_kept_and_printed",),
        "what a piece has measured before its time was over is lost",
    ),
    Fault(
        "on_chip/a-piece-that-was-cut-off-is-not-repeated",
        FOLDER + "results.py",
        'self.pieces[name]["status"] != CUT_OFF',
        "True",
        (TESTS + "test_rows_of_a_piece_that_was_cut_off_are_kept_and_printed",),
        "an interrupted run never has all results",
    ),
    Fault(
        "on_chip/tolerance-is-absolute",
        FOLDER + "parity.py",
        " / np.linalg.norm(expected, axis=1)",
        "",
        (TESTS + "test_errors_are_relative_to_each_row",),
        "where outputs are small a decode blind to its newest key passes",
    ),
    Fault(
        "on_chip/tolerance-lets-a-blind-decode-pass",
        FOLDER + "parity.py",
        "MAX_ERROR = 1e-2",
        "MAX_ERROR = 1e-1",
        (TESTS + "test_a_decode_blind_to_its_newest_key_is_refused_at_1000_keys",),
        "a kernel that drops a key of a thousand counts as right",
    ),
    Fault(
        "on_chip/cards-share-their-results",
        FOLDER + "results.py",
        "card = f\"{machine['device']} x",
        'card = f"x',
        (TESTS + "test_another_card_and_other_versions_add_to_the_file",),
        "what an H100 has measured is not measured on an H200",
    ),
    Fault(
        "on_chip/variables-of-a-piece-do-not-reach-its-process",
        FOLDER + "supervisor.py",
        'environment.get("XLA_FLAGS"))',
        "None)",
        (TESTS + "test_a_piece_that_aborts_is_recorded_the_others_run_and_the_last_is_cut_off",),
        "the step as one graph is measured without it",
    ),
    Fault(
        "on_chip/a-hung-piece-takes-the-whole-run",
        FOLDER + "supervisor.py",
        " or (card is not None and time.time() - card.begun > card.limit)",
        "",
        (TESTS + "test_a_piece_beyond_its_limit_has_hung",),
        "a deadlock costs the rest of the call",
    ),
    Fault(
        "on_chip/gaps-are-counted-from-the-last-kernel-begun",
        FOLDER + "steps.py",
        "max(end, run.end)",
        "run.end",
        (TESTS + "test_the_table_of_kernels",),
        "kernels side by side show gaps that are none",
    ),
)
