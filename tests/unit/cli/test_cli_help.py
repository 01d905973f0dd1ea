"""Every command helps with an example, prints JSON where a script would want it, and tells its exit statuses."""

from __future__ import annotations

import re
from collections.abc import Iterator

import click
import pytest

from opencue_sched.cli import cli

# These run until they are stopped.
WITHOUT_JSON = re.compile("demo|report-service|job log")


def commands(command: click.Command = cli, words: tuple[str, ...] = ()) -> Iterator[tuple[str, click.Command]]:
    """Every command and group with its words, but for the program itself."""
    if words:
        yield " ".join(words), command
    if isinstance(command, click.Group):
        context = click.Context(command)
        for name in command.list_commands(context):
            _, sub, _ = command.resolve_command(context, [name])
            assert sub is not None
            yield from commands(sub, (*words, name))


COMMANDS = list(commands())


def help_of(command: click.Command) -> str:
    return " ".join(command.get_help(click.Context(command, terminal_width=200, max_content_width=200)).split())


def takes_json(command: click.Command) -> bool:
    return any("--json" in parameter.opts for parameter in command.params)


@pytest.mark.parametrize(("words", "command"), COMMANDS, ids=lambda it: it if isinstance(it, str) else "")
def test_every_command_says_what_it_does_with_an_example(words: str, command: click.Command) -> None:
    said, _, example = help_of(command).partition(" Example: ")
    assert said.rstrip().endswith((".", ")"))
    assert f"opencue-sched {words}" in example.partition(" Options: ")[0]


@pytest.mark.parametrize(("words", "command"), COMMANDS, ids=lambda it: it if isinstance(it, str) else "")
def test_what_lists_shows_or_makes_something_prints_json_too(words: str, command: click.Command) -> None:
    if not isinstance(command, click.Group):
        assert takes_json(command) != bool(WITHOUT_JSON.fullmatch(words))


def test_the_program_tells_its_exit_statuses() -> None:
    _, _, listed = help_of(cli).partition("Exit status: ")
    assert re.findall(r"(?:^|; )(\d+) ", listed.partition(" Example: ")[0]) == ["0", "1", "2", "75", "78", "130"]


@pytest.mark.parametrize(("word", "near"), [("jobs", "'job'?"), ("zzz", ""), ("--jobs", "")])
def test_a_word_that_is_near_a_command_has_it_named(word: str, near: str) -> None:
    with pytest.raises(click.UsageError) as refused:
        cli.main([word], standalone_mode=False)
    assert refused.value.format_message().endswith(near or f"{word!r}.")


def test_the_demo_is_of_48_frames_on_three_rqds_with_two_workers() -> None:
    defaults = {option.name: option.default for option in dict(COMMANDS)["demo"].params}
    assert (defaults["frames"], defaults["hosts"], defaults["workers"]) == (48, 3, 2)
