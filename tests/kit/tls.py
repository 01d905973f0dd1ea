"""TLS in front of an embedded Redis, which has none of its own."""

from __future__ import annotations

import contextlib
import select
import socket
import ssl
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

import pytest
import trustme

from opencue_sched.embedded.servers.services import EmbeddedRedis


@dataclass(frozen=True)
class TlsFront:
    """``url`` says nothing of the authority; ``trusting_url`` names ``authority``, the file with its certificate."""

    url: str
    authority: Path

    @property
    def trusting_url(self) -> str:
        return f"{self.url}?ssl_ca_certs={self.authority}"


@contextmanager
def tls_front(server: EmbeddedRedis, directory: Path) -> Iterator[TlsFront]:
    """Take TLS connections on a port of 127.0.0.1 and pass on what they say, under a private authority."""
    context, authority = private_authority(directory)
    with tls_port(context, server.port) as port:
        yield TlsFront(f"rediss://:{urlsplit(server.url).password}@127.0.0.1:{port}/0", authority)


def private_authority(directory: Path) -> tuple[ssl.SSLContext, Path]:
    """What a server on 127.0.0.1 needs to speak TLS, and the file with the certificate of who vouches for it."""
    authority = trustme.CA()
    authority.cert_pem.write_to_path(str(directory / "authority.pem"))
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    authority.issue_cert("127.0.0.1").configure_cert(context)
    return context, directory / "authority.pem"


@contextmanager
def tls_port(context: ssl.SSLContext, behind: int) -> Iterator[int]:
    """A port of 127.0.0.1 that takes TLS only, for what listens on the port ``behind``."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        threading.Thread(target=_accept, args=(listening, context, behind), daemon=True).start()
        yield int(listening.getsockname()[1])


@contextmanager
def tls_instead_of(ports: Iterable[int], directory: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Whoever connects to one of ``ports`` from this process comes to one that takes TLS only, and leads there."""
    context, authority = private_authority(directory)
    with contextlib.ExitStack() as stack:
        fronts = {port: stack.enter_context(tls_port(context, port)) for port in ports}
        found = socket.getaddrinfo
        monkeypatch.setattr(socket, "getaddrinfo", lambda host, port, *how: found(host, fronts.get(port, port), *how))
        yield authority


def _accept(listening: socket.socket, context: ssl.SSLContext, port: int) -> None:
    while True:
        try:
            plain, _ = listening.accept()
        except OSError:
            return
        threading.Thread(target=_serve, args=(plain, context, port), daemon=True).start()


def _serve(plain: socket.socket, context: ssl.SSLContext, port: int) -> None:
    with plain, contextlib.suppress(OSError):
        plain.settimeout(10.0)
        with context.wrap_socket(plain, server_side=True) as front, socket.socket() as back:
            back.connect(("127.0.0.1", port))
            front.setblocking(False)
            _pass_on(front, back)


def _pass_on(front: ssl.SSLSocket, back: socket.socket) -> None:
    """Both ways, one thread: an SSL socket may not be read and written by two."""
    while True:
        if not front.pending():
            select.select([front, back], [], [])
        with contextlib.suppress(ssl.SSLWantReadError):
            asked = front.recv(65536)
            if not asked:
                return
            back.sendall(asked)
        if select.select([back], [], [], 0)[0]:
            answered = back.recv(65536)
            if not answered:
                return
            front.setblocking(True)
            front.sendall(answered)
            front.setblocking(False)
