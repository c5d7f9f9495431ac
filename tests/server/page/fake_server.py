"""An OpenAI-compatible server without a model: what the last message says chooses how it answers."""

import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from jaxinfer.server.page import chat_page

MODELS = ("demo", "demo-large")
KEY = "sk-test"
# Questions whose answers can be continued after a lost connection; `resume` loses its first one.
RESUMABLE = ("slow", "resume")
# Events are cut here, in the middle of lines and of UTF-8 sequences.
CUTS = (1, 2, 3, 5, 7, 11, 64)
MARKDOWN = """## Paged attention in three steps

A **page** holds keys and values of a few tokens; a *page table* says where each sequence's pages are. \
See [the paper](https://arxiv.org/abs/2309.06180).

1. Look up the pages of the sequence in `page_table`.
2. Gather keys and values:
   - in blocks that fit into VMEM,
   - skipping pages past the length.
3. Combine partial softmax sums.

```python
def gather(pages, page_table, lengths):
    # "T Hkv K": tokens, heads, width
    for slot, length in enumerate(lengths):
        yield pages[page_table[slot, : -(-length // 16)]]
```

| Chip | Pages of 16 tokens | Bandwidth |
| :--- | ---: | ---: |
| TPU v5e | 12,288 | 819 GB/s |
| H100 | 61,440 | 3.35 TB/s |

> Page 0 is never given to a sequence: empty places of a table point to it.
"""


def chunk(delta: dict, finish: str | None = None, **more: Any) -> bytes:
    body = {"id": "chatcmpl-1", "object": "chat.completion.chunk", "created": 1, "model": "demo", **more}
    body.setdefault("choices", [{"index": 0, "delta": delta, "finish_reason": finish}])
    return f"data: {json.dumps(body, ensure_ascii=False)}\n\n".encode()


def pieces(text: str, size: int = 7) -> list[str]:
    return [text[at : at + size] for at in range(0, len(text), size)]


@dataclass
class FakeServer:
    """What the handler needs and records. `answers` are texts by question that replace the usual one; `delay` is the
    time in seconds before each piece, `load_seconds` that before an answer begins. While it `is_down`, streams break
    and requests are refused; while it `is_loading`, it says so. `statuses` are more fields of models in their list, by
    their names."""

    url: str = ""
    needs_key: bool = False
    is_down: bool = False
    is_loading: bool = False
    statuses: dict[str, dict] = field(default_factory=dict)
    answers: dict[str, str] = field(default_factory=dict)
    requests: list[dict] = field(default_factory=list)
    positions: list[str | None] = field(default_factory=list)
    paths: list[str] = field(default_factory=list)
    delay: float = 0.0
    load_seconds: float = 0.0
    num_disconnects: int = 0

    def events(self, question: str, position: str | None) -> Iterator[bytes]:
        """Events of an answer, all or those after the event with the id `position`. A `slow` one takes 15 seconds."""
        yield b": a comment that keeps the connection\n\n"
        yield chunk({"role": "assistant", "content": ""})
        if question.startswith("think"):
            for piece in pieces("First the question is read, then each step is weighed.\nThen the answer follows."):
                time.sleep(0.02)
                yield chunk({"reasoning_content": piece})
        text = self.answers.get(question) or f"Answer {len(self.requests)} to “{question}”. ✓"
        if question.startswith("markdown"):
            text = MARKDOWN
        parts = [f"word{number} " for number in range(300)] if question.startswith("slow") else pieces(text)
        done = int(position.removeprefix("p-")) if position else 0
        for number, part in enumerate(parts[done:], start=done):
            time.sleep(0.05 if question.startswith("slow") else self.delay)
            if number == 2 and question.startswith("broken"):
                yield f"data: {json.dumps({'error': {'message': 'the engine stopped', 'code': 500}})}\n\n".encode()
                return
            if number == 2 and (question.startswith("lost") or (question.startswith("resume") and not position)):
                return
            event = chunk({"content": part}).replace(b"\n", b"\r\n" if number % 2 else b"\n")
            yield b"id: p-%d\n%b" % (number + 1, event)
        yield chunk({}, "length" if question.startswith("long") else "stop")
        usage = {"prompt_tokens": 12, "completion_tokens": len(parts), "prompt_tokens_details": {"cached_tokens": 4}}
        yield chunk({}, choices=[], usage=usage)
        yield b"data: [DONE]\n\n"


def handler_of(fake: FakeServer) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, format: str, *args: Any) -> None:
            pass

        def answer(self, status: int, body: bytes, headers: dict[str, str] | None = None) -> None:
            self.send_response(status)
            for name, value in {"Content-Type": "application/json", **(headers or {})}.items():
                self.send_header(name, value)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def is_refused(self) -> bool:
            if fake.is_down:
                self.close_connection = True
                return True
            if fake.is_loading:
                self.answer(503, b'{"error": {"message": "the model is being loaded"}}', {"Retry-After": "5"})
                return True
            if fake.needs_key and self.headers["Authorization"] != f"Bearer {KEY}":
                self.answer(401, b'{"error": {"message": "a key is needed", "code": 401}}')
                return True
            return False

        def do_GET(self) -> None:
            fake.paths.append(self.path)
            if self.path == "/":
                page = chat_page()
                self.answer(200, page.content, page.headers)
            elif self.path == "/ready":
                if not self.is_refused():
                    self.answer(200, b'{"status": "ready"}')
            elif self.path == "/v1/models" and (fake.is_loading or not self.is_refused()):
                data = [{"id": name, "object": "model", **fake.statuses.get(name, {})} for name in MODELS]
                self.answer(200, json.dumps({"data": data}).encode())
            elif self.path != "/v1/models":
                self.answer(404, b"<html>a proxy's page</html>")

        def do_POST(self) -> None:
            fake.paths.append(self.path)
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            if self.is_refused():
                return
            fake.requests.append(body)
            time.sleep(fake.load_seconds)
            question = body["messages"][-1]["content"]
            fake.positions.append(self.headers["Last-Event-ID"])
            if question.startswith("busy"):
                self.answer(429, b'{"error": {"message": "the queue is full"}}', {"Retry-After": "3"})
            elif question.startswith("refused"):
                error = {"message": "top_k=5 is not supported", "param": "top_k", "code": 400}
                self.answer(400, json.dumps({"error": error}).encode())
            elif question.startswith("too large"):
                error = {"message": "demo needs 20 GiB, and the budget is 10 GiB", "code": "model_not_loaded"}
                self.answer(503, json.dumps({"error": error}).encode(), {"Retry-After": "10"})
            else:
                self.stream(question)

        def stream(self, question: str) -> None:
            self.send_response(200)
            self.send_header("Content-Type", "text/event-stream")
            self.send_header("Transfer-Encoding", "chunked")
            self.send_header("x-jaxinfer-seed", "18446744073709551615")
            self.send_header("x-jaxinfer-resumable", "yes" if question.startswith(RESUMABLE) else "no")
            self.end_headers()
            try:
                event = b""
                for number, event in enumerate(fake.events(question, self.headers["Last-Event-ID"])):
                    size = CUTS[number % len(CUTS)]
                    if fake.is_down:
                        break
                    for at in range(0, len(event), max(size, len(event) // 4)):
                        part = event[at : at + max(size, len(event) // 4)]
                        self.wfile.write(b"%x\r\n%s\r\n" % (len(part), part))
                if event.endswith(b"[DONE]\n\n"):
                    self.wfile.write(b"0\r\n\r\n")
                else:
                    time.sleep(0.3)  # a browser drops what it has not yet read when a connection breaks
                    self.close_connection = True
            except OSError:
                fake.num_disconnects += 1
                self.close_connection = True

    return Handler


@contextmanager
def running() -> Iterator[FakeServer]:
    """A server on a free port of this machine, while the context is open."""
    fake = FakeServer()
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler_of(fake))
    server.daemon_threads = True
    server.block_on_close = False
    fake.url = f"http://127.0.0.1:{server.server_port}/"
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield fake
    finally:
        server.shutdown()
        server.server_close()


if __name__ == "__main__":
    with running() as fake_server:
        print(f"{fake_server.url}: say markdown, think, slow, resume, busy, refused, too large, broken or lost.")
        threading.Event().wait()
