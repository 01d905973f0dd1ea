"""How many connections a process has to a server of this machine, as the kernel counts them."""

from __future__ import annotations

import re
from contextlib import suppress
from pathlib import Path

_ESTABLISHED = "01"


def connections(pid: int, port: int) -> int:
    """Connections of a process to a port, over IPv4; 0 for a process that has ended."""
    sockets = set()
    with suppress(FileNotFoundError):
        for descriptor in Path(f"/proc/{pid}/fd").iterdir():
            with suppress(FileNotFoundError):
                sockets.update(re.findall(r"^socket:\[(\d+)\]$", str(descriptor.readlink())))
    rows = [line.split() for line in Path("/proc/net/tcp").read_text(encoding="ascii").splitlines()[1:]]
    return sum(
        row[9] in sockets and row[3] == _ESTABLISHED and int(row[2].rpartition(":")[2], 16) == port for row in rows
    )
