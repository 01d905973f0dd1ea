"""The independent witness: what the proc table holds against every cap, many times a second, on its own connection.

A sample is one statement, so it sees one moment: every proc with the caps of its vertices, and when the transaction
that wrote each was committed (track_commit_timestamp). A booking is a violation when, at its commit, a vertex held more
than the cap in force. A row may have been written again before anybody looked, and then does not say when. So of a proc
that a host has reported already the beginning of its booking counts, of a cap that was raised since the sample before
the higher value, and of one that was lowered the time at which its row was written last. What that leaves out is a
booking of these few milliseconds.

As a program (``python -m benchmarks.chaos.sampler``) it reads the database URL from its environment, writes a JSON line
every half second, and ends when its standard input is closed.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import sys
import time
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

import psycopg2

from benchmarks.chaos.seats import SEATS, Seated, SeatJudge

SAMPLES_PER_SECOND = 40.0
WRITE_SECONDS = 0.5
URL_VARIABLE = "OPENCUE_SCHED_CHAOS_DATABASE"
_AHEAD = 5

# Cores in centicores; GPUs; limits in frames, where they are no more than that (seats.py looks at the others). A cap of
# -1 or 0 of a folder or job is none, as in OpenCue.
_PREPARE = f"""
PREPARE sample AS WITH procs AS (
    SELECT p.pk_proc, p.int_cores_reserved AS cores, p.int_gpus_reserved AS gpus, p.pk_show, h.pk_alloc, j.pk_folder,
           p.pk_job, p.pk_host, extract(epoch FROM p.ts_dispatched)::float8 AS started,
           ARRAY(SELECT DISTINCT pk_limit_record FROM layer_limit ll WHERE ll.pk_layer = p.pk_layer) AS limits,
           extract(epoch FROM coalesce(
               CASE WHEN p.ts_ping = p.ts_booked AND p.int_mem_reserved = p.int_mem_pre_reserved
                    THEN pg_xact_commit_timestamp(p.xmin) END, p.ts_booked))::float8 AS committed
    FROM proc p JOIN host h USING (pk_host) JOIN job j USING (pk_job)
), caps AS (
    SELECT 'sub:' || pk_show || ':' || pk_alloc AS vertex, int_burst AS cap, pg_xact_commit_timestamp(xmin) AS at
    FROM subscription
    UNION ALL
    SELECT 'folder:' || pk_folder, CASE WHEN int_max_cores > 0 THEN int_max_cores END, pg_xact_commit_timestamp(xmin)
    FROM folder_resource
    UNION ALL
    SELECT 'job:' || r.pk_job, CASE WHEN r.int_max_cores > 0 THEN r.int_max_cores END, pg_xact_commit_timestamp(r.xmin)
    FROM job_resource r JOIN job USING (pk_job) WHERE job.str_state = 'PENDING'
    UNION ALL
    SELECT 'folder_gpus:' || pk_folder, CASE WHEN int_max_gpus > 0 THEN int_max_gpus END, pg_xact_commit_timestamp(xmin)
    FROM folder_resource
    UNION ALL
    SELECT 'job_gpus:' || r.pk_job, CASE WHEN r.int_max_gpus > 0 THEN r.int_max_gpus END,
           pg_xact_commit_timestamp(r.xmin)
    FROM job_resource r JOIN job USING (pk_job) WHERE job.str_state = 'PENDING'
    UNION ALL
    SELECT 'limit:' || pk_limit_record, int_max_value, pg_xact_commit_timestamp(xmin) FROM limit_record
    WHERE str_type = 'FRAME' AND ts_reported IS NULL
)
SELECT (SELECT coalesce(json_agg(procs), '[]') FROM procs),
       (SELECT coalesce(json_agg(json_build_array(vertex, cap, extract(epoch FROM at)::float8)), '[]') FROM caps),
       ({SEATS})
"""  # noqa: S608 - only our own constant
"""Prepared on each connection: PostgreSQL takes twice as long to plan a sample as to take it."""

Cap = float
_NONE = float("inf")


@dataclass(frozen=True, slots=True)
class Held:
    """A proc: what it takes of each vertex (centicores, or GPUs, or of a limit frames), and when it was committed."""

    id: str
    takes: Mapping[str, int]
    committed: float

    @classmethod
    def read(cls, row: Mapping[str, Any]) -> Held:
        cores, gpus = int(row["cores"]), int(row["gpus"])
        takes = {
            f"sub:{row['pk_show']}:{row['pk_alloc']}": cores,
            f"folder:{row['pk_folder']}": cores,
            f"job:{row['pk_job']}": cores,
            **({f"folder_gpus:{row['pk_folder']}": gpus, f"job_gpus:{row['pk_job']}": gpus} if gpus else {}),
            **{f"limit:{limit}": 1 for limit in row["limits"]},
        }
        return cls(row["pk_proc"], takes, float(row["committed"]))


@dataclass(frozen=True, slots=True)
class Excess:
    """A booking that was committed while a vertex held more than ``cap``. ``late``: seconds the cap had been in force
    at the commit."""

    vertex: str
    proc_id: str
    held: int
    cap: float
    late: float
    at: float


@dataclass(slots=True)
class CapHistory:
    """The values a cap had, each with the time of its commit; the first one since ever."""

    changes: list[tuple[float, Cap]] = field(default_factory=list)

    def note(self, value: Cap, at: float) -> bool:
        """Whether the cap is another than before."""
        if self.changes and self.changes[-1][1] == value:
            return False
        self.changes.append((at if self.changes else float("-inf"), value))
        return True

    def at(self, moment: float) -> tuple[float, Cap]:
        """(since, value) of the cap in force at ``moment``."""
        return next(change for change in reversed(self.changes) if change[0] <= moment)


class Judge:
    """Looks at one sample after the other."""

    def __init__(self) -> None:
        self._caps: dict[str, CapHistory] = defaultdict(CapHistory)
        self._known: dict[str, Held] = {}
        self.violations: list[Excess] = []

    def look(self, procs: Iterable[Held], caps: Iterable[tuple[str, Cap, float]]) -> list[Held]:
        """Judge the bookings that are new in this sample; returns them."""
        changed = {vertex: value for vertex, value, at in caps if self._caps[vertex].note(value, at)}
        now = {proc.id: self._known.get(proc.id, proc) for proc in procs}
        new = sorted((proc for proc in now.values() if proc.id not in self._known), key=lambda proc: proc.committed)
        self._known = now
        for proc in new:
            for vertex in proc.takes:
                self._judge(proc, vertex, changed.get(vertex, 0.0))
        return new

    def _judge(self, proc: Held, vertex: str, changed: Cap) -> None:
        """What is there now and was committed no later was there at the commit too: a lower bound."""
        history = self._caps.get(vertex)
        if history is None:
            return
        held = sum(it.takes.get(vertex, 0) for it in self._known.values() if it.committed <= proc.committed)
        since, cap = history.at(proc.committed)
        if held > max(cap, changed):
            late = proc.committed - since
            self.violations.append(Excess(vertex, proc.id, held, cap, late, proc.committed))


@dataclass(frozen=True, slots=True)
class _Sample:
    """What one statement saw."""

    procs: list[Held]
    caps: list[tuple[str, Cap, float]]
    seated: list[Seated]
    limits: list[Mapping[str, Any]]


def _take_sample(cursor: Any) -> _Sample:
    cursor.execute("EXECUTE sample")
    procs, caps, limits = cursor.fetchone()
    seated = [
        Seated(row["pk_proc"], row["pk_host"], frozenset(row["limits"]), row["started"], row["committed"])
        for row in procs
        if row["limits"]
    ]
    return _Sample(
        [Held.read(row) for row in procs],
        [(vertex, _NONE if cap is None else float(cap), float(at or 0)) for vertex, cap, at in caps],
        seated,
        limits,
    )


@dataclass(slots=True)
class _Told:
    """What the next output line says."""

    judge: Judge
    seats: SeatJudge
    samples: list[float] = field(default_factory=list)
    booked: list[float] = field(default_factory=list)
    ids: list[str] = field(default_factory=list)
    procs: int = 0
    centicores: int = 0
    violations_told: int = 0
    forbidden_told: int = 0

    def add(self, sample: _Sample) -> None:
        self.samples.append(time.time())
        procs, new = sample.procs, self.judge.look(sample.procs, sample.caps)
        self.seats.look(sample.seated, sample.limits, self.samples[-1])
        self.booked += [proc.committed for proc in new]
        self.ids += [proc.id for proc in new]
        self.procs, self.centicores = len(procs), sum(next(iter(proc.takes.values())) for proc in procs)

    def write(self) -> None:
        judge = self.judge
        line = {
            "samples": self.samples,
            "booked": self.booked,
            "ids": self.ids,
            "procs": self.procs,
            "centicores": self.centicores,
            "violations": [asdict(excess) for excess in judge.violations[self.violations_told :]],
            "forbidden": [asdict(booking) for booking in self.seats.forbidden[self.forbidden_told :]],
            "judged": self.seats.judged,
        }
        self.forbidden_told = len(self.seats.forbidden)
        self.violations_told = len(judge.violations)
        self.samples, self.booked, self.ids = [], [], []
        sys.stdout.write(json.dumps(line) + "\n")
        sys.stdout.flush()


def _asked_to_stop(seconds: float) -> bool:
    ready, _, _ = select.select([sys.stdin], [], [], max(0.0, seconds))
    return bool(ready) and not os.read(sys.stdin.fileno(), 512)


def _go_first() -> None:
    """A witness that waits for its turn on a busy machine sees less. Where this is not allowed it has to wait."""
    with contextlib.suppress(PermissionError):
        os.nice(-_AHEAD)


def _connect(url: str) -> Any:
    connection = psycopg2.connect(url, connect_timeout=2, application_name="opencue-sched-chaos-sampler")
    connection.autocommit = True
    with connection.cursor() as cursor:
        cursor.execute(_PREPARE)
    return connection


def main() -> int:
    """Sample until standard input is closed, and once more then."""
    _go_first()
    url = os.environ[URL_VARIABLE]
    told = _Told(Judge(), SeatJudge())
    connection: Any = None
    period = 1.0 / SAMPLES_PER_SECOND
    next_sample = next_write = time.monotonic()
    while not _asked_to_stop(next_sample - time.monotonic()):
        next_sample = max(next_sample + period, time.monotonic() - period)
        try:
            connection = connection or _connect(url)
            with connection.cursor() as cursor:
                told.add(_take_sample(cursor))
        except psycopg2.ProgrammingError:
            raise
        except psycopg2.Error:
            # The database is away, which is one of the faults: the gap in ``samples`` shows it.
            if connection is not None:
                connection.close()
            connection = None
            next_sample = time.monotonic() + 0.05
        if time.monotonic() >= next_write:
            next_write = time.monotonic() + WRITE_SECONDS
            told.write()
    if connection is not None:
        with contextlib.closing(connection), connection.cursor() as cursor:
            told.add(_take_sample(cursor))
    told.write()
    return 0


if __name__ == "__main__":
    sys.exit(main())
