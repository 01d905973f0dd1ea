"""The environments a launch asks for."""

from __future__ import annotations

from sqlalchemy import Engine

from opencue_sched.embedded.farm import Farm
from opencue_sched.embedded.farm_specs import LayerSpec
from opencue_sched.store.jobs import fetch_environments
from tests.integration.dispatch.gathering import counted_statements


def test_a_layers_variables_override_its_jobs(engine: Engine) -> None:
    with engine.begin() as connection:
        farm = Farm(connection)
        layers = [LayerSpec(env={"QUALITY": "high", "TILE": "1"}), LayerSpec()]
        job = farm.job(layers, env={"QUALITY": "low", "ROOT": "/a=b"})
        other = farm.job([LayerSpec(env={"X": "1"})], env={"Y": ""})
        asked = [*(layer.id for layer in job.layers), other.layers[0].id]

        with counted_statements(engine) as statements:
            environments = fetch_environments(connection, [job.id, other.id], asked)

    assert len(statements) == 2
    assert environments.of(job.id, job.layers[0].id) == {"QUALITY": "high", "TILE": "1", "ROOT": "/a=b"}
    assert environments.of(job.id, job.layers[1].id) == {"QUALITY": "low", "ROOT": "/a=b"}
    assert environments.of(other.id, other.layers[0].id) == {"X": "1", "Y": ""}
    assert environments.of("unknown", "unknown") == {}
