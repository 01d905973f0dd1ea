"""A receiver of job events over HTTP, as a farm's own one might be: it keeps what it got, refuses, or hangs."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


class EventReceiver:
    """``got`` is what was posted, in order. ``answer`` says the status for an event; None hangs until the receiver
    goes. ``headers`` are those of the last request, ``extra`` are sent with every answer, followed by ``body``."""

    def __init__(self) -> None:
        self.got: list[dict[str, Any]] = []
        self.headers: dict[str, str] = {}
        self.paths: list[str] = []
        self.answer: Callable[[dict[str, Any]], int | None] = lambda _event: 200
        self.extra: dict[str, str] = {}
        self.body = b""
        self.ending = threading.Event()
        self.port = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}/farm/secret-path?key=secret-key"

    @property
    def ids(self) -> list[str]:
        return [event["id"] for event in self.got]

    def kinds(self) -> list[str]:
        return [event["event"] for event in self.got]


@contextmanager
def event_receiver() -> Iterator[EventReceiver]:
    receiver = EventReceiver()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            event = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            receiver.headers = dict(self.headers)
            receiver.paths.append(self.path)
            receiver.got.append(event)
            status = receiver.answer(event)
            if status is None:
                receiver.ending.wait()
                return
            self.send_response(status)
            for name, value in receiver.extra.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(receiver.body)

        def log_message(self, *_: object) -> None:
            pass

    class Server(ThreadingHTTPServer):
        daemon_threads = True

        def handle_error(self, *_: object) -> None:
            """A sender that hangs up is no error here."""

    with Server(("127.0.0.1", 0), Handler) as server:
        receiver.port = server.server_address[1]
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        try:
            yield receiver
        finally:
            receiver.ending.set()
            server.shutdown()
            thread.join()
