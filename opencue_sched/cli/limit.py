"""``opencue-sched limit``: how many frames, or machines, may run under a name, and who holds it."""

from __future__ import annotations

import click
from sqlalchemy import Connection

from opencue_sched.cli.inputs import LIMIT, Commands, WholeNumber, new_name
from opencue_sched.cli.output import NAME, Column, Columns, Done
from opencue_sched.domain.units import INT_MAX
from opencue_sched.errors import InvalidInput
from opencue_sched.store import named_rows, shows
from opencue_sched.store.limit_types import type_column
from opencue_sched.store.named_rows import Kind, NamedRow
from opencue_sched.store.pending import fetch_limits

_LIMIT_COLUMNS = Columns(
    Column("limit", "Limit", "name", importance=NAME),
    Column("id"),
    Column("running", "Running"),
    Column("max", "Max", "max_value"),
    Column("left", "Left"),
    Column("counts", "Counts", lambda limit: "machines" if limit.counts_machines else "frames"),
)
_LIMIT = click.argument("limit", type=LIMIT)
_TYPE = click.option(
    "--type",
    "limit_type",
    type=click.Choice(["FRAME", "HOST"], case_sensitive=False),
    help="What it counts: running frames, or the machines that run any (one seat a machine: Nuke, Katana, Houdini).",
)


_MOST = click.argument("most", type=WholeNumber(0, INT_MAX), metavar="MAX")
_PERHAPS_MOST = click.argument("most", type=WholeNumber(0, INT_MAX), metavar="[MAX]", required=False)


limit_command = Commands("limit")


@limit_command.in_transaction("list")
def list_limits(connection: Connection) -> Done:
    """List limits with the frames that run under each, or the machines that run them."""
    return _LIMIT_COLUMNS.listed(sorted(fetch_limits(connection).values(), key=lambda limit: limit.name))


@limit_command.in_transaction("create arnold 20")
@click.argument("name")
@_MOST
@_TYPE
def create_limit(connection: Connection, name: str, most: int, limit_type: str | None) -> Done:
    """Create a limit of MAX running frames, or machines."""
    new_name("limit", name)
    if named_rows.find_rows(connection, Kind.LIMIT, [name]):
        raise InvalidInput(f"there is a limit {name!r} already")
    made = shows.insert_row(
        connection, "limit_record", str_name=name, int_max_value=most, **type_column(connection, limit_type or "FRAME")
    )
    return _LIMIT_COLUMNS.changed(fetch_limits(connection)[made])


@limit_command.in_transaction("set arnold 25")
@_LIMIT
@_PERHAPS_MOST
@_TYPE
def set_limit(connection: Connection, limit: NamedRow, most: int | None, limit_type: str | None) -> Done:
    """Change how many frames or machines may run under a limit, or which of these it counts.

    What runs above it goes on.
    """
    values: dict[str, object] = {} if most is None else {"int_max_value": most}
    if limit_type is not None:
        values |= type_column(connection, limit_type)
    if not values:
        raise click.UsageError("say a MAX, or a --type")
    shows.set_rows(connection, "limit_record", "pk_limit_record", [limit.id], values)
    return _LIMIT_COLUMNS.changed(fetch_limits(connection)[limit.id])


@limit_command.in_transaction("delete arnold")
@_LIMIT
@click.option("--force", is_flag=True, help="Even while frames run or wait under it; they are limited no more.")
def delete_limit(connection: Connection, limit: NamedRow, force: bool) -> Done:
    """Delete a limit."""
    held = fetch_limits(connection)[limit.id].running or shows.shows_under(connection, limits=[limit.id])
    if held and not force:
        raise InvalidInput(f"frames run or wait under {limit.name}; --force deletes it all the same")
    # No foreign key says so, but a layer under a limit that is gone would never be booked again.
    for name in ("layer_limit", "limit_record"):
        shows.delete_rows(connection, name, "pk_limit_record", limit.id)
    return Done(f"deleted limit {limit.name}", {"limit": limit.name, "id": limit.id})
