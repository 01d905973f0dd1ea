"""A server that refuses every connection as PostgreSQL does, in the encoding of its choice."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from pydantic import SecretStr

from opencue_sched.settings import Settings

_ASKS_FOR_TLS = b"\x04\xd2\x16\x2f"


@contextmanager
def refusing_postgres(settings: Settings, message: bytes, *, state: bytes = b"57P03") -> Iterator[Settings]:
    """These settings, with the address of such a server."""

    def serve() -> None:
        while True:
            try:
                client, _ = listener.accept()
            except OSError:
                return
            # Whoever gave up waiting has closed its side.
            with client, suppress(OSError):
                if client.recv(8192)[4:8] == _ASKS_FOR_TLS:
                    client.sendall(b"N")
                    client.recv(8192)
                fields = b"SFATAL\0VFATAL\0C" + state + b"\0M" + message + b"\0\0"
                client.sendall(b"E" + (len(fields) + 4).to_bytes(4, "big") + fields)

    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=serve)
        thread.start()
        try:
            address = SecretStr(f"postgresql://nobody:any@127.0.0.1:{listener.getsockname()[1]}/none")
            yield settings.model_copy(update={"database_url": address})
        finally:
            listener.shutdown(socket.SHUT_RDWR)
            thread.join()
