"""Services by command, where there is no Cuebot."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from sqlalchemy import Engine, text

from tests.kit.command import Cli
from tests.kit.wording import lacks

Rows = Callable[..., list[Any]]
GIB = 1024**2


LEFT_TO_IT = "it changes its services itself, by CueGUI and cueadmin"
"""Why no service is made or changed on a schema of a Cuebot."""


@pytest.mark.without_cuebot(LEFT_TO_IT)
def test_a_service_is_made_listed_and_changed(cli: Cli, rows: Rows) -> None:
    made = cli(
        *("service", "create", "arnold", "--cores", "2.5", "--memory", "16GiB", "--memory-increase", "8GiB"),
        *("--tags", "gpu, general", "--timeout", "90", "--json"),
    )
    assert made.status == 0
    assert (made.json["service"], made.json["min_cores"], made.json["memory_kb"]) == ("arnold", 2.5, 16 * GIB)
    stored = (
        "SELECT int_cores_min, int_mem_min, int_min_memory_increase, str_tags, int_timeout, b_threadable FROM service"
    )
    assert rows(f"{stored} WHERE str_name = 'arnold'") == [(250, 16 * GIB, 8 * GIB, "gpu | general", 90, True)]

    changed = cli("service", "set", "arnold", "--memory", "24GiB", "--no-threadable", "--cores", "1", "--json").json
    assert (changed["memory_kb"], changed["threadable"], changed["memory_increase_kb"]) == (24 * GIB, False, 8 * GIB)
    assert "arnold" in {service["service"] for service in cli("service", "list", "--json").json}


@pytest.mark.without_cuebot(LEFT_TO_IT)
@pytest.mark.parametrize(
    ("words", "status", "problem"),
    [
        (("create", "arnold"), 1, ["'arnold'"]),
        (("create", "ar nold"), 1, ["'ar nold'"]),
        (("create", "x" * 40), 1, ["character varying(36)"]),
        (("create", "maya", "--memory", "4 apples"), 1, ["memory", "'4 apples'"]),
        (("set", "arnodl", "--gpus", "1"), 1, ["'arnodl'", "'arnold'"]),
        (("set", "arnold"), 2, ["--help"]),
    ],
)
def test_what_is_wrong_is_said(cli: Cli, words: tuple[str, ...], status: int, problem: list[str]) -> None:
    assert cli("service", "create", "arnold").status == 0
    ran = cli("service", *words)
    assert ran.status == status
    assert not lacks(ran.err, *problem)


@pytest.mark.parametrize("words", [("create", "maya"), ("set", "default", "--gpus", "1")])
def test_a_cuebots_services_are_left_to_it(cli: Cli, engine: Engine, words: tuple[str, ...]) -> None:
    with engine.begin() as connection:
        connection.execute(text("UPDATE opencue_sched_origin SET origin = 'cuebot'"))
    refused = cli("service", *words)
    assert refused.status == 1
    assert "Cuebot" in refused.err
