"""The player of an interleaving that counts as it was done before (naive_counters.py): a scheduler and a Cuebot."""

from __future__ import annotations

import uuid
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import ClassVar

from sqlalchemy import Connection, Engine, text
from sqlalchemy.exc import DBAPIError

from opencue_sched.accounting import keys
from opencue_sched.accounting.caps import cap_rows_of_shows, make_ledger
from opencue_sched.settings import Accounting, Settings
from opencue_sched.store.accounting_tables import refresh_tables
from tests.integration.accounting.interleaved import (
    BOOK,
    BOOKED,
    CAPS_READ,
    DRIFTED,
    JUDGED,
    OVER_BOOKED,
    PLANNED,
    ROLLBACK,
    SNAPSHOT,
    UNDOING,
    Figures,
    Side,
    finish,
)
from tests.integration.accounting.naive_counters import Counters, ProcessCounters, RedisCounters, Taken, cap_field
from tests.integration.accounting.stepping import Actor, Clock, SteppedRedis, boundary


class Naive(Side):
    """A scheduler and a Cuebot on such counters. ``zero_baseline``, ``guarded``, ``guards_caps``: which of the
    repairs that were added later it has."""

    ours = False
    make: ClassVar[Callable[[SteppedRedis], Counters]]

    def __init__(self, engine: Engine, client: SteppedRedis, clock: Clock, settings: Settings) -> None:
        super().__init__(engine, client, clock, settings)
        self.counters = type(self).make(client)
        self.claimed: set[str] = set()
        self.ended: dict[str, Taken] = {}

    # Booking

    def worker(self) -> Actor:
        return self.actor(f"worker{len(self.actors)}", lambda: self._works(self.counters))

    def _works(self, counters: Counters) -> None:
        wanted = self._plan()
        try:
            boundary(PLANNED)
            boundary(BOOK)
            accepted = [taken for taken in wanted if counters.book(taken)]
            boundary(BOOKED)
            if accepted:
                self._commit(counters, accepted)
        finally:
            self.claimed -= {taken.frame_id for taken in wanted}

    def _commit(self, counters: Counters, accepted: Sequence[Taken]) -> None:
        try:
            with self.engine.begin() as connection:
                for taken in accepted:
                    self._insert(connection, taken)
        except DBAPIError:
            boundary(ROLLBACK)
            self._give_back(counters, accepted)
            return
        if not self.launches_fail:
            for taken in accepted:
                counters.confirm(taken)
            return
        self._give_back(counters, accepted)
        if self.compensations_fail:
            return
        with self.engine.begin() as connection:
            connection.execute(_DELETE, {"procs": [taken.proc_id for taken in accepted]})
            boundary(UNDOING)

    def _plan(self) -> list[Taken]:
        with self.engine.begin() as connection:
            rows = connection.execute(_WAITING).all()
            alloc = connection.execute(_ALLOC, {"host": self.host.id}).scalar_one()
        rows = [row for row in rows if row.pk_frame not in self.claimed]
        self.claimed |= {row.pk_frame for row in rows}
        return [
            Taken(str(uuid.uuid4()), row.pk_frame, self._vertices(alloc, row.pk_folder, row.pk_job)) for row in rows
        ]

    def _vertices(self, alloc: str, folder: str, job: str) -> tuple[str, str, str]:
        return keys.subscription(self.show.id, alloc), keys.folder(folder), keys.job(job)

    def _insert(self, connection: Connection, taken: Taken) -> None:
        row = {"proc": taken.proc_id, "frame": taken.frame_id, "host": self.host.id, "centicores": taken.cores * 100}
        connection.execute(_INSERT, row)
        connection.execute(_START, row)

    @staticmethod
    def _give_back(counters: Counters, accepted: Iterable[Taken]) -> None:
        for taken in accepted:
            counters.rollback(taken)

    # Releaser: by the vertices of now, in whole cores

    def end(self, proc_id: str) -> None:
        with self.engine.begin() as connection:
            row = connection.execute(_PLACE, {"proc": proc_id}).one()
        cores = row.int_cores_reserved // 100
        self.ended[proc_id] = Taken(proc_id, "", self._vertices(row.pk_alloc, row.pk_folder, row.pk_job), cores)
        super().end(proc_id)

    def release(self, proc_id: str) -> None:
        self.counters.release(self.ended[proc_id])

    # Repairing

    def recompute(self) -> Actor:
        return self.actor("recompute", self._recomputes)

    def _recomputes(self) -> None:
        self.counters.recompute(self._sums, zero_baseline=self.zero_baseline, guarded=self.guarded)
        refresh_tables(self.engine, [self.show.id])

    def _sums(self) -> Mapping[str, int]:
        sums: Counter[str] = Counter()
        with self.engine.begin() as connection:
            for row in connection.execute(_SUMS):
                for key in self._vertices(row.pk_alloc, row.pk_folder, row.pk_job):
                    sums[key] += row.centicores
        boundary(SNAPSHOT)
        boundary(JUDGED)
        return {key: centicores // 100 for key, centicores in sums.items()}

    def load_caps(self) -> Actor:
        return self.actor("caps", self._loads_caps)

    def _loads_caps(self) -> None:
        self.counters.load_caps(self._caps, guarded=self.guards_caps)

    def _caps(self) -> Mapping[str, float]:
        caps = {}
        ledger = make_ledger(self.engine, self.client, owner="naive", accounting=Accounting())
        with self.engine.begin() as connection:
            for key, fields in cap_rows_of_shows(connection, ledger, [self.show.id], {}):
                cap = dict(zip(fields[::2], fields[1::2], strict=True)).get(cap_field(key))
                if cap is not None:
                    caps[key] = float(cap)
        boundary(CAPS_READ)
        return caps

    def stir(self) -> None:
        job = self.jobs[-1]
        taken = Taken("", "", self._vertices(self.alloc.id, job.folder_id, job.id))
        if self.counters.book(taken):
            self.counters.rollback(taken)

    def hand_over(self, meanwhile: Callable[[], object]) -> None:
        self.set_managed(True)
        self._loads_caps()
        meanwhile()

    def hand_back(self, meanwhile: Callable[[], object]) -> None:
        self._recomputes()
        self.set_managed(False)
        meanwhile()
        self._recomputes()

    def refill(self, meanwhile: Callable[[], object]) -> None:
        self._loads_caps()
        self._recomputes()
        meanwhile()

    def wait_until_cut(self) -> None:
        """The server was told nothing: it waits for as long as it takes."""
        assert self.scalar("SHOW idle_in_transaction_session_timeout") == "0"

    def settle_down(self) -> None:
        for _ in range(3):
            self._recomputes()

    def judge(self, figures: Figures, *, breaks: str, cap: int, room: int) -> None:
        """Broken in the way it is said to be."""
        if breaks == OVER_BOOKED:
            assert figures.running > cap
        elif breaks == DRIFTED:
            assert self.counted() != self.figures().running
        else:
            self.submit()
            finish(self.worker())
            assert self.figures().running == figures.running < min(cap, room)

    def counted(self) -> int:
        return self.counters.counted(self.key)

    def burst(self) -> float:
        return self.counters.cap(keys.subscription(self.show.id, self.alloc.id))


class OnRedis(Naive):
    """The accounting reference."""

    make = RedisCounters


class InProcess(Naive):
    """What came after it."""

    make = staticmethod(lambda _: ProcessCounters())


class InEachProcess(InProcess):
    """The same, with an instance of it for each worker."""

    def worker(self) -> Actor:
        mine = ProcessCounters()
        mine.load_caps(self._caps, guarded=False)
        mine.recompute(self._sums, zero_baseline=True, guarded=True)
        return self.actor(f"worker{len(self.actors)}", lambda: self._works(mine))


_WAITING = text(
    """
    SELECT pk_frame, pk_folder, frame.pk_job
      FROM frame JOIN job USING (pk_job) JOIN show USING (pk_show)
     WHERE frame.str_state = 'WAITING' AND b_scheduler_managed ORDER BY int_number
    """
)
_ALLOC = text("SELECT pk_alloc FROM host WHERE pk_host = :host")
_INSERT = text(
    """
    INSERT INTO proc (pk_proc, pk_host, pk_job, pk_show, pk_layer, pk_frame, int_cores_reserved, int_mem_reserved)
    SELECT CAST(:proc AS varchar), :host, frame.pk_job, pk_show, pk_layer, pk_frame, :centicores, 1
      FROM frame JOIN job USING (pk_job) WHERE pk_frame = :frame
    """
)
_START = text("UPDATE frame SET str_state = 'RUNNING' WHERE pk_frame = :frame")
_DELETE = text("DELETE FROM proc WHERE pk_proc = ANY(:procs)")
_PLACE = text(
    """
    SELECT int_cores_reserved, pk_alloc, pk_folder, proc.pk_job
      FROM proc JOIN host USING (pk_host) JOIN job ON job.pk_job = proc.pk_job WHERE pk_proc = :proc
    """
)
_SUMS = text(
    """
    SELECT host.pk_alloc, pk_folder, proc.pk_job, sum(int_cores_reserved) AS centicores
      FROM proc JOIN host USING (pk_host) JOIN job ON job.pk_job = proc.pk_job JOIN show ON show.pk_show = job.pk_show
     WHERE b_scheduler_managed AND job.str_state <> 'FINISHED'
     GROUP BY host.pk_alloc, pk_folder, proc.pk_job
    """
)
