"""What a run plays on a second PostgreSQL, and when."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

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


def test_files_named_are_played_there_too_or_there_alone_after_all_others(tmp_path: Path):
    # given a file that is not named, one that is to be played twice and one of whole processes for the second alone
    for file, name in (
        ("unit/test_plain.py", "plain"),
        ("unit/test_twice.py", "twice"),
        ("e2e/test_alone.py", "alone"),
    ):
        path = tmp_path / "tests" / file
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(ASKING.format(name=name))
    (tmp_path / "tests" / "conftest.py").write_text(CONFTEST)
    (tmp_path / "pytest.ini").write_text("[pytest]\naddopts = --import-mode=importlib\n")
    # when all are played
    ran = subprocess.run(
        [
            *(sys.executable, "-m", "pytest", "-p", "xdist", "-p", "tests.second_postgres", "-p", "tests.side_by_side"),
            *("--second-postgres=/second", "--on-second=tests/unit/test_tw*.py", "--on-second-only=tests/e2e/*.py"),
            *("-q", "-s", "tests"),
        ],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    # then the second one comes once, after all others, and what is of whole processes first there
    assert ran.returncode == 0, ran.stdout + ran.stderr
    played = [line.lstrip(".") for line in ran.stdout.splitlines() if " on " in line]
    assert played == [
        *("plain 1 on None", "plain 2 on None", "twice 1 on None", "twice 2 on None"),
        *("alone 1 on /second", "alone 2 on /second", "twice 1 on /second", "twice 2 on /second"),
    ]
