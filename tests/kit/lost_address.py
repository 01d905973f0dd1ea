"""A host whose address is lost: connections that are open go silent, and new ones reach it."""

from __future__ import annotations

import socket
import threading
from typing import Self


class LostAddress:
    """A relay in front of ``target`` (``address:port``). What comes over a connection from before `lose` goes nowhere,
    and nobody is told: no reset, no end. ``opened`` counts the connections."""

    def __init__(self, target: str) -> None:
        host, _, port = target.rpartition(":")
        self._target = host, int(port)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        self.opened = 0
        self._sockets: list[socket.socket] = []
        self._lost: set[socket.socket] = set()
        self._threads = [threading.Thread(target=self._accept)]

    def __enter__(self) -> Self:
        self._threads[0].start()
        return self

    def __exit__(self, *_: object) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._threads[0].join()
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
            far = socket.create_connection(self._target)
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
        except OSError:  # closed by the other pump, or the end of the test
            return
