"""What the frames of a plan are launched with, and layers of which none can be."""

from __future__ import annotations

import pytest
from sqlalchemy import Engine, text

from opencue_sched.domain.frame_command import JobDetails, LayerDetails
from opencue_sched.embedded.farms.farm import Farm
from opencue_sched.embedded.farms.farm_specs import LayerSpec
from opencue_sched.store.booking import fetch_launch_details
from tests.kit.gathering import counted_statements
from tests.kit.wording import lacks


def test_what_jobs_and_layers_say_takes_one_statement(engine: Engine) -> None:
    with engine.begin() as connection:
        farm = Farm(connection)
        layers = [
            LayerSpec(frames=2, chunk=5, command="render #IFRAME#", env={"QUALITY": "high", "TILE": "1"}),
            LayerSpec(command="comp"),
        ]
        job = farm.job(layers, env={"QUALITY": "low", "ROOT": "/a=b"}, shot="sh1", user="jo", uid=501, log_dir="/logs")
        other = farm.job([LayerSpec(env={"X": "1"})], env={"Y": ""}, uid=None)
        connection.execute(text("UPDATE job SET str_loki_url = 'http://loki' WHERE pk_job = :job"), {"job": job.id})
        asked = [*(layer.id for layer in job.layers), other.layers[0].id]

        with counted_statements(engine) as statements:
            details = fetch_launch_details(connection, [job.id, other.id], asked)

    assert len(statements) == 1
    assert details.unfit == {}
    assert details.jobs[job.id] == JobDetails(
        "sh1", "jo", 501, "/logs", "http://loki", environment={"QUALITY": "low", "ROOT": "/a=b"}
    )
    assert (details.jobs[other.id].uid, details.jobs[other.id].loki_url) == (None, "")
    assert details.layers[job.layers[0].id] == LayerDetails(
        "render #IFRAME#", "1-10", 5, environment={"QUALITY": "high", "TILE": "1"}
    )
    assert details.layers[job.layers[1].id] == LayerDetails("comp", "1-1", 1, environment={})
    environments = {of: each.environment for of, each in {**details.jobs, **details.layers}.items()}
    assert environments == {
        job.id: {"QUALITY": "low", "ROOT": "/a=b"},
        job.layers[0].id: {"QUALITY": "high", "TILE": "1"},
        job.layers[1].id: {},
        other.id: {"Y": ""},
        other.layers[0].id: {"X": "1"},
    }


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ("int_chunk_size = 0", ["int_chunk_size", "0"]),
        ("int_chunk_size = -1", ["int_chunk_size", "-1"]),
        ("str_cmd = '  '", ["str_cmd"]),
        ("str_range = '1-5,7..'", ["'7..'"]),
    ],
)
def test_a_layer_that_cannot_be_launched_is_named_alone(engine: Engine, change: str, why: list[str]) -> None:
    with engine.begin() as connection:
        job = Farm(connection).job([LayerSpec(), LayerSpec()])
        bad, good = (layer.id for layer in job.layers)
        connection.execute(
            text(f"UPDATE layer SET {change} WHERE pk_layer = :layer"),  # noqa: S608 - our own constants
            {"layer": bad},
        )

        details = fetch_launch_details(connection, [job.id], [bad, good])

    assert details.layers.keys() == {good}
    assert details.unfit.keys() == {bad}
    assert not lacks(details.unfit[bad], *why)


def test_a_layer_that_is_gone_cannot_be_launched(engine: Engine) -> None:
    with engine.begin() as connection:
        job = Farm(connection).job()
        details = fetch_launch_details(connection, [job.id], ["gone", job.layers[0].id])

    assert details.layers.keys() == {job.layers[0].id}
    assert details.unfit.keys() == {"gone"}
