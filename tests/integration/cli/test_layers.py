"""`opencue-sched layer`: what the frames of a running job's layers need."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest

from opencue_sched.embedded.farms.farm import Farm
from opencue_sched.embedded.farms.farm_specs import JobIds, LayerSpec
from tests.kit.command import Cli
from tests.kit.wording import lacks

Build = Callable[[Callable[[Farm], Any]], Any]
Rows = Callable[..., list[Any]]

NAME = "demo-s-u_job"


@pytest.fixture
def job(build: Build) -> JobIds:
    """A job of two layers, one frame of the first running, on a farm of one host of 16 cores."""

    def make(farm: Farm) -> JobIds:
        show = farm.show("demo")
        farm.subscription(show, farm.alloc("general"), size=100)
        layers = [LayerSpec(name="render", frames=3, limits=[farm.limit("arnold", 5)]), LayerSpec(name="comp")]
        made = farm.job(layers, show=show, name=NAME, max_cores=50)
        farm.run(made.frames[:1], farm.host(cores=16, memory_gb=64, tags=["gpu"], gpus=2, gpu_memory_gb=16))
        farm.limit("maya", 3)
        return made

    made: JobIds = build(make)
    return made


def test_layers_are_listed(cli: Cli, job: JobIds) -> None:
    render, comp = cli("layer", "list", NAME, "--json").json
    assert (render["layer"], render["running"], render["waiting"], render["limits"]) == ("render", 1, 2, ["arnold"])
    assert comp["layer"] == "comp"
    assert cli("layer", "list", NAME).words[1][0] == "render"


def test_every_field_is_written_as_cuebot_writes_it(cli: Cli, job: JobIds, rows: Rows) -> None:
    # when all of a layer is changed
    ran = cli(
        *("layer", "set", NAME, "render", "--cores", "2.5", "--max-cores", "8", "--memory", "16GiB", "--no-optimize"),
        *("--gpus", "1", "--gpu-memory", "8GiB", "--tags", "gpu, general", "--timeout", "90", "--timeout-llu", "15"),
        *("--add-limit", "maya", "--drop-limit", "arnold"),
    )
    # then it is so, and what runs and the other layer stay as they are
    assert (ran.status, ran.err) == (0, "")
    said = re.split(" {2,}", ran.out.splitlines()[1])
    assert {"render", "2.5", "8", "16.0G", "1", "8.0G", "gpu | general", "maya", "90", "15"} <= set(said)
    stored = (
        "SELECT int_cores_min, int_cores_max, int_mem_min, b_optimize, int_gpus_min, int_gpu_mem_min, str_tags,"
        " int_timeout, int_timeout_llu, b_threadable FROM layer ORDER BY int_dispatch_order"
    )
    render, comp = (tuple(row) for row in rows(stored))
    assert render == (250, 800, 16 * 1024**2, False, 1, 8 * 1024**2, "gpu | general", 90, 15, True)
    assert comp == (100, 0, 1024**2, True, 0, 0, "general", 0, 0, True)
    limits = "SELECT limit_record.str_name FROM layer_limit JOIN limit_record USING (pk_limit_record)"
    assert rows(limits) == [("maya",)]
    assert rows("SELECT int_cores_reserved, int_mem_reserved FROM proc") == [(100, 1024**2)]


def test_several_layers_at_once_and_only_what_is_said(cli: Cli, job: JobIds, rows: Rows) -> None:
    ran = cli("layer", "set", NAME, "render", "comp", "--cores", "-2", "--add-limit", "arnold", "--json")
    assert [(row["layer"], row["min_cores"]) for row in ran.json["layers"]] == [("render", -2), ("comp", -2)]
    assert ran.json["notes"] == []
    assert rows("SELECT int_cores_min, int_mem_min FROM layer") == [(-200, 1024**2)] * 2
    assert rows("SELECT count(*) FROM layer_limit") == [(2,)]


def test_what_the_farm_cannot_serve_is_noted(cli: Cli, job: JobIds, rows: Rows) -> None:
    ran = cli("layer", "set", NAME, "comp", "--memory", "128GiB")
    assert ran.status == 0
    assert not lacks(ran.err, "note: ", "comp", "general", "64 of 128 GiB")
    assert rows("SELECT max(int_mem_min) FROM layer") == [(128 * 1024**2,)]
    # and of a layer that is served nothing is noted, whatever another one needs
    assert cli("layer", "set", NAME, "render", "--timeout", "60").err == ""


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (("rendr", "--gpus", "1"), [NAME, "'rendr'", "'render'"]),
        (("render",), ["--help"]),
        (("render", "--memory", "4 apples"), ["memory", "'4 apples'"]),
        (("render", "--memory", "1MiB"), ["memory"]),
        (("render", "--gpus", "-1"), ["gpus"]),
        (("render", "--tags", "big mem"), ["tags[0]", "'big mem'"]),
        (("render", "--cores", "8", "--max-cores", "4"), ["render", "cores"]),
        (("render", "--cores", "0.5"), ["--no-threadable"]),
        (
            ("comp", "--cores", "51"),
            ["comp", "`opencue-sched job max-"],
        ),
        (("render", "--add-limit", "arnodl"), ["'arnodl'", "'arnold'"]),
    ],
)
def test_what_is_wrong_is_said_and_nothing_is_changed(
    cli: Cli, job: JobIds, rows: Rows, words: tuple[str, ...], problem: list[str]
) -> None:
    before = rows("SELECT * FROM layer ORDER BY pk_layer")
    ran = cli("layer", "set", NAME, *words)
    assert ran.status in (1, 2)
    assert not lacks(ran.err, *problem)
    assert rows("SELECT * FROM layer ORDER BY pk_layer") == before
