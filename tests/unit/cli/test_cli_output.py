"""A column serves table and JSON; what takes a while shows itself on a terminal, and nowhere else."""

from __future__ import annotations

import io
import json
import time
from types import SimpleNamespace

import click
import pytest

from opencue_sched.cli.output import HIGH, LOW, NAME, Column, Columns, in_cores, working


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


def test_a_pipe_sees_nothing_and_errors_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    pipe = io.StringIO()
    monkeypatch.setattr("sys.stderr", pipe)
    with pytest.raises(KeyError), working("migrating the schema"):
        raise KeyError("it failed")
    assert pipe.getvalue() == ""


THINGS = [
    SimpleNamespace(name="a", centicores=150, up=True, note=None),
    SimpleNamespace(name="b", centicores=1000, up=False, note="full"),
]
COLUMNS = Columns(
    Column("thing", "Thing", "name"),
    Column("cores", "Cores", in_cores("centicores")),
    Column("up", "Up"),
    Column("note"),
    Column("", "Note", lambda thing: thing.note, "({})".format),
)


def test_a_column_with_a_key_is_in_json_under_it(capsys: pytest.CaptureFixture[str]) -> None:
    COLUMNS.listed(THINGS).show(as_json=True)
    assert json.loads(capsys.readouterr().out) == [
        {"thing": "a", "cores": 1.5, "up": True, "note": None},
        {"thing": "b", "cores": 10, "up": False, "note": "full"},
    ]


def test_of_nothing_standard_error_says_what_there_is_none_of(capsys: pytest.CaptureFixture[str]) -> None:
    COLUMNS.listed([]).show(as_json=False)
    COLUMNS.listed([], "gadget").show(as_json=False)
    told = capsys.readouterr()
    assert (told.out, [line.split()[-1] for line in told.err.splitlines()]) == ("", ["things", "gadgets"])
    COLUMNS.listed([]).show(as_json=True)
    assert capsys.readouterr() == ("[]\n", "")


def test_a_narrow_terminal_leaves_out_columns_without_any_value_first(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    columns = Columns(
        Column("name", "Name", importance=NAME),
        Column("note", "A Note That Few Have", importance=HIGH),
        Column("up", "Up", importance=LOW),
        Column("said", "Said", lambda _: "word " * 5, importance=HIGH, wraps=True),
    )
    for width, titles in (
        (80, ["Name", "A", "Note", "That", "Few", "Have", "Up", "Said"]),
        (40, ["Name", "Up", "Said"]),
    ):
        monkeypatch.setenv("COLUMNS", str(width))
        monkeypatch.setattr("sys.stdout.isatty", lambda: True)
        columns.listed(THINGS[:1]).show(as_json=False)
        lines = click.unstyle(capsys.readouterr().out).splitlines()
        assert lines[0].split() == titles
        assert lines[1].count("word") == 5, "what wraps has the room"


def test_a_column_with_a_title_is_in_the_table_and_numbers_are_aligned(capsys: pytest.CaptureFixture[str]) -> None:
    COLUMNS.listed(THINGS).show(as_json=False)
    assert [line.rstrip() for line in capsys.readouterr().out.splitlines()] == [
        "Thing  Cores  Up   Note",
        "a        1.5  yes",
        "b         10  no   (full)",
    ]
