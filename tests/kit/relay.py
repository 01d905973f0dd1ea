"""A relay of TCP connections between a client and the servers behind one address."""

from __future__ import annotations

import socket
import threading
from typing import Self


class Relay:
    """An address in front of ``targets`` (each ``address:port``), which get its connections in turn.

    After `lose` what comes over a connection from before goes nowhere, and nobody is told, as where an address is gone:
    no reset, no end. ``opened`` counts the connections.
    """

    def __init__(self, *targets: str) -> None:
        pairs = [target.rpartition(":") for target in targets]
        self._targets = [(host, int(port)) for host, _, port in pairs]
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        self.opened = 0
        self._sockets: list[socket.socket] = []
        self._lost: set[socket.socket] = set()
        self._accepting = threading.Thread(target=self._accept)

    def __enter__(self) -> Self:
        self._accepting.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._accepting.join()
        for open_socket in self._sockets:
            open_socket.close()

    def lose(self) -> None:
        """The address of all connections so far is gone."""
        self._lost |= {*self._sockets}

    def _accept(self) -> None:
        while True:
            try:
                near, _ = self._listener.accept()
            except OSError:  # closed
                return
            far = socket.create_connection(self._targets[self.opened % len(self._targets)])
            self._sockets += [near, far]
            self.opened += 1
            for source, sink in ((near, far), (far, near)):
                threading.Thread(target=self._pump, args=(source, sink), daemon=True).start()

    def _pump(self, source: socket.socket, sink: socket.socket) -> None:
        try:
            while data := source.recv(65536):
                if source not in self._lost:
                    sink.sendall(data)
            if source not in self._lost:
                sink.shutdown(socket.SHUT_WR)
        except OSError:  # closed by the other pump, or at the end of the test
            return
