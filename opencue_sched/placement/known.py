"""What one process believes about each host: the last read, less what was taken since.

Three things change a host: a read of PostgreSQL, a plan that takes from it, and the outcome of that plan. They arrive
in any order, so a host is kept as **what the last read said, less the holds that read cannot have seen**:

- Reads are ordered by when they *began*, on this process's clock; an older read never overwrites a newer one.
- A hold starts at check-in. Once its booking has been committed, reads that begin later contain it and end it; if it
  was lost, its idle is back at once. A hold nobody settles ends with the first read that begins ``hold_seconds`` after
  it. So a read that was under way during a commit does not bring back idle that the commit took, and cores that
  anybody freed are seen by the next read, not by the host's next report (design trap I-3).

Every doubt under-books: the host shows less idle than it has until the next read.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Protocol

import structlog

from opencue_sched.domain.farm import Host, Reservation
from opencue_sched.placement.groups import HostGroups

log = structlog.get_logger(__name__)


class HostReading(Protocol):
    """A host as PostgreSQL had it when it was read (``store.hosts.FetchedHost``)."""

    @property
    def host(self) -> Host: ...

    @property
    def report_age(self) -> float:
        """Seconds since host_stat.ts_ping, by the database's clock: ours may differ from it."""


@dataclass(slots=True)
class _Hold:
    taken: Reservation
    covered_from: float
    """Reads that begin at this time or later contain the hold, or show that it came to nothing."""
    open: bool = True
    """Nobody has said yet what became of its booking."""


@dataclass(frozen=True, slots=True)
class _Refused:
    """A host that is not to be read before ``until``, as it was last known."""

    until: float
    host: Host | None
    why: str


@dataclass(slots=True)
class _Entry:
    """``read`` and ``current`` are None for a host that is gone: a read beginning before ``read_at`` does not count."""

    read_at: float
    read: Host | None = None
    current: Host | None = None
    reported_at: float = 0.0
    holds: dict[str, _Hold] = field(default_factory=dict)


class KnownHosts:
    """The hosts, their holds and their check-outs, shown in ``groups`` as they can be booked now. Not thread-safe.

    Times are seconds of one clock that never runs backwards. Every change gives a host a larger ``last_updated``.
    """

    def __init__(self, groups: HostGroups, *, hold_seconds: float, checkout_seconds: float) -> None:
        self.groups = groups
        self._hold_seconds = hold_seconds
        self._checkout_seconds = checkout_seconds
        self._entries: dict[str, _Entry] = {}
        self._out: dict[str, tuple[float, float]] = {}
        self._invalidated: dict[str, _Refused] = {}
        self._being_booked: dict[str, int] = {}
        self._version = 0

    @property
    def checked_out(self) -> Collection[str]:
        """Ids of the hosts somebody has."""
        return self._out.keys()

    @property
    def being_booked(self) -> Collection[str]:
        """Ids of the hosts on which plans whose outcome is not known yet hold something. A live view."""
        return self._being_booked.keys()

    def invalidated(self, now: float) -> frozenset[str]:
        """Ids of the hosts nobody has read since they were invalidated, and that may be read by now."""
        return frozenset(host_id for host_id, refused in self._invalidated.items() if refused.until <= now)

    def next_return(self) -> float | None:
        """When the first of the invalidated hosts may be read again; None when there are none."""
        return min((refused.until for refused in self._invalidated.values()), default=None)

    def refused(self, facility_id: str, tags: Collection[str]) -> list[str]:
        """Why the invalidated hosts of a facility with any of these tags are, one reason each; the latest last."""
        return [
            refused.why
            for refused in self._invalidated.values()
            if (host := refused.host) and host.facility_id == facility_id and not host.tags.isdisjoint(tags)
        ]

    def reported_at(self, host_id: str) -> float:
        """When the host last reported, by our clock."""
        return self._entries[host_id].reported_at

    def take_over(self, reading: HostReading, read_at: float) -> None:
        """A read that began at ``read_at`` found the host."""
        host = reading.host
        entry = self._entries.get(host.id)
        if entry is None:
            if not self.groups.wants(host):
                return
            entry = self._entries[host.id] = _Entry(read_at)
        elif read_at < entry.read_at:
            return
        unchanged = entry.read == host and not entry.holds
        self._end(host.id, entry, [proc_id for proc_id, hold in entry.holds.items() if hold.covered_from <= read_at])
        entry.read_at = read_at
        entry.reported_at = read_at - reading.report_age
        entry.read = host
        self._invalidated.pop(host.id, None)
        if not unchanged or entry.current is None:
            entry.current = self._less_holds(host, entry.holds)
        self._show(entry.current)

    def forget(self, host_id: str, read_at: float) -> None:
        """A read that began at ``read_at`` did not find the host. Remembered, so that an older read cannot undo it."""
        entry = self._entries.setdefault(host_id, _Entry(read_at))
        if read_at < entry.read_at:
            return
        entry.read_at = read_at
        entry.read = entry.current = None
        self._invalidated.pop(host_id, None)
        self._out.pop(host_id, None)
        self.groups.drop(host_id)

    def invalidate(self, host_id: str, until: float, why: str) -> None:
        """Forget the host until a read that begins at ``until`` or later. Of several reasons the first says most."""
        before = self._invalidated.get(host_id) or _Refused(until, self.groups.get(host_id), why)
        self.forget(host_id, until)
        self._invalidated[host_id] = replace(before, until=max(until, before.until), why=before.why or why)

    def take(self, host: Host, now: float) -> bool:
        """Check the host out if it is still as it was when looked up (the optimistic ``last_updated`` test)."""
        entry = self._entries.get(host.id)
        if entry is None or entry.current is None or host.id in self._out:
            return False
        if entry.current.last_updated != host.last_updated:
            return False
        self.groups.hide(host.id)
        self._out[host.id] = (now, host.last_updated)
        return True

    def give_back(self, host: Host, taken: Mapping[str, Reservation], now: float) -> bool:
        """Check in what ``take`` checked out, with new holds. False if the check-out had ended before."""
        checkout = self._out.get(host.id)
        valid = checkout is not None and checkout[1] == host.last_updated
        if valid:
            del self._out[host.id]
        entry = self._entries.get(host.id)
        if entry is None:
            return False
        for proc_id, reservation in taken.items():
            entry.holds[proc_id] = _Hold(reservation, now + self._hold_seconds)
        if taken:
            self._being_booked[host.id] = self._being_booked.get(host.id, 0) + len(taken)
        if entry.current is None:
            return False
        if taken:
            entry.current = entry.current.less(_sum(taken.values()), last_updated=self._next_version())
        self._show(entry.current)
        return valid

    def settle(self, host_id: str, committed: Collection[str], lost: Collection[str], now: float) -> None:
        """End holds: ``committed`` when a read that begins from now on arrives, ``lost`` at once."""
        entry = self._entries.get(host_id)
        if entry is None:
            return
        for proc_id in committed:
            hold = entry.holds.get(proc_id)
            if hold is not None:
                hold.covered_from = min(hold.covered_from, now)
                self._close(host_id, hold)
        if self._end(host_id, entry, lost) and entry.read is not None:
            entry.current = self._less_holds(entry.read, entry.holds)
            self._show(entry.current)

    def take_back_overdue(self, now: float) -> None:
        """End check-outs that lasted too long. They are in the order they began, so the first in time ends the look."""
        while self._out:
            host_id, (since, _) = next(iter(self._out.items()))
            if now - since <= self._checkout_seconds:
                return
            del self._out[host_id]
            log.warning("checkout_timed_out", host_id=host_id, held_seconds=round(now - since, 1))
            entry = self._entries[host_id]
            if entry.current is not None:
                entry.current = replace(entry.current, last_updated=self._next_version())
                self._show(entry.current)

    def purge(self, before: float) -> None:
        """Drop what is remembered of hosts in no open group, if no read as old as ``before`` can still arrive."""
        for host_id, entry in list(self._entries.items()):
            if self.groups.get(host_id) is not None or host_id in self._out or entry.read_at >= before:
                continue
            if all(hold.covered_from < before for hold in entry.holds.values()):
                del self._entries[host_id]
                self._being_booked.pop(host_id, None)
                self._invalidated.pop(host_id, None)

    def _end(self, host_id: str, entry: _Entry, proc_ids: Iterable[str]) -> bool:
        """End these holds, as far as they are there; whether one was."""
        ended = [entry.holds.pop(proc_id) for proc_id in proc_ids if proc_id in entry.holds]
        for hold in ended:
            self._close(host_id, hold)
        return bool(ended)

    def _close(self, host_id: str, hold: _Hold) -> None:
        """The hold's booking is known to have ended, or too old to be under way."""
        if not hold.open:
            return
        hold.open = False
        self._being_booked[host_id] -= 1
        if not self._being_booked[host_id]:
            del self._being_booked[host_id]

    def _less_holds(self, host: Host, holds: Mapping[str, _Hold]) -> Host:
        return host.less(_sum(hold.taken for hold in holds.values()), last_updated=self._next_version())

    def _show(self, host: Host) -> None:
        """Make the host bookable as it is, unless somebody has it: then its check-in will."""
        if not self.groups.shows(host):
            self.groups.put(host)
        if host.id in self._out:
            self.groups.hide(host.id)

    def _next_version(self) -> float:
        self._version += 1
        return float(self._version)


def _sum(taken: Iterable[Reservation]) -> Reservation:
    cores = memory_kb = gpus = gpu_memory_kb = 0
    for reservation in taken:
        cores += reservation.cores
        memory_kb += reservation.memory_kb
        gpus += reservation.gpus
        gpu_memory_kb += reservation.gpu_memory_kb
    return Reservation(cores, memory_kb, gpus, gpu_memory_kb)
