"""Ends the running frames of a dry-run farm as their RQDs would, so that a benchmark has a farm that lives.

In dry run nothing runs, so nothing ends. `FrameEnds` follows the procs that the workers book, asks how long each of
them runs, and ends it when that time is over by the same transaction that the report service uses
(`reports.completion.Releaser`): PostgreSQL's triggers, the release in the ledger and the log of changed hosts.

It also does what the host reports of a real farm do: hosts stay fresh (host_stat.ts_ping).

What this costs PostgreSQL: two statements a look (ten looks a second; an index of its own on proc.ts_dispatched, so a
look reads only what is new), one transaction for each batch of ends, one statement every ten seconds for the reports.
"""

from __future__ import annotations

import heapq
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from datetime import datetime
from typing import NamedTuple, Self

import structlog
from sqlalchemy import Engine, text
from sqlalchemy.exc import SQLAlchemyError

from opencue_sched.accounting.ledger import Ledger
from opencue_sched.coordination.change_log import HostChanges
from opencue_sched.reports.completion import MOST_TOGETHER, Releaser
from opencue_sched.reports.run_ends import CompletedFrame, RunVerdict
from opencue_sched.settings import Release

LOOK_SECONDS = 0.1
REPORT_SECONDS = 10.0
_RETRY_SECONDS = 0.5

_log = structlog.get_logger(__name__)

_INDEX = text("CREATE INDEX IF NOT EXISTS benchmark_proc_dispatched ON proc (ts_dispatched)")
_KEEPS_COMMIT_TIMES = text("SELECT current_setting('track_commit_timestamp', true) = 'on'")
# A row that is not seen yet belongs to a transaction that is open now; ts_dispatched is the start of its transaction.
# So whatever the next look has to find is not older than the oldest open transaction of this one.
_OLDEST_TRANSACTION = text("SELECT coalesce(min(xact_start), clock_timestamp()) FROM pg_stat_get_activity(NULL)")
_NEW_PROCS = """
    SELECT pk_proc, pk_frame, pk_host, pk_show, pk_job, pk_layer, int_cores_reserved, int_mem_reserved,
           int_gpus_reserved, extract(epoch FROM {booked_at})
      FROM proc WHERE pk_frame IS NOT NULL AND (CAST(:since AS timestamptz) IS NULL OR ts_dispatched >= :since)
"""
_HOST_NAMES = text("SELECT pk_host, str_name FROM host")
_REPORT = text(
    """
    WITH due AS (SELECT pk_host_stat FROM host_stat ORDER BY pk_host_stat FOR NO KEY UPDATE SKIP LOCKED)
    UPDATE host_stat SET ts_ping = current_timestamp
      FROM due WHERE host_stat.pk_host_stat = due.pk_host_stat
    """
)


class RunningProc(NamedTuple):
    """A proc as it was booked. Centicores, KB, whole GPUs; ``booked_at`` is when its booking was committed, in epoch
    seconds (when the transaction began, on a server that keeps no commit times)."""

    id: str
    frame_id: str
    host_id: str
    show_id: str
    job_id: str
    layer_id: str
    centicores: int
    memory_kb: int
    gpus: int
    booked_at: float


SecondsOf = Callable[[RunningProc], float]
"""How long a proc's frame runs."""


def success(_: RunningProc) -> int:
    """The exit status of a frame that did its work."""
    return 0


class RunningFrames:
    """The procs that were seen, ordered by the end of their frames. Pure; not thread-safe."""

    def __init__(self, seconds_of: SecondsOf) -> None:
        self._seconds_of = seconds_of
        self._due: list[tuple[float, str]] = []
        self._procs: dict[str, RunningProc] = {}
        self._seen: set[str] = set()

    def __len__(self) -> int:
        return len(self._procs)

    def add(self, procs: Iterable[RunningProc]) -> list[RunningProc]:
        """Those of the procs that were never added before; each is due ``seconds_of`` after its booking."""
        new = [proc for proc in procs if proc.id not in self._seen]
        self._seen.update(proc.id for proc in new)
        for proc in new:
            self._procs[proc.id] = proc
            heapq.heappush(self._due, (proc.booked_at + self._seconds_of(proc), proc.id))
        return new

    def take(self, now: float, most: int) -> list[tuple[float, RunningProc]]:
        """Up to ``most`` procs whose frames are over by ``now`` (epoch seconds), each with its due time, the longest
        overdue first. They are forgotten."""
        taken: list[tuple[float, RunningProc]] = []
        while self._due and self._due[0][0] <= now and len(taken) < most:
            due, proc_id = heapq.heappop(self._due)
            taken.append((due, self._procs.pop(proc_id)))
        return taken

    def put_back(self, taken: Iterable[tuple[float, RunningProc]]) -> None:
        """What `take` gave, due as it was."""
        for due, proc in taken:
            self._procs[proc.id] = proc
            heapq.heappush(self._due, (due, proc.id))

    def next_due(self) -> float | None:
        """When the next frame ends, in epoch seconds; None when none runs."""
        return self._due[0][0] if self._due else None


class FrameEnds:
    """Ends frames from ``start()`` until ``stop()``; use it as a context manager or call the two.

    ``engine`` needs ``threads`` + 2 connections. ``ledger`` and ``changes`` are those of the farm's workers
    (`Ledger(client, owner="frame-ends")`, `HostChanges(client, settings.coordination.namespace)`); without them only
    PostgreSQL is told, and its notifications tell the workers. ``seconds_of`` is asked once for each proc, in
    one thread, in the order of discovery. ``exit_status`` says how a frame ends. ``on_booked`` and ``on_ended`` are
    told of new procs, and of ended ones with the time of the end (epoch seconds), from several threads. A layer asks
    for more memory as ``release.frame_memory`` says.

    Counts, to be read at any time: ``ended`` (frames stopped and procs released), ``outcomes`` (all answers by
    verdict), ``batches`` (transactions of ends), ``looks``, ``rows`` (read by the looks), ``seen`` (procs found),
    ``running`` and ``overdue`` (seconds by which the last batch was late).
    """

    def __init__(
        self,
        engine: Engine,
        seconds_of: SecondsOf,
        *,
        ledger: Ledger | None = None,
        changes: HostChanges | None = None,
        exit_status: Callable[[RunningProc], int] = success,
        on_booked: Callable[[Sequence[RunningProc]], None] | None = None,
        on_ended: Callable[[Sequence[RunningProc], float], None] | None = None,
        frame_memory: bool = True,
        threads: int = 2,
    ) -> None:
        self._engine = engine
        self._releaser = Releaser(engine, Release(frame_memory=frame_memory), ledger, changes)
        self._exit_status = exit_status
        self._on_booked = on_booked
        self._on_ended = on_ended
        self._frames = RunningFrames(seconds_of)
        self._lock = threading.Condition()
        self._stopping = threading.Event()
        self._host_names: dict[str, str] = {}
        self._since: datetime | None = None
        self._new_procs = text(_NEW_PROCS.format(booked_at="ts_dispatched"))
        repeat = self._until_stopped
        self._threads = [
            threading.Thread(target=repeat, args=(self._look, LOOK_SECONDS), name="looks", daemon=True),
            threading.Thread(target=repeat, args=(self._report, REPORT_SECONDS), name="reports", daemon=True),
            *(threading.Thread(target=self._end_frames, name=f"ends{n}", daemon=True) for n in range(threads)),
        ]
        self.outcomes: Counter[RunVerdict | str] = Counter()
        self.looks = 0
        self.rows = 0
        self.seen = 0
        self.batches = 0
        self.overdue = 0.0

    @property
    def ended(self) -> int:
        return self.outcomes[RunVerdict.APPLIED]

    @property
    def running(self) -> int:
        with self._lock:
            return len(self._frames)

    def start(self) -> Self:
        """Prepare the database (one index), report every host once, and begin."""
        with self._engine.begin() as connection:
            connection.execute(_INDEX)
            if connection.execute(_KEEPS_COMMIT_TIMES).scalar():
                booked_at = "coalesce(pg_xact_commit_timestamp(xmin), ts_dispatched)"
                self._new_procs = text(_NEW_PROCS.format(booked_at=booked_at))
        self._report()
        for thread in self._threads:
            thread.start()
        return self

    def stop(self) -> None:
        """End no more frames; returns when the transactions that have begun are over."""
        self._stopping.set()
        with self._lock:
            self._lock.notify_all()
        for thread in self._threads:
            thread.join()

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.stop()

    def _until_stopped(self, step: Callable[[], None], seconds: float) -> None:
        while not self._stopping.wait(seconds):
            try:
                step()
            except SQLAlchemyError as error:
                _log.warning("frame_ends_retries", step=step.__name__, error=str(error))

    def _look(self) -> None:
        with self._engine.connect() as connection:
            oldest = connection.execute(_OLDEST_TRANSACTION).scalar()
            connection.rollback()
            rows = connection.execute(self._new_procs, {"since": self._since}).all()
            connection.rollback()
            if any(row.pk_host not in self._host_names for row in rows):
                self._host_names = {row.pk_host: row.str_name for row in connection.execute(_HOST_NAMES)}
        self._since = oldest
        found = [RunningProc._make((*row[:-1], float(row[-1]))) for row in rows]
        with self._lock:
            new = self._frames.add(found)
            self.looks += 1
            self.rows += len(rows)
            self.seen += len(new)
            if new:
                self._lock.notify_all()
        if new and self._on_booked is not None:
            self._on_booked(new)

    def _report(self) -> None:
        with self._engine.begin() as connection:
            connection.execute(_REPORT)

    def _end_frames(self) -> None:
        while (batch := self._next_batch()) is not None:
            try:
                self._end([proc for _, proc in batch])
            except SQLAlchemyError as error:
                # Nothing of the batch was applied, and the next look does not find it again: it is not new.
                _log.warning("frame_ends_retries", step="end", error=str(error))
                self._stopping.wait(_RETRY_SECONDS)
                with self._lock:
                    self._frames.put_back(batch)

    def _next_batch(self) -> list[tuple[float, RunningProc]] | None:
        """Wait for frames that are over; None when it is time to stop."""
        with self._lock:
            while not self._stopping.is_set():
                now = time.time()
                taken = self._frames.take(now, MOST_TOGETHER)
                if taken:
                    self.overdue = now - taken[0][0]
                    return taken
                due = self._frames.next_due()
                self._lock.wait(None if due is None else max(0.0, due - now))
            return None

    def _end(self, batch: Sequence[RunningProc]) -> None:
        answers = self._releaser.end([self._completion(proc) for proc in batch])
        at = time.time()
        ended = []
        with self._lock:
            self.batches += 1
            for proc, answer in zip(batch, answers, strict=True):
                self.outcomes[answer.verdict] += 1
                if answer.verdict is RunVerdict.APPLIED:
                    ended.append(proc)
        if ended and self._on_ended is not None:
            self._on_ended(ended, at)

    def _completion(self, proc: RunningProc) -> CompletedFrame:
        return CompletedFrame(
            proc_id=proc.id,
            frame_id=proc.frame_id,
            host_name=self._host_names[proc.host_id],
            exit_status=self._exit_status(proc),
        )
