"""Faults in models by name: what is pulled, listed, removed, and what an alias adds."""

from tests.faults.fault import Fault

FAULTS = (
    Fault(
        "store/an-unknown-tag-is-the-default-one",
        "jaxinfer/store/library.py",
        "repository = tags.get(tag.lower())",
        "repository = tags.get(tag.lower(), next(iter(tags.values())))",
        ("tests/store/test_library.py::test_a_tag_that_is_not_there_lists_those_that_are",),
        "qwen3:7b downloads and runs another model than the one that was named",
    ),
    Fault(
        "store/what-was-received-is-not-compared",
        "jaxinfer/store",
        "            is_sound = _matches(partial, digest)\n            if was_resumed",
        "            is_sound = True\n            if was_resumed",
        ("tests/store/test_pull.py::test_wrong_bytes_are_never_listed_nor_kept",),
        "a model with damaged weights is listed and used",
    ),
    Fault(
        "store/a-cut-download-begins-again",
        "jaxinfer/store",
        'partial.open("ab") as target',
        'partial.open("wb") as target',
        ("tests/store/test_pull.py::test_a_download_can_be_stopped_and_goes_on",),
        "an interrupted download of 50 GB begins at zero",
    ),
    Fault(
        "store/incomplete-models-are-listed",
        "jaxinfer/store",
        "if not (is_complete and model.missing())",
        "if True",
        ("tests/store/test_pull.py::test_files_are_shared_with_the_hubs_own_client",),
        "a model whose files another tool removed is still listed",
    ),
    Fault(
        "store/removal-takes-the-files-of-others",
        "jaxinfer/store",
        "if blob.name not in _linked(folder):",
        "if True:",
        ("tests/store/test_remove.py::test_variants_of_a_repository_go_one_by_one",),
        "removing one quantization of a repository breaks the others",
    ),
    Fault(
        "store/an-alias-wins-over-what-is-given",
        "jaxinfer/api/arguments.py",
        "if name not in given and",
        "if True and",
        ("tests/store/test_names.py::test_what_is_given_wins_over_an_alias",),
        "--draft is ignored where an alias has one",
    ),
)
