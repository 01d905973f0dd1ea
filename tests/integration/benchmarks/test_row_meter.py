"""Rows are counted for the function of the store that has PostgreSQL read them."""

from __future__ import annotations

from pathlib import Path

from prometheus_client import Counter
from sqlalchemy import Engine, text

from benchmarks.row_meter import install
from opencue_sched.clients.postgres import ask
from opencue_sched.embedded.farms.farm import Farm
from opencue_sched.embedded.farms.farm_specs import LayerSpec
from opencue_sched.store.pending import facility_ids

FRAMES = 37
COUNT = text("SELECT count(*) FROM frame")


def count_frames(engine: Engine) -> None:
    with engine.connect() as connection:
        connection.execute(COUNT)
    with engine.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
        connection.execute(COUNT)


def rows(meter: Counter) -> dict[str, float]:
    (family,) = meter.collect()
    return {sample.labels["reason"]: sample.value for sample in family.samples if sample.name.endswith("_total")}


def test_rows_are_counted_by_reader_while_the_switch_is_there(engine: Engine, tmp_path: Path) -> None:
    # given a farm with some frames, and a meter that is off
    with engine.begin() as connection:
        farm = Farm(connection)
        farm.job([LayerSpec(frames=FRAMES)], show=farm.show("metered"))
        facility = farm.facility("metered")
    meter = install(engine, tmp_path / "on")
    count_frames(engine)
    assert rows(meter) == {}

    # when it is on, and the frames are counted twice, within a transaction and without
    (tmp_path / "on").touch()
    count_frames(engine)
    assert ask(engine, facility_ids, "metered") == [facility]

    # then their rows were counted twice, and what a function of the store read under its name
    counted = rows(meter)
    assert counted["other"] == 2 * FRAMES
    assert counted["pending.facility_ids"] >= 1

    # and nothing more when it is off again
    (tmp_path / "on").unlink()
    count_frames(engine)
    assert rows(meter) == counted
