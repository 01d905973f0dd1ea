"""``opencue-sched alloc``."""

from __future__ import annotations

import uuid

import click

from opencue_sched.cli import output
from opencue_sched.cli.inputs import CommandRefused, choose, farm, new_name, notify_hosts_changed
from opencue_sched.cli.output import Column, counted, in_cores, json_option, show_rows
from opencue_sched.domain.units import FACILITY_NAME_WIDTH
from opencue_sched.store import shows
from opencue_sched.store.shows import Kind

ALLOCATION_NAME_WIDTH = 36
ALLOCATION_TAG_WIDTH = 24

_COLUMNS = (
    Column("allocation", "Allocation", "name"),
    Column("id"),
    Column("tag", "Tag"),
    Column("facility", "Facility"),
    Column("running_cores", "Running Cores", in_cores("booked_centicores")),
    Column("idle_cores", "Idle Cores", in_cores("idle_centicores")),
    Column("cores", "Cores", in_cores("centicores")),
    Column("hosts", "Hosts"),
    Column("locked", "Locked"),
    Column("down", "Down"),
    Column("default", "Default"),
)


@click.group("alloc")
def command() -> None:
    """List, create and change allocations: pools of hosts, found by a tag.

    Example: opencue-sched alloc create local.desktop --tag desktop
    """


@command.command("list")
@json_option
def list_(as_json: bool) -> None:
    """List allocations with their hosts. Idle cores are those of hosts that are up and open.

    Example: opencue-sched alloc list
    """
    with farm() as (engine, _), engine.connect() as connection:
        found = shows.list_allocations(connection)
    show_rows(found, _COLUMNS, as_json=as_json)


@command.command()
@click.argument("name")
@click.option("--tag", metavar="TAG", help="The tag of its hosts. Default: the name without the facility.")
@click.option("--facility", metavar="NAME", help="Default: what the name begins with, else the default facility.")
@click.option("--new-facility", is_flag=True, help="Create the facility as well.")
@json_option
def create(name: str, tag: str | None, facility: str | None, new_facility: bool, as_json: bool) -> None:
    """Create an allocation, named FACILITY.NAME as in OpenCue.

    Example: opencue-sched alloc create cloud.gpu --tag gpu --new-facility
    """
    before, dot, rest = name.partition(".")
    with farm() as (engine, _), engine.begin() as connection:
        facility = facility or (before if dot else None)
        if facility is None:
            default = shows.default_facility(connection)
            if default is None:
                raise CommandRefused("there is no facility yet; name one with --facility and add --new-facility")
            facility_id, facility = default
        elif new_facility:
            new_name("facility", facility, width=FACILITY_NAME_WIDTH)
            facility_id = str(uuid.uuid4())
            shows.insert_facility(connection, facility_id, facility)
        else:
            facility_id = choose(connection, Kind.FACILITY, facility).id
        full_name = name if name.startswith(f"{facility}.") else f"{facility}.{name}"
        new_name("allocation", full_name, width=ALLOCATION_NAME_WIDTH)
        tag = new_name("tag", tag or (rest if dot else name), width=ALLOCATION_TAG_WIDTH)
        alloc_id = str(uuid.uuid4())
        if not shows.insert_allocation(connection, alloc_id, full_name, tag, facility_id):
            raise CommandRefused(f"there is an allocation {full_name!r} already")
    text = f"created allocation {full_name} of hosts tagged {tag}"
    output.done(text, as_json=as_json, allocation=full_name, id=alloc_id, tag=tag, facility=facility)


@command.command()
@click.argument("name")
@click.argument("tag")
def tag(name: str, tag: str) -> None:
    """Give an allocation and its hosts another tag.

    Example: opencue-sched alloc tag local.desktop workstation
    """
    new_name("tag", tag, width=ALLOCATION_TAG_WIDTH)
    with farm() as (engine, _), engine.begin() as connection:
        alloc = choose(connection, Kind.ALLOCATION, name)
        hosts = shows.set_allocation_tag(connection, alloc.id, tag)
    notify_hosts_changed(hosts)
    output.done(f"{alloc.name} and {counted(len(hosts), 'host')} of it have the tag {tag}")
