"""The server's small engine, for tests that ask through every door."""

from tests.server.conftest import engine, make_service

__all__ = ["engine", "make_service"]
