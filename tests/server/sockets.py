"""A server in a thread, and raw bytes over sockets to it."""

import asyncio
import contextlib
import re
import socket
import threading

from jaxinfer.server.run import make_uvicorn


@contextlib.contextmanager
def served(service, keys=None, admin_keys=None):
    """Listens as `jaxinfer serve` does, and gives the port."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        server = make_uvicorn(service, keys, admin_keys)
        thread = threading.Thread(target=lambda: asyncio.run(server.serve([listener])), daemon=True)
        thread.start()
        try:
            yield listener.getsockname()[1]
        finally:
            server.should_exit = True
            thread.join(30)
            assert not thread.is_alive()


def connect(port, seconds=20.0, **options):
    return socket.create_connection(("127.0.0.1", port), timeout=seconds)


def send(connection, data):
    """Sends as much as the server takes; whether that was all."""
    try:
        connection.sendall(data)
    except OSError:
        return False
    return True


def received(connection, seconds):
    """What comes until the connection is closed or nothing has come for that time, and whether it was closed."""
    connection.settimeout(seconds)
    found = b""
    try:
        while part := connection.recv(1 << 16):
            found += part
    except TimeoutError:
        return found, False
    except OSError:
        pass
    return found, True


def exchange(port, data):
    """The statuses of all answers to raw bytes, what came, and whether the connection was closed. Reads the first
    answer, and what comes after it if the server says that it closes the connection."""
    with connect(port) as connection:
        send(connection, data)
        found, is_closed = b"", False
        while not is_closed and not _is_whole(found):
            try:
                part = connection.recv(1 << 16)
            except ConnectionError:
                part = b""
            found, is_closed = found + part, not part
    return [int(status) for status in re.findall(rb"HTTP/1\.1 (\d+)", found)], found, is_closed


def _is_whole(found):
    head, end, body = found.partition(b"\r\n\r\n")
    length = re.search(rb"content-length: (\d+)", head)
    return bool(end) and b"connection: close" not in head and length is not None and len(body) >= int(length[1])
