"""``opencue-sched dead-letters``: messages that nobody could read."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import click

from opencue_sched.coordination.dead_letters import KEPT, DeadLetter, purge_dead_letters, read_dead_letters
from opencue_sched.operate.cli.connect import checked_redis
from opencue_sched.operate.cli.output import counted, done, json_option, show_rows, time_text
from opencue_sched.settings import get_settings

_SHOWN_CHARACTERS = 60


@click.group("dead-letters")
def command() -> None:
    """List and delete the messages that nobody could read.

    A worker puts what is no message, or no task of ours, aside and goes on. The newest 1,000 are kept, of all fleets of
    this namespace.

    Example: opencue-sched dead-letters list
    """


@command.command("list")
@click.option(
    "--count",
    type=click.IntRange(1, KEPT),
    default=50,
    show_default=True,
    help="At most so many, the newest first.",
)
@json_option
def list_(count: int, as_json: bool) -> None:
    """List dead letters: when and from which queue each came, why nobody could read it, and what it was.

    The table shows the beginning of each; JSON all that was kept, up to 10,000 characters.

    Example: opencue-sched dead-letters list --count 10 --json
    """
    with checked_redis() as client:
        letters = read_dead_letters(client, get_settings().coordination.namespace, count)
    columns = {"at": "At", "queue": "Queue", "reason": "Why", "body": "Message"}
    show_rows(
        [_row(letter) for letter in letters],
        columns,
        as_json=as_json,
        formats={"at": time_text, "reason": _shortened, "body": _shortened},
    )


@command.command()
@json_option
def purge(as_json: bool) -> None:
    """Delete all dead letters, once they were looked at.

    Example: opencue-sched dead-letters purge
    """
    with checked_redis() as client:
        deleted = purge_dead_letters(client, get_settings().coordination.namespace)
    done(f"{counted(deleted, 'dead letter')} deleted", as_json=as_json, deleted=deleted)


def _row(letter: DeadLetter) -> dict[str, Any]:
    return {
        "at": datetime.fromtimestamp(letter.at, UTC),
        "queue": letter.queue,
        "reason": letter.reason,
        "body": letter.body,
    }


def _shortened(text: str) -> str:
    """The beginning, on one line: anybody may have sent it, so control characters become escapes."""
    line = "".join(each if each.isprintable() else repr(each)[1:-1] for each in text[:_SHOWN_CHARACTERS])
    return f"{line}..." if len(text) > _SHOWN_CHARACTERS else line
