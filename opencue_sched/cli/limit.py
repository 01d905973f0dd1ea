"""``opencue-sched limit``: limits, each of which bounds how many frames run at once, or machines on which they do."""

from __future__ import annotations

import sys
from dataclasses import asdict
from datetime import UTC, datetime
from typing import Any, BinaryIO

import click
from sqlalchemy import Connection, Row

from opencue_sched.cli.inputs import LIMIT, NEGATIVE_NUMBERS, Commands, WholeNumber, farm, most_option, new_name
from opencue_sched.cli.output import HIGH, NAME, Column, Columns, Done, time_text
from opencue_sched.domain.moments import past_moment_of
from opencue_sched.domain.names import plural
from opencue_sched.domain.units import INT_MAX, duration_text
from opencue_sched.errors import InvalidInput
from opencue_sched.insight.limit_words import why_open
from opencue_sched.settings import as_seconds, get_settings
from opencue_sched.store import limit_bindings, named_rows, shows
from opencue_sched.store.limit_reports import has_holders
from opencue_sched.store.limit_types import type_column
from opencue_sched.store.limits import fetch_limits, has_terms, limit_of_exit_status, list_holders
from opencue_sched.store.named_rows import Kind, NamedRow
from opencue_sched.text_file import InvalidFile

_LIMIT_COLUMNS = Columns(
    Column("limit", "Limit", "name", importance=NAME),
    Column("id"),
    Column("running", "Running", importance=HIGH),
    Column("max", "Max", "max_value", importance=HIGH),
    Column("left", "Left"),
    Column("counts", "Counts", lambda limit: "machines" if limit.counts_machines else "frames"),
    Column("soft", "Soft", lambda limit: limit.soft if limit.soft >= 0 else None),
    Column("settled", "Settled", lambda limit: limit.settled if limit.reported_at else None),
    Column("pending", "Pending", lambda limit: limit.pending if limit.reported_at else None),
    Column("report_age", "Report", show=duration_text),
    Column("open", "Open", why_open, importance=HIGH),
    *map(Column, ("frames", "machines", "enforcement", "reported_at", "report_source")),
    Column("ttl", show=duration_text),
    *map(Column, ("exit_status", "delay_minutes", "auto_tag")),
)
"""The columns of a row of fetch_limits."""
_HOLDER_COLUMNS = Columns(
    Column("limit", "Limit", importance=NAME),
    Column("machine", "Machine", importance=NAME),
    Column("why", "Why"),
    Column("frames", "Frames"),
    Column("tokens", "Tokens"),
    Column("since", "Since", show=time_text),
    Column("users", "Whose", wraps=True),
    Column("is_host"),
)
"""The columns of a row of list_holders: a machine that holds a limit."""


def _limits(connection: Connection) -> dict[str, Row[Any]]:
    """All limits as fetch_limits has them, by id."""
    window = get_settings().accounting.limit_settle_window_seconds
    return fetch_limits(connection, window, has_holders=has_holders(connection))


_LIMIT = click.argument("limit", type=LIMIT)
_MAXIMUM = click.argument("maximum", type=WholeNumber(0, INT_MAX), metavar="MAX")
_PERHAPS_MAXIMUM = click.argument("maximum", type=WholeNumber(0, INT_MAX), metavar="[MAX]", required=False)


_NO_STATUS = 0
"""Stands for "no exit status" between the option and the row, which has NULL then. (None stands for an option that was
not given.) No limit has this status, because a frame that succeeds ends with it."""


def _seconds(value: str) -> int:
    """A duration in whole seconds, as many as the column holds."""
    try:
        seconds = round(as_seconds(value))
    except (InvalidInput, ValueError) as error:
        raise click.BadParameter(f"{value[:60]!r} is no duration; write 900, 15m or 1h") from error
    return WholeNumber(0, INT_MAX)(str(seconds))


def _exit_status(value: str) -> int:
    """The exit status of frames that got no licence. 0 is success, and with 1 frames fail for any reason."""
    return _NO_STATUS if value == "none" else WholeNumber(2, INT_MAX)(value)


# Each option is called like the column of limit_record that it sets: see _values.
_TERMS = (
    click.Option(
        ["--type", "str_type"],
        type=click.Choice(["FRAME", "HOST"], case_sensitive=False),
        help="What it counts: running frames, or machines that run any (one seat a machine: Nuke, Katana, Houdini).",
    ),
    click.Option(
        ["--soft", "int_soft_value"],
        type=WholeNumber(-1, INT_MAX),
        metavar="MACHINES",
        help="A limit of machines lets no more of them start once so many hold it: the rest is for artists. -1: none.",
    ),
    click.Option(
        ["--enforcement", "str_enforcement"],
        type=click.Choice(["ENFORCED", "ADVISORY", "DISABLED"], case_sensitive=False),
        help="ADVISORY and DISABLED keep nothing from starting.",
    ),
    click.Option(
        ["--ttl", "int_report_ttl"],
        type=_seconds,
        metavar="DURATION",
        help="A limit whose last report is older is not enforced until the next report. 0: it always is.",
    ),
    click.Option(
        ["--exit-status", "int_exit_status"],
        type=_exit_status,
        metavar="STATUS",
        help="The exit status of frames that got no licence. none: no status says so.",
    ),
    click.Option(
        ["--delay", "int_delay_minutes"],
        type=WholeNumber(0, INT_MAX),
        metavar="MINUTES",
        help="How long a layer waits, using no retry, after a frame got no licence. 0: the frame fails as any other.",
    ),
    click.Option(
        ["--auto-tag/--no-auto-tag", "b_auto_tag"],
        default=None,
        help="Whether a layer gets the limit when a frame of it got no licence.",
    ),
)


def _values(connection: Connection, given: dict[str, Any], limit_id: str = "") -> dict[str, object]:
    """The columns of a limit's row that the options ``given`` set, with their values.

    ``limit_id``: the limit that is changed; empty for a new one. Raises InvalidInput where this database has no such
    column, or another limit has the exit status.
    """
    values: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
    limit_type = values.pop("str_type", None)
    if values and not has_terms(connection):
        raise InvalidInput("limits of this database have a maximum and a type; more comes with Cuebot's migration V49")
    if (status := values.get("int_exit_status")) is not None:
        if other := limit_of_exit_status(connection, status, but=limit_id):
            raise InvalidInput(f"exit status {status} is that of limit {other}")
        values["int_exit_status"] = None if status == _NO_STATUS else status
    return values if limit_type is None else values | type_column(connection, limit_type)


limit_command = Commands("limit")


@limit_command.in_transaction("list")
def list_limits(connection: Connection) -> Done:
    """List limits with the frames that run under each, or the machines that hold it.

    Where a licence server's holders are reported, Settled are those, and Pending what started since and is not among
    them; both together are Running. Report is the age of the last report; Open says why a limit is not enforced.
    """
    return _LIMIT_COLUMNS.listed(sorted(_limits(connection).values(), key=lambda limit: limit.name))


@limit_command.in_transaction("info nuke")
@_LIMIT
def limit_info(connection: Connection, limit: NamedRow) -> Done:
    """Show one limit, and each machine that holds it: why, since when and whose.

    A machine holds a limit while frames run there, or while the licence server says so. Once there is a report, what it
    names counts, and the frames that started after it.
    """
    row, holders = _limits(connection)[limit.id], list_holders(connection, limit_ids=[limit.id])
    return _LIMIT_COLUMNS.shown(row, "holders", holders, _HOLDER_COLUMNS)


@limit_command.in_transaction("create arnold 20", params=_TERMS, context_settings=NEGATIVE_NUMBERS)
@click.argument("name")
@_MAXIMUM
def create_limit(connection: Connection, name: str, maximum: int, **terms: Any) -> Done:
    """Create a limit of MAX running frames, or machines."""
    new_name("limit", name)
    if named_rows.find_rows(connection, Kind.LIMIT, [name]):
        raise InvalidInput(f"there is a limit {name!r} already; `opencue-sched limit set` changes it")
    values = _values(connection, terms)
    new_id = shows.insert_row(connection, "limit_record", str_name=name, int_max_value=maximum, **values)
    return _LIMIT_COLUMNS.changed(_limits(connection)[new_id])


@limit_command.in_transaction("set arnold 25", params=_TERMS, context_settings=NEGATIVE_NUMBERS)
@_LIMIT
@_PERHAPS_MAXIMUM
def set_limit(connection: Connection, limit: NamedRow, maximum: int | None, **terms: Any) -> Done:
    """Change how many frames or machines may run under a limit, which of these it counts, and how strictly.

    Frames that run above the new MAX go on.
    """
    values = _values(connection, terms, limit.id)
    if maximum is not None:
        values["int_max_value"] = maximum
    if not values:
        raise click.UsageError("say a MAX, or a --type or another option")
    shows.set_rows(connection, "limit_record", "pk_limit_record", [limit.id], values)
    return _LIMIT_COLUMNS.changed(_limits(connection)[limit.id])


@limit_command.in_transaction("delete arnold")
@_LIMIT
@click.option("--force", is_flag=True, help="Even while frames run or wait under it; they are limited no more.")
def delete_limit(connection: Connection, limit: NamedRow, force: bool) -> Done:
    """Delete a limit."""
    in_use = _limits(connection)[limit.id].frames or shows.shows_under(connection, limits=[limit.id])
    if in_use and not force:
        raise InvalidInput(f"frames run or wait under {limit.name}; --force deletes it all the same")
    # The rows of its layers go first. No foreign key asks for that, but a layer that names a limit which is gone would
    # never be booked again.
    for table in ("layer_limit", "limit_record"):
        shows.delete_rows(connection, table, "pk_limit_record", limit.id)
    return Done(f"deleted limit {limit.name}", {"limit": limit.name, "id": limit.id})


_BINDING_COLUMNS = Columns(
    Column("job", "Job", importance=NAME),
    Column("layer", "Layer", importance=NAME),
    Column("layer_id"),
    Column("source", "Bound by", show=str.lower),
    Column("since", "Since", show=time_text),
    Column("waiting", "Waiting"),
    Column("running", "Running"),
)


@limit_command.in_transaction("bindings nuke")
@_LIMIT
@most_option(1000)
def bindings(connection: Connection, limit: NamedRow, most: int) -> Done:
    """List the layers of pending jobs under a limit, and how each was bound.

    SPEC: by its job file. MANUAL: by `layer set --add-limit`. AUTO: a frame of it ended with the limit's exit status.
    """
    found = limit_bindings.list_bindings(connection, limit.id, most=most + 1)  # one more tells whether there are more
    return _BINDING_COLUMNS.listed(found, "layer", most)


@limit_command.in_transaction("unbind nuke --auto")
@_LIMIT
@click.option("--auto", is_flag=True, required=True, help="The layers that were bound because of an exit status.")
def unbind(connection: Connection, limit: NamedRow, auto: bool) -> Done:  # noqa: ARG001 - there is no other kind yet
    """Take a limit from the layers that it was bound to because a frame ended with its exit status.

    What job files and people bound stays.
    """
    if not has_terms(connection):
        raise InvalidInput("limits of this database learn no layers; that comes with Cuebot's migration V49")
    freed = limit_bindings.unbind_learnt(connection, limit.id)
    return Done(f"took {limit.name} from {plural(freed, 'layer')}", {"limit": limit.name, "layers": freed})


def _past_moment(value: str) -> datetime:
    """A moment that was, as past_moment_of reads it."""
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
