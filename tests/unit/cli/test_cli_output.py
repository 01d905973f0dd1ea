"""What takes a while shows itself on a terminal, and nowhere else."""

from __future__ import annotations

import io
import time

import pytest

from opencue_sched.cli.output import working


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_terminal_sees_what_is_being_done(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Terminal()
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr("sys.stderr", terminal)
    with working("migrating the schema"):
        deadline = time.monotonic() + 10
        while "migrating the schema" not in terminal.getvalue():
            assert time.monotonic() < deadline
    assert "0:00:0" in terminal.getvalue()


def test_a_pipe_sees_nothing_and_errors_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    pipe = io.StringIO()
    monkeypatch.setattr("sys.stderr", pipe)
    with pytest.raises(KeyError), working("migrating the schema"):
        raise KeyError("it failed")
    assert pipe.getvalue() == ""
