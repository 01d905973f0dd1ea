"""The environments a launch asks for."""

from __future__ import annotations

from sqlalchemy import Engine

from opencue_sched.embedded.farms.farm import Farm
from opencue_sched.embedded.farms.farm_specs import LayerSpec
from opencue_sched.store.booking import fetch_environments
from tests.kit.gathering import counted_statements


def test_variables_of_jobs_and_layers_take_one_statement(engine: Engine) -> None:
    with engine.begin() as connection:
        farm = Farm(connection)
        layers = [LayerSpec(env={"QUALITY": "high", "TILE": "1"}), LayerSpec()]
        job = farm.job(layers, env={"QUALITY": "low", "ROOT": "/a=b"})
        other = farm.job([LayerSpec(env={"X": "1"})], env={"Y": ""})
        asked = [*(layer.id for layer in job.layers), other.layers[0].id]

        with counted_statements(engine) as statements:
            environments = fetch_environments(connection, [job.id, other.id], asked)

    assert len(statements) == 1
    assert environments == {
        job.id: {"QUALITY": "low", "ROOT": "/a=b"},
        job.layers[0].id: {"QUALITY": "high", "TILE": "1"},
        other.id: {"Y": ""},
        other.layers[0].id: {"X": "1"},
    }
