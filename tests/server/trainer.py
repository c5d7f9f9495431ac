"""A trainer in a process of its own that replaces the weights of a server, and dies at a point that is given.

Arguments: port, key, folder, step, where. It kills itself at that step: "half" of the request is sent, it is "sent" and
the answer is not read, or the answer "came".
"""

import http.client
import json
import os
import signal
import socket
import sys

STEPS = [
    ("/pause?mode=keep", {}),
    ("/init_weight_transfer_engine", {"init_info": {"backend": "path"}}),
    ("/start_weight_update", {"is_checkpoint_format": True}),
    ("/update_weights", {}),
    ("/update_weights", {}),
    ("/finish_weight_update", {"weight_version": "of the trainer that dies"}),
    ("/resume", {}),
]
PLACES = ("half", "sent", "came")


def request(path: str, body: dict, key: str) -> bytes:
    data = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nhost: 127.0.0.1\r\nauthorization: Bearer {key}\r\ncontent-type: application/json"
    return f"{head}\r\ncontent-length: {len(data)}\r\n\r\n".encode() + data


def main(port: str, key: str, folder: str, last: str, where: str) -> None:
    for step, (path, body) in enumerate(STEPS):
        if path == "/update_weights":
            body = {"update_info": {"backend": "path", "path": folder}}
        data = request(path, body, key)
        is_last = step == int(last)
        with socket.create_connection(("127.0.0.1", int(port))) as connection:
            connection.sendall(data[: len(data) - 1 if body else 20] if is_last and where == "half" else data)
            if not is_last or where == "came":
                response = http.client.HTTPResponse(connection)
                response.begin()
                if response.status != 200:
                    sys.exit(f"{path}: {response.status} {response.read().decode()}")
                response.read()
            if is_last:
                os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    main(*sys.argv[1:])
