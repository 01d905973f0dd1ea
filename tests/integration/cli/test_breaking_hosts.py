"""A host that breaks frames: `doctor`, `explain` and `top` name it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from opencue_sched.embedded.farms.farm import Farm
from opencue_sched.embedded.farms.farm_specs import LayerSpec
from tests.kit.command import Cli
from tests.kit.failed_runs import failed_on

Build = Callable[[Callable[[Farm], Any]], Any]

SAID = (
    "host render07 may break frames: 4 frames of 4 jobs failed there within the last hour and ran through elsewhere, "
    "or were not tried elsewhere (a, b, c and 1 more)"
)


@pytest.fixture
def broken(build: Build) -> None:
    """A host on which frames of four jobs failed, and a job elsewhere."""

    def make(farm: Farm) -> None:
        farm.host(name="render07")
        far = farm.alloc("far")
        farm.host(name="render08", alloc=far)
        farm.job([LayerSpec(tags="far")], name="elsewhere")
        failed_on(farm, "render07", [farm.job(name=name) for name in "abcd"])

    build(make)


@pytest.mark.usefixtures("broken")
def test_it_is_named_with_the_jobs_and_what_to_do(cli: Cli) -> None:
    found = [it for it in cli("doctor", "--json").json["findings"] if "break frames" in it["text"]]
    assert [(it["level"], it["what"], it["text"]) for it in found] == [("warn", "hosts", SAID)]
    assert "opencue-sched host lock render07" in found[0]["remedy"]
    assert cli("top", "--json").json["breaking_hosts"] == [{"host": "render07", "words": SAID}]


@pytest.mark.usefixtures("broken")
def test_explain_names_it_to_jobs_that_may_run_there(cli: Cli) -> None:
    assert cli("explain", "a", "--json").json["breaking_hosts"] == [SAID]
    assert SAID in " ".join(cli("explain", "a").out.split())
    assert cli("explain", "elsewhere", "--json").json["breaking_hosts"] == []
