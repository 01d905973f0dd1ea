"""TLS in front of an embedded Redis, which has none of its own."""

from __future__ import annotations

import contextlib
import select
import socket
import ssl
import subprocess
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

import pytest
import trustme
from cryptography.hazmat.primitives import serialization

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


@contextmanager
def tls_that_asks(server: EmbeddedRedis, directory: Path, key_password: str) -> Iterator[str]:
    """As tls_front, for clients with a certificate of the authority alone: a URL that names theirs, whose key has a
    password that it does not say, and the authority by a directory."""
    authority = trustme.CA()
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    authority.issue_cert("127.0.0.1").configure_cert(context)
    authority.configure_trust(context)
    context.verify_mode = ssl.CERT_REQUIRED
    client = authority.issue_cert("client.example")
    client.cert_chain_pems[0].write_to_path(str(directory / "client.pem"))
    key = serialization.load_pem_private_key(client.private_key_pem.bytes(), None)
    encryption = serialization.BestAvailableEncryption(key_password.encode())
    form = serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, encryption
    (directory / "client.key").write_bytes(key.private_bytes(*form))
    authorities = directory / "authorities"
    authorities.mkdir()
    authority.cert_pem.write_to_path(str(authorities / "ours.pem"))
    subprocess.run(["openssl", "rehash", authorities], check=True)
    files = f"ssl_ca_path={authorities}&ssl_certfile={directory}/client.pem&ssl_keyfile={directory}/client.key"
    with tls_port(context, server.port) as port:
        yield f"rediss://:{urlsplit(server.url).password}@127.0.0.1:{port}/0?{files}"


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
