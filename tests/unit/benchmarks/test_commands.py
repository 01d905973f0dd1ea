"""``python -m benchmarks``: each command helps, writes JSON, and refuses what it cannot read before it begins."""

from __future__ import annotations

import json
import os

import click
import pytest
from click.testing import CliRunner

from benchmarks.__main__ import cli
from benchmarks.figures import write_json


@pytest.mark.parametrize("name", sorted(cli.commands))
def test_each_benchmark_helps_with_an_example_and_writes_json(name: str) -> None:
    command = cli.commands[name]
    text = command.get_help(click.Context(command, terminal_width=200, max_content_width=200))
    assert f"python -m benchmarks {name}" in " ".join(text.split())
    assert any("--json" in parameter.opts for parameter in command.params)


@pytest.mark.parametrize(
    "words",
    [
        "scale --workers 1,two",
        "scale --steady --hosts 0",
        "scale --steady --layers 100",
        "scale --steady --layers 100 --frames 99",
        "latency --workers 0",
        "recovery --part nothing",
        "accounting --part nothing",
    ],
)
def test_what_no_benchmark_can_read_is_wrong_usage(words: str) -> None:
    ran = CliRunner().invoke(cli, words.split())
    assert ran.exit_code == 2, ran.output


def test_figures_are_written_where_there_is_no_directory_yet(tmp_path) -> None:
    write_json(tmp_path / "of" / "today" / "figures.json", [{"phase": "drain"}])
    assert json.loads((tmp_path / "of" / "today" / "figures.json").read_text()) == [{"phase": "drain"}]


@pytest.mark.parametrize("name", sorted(cli.commands.keys() - {"host-score"}))
def test_the_programs_of_another_postgres_are_given_by_their_directory(
    name: str, tmp_path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OPENCUE_SCHED_EMBEDDED_POSTGRES", "")
    with cli.commands[name].make_context(name, ["--postgres", str(tmp_path)]):
        assert os.environ["OPENCUE_SCHED_EMBEDDED_POSTGRES"] == str(tmp_path)
    ran = CliRunner().invoke(cli, [name, "--postgres", str(tmp_path / "nowhere")])
    assert ran.exit_code == 2, ran.output
