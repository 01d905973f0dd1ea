"""PostgreSQL is restarted under a process that knows 5,000 layers: it goes on with what it knows."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass

import pytest
from pydantic import SecretStr
from sqlalchemy import text
from sqlalchemy.exc import SQLAlchemyError

from opencue_sched.clients.postgres import make_engine
from opencue_sched.domain.clusters import Cluster, ClusterKind
from opencue_sched.embedded.farms.farm import Farm
from opencue_sched.embedded.farms.farm_specs import JobSpec, LayerSpec
from opencue_sched.embedded.servers.services import EmbeddedPostgres
from opencue_sched.settings import Rqd, Settings
from opencue_sched.store.schema import upgrade
from tests.kit.passes import Passes, passes

pytestmark = pytest.mark.long(15)

CORES = 4
JOBS, LAYERS_OF_EACH = 125, 40
MOST_ROWS = 500
"""That a pass may be answered by PostgreSQL, however many layers are known."""


@dataclass
class Knowing:
    """A process that has listed what waits, on a server of its own with one host."""

    postgres: EmbeddedPostgres
    passes: Passes
    cluster: Cluster
    last: str
    """The job (its id) that comes last in the order."""

    def everything_ends(self) -> None:
        with self.passes.engine.begin() as connection:
            connection.execute(text("DELETE FROM proc"))
            connection.execute(text("UPDATE host SET int_cores_idle = int_cores, int_mem_idle = int_mem"))
        self.passes.runner.hosts.missed()

    def books(self) -> int:
        return self.passes.run([self.cluster])[0].frames_booked


@pytest.fixture
def knowing(settings: Settings) -> Iterator[Knowing]:
    with EmbeddedPostgres(in_memory=True) as postgres:
        upgrade(postgres.url)
        own = {"database_url": SecretStr(postgres.url), "rqd": Rqd(dry_run_mode=True)}
        here = settings.model_copy(update=own)
        engine = make_engine(here, application_name="opencue-sched-test")
        with engine.begin() as connection:
            farm = Farm(connection)
            farm.host(cores=CORES, memory_gb=512)
            show = farm.default_show()
            layers = [LayerSpec(frames=1, memory_gb=1 + number / 64) for number in range(LAYERS_OF_EACH)]
            jobs = farm.jobs([JobSpec(layers, show=show, os=None, priority=2) for _ in range(JOBS - 1)])
            jobs += farm.jobs([JobSpec(layers, show=show, os=None, priority=1)])
            cluster = Cluster(farm.facility(), show.id, ClusterKind.ALLOC, ("general",))
            connection.execute(text("ANALYZE"))
        with passes(engine, here, named=True) as runner:
            runner.runner.backlog.follow()
            yield Knowing(postgres, runner, cluster, jobs[-1].id)
        engine.dispose()


def test_a_restarted_postgresql_is_booked_on_by_what_was_known(knowing: Knowing) -> None:
    # given a process that books, and knows all that waits
    backlog = knowing.passes.runner.backlog
    assert knowing.books() == CORES
    assert len(backlog.backlog) == JOBS * LAYERS_OF_EACH

    for mode in ("fast", "immediate"):
        # when the server is restarted, and the listener says that it has missed something
        knowing.everything_ends()
        knowing.postgres.restart(mode)
        back_at = time.monotonic()
        backlog.missed()

        # then the first pass that has a connection books, without a look at all that is known
        booked = 0
        with knowing.passes.counted() as count:
            with suppress(SQLAlchemyError):
                booked = knowing.books()
            booked = booked or knowing.books()
        print(f"{mode}: booked {time.monotonic() - back_at:.2f} s after its return, {count.rows} rows")
        assert booked == CORES
        assert count.rows <= MOST_ROWS

    # and what was missed is found by the resync, which is due
    with knowing.passes.engine.begin() as connection:
        connection.execute(text("UPDATE job_resource SET int_priority = 99 WHERE pk_job = :job"), {"job": knowing.last})
    knowing.everything_ends()
    backlog.resync()
    assert knowing.books() == CORES
    with knowing.passes.engine.connect() as connection:
        assert connection.execute(text("SELECT DISTINCT pk_job FROM proc")).scalars().all() == [knowing.last]
