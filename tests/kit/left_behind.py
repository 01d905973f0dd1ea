"""Whether a program that has ended left processes behind, by a marker in the environment that they inherit."""

from __future__ import annotations

import os
from pathlib import Path

from tests.kit.polling import eventually

MARKER = "DEMO_TEST_MARKER"
"""The variable whose value marks what one test has started."""


def nothing_is_left(marker: str) -> None:
    """No process lives that carries this marker; waits for those that are ending."""

    def left() -> list[str]:
        return processes_mentioning(marker)

    eventually(lambda: not left(), 20, "the end of all it started", told=lambda: "\n".join(left()))


def processes_mentioning(marker: str) -> list[str]:
    """Command lines of live processes whose environment or arguments carry a marker."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            environment, arguments = (process / "environ").read_bytes(), (process / "cmdline").read_bytes()
        except OSError:
            continue
        if marker.encode() in environment + arguments and int(process.name) != os.getpid():
            found.append(arguments.decode(errors="replace").replace("\0", " "))
    return found
