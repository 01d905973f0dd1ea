"""Who assigns frames of a managed show: our sessions; a Cuebot, whatever it believes, only its local procs."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from sqlalchemy import Engine, create_engine, text
from sqlalchemy.exc import IntegrityError

from opencue_sched.embedded.farms.farm import Farm
from opencue_sched.embedded.farms.farm_specs import HostIds, JobIds, LayerSpec
from opencue_sched.store.schema import GUARDS, triggers_of_proc

INSERT = """
    INSERT INTO proc (pk_proc, pk_host, pk_show, pk_job, pk_layer, pk_frame, int_cores_reserved, int_mem_reserved,
                      b_local)
    VALUES (:proc, :host, :show, :job, :layer, :frame, 100, 1, :local)
"""
REASSIGN = "UPDATE proc SET pk_show = :show, pk_job = :job, pk_layer = :layer, pk_frame = :frame WHERE pk_proc = :proc"


@pytest.fixture
def cuebot(database_url: str) -> Iterator[Engine]:
    """Sessions as Cuebot's are."""
    engine = create_engine(database_url, connect_args={"application_name": "PostgreSQL JDBC Driver"})
    try:
        yield engine
    finally:
        engine.dispose()


class Farms:
    """A job of a managed show and one of Cuebot's, and a host."""

    def __init__(self, engine: Engine) -> None:
        with engine.begin() as connection:
            farm = Farm(connection)
            self.host: HostIds = farm.host(cores=16)
            self.ours: JobIds = farm.job([LayerSpec(frames=3)], show=farm.show("ours"), name="ours")
            self.theirs: JobIds = farm.job(
                [LayerSpec(frames=3)], show=farm.show("theirs", managed=False), name="theirs"
            )

    def run(self, job: JobIds, frame: int = 0, *, local: bool = False) -> dict[str, Any]:
        ids = {"show": job.show.id, "job": job.id, "layer": job.layers[0].id, "frame": job.frames[frame]}
        return {"proc": f"proc-{job.frames[frame]}"[:36], "host": self.host.id, "local": local, **ids}


@pytest.fixture
def farms(engine: Engine) -> Farms:
    return Farms(engine)


def do(engine: Engine, sql: str, **parameters: Any) -> None:
    with engine.begin() as connection:
        connection.execute(text(sql), parameters)


def procs(engine: Engine) -> dict[str, str | None]:
    """What runs, by job: the frame of its proc."""
    with engine.connect() as connection:
        return {row.pk_job: row.pk_frame for row in connection.execute(text("SELECT pk_job, pk_frame FROM proc"))}


def refusal_of(job: JobIds) -> str:
    """A pattern for the refusal of the guard, which names the job in its first line."""
    return rf"CheckViolation\) .*{job.id}"


def test_a_cuebot_books_no_frame_of_a_managed_show(engine: Engine, cuebot: Engine, farms: Farms) -> None:
    with pytest.raises(IntegrityError, match=refusal_of(farms.ours)):
        do(cuebot, INSERT, **farms.run(farms.ours))
    assert procs(engine) == {}
    do(cuebot, INSERT, **farms.run(farms.theirs))
    do(engine, INSERT, **farms.run(farms.ours))
    assert procs(engine) == {job.id: job.frames[0] for job in (farms.ours, farms.theirs)}


def test_the_flag_is_read_anew_at_each_booking(engine: Engine, cuebot: Engine, farms: Farms) -> None:
    do(engine, "UPDATE show SET b_scheduler_managed = true")
    with pytest.raises(IntegrityError, match=refusal_of(farms.theirs)):
        do(cuebot, INSERT, **farms.run(farms.theirs))
    do(engine, "UPDATE show SET b_scheduler_managed = false")
    do(cuebot, INSERT, **farms.run(farms.theirs))


def test_a_cuebot_takes_no_proc_to_another_frame_of_a_managed_show(
    engine: Engine, cuebot: Engine, farms: Farms
) -> None:
    # given a run of each show, and Cuebot's proc with nothing to do
    do(engine, INSERT, **farms.run(farms.ours))
    do(cuebot, INSERT, **farms.run(farms.theirs))
    do(cuebot, "UPDATE proc SET pk_frame = NULL WHERE pk_job = :job", job=farms.theirs.id)

    # when it is to run a frame of ours, or our proc the next frame: each is refused
    for run in (farms.run(farms.ours, 1) | {"proc": farms.run(farms.theirs)["proc"]}, farms.run(farms.ours)):
        with pytest.raises(IntegrityError, match=refusal_of(farms.ours)):
            do(cuebot, REASSIGN, **run | {"frame": farms.ours.frames[1]})
    assert procs(engine) == {farms.ours.id: farms.ours.frames[0], farms.theirs.id: None}

    # then everything else that a Cuebot does to a proc of ours it does, and to its own all
    do(cuebot, "UPDATE proc SET int_mem_used = 5, ts_ping = now(), str_redirect = 'x', b_unbooked = true")
    do(cuebot, REASSIGN, **farms.run(farms.theirs) | {"frame": farms.theirs.frames[2]})
    do(cuebot, "UPDATE proc SET pk_frame = NULL")
    do(cuebot, "DELETE FROM proc")


def test_local_procs_are_cuebots_in_every_show(engine: Engine, cuebot: Engine, farms: Farms) -> None:
    run = farms.run(farms.ours, local=True)
    do(cuebot, INSERT, **run)
    do(cuebot, REASSIGN, **run | {"frame": farms.ours.frames[1]})
    assert procs(engine) == {farms.ours.id: farms.ours.frames[1]}


def test_what_is_missing_of_the_guard_is_known(engine: Engine) -> None:
    def whole() -> bool:
        with engine.connect() as connection:
            return triggers_of_proc(connection) >= GUARDS

    assert whole()
    do(engine, "ALTER TABLE proc DISABLE TRIGGER opencue_sched_guard_update")
    assert not whole()
    do(engine, "DROP TRIGGER opencue_sched_guard_update ON proc")
    assert not whole()
