"""Work that ends when its client leaves."""

import asyncio
from collections.abc import Awaitable
from typing import TypeVar

from starlette.types import Receive

Result = TypeVar("Result")


class ClientLeftError(Exception):
    """The client closed its connection: no answer can be sent."""


async def while_connected(receive: Receive, work: Awaitable[Result]) -> Result:
    """Awaits the work; cancels it, and raises ClientLeftError, when the client closes its connection. The body must
    have been read."""
    task = asyncio.ensure_future(work)
    watcher = asyncio.ensure_future(until_left(receive))
    try:
        await asyncio.wait((task, watcher), return_when=asyncio.FIRST_COMPLETED)
        if watcher.done():
            raise ClientLeftError
        return task.result()
    finally:
        for future in (task, watcher):
            if not future.done():
                future.cancel()
        await asyncio.gather(task, watcher, return_exceptions=True)


async def until_left(receive: Receive) -> None:
    """Returns when the client has closed its connection. The body must have been read."""
    while (await receive())["type"] != "http.disconnect":
        pass
