"""What a command changed, as JSON, under people's names."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from opencue_sched.embedded.farms.farm import Farm
from opencue_sched.embedded.farms.farm_specs import LayerSpec
from tests.kit.command import Cli


@pytest.fixture
def a_farm(build: Callable[[Callable[[Farm], Any]], Any]) -> None:
    """A host that is up and one that is down, a job, a subscription and a limit."""

    def make(farm: Farm) -> None:
        show, general = farm.show("demo"), farm.alloc("general")
        farm.alloc("desktop")
        farm.subscription(show, general, size=100, burst=150)
        farm.limit("arnold", 20)
        farm.host(name="render01", tags=["old"])
        farm.host(name="render02", state="DOWN")
        farm.job([LayerSpec(frames=2)], name="demo-sh-user_job", show=show)

    build(make)


JOB = {"job": "demo-sh-user_job"}
GENERAL = {"show": "demo", "allocation": "local.general"}


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("host lock render01", [{"host": "render01", "lock": "LOCKED"}]),
        ("host unlock render01", [{"host": "render01", "lock": "OPEN"}]),
        ("host tags add render01 ssd", {"host": "render01", "tags": ["general", "render01", "old", "ssd"]}),
        ("host tags remove render01 old", {"host": "render01", "tags": ["general", "render01"]}),
        ("host move render01 local.desktop", [{"host": "render01", "allocation": "local.desktop"}]),
        ("host delete render02", {"host": "render02"}),
        ("job pause demo-sh-user_job", [{**JOB, "paused": True}]),
        ("job unpause demo-sh-user_job", [{**JOB, "paused": False}]),
        ("job priority demo-sh-user_job 80", [{**JOB, "priority": 80}]),
        ("job min-cores demo-sh-user_job 2.5", [{**JOB, "min_cores": 2.5}]),
        ("job max-cores demo-sh-user_job 200", [{**JOB, "max_cores": 200}]),
        ("job max-cores demo-sh-user_job -1", [{**JOB, "max_cores": -1}]),
        ("job max-gpus demo-sh-user_job 4", [{**JOB, "max_gpus": 4}]),
        ("show active demo off", {"show": "demo", "active": False}),
        ("show booking demo on", {"show": "demo", "booking": True}),
        ("show default-min-cores demo 2", {"show": "demo", "default_min_cores": 2}),
        ("show default-max-cores demo 200", {"show": "demo", "default_max_cores": 200}),
        ("alloc tag local.general workstation", {"allocation": "local.general", "tag": "workstation", "hosts": 2}),
        ("subscription size demo local.general 120", {**GENERAL, "size": 120}),
        ("subscription burst demo local.general 150%", {**GENERAL, "burst": 150}),
        ("subscription delete demo local.general", GENERAL),
        ("limit set arnold 25", {"limit": "arnold", "max": 25}),
        ("limit delete arnold", {"limit": "arnold"}),
    ],
)
def test_a_change_is_printed_as_json(cli: Cli, a_farm: None, words: str, expected: Any) -> None:
    ran = cli(*words.split(), "--json")
    assert ran.status == 0, ran.err
    found, wanted = (ran.json, expected) if isinstance(expected, list) else ([ran.json], [expected])
    assert [{key: row[key] for key in like} for row, like in zip(found, wanted, strict=True)] == wanted
    assert all(row.get("id") or "hosts" in row for row in found), json.dumps(found)


def test_a_migration_prints_the_revisions_as_json(cli: Cli) -> None:
    migrated = cli("migrate", "--json").json
    assert migrated["before"] == migrated["revision"] is not None
