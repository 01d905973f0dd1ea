"""In which order tests of whole processes begin."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
TESTS = """
import time

import pytest

def test_short():
    pass

@pytest.mark.parametrize("number", [1, 2, 3])
def test_cases(number):
    pass

def test_long():
    time.sleep(0.3)

def test_longer():
    time.sleep(0.6)

@pytest.mark.long(5)
def test_marked():
    pass

@pytest.mark.long(50)
def test_marked_longer():
    pass
"""


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A directory with tests of whole processes that take different times."""
    (tmp_path / "tests" / "e2e").mkdir(parents=True)
    (tmp_path / "tests" / "e2e" / "test_some.py").write_text(TESTS)
    (tmp_path / "pytest.ini").write_text("[pytest]\naddopts = --import-mode=importlib\nmarkers = long(seconds)\n")
    return tmp_path


def _pytest(project: Path, *words: str) -> str:
    """What pytest prints with the plugin, which runs the tests in a process beside it."""
    command = [sys.executable, "-m", "pytest", "-p", "xdist", "-p", "tests.side_by_side", "-n", "1"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    ran = subprocess.run(
        [*command, "--dist", "loadgroup", *words, "tests"],
        cwd=project,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    return ran.stdout


def _order(project: Path) -> list[str]:
    """The tests in the order in which they are to begin, cases once."""
    listed = _pytest(project, "--collect-only", "-q", "-n", "0")
    names = [line.partition("::")[2].partition("[")[0] for line in listed.splitlines() if "::" in line]
    return list(dict.fromkeys(names))


def test_in_a_fresh_clone_long_tests_begin_first_and_then_what_has_the_most_cases(project: Path):
    assert _order(project) == [
        "test_marked_longer",
        "test_marked",
        "test_cases",
        "test_short",
        "test_long",
        "test_longer",
    ]


def test_what_took_longest_in_the_last_run_begins_first_and_a_new_test_before_it(project: Path):
    # given a run of all there is
    _pytest(project)
    assert _order(project)[:2] == ["test_longer", "test_long"]
    # when a test is added, and others run alone meanwhile
    with (project / "tests" / "e2e" / "test_some.py").open("a") as file:
        file.write("\ndef test_new():\n    pass\n")
    _pytest(project, "-k", "short")
    # then it is first, and what has not run this time is remembered
    assert _order(project)[:3] == ["test_new", "test_longer", "test_long"]
