"""Celery's loader, kept to the files of this distribution.

``celeryconfig.py`` and ``tasks`` stand beside the package ``opencue_sched``, in a checkout as in an installed wheel.
Celery's manual gives both names to everybody's files, and Celery looks in the working directory first.
"""

from __future__ import annotations

import sys
from importlib.machinery import PathFinder
from importlib.util import module_from_spec
from pathlib import Path
from typing import Any

from celery.loaders.app import AppLoader

_DIRECTORY = Path(__file__).resolve().parents[2]
_OURS = ("celeryconfig", "tasks")


class Loader(AppLoader):
    """Imports ``celeryconfig`` and ``tasks`` from beside our package, and all else as Celery does."""

    def import_module(self, module: str, package: str | None = None) -> Any:
        """Celery's hook: import a module, one of ours from beside our package."""
        name = module.partition(".")[0]
        if name in _OURS:
            _import_ours(name)
        return super().import_module(module, package)


def _import_ours(name: str) -> None:
    """Import a top-level module of ours, whatever the import path leads to. Raises ImportError when another module of
    this name has been imported."""
    spec = PathFinder.find_spec(name, [str(_DIRECTORY)])
    if spec is None or spec.origin is None or spec.loader is None:
        raise ModuleNotFoundError(f"{name} is missing in {_DIRECTORY}, beside opencue_sched", name=name)
    if name in sys.modules:
        imported_from = getattr(sys.modules[name], "__file__", None)
        if imported_from is None or not Path(imported_from).samefile(spec.origin):
            raise ImportError(f"opencue_sched needs its own {name}; {imported_from} was imported under that name")
        return
    module = module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]  # as an import that fails
        raise
