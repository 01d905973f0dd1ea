"""Comments of jobs and hosts, in words and for JSON."""

from __future__ import annotations

from typing import Any

from opencue_sched.store.comments import Comment


def comment_words(comment: Comment) -> str:
    """A comment in one line: when, who, and what. The subject is left out where the message begins with it."""
    message = " ".join(comment.message.split())
    said = message if message.startswith(comment.subject) else f"{comment.subject}: {message}"
    return f"{comment.created.astimezone():%Y-%m-%d %H:%M:%S} {comment.user}: {said}"


def comment_document(comment: Comment) -> dict[str, Any]:
    """A comment for JSON."""
    return {
        "created": comment.created.isoformat(),
        "user": comment.user,
        "subject": comment.subject,
        "message": comment.message,
    }
