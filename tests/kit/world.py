"""A small farm in PostgreSQL and a store that accounts for it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field

from sqlalchemy import Engine, text

from opencue_sched.accounting import keys
from opencue_sched.accounting.caps import make_ledger
from opencue_sched.accounting.consistency import check_consistency, drift
from opencue_sched.accounting.keys import Booking, unpack_entry
from opencue_sched.accounting.recompute import RecomputeReport, entries_of, may_still_commit, read_snapshot, recompute
from opencue_sched.embedded.farms.farm import Farm
from opencue_sched.embedded.farms.farm_specs import HostIds, JobIds, LayerSpec, ShowIds
from opencue_sched.settings import Accounting
from opencue_sched.store.accounting import procs
from tests.kit.counters import Store
from tests.kit.polling import eventually

AGE = 40.0


@dataclass
class World:
    """One managed show with one job on one host. The test turns the boot clock (``now``, seconds)."""

    engine: Engine
    store: Store
    show: ShowIds
    job: JobIds
    host: HostIds
    now: float = 1000.0
    procs: list[str] = field(default_factory=list)

    @classmethod
    def make(cls, engine: Engine, store: Store) -> World:
        with engine.begin() as connection:
            farm = Farm(connection)
            show = farm.default_show()
            host = farm.host(cores=64, memory_gb=256)
            job = farm.job([LayerSpec(frames=40), LayerSpec(frames=2)])
        return cls(engine, store, show, job, host)

    def __post_init__(self) -> None:
        self.ledger = make_ledger(self.engine, self.store.client, owner="test", accounting=Accounting())

    def boot_clock(self) -> float:
        return self.now

    def recompute(self, *show_ids: str, **rest: float) -> RecomputeReport:
        return recompute(
            self.engine,
            self.ledger,
            show_ids or None,
            age_seconds=AGE,
            clock=self.boot_clock,
            write_tables=False,
            **rest,  # type: ignore[arg-type]
        )

    def run(self, count: int = 1, cores: float = 2) -> list[str]:
        """Procs in PostgreSQL that the ledger knows nothing of."""
        with self.engine.begin() as connection:
            frames = self.job.layers[0].frames[len(self.procs) : len(self.procs) + count]
            made = Farm(connection).run(frames, self.host, cores=cores)
        self.procs += made
        return made

    @contextmanager
    def stalled_commit(self) -> Iterator[tuple[Booking, Callable[[], None]]]:
        """A proc whose COMMIT PostgreSQL has taken and does not finish, until the function is called."""
        self.sql(
            "CREATE FUNCTION stall() RETURNS trigger LANGUAGE plpgsql AS "
            "'BEGIN PERFORM pg_advisory_xact_lock(1); RETURN NULL; END'"
        )
        self.sql(
            "CREATE CONSTRAINT TRIGGER stall AFTER INSERT ON proc DEFERRABLE INITIALLY DEFERRED "
            "FOR EACH ROW EXECUTE FUNCTION stall()"
        )
        with ExitStack() as stack:
            disk, booker = (stack.enter_context(self.engine.connect()) for _ in range(2))
            disk.execute(text("SELECT pg_advisory_lock(1)"))
            (proc_id,) = Farm(booker).run(self.job.layers[0].frames[-1:], self.host, cores=2)
            booked = unpack_entry(proc_id, entries_of(procs(booker))[proc_id])
            committing = stack.enter_context(ThreadPoolExecutor(1)).submit(booker.commit)

            def finish() -> None:
                disk.execute(text("SELECT pg_advisory_unlock_all()"))
                committing.result()

            stack.callback(finish)
            eventually(lambda: may_still_commit(self.engine, 0))
            yield booked, finish

    def entry(self, proc_id: str) -> Booking:
        """The booking of a proc as PostgreSQL has it."""
        return unpack_entry(proc_id, read_snapshot(self.engine)[1][proc_id])

    def delete(self, proc_id: str) -> None:
        self.sql("DELETE FROM proc WHERE pk_proc = :id", id=proc_id)

    def sql(self, statement: str, **parameters: object) -> None:
        with self.engine.begin() as connection:
            connection.execute(text(statement), parameters)

    def age(self, proc_id: str, seconds: int) -> None:
        """Make an entry that many seconds older by Redis TIME."""
        record = str(self.store.client.hget(keys.LEDGER, proc_id)).split("|", 3)
        record[2] = str(int(record[2]) - seconds)
        self.store.client.hset(keys.LEDGER, proc_id, "|".join(record))

    def job_cores(self) -> int:
        return self.store.counter(keys.job(self.job.id))[0]

    def exact(self) -> None:
        """Ledger and proc table agree, and every counter is the sum of its entries."""
        check = check_consistency(self.ledger)
        assert {i: r.entry for i, r in check.records.items()} == dict(read_snapshot(self.engine)[1])
        assert drift(check) == {}
