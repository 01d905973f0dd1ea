"""What a run plays on a second PostgreSQL, and when."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
CONFTEST = """
import pytest

@pytest.fixture(scope="session", autouse=True)
def postgres_programs(request):
    return getattr(request, "param", None)
"""
ASKING = """
import pytest

@pytest.mark.parametrize("number", [1, 2])
def test_{name}(number, postgres_programs):
    print(f"{name} {{number}} on {{postgres_programs}}")
"""


def play(directory: Path, files: dict[str, str], *patterns: str) -> subprocess.CompletedProcess[str]:
    """What a run says that plays these files, each of which has tests of one name, with these options."""
    for file, name in files.items():
        path = directory / "tests" / file
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(ASKING.format(name=name))
    (directory / "tests" / "conftest.py").write_text(CONFTEST)
    (directory / "pytest.ini").write_text("[pytest]\naddopts = --import-mode=importlib\n")
    return subprocess.run(
        [
            *(sys.executable, "-m", "pytest", "-p", "xdist", "-p", "tests.second_postgres", "-p", "tests.side_by_side"),
            *("--second-postgres=/second", *patterns, "-q", "-s", "tests"),
        ],
        cwd=directory,
        env={**os.environ, "PYTHONPATH": str(ROOT), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},
        capture_output=True,
        text=True,
        check=False,
    )


def test_files_named_are_played_there_too_or_there_alone_after_all_others(tmp_path: Path):
    # given a file that is not named, one that is to be played twice and one of whole processes for the second alone
    files = {"unit/test_plain.py": "plain", "unit/test_twice.py": "twice", "e2e/test_alone.py": "alone"}
    # when all are played
    ran = play(tmp_path, files, "--on-second=tests/unit/test_tw*.py", "--on-second-only=tests/e2e/*.py")
    # then the second one comes once, after all others, and what is of whole processes first there
    assert ran.returncode == 0, ran.stdout + ran.stderr
    played = [line.lstrip(".") for line in ran.stdout.splitlines() if " on " in line]
    assert played == [
        *("plain 1 on None", "plain 2 on None", "twice 1 on None", "twice 2 on None"),
        *("alone 1 on /second", "alone 2 on /second", "twice 1 on /second", "twice 2 on /second"),
    ]


@pytest.mark.parametrize("option", ["--on-second", "--on-second-only"])
def test_a_run_that_is_to_play_what_is_not_there_is_refused(tmp_path: Path, option: str):
    # given a file that has another name than the run was told, when it is played
    ran = play(tmp_path, {"unit/test_renamed.py": "renamed"}, f"{option}=tests/unit/test_before.py")
    # then the run does not pass, and says why
    assert ran.returncode == pytest.ExitCode.USAGE_ERROR
    assert "tests/unit/test_before.py" in ran.stderr
