"""``opencue-sched show``."""

from __future__ import annotations

import uuid
from dataclasses import asdict

import click

from opencue_sched.accounting.caps import make_ledger
from opencue_sched.accounting.show_handover import Flip, flip_show, wait_of
from opencue_sched.cli import output
from opencue_sched.cli.inputs import (
    NEGATIVE_NUMBERS,
    CommandRefused,
    choose,
    core_cap,
    core_count,
    farm,
    new_name,
    redis_store,
    switch,
)
from opencue_sched.cli.output import Column, in_cores, json_option, json_row, show_fields, show_json, show_rows
from opencue_sched.cli.subscription import SUBSCRIPTION_COLUMNS
from opencue_sched.domain.units import SHOW_NAME_WIDTH
from opencue_sched.settings import get_settings
from opencue_sched.store import shows
from opencue_sched.store.shows import Kind

_COLUMNS = (
    Column("show", "Show", "name"),
    Column("id"),
    Column("active", "Active"),
    Column("managed", "Managed"),
    Column("booking", "Booking", lambda show: show.booking and show.dispatch),
    Column("paused"),
    Column("reserved_cores", "Reserved Cores", in_cores("centicores")),
    Column("reserved_gpus", read="gpus"),
    Column("running_frames", "Running Frames"),
    Column("waiting_frames", "Waiting Frames"),
    Column("pending_jobs", "Pending Jobs"),
    Column("default_min_cores", read=in_cores("default_min_cores")),
    Column("default_max_cores", read=in_cores("default_max_cores")),
)


@click.group("show")
def command() -> None:
    """List, create and change shows.

    Example: opencue-sched show create demo --managed
    """


@command.command("list")
@json_option
def list_(as_json: bool) -> None:
    """List shows and what they are doing.

    Example: opencue-sched show list
    """
    with farm() as (engine, _), engine.connect() as connection:
        found = shows.list_shows(connection)
    show_rows(found, _COLUMNS, as_json=as_json)


@command.command()
@click.argument("name")
@json_option
def info(name: str, as_json: bool) -> None:
    """Show one show with its subscriptions.

    Example: opencue-sched show info demo
    """
    with farm() as (engine, _), engine.connect() as connection:
        (show,) = shows.list_shows(connection, choose(connection, Kind.SHOW, name).id)
        subscriptions = [
            json_row(row, SUBSCRIPTION_COLUMNS) for row in shows.list_subscriptions(connection, show_id=show.id)
        ]
    if as_json:
        show_json({**json_row(show, _COLUMNS), "subscriptions": subscriptions})
        return
    show_fields(
        {
            "Show": show.name,
            "Id": show.id,
            "Active": output.yes_no(show.active),
            "Managed by this scheduler": output.yes_no(show.managed),
            "Booking": output.yes_no(show.booking and show.dispatch and not show.paused),
            "Paused": "yes" if show.paused else "",
            "Default min cores of a job": f"{output.cores(show.default_min_cores)}",
            "Default max cores of a job": output.cap_text(output.cores(show.default_max_cores)),
            "Reserved cores": f"{output.cores(show.centicores)}",
            "Reserved GPUs": str(show.gpus) if show.gpus else "",
            "Frames": f"{show.running_frames} running, {show.waiting_frames} waiting",
            "Pending jobs": str(show.pending_jobs),
            "Subscriptions": ", ".join(
                f"{row['allocation']} (size {row['size']}, burst {row['burst']}, used {row['used']})"
                for row in subscriptions
            )
            or "none: nothing can be booked",
        }
    )


@command.command()
@click.argument("name")
@click.option("--managed/--unmanaged", default=None, help="Whether this scheduler books it. Default: without a Cuebot.")
@click.option("--min-cores", type=core_count, metavar="CORES", help="Default of its jobs' min_cores (1).")
@click.option("--max-cores", type=core_cap, metavar="CORES", help="Default of its jobs' max_cores (100).")
@json_option
def create(name: str, managed: bool | None, min_cores: int | None, max_cores: int | None, as_json: bool) -> None:
    """Create a show with its root folder.

    Nothing is booked before it has a subscription.

    Example: opencue-sched show create demo --managed --max-cores 200
    """
    new_name("show", name, width=SHOW_NAME_WIDTH)
    with farm() as (engine, facts), engine.begin() as connection:
        if shows.find_row(connection, Kind.SHOW, name) is not None:
            raise CommandRefused(f"there is a show {name!r} already")
        dept = shows.default_dept(connection)
        if dept is None:
            raise CommandRefused("the database has no department; was it made by `opencue-sched migrate` or a Cuebot?")
        ids = {key: str(uuid.uuid4()) for key in ("show_id", "folder_id", "point_id")}
        managed = managed if managed is not None else facts.origin == "opencue-sched"
        shows.insert_show(
            connection, name=name, dept_id=dept, managed=managed, min_cores=min_cores, max_cores=max_cores, **ids
        )
    text = f"created show {name}" + ("" if managed else ", not managed by this scheduler")
    output.done(text, as_json=as_json, show=name, id=ids["show_id"], managed=managed)


@command.command()
@click.argument("name")
@click.argument("state", type=switch, metavar="on|off")
def active(name: str, state: bool) -> None:
    """Make a show active or not. Jobs of a show that is not active are not booked, and none can be submitted.

    Example: opencue-sched show active demo off
    """
    _set_flag(name, "b_active", state, "active")


@command.command()
@click.argument("name")
@click.argument("state", type=switch, metavar="on|off")
def booking(name: str, state: bool) -> None:
    """Let a show's frames be booked or not. What runs goes on.

    Example: opencue-sched show booking demo off
    """
    _set_flag(name, "b_booking_enabled", state, "booking")


@command.command()
@click.argument("name")
@click.argument("state", type=switch, metavar="on|off")
@click.option("--wait", type=click.FloatRange(min=0), metavar="SECONDS", help="Time without booking in between.")
@json_option
def managed(name: str, state: bool, wait: float | None, as_json: bool) -> None:
    """Hand a show to this scheduler (on), or back to Cuebot (off).

    On: booking stops, what runs is counted and the caps are loaded, and booking goes on after 30 s, when every Cuebot
    knows (at once where there is no Cuebot). Off: booking stops until all commits are over, then OpenCue's accounting
    tables are brought up to date together with the flag.

    Example: opencue-sched show managed demo on
    """
    settings = get_settings()
    with farm() as (engine, facts), redis_store() as client:
        with engine.connect() as connection:
            show_id = choose(connection, Kind.SHOW, name).id
        ledger = make_ledger(engine, client, owner=f"{settings.instance}-cli")
        age = settings.accounting.in_flight_age
        seconds = wait_of(settings, managed=state, cuebots=facts.origin == "cuebot") if wait is None else wait
        _announce_wait(seconds)
        with output.working(f"handing {name} {'over' if state else 'back'}"):
            flip = flip_show(engine, ledger, show_id, managed=state, wait_seconds=seconds, age_seconds=age)
    text = "\n".join(_flip_lines(name, state, flip))
    output.done(text, as_json=as_json, show=name, managed=state, **asdict(flip))


@command.command("default-min-cores")
@click.argument("name")
@click.argument("number", type=core_count, metavar="CORES")
def default_min_cores(name: str, number: int) -> None:
    """Set the min_cores of jobs that do not say.

    Example: opencue-sched show default-min-cores demo 1
    """
    _set_number(name, "int_default_min_cores", number)
    output.done(f"jobs of {name} have {output.cores(number)} min cores unless they say otherwise")


@command.command("default-max-cores", context_settings=NEGATIVE_NUMBERS)
@click.argument("name")
@click.argument("number", type=core_cap, metavar="CORES")
def default_max_cores(name: str, number: int) -> None:
    """Set the max_cores of jobs that do not say; -1 is no cap.

    Example: opencue-sched show default-max-cores demo 200
    """
    _set_number(name, "int_default_max_cores", number)
    cap = "no cap" if number <= 0 else f"{output.cores(number)} max cores"
    output.done(f"jobs of {name} have {cap} unless they say otherwise")


def _set_flag(name: str, flag: str, value: bool, word: str) -> None:
    with farm() as (engine, _), engine.begin() as connection:
        show = choose(connection, Kind.SHOW, name)
        changed = shows.set_show_flag(connection, show.id, flag, value)
    state = "on" if value else "off"
    output.done(f"{word} of {show.name} is {state}" + ("" if changed else " (it was)"))


def _set_number(name: str, column: str, value: int) -> None:
    with farm() as (engine, _), engine.begin() as connection:
        shows.set_show_number(connection, choose(connection, Kind.SHOW, name).id, column, value)


def _announce_wait(seconds: float) -> None:
    if seconds > 0:
        click.echo(
            f"its booking is off for {seconds:g} s, and stays off if this is interrupted: then say it again",
            err=True,
        )


def _flip_lines(name: str, state: bool, flip: Flip) -> list[str]:
    if not flip.changed:
        word = "is" if state else "is not"
        lines = [f"show {name} {word} managed by this scheduler already"]
    elif state:
        lines = [f"show {name} is managed by this scheduler now"]
    else:
        lines = [f"show {name} is not managed by this scheduler any more"]
    if not flip.booking:
        lines.append(f"its booking is off: `opencue-sched show booking {name} on` lets it book")
    if not flip.store_ready:
        lines.append("Redis is not open for booking yet; the first worker counts what runs before it books")
    return lines
