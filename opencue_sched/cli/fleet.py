"""``opencue-sched fleet``."""

from __future__ import annotations

from typing import Any

import click
from sqlalchemy import Engine
from sqlalchemy.exc import OperationalError

from opencue_sched.cli.inputs import checked_redis, database
from opencue_sched.cli.output import Column, duration_text, json_option, show_json, show_rows
from opencue_sched.coordination.leader import ONE_REDIS
from opencue_sched.insight.fleet import fleet_view
from opencue_sched.insight.stores import trouble_in_words
from opencue_sched.settings import get_settings
from opencue_sched.store.fences import PersistentFences
from opencue_sched.store.schema import check_schema, refuse_unmigrated

_WORKER_COLUMNS = (
    Column("instance", "Instance"),
    Column("group", "Group"),
    Column("hostname", "Host"),
    Column("pid", "Pid"),
    Column("state", "State"),
    Column("", "In hand", lambda worker: f"{worker['in_flight']}/{worker['capacity']}"),
    Column("up_seconds", "Up", show=duration_text),
    Column("heartbeat_seconds_ago", "Seen", show="{:.0f}s ago".format),
    Column("types", "Types", show=", ".join),
    Column("work", "Works on", show=", ".join),
)
_QUEUE_COLUMNS = (
    Column("type", "Queue"),
    Column("depth", "Waiting"),
    Column("oldest_seconds", "Oldest", show="{:.1f}s".format),
    Column("queues", "Where", show=lambda queues: ", ".join(f"{name} {depth}" for name, depth in queues.items())),
)


@click.command("fleet")
@json_option
def command(as_json: bool) -> None:
    """Show who is alive, who leads, what each works on, and what waits.

    Example: opencue-sched fleet --json | jq .leader
    """
    with checked_redis() as client, database() as engine:
        _refuse_unmigrated(engine)
        view = fleet_view(client, get_settings(), PersistentFences(engine))
    if as_json:
        show_json(view)
        return
    click.echo(_leader_line(view["leader"]))
    if view["leader"]["two_redis"]:
        click.echo(f"warning: beats of two Redis want to lead, so one stands by; {ONE_REDIS}")
    click.echo(_beats_line(view["beats"]))
    _show_workers(view["workers"])
    click.echo()
    show_rows([{"type": name, **figures} for name, figures in view["queues"].items()], _QUEUE_COLUMNS)
    click.echo()
    postings = view["postings"]
    click.echo(
        f"clusters: {postings['ready']} ready, {postings['claimed']} worked on, {postings['resting']} resting, "
        f"{postings['trash']} trashed (opencue-sched board list)"
    )
    backlog = ", ".join(f"{group} {number:g}" for group, number in view["backlog_per_worker"].items())
    click.echo(f"backlog per worker: {backlog}")
    if view["gone"]:
        click.echo(f"gone lately: {', '.join(sorted({key.rpartition(':')[2] for key in view['gone']}))}")


def _refuse_unmigrated(engine: Engine) -> None:
    """Raises SchedulerError saying what to run. Without PostgreSQL, most of what is known of the fleet is shown."""
    try:
        with engine.connect() as connection:
            refuse_unmigrated(check_schema(connection))
    except OperationalError as error:
        click.echo(f"warning: {trouble_in_words(error, get_settings())}", err=True)


def _leader_line(leader: dict[str, Any]) -> str:
    if leader["fence"] is None:
        return "leader: none (is a beat alive?)"
    who = leader["instance"] or "a beat without presence"
    age = leader["tick_age_seconds"]
    fired = "no tick fired yet" if age is None else f"last tick {age:.1f}s ago"
    return f"leader: {who}, fence {leader['fence']}, {fired}"


def _beats_line(beats: list[dict[str, Any]]) -> str:
    said = [f"{beat['instance']} on {beat['hostname']} {'leads' if beat['fence'] else 'stands by'}" for beat in beats]
    return f"beats: {', '.join(said) or 'none alive'}"


def _show_workers(workers: list[dict[str, Any]]) -> None:
    if not workers:
        click.echo("workers: none alive")
        return
    show_rows(workers, _WORKER_COLUMNS)
