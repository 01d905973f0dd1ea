"""What a report says about its host, checked and turned into what the database keeps (facts F, HostReport). Pure.

A host that reports nonsense is refused with the field's name, before anything of its report is used: one with zero
cores would look bookable, one with negative memory would make every booking on it fail.
"""

from __future__ import annotations

import ipaddress
import math
from collections.abc import Iterable
from dataclasses import dataclass

from opencue_proto import host_pb2, report_pb2

from opencue_sched.domain.errors import InvalidInput
from opencue_sched.domain.states import HardwareState, LockState, ThreadMode
from opencue_sched.store.reports import HostSize, HostStatus

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
    for field, values, most in (
        ("tags", report.host.tags, MOST_TAGS),
        ("frames", getattr(report, "frames", ()), MOST_FRAMES),
    ):
        if len(values) > most:
            raise InvalidInput(f"host {name}: {len(values)} {field}, {most} are possible")


def check_frames(frames: Iterable[report_pb2.RunningFrameInfo], host_name: str) -> None:
    """Refuse (InvalidInput) running frames whose ids cannot be ids or whose memory no host has."""
    for frame in frames:
        for field in ("resource_id", "frame_id"):
            wrong = wrong_id(getattr(frame, field))
            if wrong:
                raise InvalidInput(f"host {host_name}: {field} {wrong}")
        for field in ("rss", "max_rss", "pss", "max_pss", "used_gpu_memory", "max_used_gpu_memory"):
            value = getattr(frame, field)
            if value > MOST_KB:
                raise InvalidInput(
                    f"host {host_name}: {field} {value} KB of frame {frame.frame_id} is more than any host has"
                )


def wrong_id(value: str) -> str:
    """What is wrong with a proc's or a frame's id; empty when nothing is. No id at all is not wrong."""
    return "" if len(value) <= LONGEST_ID and value.isprintable() else f"{value[:_SHOWN]!r} is not an id"


def read_host(host: report_pb2.RenderHost) -> ReportedHost:
    """The checked report of a host; raises InvalidInput with host and field."""
    full_name = host.name.strip()
    name = _checked_name(full_name)
    _check_numbers(host, full_name)
    for field, value in (("facility", host.facility), ("SP_OS", host.attributes.get("SP_OS", ""))):
        if "\0" in value:
            raise InvalidInput(f"host {full_name}: {field} {value[:_SHOWN]!r} has a NUL in it")
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
    for field in ("free_mem", "total_swap", "free_swap", "total_mcp", "free_mcp", "num_gpus", "total_gpu_mem"):
        value = getattr(host, field)
        if value < 0:
            raise InvalidInput(f"host {name}: {field} {value} is negative")
    for field, most in (
        ("total_mem", MOST_KB),
        ("total_swap", MOST_KB),
        ("free_swap", MOST_KB),
        ("total_gpu_mem", MOST_KB),
        ("num_gpus", _MOST_GPUS),
    ):
        value = getattr(host, field)
        if value > most:
            raise InvalidInput(f"host {name}: {field} {value} is more than any host has")


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
