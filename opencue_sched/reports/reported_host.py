"""What a report says about its host, checked and turned into what the database keeps. Pure.

A host that reports nonsense is refused, with its name and the field, before anything of its report is used: one with
zero cores would look bookable, one with negative memory would make every booking on it fail.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from opencue_proto import host_pb2, report_pb2

from opencue_sched.domain.names import short_name
from opencue_sched.domain.states import HardwareState, LockState
from opencue_sched.domain.units import KB_PER_GIB
from opencue_sched.errors import InvalidInput
from opencue_sched.store.hosts import RQD_LOCK_SOURCE
from opencue_sched.store.reports import HostSize

LONGEST_NAME, LONGEST_FULL_NAME, LONGEST_TAG, LONGEST_OS, LONGEST_ID = 45, 128, 45, 32, 36
"""Widths of host.str_name, host.str_fqdn, host_tag.str_tag, host_stat.str_os and proc.pk_proc."""

SYSTEM_MEMORY_KB = 524_288
"""The memory that a host keeps for its system."""

LEAST_FREE_TEMP = 0.05
"""The share of the temporary directory, from 0 to 1, that must be free, or the host goes to REPAIR."""

_NIMBY_SOURCE = "NIMBY"
"""host.str_lock_source of a host that was locked because a person uses the machine, or that was never locked."""
_DEFAULT_OS = "rhel40"
"""The operating system of a host that reports none, as with Cuebot."""
_MOST_CENTICORES = 10_000_000
"""The most centicores of a host that are believed."""
SHOWN_CHARACTERS = 60
"""How many characters of a wrong value an error shows: a value may have millions."""
LATEST_EPOCH = 4_102_444_800
"""The latest boot time that is believed, in epoch seconds: the beginning of 2100."""
MOST_KB = 2**38
"""The most memory of a host or a frame that is believed, 256 TB. More would raise the minimum of a layer beyond every
host."""

_RANGES = {
    "num_procs": (1, _MOST_CENTICORES),
    "cores_per_proc": (1, _MOST_CENTICORES),
    "total_mem": (1, MOST_KB),
    "free_mem": (0, math.inf),
    "total_swap": (0, MOST_KB),
    "free_swap": (0, MOST_KB),
    "total_mcp": (0, math.inf),
    "free_mcp": (0, math.inf),
    "num_gpus": (0, 1_000),
    "total_gpu_mem": (0, MOST_KB),
}
"""The least and the most that a host's report may say."""


@dataclass(frozen=True, slots=True)
class ReportedHost:
    """A host's report, checked."""

    full_name: str
    name: str
    facility: str
    size: HostSize
    status: Mapping[str, Any]
    """What `reports.update_statuses` takes."""
    state: HardwareState
    nimby_locked: bool
    tags: tuple[str, ...]
    """The report's own tags, trimmed, without those that are too long or unprintable."""
    locked_centicores: int | None = None
    """How many centicores of the host are locked on the RQD itself; None: the report does not say."""

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
            raise InvalidInput(f"{where}: {key} {text[:SHOWN_CHARACTERS]!r} has a NUL in it")
    tags = tuple(dict.fromkeys(tag.strip() for tag in host.tags if tag.strip()))
    memory_kb = bookable_memory_kb(host.total_mem, is_64bit="64bit" in tags, nimby=host.nimby_enabled)
    if memory_kb <= 0:
        raise InvalidInput(f"{where}: total_mem {host.total_mem} KB leaves nothing to book after what the system keeps")
    size = HostSize(host.num_procs, centicores, memory_kb, host.num_gpus, host.total_gpu_mem, host.nimby_enabled)
    status = {name: getattr(host, name) for name in _RANGES} | {
        "free_mem": min(host.free_mem, host.total_mem),
        "free_gpu_mem": max(0, min(host.free_gpu_mem, host.total_gpu_mem)),
        "load": max(0, host.load),
        "boot_time": max(0, min(host.boot_time, LATEST_EPOCH)),
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
    # The RQD counts its own cores: its share of locked ones is applied to the cores that the host is known to have.
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

    A workstation (nimby) offers two thirds of that, plus the half GB. A host of less than 1 GB that is not 64bit offers
    nothing: the result is not positive.
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
    """The short name of a host that reports this name. Raises InvalidInput for a name that no host can have."""
    shown = f"host name {full_name[:SHOWN_CHARACTERS]!r}"
    if not full_name or not full_name.isprintable() or " " in full_name:
        raise InvalidInput(f"{shown}: a host needs a name without spaces")
    name = short_name(full_name)
    if not name:
        raise InvalidInput(f"{shown}: a host's name never begins with a dot")
    for text, which, most in ((name, "", LONGEST_NAME), (full_name, " with domain", LONGEST_FULL_NAME)):
        if len(text) > most:
            raise InvalidInput(f"{shown}: {len(text)} characters{which}, {most} are possible")
    return name
