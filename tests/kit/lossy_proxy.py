"""A proxy before Redis that loses answers."""

from __future__ import annotations

import select
import socket
import threading
from contextlib import suppress


class LossyProxy:
    """Stands before a server. After ``lose(command)`` it passes the next such command, or the next few, on and drops
    the connection instead of the reply. After ``hold(command)`` it passes nothing of the connection on, from the next
    such command on until ``let_go()``; ``hold(command, answer=True)`` lets the command through and holds the answer."""

    def __init__(self, host: str, port: int) -> None:
        self._upstream = (host, port)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        self._lose, self._times = b"", 0
        self.lost = 0
        self._hold, self._holds_answer = b"", False
        self.holds = threading.Event()
        self._let_go = threading.Event()
        self._threads = [threading.Thread(target=self._accept)]
        self._stopped = threading.Event()
        self._threads[0].start()

    def lose(self, command: str, *, times: int = 1) -> None:
        self._lose, self._times = command.encode(), times

    def hold(self, command: str, *, answer: bool = False) -> None:
        self.holds.clear()
        self._let_go.clear()
        self._hold, self._holds_answer = command.encode(), answer

    def let_go(self) -> None:
        self._hold = b""
        self._let_go.set()

    def close(self) -> None:
        self._let_go.set()
        self._stopped.set()
        for thread in self._threads:
            thread.join()
        self._listener.close()

    def _accept(self) -> None:
        while not self._stopped.is_set():
            if select.select([self._listener], [], [], 0.05)[0]:
                self._threads.append(threading.Thread(target=self._serve, args=(self._listener.accept()[0],)))
                self._threads[-1].start()

    def _serve(self, client: socket.socket) -> None:
        with client, socket.create_connection(self._upstream) as server, suppress(ConnectionError):
            losing = False
            while not self._stopped.is_set():
                for source in select.select([client, server], [], [], 0.05)[0]:
                    data = source.recv(65536)
                    if not data or (losing and source is server):
                        return
                    if source is client and self._times and self._lose in data:
                        self._times -= 1
                        self.lost += 1
                        losing = True
                    if source is client and self._hold and self._hold in data:
                        if self._holds_answer:
                            server.sendall(data)
                        self.holds.set()
                        self._let_go.wait()
                        if self._holds_answer:
                            continue
                    (server if source is client else client).sendall(data)
