"""Boot and status reports: the host's row first, then the processes the report names and those it does not."""

from __future__ import annotations

import ipaddress
import math
import random
import threading
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from enum import StrEnum
from time import monotonic

import structlog
from opencue_proto import host_pb2, report_pb2
from sqlalchemy import Connection

from opencue_sched.dispatch.rqd import Fate, RqdKiller
from opencue_sched.domain.farm import ExitStatus, HardwareState, JobState, LockState, TagType, ThreadMode
from opencue_sched.errors import InvalidInput
from opencue_sched.farm.completion import Releaser, database_away
from opencue_sched.farm.model import LostRun, RunVerdict
from opencue_sched.settings import Release
from opencue_sched.store import reports
from opencue_sched.store.reports import HostRow, HostSize, HostStatus, ReportedRun, RunUsage, UnreportedProc

# What a report says about its host, checked and turned into what the database keeps (facts F, HostReport). Pure.
#
# A host that reports nonsense is refused with the which's name, before anything of its report is used: one with zero
# cores would look bookable, one with negative memory would make every booking on it fail.

LONGEST_NAME, LONGEST_FULL_NAME, LONGEST_TAG, LONGEST_OS = 45, 128, 45, 32
"""Widths of host.str_name, host.str_fqdn, host_tag.str_tag and host_stat.str_os."""

LONGEST_ID = 36
"""Width of proc.pk_proc and frame.pk_frame."""

MOST_TAGS, MOST_FRAMES = 200, 5_000
"""What one report may name; a host with more cores than any there is runs fewer frames."""

MOST_KB = 2**38
"""256 TB: memory that neither a host nor a frame has. More would raise the minimum of a layer beyond every host."""

SYSTEM_MEMORY_KB = 524_288
"""What a host keeps for itself."""

LEAST_FREE_TEMP = 0.05
"""Share of the temporary directory that must be free, or the host goes to REPAIR."""

_DEFAULT_OS = "rhel40"
_DEFAULT_ALLOC_TAG = "general"
_KB_PER_GB = 1024 * 1024
_MOST_CENTICORES = 10_000_000
_MOST_GPUS = 1_000
_SHOWN = 60
_LATEST_EPOCH = 4_102_444_800


@dataclass(frozen=True, slots=True)
class ReportedHost:
    """A host's report, checked. ``tags`` are the report's own, trimmed, without ``refused_tags``, those that are too
    long or unprintable (cut for the log)."""

    full_name: str
    name: str
    facility: str
    size: HostSize
    status: HostStatus
    state: HardwareState
    nimby_locked: bool
    thread_mode: ThreadMode
    tags: tuple[str, ...]
    refused_tags: tuple[str, ...]

    @property
    def temp_full(self) -> bool:
        """Whether too little of the temporary directory is free. Unknown sizes and Windows are never full."""
        if self.status.temp_total <= 0 or self.status.os.lower() == "windows":
            return False
        return self.status.temp_free / self.status.temp_total < LEAST_FREE_TEMP


def check_bounds(report: report_pb2.BootReport | report_pb2.HostReport) -> None:
    """Refuse (InvalidInput) a report that cannot be told by its host's name or is larger than any host's, before it is
    kept and read."""
    name = report.host.name
    if not name.strip():
        raise InvalidInput("host.name: a report needs the name of its host")
    if "\0" in name:
        raise InvalidInput(f"host.name: {name[:_SHOWN]!r} has a NUL in it")
    if len(name) > LONGEST_FULL_NAME:
        raise InvalidInput(f"host.name: {name[:_SHOWN]!r} and more, {len(name)} characters")
    for which, values, most in (
        ("tags", report.host.tags, MOST_TAGS),
        ("frames", getattr(report, "frames", ()), MOST_FRAMES),
    ):
        if len(values) > most:
            raise InvalidInput(f"host {name}: {len(values)} {which}, {most} are possible")


def check_frames(frames: Iterable[report_pb2.RunningFrameInfo], host_name: str) -> None:
    """Refuse (InvalidInput) running frames whose ids cannot be ids or whose memory no host has."""
    for frame in frames:
        for which in ("resource_id", "frame_id"):
            wrong = wrong_id(getattr(frame, which))
            if wrong:
                raise InvalidInput(f"host {host_name}: {which} {wrong}")
        for which in ("rss", "max_rss", "pss", "max_pss", "used_gpu_memory", "max_used_gpu_memory"):
            value = getattr(frame, which)
            if value > MOST_KB:
                raise InvalidInput(
                    f"host {host_name}: {which} {value} KB of frame {frame.frame_id} is more than any host has"
                )


def wrong_id(value: str) -> str:
    """What is wrong with a proc's or a frame's id; empty when nothing is. No id at all is not wrong."""
    return "" if len(value) <= LONGEST_ID and value.isprintable() else f"{value[:_SHOWN]!r} is not an id"


def read_host(host: report_pb2.RenderHost) -> ReportedHost:
    """The checked report of a host; raises InvalidInput with host and which."""
    full_name = host.name.strip()
    name = _checked_name(full_name)
    _check_numbers(host, full_name)
    for which, value in (("facility", host.facility), ("SP_OS", host.attributes.get("SP_OS", ""))):
        if "\0" in value:
            raise InvalidInput(f"host {full_name}: {which} {value[:_SHOWN]!r} has a NUL in it")
    os_name = host.attributes.get("SP_OS", "").strip() or _DEFAULT_OS
    tags = tuple(dict.fromkeys(tag.strip() for tag in host.tags if tag.strip()))
    memory_kb = bookable_memory_kb(host.total_mem, is_64bit="64bit" in tags, nimby=host.nimby_enabled)
    if memory_kb <= 0:
        raise InvalidInput(
            f"host {full_name}: total_mem {host.total_mem} KB leaves nothing to book after what the system keeps"
        )
    return ReportedHost(
        full_name,
        name,
        host.facility.strip(),
        HostSize(
            host.num_procs,
            host.num_procs * host.cores_per_proc,
            memory_kb,
            host.num_gpus,
            host.total_gpu_mem,
            host.nimby_enabled,
        ),
        _status(host, os_name),
        HardwareState(host_pb2.HardwareState.Name(host.state)) if 0 <= host.state <= 4 else HardwareState.UP,
        host.nimby_locked,
        ThreadMode.ALL if host.nimby_enabled else ThreadMode.AUTO,
        tuple(tag for tag in tags if _usable(tag)),
        tuple(tag[:_SHOWN] for tag in tags if not _usable(tag)),
    )


def short_name(full_name: str) -> str:
    """The first label of a host name; addresses stay whole."""
    try:
        ipaddress.ip_address(full_name)
    except ValueError:
        return full_name.partition(".")[0]
    return full_name


def bookable_memory_kb(total_kb: int, *, is_64bit: bool, nimby: bool) -> int:
    """What may be booked: whole GB (rounded up on hosts tagged 64bit, else down) less half a GB for the system.

    Of a workstation (nimby) two thirds of that, plus the half GB. A host of less than 1 GB that is not 64bit has
    nothing (the result is not positive).
    """
    gigabytes = total_kb / _KB_PER_GB
    memory_kb = (math.ceil(gigabytes) if is_64bit else math.floor(gigabytes)) * _KB_PER_GB - SYSTEM_MEMORY_KB
    return int(memory_kb / 1.5) + SYSTEM_MEMORY_KB if nimby and memory_kb > 0 else memory_kb


def next_hardware_state(
    current: HardwareState, reported: HardwareState, *, boot: bool, temp_full: bool, marked: bool
) -> HardwareState:
    """The state after a report. ``marked``: the host is in REPAIR because its temporary directory was full.

    A full temporary directory sends an UP host to REPAIR and a marked one comes back by itself; any other REPAIR is a
    person's and stays. DOWN is over with the first report, a reboot only with a boot report.
    """
    if temp_full and current is HardwareState.UP:
        return HardwareState.REPAIR
    match current:
        case HardwareState.REPAIR:
            return HardwareState.UP if marked and not temp_full else current
        case HardwareState.DOWN:
            return HardwareState.UP
        case HardwareState.REBOOTING | HardwareState.REBOOT_WHEN_IDLE:
            return HardwareState.UP if boot else current
        case _:
            return reported


def next_lock_state(current: LockState, *, nimby_locked: bool) -> LockState:
    """The lock after a report: only a user's taking the workstation back and giving it again change it."""
    if nimby_locked and current is LockState.OPEN:
        return LockState.NIMBY_LOCKED
    if not nimby_locked and current is LockState.NIMBY_LOCKED:
        return LockState.OPEN
    return current


def _usable(tag: str) -> bool:
    return len(tag) <= LONGEST_TAG and tag.isprintable()


def _checked_name(full_name: str) -> str:
    if not full_name or not full_name.isprintable() or any(letter.isspace() for letter in full_name):
        raise InvalidInput(f"host name {full_name[:_SHOWN]!r}: a host needs a name without spaces")
    name = short_name(full_name)
    if not name:
        raise InvalidInput(f"host name {full_name[:_SHOWN]!r}: a host's name never begins with a dot")
    if len(name) > LONGEST_NAME:
        raise InvalidInput(f"host name {full_name[:_SHOWN]!r}: {len(name)} characters, {LONGEST_NAME} are possible")
    if len(full_name) > LONGEST_FULL_NAME:
        raise InvalidInput(
            f"host name {full_name[:_SHOWN]!r}: {len(full_name)} characters with domain,"
            f" {LONGEST_FULL_NAME} are possible"
        )
    return name


def _check_numbers(host: report_pb2.RenderHost, name: str) -> None:
    centicores = host.num_procs * host.cores_per_proc
    if host.num_procs <= 0 or host.cores_per_proc <= 0:
        raise InvalidInput(
            f"host {name}: num_procs {host.num_procs} x cores_per_proc {host.cores_per_proc} is not a host with cores"
        )
    if centicores > _MOST_CENTICORES:
        raise InvalidInput(f"host {name}: {centicores} centicores are more than any host has")
    if host.total_mem <= 0:
        raise InvalidInput(f"host {name}: total_mem {host.total_mem} KB is not a host's memory")
    for which in ("free_mem", "total_swap", "free_swap", "total_mcp", "free_mcp", "num_gpus", "total_gpu_mem"):
        value = getattr(host, which)
        if value < 0:
            raise InvalidInput(f"host {name}: {which} {value} is negative")
    for which, most in (
        ("total_mem", MOST_KB),
        ("total_swap", MOST_KB),
        ("free_swap", MOST_KB),
        ("total_gpu_mem", MOST_KB),
        ("num_gpus", _MOST_GPUS),
    ):
        value = getattr(host, which)
        if value > most:
            raise InvalidInput(f"host {name}: {which} {value} is more than any host has")


def _status(host: report_pb2.RenderHost, os_name: str) -> HostStatus:
    return HostStatus(
        memory_total=host.total_mem,
        memory_free=min(host.free_mem, host.total_mem),
        swap_total=host.total_swap,
        swap_free=host.free_swap,
        temp_total=host.total_mcp,
        temp_free=host.free_mcp,
        gpu_memory_total=host.total_gpu_mem,
        gpu_memory_free=max(0, min(host.free_gpu_mem, host.total_gpu_mem)),
        load=max(0, host.load),
        booted_at=max(0, min(host.boot_time, _LATEST_EPOCH)),
        os=os_name[:LONGEST_OS],
    )


# Whether a process a host reports is owned by a proc, and what to do if it is not (I5). Pure.
#
# RQD knows frames by frame id only, so a kill must never meet a newer run of the same frame on the same host. The rules
# below only kill where that cannot be: the frame belongs to another host, or has been what it is for longer than a
# report can be old. Whatever has to wait is killed by the next report.

SETTLED_SECONDS = 4.0
"""A frame or proc unchanged for this long is what it was when the report was made: a report older than that (it had to
queue) is not used for verification, and hosts report every five seconds at most."""

_KILLS_IN_A_WINDOW, _KILL_WINDOW_SECONDS = 3, 180.0
_LARGEST_KB = 2**62


class OrphanCheck(StrEnum):
    """What is to be done with a reported process: it is OWNED by its proc, an orphan to KILL, or has to WAIT."""

    OWNED = "owned"
    KILL = "kill"
    WAIT = "wait"


def verify(run: ReportedRun, proc_id: str, frame_id: str, host_id: str) -> tuple[OrphanCheck, str]:
    """Judge one reported process of a host; with why it is not owned, for the kill message and the log."""
    if run.proc_id is not None and run.proc_frame_id == frame_id:
        if run.job_state is JobState.FINISHED:
            return OrphanCheck.KILL, "its job is finished"
        return OrphanCheck.OWNED, ""
    if run.owner_proc_id is not None and run.owner_host_id == host_id:
        return _settled(run.owner_age, f"proc {run.owner_proc_id} has the frame on this host, not {proc_id}")
    if run.owner_proc_id is not None:
        return OrphanCheck.KILL, f"proc {run.owner_proc_id} has the frame on another host"
    if run.frame_state is None:
        return OrphanCheck.KILL, "its frame does not exist"
    return _settled(run.frame_age, f"no proc has its frame, which is {run.frame_state.value}")


def overdue(run: ReportedRun, reported: report_pb2.RunningFrameInfo, *, now: float) -> str:
    """Why a running frame has to be killed for its layer's time limits; empty when it has not.

    ``now`` is epoch seconds; RQD reports start_time in milliseconds and llu_time in seconds.
    """
    minutes = (now - reported.start_time / 1000) / 60
    if run.timeout_minutes > 0 and reported.start_time > 0 and minutes > run.timeout_minutes:
        return f"it has run for {minutes:.0f} minutes of {run.timeout_minutes}"
    if run.timeout_llu_minutes > 0 and reported.llu_time > 0:
        silent = int(now - reported.llu_time) // 60
        if silent > run.timeout_llu_minutes - 1:
            return f"its log has not grown for {silent} minutes of {run.timeout_llu_minutes}"
    return ""


def usage(run: ReportedRun, reported: report_pb2.RunningFrameInfo) -> RunUsage:
    """The numbers of a running frame. Negative ones, which RQD reports while it cannot tell, become zero."""
    return RunUsage(
        reported.resource_id,
        reported.frame_id,
        run.layer_id,
        run.job_id,
        _kb(reported.rss),
        _kb(reported.max_rss),
        _kb(reported.pss),
        _kb(reported.max_pss),
        _kb(reported.vsize),
        _kb(reported.max_vsize),
        _kb(reported.used_gpu_memory),
        _kb(reported.max_used_gpu_memory),
        _kb(reported.used_swap_memory),
        max(0, min(reported.llu_time, _LATEST_EPOCH)),
    )


class KillThrottle:
    """At most three kills of one frame on one host in three minutes. Thread-safe."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._tries: dict[tuple[str, str], list[float]] = {}
        self._forget_at = 0.0

    def allows(self, host_name: str, frame_id: str) -> bool:
        """Whether a kill may be sent now; if so it is counted."""
        now = self._clock()
        since = now - _KILL_WINDOW_SECONDS
        with self._lock:
            recent = [at for at in self._tries.get((host_name, frame_id), ()) if at > since]
            if len(recent) >= _KILLS_IN_A_WINDOW:
                return False
            self._tries[host_name, frame_id] = [*recent, now]
            if now >= self._forget_at:
                self._forget_at = now + _KILL_WINDOW_SECONDS
                self._tries = {key: tries for key, tries in self._tries.items() if tries[-1] > since}
            return True


class Absences:
    """How many reports in a row have not named a proc of their host."""

    def __init__(self) -> None:
        self._counts: dict[str, dict[str, int]] = {}

    def missing(self, host_id: str, proc_ids: Sequence[str]) -> list[str]:
        """Count this report's missing procs of a host; returns those missing from two reports in a row."""
        before = self._counts.pop(host_id, {})
        counts = {proc_id: before.get(proc_id, 0) + 1 for proc_id in proc_ids}
        if counts:
            self._counts[host_id] = counts
        return [proc_id for proc_id, count in counts.items() if count >= 2]


def _settled(age: float, reason: str) -> tuple[OrphanCheck, str]:
    return OrphanCheck.KILL if age >= SETTLED_SECONDS else OrphanCheck.WAIT, reason


def _kb(value: int) -> int:
    return max(0, min(value, _LARGEST_KB))


_log = structlog.get_logger(__name__)

RECONCILE_SECONDS = 600.0
"""How often a host's idle resources are compared with its procs."""

OLDEST_FOR_VERIFICATION_SECONDS = SETTLED_SECONDS - 1.0
"""A status report that waited longer than this only brings numbers; nothing is killed or missed because of it."""


LONGEST_SETUP_SECONDS = 120.0
"""RQD lists a frame once its log is open, which takes ten seconds when the directory does not answer."""

KILL_THREADS = 8


class KillPool:
    """Threads in which processes are ended, so that no host report waits for an RQD. Thread-safe.

    A host has one job at a time; what a job leaves undone is found again by the next report of its host.
    """

    def __init__(self, threads: int = KILL_THREADS) -> None:
        self._threads = ThreadPoolExecutor(threads, thread_name_prefix="kills")
        self._lock = threading.Lock()
        self._hosts: set[str] = set()

    def submit(self, host_id: str, work: Callable[[], None]) -> bool:
        """Have ``work`` done for a host without being waited for; False when that host's last is not over."""
        with self._lock:
            if host_id in self._hosts:
                return False
            self._threads.submit(self._run, host_id, work)
            self._hosts.add(host_id)
            return True

    def close(self) -> None:
        """Drop what waits; what is under way ends by itself (rqd.kill_timeout)."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _run(self, host_id: str, work: Callable[[], None]) -> None:
        try:
            work()
        except Exception as error:
            (_log.warning if database_away(error) else _log.exception)("kills_failed", host=host_id, error=str(error))
        finally:
            with self._lock:
                self._hosts.discard(host_id)


@dataclass(frozen=True, slots=True)
class HostReportResult:
    """What one report led to. ``changed``: booking sees the host differently now."""

    host_id: str
    changed: bool


@dataclass(slots=True)
class _Seen:
    """The running frames of one report, after verification."""

    owned: list[tuple[report_pb2.RunningFrameInfo, ReportedRun]] = field(default_factory=list)
    kills: list[tuple[str, str]] = field(default_factory=list)


class HostReports:
    """Handles the reports of every host. Thread-safe as long as one host's reports come one at a time.

    Whatever waits for an RQD is done in the ``background`` (`KillPool.submit`).
    """

    def __init__(
        self,
        releaser: Releaser,
        settings: Release,
        *,
        killer: RqdKiller,
        background: Callable[[str, Callable[[], None]], bool],
    ) -> None:
        self._releaser = releaser
        self._engine = releaser.engine
        self._settings = settings
        self._killer = killer
        self._background = background
        self._counts = releaser.counts
        self._clock = releaser.clock
        self._throttle = KillThrottle(self._clock)
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
        return HostReportResult(result.host_id, result.changed or reconciled)

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
            self._releaser.publish_hosts([row.id])
        return HostReportResult(row.id, changed)

    def _create(self, connection: Connection, host: ReportedHost) -> HostRow:
        """A new host in the allocation its tags name, or in the default one."""
        facility = host.facility or self._settings.facility
        alloc = reports.find_alloc(connection, facility, host.tags, _DEFAULT_ALLOC_TAG)
        if alloc is None:
            raise InvalidInput(
                f"host {host.full_name}: no allocation for facility {facility[:60]!r} and tags {list(host.tags[:20])},"
                f" no allocation tagged {_DEFAULT_ALLOC_TAG!r} there and no default allocation"
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
            rows = reports.read_reported(connection, named)
        now = self._clock()
        for frame, row in zip(report.frames, rows, strict=True):
            check, reason = verify(row, frame.resource_id, frame.frame_id, host_id)
            if check is OrphanCheck.OWNED:
                seen.owned.append((frame, row))
                late = overdue(row, frame, now=now)
                if late:
                    seen.kills.append((frame.frame_id, late))
            elif check is OrphanCheck.KILL:
                self._counts.add("unowned_process")
                seen.kills.append((frame.frame_id, reason))
        return seen

    def _write_usage(self, seen: _Seen, host_id: str, host: ReportedHost) -> None:
        if not seen.owned:
            return
        with self._engine.begin() as connection:
            reports.update_runs(connection, [usage(row, frame) for frame, row in seen.owned])
        growing = {
            frame.resource_id: frame.rss
            for frame, row in seen.owned
            if frame.rss > row.proc_memory_kb and not row.proc_local
        }
        if not growing or host.size.nimby:
            return
        with self._engine.begin() as connection:
            grown = reports.grow_reservations(connection, host_id, growing)
        if grown:
            self._counts.add("reservation_grown", len(grown))
            self._releaser.publish_hosts([host_id])
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
                        proc.frame_id or "",
                        exit_status=ExitStatus.FRAME_ORPHAN,
                        pinged_at=proc.pinged_at,
                        reason="its host no longer reports it",
                    )
                )
        ended = self._releaser.end_lost(gone)
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
            unreported = reports.unreported_procs(
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
        return fate is Fate.NOT_RUNNING

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
            self._releaser.publish_hosts([host_id])
        return wrong
