"""Layers that may not start before a moment, by command and by job file."""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime
from typing import Any

import pytest
from sqlalchemy import Engine, text

from opencue_sched.embedded.farms.farm import Farm
from opencue_sched.embedded.farms.farm_specs import LayerSpec
from tests.kit.command import Cli
from tests.kit.wording import lacks

Build = Callable[[Callable[[Farm], Any]], Any]
Rows = Callable[..., list[Any]]

JOB = "show-sh010-alice_comp"
TOMORROWS = "2099-12-24 18:00+01:00"
FILE = """
show: show
shot: sh010
name: comp
user: alice
layers:
  - name: render
    command: echo
    range: 1-2
    optimize: false
    start_after: {start}
"""


@pytest.fixture
def job(build: Build) -> str:
    """A job of a layer that waits."""
    build(lambda farm: farm.job([LayerSpec(name="render", frames=2)], name=JOB))
    return JOB


@pytest.fixture
def without_start_after(engine: Engine) -> None:
    """A schema of before V47."""
    with engine.begin() as connection:
        connection.execute(text("ALTER TABLE layer DROP COLUMN ts_start_after CASCADE"))
        connection.execute(text("ALTER TABLE layer DROP COLUMN str_start_after_reason"))


def test_a_layer_is_held_back_and_let_go(cli: Cli, job: str, rows: Rows) -> None:
    (layer,) = cli(
        "layer", "start-after", job, "render", TOMORROWS, "--reason", "the client looks first", "--json"
    ).json
    assert datetime.fromisoformat(layer["start_after"]) == datetime.fromisoformat(TOMORROWS)
    assert "the client looks first" in layer["start_after_reason"]
    assert "the client looks first" in cli("explain", job).out
    ((subject,),) = rows("SELECT str_subject FROM comments")
    assert not lacks(subject, "render", "start-after", TOMORROWS)

    (layer,) = cli("layer", "start-after", job, "render", "clear", "--json").json
    assert (layer["start_after"], layer["start_after_reason"]) == (None, None)


@pytest.mark.parametrize(
    ("words", "problem"),
    [(("render", "soon"), ["'soon'"]), (("rendr", "18:00"), ["'rendr'", "'render'"])],
)
def test_what_is_wrong_is_said(cli: Cli, job: str, words: tuple[str, ...], problem: list[str]) -> None:
    ran = cli("layer", "start-after", job, *words)
    assert ran.status == 1
    assert not lacks(ran.err, *problem)


def test_a_schema_that_does_not_know_it_refuses(cli: Cli, job: str, without_start_after: None) -> None:
    ran = cli("layer", "start-after", job, "render", TOMORROWS)
    assert ran.status == 1
    assert "V47" in ran.err


def test_a_job_file_has_it(cli: Cli, build: Build, rows: Rows) -> None:
    build(lambda farm: farm.show("show"))
    assert cli("submit", "-", given=FILE.format(start=TOMORROWS)).status == 0
    ((start, reason, optimize),) = rows("SELECT ts_start_after, str_start_after_reason, b_optimize FROM layer")
    assert (start, optimize) == (datetime.fromisoformat(TOMORROWS), False)
    assert "job file" in reason


def test_a_job_file_is_refused_by_field(cli: Cli, build: Build, without_start_after: None) -> None:
    build(lambda farm: farm.show("show"))
    refused = cli("submit", "-", given=FILE.format(start=TOMORROWS))
    assert refused.status == 1
    assert "layers[0].start_after: " in refused.err
    wrong = cli("submit", "-", given=FILE.format(start="soon"))
    assert not lacks(wrong.err, "layers[0].start_after: ", "'soon'")
