"""Commands whose output goes nowhere, and whose arguments are no text."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from opencue_sched.embedded.farms.farm import Farm
from opencue_sched.embedded.farms.farm_specs import LayerSpec
from tests.kit.command import Cli
from tests.kit.terminal import MAIN
from tests.kit.wording import lacks

Build = Callable[[Callable[[Farm], Any]], Any]

NO_TEXT = os.fsdecode(b"sim\xff")
"""What Python makes of an argument that is not UTF-8."""


def redirected(redirection: str, *words: str) -> subprocess.CompletedProcess[str]:
    """``opencue-sched WORDS...`` with a redirection of a shell's."""
    command = ["sh", "-c", f'exec "$@" {redirection}', "sh", sys.executable, "-c", MAIN, *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


@pytest.mark.parametrize("words", [("job", "list"), ("job", "list", "--json"), ("--help",)], ids=" ".join)
def test_a_full_disk_is_told_in_one_line(environment: pytest.MonkeyPatch, build: Build, words: tuple[str, ...]) -> None:
    # given something to list
    build(lambda farm: farm.job([LayerSpec()]))
    # when it is written to where there is no room
    ran = redirected(">/dev/full", *words)
    # then that is told, and is no success
    (line,) = ran.stderr.splitlines()
    assert ran.returncode == 1
    assert not lacks(line, "error: ", os.strerror(errno.ENOSPC))


@pytest.mark.parametrize(
    ("redirection", "status"), [("2>/dev/full", 1), ("2>&-", 1), (">&- 2>&-", 1), (">/dev/full 2>/dev/full", 1)]
)
def test_a_command_that_can_tell_nobody_has_its_exit_status(
    environment: pytest.MonkeyPatch, redirection: str, status: int
) -> None:
    ran = redirected(redirection, "job", "info", "nobody")
    assert (ran.returncode, ran.stdout, ran.stderr) == (status, "", "")


def test_what_is_closed_is_no_connections(environment: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A connection would get the lowest number that is free, and with it what libraries write to standard error."""
    seen, devices = tmp_path / "seen", "[os.fstat(number).st_rdev for number in range(3)]"
    look = f"import os; from opencue_sched.cli import main; main(); open({str(seen)!r}, 'w').write(str({devices}))"
    command = ["sh", "-c", 'exec "$@" <&- >&- 2>&-', "sh", sys.executable, "-c", look, "job", "list"]
    assert subprocess.run(command, timeout=60, check=False).returncode == 0
    assert seen.read_text() == str([Path(os.devnull).stat().st_rdev] * 3)


@pytest.mark.parametrize(
    "words",
    [
        ("job", "info", NO_TEXT),
        ("job", "kill", NO_TEXT, "--yes"),
        ("job", "retry", NO_TEXT),
        ("job", "log", NO_TEXT, "0001-render"),
        ("layer", "list", NO_TEXT),
        ("explain", NO_TEXT),
        ("host", "info", NO_TEXT),
        ("host", "lock", NO_TEXT),
        ("proc", "list", "--host", NO_TEXT),
        ("show", "info", NO_TEXT),
        ("folder", "list", NO_TEXT),
        ("subscription", "list", NO_TEXT),
        ("limit", "set", NO_TEXT, "3"),
        ("alloc", "tag", NO_TEXT, "general"),
    ],
    ids=lambda words: " ".join(words[:2]).replace(NO_TEXT, "X"),
)
def test_a_name_that_is_no_text_is_nobodys(cli: Cli, build: Build, words: tuple[str, ...]) -> None:
    # given jobs, hosts and shows with other names
    build(lambda farm: (farm.job([LayerSpec()]), farm.host()))
    # when a command is given one that no database could keep
    ran = cli(*words)
    # then there is none of that name
    assert (ran.status, ran.out) == (1, "")
    assert ran.err.startswith("error: ")
    assert "Traceback" not in ran.err


@pytest.mark.parametrize(
    "words",
    [
        ("job", "list", "--user", NO_TEXT),
        ("show", "create", NO_TEXT),
        ("host", "tags", "add", "host0001", NO_TEXT),
        ("board", "show", NO_TEXT),
        ("dispatch", NO_TEXT),
        ("ctl", "stop", "--instance", NO_TEXT),
        ("submit", NO_TEXT),
    ],
    ids=lambda words: " ".join(words[:2]).replace(NO_TEXT, "X"),
)
def test_text_that_is_none_is_refused(cli: Cli, build: Build, words: tuple[str, ...]) -> None:
    build(lambda farm: farm.host())
    ran = cli(*words)
    assert ran.status in (1, 2)
    assert ran.err.strip()
    assert "Traceback" not in ran.err
