"""``opencue-sched board``: cluster postings, and the permits of layers."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime

import click
import redis

from opencue_sched.cli.inputs import Commands, checked_redis, with_names
from opencue_sched.cli.output import (
    HIGH,
    NAME,
    Column,
    Done,
    Rows,
    age_text,
    field_lines,
    json_row,
)
from opencue_sched.coordination.board import BoardScripts, Listing, Pages, Update
from opencue_sched.coordination.names import permit_board
from opencue_sched.coordination.postings import ClusterPostings, decode_cluster
from opencue_sched.domain.cluster import Cluster
from opencue_sched.errors import InvalidInput, SchedulerError
from opencue_sched.insight.explain import cluster_postings
from opencue_sched.settings import get_settings

_COLUMNS = (
    Column("cluster", "Cluster", lambda it: it.fields.get("name"), importance=NAME),
    Column("posting", read="uuid"),
    Column("state", "State", lambda it: it.fields.get("state"), importance=HIGH),
    Column("owner", "Owner", lambda it: it.fields.get("owner") or None),
    Column("failures", "Failures", lambda it: int(it.fields.get("failures", "0"))),
    Column("posted", "Posted", lambda it: _moment(it.fields.get("created")), lambda moment: _ago(moment)),
    Column("modified", "Last worked on", lambda it: _moment(it.fields.get("modified")), lambda moment: _ago(moment)),
    Column("show_id", read=lambda it: getattr(_cluster(it), "show_id", None)),
    Column("facility_id", read=lambda it: getattr(_cluster(it), "facility_id", None)),
    Column(
        "tags", "Tags", lambda it: " ".join(cluster.tags) if (cluster := _cluster(it)) else "unreadable", wraps=True
    ),
)
_PERMIT_COLUMNS = (
    Column("layer_id", read="uuid"),
    Column("state", "State", lambda it: it.fields.get("state")),
    Column("cluster", "Cluster", lambda it: it.fields.get("owner") or None, importance=HIGH),
    Column("fence", "Fence", lambda it: int(it.fields.get("fence", "0"))),
    Column("taken", "Taken", lambda it: _moment(it.fields.get("modified")), lambda moment: _ago(moment)),
)


def _named(found: Sequence[Listing], *, permits: bool) -> tuple[Column, ...]:
    """The columns of these, with those of names: of a posting's show and facility, or of a permit's layer."""
    ids = [it.uuid if permits else getattr(_cluster(it), key, "") for it in found for key in ("show_id", "facility_id")]
    names = dict(zip(ids, with_names(ids), strict=True))
    if permits:
        return (Column("layer", "Layer", lambda it: names[it.uuid], importance=NAME), *_PERMIT_COLUMNS)
    show = Column("show", "Show", lambda it: names[getattr(_cluster(it), "show_id", "")] or None, importance=HIGH)
    facility = Column("facility", "Facility", lambda it: names[getattr(_cluster(it), "facility_id", "")] or None)
    return (_COLUMNS[0], show, *_COLUMNS[1:], facility)


command = Commands(
    "board", "List, show, trash and restore cluster postings; list the permits of layers.", "list --state trash"
)


@command.answers("list --json")
@click.option(
    "--state", type=click.Choice(["ready", "delayed", "claimed", "trash"]), help="Only postings in this state."
)
@click.option("--permits", is_flag=True, help="Which cluster's pass has which layer, instead of postings.")
def list_(state: str | None, permits: bool) -> Rows:
    """List postings: what waits, is worked on, sleeps or is in the trash.

    With --permits, the layers that passes hold now: a pass gives its permits back at its end, or they run out.
    """
    with checked_redis() as client:
        if permits:
            board = BoardScripts(client, permit_board(get_settings().coordination.namespace))
        else:
            board = cluster_postings(client, get_settings())
        pages: list[Pages] = ["trash"] if state == "trash" else ["listed"] if state else ["listed", "trash"]
        found = [
            listing
            for which in pages
            for listing in board.listings(which)
            if state in (None, listing.fields.get("state"))
        ]
    return Rows(found, _named(found, permits=permits))


@command.answers("show alloc-0f3a9c1d2b4e5f60")
@click.argument("cluster")
def show(cluster: str) -> Done:
    """Show one posting, by its cluster's key or its id; with the traceback of its last failure."""
    with checked_redis() as client:
        _, listing = _found(client, cluster)
    row = json_row(listing, _named([listing], permits=False)) | {
        "error": listing.fields.get("error", ""),
        "fence": int(listing.fields.get("fence", "0")),
    }
    return Done(field_lines({name: "" if value is None else str(value) for name, value in row.items()}), row)


@command.answers('trash alloc-0f3a9c1d2b4e5f60 --reason "bad hosts"')
@click.argument("cluster")
@click.option("--reason", default="trashed by an operator", show_default=True, help="Kept with the posting.")
@click.option("--force", is_flag=True, help="Even while a worker has it; that worker then loses its claim.")
def trash(cluster: str, reason: str, force: bool) -> Done:
    """Put a posting into the trash: its cluster is not dispatched until it is restored. A key without a shard (what
    follows @) means the cluster's postings in all of them.
    """
    _update(cluster, "trash", reason, force=force)
    return Done(f"{cluster} is in the trash", {"cluster": cluster, "state": "trash"})


@command.answers("restore alloc-0f3a9c1d2b4e5f60")
@click.argument("cluster")
def restore(cluster: str) -> Done:
    """Take a posting out of the trash; a sweep or a worker sends a message for it within seconds."""
    _update(cluster, "restore")
    return Done(f"{cluster} is on the board again", {"cluster": cluster, "state": "ready"})


def _found(client: redis.Redis, cluster: str) -> tuple[ClusterPostings, Listing]:
    postings = cluster_postings(client, get_settings())
    listing = postings.job(next(iter(postings.find_all(cluster)), cluster))
    if listing is None:
        raise InvalidInput(f"no posting of a cluster {cluster!r}; see: opencue-sched board list")
    return postings, listing


def _update(cluster: str, how: Update, reason: str = "", *, force: bool = False) -> None:
    with checked_redis() as client:
        postings, listing = _found(client, cluster)
        uuids = postings.find_all(cluster) or [listing.uuid]
        answers = [postings.update(uuid, how, reason, force=force) for uuid in uuids]
    # Of all shards: one that is worked on is told of, but not one that is where it should be already.
    refused = [answer for answer in answers if not answer[0]]
    if held := [answer for answer in refused if answer[1] == "held"] or (refused if len(refused) == len(uuids) else []):
        answer = held[0]
        refusals = {
            "held": f"{cluster} is worked on by {answer[-1]}; wait, or say --force",
            "not_trashed": f"{cluster} is not in the trash",
            "trashed": f"{cluster} is in the trash already",
        }
        raise SchedulerError(refusals.get(str(answer[1]), f"{cluster} is gone"))


def _cluster(listing: Listing) -> Cluster | None:
    """The cluster of a posting; None of one that cannot be read."""
    try:
        return decode_cluster(listing.fields.get("details", ""))
    except InvalidInput:
        return None


def _ago(moment: datetime) -> str:
    return f"{age_text(moment)} ago"


def _moment(milliseconds: str | None) -> datetime | None:
    return datetime.fromtimestamp(int(milliseconds) / 1000, UTC) if milliseconds else None
