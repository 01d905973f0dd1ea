"""Tasks of the dispatch queue."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

from pydantic import Field

from opencue_sched.celery import app
from opencue_sched.coordination.postings import ClaimRefused
from opencue_sched.coordination.replies import answer_job
from opencue_sched.dispatch.report import PassEnd
from opencue_sched.worker import fleet_metrics, metrics
from opencue_sched.worker.task import process_of

if TYPE_CHECKING:
    from opencue_sched.worker.process import Process

PostingId = Annotated[str, Field(pattern="^[0-9a-f]{40}$")]
ReplyId = Annotated[str, Field(pattern="^[0-9a-f]{32}$")]


@app.task(name="opencue_sched.dispatch.dispatch_cluster")
def dispatch_cluster(posting: PostingId, ticket: int | None = None, reply: ReplyId | None = None) -> dict[str, object]:
    """Work on one posted cluster, unless another worker does, the cluster sleeps, or the message is an answered copy.

    A worker that is told to take no work passes the message on. The client that waits at ``reply`` gets the summary, or
    the error, which is raised all the same.
    """
    mine = process_of(app)
    if not mine.membership.workload.takes_work:
        mine.messenger.to_all(posting, ticket, reply=reply)
        return {"ended": "given back"}
    try:
        summary = _pass(mine, posting, ticket)
    except Exception as error:
        if reply is not None:
            mine.membership.answer_failed(reply, posting, error)
        raise
    if reply is not None:
        answer_job(mine.client, mine.membership.namespace, reply, summary)
    return summary


def _pass(mine: Process, posting: str, ticket: int | None) -> dict[str, object]:
    """Make a pass for a posting and count it; what the task answers, for the posting's cluster and those planned with
    it."""
    answer = mine.dispatcher.dispatch(posting, ticket)
    if isinstance(answer, ClaimRefused):
        fleet_metrics.messages_dropped.labels(answer.reason).inc()
        return {"ended": "dropped", "reason": answer.reason, "owner": answer.owner}
    for report in answer:
        metrics.record_pass(report)
    metrics.host_cache_size.set(len(mine.hosts.cache))
    first, *others = answer
    if first.ended is PassEnd.NOT_READY:
        mine.refill_counters()
    return first.summary() | ({"with": [report.summary() for report in others]} if others else {})
