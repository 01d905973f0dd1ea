"""``opencue-sched ctl``: what is said to running workers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import click

from opencue_sched.cli.inputs import checked_redis
from opencue_sched.cli.output import json_option, show_json
from opencue_sched.coordination.control import Command, ControlMessage, push_control_message
from opencue_sched.coordination.names import QueueName, QueueType, worker_group
from opencue_sched.coordination.presence import BEAT_TYPE, Members, list_members
from opencue_sched.errors import InvalidInput, SchedulerError
from opencue_sched.settings import as_seconds, get_settings
from opencue_sched.worker.control import broadcast

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
    """Pause, resume, drain and stop workers; let a cluster rest.

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
@click.option("--for", "duration", required=True, help="How long, such as 90s, 10m or 2h; 0 ends the rest.")
@_addressed
def sleep(cluster: str, duration: str, **where: Any) -> None:
    """Let a cluster rest for a time, whatever would wake it.

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
