"""``opencue-sched limit``: how many frames, or machines, may run under a name, and who holds it."""

from __future__ import annotations

import sys
from dataclasses import asdict
from datetime import UTC, datetime
from typing import BinaryIO

import click
from sqlalchemy import Connection

from opencue_sched.cli.inputs import LIMIT, Commands, WholeNumber, farm, new_name
from opencue_sched.cli.output import NAME, Column, Columns, Done
from opencue_sched.domain.moments import past_moment_of
from opencue_sched.domain.units import INT_MAX
from opencue_sched.errors import InvalidInput
from opencue_sched.store import named_rows, shows
from opencue_sched.store.limit_types import type_column
from opencue_sched.store.named_rows import Kind, NamedRow
from opencue_sched.store.pending import fetch_limits
from opencue_sched.text_file import InvalidFile

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


def _past_moment(value: str) -> datetime:
    try:
        return past_moment_of(value)
    except InvalidInput as error:
        raise click.BadParameter(str(error)) from error


@limit_command.answers("report nuke --file holders.jsonl --source rlm@lic01")
@click.argument("name", metavar="[LIMIT]", required=False)
@click.option("--file", type=click.File("rb"), help="What to read. Default: standard input.")
@click.option(
    "--asked-at",
    type=_past_moment,
    metavar="TIME",
    help="When the licence server was asked, such as 2026-12-24T18:00:05Z. Default: when this command began.",
)
@click.option("--source", metavar="TEXT", help="Who says so, for people.")
@click.option("--nobody", is_flag=True, help="Nobody holds the limit; nothing is read.")
def report_limit(
    name: str | None, file: BinaryIO | None, asked_at: datetime | None, source: str | None, nobody: bool
) -> Done:
    """Say who holds a limit, as its licence server says: everybody, artists too.

    A JSON object a line: {"host": "ws017", "tokens": 1, "user": "alice"}, tokens and user if known. Without LIMIT each
    line names its own in a field "limit". All lines are taken, or none. Input without a line is an error: where the
    licence server cannot be asked, report nothing. A report that comes too late (a later one was taken), within five
    seconds of the last, or for a limit that is not there, is noted and left out; the exit status is 0 then.
    """
    from opencue_sched.reports.limit_reports import read_holders, report_limits

    asked_at = asked_at or datetime.now(UTC)
    if nobody and (name is None or file is not None):
        raise click.UsageError("--nobody takes a LIMIT, and no --file")
    stream = file or sys.stdin.buffer
    try:
        held = {name: []} if nobody and name is not None else read_holders(stream, name)
    except InvalidFile as error:
        problems = [f"{getattr(stream, 'name', '<stdin>')}: {problem}" for problem in error.problems]
        return Done([], {"problems": error.problems}, [f"error: {problem}" for problem in problems], status=1)
    with farm() as engine:
        said = report_limits(engine, held, asked_at=asked_at, source=source)
    taken = [report.words for report in said if report.outcome == "taken"]
    notes = [f"note: {report.words}" for report in said if report.outcome != "taken"]
    return Done(taken, [asdict(report) for report in said], notes)
