"""``opencue-sched alloc``."""

from __future__ import annotations

import uuid
from typing import Any

import click

from opencue_sched.cli import output
from opencue_sched.cli.connect import farm, tell_hosts_changed
from opencue_sched.cli.output import counted, json_option, show_rows
from opencue_sched.cli.values import Refused, choose, new_name
from opencue_sched.domain.units import FACILITY_NAME_WIDTH
from opencue_sched.store import shows
from opencue_sched.store.shows import Kind

ALLOCATION_NAME_WIDTH = 36
ALLOCATION_TAG_WIDTH = 24

_COLUMNS = {
    "allocation": "Allocation",
    "tag": "Tag",
    "facility": "Facility",
    "running_cores": "Running Cores",
    "idle_cores": "Idle Cores",
    "cores": "Cores",
    "hosts": "Hosts",
    "locked": "Locked",
    "down": "Down",
    "default": "Default",
}


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
        rows = [_row(alloc) for alloc in shows.list_allocations(connection)]
    show_rows(rows, _COLUMNS, as_json=as_json)


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
                raise Refused("there is no facility yet; name one with --facility and add --new-facility")
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
            raise Refused(f"there is an allocation {full_name!r} already")
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
    with farm() as (engine, _):
        with engine.begin() as connection:
            alloc = choose(connection, Kind.ALLOCATION, name)
            hosts = shows.set_allocation_tag(connection, alloc.id, tag)
        tell_hosts_changed(hosts)
    output.done(f"{alloc.name} and {counted(len(hosts), 'host')} of it have the tag {tag}")


def _row(alloc: shows.Allocation) -> dict[str, Any]:
    return {
        "allocation": alloc.name,
        "id": alloc.id,
        "tag": alloc.tag,
        "facility": alloc.facility,
        "running_cores": output.cores(alloc.booked_centicores),
        "idle_cores": output.cores(alloc.idle_centicores),
        "cores": output.cores(alloc.centicores),
        "hosts": alloc.hosts,
        "locked": alloc.locked,
        "down": alloc.down,
        "default": alloc.default,
    }
