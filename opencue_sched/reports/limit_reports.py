"""What a licence server says of who holds a limit, where no Cuebot takes it: read, checked whole, then written.

A report is a full list: a limit that it names is held by nobody else, and limits that it does not name stay as they
are. It counts from the moment at which the licence server was asked, so that of two reporters the later answer wins,
whichever comes first. Who cannot ask the licence server reports nothing: silence lets the limit open after its time to
live, while an empty list opens it at once.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import IO, Any, Literal

from sqlalchemy import Engine

from opencue_sched.domain.names import near, plural
from opencue_sched.domain.units import INT_MAX
from opencue_sched.errors import SchedulerError
from opencue_sched.store import limit_reports as store
from opencue_sched.store.named_rows import Kind, similar_names
from opencue_sched.store.schema import read_origin
from opencue_sched.text_file import InvalidFile

MOST_BYTES = 16 * 1024**2
"""The size of the largest report that is read: a line for each of 100,000 machines."""
MOST_PROBLEMS = 20
"""Lines that are wrong, after which a report is read no further: each line of another format is."""
_FIELDS = ("limit", "host", "tokens", "user")
_WIDTHS = {"limit": 255, "host": 256, "user": 64, "source": 255}
"""Characters that the columns take."""
_NO_HOLDERS = "no holder is named, so nothing was written; say --nobody where the licence server says that nobody holds"


@dataclass(frozen=True, slots=True)
class Holder:
    """A machine that holds licences."""

    host: str
    """The licence server's name for the holder's machine; case and domain do not matter, and it need not be a host of
    the farm."""
    tokens: int = 1
    """How many tokens the holder has. A limit of machines counts the machine once all the same."""
    user: str | None = None
    """The user who holds the tokens; None: not known."""


@dataclass(frozen=True, slots=True)
class LimitReport:
    """What became of the report of one limit."""

    limit: str
    outcome: Literal["taken", "early", "late", "unknown"]
    """What became of the report. Only a report that was taken is written. A report is early when the licence server was
    asked less than five seconds after the last report, late when before the last report, and unknown when there is no
    such limit."""
    words: str
    """The outcome in words, for people."""
    holders: int = 0
    """Lines of the report."""
    tokens: int = 0


def report_limits(
    engine: Engine, held: Mapping[str, Collection[Holder]], *, asked_at: datetime, source: str | None = None
) -> list[LimitReport]:
    """Write who holds limits, by their names, as a licence server said when it was asked; all in one transaction.

    No holders of a limit: nobody holds it. ``asked_at`` has a time zone, and counts as now where it is later;
    ``source`` is kept for people. Raises InvalidFile for what makes no sense, and SchedulerError where a Cuebot takes
    such reports, or the database cannot; nothing is written then.
    """
    if problems := [
        *_problems({"source": source}),
        *(problem for limit in held for problem in _problems_of(limit, held[limit])),
    ]:
        raise InvalidFile(*problems)
    with engine.begin() as connection:
        if read_origin(connection) == "cuebot":
            raise SchedulerError(_of_a_cuebot(takes_reports=store.has_holders(connection)))
        if not store.has_holders(connection):
            raise SchedulerError("this database has no table limit_host: run `opencue-sched migrate`")
        asked_at = store.not_later_than_now(connection, asked_at)
        limits = {row.name: row for row in store.lock_limits(connection, held.keys(), asked_at)}
        taken = {row.id: held[row.name] for row in limits.values() if row.outcome == "taken"}
        if taken:
            holders = [
                (limit_id, holder.host, holder.tokens, holder.user) for limit_id in taken for holder in taken[limit_id]
            ]
            store.replace_holders(connection, taken, holders, asked_at, source)
        said = []
        for name, machines in held.items():
            if name not in limits:
                hint = near(name, similar_names(connection, Kind.LIMIT, name))
                said.append(LimitReport(name, "unknown", f"there is no limit {name!r}{hint}"))
            else:
                said.append(_outcome(limits[name], machines))
        return said


def read_holders(stream: IO[bytes], limit: str | None) -> dict[str, list[Holder]]:
    """The holders of limits that JSON lines name: an object a line with a ``host`` and perhaps ``tokens`` and ``user``;
    and ``limit``, unless all are of one. Raises InvalidFile, with what is wrong."""
    content = stream.read(MOST_BYTES + 1)
    if len(content) > MOST_BYTES:
        raise InvalidFile(f"has more than {MOST_BYTES // 1024**2} MiB")
    held: dict[str, list[Holder]] = {}
    problems: list[str] = []
    for number, line in enumerate(content.splitlines(), 1):
        if len(problems) >= MOST_PROBLEMS:
            problems.append("and perhaps more: the rest was not read")
            break
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except (ValueError, RecursionError):
            problems.append(f"line {number}: not JSON")
            continue
        found = list(_problems_of_line(row, limit))
        problems += [f"line {number}: {problem}" for problem in found]
        if not found:
            holders = held.setdefault(limit or row["limit"], [])
            holders.append(Holder(row["host"], row.get("tokens", 1), row.get("user")))
    if problems:
        raise InvalidFile(*problems)
    if not held:
        raise InvalidFile(_NO_HOLDERS)
    return held


def _problems_of_line(row: Any, limit: str | None) -> list[str]:
    """What is wrong with a line of a report, as it was parsed from JSON. ``limit``: that of all lines, None where each
    names its own."""
    if not isinstance(row, dict):
        return ["not an object"]
    unknown = [f"there is no field {name[:60]!r}{near(name, _FIELDS)}" for name in row if name not in _FIELDS]
    if limit is not None and "limit" in row:
        unknown.append("names a limit, as the command does: leave out either")
    needed = ("host",) if limit is not None else ("limit", "host")
    absent = [f"has no {name}" for name in needed if name not in row]
    return [*unknown, *absent, *_problems(row)]


def _problems_of(limit: str, holders: Collection[Holder]) -> list[str]:
    """What is wrong with the name of a limit and the holders of it."""
    found = _problems({"limit": limit})
    for holder in holders:
        found += _problems({"host": holder.host, "tokens": holder.tokens, "user": holder.user})
    return found


def _problems(row: Mapping[str, Any]) -> list[str]:
    """What is wrong with values of these fields."""
    found = []
    for name in _WIDTHS.keys() & row.keys():
        value = row[name]
        if value is None and name in ("user", "source"):
            continue
        if not isinstance(value, str) or not value.strip():
            found.append(f"{name} is not a name")
        elif len(value) > _WIDTHS[name]:
            found.append(f"{name} has more than {_WIDTHS[name]} characters")
        elif name == "host" and value.strip().startswith("."):
            found.append("host has a domain alone")
        elif not value.isprintable():
            found.append(f"{name} has characters that cannot be printed")
    if "tokens" in row and (type(row["tokens"]) is not int or not 0 < row["tokens"] <= INT_MAX):
        found.append("tokens is not a whole number above 0")
    return sorted(found)


def _outcome(limit: Any, holders: Collection[Holder]) -> LimitReport:
    """What became of a report of a limit (a row of lock_limits), with a sentence for people."""
    tokens = sum(holder.tokens for holder in holders)
    if limit.outcome == "taken":
        hold, licences = "holds" if len(holders) == 1 else "hold", plural(tokens, "licence")
        held = f"{plural(len(holders), 'machine')} {hold} {licences}" if holders else "nobody holds it"
        words = f"{limit.name}: {held}"
        return LimitReport(limit.name, "taken", words, len(holders), tokens)
    last = limit.reported_at.astimezone().strftime("%Y-%m-%d %H:%M:%S")
    why = f"less than {store.TOO_EARLY_SECONDS} s before this one" if limit.outcome == "early" else "which is later"
    words = f"{limit.name} stays as it is: its last report was asked for at {last}, {why}"
    return LimitReport(limit.name, limit.outcome, words, len(holders), tokens)


def _of_a_cuebot(*, takes_reports: bool) -> str:
    """Why this database takes no reports; ``takes_reports``: whether its Cuebot does."""
    if takes_reports:
        return (
            "this database is a Cuebot's, which takes the reports of licence servers itself: send them to that Cuebot, "
            "as samples/licensing in OpenCue's source does (its guide: Licenses and Limits)"
        )
    return (
        "the limits of this database know no reports: they come with Cuebot's migration V49, and such a Cuebot takes "
        "them itself"
    )
