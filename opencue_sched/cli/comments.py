"""The comments of a job or a host: how ``comment`` adds one, and how ``info`` shows them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import click
from sqlalchemy import Connection

from opencue_sched.cli.inputs import Commands, NameOf, current_user
from opencue_sched.cli.output import Column, Done
from opencue_sched.domain.names import plural
from opencue_sched.errors import InvalidInput
from opencue_sched.insight.comments import comment_document, comment_words
from opencue_sched.store.comments import SUBJECT_WIDTH, CommentedTable, add_comment, comments_of
from opencue_sched.store.named_rows import NamedRow

NOBODY = "somebody"
"""The user of a comment where the user id that runs the command has no name."""


def comments_column(connection: Connection, table: CommentedTable, row_id: str) -> Column:
    """What ``info`` shows of a job's or host's comments: a line each, the oldest first; JSON has their parts."""
    found = comments_of(connection, table, row_id)
    documents = [comment_document(comment) for comment in found]
    return Column("comments", "Comments", lambda _: documents or None, lambda _: "\n".join(map(comment_words, found)))


def add_comment_command(commands: Commands, kind: NameOf, table: CommentedTable, example: str) -> None:
    """Add the command ``comment`` to those of jobs or of hosts."""
    noun = kind.kind.value

    @commands.in_transaction(example, does=f"Add a comment to {noun}s, as CueGUI's do: `{noun} info` shows them.")
    @click.argument("chosen", type=kind, nargs=-1, required=True)
    @click.argument("message")
    @click.option("--subject", metavar="TEXT", help="Its title; the beginning of the message unless given.")
    def comment(connection: Connection, chosen: Sequence[NamedRow], message: str, subject: str | None) -> Done:
        if not message.strip():
            raise InvalidInput("the message of a comment is empty")
        title = subject or message.splitlines()[0][:SUBJECT_WIDTH]
        ids = [row.id for row in chosen]
        add_comment(connection, table, ids, user=current_user() or NOBODY, subject=title, message=message)
        names: list[Any] = [row.name for row in chosen]
        return Done(f"commented on {plural(len(ids), noun)}", [{noun: name, "comment": message} for name in names])
