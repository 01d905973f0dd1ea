"""``opencue-sched limit``."""

from __future__ import annotations

import uuid

import click

from opencue_sched.cli import output
from opencue_sched.cli.inputs import CommandRefused, choose, farm, new_name
from opencue_sched.cli.output import Column, counted, json_option, show_rows
from opencue_sched.domain.units import INT_MAX, LIMIT_NAME_WIDTH
from opencue_sched.store import shows
from opencue_sched.store.pending import fetch_limits
from opencue_sched.store.shows import Kind

_FRAMES = click.IntRange(0, INT_MAX)
_COLUMNS = (
    Column("limit", "Limit", "name"),
    Column("id"),
    Column("running", "Running"),
    Column("max", "Max", "max_value"),
    Column("left", "Left", lambda limit: max(0, limit.max_value - limit.running)),
)


@click.group("limit")
def command() -> None:
    """List, create and change limits: how many frames may run under a name (licences and the like).

    Example: opencue-sched limit create arnold 20
    """


@command.command("list")
@json_option
def list_(as_json: bool) -> None:
    """List limits with the frames that run under each.

    Example: opencue-sched limit list
    """
    with farm() as (engine, _), engine.connect() as connection:
        limits = sorted(fetch_limits(connection).values(), key=lambda limit: limit.name)
    show_rows(limits, _COLUMNS, as_json=as_json)


@command.command()
@click.argument("name")
@click.argument("most", type=_FRAMES, metavar="MAX")
@json_option
def create(name: str, most: int, as_json: bool) -> None:
    """Create a limit of MAX running frames.

    Example: opencue-sched limit create arnold 20
    """
    new_name("limit", name, width=LIMIT_NAME_WIDTH)
    with farm() as (engine, _), engine.begin() as connection:
        if shows.find_row(connection, Kind.LIMIT, name) is not None:
            raise CommandRefused(f"there is a limit {name!r} already")
        limit_id = str(uuid.uuid4())
        shows.insert_limit(connection, limit_id, name, most)
    output.done(f"created limit {name} of {counted(most, 'frame')}", as_json=as_json, limit=name, id=limit_id, max=most)


@command.command("set")
@click.argument("name")
@click.argument("most", type=_FRAMES, metavar="MAX")
def set_(name: str, most: int) -> None:
    """Change how many frames may run under a limit. What runs above it goes on.

    Example: opencue-sched limit set arnold 25
    """
    with farm() as (engine, _), engine.begin() as connection:
        limit = choose(connection, Kind.LIMIT, name)
        shows.set_limit(connection, limit.id, most)
    output.done(f"{counted(most, 'frame')} may run under {limit.name}")


@command.command()
@click.argument("name")
@click.option("--force", is_flag=True, help="Even while pending jobs have layers under it; they are limited no more.")
def delete(name: str, force: bool) -> None:
    """Delete a limit.

    Example: opencue-sched limit delete arnold
    """
    with farm() as (engine, _), engine.begin() as connection:
        limit = choose(connection, Kind.LIMIT, name)
        jobs = shows.pending_jobs_under_limit(connection, limit.id)
        if jobs and not force:
            raise CommandRefused(f"{limit.name} holds {counted(jobs, 'pending job')}; --force deletes it all the same")
        shows.delete_limit(connection, limit.id)
    output.done(f"deleted limit {limit.name}")
