"""Processes from which commands are forked: one for `jaxinfer convert`, which starts quickly, and one for all."""

from collections.abc import Iterator

import pytest

from tests.crash.server import Server


@pytest.fixture(scope="package")
def converting() -> Iterator[Server]:
    with Server(has_all=False) as server:
        yield server


@pytest.fixture(scope="package")
def server() -> Iterator[Server]:
    with Server() as server:
        yield server
