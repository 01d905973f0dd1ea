"""Tasks of the dispatch queue."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from opencue_sched.celery import app
from opencue_sched.worker.task import runtime

PostingId = Annotated[str, Field(pattern="^[0-9a-f]{40}$")]
ReplyId = Annotated[str, Field(pattern="^[0-9a-f]{32}$")]


@app.task(name="opencue_sched.dispatch.dispatch_cluster")
def dispatch_cluster(posting: PostingId, ticket: int | None = None, reply: ReplyId | None = None) -> dict[str, object]:
    """Work on one posted cluster, unless somebody else does, it sleeps, or the message is an answered copy."""
    return runtime().dispatch(posting, ticket=ticket, reply=reply)
