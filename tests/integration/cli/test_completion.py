"""What a shell is given when Tab is pressed."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
from sqlalchemy import Engine, text

from opencue_sched.embedded.farms.farm import Farm
from opencue_sched.embedded.farms.farm_specs import LayerSpec
from opencue_sched.settings import Settings
from tests.kit.command import Cli

PROGRAM = "from opencue_sched.cli import main; main()"
LARGE = ("sqlalchemy", "pydantic", "redis")
TELLING = f"""
import atexit, sys
atexit.register(lambda: print([name for name in {LARGE} if name in sys.modules], file=sys.stderr))
"""


def asked(line: str, how: str = "bash_complete") -> dict[str, str]:
    """The variables by which a shell asks how a line may go on."""
    return {"_OPENCUE_SCHED_COMPLETE": how, "COMP_WORDS": line, "COMP_CWORD": str(line.count(" "))}


def complete(
    line: str, *, how: str = "bash_complete", program: str = PROGRAM, **variables: str
) -> tuple[list[str], str]:
    """Lines of standard output, and standard error, of the program when the shell asks how a line may go on."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("OPENCUE_SCHED_")}
    ran = subprocess.run(
        [sys.executable, "-c", program],
        env={**inherited, **variables, **asked(line, how)},
        capture_output=True,
        text=True,
        timeout=60,
        check=how.endswith("_source"),
    )
    return [line for line in ran.stdout.splitlines() if line], ran.stderr


@pytest.fixture
def on_database(settings: Settings) -> dict[str, str]:
    return {"OPENCUE_SCHED_DATABASE_URL": settings.sqlalchemy_url}


@pytest.fixture
def a_farm(build: Callable[[Callable[[Farm], Any]], Any]) -> None:
    def make(farm: Farm) -> None:
        farm.subscription(farm.show("demo"), farm.alloc("general"))
        farm.limit("arnold", 20)
        for number in range(150):
            farm.host(name=f"render{number:03}")
        farm.job([LayerSpec(frames=1)], name="demo-sh010-user_comp")
        farm.job([LayerSpec(frames=1)], name="demo-sh020-user_comp")

    build(make)


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("opencue-sched job kill demo-sh010-user_comp demo-sh02", ["demo-sh020-user_comp"]),
        ("opencue-sched explain demo-sh01", ["demo-sh010-user_comp"]),
        ("opencue-sched host lock r", [f"render{number:03}" for number in range(100)]),
        ("opencue-sched show info d", ["demo"]),
        ("opencue-sched show create d", []),
        ("opencue-sched job list --show d", ["demo"]),
        ("opencue-sched subscription size demo lo", ["local.general"]),
        ("opencue-sched limit set a", ["arnold"]),
    ],
)
def test_names_are_completed_from_the_database(
    a_farm: None, environment: pytest.MonkeyPatch, cli: Cli, line: str, expected: list[str]
) -> None:
    for name, value in asked(line).items():
        environment.setenv(name, value)
    told = cli()
    assert (told.out.split(), told.err) == ([f"plain,{name}" for name in expected], "")


@pytest.mark.parametrize("url", ["postgresql://nobody@127.0.0.1:1/none", "nonsense"])
def test_nothing_is_completed_and_nothing_said_without_a_database(url: str) -> None:
    assert complete("opencue-sched job kill d", OPENCUE_SCHED_DATABASE_URL=url) == ([], "")


def test_a_database_that_does_not_answer_at_once_is_not_waited_for(
    a_farm: None, on_database: dict[str, str], engine: Engine
) -> None:
    # given a process that completes names
    assert complete("opencue-sched job kill demo-sh02", **on_database) == (["plain,demo-sh020-user_comp"], "")
    # when nobody can read jobs, then it says nothing
    with engine.begin() as connection:
        connection.execute(text("LOCK TABLE job IN ACCESS EXCLUSIVE MODE"))
        assert complete("opencue-sched job kill d", **on_database) == ([], "")


def test_commands_are_completed_without_a_large_library() -> None:
    out, told = complete("opencue-sched s", program=TELLING + PROGRAM)
    assert out == ["plain,service", "plain,show", "plain,submit", "plain,subscription"]
    assert told == "[]\n"


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_each_shell_gets_its_script(shell: str) -> None:
    script, _ = complete("opencue-sched", how=f"{shell}_source")
    assert f"_OPENCUE_SCHED_COMPLETE={shell}_complete" in "\n".join(script)
