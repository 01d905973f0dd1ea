"""A host that breaks frames: `doctor`, `explain` and `top` name it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from opencue_sched.embedded.farms.farm import Farm
from opencue_sched.embedded.farms.farm_specs import LayerSpec
from tests.kit.command import Cli
from tests.kit.failed_runs import failed_on
from tests.kit.wording import lacks

Build = Callable[[Callable[[Farm], Any]], Any]

SAID = ("render07", "4 frames", "4 jobs", "(a, b, c ")
"""The host, how many frames failed there, of how many jobs, and the names of some."""


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
    found = next(
        it for it in cli("doctor", "--json").json["findings"] if (it["what"], it["level"]) == ("hosts", "warn")
    )
    assert not lacks(found["text"], *SAID)
    assert "opencue-sched host lock render07" in found["remedy"]
    assert cli("top", "--json").json["breaking_hosts"] == [{"host": "render07", "words": found["text"]}]


@pytest.mark.usefixtures("broken")
def test_explain_names_it_to_jobs_that_may_run_there(cli: Cli) -> None:
    (said,) = cli("explain", "a", "--json").json["breaking_hosts"]
    assert not lacks(said, *SAID)
    assert said in " ".join(cli("explain", "a").out.split())
    assert cli("explain", "elsewhere", "--json").json["breaking_hosts"] == []
