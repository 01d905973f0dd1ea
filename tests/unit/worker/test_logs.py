"""Logs are text for who looks on at a terminal, and JSON lines for everything else."""

from __future__ import annotations

import io
import json
import logging
import sys

import pytest
import structlog

from opencue_sched.settings import Logging
from opencue_sched.worker.logs import configure_logging


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture(autouse=True)
def _logging_as_it_was():
    root, before = logging.getLogger(), structlog.get_config()
    handlers, level = list(root.handlers), root.level
    yield
    for handler in root.handlers:
        handler.close()
    root.handlers, root.level = handlers, level
    structlog.configure(**before)


@pytest.mark.parametrize("stream", [Terminal, io.StringIO])
def test_a_terminal_gets_text_and_everything_else_json(monkeypatch, tmp_path, stream):
    monkeypatch.setattr(sys, "stderr", stream())
    configure_logging(Logging(path=tmp_path / "log"))
    logging.getLogger("one").warning("told")
    shown, kept = sys.stderr.getvalue(), (tmp_path / "log").read_text()
    assert json.loads(kept)["event"] == "told"
    assert shown.startswith("{") == (stream is io.StringIO)
    assert "told" in shown
