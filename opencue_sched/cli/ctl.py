"""``opencue-sched board``, ``ctl`` and ``dispatch``: clusters' postings, and messages to running workers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

import click
import redis

from opencue_sched.cli.inputs import TOP, Commands, database, redis_store, with_names
from opencue_sched.cli.output import HIGH, NAME, Column, Columns, Done, age_text, working
from opencue_sched.coordination.board import Listing, Update
from opencue_sched.coordination.keys import QueueType, worker_group
from opencue_sched.coordination.postings import ClusterPostings, cluster_postings, decode_cluster
from opencue_sched.coordination.presence import BEAT_TYPE, Actor, Members, list_members
from opencue_sched.coordination.replies import await_reply, open_job
from opencue_sched.coordination.routing import Router
from opencue_sched.dispatch.clusters import load_clusters
from opencue_sched.dispatch.report import PassEnd
from opencue_sched.domain.clusters import Cluster
from opencue_sched.errors import InvalidInput, SchedulerError
from opencue_sched.settings import Settings, as_seconds, get_settings
from opencue_sched.worker.control import broadcast
from opencue_sched.worker.messenger import Messenger

WAIT_SECONDS = 3.0
"""How long a command waits for the answers of the workers that it was sent to."""
_CLUSTER = click.argument("cluster")
_KEY = click.option("--cluster", required=True, help="Key of the cluster, as `opencue-sched board list` shows it.")


_POSTING_COLUMNS = Columns(
    Column("cluster", "Cluster", "name", importance=NAME),
    Column("show", "Show", importance=HIGH),
    Column("posting", read="uuid"),
    Column("state", "State", importance=HIGH),
    Column("owner", "Owner"),
    Column("failures", "Failures"),
    Column("posted", "Age", "created", age_text),
    Column("modified", "Last worked on", show=age_text),
    *map(Column, ("fence", "error")),
    Column("facility", "Facility"),
    Column("tags", "Tags", wraps=True),
)

board_command = Commands("board")


@board_command.answers("list --json")
@click.option(
    "--state", type=click.Choice(["ready", "delayed", "claimed", "trash"]), help="Only postings in this state."
)
def list_postings(state: str | None) -> Done:
    """List postings: what waits, is worked on, sleeps or is in the trash."""
    with redis_store() as client:
        board = cluster_postings(client, get_settings())
        there = [*board.listings("listed"), *board.listings("trash")]
    return _POSTING_COLUMNS.listed(
        _read([listing for listing in there if state in (None, listing.fields.get("state"))])
    )


@board_command.answers("show alloc-0f3a9c1d2b4e5f60")
@_CLUSTER
def show(cluster: str) -> Done:
    """Show one posting, by its cluster's key or its id; with the traceback of its last failure."""
    with redis_store() as client:
        postings = cluster_postings(client, get_settings())
        listing = postings.job(_uuids(postings, cluster)[0])
    if listing is None:
        raise InvalidInput(f"{cluster} is gone")
    return _POSTING_COLUMNS.shown(_read([listing])[0])


@board_command.answers('trash alloc-0f3a9c1d2b4e5f60 --reason "bad hosts"')
@_CLUSTER
@click.option("--reason", default="trashed by an operator", show_default=True, help="Kept with the posting.")
@click.option("--force", is_flag=True, help="Even while a worker has it; that worker then loses its claim.")
def trash(cluster: str, reason: str, force: bool) -> Done:
    """Put a posting into the trash: its cluster is not dispatched until it is restored. A key without a shard (what
    follows @) means the cluster's postings in all of them.
    """
    _update(cluster, "trash", reason, force=force)
    return Done(f"{cluster} is in the trash", {"cluster": cluster, "state": "trash"})


@board_command.answers("restore alloc-0f3a9c1d2b4e5f60")
@_CLUSTER
def restore(cluster: str) -> Done:
    """Take a posting out of the trash; a sweep or a worker sends a message for it within seconds."""
    _update(cluster, "restore")
    return Done(f"{cluster} is on the board again", {"cluster": cluster, "state": "ready"})


def _uuids(postings: ClusterPostings, cluster: str) -> list[str]:
    """The uuids of postings: of those of a cluster by its key (without a shard: for all shards), or of one by its own
    uuid. Raises InvalidInput where there is none."""
    found = postings.find_all(cluster) or ([cluster] if postings.job(cluster) else [])
    if not found:
        raise InvalidInput(f"no posting of a cluster {cluster!r}; see: opencue-sched board list")
    return found


def _update(cluster: str, how: Update, value: str | int = "", *, force: bool = False) -> None:
    """Change all postings of a cluster, by its key, or one by its uuid. Raises SchedulerError when one is claimed,
    unless ``force``, or when none could be changed; those that could stay changed."""
    with redis_store() as client:
        postings = cluster_postings(client, get_settings())
        answers = [postings.update(uuid, how, value, force=force) for uuid in _uuids(postings, cluster)]
    # The postings of all shards: one that is claimed is reported, and one that is in the wanted state already is not.
    held = [answer for answer in answers if "held" in answer]
    if held or not any(answer[0] for answer in answers):
        _, reason, *owner = (held or answers)[0]
        refusals = {
            "held": f"{cluster} is worked on by {' '.join(owner)}; wait, or say --force",
            "not_trashed": f"{cluster} is not in the trash",
            "trashed": f"{cluster} is in the trash",
        }
        raise SchedulerError(refusals.get(reason, f"{cluster} is gone"))


def _read(found: Sequence[Listing]) -> list[dict[str, Any]]:
    """What postings say, with the names of shows and facilities."""
    clusters = [decode_cluster(listing.fields.get("details", "")) for listing in found]
    ids = [row_id for cluster in clusters if cluster for row_id in (cluster.show_id, cluster.facility_id)]
    names = iter(with_names(ids))
    rows = []
    for listing, cluster in zip(found, clusters, strict=True):
        fields = listing.fields
        row: dict[str, Any] = {key: fields.get(key) or None for key in ("name", "state", "owner", "error")}
        row |= {key: int(fields.get(key, "0")) for key in ("failures", "fence")}
        moments = {key: int(fields[key] or 0) / 1000 for key in ("created", "modified")}
        row |= {key: datetime.fromtimestamp(at, UTC) if at else None for key, at in moments.items()}
        row |= {"uuid": listing.uuid, "tags": "unreadable", "show": None, "facility": None}
        if cluster is not None:
            row |= {"show": next(names), "facility": next(names), "tags": " ".join(cluster.tags)}
        rows.append(row)
    return rows


ctl_command = Commands(
    "ctl",
    "Pause, resume, drain and stop workers; let a cluster sleep.\n\n"
    "The same as `celery -A opencue_sched control pause_dispatch|resume_dispatch|drain|stop_worker`, but workers are "
    "addressed by queue type, group and instance. The workers of a facility hear only who has its name in "
    "OPENCUE_SCHED_SCHEDULER__FACILITY, or says it as --group.",
)


_TYPES = click.Choice([type_.value for type_ in QueueType])


def _remote(name: str, command_: str, does: str) -> None:
    """Add a command that goes to the workers it is addressed to."""

    @ctl_command.answers(f"{name} --instance node1", does)
    @click.option(
        "--type", "type_", type=_TYPES, default="dispatch", show_default=True, help="Workers of this queue type."
    )
    @click.option("--group", help="Only workers of this group. Default: of all; with a facility set, its own.")
    @click.option("--instance", help="Only this instance; with --group if several groups have one of the name.")
    def send(type_: str, group: str | None, instance: str | None) -> Done:
        from opencue_sched.celery import app

        settings = get_settings()
        namespace = settings.coordination.namespace
        with redis_store() as client:
            meant = addressees(list_members(client, namespace), settings.scheduler.facility, type_, group, instance)
        answers = broadcast(app, namespace, command_, meant, wait_seconds=WAIT_SECONDS)
        rows = {node: answer for reply in answers for node, answer in reply.items()}
        lines = [f"{node}: {answer.get('ok') or answer.get('error')}" for node, answer in sorted(rows.items())]
        notes = [] if rows else ["error: no live worker answered; see: opencue-sched fleet"]
        failed = not rows or any("error" in answer for answer in rows.values())
        return Done(lines, rows, notes, status=1 if failed else 0)


_remote("pause", "pause_dispatch", "Take no more dispatch messages until `ctl resume`; other work goes on.")
_remote("resume", "resume_dispatch", "Take messages again after `ctl pause` or `ctl drain`.")
_remote("drain", "drain", "Take no more messages of any type, finish what is in hand, and stay up.")
_remote("stop", "stop_worker", "Finish what is in hand and end, as SIGTERM does.")


@ctl_command.answers("sleep --cluster alloc-0f3a9c1d2b4e5f60 --for 10m")
@_KEY
@click.option("--for", "duration", required=True, help="How long, such as 90s, 10m or 2h; 0 wakes it.")
def sleep(cluster: str, duration: str) -> Done:
    """Let a cluster of one's own facility sleep for a time, whatever would wake it."""
    seconds = as_seconds(duration)
    _update(cluster, "rest", round(seconds * 1000))
    said = f"{cluster} sleeps for {seconds:g} s" if seconds else f"{cluster} is awake"
    return Done(said, {"ok": said})


def addressees(
    members: Members, facility: str | None, type_: str, group: str | None, instance: str | None
) -> list[Actor]:
    """The live workers that a command is for, once each: of ``group``, or of one's own fleet; an instance whatever it
    consumes, and otherwise those that consume ``type_``.

    Raises InvalidInput when several groups of the fleet have an instance of this name.
    """
    found = {
        (actor.group, actor.instance): actor
        for actor in members.alive
        if actor.type != BEAT_TYPE
        and (actor.facility == (facility or "").lower() if group is None else actor.group == group)
        and (actor.type == type_ if instance is None else actor.instance == instance)
    }
    groups = sorted({group for group, _ in found})
    if instance is not None and len(groups) > 1:
        raise InvalidInput(f"several groups have an instance {instance!r}: {', '.join(groups)}; say which by --group")
    return list(found.values())


@TOP.answers("dispatch --cluster alloc-0f3a9c1d2b4e5f60 --wait")
@_KEY
@click.option("--wait", is_flag=True, help="Wait for the end of the pass and print what it did.")
@click.option("--timeout", default=30.0, show_default=True, help="Seconds to wait.")
def dispatch_command(cluster: str, wait: bool, timeout: float) -> Done:
    """Have one cluster dispatched now, even if it sleeps.

    Exit status with --wait: 0 when the pass did its work (booked, saturated or no_jobs); 1 when it did not, or no
    worker answered in time, with the reason on standard error. Without --wait: 0, and the state of the cluster's
    posting; no worker takes a posting that is in the trash or delayed.
    """
    settings = get_settings()
    with database() as engine, engine.connect() as connection:
        clusters = {known.key: known for known in load_clusters(connection, settings)}
    name, _, shard = cluster.partition("@")
    if name not in clusters:
        raise InvalidInput(f"no cluster {cluster!r} among {len(clusters)}; see: opencue-sched board list")
    with redis_store() as client:
        answer = _dispatch(client, settings, replace(clusters[name], shard=shard), timeout if wait else None)
    line = ", ".join(f"{name} {value}" for name, value in answer.items() if value not in ("", None))
    if not wait or answer.get("ended") in (PassEnd.BOOKED, PassEnd.SATURATED, PassEnd.NO_JOBS):
        return Done(line, answer)
    reason = answer.get("error") or answer.get("reason") or "see the log of the workers"
    failure = f"error: the pass over {cluster} did not do its work: {answer.get('ended')} ({reason})"
    if reason == "trashed":
        failure += f"; `opencue-sched board restore {cluster}` takes it out of the trash"
    return Done(line, answer, [failure], status=1)


def _dispatch(client: redis.Redis, settings: Settings, cluster: Cluster, timeout: float | None) -> dict[str, object]:
    """Enqueue and wake the posting of a cluster, and answer what was sent; with ``timeout`` (seconds) wait for the
    pass, and answer what came of it."""
    from opencue_sched.celery import app

    namespace, facility = settings.coordination.namespace, settings.scheduler.facility
    postings = cluster_postings(client, settings)
    group = worker_group(facility, settings.coordination.group)
    router = Router(client, namespace, group, fixed=facility is not None)
    messenger = Messenger(app, router, legacy_queues=settings.coordination.legacy_queues)
    (enqueued,) = postings.enqueue([cluster], wake=True)
    if timeout is None:
        if enqueued.ticket:
            messenger.send(enqueued)
        posting = postings.job(enqueued.uuid)
        state = "gone" if posting is None else posting.fields["state"]
        return {"cluster": cluster.key, "posting": enqueued.uuid, "sent": enqueued.ticket > 0, "state": state}
    job = open_job(client, namespace, f"dispatch {cluster.key}", waits_seconds=timeout)
    messenger.to_all(enqueued.uuid, reply=job)
    with working(f"waiting for a pass over {cluster.key}"):
        return await_reply(client, namespace, job, timeout_seconds=timeout)
