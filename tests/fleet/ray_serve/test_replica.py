"""The door of a replica: it knows fronts by their key, and closes without leaving a request inside."""

import asyncio

from jaxinfer.fleet.ray_serve.replica import FRONT_KEY, FrontDoor


def test_a_closed_door_waits_for_those_inside_and_holds_the_others():
    async def everything():
        inside, may_end, seen = asyncio.Event(), asyncio.Event(), []

        async def app(scope, receive, send):
            seen.append(scope["headers"])
            inside.set()
            await may_end.wait()

        async def ask(key):
            sent = []

            async def send(message):
                sent.append(message)

            await door({"headers": [(b"a", b"b"), (FRONT_KEY, key)], "path": "/", "type": "http"}, None, send)
            return sent

        door, is_closed = FrontDoor(app, b"key"), asyncio.Event()

        async def close():
            async with door.closed():
                is_closed.set()
                await asyncio.sleep(0.05)
                assert len(seen) == 1

        assert (await ask(b"another"))[0]["status"] == 403
        first = asyncio.create_task(ask(b"key"))
        await inside.wait()
        closing = asyncio.create_task(close())
        await asyncio.sleep(0.03)
        assert not is_closed.is_set()
        second = asyncio.create_task(ask(b"key"))
        may_end.set()
        await asyncio.gather(first, second, closing)
        assert is_closed.is_set()
        assert seen == [[(b"a", b"b")]] * 2
        assert door.num_inside == 0

    asyncio.run(everything())
