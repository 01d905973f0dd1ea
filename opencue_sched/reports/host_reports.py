"""Boot and status reports: the host's row first, then the processes the report names."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from time import monotonic

import structlog
from opencue_proto import report_pb2
from sqlalchemy import Connection

from opencue_sched.domain.clusters import ClusterKind, normalise_tag
from opencue_sched.domain.states import HardwareState, LockState
from opencue_sched.errors import InvalidInput
from opencue_sched.reports.completion import Releaser, warn_of_astray
from opencue_sched.reports.reported_host import ReportedHost, next_hardware_state, next_lock, read_report
from opencue_sched.reports.reported_runs import SETTLED_SECONDS, LogSilences, check_frame, unowned, usage
from opencue_sched.reports.run_ends import overdue
from opencue_sched.rqd.kill import RqdKiller
from opencue_sched.store import reported_runs, reports
from opencue_sched.store.hosts import RQD_LOCK_SOURCE, set_lock, set_state, set_tags
from opencue_sched.store.procs import Run, read_runs
from opencue_sched.store.reports import HostRow
from opencue_sched.store.schema import read_origin

_log = structlog.get_logger(__name__)

_DEFAULT_FACILITY = "local"
_DEFAULT_ALLOC_TAG = "general"

RECONCILE_SECONDS = 600.0
"""How often a host's idle resources are compared with its procs."""

OLDEST_FOR_VERIFICATION_SECONDS = SETTLED_SECONDS - 1.0
"""A status report that waited longer than this only brings numbers; nothing is killed because of it."""


@dataclass
class HostReports:
    """Handles the reports of every host. Thread-safe as long as one host's reports come one at a time.

    ``facility`` is that of hosts that report none.
    """

    releaser: Releaser
    killer: RqdKiller
    facility: str | None = None
    silences: LogSilences = field(init=False)
    _reconcile_at: dict[str, float] = field(default_factory=dict, init=False)

    def __post_init__(self) -> None:
        self.silences = LogSilences(self.releaser.clock)

    def boot(self, report: report_pb2.BootReport) -> None:
        """A host's RQD has started. Raises InvalidInput when the host is nonsense."""
        self._host(read_report(report), boot=True)

    def status(self, report: report_pb2.HostReport, *, age: float = 0.0) -> Callable[[], None] | None:
        """A host's regular report, which waited ``age`` seconds to be handled. Raises InvalidInput as `boot`.

        Returns what kills the processes that are to end, if any, which waits for the host's RQD.
        """
        fresh_until = monotonic() + OLDEST_FOR_VERIFICATION_SECONDS - age
        host = read_report(report)
        for frame in report.frames:
            check_frame(frame, f"host {host.name}: ")
        row = self._host(host, boot=False)
        owned, kills = self._verify(report, row.id)
        self._write_usage(owned, row.id, host)
        self._reconcile(row.id, host.name)
        stale = age > OLDEST_FOR_VERIFICATION_SECONDS
        return partial(self._kill, host.name, kills, fresh_until) if kills and not stale else None

    def _host(self, host: ReportedHost, *, boot: bool) -> HostRow:
        """Bring the host's rows up to date; its row as it was before."""
        with self.releaser.engine.begin() as connection:
            row = reports.find_host(connection, host.full_name, host.name)
            if row is None and self._take_over(connection, host):
                row = reports.find_host(connection, host.full_name, host.name)
            created = row is None
            if row is None:
                row = self._create(connection, host)
            self._refresh(connection, row, host, boot=boot or created)
        if created:
            _log.info("host_created", host=host.name, cores=host.size.centicores / 100, alloc_tag=row.alloc_tag)
        if boot or created or host.locked_centicores not in (None, row.locked_centicores):
            # Triggers announce another lock, state or size, but neither a new host nor other tags or locked cores.
            self.releaser.publish_hosts([row.id])
        return row

    def _take_over(self, connection: Connection, host: ReportedHost) -> bool:
        """Give a host whose domain changed the row it had, whether there is one. Raises InvalidInput while the row
        belongs to another machine: one row for two machines would run frames twice."""
        namesake = reports.find_namesake(connection, host.name)
        if namesake is None:
            return False
        refusal = f"host {host.full_name}: the name {host.name!r} is another host's, {namesake.full_name}"
        if read_origin(connection) == "cuebot":  # which finds its rows by the names that it gave them
            raise InvalidInput(refusal)
        silent = self.releaser.settings.host_down_after
        taken = reports.take_over_host(connection, host.name, host.full_name, silent=silent)
        if taken is None:
            raise InvalidInput(f"{refusal}; its row becomes this one's when it has not reported for {silent:g} s")
        _log.warning("host_taken_over", host=taken.name, before=taken.before, now=host.full_name)
        return True

    def _create(self, connection: Connection, host: ReportedHost) -> HostRow:
        """A new host in the allocation its tags name, or in the default one."""
        facility = host.facility or self.facility or _DEFAULT_FACILITY
        alloc = reports.find_alloc(connection, facility, [*host.tags, _DEFAULT_ALLOC_TAG])
        if alloc is None:
            raise InvalidInput(
                f"host {host.full_name}: no allocation for facility {facility[:60]!r} and tags {list(host.tags[:20])},"
                f" no allocation tagged {_DEFAULT_ALLOC_TAG!r} there and no default allocation"
            )
        host_id = reports.insert_host(connection, alloc.pk_alloc, host.name, host.full_name, nimby=host.size.nimby)
        if host_id is not None:
            set_tags(connection, [host_id], ClusterKind.ALLOC, add=[alloc.str_tag])
            set_tags(connection, [host_id], ClusterKind.HOSTNAME, add=[host.name])
        # Another service may have created it meanwhile.
        row = reports.find_host(connection, host.full_name, host.name)
        if row is None:
            raise InvalidInput(f"host {host.full_name}: the name {host.name!r} is another host's")
        return row

    def _refresh(self, connection: Connection, row: HostRow, host: ReportedHost, *, boot: bool) -> None:
        """Bring an existing host up to date: first what is in its own row, which booking locks, then its statistics."""
        lock, source = next_lock(row.lock_state, row.lock_source, host)
        if lock != row.lock_state:
            # A person may have locked it meanwhile, also where the RQD had.
            old_source = RQD_LOCK_SOURCE if row.lock_state == LockState.LOCKED else None
            set_lock(connection, [row.id], old=[row.lock_state], old_source=old_source, new=lock, source=source)
        if host.locked_centicores not in (None, row.locked_centicores):
            reports.lock_cores(connection, row.id, host.locked_centicores)
        if boot or (not row.busy and any(getattr(row, key) != value for key, value in asdict(host.size).items())):
            reports.resize_host(connection, row.id, host.size, boot=boot)
        if boot:
            # The report's tags are HARDWARE tags, but for those the host has as another kind anyway.
            others = {normalise_tag(tag) for tag in (row.alloc_tag, row.name) if tag}
            own = [tag for tag in host.tags if normalise_tag(tag) not in others]
            set_tags(connection, [row.id], ClusterKind.HARDWARE, add=own)
        before, temp_full = HardwareState(row.state), host.temp_full
        state = next_hardware_state(before, host.state, boot=boot, temp_full=temp_full, marked=row.marked)
        if state is not before and set_state(connection, row.id, old=[before], new=state):
            note = None
            if state is HardwareState.REPAIR and temp_full:
                free_mb, total_mb = host.status["free_mcp"] // 1024, host.status["total_mcp"] // 1024
                note = f"REPAIR: {free_mb} MB of the {total_mb} MB temporary directory are free"
            if note or row.marked:
                reports.mark_full_temp(connection, row.id, note)
            _log.info("host_state_changed", host=row.name, old=row.state, new=state.value)
        reports.update_status(connection, row.id, host.status)

    def _verify(
        self, report: report_pb2.HostReport, host_id: str
    ) -> tuple[list[tuple[report_pb2.RunningFrameInfo, Run]], list[tuple[str, str]]]:
        """Sort the reported processes into owned ones and, with why, frames to be killed."""
        owned: list[tuple[report_pb2.RunningFrameInfo, Run]] = []
        kills: list[tuple[str, str]] = []
        self.silences.note(report.host.name, report.frames)
        if not report.frames:
            return owned, kills
        with self.releaser.engine.connect() as connection:
            rows = read_runs(connection, [(it.resource_id, it.frame_id) for it in report.frames])
        for frame, row in zip(report.frames, rows, strict=True):
            reason, age = unowned(row, frame.resource_id, host_id)
            if not reason:
                warn_of_astray(row.host_name, report.host.name)
                owned.append((frame, row))
                # When it began says the database: its start_time is in milliseconds or, by some RQDs, in seconds, of
                # the clock of a worker or of the host.
                reason = overdue(row, row.run_seconds, self.silences.seconds(report.host.name, frame))
            elif age < SETTLED_SECONDS:
                continue
            if reason:
                kills.append((frame.frame_id, reason))
        return owned, kills

    def _write_usage(
        self, owned: Sequence[tuple[report_pb2.RunningFrameInfo, Run]], host_id: str, host: ReportedHost
    ) -> None:
        if not owned:
            return
        with self.releaser.engine.begin() as connection:
            reported_runs.update_runs(
                connection,
                [usage(row, frame) for frame, row in owned],
                frames_to_raise=self.releaser.settings.frames_to_raise_a_layer,
            )
        growing = {
            frame.resource_id: frame.rss for frame, row in owned if frame.rss > row.memory_reserved_kb and not row.local
        }
        if not growing or host.size.nimby:
            return
        with self.releaser.engine.begin() as connection:
            grown = reported_runs.grow_reservations(connection, host_id, growing)
        if grown:
            self.releaser.publish_hosts([host_id])

    def _kill(self, host_name: str, kills: Sequence[tuple[str, str]], fresh_until: float) -> None:
        """Kill frames, each with why.

        Only while the report is fresh: an older one could name a frame that has been booked here again since, and an
        RQD that does not answer would keep the thread for a time-out a frame. The next report names what is left.
        """
        for frame_id, reason in kills:
            if monotonic() > fresh_until:
                break
            _log.warning("process_killed", host=host_name, frame=frame_id, reason=reason)
            self.releaser.count("process_killed")
            if not self.killer.ask(host_name, frame_id, reason):
                break

    def _reconcile(self, host_id: str, host_name: str) -> None:
        """Every ten minutes, spread over the hosts: idle resources are total minus procs."""
        now = self.releaser.clock()
        if now < self._reconcile_at.setdefault(host_id, now + random.uniform(0, RECONCILE_SECONDS)):
            return
        self._reconcile_at[host_id] = now + RECONCILE_SECONDS
        with self.releaser.engine.begin() as connection:
            wrong = reports.reconcile_host(connection, host_id)
        if wrong:
            self.releaser.count("host_reconciled")
            _log.warning("host_idle_reconciled", host=host_name)
            self.releaser.publish_hosts([host_id])
