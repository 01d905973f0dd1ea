"""A server that answers as a Redis of another version."""

from __future__ import annotations

import socketserver
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import redis


class _Connection(socketserver.StreamRequestHandler):
    """Says its version when it is asked for INFO, and OK to all else."""

    server: _Server

    def handle(self) -> None:
        while header := self.rfile.readline():
            words = [self.rfile.read(int(self.rfile.readline()[1:]) + 2)[:-2] for _ in range(int(header[1:]))]
            info = b"redis_version:%s\r\n" % self.server.version.encode()
            self.wfile.write(b"$%d\r\n%s\r\n" % (len(info), info) if words[0] == b"INFO" else b"+OK\r\n")


class _Server(socketserver.ThreadingTCPServer):
    daemon_threads = True
    version = ""


@contextmanager
def old_redis(version: str) -> Iterator[redis.Redis]:
    """A client of such a server."""
    with _Server(("127.0.0.1", 0), _Connection) as server:
        server.version = version
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            with redis.Redis(port=server.server_address[1], decode_responses=True, protocol=2) as client:
                yield client
        finally:
            server.shutdown()
            thread.join()
