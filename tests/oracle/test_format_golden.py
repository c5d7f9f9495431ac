"""Quantized modules as other libraries wrote them: our weights are theirs, bit for bit. Needs none of the libraries."""

from pathlib import Path

import pytest

from tests.oracle.format_cases import FOLDER, assert_equal

FILES = sorted(FOLDER.glob("*.safetensors"))


def test_there_are_files_of_every_library():
    libraries = {"bitsandbytes", "compressed", "transformers", "autoawq", "modelopt"}
    assert {path.stem.split("-")[0] for path in FILES} == libraries
    assert len(FILES) == 35
    assert max(path.stat().st_size for path in FILES) < 100_000


@pytest.mark.matrix
@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_weights_are_the_librarys(path: Path):
    assert_equal(path)
