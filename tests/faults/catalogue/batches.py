"""Faults in batches: files of requests in, files of answers out."""

from tests.faults.fault import Fault

_TABLE = "tests/batch/test_table.py"

FAULTS = (
    Fault(
        "batch/another-template-continues-the-job",
        "jaxinfer/batch/job.py",
        "table=self.scan.table",
        "table=None",
        (f"{_TABLE}::test_a_job_goes_on_and_its_rows_keep_their_columns",),
        "half of the answers are to other prompts than the rest",
    ),
    Fault(
        "batch/short-rows-shift-cells",
        "jaxinfer/batch/table.py",
        "if len(cells) != len(names):",
        "if len(cells) < len(columns):",
        (f"{_TABLE}::test_bad_rows_say_why",),
        "a row with a cell too many or too few is answered as if it were whole",
    ),
    Fault(
        "batch/blank-rows-are-not-counted",
        "jaxinfer/batch/table.py",
        "enumerate(records, 1)",
        "enumerate((one for one in records if any(one[1])), 1)",
        (f"{_TABLE}::test_blank_rows_are_left_out_and_counted",),
        "row-7 is not the seventh row of the table",
    ),
    Fault(
        "batch/sorting-loses-the-lock",
        "jaxinfer/batch/results.py",
        "                    _lock(fd, self.path)\n",
        "",
        ("tests/batch/test_job.py::test_a_sorted_file_stays_locked_and_can_be_continued",),
        "two processes write one file of answers",
    ),
)
