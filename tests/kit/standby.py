"""A hot standby: PostgreSQL that answers and takes no writes."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

from opencue_sched.embedded.servers.services import EmbeddedPostgres
from opencue_sched.store import schema


@contextmanager
def standby_server() -> Iterator[EmbeddedPostgres]:
    """A migrated database on a server in recovery, which also listens on a socket in its data directory."""
    with EmbeddedPostgres(configuration={"unix_socket_directories": "."}) as server:
        schema.upgrade(server.url)
        data = server.directory / "data"
        signal = data / "standby.signal"
        signal.touch()
        os.chown(signal, data.stat().st_uid, data.stat().st_gid)
        server.restart()
        yield server
