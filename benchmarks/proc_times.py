"""CPU seconds and memory of processes, read from /proc (Linux)."""

from __future__ import annotations

import os
import time
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

BENCHMARK = "benchmark"

_PROC = Path("/proc")
_TICK = os.sysconf("SC_CLK_TCK")
# Of the fields behind the command's closing parenthesis, counted from 0 (proc(5)).
_PARENT, _FIRST_TIME, _LAST_TIME = 1, 11, 14
# user nice system idle iowait irq softirq steal: the third and fourth of these are not work.
_NOT_BUSY = (3, 4)
_MACHINE_TIMES = 8


@dataclass(frozen=True, slots=True)
class _Process:
    parent: int
    seconds: float


def cpu_seconds(roots: Iterable[int]) -> float:
    """CPU time so far of these processes and all below them, with those that ended and were waited for.

    Processes that do not exist count nothing.
    """
    table = _read_processes()
    children: dict[int, list[int]] = defaultdict(list)
    for pid, process in table.items():
        children[process.parent].append(pid)
    waiting, seen = list(roots), set()
    total = 0.0
    while waiting:
        pid = waiting.pop()
        if pid in seen or pid not in table:
            continue
        seen.add(pid)
        total += table[pid].seconds
        waiting += children[pid]
    return total


def parent_of(pid: int) -> int:
    """The parent of a process. Raises OSError when there is no such process."""
    return _read(pid).parent


def resident_mb(pid: int) -> int:
    """The memory that a process holds. Raises OSError when there is no such process."""
    for line in (_PROC / str(pid) / "status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) // 1024
    return 0


def busy_seconds() -> float:
    """CPU time that the whole machine has spent on work so far."""
    times = (_PROC / "stat").read_text().split("\n", 1)[0].split()[1 : 1 + _MACHINE_TIMES]
    return sum(int(value) for place, value in enumerate(times) if place not in _NOT_BUSY) / _TICK


@dataclass(frozen=True, slots=True)
class Reading:
    """CPU seconds so far: of each group of processes, and of the whole machine."""

    groups: Mapping[str, float]
    machine: float

    def since(self, before: Reading) -> Reading:
        spent = {name: seconds - before.groups.get(name, 0.0) for name, seconds in self.groups.items()}
        return Reading(spent, self.machine - before.machine)

    def micros(self, frames: int) -> dict[str, float]:
        """Microseconds of each group for each of so many frames."""
        return {name: round(1e6 * seconds / max(1, frames), 1) for name, seconds in self.groups.items()}

    def others_percent(self, seconds: float) -> int:
        """How much of the machine everything but the groups took for ``seconds``: above 10, figures are rough."""
        cores = os.cpu_count() or 1
        return round(100 * max(0.0, self.machine - sum(self.groups.values())) / (seconds * cores))


def read(groups: Mapping[str, Iterable[int]]) -> Reading:
    """CPU seconds so far of named groups of process trees, given by their roots, and of this process."""
    spent = {name: cpu_seconds(roots) for name, roots in groups.items()}
    return Reading({**spent, BENCHMARK: time.process_time()}, busy_seconds())


def _read_processes() -> dict[int, _Process]:
    found = {}
    for entry in _PROC.iterdir():
        if entry.name.isdigit():
            try:
                found[int(entry.name)] = _read(int(entry.name))
            except (OSError, IndexError):
                continue  # it ended meanwhile
    return found


def _read(pid: int) -> _Process:
    fields = (_PROC / str(pid) / "stat").read_text().rpartition(")")[2].split()
    times = fields[_FIRST_TIME : _LAST_TIME + 1]
    return _Process(int(fields[_PARENT]), sum(int(value) for value in times) / _TICK)
