"""Which files Celery takes for our application."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType

import pytest
from celery import Celery

import celeryconfig
from opencue_sched.worker.loader import Loader


@pytest.fixture
def loader() -> Loader:
    return Loader(app=Celery(set_as_current=False))


@pytest.fixture
def directory_of_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory, with a celeryconfig.py and a tasks.py of somebody else."""
    for name in ("celeryconfig.py", "tasks.py", "settings_of_others.py"):
        (tmp_path / name).write_text("whose = 'others'\n")
    monkeypatch.chdir(tmp_path)
    for name in ("celeryconfig", "tasks", "settings_of_others"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    return tmp_path


@pytest.mark.parametrize("name", ["celeryconfig", "tasks"])
def test_our_files_win_over_those_of_the_working_directory(loader: Loader, directory_of_others: Path, name: str):
    module = loader.import_from_cwd(name)
    assert not hasattr(module, "whose")
    assert Path(module.__file__).is_relative_to(Path(celeryconfig.__file__).parent)


def test_files_of_other_names_are_taken_from_the_working_directory(loader: Loader, directory_of_others: Path):
    assert loader.import_from_cwd("settings_of_others").whose == "others"


def test_a_process_that_has_imported_somebody_elses_is_told_so(loader: Loader, monkeypatch: pytest.MonkeyPatch):
    others = ModuleType("tasks")
    others.__file__ = __file__
    monkeypatch.setitem(sys.modules, "tasks", others)
    with pytest.raises(ImportError, match=r"test_loader\.py"):
        loader.import_from_cwd("tasks")
