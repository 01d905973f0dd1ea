"""Fleets that nobody needs any more when a test is over."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import redis

from opencue_sched.accounting.epoch import Epoch
from opencue_sched.accounting.keys import EPOCH
from opencue_sched.embedded.servers.fleet import Fleet


@contextmanager
def brief_fleet(environment: Mapping[str, str], directory: Path, *, fleet_type: type[Fleet] = Fleet) -> Iterator[Fleet]:
    """A fleet whose processes are killed in the end: draining would only take its time."""
    with fleet_type(environment, directory) as fleet:
        try:
            yield fleet
        finally:
            for process in fleet.processes.values():
                process.kill()


def open_counters(client: redis.Redis, *, dual: bool = False) -> None:
    """Say that the counters are complete, as those of an empty farm are: no worker needs to wait and fill them."""
    client.set(EPOCH, Epoch.new(str(client.info("server")["run_id"]), dual=dual).text)
