"""A command on a pseudo-terminal: what its screen shows, keys for it, and what it leaves behind."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import select
import signal
import struct
import sys
import termios
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from benchmarks.warm_start import Started
from tests.kit.polling import eventually

MAIN = "from opencue_sched.cli import main; main()"
_TAKE_THE_TERMINAL = "import fcntl, termios; fcntl.ioctl(0, termios.TIOCSCTTY, 0); "
"""What the leader of a session does to have its terminal's Ctrl-C and the end of it sent to itself."""
_ALTERNATE, _CURSOR_OFF = "?1049", "?25"
_OUTPUT = re.compile(r"\x1b\[([?0-9;]*)([A-Za-z])|([^\x1b])", re.DOTALL)


class Terminal:
    """A terminal of so many columns and rows. It knows of escape sequences what rich's Live sends on a whole screen."""

    def __init__(self, columns: int, rows: int) -> None:
        self.columns, self.rows = columns, rows
        self.master, self.slave = pty.openpty()
        fcntl.ioctl(self.slave, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))
        self.modes: dict[str, bool] = {}
        self.overrun = False
        self._lines = [""] * rows
        self._row = self._column = 0
        self._pending = b""

    @property
    def attributes(self) -> list[Any]:
        """What termios says of it."""
        return termios.tcgetattr(self.slave)

    def type(self, keys: str) -> None:
        """Press keys."""
        os.write(self.master, keys.encode())

    def screen(self) -> list[str]:
        """The lines that it shows now."""
        while select.select([self.master], [], [], 0)[0]:
            self._pending += os.read(self.master, 65536)
        self._show()
        return [line.rstrip() for line in self._lines]

    def shows(self, *parts: str) -> list[str]:
        """The lines, once all of these parts are in them."""
        eventually(lambda: all(it in "\n".join(self.screen()) for it in parts), 20, f"{parts}", told=self.text)
        return self.screen()

    def text(self) -> str:
        """All that it shows."""
        return "\n".join(self.screen())

    def _show(self) -> None:
        whole = self._pending.decode("utf-8", "ignore")
        cut = whole.rfind("\x1b")
        if cut >= 0 and not _OUTPUT.match(whole, cut):
            whole = whole[:cut]
        self._pending = self._pending[len(whole.encode()) :]
        for arguments, command, character in _OUTPUT.findall(whole):
            if command == "H":
                self._row = self._column = 0
            elif command in ("h", "l"):
                self.modes[arguments] = command == "h"
            elif character == "\n":
                self._row += 1
            elif character == "\r":
                self._column = 0
            elif character:
                self._put(character)

    def _put(self, character: str) -> None:
        self.overrun |= self._column >= self.columns or self._row >= self.rows
        if self._row < self.rows:
            line = self._lines[self._row].ljust(self.columns)
            self._lines[self._row] = line[: self._column] + character + line[self._column + 1 :]
        self._column += 1

    @property
    def is_as_before(self) -> bool:
        """Whether the command left the whole screen and showed the cursor again."""
        self.screen()
        return self.modes.get(_ALTERNATE) is False and self.modes.get(_CURSOR_OFF) is True


@contextmanager
def on_terminal(
    words: Sequence[str], *, columns: int = 100, rows: int = 30, program: str = MAIN
) -> Iterator[tuple[Terminal, Started]]:
    """``opencue-sched WORDS...`` on a terminal, of a session of its own. Killed at the end if it still runs."""
    terminal = Terminal(columns, rows)
    environment = {k: v for k, v in os.environ.items() if k not in ("COLUMNS", "LINES", "NO_COLOR")}
    process = Started(
        [sys.executable, "-c", _TAKE_THE_TERMINAL + program, *words],
        stdin=terminal.slave,
        stdout=terminal.slave,
        stderr=terminal.slave,
        env=environment | {"TERM": "xterm-256color"},
    )
    try:
        yield terminal, process
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGKILL)
        process.wait()
        os.close(terminal.master)
        os.close(terminal.slave)
