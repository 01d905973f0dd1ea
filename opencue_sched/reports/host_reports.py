"""Boot and status reports: the host's row first, then the processes the report names."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from time import monotonic
from typing import Any

import structlog
from opencue_proto import host_pb2, report_pb2
from sqlalchemy import Connection

from opencue_sched.domain.clusters import ClusterKind, normalise_tag
from opencue_sched.domain.names import short_name
from opencue_sched.domain.states import HardwareState, JobState, LockState
from opencue_sched.domain.units import KB_PER_GIB
from opencue_sched.errors import InvalidInput
from opencue_sched.reports.completion import Releaser, warn_of_astray
from opencue_sched.reports.run_ends import overdue
from opencue_sched.rqd.kill import RqdKiller
from opencue_sched.store import reported_runs, reports
from opencue_sched.store.hosts import RQD_LOCK_SOURCE, set_lock, set_state, set_tags
from opencue_sched.store.procs import Run, read_runs
from opencue_sched.store.reports import HostRow, HostSize
from opencue_sched.store.schema import read_origin

_log = structlog.get_logger(__name__)

# What a report says about its host, checked and turned into what the database keeps. Pure.
#
# A host that reports nonsense is refused, with its name and the field, before anything of its report is used: one with
# zero cores would look bookable, one with negative memory would make every booking on it fail.

LONGEST_NAME, LONGEST_FULL_NAME, LONGEST_TAG, LONGEST_OS, LONGEST_ID = 45, 128, 45, 32, 36
"""Widths of host.str_name, host.str_fqdn, host_tag.str_tag, host_stat.str_os and proc.pk_proc."""

SYSTEM_MEMORY_KB = 524_288
"""What a host keeps for itself."""

LEAST_FREE_TEMP = 0.05
"""Share of the temporary directory that must be free, or the host goes to REPAIR."""

_NIMBY_SOURCE = "NIMBY"
_DEFAULT_OS = "rhel40"
_DEFAULT_FACILITY = "local"
_DEFAULT_ALLOC_TAG = "general"
_MOST_CENTICORES = 10_000_000
_SHOWN = 60
_LATEST_EPOCH = 4_102_444_800
# 256 TB: memory that neither a host nor a frame has. More would raise the minimum of a layer beyond every host.
_MOST_KB = 2**38

_RANGES = {
    "num_procs": (1, _MOST_CENTICORES),
    "cores_per_proc": (1, _MOST_CENTICORES),
    "total_mem": (1, _MOST_KB),
    "free_mem": (0, math.inf),
    "total_swap": (0, _MOST_KB),
    "free_swap": (0, _MOST_KB),
    "total_mcp": (0, math.inf),
    "free_mcp": (0, math.inf),
    "num_gpus": (0, 1_000),
    "total_gpu_mem": (0, _MOST_KB),
}
"""The least and the most that a host's report may say."""
_FRAME_MEMORY = ("rss", "max_rss", "pss", "max_pss", "used_gpu_memory", "max_used_gpu_memory")
_VIRTUAL_MEMORY = ("vsize", "max_vsize", "used_swap_memory")


@dataclass(frozen=True, slots=True)
class ReportedHost:
    """A host's report, checked; ``status`` is what `reports.update_status` takes. ``tags`` are the report's own,
    trimmed, without those that are too long or unprintable. ``locked_centicores`` of it are locked on the RQD itself;
    None: the report does not say."""

    full_name: str
    name: str
    facility: str
    size: HostSize
    status: Mapping[str, Any]
    state: HardwareState
    nimby_locked: bool
    tags: tuple[str, ...]
    locked_centicores: int | None = None

    @property
    def all_locked(self) -> bool:
        """Whether all cores are locked on the RQD itself."""
        return self.locked_centicores is not None and self.locked_centicores >= self.size.centicores

    @property
    def temp_full(self) -> bool:
        """Whether too little of the temporary directory is free. Unknown sizes and Windows are never full."""
        if self.status["total_mcp"] <= 0 or self.status["os"].lower() == "windows":
            return False
        return bool(self.status["free_mcp"] / self.status["total_mcp"] < LEAST_FREE_TEMP)


def check_frame(frame: report_pb2.RunningFrameInfo, where: str, *, needs_ids: bool = False) -> None:
    """Refuse (InvalidInput) a frame whose ids cannot be ids or whose memory no host has. ``where`` begins its text."""
    for key in ("resource_id", "frame_id"):
        value = getattr(frame, key)
        if len(value) > LONGEST_ID or not value.isprintable() or (needs_ids and not value):
            raise InvalidInput(f"{where}{key} {value[:_SHOWN]!r} is not an id")
    for key in _FRAME_MEMORY:
        value = getattr(frame, key)
        if value > _MOST_KB:
            raise InvalidInput(f"{where}{key} {value} KB of frame {frame.frame_id} is more than any host has")


def read_host(host: report_pb2.RenderHost) -> ReportedHost:
    """The checked report of a host; raises InvalidInput with host and field."""
    full_name = host.name.strip()
    name = checked_name(full_name)
    where = f"host {full_name}"
    for key, (least, most) in _RANGES.items():
        value = getattr(host, key)
        if not least <= value <= most:
            raise InvalidInput(f"{where}: {key} {value} is {'less' if value < least else 'more'} than any host has")
    centicores = host.num_procs * host.cores_per_proc
    if centicores > _MOST_CENTICORES:
        raise InvalidInput(f"{where}: {centicores} centicores are more than any host has")
    os_name = host.attributes.get("SP_OS", "").strip() or _DEFAULT_OS
    for key, text in (("facility", host.facility), ("SP_OS", os_name)):
        if "\0" in text:
            raise InvalidInput(f"{where}: {key} {text[:_SHOWN]!r} has a NUL in it")
    tags = tuple(dict.fromkeys(tag.strip() for tag in host.tags if tag.strip()))
    memory_kb = bookable_memory_kb(host.total_mem, is_64bit="64bit" in tags, nimby=host.nimby_enabled)
    if memory_kb <= 0:
        raise InvalidInput(f"{where}: total_mem {host.total_mem} KB leaves nothing to book after what the system keeps")
    size = HostSize(host.num_procs, centicores, memory_kb, host.num_gpus, host.total_gpu_mem, host.nimby_enabled)
    status = {name: getattr(host, name) for name in _RANGES} | {
        "free_mem": min(host.free_mem, host.total_mem),
        "free_gpu_mem": max(0, min(host.free_gpu_mem, host.total_gpu_mem)),
        "load": max(0, host.load),
        "boot_time": max(0, min(host.boot_time, _LATEST_EPOCH)),
        "os": os_name[:LONGEST_OS],
    }
    state = HardwareState(host_pb2.HardwareState.Name(host.state)) if 0 <= host.state <= 4 else HardwareState.UP
    usable = tuple(tag for tag in tags if len(tag) <= LONGEST_TAG and tag.isprintable())
    facility = host.facility.strip()
    return ReportedHost(full_name, name, facility, size, status, state, host.nimby_locked, usable)


def read_report(report: report_pb2.HostReport | report_pb2.BootReport) -> ReportedHost:
    """The checked report of a host with what is locked on its RQD; raises InvalidInput as `read_host`."""
    host = read_host(report.host)
    cores = report.core_info
    if cores.total_cores <= 0:  # it has no such part, or is of an RQD that does not count its cores
        return host
    # Of as many cores as the host is known to have, in the part that the RQD says.
    part = max(0, min(cores.locked_cores, cores.total_cores)) / cores.total_cores
    return replace(host, locked_centicores=math.ceil(part * host.size.centicores))


def next_lock(lock: str, source: str | None, host: ReportedHost) -> tuple[LockState, str]:
    """The lock of a host after a report, and its source. A lock of a person's stays; a user who takes a workstation
    back comes before cores that are locked on the RQD; and only what the RQD locked opens when it is not any more."""
    by_rqd = lock == LockState.LOCKED and source == RQD_LOCK_SOURCE
    if lock == LockState.LOCKED and not by_rqd:
        return LockState.LOCKED, source or ""
    if host.nimby_locked:
        return LockState.NIMBY_LOCKED, _NIMBY_SOURCE
    if host.all_locked or (by_rqd and host.locked_centicores is None):
        return LockState.LOCKED, RQD_LOCK_SOURCE
    return LockState.OPEN, RQD_LOCK_SOURCE if by_rqd else _NIMBY_SOURCE


def bookable_memory_kb(total_kb: int, *, is_64bit: bool, nimby: bool) -> int:
    """What may be booked: whole GB (rounded up on hosts tagged 64bit, else down) less half a GB for the system.

    Of a workstation (nimby) two thirds of that, plus the half GB. A host of less than 1 GB that is not 64bit has
    nothing (the result is not positive).
    """
    gigabytes = total_kb / KB_PER_GIB
    memory_kb = (math.ceil(gigabytes) if is_64bit else math.floor(gigabytes)) * KB_PER_GIB - SYSTEM_MEMORY_KB
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


def checked_name(full_name: str) -> str:
    """The short name. Raises InvalidInput."""
    shown = f"host name {full_name[:_SHOWN]!r}"
    if not full_name or not full_name.isprintable() or " " in full_name:
        raise InvalidInput(f"{shown}: a host needs a name without spaces")
    name = short_name(full_name)
    if not name:
        raise InvalidInput(f"{shown}: a host's name never begins with a dot")
    for text, which, most in ((name, "", LONGEST_NAME), (full_name, " with domain", LONGEST_FULL_NAME)):
        if len(text) > most:
            raise InvalidInput(f"{shown}: {len(text)} characters{which}, {most} are possible")
    return name


# Whether a process a host reports is owned by a proc, and what to do if it is not (I5). Pure.
#
# RQD knows frames by frame id only, so a kill must never meet a newer run of the same frame on the same host. The rules
# below only kill where that cannot be: the frame belongs to another host, or has been what it is for longer than a
# report can be old. Whatever has to wait is killed by the next report.

SETTLED_SECONDS = 4.0
"""A frame or proc unchanged for this long is what it was when the report was made: a report older than that (it had to
queue) is not used for verification, and hosts report every five seconds at most."""


def unowned(run: Run, proc_id: str, host_id: str) -> tuple[str, float]:
    """Why no proc owns a reported process of a host, empty when one does, and for how many seconds that has been so:
    infinity where the process can be killed at once."""
    if run.proc_id and run.frame_id and run.proc_frame_id == run.frame_id:
        return ("its job is finished" if run.job_state == JobState.FINISHED else ""), math.inf
    if run.owner_proc_id and run.owner_host_id == host_id:
        return f"proc {run.owner_proc_id} has the frame on this host, not {proc_id}", run.owner_age
    if run.owner_proc_id:
        return f"proc {run.owner_proc_id} has the frame on another host", math.inf
    if not run.frame_state:
        return "its frame does not exist", math.inf
    return f"no proc has its frame, which is {run.frame_state}", run.frame_age


def usage(run: Run, reported: report_pb2.RunningFrameInfo) -> dict[str, Any]:
    """What `reports.update_runs` takes: KB, and ``llu_time``, the epoch of the last log line, 0 when unknown. Negative
    numbers, which RQD reports while it cannot tell, become zero."""
    return {
        "resource_id": reported.resource_id,
        "frame_id": reported.frame_id,
        "layer_id": run.layer_id,
        "job_id": run.job_id,
        **{name: max(0, getattr(reported, name)) for name in (*_FRAME_MEMORY, *_VIRTUAL_MEMORY)},
        "llu_time": max(0, min(reported.llu_time, _LATEST_EPOCH)),
    }


class LogSilences:
    """How long the logs of running frames have shown the same time, by the clock of this process.

    A log's time is by the clock of its host, or of a file server: it is compared with nothing but itself. So a log is
    silent since its present time was first seen here, and in a service that starts every silence begins anew.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._seen: dict[str, dict[str, tuple[int, float]]] = {}
        """Of each host, by proc: the log's time and when it was first seen. The thread that handles the report of a
        host replaces what is known of it as a whole; any thread reads."""

    def note(self, host_name: str, frames: Sequence[report_pb2.RunningFrameInfo]) -> None:
        """Keep the times of the logs of everything that runs on a host, in place of what was known of it."""
        now, seen = self._clock(), self._seen.get(host_name, {})
        shown: dict[str, tuple[int, float]] = {}
        for frame in frames:
            before = seen.get(frame.resource_id)
            known = before is not None and before[0] == frame.llu_time
            shown[frame.resource_id] = before if before and known else (frame.llu_time, now)
        self._seen[host_name] = shown

    def seconds(self, host_name: str, frame: report_pb2.RunningFrameInfo) -> float:
        """How long a frame's log has shown the time that it is reported with; 0 when that is new, or unknown."""
        llu_time, since = self._seen.get(host_name, {}).get(frame.resource_id, (0, 0.0))
        return self._clock() - since if 0 < llu_time == frame.llu_time else 0.0


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
