"""``opencue-sched subscription``."""

from __future__ import annotations

import uuid

import click
from sqlalchemy import Connection

from opencue_sched.cli import output
from opencue_sched.cli.inputs import CommandRefused, UnknownName, choose, core_count, farm
from opencue_sched.cli.output import Column, in_cores, json_option, show_rows
from opencue_sched.store import shows
from opencue_sched.store.shows import Kind


def _percent_of_size(subscription: shows.Subscription) -> float | None:
    """What is used, of the size; None where that is 0."""
    size = subscription.size_centicores
    return round(100 * subscription.used_centicores / size, 2) if size > 0 else None


SUBSCRIPTION_COLUMNS = (
    Column("show", "Show"),
    Column("allocation", "Allocation"),
    Column("id"),
    Column("size", "Size", in_cores("size_centicores")),
    Column("burst", "Burst", in_cores("burst_centicores")),
    Column("used", "Used", in_cores("used_centicores")),
    Column("used_gpus"),
    Column("percent", "Used %", _percent_of_size, "{:.0f}%".format),
    Column("left", "Left", lambda it: output.cores(max(0, it.burst_centicores - it.used_centicores))),
    Column("running_frames", read="procs"),
    Column("idle_cores", "Idle Cores", in_cores("idle_centicores")),
)


@click.group("subscription")
def command() -> None:
    """List, create and change subscriptions: what a show may use of an allocation, in cores.

    Size is what it is promised, burst the most it may use; burst 0 books nothing.

    Example: opencue-sched subscription create demo local.general 100 150
    """


@command.command("list")
@click.argument("show", required=False)
@click.option("--alloc", metavar="NAME", help="Only of this allocation.")
@json_option
def list_(show: str | None, alloc: str | None, as_json: bool) -> None:
    """List subscriptions, or those of one show.

    Used is what runs now, in percent of the size; Left is up to the burst; Idle Cores are what the allocation's hosts
    that are up and open have left.

    Example: opencue-sched subscription list demo
    """
    with farm() as (engine, _), engine.connect() as connection:
        show_id = None if show is None else choose(connection, Kind.SHOW, show).id
        alloc_id = None if alloc is None else choose(connection, Kind.ALLOCATION, alloc).id
        found = shows.list_subscriptions(connection, show_id=show_id, alloc_id=alloc_id)
    show_rows(found, SUBSCRIPTION_COLUMNS, as_json=as_json)


@command.command()
@click.argument("show")
@click.argument("alloc")
@click.argument("size", type=core_count, metavar="SIZE")
@click.argument("burst", required=False, metavar="[BURST]")
@json_option
def create(show: str, alloc: str, size: int, burst: str | None, as_json: bool) -> None:
    """Let a show use an allocation. BURST is like SIZE unless given, in cores or as a percentage of it.

    Example: opencue-sched subscription create demo local.general 100 150%
    """
    most = size if burst is None else _burst(burst, size)
    with farm() as (engine, _), engine.begin() as connection:
        show_row, alloc_row = choose(connection, Kind.SHOW, show), choose(connection, Kind.ALLOCATION, alloc)
        made = shows.insert_subscription(
            connection, str(uuid.uuid4()), show_row.id, alloc_row.id, size=size, burst=most
        )
        if not made:
            raise CommandRefused(f"show {show_row.name} has a subscription for {alloc_row.name} already")
    text = f"{show_row.name} may use {output.cores(size)} cores of {alloc_row.name}, {output.cores(most)} at most"
    output.done(
        text,
        as_json=as_json,
        show=show_row.name,
        allocation=alloc_row.name,
        size=output.cores(size),
        burst=output.cores(most),
    )
    _note_burst(size, most)


@command.command()
@click.argument("show")
@click.argument("alloc")
@click.argument("number", type=core_count, metavar="CORES")
def size(show: str, alloc: str, number: int) -> None:
    """Set what a show is promised of an allocation.

    Example: opencue-sched subscription size demo local.general 200
    """
    with farm() as (engine, _), engine.begin() as connection:
        found = _existing(connection, show, alloc)
        shows.set_subscription(connection, found.show_id, found.alloc_id, size=number)
    output.done(f"size of {found.show} in {found.allocation} is {output.cores(number)} cores")
    _note_burst(number, found.burst_centicores)


@command.command()
@click.argument("show")
@click.argument("alloc")
@click.argument("number", metavar="CORES|PERCENT%")
def burst(show: str, alloc: str, number: str) -> None:
    """Set the most a show may use of an allocation, in cores or as a percentage of its size.

    Example: opencue-sched subscription burst demo local.general 150%
    """
    with farm() as (engine, _), engine.begin() as connection:
        found = _existing(connection, show, alloc)
        most = _burst(number, found.size_centicores)
        shows.set_subscription(connection, found.show_id, found.alloc_id, burst=most)
    output.done(f"burst of {found.show} in {found.allocation} is {output.cores(most)} cores")
    _note_burst(found.size_centicores, most)
    if most < found.used_centicores:
        used = output.cores(found.used_centicores)
        click.echo(f"note: {used} cores are in use; nothing is booked until fewer are", err=True)


@command.command()
@click.argument("show")
@click.argument("alloc")
@click.option("--force", is_flag=True, help="Even while frames run under it; they go on.")
def delete(show: str, alloc: str, force: bool) -> None:
    """Take an allocation away from a show.

    Example: opencue-sched subscription delete demo local.general
    """
    with farm() as (engine, _), engine.begin() as connection:
        found = _existing(connection, show, alloc)
        if found.procs and not force:
            running = f"frames of {found.show} running in {found.allocation}: {found.procs}"
            raise CommandRefused(f"{running}; set burst 0 and wait, or use --force")
        shows.delete_subscription(connection, found.show_id, found.alloc_id)
    output.done(f"{found.show} may not use {found.allocation} any more")


def _existing(connection: Connection, show: str, alloc: str) -> shows.Subscription:
    """The subscription of a show for an allocation, both by name or id. Raises UnknownName where there is none."""
    show_row, alloc_row = choose(connection, Kind.SHOW, show), choose(connection, Kind.ALLOCATION, alloc)
    found = shows.list_subscriptions(connection, show_id=show_row.id, alloc_id=alloc_row.id)
    if not found:
        raise UnknownName(
            f"show {show_row.name} has no subscription for {alloc_row.name}; `subscription create` makes one"
        )
    return found[0]


def _note_burst(size: int, burst: int) -> None:
    """Cuebot allows a burst below the size. 0 is how bookings are stopped; any other is most often a mistake."""
    if 0 < burst < size:
        text = (
            f"the burst is below the size: {output.cores(burst)} cores are the most it gets of its {output.cores(size)}"
        )
        click.echo(f"note: {text}", err=True)


def _burst(text: str, size: int) -> int:
    """Cores, or a percentage of the size, as centicores."""
    if not text.endswith("%"):
        return core_count(text)
    try:
        percent = float(text[:-1])
    except ValueError as error:
        raise click.BadParameter(f"{text!r} is not a percentage") from error
    if not 0 <= percent <= 100_000:
        raise click.BadParameter(f"{text} is not a percentage of a size")
    return round(size * percent / 100)
