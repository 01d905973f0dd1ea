"""A frame that ran out of memory is booked with what it asked for; the others of its layer as before."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from sqlalchemy import Engine, text

from opencue_sched.coordination.change_log import HostChanges
from opencue_sched.embedded.farms.farm import Farm
from opencue_sched.embedded.farms.farm_specs import LayerSpec
from opencue_sched.reports.completion import Releaser
from opencue_sched.reports.run_ends import CompletedFrame, RunVerdict
from opencue_sched.settings import Release, Rqd, Settings
from tests.kit.passes import Passes, passes

GB = 1024 * 1024


@pytest.fixture
def one(engine: Engine, settings: Settings) -> Iterator[Passes]:
    with passes(engine, settings.model_copy(update={"rqd": Rqd(dry_run_mode=True)})) as runner:
        yield runner


def reserved(engine: Engine) -> dict[int, float]:
    """GB of each running frame, by its number."""
    sql = text("SELECT int_number, proc.int_mem_reserved FROM proc JOIN frame USING (pk_frame)")
    with engine.connect() as connection:
        return {row.int_number: row.int_mem_reserved / GB for row in connection.execute(sql)}


def runs_out_of_memory(here: Passes, number: int) -> None:
    """The frame that runs with this number ends so, and the hosts are told of."""
    sql = text(
        "SELECT pk_proc, proc.pk_frame, host.str_name FROM proc JOIN frame USING (pk_frame) JOIN host USING (pk_host)"
        " WHERE int_number = :number"
    )
    with here.engine.connect() as connection:
        proc, frame, host = connection.execute(sql, {"number": number}).one()
    changes = HostChanges(here.client, here.settings.coordination.namespace)
    releaser = Releaser(here.engine, Release(), here.runner.ledger, changes)
    (ended,) = releaser.end([CompletedFrame(proc, frame, host, exit_status=33)])
    assert ended.verdict is RunVerdict.APPLIED


def test_a_frame_that_ran_out_of_memory_is_booked_with_more_and_its_layer_after_three(
    one: Passes, engine: Engine
) -> None:
    # given a layer of six frames of 2 GB that run
    with engine.begin() as connection:
        farm = Farm(connection)
        farm.host(cores=8, memory_gb=64)
        farm.job([LayerSpec(frames=6, memory_gb=2)])
    one.drain()
    assert reserved(engine) == dict.fromkeys(range(1, 7), 2)

    # when one dies for want of memory, twice, and then another one, and another
    runs_out_of_memory(one, 2)
    one.drain()
    assert reserved(engine) == {**dict.fromkeys(range(1, 7), 2), 2: 4}
    runs_out_of_memory(one, 2)
    runs_out_of_memory(one, 3)
    one.drain()
    assert reserved(engine) == {**dict.fromkeys(range(1, 7), 2), 2: 6, 3: 4}

    # then each is booked with its own, and after the third the layer asks for what three of them need
    runs_out_of_memory(one, 4)
    one.drain()
    assert reserved(engine) == {1: 2, 2: 6, 3: 4, 4: 4, 5: 2, 6: 2}
    with engine.connect() as connection:
        assert connection.execute(text("SELECT int_mem_min FROM layer")).scalar_one() == 4 * GB
