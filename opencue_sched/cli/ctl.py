"""``opencue-sched ctl`` and ``opencue-sched dispatch``: messages to running workers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import click
import redis

from opencue_sched.cli.inputs import checked_redis, database
from opencue_sched.cli.output import json_option, show_json, working
from opencue_sched.coordination.control import (
    Command,
    ControlMessage,
    NoReply,
    await_reply,
    open_job,
    push_control_message,
)
from opencue_sched.coordination.names import QueueName, QueueType, worker_group
from opencue_sched.coordination.postings import ClusterPostings, Enqueued
from opencue_sched.coordination.presence import BEAT_TYPE, Members, list_members
from opencue_sched.coordination.queues import Router
from opencue_sched.dispatch.clusters import load_clusters
from opencue_sched.dispatch.report import PassEnd
from opencue_sched.domain.cluster import Cluster
from opencue_sched.errors import InvalidInput, SchedulerError
from opencue_sched.insight.explain import cluster_postings
from opencue_sched.settings import Settings, as_seconds, get_settings
from opencue_sched.worker.control import broadcast
from opencue_sched.worker.task import Messenger

WAIT_SECONDS = 3.0


def _addressed(function: Callable[..., None]) -> Callable[..., None]:
    for option in (
        json_option,
        click.option("--queued", is_flag=True, help="Leave it on the control queue; workers look every few seconds."),
        click.option("--instance", help="Only this instance; with --group if several groups have one of the name."),
        click.option("--group", help="Only workers of this group. Default: of all; with a facility set, its own."),
        click.option(
            "--type",
            "type_",
            type=click.Choice([type_.value for type_ in QueueType]),
            default=QueueType.DISPATCH.value,
            show_default=True,
            help="Workers that consume this queue type.",
        ),
    ):
        function = option(function)
    return function


@click.group("ctl")
def command() -> None:
    """Pause, resume, drain and stop workers; let a cluster sleep.

    The same as `celery -A opencue_sched control pause_dispatch|resume_dispatch|drain|stop_worker|sleep_cluster`, but
    addressed by queue type, group and instance. The workers of a facility hear only who has its name in
    OPENCUE_SCHED_SCHEDULER__FACILITY, or says it as --group.

    Example: opencue-sched ctl pause --group default
    """


@command.command()
@_addressed
def pause(**where: Any) -> None:
    """Take no more dispatch messages until `ctl resume`; other work goes on.

    Example: opencue-sched ctl pause --instance node1
    """
    _say(ControlMessage(Command.PAUSE), **where)


@command.command()
@_addressed
def resume(**where: Any) -> None:
    """Take messages again after `ctl pause` or `ctl drain`.

    Example: opencue-sched ctl resume --instance node1
    """
    _say(ControlMessage(Command.RESUME), **where)


@command.command()
@_addressed
def drain(**where: Any) -> None:
    """Take no more messages of any type, finish what is in hand, and stay up.

    Example: opencue-sched ctl drain --instance node1
    """
    _say(ControlMessage(Command.DRAIN), **where)


@command.command()
@_addressed
def stop(**where: Any) -> None:
    """Finish what is in hand and end, as SIGTERM does.

    Example: opencue-sched ctl stop --instance node1
    """
    _say(ControlMessage(Command.STOP), **where)


@command.command()
@click.option("--cluster", required=True, help="Key of the cluster, as `opencue-sched board list` shows it.")
@click.option("--for", "duration", required=True, help="How long, such as 90s, 10m or 2h; 0 wakes it.")
@_addressed
def sleep(cluster: str, duration: str, **where: Any) -> None:
    """Let a cluster sleep for a time, whatever would wake it.

    Example: opencue-sched ctl sleep --cluster alloc-0f3a9c1d2b4e5f60 --for 10m
    """
    try:
        seconds = float(as_seconds(duration))
    except ValueError as error:
        raise InvalidInput(str(error)) from error
    _say(ControlMessage(Command.SLEEP, cluster, seconds), **where)


def _say(
    message: ControlMessage, *, type_: str, group: str | None, instance: str | None, queued: bool, as_json: bool
) -> None:
    from opencue_sched.celery import app

    settings = get_settings()
    namespace, facility = settings.coordination.namespace, settings.scheduler.facility
    with checked_redis() as client:
        members = list_members(client, namespace)
        if group is None and instance is not None:
            type_, group = _place_of(members, facility, instance, type_)
        if group is None and (facility is not None or instance is not None):
            group = worker_group(facility, settings.coordination.group)
        queue = QueueName(namespace, type_, group, instance, family="ctl")
        if queued:
            push_control_message(client, queue, message)
            click.echo(f"left on {queue}; workers look every few seconds")
            return
    answers = broadcast(app, queue, message, members=members, wait_seconds=WAIT_SECONDS)
    rows = {node: answer for reply in answers for node, answer in reply.items()}
    if as_json:
        show_json(rows)
    else:
        for node, answer in sorted(rows.items()):
            click.echo(f"{node}: {answer.get('ok') or answer.get('error')}")
    if not rows:
        raise SchedulerError(f"no live worker answered for {queue}; see: opencue-sched fleet")
    if any("error" in answer for answer in rows.values()):
        raise click.exceptions.Exit(1)


def _place_of(members: Members, facility: str | None, instance: str, type_: str) -> tuple[str, str | None]:
    """A type that the live instance of this name consumes, ``type_`` if it does, and its group; None without one.

    Raises InvalidInput when several groups of the fleet have an instance of this name.
    """
    fleet = (facility or "").lower()
    found = [it for it in members.alive if (it.instance, it.facility) == (instance, fleet) and it.type != BEAT_TYPE]
    groups = sorted({actor.group for actor in found})
    if len(groups) > 1:
        raise InvalidInput(f"several groups have an instance {instance!r}: {', '.join(groups)}; say which by --group")
    types = {actor.type for actor in found}
    return (min(types - {type_}) if types and type_ not in types else type_), (groups[0] if groups else None)


# ``opencue-sched dispatch``.


@click.command("dispatch")
@click.option("--cluster", "key", required=True, help="Key of the cluster, as `opencue-sched board list` shows it.")
@click.option("--wait", is_flag=True, help="Wait for the end of the pass and print what it did.")
@click.option("--timeout", default=30.0, show_default=True, help="Seconds to wait.")
@json_option
def dispatch_command(key: str, wait: bool, timeout: float, as_json: bool) -> None:
    """Have one cluster dispatched now, even if it sleeps.

    Exit status with --wait: 0 when the pass did its work (booked, saturated or no_jobs); 1 when it did not, or no
    worker answered in time, with the reason on standard error. Without: 0 once the cluster is up for a worker to take;
    1 when it is in the trash, cooled down or asleep.

    Example: opencue-sched dispatch --cluster alloc-0f3a9c1d2b4e5f60 --wait
    """
    settings = get_settings()
    with checked_redis() as client:
        answer = _dispatch(client, settings, _cluster(settings, key), timeout if wait else None)
    if as_json:
        show_json(answer)
    else:
        click.echo(", ".join(f"{name} {value}" for name, value in answer.items() if value not in ("", None)))
    if wait and answer.get("ended") not in [end.value for end in PassEnd if end.did_its_work]:
        reason = answer.get("error") or answer.get("reason") or "see the log of the workers"
        raise SchedulerError(f"the pass over {key} did not do its work: {answer.get('ended')} ({reason})")


def _cluster(settings: Settings, key: str) -> Cluster:
    with database() as engine, engine.connect() as connection:
        clusters = {cluster.key: cluster for cluster in load_clusters(connection, settings)}
    if key not in clusters:
        raise InvalidInput(f"no cluster {key!r} among {len(clusters)}; see: opencue-sched board list")
    return clusters[key]


def _check_takeable(postings: ClusterPostings, enqueued: Enqueued) -> None:
    """Raise SchedulerError for a cluster that no worker takes now, though it was woken."""
    job = postings.job(enqueued.uuid)
    state = "" if job is None else job.fields["state"]
    key = enqueued.cluster.key
    if state == "trash":
        raise SchedulerError(f"{key} is in the trash; to take it out: opencue-sched board restore {key}")
    if state == "delayed" and job is not None and int(job.fields["failures"]) > 0:
        why = job.fields.get("reason", "")
        end = f"to try at once: opencue-sched ctl sleep --cluster {key} --for 0"
        raise SchedulerError(f"{key} is cooled down, because its passes fail ({why}); {end}")
    if state == "delayed":
        raise SchedulerError(f"{key} is asleep; to wake it: opencue-sched ctl sleep --cluster {key} --for 0")


def _dispatch(client: redis.Redis, settings: Settings, cluster: Cluster, timeout: float | None) -> dict[str, object]:
    from opencue_sched.celery import app

    namespace, facility = settings.coordination.namespace, settings.scheduler.facility
    postings = cluster_postings(client, settings)
    group = worker_group(facility, settings.coordination.group)
    router = Router(client, namespace, group, fixed=facility is not None)
    messenger = Messenger(app, router, legacy_queues=settings.coordination.legacy_queues)
    (enqueued,) = postings.enqueue([cluster], wake=True)
    if timeout is None:
        if enqueued.send:
            messenger.send(enqueued)
        else:
            _check_takeable(postings, enqueued)
        return {"cluster": cluster.key, "posting": enqueued.uuid, "sent": enqueued.send}
    job = open_job(client, namespace, f"dispatch {cluster.key}", waits_seconds=timeout)
    messenger.ask(enqueued.uuid, reply=job)
    try:
        with working(f"waiting for a pass over {cluster.key}"):
            return await_reply(client, namespace, job, timeout_seconds=timeout)
    except NoReply as error:
        raise SchedulerError(f"{error}; is a worker alive? see: opencue-sched fleet") from error
