"""Comments of jobs and hosts, in OpenCue's table and by its habits: what people wrote, and what they did and why."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any, Literal

from sqlalchemy import Connection, Row, text

USER_WIDTH, SUBJECT_WIDTH, MESSAGE_WIDTH = 36, 128, 4000
"""Characters that the columns hold; longer texts are cut."""

CommentedTable = Literal["job", "host"]

Comment = Row[Any]
"""A comment: ``id``, ``created`` (with its time zone), ``user``, ``subject``, ``message``."""

# In the order in which everybody locks rows of a table: a completion that ends several jobs does so, too.
_LOCK = "SELECT pk_{table} FROM {table} WHERE pk_{table} = ANY(CAST(:ids AS varchar[])) ORDER BY 1 FOR NO KEY UPDATE"
# Add a comment to rows of a table; a comment with a given id is written over.
_ADD = """
    INSERT INTO comments (pk_comment, pk_{table}, str_user, str_subject, str_message)
    SELECT coalesce(CAST(:comment AS varchar), CAST(gen_random_uuid() AS varchar)), pk_{table}, :user, :subject,
           :message
      FROM {table} WHERE pk_{table} = ANY(CAST(:ids AS varchar[]))
    ON CONFLICT (pk_comment) DO UPDATE SET str_subject = excluded.str_subject, str_message = excluded.str_message
"""
# Cuebot's tools look for comments only where the row says that there are some.
_MARK = "UPDATE {table} SET b_comment = true WHERE pk_{table} = ANY(CAST(:ids AS varchar[])) AND NOT b_comment"
_DROP = "DELETE FROM comments WHERE pk_{table} = :id AND str_user = :user AND str_subject = :subject"
# The column has no time zone: it is read as UTC, in which our sessions write; a Cuebot writes in its own zone.
_LIST = """
    SELECT pk_comment AS id, CAST(ts_created AS timestamptz) AS created, str_user AS user, str_subject AS subject,
           str_message AS message
      FROM comments WHERE pk_{table} = :id ORDER BY ts_created, pk_comment
"""


def add_comment(
    connection: Connection,
    table: CommentedTable,
    ids: Collection[str],
    *,
    user: str,
    subject: str,
    message: str,
    comment_id: str | None = None,
) -> None:
    """Add the same comment to each of these jobs or hosts; rows that are gone get none.

    ``comment_id`` is the id that the comment of a single row gets. Where a comment has the id, its subject and message
    are written over. Longer texts are cut to what the columns hold.
    """
    wanted = {"ids": sorted(ids), "user": user[:USER_WIDTH]}
    texts = {"comment": comment_id, "subject": subject[:SUBJECT_WIDTH], "message": message[:MESSAGE_WIDTH]}
    connection.execute(text(_LOCK.format(table=table)), {"ids": wanted["ids"]})
    connection.execute(text(_ADD.format(table=table)), wanted | texts)
    connection.execute(text(_MARK.format(table=table)), {"ids": wanted["ids"]})


def drop_comments(connection: Connection, table: CommentedTable, row_id: str, *, user: str, subject: str) -> None:
    """Delete the comments of a job or host that have this user and subject."""
    connection.execute(text(_DROP.format(table=table)), {"id": row_id, "user": user, "subject": subject})


def comments_of(connection: Connection, table: CommentedTable, row_id: str) -> Sequence[Comment]:
    """The comments of a job or host, the oldest first."""
    return connection.execute(text(_LIST.format(table=table)), {"id": row_id}).all()
