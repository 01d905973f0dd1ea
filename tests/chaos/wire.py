"""What goes over the wire to Redis, command by command, for processes that die at a chosen one."""

from __future__ import annotations

from collections.abc import Sequence

import redis
from redis.connection import AbstractConnection

from opencue_sched.clients.lua_scripts import load_script, lua_directory

SCRIPTS = {load_script(path.stem).sha: path.stem for path in lua_directory().glob("*.lua")}


class Unwatched(redis.Connection):
    """A connection of such a process whose commands are no steps."""

    # As it is now, before a process begins to watch what it sends.
    send_packed_command = AbstractConnection.send_packed_command


def commands_of(packed: bytes | Sequence[bytes]) -> list[tuple[str, bytes]]:
    """The commands in what redis-py sends at a time, and their names; those of scripts are the scripts' own."""
    data = packed if isinstance(packed, bytes) else b"".join(packed)
    found = []
    while data:
        head, _, rest = data.partition(b"\r\n")
        words = []
        for _ in range(int(head.removeprefix(b"*"))):
            size, _, rest = rest.partition(b"\r\n")
            length = int(size.removeprefix(b"$"))
            words.append(rest[:length])
            rest = rest[length + 2 :]
        name = words[0].decode().upper()
        found.append((SCRIPTS[words[1].decode()] if name == "EVALSHA" else name, data[: len(data) - len(rest)]))
        data = rest
    return found
