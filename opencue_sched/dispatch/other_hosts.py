"""Says whether other hosts of the farm may take frames that failed on some, where hosts are divided among workers.

A worker knows the hosts of its own shard. The hosts of all shards are read by kind, in a statement that looks at each
host once: only for layers of which a waiting frame failed on a host, and at most once in KINDS_SECONDS for the same
tags.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace

from sqlalchemy import Connection, Engine

from opencue_sched.clients.postgres import ask
from opencue_sched.domain.clusters import normalise_tag
from opencue_sched.domain.frame_needs import Demand, Search, smallest_need
from opencue_sched.domain.hosts import Host
from opencue_sched.domain.jobs import Frame, memory_slices
from opencue_sched.domain.plans import Waiting
from opencue_sched.settings import Settings
from opencue_sched.store.hosts import fetch_hosts_by_id
from opencue_sched.store.reservations import fetch_host_kinds

KINDS_SECONDS = 60.0
"""How long the kinds of a facility's hosts are believed."""


@dataclass(frozen=True, slots=True)
class _Kinds:
    """The hosts of a facility that take frames and carry one of some tags."""

    tags: frozenset[str]
    read_at: float
    """The time at which the hosts were read, by the clock of OtherHosts."""
    hosts: Sequence[tuple[Host, int]]
    """One host of each kind, and how many there are."""


class OtherHosts:
    """The kinds of hosts of whole facilities, as far as they are asked for. Thread-safe."""

    def __init__(self, engine: Engine, settings: Settings, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._engine = engine
        self._staleness = settings.host_cache.host_staleness_threshold
        """Seconds without a report after which a host takes no frames."""
        self._ignored = frozenset(map(normalise_tag, settings.scheduler.ignore_tags))
        self._clock = clock
        self._reading = threading.Lock()
        """Held by the thread that looks at ``_of_facility`` and reads what it lacks: no two read the same."""
        self._of_facility: dict[str, _Kinds] = {}
        """What was read, by the id of the facility."""

    def note(self, waiting: Waiting, frames: Sequence[Frame], alloc_ids: Collection[str]) -> tuple[Frame, ...]:
        """The frames of a layer, in their order. Frames that failed say in ``others`` whether more hosts of
        ``alloc_ids`` than those they failed on could take them while nothing else runs there, by the tests of a
        plan."""
        if not any(frame.failed_on for frame in frames):
            return tuple(frames)
        job, tags = waiting.job, waiting.layer.tags - self._ignored
        kinds, enough = self._kinds(job.facility_id, tags), 1 + max(len(frame.failed_on) for frame in frames)
        able: dict[str, int] = {}
        for layer, slice_frames, _ in memory_slices(waiting.layer, frames, len(frames)):
            search = Search.of(job, layer, smallest_need(layer), tuple(sorted(tags)))
            demand = Demand(job.facility_id, search, frozenset(alloc_ids), len(slice_frames))
            able |= dict.fromkeys((frame.id for frame in slice_frames), _hosts_able(demand, kinds, enough))
        return tuple(
            replace(frame, others=able[frame.id] > len(frame.failed_on)) if frame.failed_on else frame
            for frame in frames
        )

    def _kinds(self, facility_id: str, tags: frozenset[str]) -> Sequence[tuple[Host, int]]:
        """The kinds of the facility's hosts with one of the tags, read if they are not known or were read too long
        ago."""
        with self._reading:
            now, known = self._clock(), self._of_facility.get(facility_id)
            if known is None or now - known.read_at >= KINDS_SECONDS:
                known = None
            if known is None or not tags <= known.tags:
                # Tags that were asked for lately will be asked for again: all are read together.
                tags |= known.tags if known else frozenset()
                hosts = ask(self._engine, self._read, facility_id, tags)
                known = self._of_facility[facility_id] = _Kinds(tags, now, hosts)
            return known.hosts

    def _read(self, connection: Connection, facility_id: str, tags: frozenset[str]) -> Sequence[tuple[Host, int]]:
        """One host of each kind that takes frames now, with how many there are of it; what runs there is not read."""
        counts: Mapping[str, int] = fetch_host_kinds(connection, [facility_id], tags, self._staleness)
        hosts = fetch_hosts_by_id(connection, sorted(counts), self._staleness, but_running=counts)
        return [(host, counts[host.id]) for host in hosts]


def _hosts_able(demand: Demand, kinds: Sequence[tuple[Host, int]], enough: int) -> int:
    """How many hosts could take the frames if nothing ran there; they are counted until there are ``enough``."""
    hosts = 0
    for host, count in kinds:
        if hosts >= enough:
            break
        hosts += count if demand.need_on(host) is not None else 0
    return hosts
