"""Boot and status reports: the host's row first, then the processes the report names and those it does not."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from time import monotonic

import structlog
from opencue_proto import report_pb2
from sqlalchemy import Connection, Engine

from opencue_sched.domain.errors import InvalidInput
from opencue_sched.domain.states import ExitStatus, HardwareState, TagType
from opencue_sched.release.ending import publish_hosts
from opencue_sched.release.hosts import (
    ReportedHost,
    check_frames,
    next_hardware_state,
    next_lock_state,
    read_host,
)
from opencue_sched.release.losing import Releasing
from opencue_sched.release.model import (
    EventCounts,
    FrameKiller,
    HostPublisher,
    KillFate,
    LedgerRelease,
    LostRun,
    ReleasePolicy,
    RunVerdict,
)
from opencue_sched.release.verify import SETTLED_SECONDS, Absences, KillThrottle, Standing, overdue, usage, verify
from opencue_sched.settings import Release
from opencue_sched.store import reported_runs, reports
from opencue_sched.store.reported_runs import ReportedRun, UnreportedProc
from opencue_sched.store.reports import HostRow

_log = structlog.get_logger(__name__)

RECONCILE_SECONDS = 600.0
"""How often a host's idle resources are compared with its procs."""

OLDEST_FOR_VERIFICATION_SECONDS = SETTLED_SECONDS - 1.0
"""A status report that waited longer than this only brings numbers; nothing is killed or missed because of it."""


LONGEST_SETUP_SECONDS = 120.0
"""RQD lists a frame once its log is open, which takes ten seconds when the directory does not answer."""

Background = Callable[[str, Callable[[], None]], bool]
"""Has work done for a host (by id), one at a time, without being waited for; False: not now. `KillPool.submit`."""


@dataclass(frozen=True, slots=True)
class HostReportResult:
    """What one report led to. ``changed``: booking sees the host differently now."""

    host_id: str
    created: bool = False
    changed: bool = False
    running: int = 0


@dataclass(slots=True)
class _Seen:
    """The running frames of one report, after verification."""

    owned: list[tuple[report_pb2.RunningFrameInfo, ReportedRun]] = field(default_factory=list)
    kills: list[tuple[str, str]] = field(default_factory=list)


class HostReports:
    """Handles the reports of every host. Thread-safe as long as one host's reports come one at a time.

    Whatever waits for an RQD is done in the ``background``.
    """

    def __init__(
        self,
        engine: Engine,
        settings: Release,
        *,
        killer: FrameKiller,
        background: Background,
        ledger: LedgerRelease | None = None,
        changes: HostPublisher | None = None,
        counts: EventCounts | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._engine = engine
        self._settings = settings
        self._killer = killer
        self._background = background
        self._changes = changes
        self._counts = counts or EventCounts()
        policy = ReleasePolicy(settings.satisfy_only_on_frame_success)
        self._releasing = Releasing(engine, policy, ledger, changes, self._counts, clock)
        self._clock = clock
        self._throttle = KillThrottle(clock)
        self._absences = Absences()
        self._reconcile_at: dict[str, float] = {}

    def boot(self, report: report_pb2.BootReport) -> HostReportResult:
        """A host's RQD has started. Raises InvalidInput when the host is nonsense."""
        return self._host(read_host(report.host), boot=True)

    def status(self, report: report_pb2.HostReport, *, age: float = 0.0) -> HostReportResult:
        """A host's regular report, which waited ``age`` seconds to be handled. Raises InvalidInput as `boot`."""
        fresh_until = monotonic() + OLDEST_FOR_VERIFICATION_SECONDS - age
        host = read_host(report.host)
        check_frames(report.frames, host.name)
        result = self._host(host, boot=False)
        seen = self._verify(report, result.host_id)
        self._write_usage(seen, result.host_id, host)
        if age <= OLDEST_FOR_VERIFICATION_SECONDS:
            missing = self._missing(report, result.host_id)
            if seen.kills or missing:
                self._background(result.host_id, lambda: self._end(host.name, seen.kills, missing, fresh_until))
        reconciled = self._reconcile(result.host_id, host.name)
        changed = result.changed or reconciled
        return HostReportResult(result.host_id, result.created, changed, len(seen.owned))

    def _host(self, host: ReportedHost, *, boot: bool) -> HostReportResult:
        with self._engine.begin() as connection:
            row = reports.find_host(connection, host.full_name, host.name)
            created = row is None
            if row is None:
                row = self._create(connection, host)
            changed = self._refresh(connection, row, host, boot=boot) or created
        if host.refused_tags and (boot or created):
            _log.warning("host_tags_refused", host=host.name, tags=host.refused_tags)
        if created:
            _log.info("host_created", host=host.name, cores=host.size.centicores / 100, alloc_tag=row.alloc_tag)
        if changed:
            publish_hosts([row.id], self._changes, self._counts)
        return HostReportResult(row.id, created, changed)

    def _create(self, connection: Connection, host: ReportedHost) -> HostRow:
        """A new host in the allocation its tags name, or in the default one."""
        facility = host.facility or self._settings.facility
        alloc = reports.find_alloc(connection, facility, host.tags, self._settings.default_alloc_tag)
        if alloc is None:
            raise InvalidInput(
                f"host {host.full_name}: no allocation for facility {facility[:60]!r} and tags {list(host.tags[:20])},"
                f" no allocation tagged {self._settings.default_alloc_tag!r} there and no default allocation"
            )
        alloc_id, alloc_tag, _ = alloc
        host_id = reports.insert_host(
            connection,
            alloc_id=alloc_id,
            name=host.name,
            fqdn=host.full_name,
            thread_mode=host.thread_mode,
            size=host.size,
            state=HardwareState.UP,
        )
        if host_id is None:
            row = reports.find_host(connection, host.full_name, host.name)
            if row is not None:
                return row
            taken_by = reports.name_taken_by(connection, host.name)
            raise InvalidInput(f"host {host.full_name}: the name {host.name!r} is taken by {taken_by}")
        reports.replace_tags(connection, host_id, TagType.ALLOC, [alloc_tag])
        reports.replace_tags(connection, host_id, TagType.HOSTNAME, [host.name])
        self._tag(connection, host_id, alloc_tag, host)
        row = reports.find_host(connection, host.full_name, host.name)
        if row is None:
            raise InvalidInput(f"host {host.full_name}: it was removed while it was created")
        return row

    def _refresh(self, connection: Connection, row: HostRow, host: ReportedHost, *, boot: bool) -> bool:
        """Bring an existing host up to date: first what is in its own row, which booking locks, then its statistics."""
        changed = False
        lock = next_lock_state(row.lock_state, nimby_locked=host.nimby_locked)
        if lock is not row.lock_state:
            changed |= reports.set_lock_state(connection, row.id, row.lock_state, lock, "NIMBY")
        if boot or (row.size != host.size and not row.busy):
            changed |= reports.resize_host(connection, row.id, host.size)
        if boot:
            changed |= self._tag(connection, row.id, row.alloc_tag, host)
        state = next_hardware_state(row.state, host.state, boot=boot, temp_full=host.temp_full, marked=row.marked)
        if state is not row.state:
            changed |= self._change_state(connection, row, host, state)
        reports.update_status(connection, row.id, host.status)
        return changed

    def _change_state(self, connection: Connection, row: HostRow, host: ReportedHost, state: HardwareState) -> bool:
        if not reports.set_hardware_state(connection, row.id, row.state, state):
            return False
        if state is HardwareState.REPAIR and host.temp_full:
            free_mb, total_mb = host.status.temp_free // 1024, host.status.temp_total // 1024
            reports.mark_full_temp(
                connection, row.id, f"REPAIR: {free_mb} MB of the {total_mb} MB temporary directory are free"
            )
        elif row.marked:
            reports.unmark_full_temp(connection, row.id)
        _log.info("host_state_changed", host=row.name, old=row.state.value, new=state.value)
        return True

    def _tag(self, connection: Connection, host_id: str, alloc_tag: str, host: ReportedHost) -> bool:
        """The report's tags are HARDWARE tags, but for those the host has as another kind anyway."""
        own = [tag for tag in host.tags if tag not in (alloc_tag, host.name)]
        return reports.replace_tags(connection, host_id, TagType.HARDWARE, own)

    def _verify(self, report: report_pb2.HostReport, host_id: str) -> _Seen:
        """Sort the reported processes into owned ones and those to be killed."""
        seen = _Seen()
        if not report.frames:
            return seen
        named = [(frame.resource_id, frame.frame_id) for frame in report.frames]
        with self._engine.connect() as connection:
            rows = reported_runs.read_reported(connection, named)
        now = self._clock()
        for frame, row in zip(report.frames, rows, strict=True):
            verified = verify(row, frame.resource_id, frame.frame_id, host_id)
            if verified.standing is Standing.OWNED:
                seen.owned.append((frame, row))
                late = overdue(row, frame, now=now)
                if late:
                    seen.kills.append((frame.frame_id, late))
            elif verified.standing is Standing.KILL:
                self._counts.add("unowned_process")
                seen.kills.append((frame.frame_id, verified.reason))
        return seen

    def _write_usage(self, seen: _Seen, host_id: str, host: ReportedHost) -> None:
        if not seen.owned:
            return
        with self._engine.begin() as connection:
            reported_runs.update_runs(connection, [usage(row, frame) for frame, row in seen.owned])
        growing = {
            frame.resource_id: frame.rss
            for frame, row in seen.owned
            if frame.rss > row.proc_memory_kb and not row.proc_local
        }
        if not growing or host.size.nimby:
            return
        with self._engine.begin() as connection:
            grown = reported_runs.grow_reservations(connection, host_id, growing)
        if grown:
            self._counts.add("reservation_grown", len(grown))
            publish_hosts([host_id], self._changes, self._counts)
        if len(grown) < len(growing):
            short = {proc: kb for proc, kb in growing.items() if proc not in grown}
            _log.info("memory_over_reservation", host=host.name, procs=short)

    def _end(
        self,
        host_name: str,
        kills: Sequence[tuple[str, str]],
        missing: Sequence[UnreportedProc],
        fresh_until: float,
    ) -> None:
        """Kill what no proc owns, and end the runs that RQD confirms not to run. In the background.

        Only while the report is fresh: an older one could name a frame that has been booked here again since, and an
        RQD that does not answer would keep the thread for a time-out a frame. One that could not be asked is not asked
        again. The next report names what is left, of the missing in another order, so that one that is never confirmed
        does not keep the others.
        """
        for frame_id, reason in kills:
            if monotonic() > fresh_until or not self._kill(host_name, frame_id, reason):
                break
        gone: list[LostRun] = []
        for proc in random.sample(missing, len(missing)):
            if monotonic() > fresh_until:
                break
            if self._confirm_gone(proc, host_name):
                gone.append(
                    LostRun(
                        proc.proc_id,
                        proc.frame_id,
                        exit_status=ExitStatus.FRAME_ORPHAN,
                        pinged_at=proc.pinged_at,
                        reason="its host no longer reports it",
                    )
                )
        ended = self._releasing.end_lost(gone)
        self._counts.add("lost_completion", sum(run.verdict is RunVerdict.APPLIED for run in ended))

    def _kill(self, host_name: str, frame_id: str, reason: str) -> bool:
        """False: RQD could not be asked."""
        if not self._throttle.allows(host_name, frame_id):
            self._counts.add("kill_throttled")
            return True
        _log.warning("process_killed", host=host_name, frame=frame_id, reason=reason)
        self._counts.add("process_killed")
        return self._killer.ask(host_name, frame_id, reason)

    def _missing(self, report: report_pb2.HostReport, host_id: str) -> list[UnreportedProc]:
        """The procs this host has not named in two reports.

        While RQD has booked more cores than its frames have, it is still setting one up: a young proc is not missing.
        """
        grace = self._settings.lost_completion_grace
        if report.core_info.booked_cores > sum(frame.num_cores for frame in report.frames):
            grace = max(grace, LONGEST_SETUP_SECONDS)
        with self._engine.connect() as connection:
            unreported = reported_runs.unreported_procs(
                connection,
                host_id,
                [frame.resource_id for frame in report.frames],
                grace=grace,
                unseen=SETTLED_SECONDS,
            )
        missing = set(self._absences.missing(host_id, [proc.proc_id for proc in unreported]))
        return [proc for proc in unreported if proc.proc_id in missing]

    def _confirm_gone(self, proc: UnreportedProc, host_name: str) -> bool:
        if proc.frame_id is None:
            return True
        fate = self._killer.stop(host_name, proc.frame_id, proc.proc_id, "no report names it any more")
        return fate is KillFate.NOT_RUNNING

    def _reconcile(self, host_id: str, host_name: str) -> bool:
        """Every ten minutes, spread over the hosts: idle resources are total minus procs."""
        now = self._clock()
        due = self._reconcile_at.setdefault(host_id, now + random.uniform(0, RECONCILE_SECONDS))
        if now < due:
            return False
        self._reconcile_at[host_id] = now + RECONCILE_SECONDS
        with self._engine.begin() as connection:
            wrong = reports.reconcile_host(connection, host_id)
        if wrong:
            self._counts.add("host_reconciled")
            _log.warning("host_idle_reconciled", host=host_name)
            publish_hosts([host_id], self._changes, self._counts)
        return wrong
