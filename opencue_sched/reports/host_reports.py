"""Boot and status reports: the host's row first, then the processes the report names."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from time import monotonic

import structlog
from opencue_proto import report_pb2
from sqlalchemy import Connection

from opencue_sched.clients.postgres import ask, planned_anew
from opencue_sched.clients.store_errors import Failure, classify, is_trouble
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
from opencue_sched.store.reports import HostRow, HostSize
from opencue_sched.store.schema import read_origin

_log = structlog.get_logger(__name__)

_DEFAULT_FACILITY = "local"
"""The facility of a host that reports none, where the settings name none either."""
_DEFAULT_ALLOC_TAG = "general"
"""The tag of the allocation of a host whose own tags name none."""

RECONCILE_SECONDS = 600.0
"""The time between two comparisons of a host's idle resources with its procs."""

OLDEST_FOR_VERIFICATION_SECONDS = SETTLED_SECONDS - 1.0
"""A status report that waited longer than this only brings numbers; nothing is killed because of it."""


@dataclass(frozen=True, slots=True)
class StatusReport:
    """A host's regular report, and when it was received in monotonic time."""

    message: report_pb2.HostReport
    received_at: float


@dataclass(slots=True)
class StatusOutcome:
    """What became of a status report."""

    error: Exception | None = None
    """Why the report was not handled, or not to its end."""
    kill: Callable[[], None] | None = None
    """Ends the processes that are to end, and waits for the host's RQD; None when there are none."""


@dataclass(slots=True)
class _Status:
    """A status report that is being handled, by one thread."""

    report: StatusReport
    outcome: StatusOutcome
    host: ReportedHost
    id: str = ""
    """The id of the host's row; empty before it was looked up."""
    owned: Sequence[tuple[report_pb2.RunningFrameInfo, reported_runs.ReportedRun]] = ()
    """The processes that a proc owns, each with the row of the proc."""

    @property
    def message(self) -> report_pb2.HostReport:
        """The report as RQD sent it."""
        return self.report.message

    @property
    def growing(self) -> dict[str, int]:
        """The procs whose frames use more memory than they reserve, and how much (KB). A workstation lends none."""
        if self.host.size.nimby:
            return {}
        return {
            frame.resource_id: frame.rss
            for frame, row in self.owned
            if frame.rss > row.memory_reserved_kb and not row.local
        }


@dataclass
class HostReports:
    """Handles the reports of every host. Thread-safe as long as one host's reports come one at a time.

    ``facility`` is that of hosts that report none.
    """

    releaser: Releaser
    killer: RqdKiller
    facility: str | None = None
    silences: LogSilences = field(init=False)
    """How long the logs of running frames have been silent."""
    _reconcile_at: dict[str, float] = field(default_factory=dict, init=False)
    """When each host is to be reconciled next, by host id and the releaser's clock. Any thread reads and writes the
    entry of a host whose report it handles, without a lock: no two handle reports of one host."""

    def __post_init__(self) -> None:
        self.silences = LogSilences(self.releaser.clock)

    def boot(self, report: report_pb2.BootReport) -> None:
        """Handle the report of an RQD that has started. Raises InvalidInput when the report cannot be of a host."""
        planned_anew(self._host, read_report(report), boot=True)

    def statuses(self, reports: Sequence[StatusReport]) -> list[StatusOutcome]:
        """Handle regular reports of different hosts together, and return the outcomes in the order of the reports.

        What kills processes that are to end is in the outcomes: it waits for the host's RQD. When the database is in
        trouble the error is raised (`is_trouble`), and some of the reports may have been handled.
        """
        outcomes = [StatusOutcome() for _ in reports]
        readable: list[_Status] = []
        for report, outcome in zip(reports, outcomes, strict=True):
            try:
                host = read_report(report.message)
                for frame in report.message.frames:
                    check_frame(frame, f"host {host.name}: ")
            except InvalidInput as refusal:
                outcome.error = refusal
            else:
                readable.append(_Status(report, outcome, host))
        known = self._known(readable)
        self._by_halves(known, self._write)
        written = [status for status in known if status.outcome.error is None]
        self._by_halves([status for status in written if status.growing], self._grow)
        now = self.releaser.clock()
        self._by_halves([status for status in written if self._is_to_reconcile(status.id, now)], self._reconcile)
        return outcomes

    def _by_halves(self, statuses: Sequence[_Status], step: Callable[[Sequence[_Status]], None]) -> None:
        """Take a step for many hosts in one transaction. Where the step fails because of what a host says, take it for
        each half, so that the host that is to blame is found and fails alone."""
        if not statuses:
            return
        try:
            planned_anew(step, statuses)
        except Exception as error:
            if is_trouble(error):
                raise
            if len(statuses) == 1:
                statuses[0].outcome.error = error
                return
            middle = len(statuses) // 2
            self._by_halves(statuses[:middle], step)
            self._by_halves(statuses[middle:], step)

    def _known(self, statuses: Sequence[_Status]) -> list[_Status]:
        """The statuses of hosts whose rows are there and up to date but for their statistics. A host without such a row
        gets one first, in a transaction of its own, because another transaction may have the row locked. A host for
        which that failed is left out, with the error in its outcome."""
        rows = self._by_names([status.host for status in statuses])
        known = []
        for status, row in zip(statuses, rows, strict=True):
            try:
                if row is None or is_outdated(row, status.host):
                    row = planned_anew(self._host, status.host, boot=False)
            except Exception as error:
                if is_trouble(error) and classify(error) not in (Failure.BUSY, Failure.REPEAT):
                    raise
                status.outcome.error = error
            else:
                status.id = row.id
                known.append(status)
        return known

    def _by_names(self, hosts: Sequence[ReportedHost]) -> list[HostRow | None]:
        """The rows of hosts by their names, in the order given; None for a host without a row."""
        names = [(host.full_name, host.name) for host in hosts]
        return ask(self.releaser.engine, reports.find_hosts, names) if names else []

    def _write(self, statuses: Sequence[_Status]) -> None:
        """Write the statistics of hosts and what runs there, and find what is to be killed."""
        named = [
            (frame.resource_id, frame.frame_id, status.id) for status in statuses for frame in status.message.frames
        ]
        used: list[reported_runs.Usage] = []
        with self.releaser.engine.begin() as connection:
            rows = iter(reported_runs.read_reported(connection, named))
            for status in statuses:
                self._verify(status, list(islice(rows, len(status.message.frames))))
            pinged = reports.update_statuses(connection, {status.id: status.host.status for status in statuses})
            for status in statuses:
                if status.id in pinged:
                    used += [usage(row, frame) for frame, row in status.owned]
            if used:
                frames_to_raise = self.releaser.settings.frames_to_raise_a_layer
                reported_runs.update_runs(connection, used, frames_to_raise=frames_to_raise)

    def _host(self, host: ReportedHost, *, boot: bool) -> HostRow:
        """Bring the host's rows up to date, or make them, and return the host's row as it was before."""
        with self.releaser.engine.begin() as connection:
            reports.wait_briefly(connection)
            row = _find(connection, host)
            if row is None and self._take_over(connection, host):
                row = _find(connection, host)
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
        """Give a host whose domain changed the row that it had. Returns whether there is one. Raises InvalidInput while
        the row belongs to another machine: with one row for two machines frames would run twice."""
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
        """Make a host, in the allocation that its tags name or in the default one, and return its row."""
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
        row = _find(connection, host)
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
        if boot or is_resized(row, host):
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
        reports.update_statuses(connection, {row.id: host.status})

    def _verify(self, status: _Status, rows: Sequence[reported_runs.ReportedRun]) -> None:
        """Sort the reported processes into owned ones and, with why, frames to be killed."""
        report, owned, kills = status.message, [], []
        self.silences.note(report.host.name, report.frames)
        for frame, row in zip(report.frames, rows, strict=True):
            reason, age = unowned(row, frame.resource_id, status.id)
            if not reason:
                if row.other_host_name:
                    warn_of_astray(row.other_host_name, report.host.name)
                owned.append((frame, row))
                # Run time is counted by the database: the start_time that is reported is in milliseconds or, by some
                # RQDs, in seconds, and of the clock of a worker or of the host.
                if row.timeout_minutes or row.timeout_llu_minutes:
                    reason = overdue(row, row.run_seconds, self.silences.seconds(report.host.name, frame))
            elif age < SETTLED_SECONDS:
                continue
            if reason:
                kills.append((frame.frame_id, reason))
        status.owned = owned
        fresh_until = status.report.received_at + OLDEST_FOR_VERIFICATION_SECONDS
        fresh = monotonic() <= fresh_until
        status.outcome.kill = partial(self._kill, status.host.name, kills, fresh_until) if kills and fresh else None

    def _grow(self, statuses: Sequence[_Status]) -> None:
        """Give frames that need more memory than their procs reserve what is idle on their hosts."""
        with self.releaser.engine.begin() as connection:
            grown = reported_runs.grow_reservations(connection, {status.id: status.growing for status in statuses})
        if grown:
            self.releaser.publish_hosts(sorted(grown))

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

    def _is_to_reconcile(self, host_id: str, now: float) -> bool:
        """Whether a host is to be reconciled now: each RECONCILE_SECONDS, the first time at random within these."""
        if now < self._reconcile_at.setdefault(host_id, now + random.uniform(0, RECONCILE_SECONDS)):
            return False
        self._reconcile_at[host_id] = now + RECONCILE_SECONDS
        return True

    def _reconcile(self, statuses: Sequence[_Status]) -> None:
        """Set what the hosts have idle to their totals less their procs, where it is anything else."""
        names = {status.id: status.host.name for status in statuses}
        with self.releaser.engine.begin() as connection:
            wrong = reports.reconcile_hosts(connection, names)
        for host_id in wrong:
            self.releaser.count("host_reconciled")
            _log.warning("host_idle_reconciled", host=names[host_id])
        if wrong:
            self.releaser.publish_hosts(wrong)


def is_outdated(row: HostRow, host: ReportedHost) -> bool:
    """Whether a report that is no boot report changes more of its host than statistics."""
    state, temp_full = HardwareState(row.state), host.temp_full
    return (
        next_lock(row.lock_state, row.lock_source, host)[0] != row.lock_state
        or host.locked_centicores not in (None, row.locked_centicores)
        or is_resized(row, host)
        or next_hardware_state(state, host.state, boot=False, temp_full=temp_full, marked=row.marked) is not state
    )


def is_resized(row: HostRow, host: ReportedHost) -> bool:
    """Whether a host without procs has another size than its row says."""
    size = host.size
    return not row.busy and size != HostSize(
        row.procs, row.centicores, row.memory_kb, row.gpus, row.gpu_memory_kb, row.nimby
    )


def _find(connection: Connection, host: ReportedHost) -> HostRow | None:
    """The row of a reporting host, by its full name, else its name; None where it has none."""
    (row,) = reports.find_hosts(connection, [(host.full_name, host.name)])
    return row
