"""The idle benchmark: what a farm costs that does nothing, beat, one worker and settings at defaults.

Twice: with clusters that have no work, and with work in all of them that no host can take (it asks for more memory than
any has), so that every cluster is looked at again and again. Statements are counted from PostgreSQL's own log, in a
window after the one in which CPU time is measured, because writing that log costs some.
"""

from __future__ import annotations

import re
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.console import Console
from sqlalchemy import text

from benchmarks.proc_times import read
from benchmarks.workbench import Workbench, workbench
from opencue_sched.embedded.farms.farm import Farm
from opencue_sched.embedded.farms.farm_specs import AllocIds, HostSpec, JobSpec, LayerSpec, ShowIds

ALLOCS = 10
HOSTS_OF_EACH = 4
HOST_MEMORY_GB = 16
WANTED_MEMORY_GB = 500

# Ages only, so that the first worker is ready soon; dry run, because there are no RQDs; nobody reports for the hosts.
ENVIRONMENT = {
    "OPENCUE_SCHED_ACCOUNTING__COMMIT_DEADLINE": "2s",
    "OPENCUE_SCHED_RQD__DRY_RUN_MODE": "true",
    "OPENCUE_SCHED_HOST_CACHE__HOST_STALENESS_THRESHOLD": "1h",
    "OPENCUE_SCHED_RELEASE__HOST_DOWN_AFTER": "1h",
}

_SETTLED_SECONDS = 15.0
_LOG_SECONDS = 10.0
# "2026-01-31 12:00:00.000 UTC [123] opencue-sched worker1 LOG:  statement: SELECT ..."; see log_line_prefix.
_STATEMENT = re.compile(r"\] (\S.*) LOG:  statement:\s+(\S+(?:\s+[A-Za-z_]\S*){0,2})")
_SHOWN = 6


@dataclass(frozen=True, slots=True)
class IdleResult:
    """One load's cost, per second of the window. CPU as percent of one core."""

    phase: str
    clusters: int
    seconds: float
    passes_per_second: float
    postgresql_statements_per_second: float
    postgresql_transactions_per_second: float
    redis_commands_per_second: float
    beat_cpu_percent: float
    worker_cpu_percent: float
    postgresql_cpu_percent: float
    redis_cpu_percent: float
    redis_most: str
    cpu_of_others_percent: int

    def as_dict(self) -> dict[str, object]:
        return asdict(self)


def run_idle(*, clusters: int, seconds: float, console: Console) -> list[IdleResult]:
    """Both loads, one after the other, on one fleet."""
    with workbench(ENVIRONMENT) as bench:
        shows, allocs = _farm(bench, clusters)
        bench.workers(1)
        bench.fleet.beat()
        time.sleep(_SETTLED_SECONDS)
        results = [_measure(bench, "nothing to do", clusters, seconds, console)]
        _unplaceable_work(bench, shows, allocs)
        time.sleep(_SETTLED_SECONDS)
        results.append(_measure(bench, "work nobody can take", clusters, seconds, console))
    return results


def _farm(bench: Workbench, clusters: int) -> tuple[list[ShowIds], list[AllocIds]]:
    """Shows that are each subscribed to every allocation: a cluster for each pair."""
    with bench.engine.begin() as connection:
        farm = Farm(connection)
        allocs = [farm.alloc(f"idle{number}") for number in range(min(ALLOCS, clusters))]
        shows = [farm.show(f"idle{number}") for number in range(clusters // len(allocs))]
        for show in shows:
            for alloc in allocs:
                farm.subscription(show, alloc, size=100)
        farm.hosts(
            HostSpec(alloc=alloc, memory_gb=HOST_MEMORY_GB, hostname_tag=False)
            for alloc in allocs
            for _ in range(HOSTS_OF_EACH)
        )
    with bench.engine.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
        connection.execute(text("VACUUM ANALYZE"))
    return shows, allocs


def _unplaceable_work(bench: Workbench, shows: list[ShowIds], allocs: list[AllocIds]) -> None:
    with bench.engine.begin() as connection:
        Farm(connection).jobs(
            JobSpec(
                name=f"{show.name}-{alloc.tag}",
                show=show,
                layers=[LayerSpec(frames=10, memory_gb=WANTED_MEMORY_GB, tags=alloc.tag)],
            )
            for show in shows
            for alloc in allocs
        )


def _measure(bench: Workbench, phase: str, clusters: int, seconds: float, console: Console) -> IdleResult:
    processes = bench.processes()
    commands_before = _redis_calls(bench)
    before, cpu_before, began = bench.counters(), read(processes), time.monotonic()
    time.sleep(seconds)
    lasted, cpu = time.monotonic() - began, read(processes).since(cpu_before)
    spent = Counter(bench.counters())
    spent.subtract(before)
    commands = _redis_calls(bench) - commands_before
    with _statement_log(bench) as log:
        time.sleep(_LOG_SECONDS)
    statements = _statements(log[0])
    console.print(f"{phase}, statements in {_LOG_SECONDS:.0f} s: {_most(statements, 12)}")

    def percent(group: str) -> float:
        return round(100 * cpu.groups[group] / lasted, 1)

    return IdleResult(
        phase=phase,
        clusters=clusters,
        seconds=round(lasted, 1),
        passes_per_second=round(spent["scheduler_pass_terminated_reason_total"] / lasted, 2),
        postgresql_statements_per_second=round(statements.total() / _LOG_SECONDS, 1),
        postgresql_transactions_per_second=round((spent["pg_xact_commit"] + spent["pg_xact_rollback"]) / lasted, 1),
        redis_commands_per_second=round(spent["redis_commands"] / lasted, 1),
        beat_cpu_percent=percent("beat"),
        worker_cpu_percent=percent("worker"),
        postgresql_cpu_percent=percent("postgresql"),
        redis_cpu_percent=percent("redis"),
        redis_most=_most(Counter({name: round(count / lasted, 1) for name, count in commands.items()}), _SHOWN),
        cpu_of_others_percent=cpu.others_percent(lasted),
    )


def _redis_calls(bench: Workbench) -> Counter[str]:
    stats = bench.client.info("commandstats")
    return Counter({name.removeprefix("cmdstat_"): int(it["calls"]) for name, it in stats.items()})


@contextmanager
def _statement_log(bench: Workbench) -> Iterator[list[str]]:
    """The log of everything PostgreSQL is told within the block; one text, there at the end."""
    assert bench.postgres is not None
    log = Path(bench.postgres.directory) / "postgres.log"
    found: list[str] = []
    _configure(bench, "ALTER SYSTEM SET log_statement = 'all'")
    start = log.stat().st_size
    try:
        yield found
    finally:
        with log.open("rb") as file:
            file.seek(start)
            found.append(file.read().decode(errors="replace"))
        _configure(bench, "ALTER SYSTEM RESET log_statement")


def _configure(bench: Workbench, statement: str) -> None:
    with bench.engine.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
        connection.execute(text(statement))
        connection.execute(text("SELECT pg_reload_conf()"))


def _statements(log: str) -> Counter[str]:
    """How often each process said what (the first words of it)."""
    found: Counter[str] = Counter()
    for match in _STATEMENT.finditer(log):
        if not match[1].startswith("opencue-sched-bench"):
            found[f"{match[1].removeprefix('opencue-sched').strip(' -')}: {' '.join(match[2].split())}"] += 1
    return found


def _most(counts: Counter[str], shown: int) -> str:
    return ", ".join(f"{name} {count}" for name, count in counts.most_common(shown))
