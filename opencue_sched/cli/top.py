"""``opencue-sched top``: the farm, live in a terminal."""

from __future__ import annotations

import os
import re
import select
import signal
import sys
import termios
import textwrap
import time
import tty
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import datetime
from functools import partial
from typing import Any

import click
import redis
import structlog
from rich.console import Console, Group
from rich.text import Text
from sqlalchemy import Engine
from sqlalchemy.exc import NoResultFound, SQLAlchemyError

from opencue_sched.cli.inputs import TOP, redis_store
from opencue_sched.cli.job_changes import JobChange, change_job
from opencue_sched.cli.output import HIGH, LOW, NAME, Column, Columns, Done, asked_for_json, cap_text, live
from opencue_sched.domain.names import plural
from opencue_sched.domain.units import duration_text
from opencue_sched.domain.verdicts import Verdict
from opencue_sched.errors import SchedulerError
from opencue_sched.insight.explain import explain_job, explanation_lines, passes_over
from opencue_sched.insight.farm_view import AllocationUse, FarmView, JobUse, ShowUse, farm_view
from opencue_sched.insight.frame_logs import deaths_of
from opencue_sched.insight.health import describe_failure
from opencue_sched.settings import Settings, get_settings
from opencue_sched.store.jobs import job_of

_INTERVAL_SECONDS = 2.0
"""The time between two reads of the farm."""
_LOOK_AT_SIZE_SECONDS = 0.5
"""The time between two looks whether the terminal has another size."""
_REST_OF_KEY_SECONDS = 0.05
"""How long the rest of a key's bytes may take: after it, Escape is the key itself."""
_KEYS = {"\x1b[A": "up", "\x1b[B": "down", "\r": "enter", "\n": "enter", "\x1b": "escape", "\x7f": "backspace"}
"""The keys that are no letters, by the bytes that a terminal sends."""
_KEY = re.compile(r"\x1b(?:\[[0-9;]*[@-~]|O.)?|.", re.DOTALL)
_STEPS = {"up": -1, "down": 1}
ANY_SIZE = 100_000
"""A width or height, in characters, at which nothing is left out: that of a pipe."""
CHANGES = {
    "p": JobChange.PAUSE,
    "u": JobChange.UNPAUSE,
    "k": JobChange.KILL,
    "r": JobChange.RETRY,
    "e": JobChange.EAT,
    "i": JobChange.PRIORITY,
}
"""Keys that change the chosen job."""
_CHANGE_KEYS = "  ".join(f"{key} {change.value}" for key, change in CHANGES.items())
_PRIORITY = re.compile(r"-?[0-9]{0,9}")
_AT_WORK = frozenset({"running", Verdict.FLOWING})
"""Reasons (``why`` of farm_view) of jobs that run, or are about to: they are green."""
_ABOVE_ALL = 3
"""The importance of a column that is left out after all others but names."""

Line = tuple[str, str]
"""A text, and its style."""
SORTS: dict[str, Callable[[JobUse], Any]] = {
    "wait": lambda _: 0,
    "frames": lambda job: -job["waiting"],
    "cores": lambda job: -job["cores"],
    "priority": lambda job: -job["priority"],
    "name": lambda job: job["name"],
}
"""Orders of jobs; that of the farm's view is by how long they wait."""

_PERCENT = "{:.0%}".format
ALLOCATION_COLUMNS = Columns(
    Column("name", "ALLOCATION", importance=NAME),
    *(Column(name, name.upper(), importance=HIGH) for name in ("cores", "booked", "idle", "locked", "down")),
    Column("hosts", "HOSTS"),
)
SHOW_COLUMNS = Columns(
    Column("show", "SHOW", importance=NAME),
    Column("allocation", "ALLOCATION", importance=LOW),
    Column("used", "CORES", importance=HIGH),
    Column("size", "SIZE", importance=HIGH),
    Column("burst", "BURST", show=cap_text),
    Column("share", "SHARE", show=_PERCENT, importance=HIGH),
    Column("due", "DUE", show=_PERCENT, importance=HIGH),
    *(Column(name, title) for name, title in (("running", "RUN"), ("waiting", "WAIT"), ("dead", "DEAD"))),
    Column("off", "STATE"),
)
JOB_COLUMNS = Columns(
    Column("name", "JOB", importance=NAME),
    Column("waiting_seconds", "WAITED", show=duration_text, importance=HIGH),
    Column("waiting", "WAIT", importance=HIGH),
    Column("running", "RUN", importance=HIGH),
    Column("dead", "DEAD"),
    Column("", "DONE", lambda job: f"{job['done']}/{job['frames']}"),
    Column("cores", "CORES"),
    Column("priority", "PRI"),
    Column("user", "USER", importance=LOW),
    Column("show", "SHOW", importance=LOW),
    Column("why_text", "WHY", importance=_ABOVE_ALL, wraps=True),
)


@dataclass(frozen=True)
class Chosen:
    """What the user chose."""

    sort: str = "wait"
    show: str = ""
    """Part of the name of a show."""
    job: str = ""
    """Part of the name of a job."""
    priority: str = ""
    """A number to be set, as typed so far."""
    selected: str | None = None
    """The id of a job."""
    explained: str | None = None
    """The id of a job."""
    scrolled: int = 0
    typing: str = ""
    """What is being typed: ``show``, ``job`` or ``priority``; empty for nothing."""
    asked: JobChange | None = None
    """What a key would change on the job, which a person is asked about."""
    agreed: bool = False
    """Whether the person said yes: the change is to be made now."""
    said: str = ""
    """What became of the last change; until the next key."""

    @property
    def on(self) -> str | None:
        """The job that keys change: the one that is explained, or else selected."""
        return self.explained or self.selected


@dataclass(frozen=True)
class Read:
    """What was read last."""

    view: FarmView
    explanation: Sequence[str] = ()
    """The explanation of the job that is explained, line by line."""
    problem: str = ""
    """Why nothing newer could be read; empty where it could."""


@TOP.on_farm("top --once --json | jq '.jobs[] | {name, why_text}'")
@click.option("--once", is_flag=True, help="Print the farm once and end.")
@click.option("--show", default="", metavar="PART", help="Only shows, and jobs of shows, with this in their name.")
@click.option("--job", default="", metavar="PART", help="Only jobs with this in their name.")
@click.option("--sort", type=click.Choice(list(SORTS)), default="wait", show_default=True, help="Order of the jobs.")
def top_command(engine: Engine, once: bool, show: str, job: str, sort: str) -> Done:
    """Watch the farm: cores, shows, workers, and the jobs that wait longest, with their reason; every two seconds anew.

    Keys: s sorts, f and / filter by show and by job, arrows choose a job, enter explains it, q quits. Of the chosen job
    p pauses, u unpauses, k kills, r retries and e eats dead frames, i sets the priority; each asks first, and is a
    comment of the job.

    Each look costs the same number of statements on a farm of any size. When a store goes away, a line says so and the
    figures stay as they were. Exit status 1 if one is away at the start.
    """
    watched = not (once or asked_for_json())
    if watched and not (sys.stdin.isatty() and sys.stdout.isatty()):
        raise click.UsageError("this is no terminal; --once prints the farm once, --json for scripts")
    chosen = Chosen(sort=sort, show=show, job=job)
    settings = get_settings()
    with redis_store() as client:
        view = farm_view(engine, client, settings, show=show, job=job)
        if watched:
            structlog.configure(logger_factory=structlog.ReturnLoggerFactory())  # a log would go across the screen
            look, change = partial(_look, engine, client, settings), partial(_changed, engine, settings)
            live(lambda console: _pictures(console, look, change, chosen, Read(view)), screen=True)
            return Done([], None)
    if not asked_for_json():
        console = Console(width=None if sys.stdout.isatty() else ANY_SIZE, highlight=False, soft_wrap=True)
        lines = farm_lines(Read(view), chosen, console.width, ANY_SIZE)
        console.print(*_texts(lines, console.width), sep="\n")
    return Done([], view)


def _look(engine: Engine, client: redis.Redis, settings: Settings, chosen: Chosen, before: Read) -> Read:
    """Read what was chosen. A store that is away is the problem of what is returned."""
    try:
        view = farm_view(engine, client, settings, show=chosen.show, job=chosen.job)
        if chosen.explained is None:
            return Read(view)
        with engine.connect() as connection:
            passes = passes_over(client, settings, chosen.explained, job_of(connection, chosen.explained).show_id)
            deaths = deaths_of(connection, chosen.explained)
            found = explain_job(connection, chosen.explained, settings, passes, deaths)
        return Read(view, [found.job, *explanation_lines(found)])
    except NoResultFound:
        return Read(view, ["the job is gone"])
    except (SQLAlchemyError, redis.RedisError, SchedulerError) as error:
        return replace(before, problem=describe_failure(error, settings))


def _pictures(
    console: Console,
    look: Callable[[Chosen, Read], Read],
    change: Callable[[Chosen], str],
    chosen: Chosen,
    read: Read,
) -> Iterator[Group]:
    """What is read every two seconds, and at once when something else is chosen or was changed, until the user quits.
    ``change`` makes a change that was agreed to, and says what became of it."""
    shown = list[Text]()
    asked, due = _wanted(chosen), time.monotonic() + _INTERVAL_SECONDS
    with _keyboard() as keyboard:
        while True:
            if asked != _wanted(chosen) or time.monotonic() >= due:
                read, asked = look(chosen, read), _wanted(chosen)
                due = time.monotonic() + _INTERVAL_SECONDS
            lines = draw(read, chosen, width=console.width, height=console.height)
            if lines != shown:
                yield Group(*lines)
                shown = lines
            ready, _, _ = select.select([keyboard], [], [], _LOOK_AT_SIZE_SECONDS)
            for key in _keys(keyboard) if ready else ():
                after = pressed(key, chosen, read.view)
                if after is None:
                    return
                chosen = after
            if chosen.agreed:
                yield Group(*draw(read, chosen, width=console.width, height=console.height))  # killing may take seconds
                chosen = replace(chosen, asked=None, agreed=False, said=change(chosen))
                shown, due = [], time.monotonic()


def _changed(engine: Engine, settings: Settings, chosen: Chosen) -> str:
    """Make the change that was agreed to, and say what became of it, or why nothing did."""
    if chosen.asked is None or chosen.on is None:
        return ""
    try:
        return change_job(engine, chosen.asked, chosen.on, priority=int(chosen.priority or 0))
    except NoResultFound:
        return "the job is gone"
    except (SQLAlchemyError, redis.RedisError, SchedulerError) as error:
        return describe_failure(error, settings)


def _wanted(chosen: Chosen) -> tuple[str, str, str | None]:
    """What decides what is read: when it changes, the view is read at once."""
    return chosen.show, chosen.job, chosen.explained


def pressed(key: str, chosen: Chosen, view: FarmView) -> Chosen | None:
    """What is chosen after a key; None: nothing more, the user quits."""
    name = _KEYS.get(key, key)
    chosen = replace(chosen, said="")
    if chosen.asked and not chosen.typing:
        return replace(chosen, agreed=True) if name == "y" else replace(chosen, asked=None)
    if chosen.typing:
        return _typed(name, chosen)
    if name == "q":
        return None
    if name in CHANGES and chosen.on is not None:
        typed = "priority" if CHANGES[name] is JobChange.PRIORITY else ""
        return replace(chosen, asked=CHANGES[name], typing=typed, priority="")
    if chosen.explained is not None:
        if name in ("escape", "enter"):
            return replace(chosen, explained=None, scrolled=0)
        return replace(chosen, scrolled=max(0, chosen.scrolled + _STEPS.get(name, 0)))
    if name in ("f", "/"):
        return replace(chosen, typing="show" if name == "f" else "job")
    if name == "s":
        orders = list(SORTS)
        return replace(chosen, sort=orders[(orders.index(chosen.sort) + 1) % len(orders)])
    if name in (*_STEPS, "enter"):
        after = moved(view, chosen, _STEPS.get(name, 0))
        return replace(after, explained=after.selected) if name == "enter" else after
    return replace(chosen, show="", job="") if name == "escape" else chosen


def _typed(name: str, chosen: Chosen) -> Chosen:
    """What is chosen after a key while a text is typed, by the key's name. Enter ends typing, and Escape empties the
    text as well."""
    text = getattr(chosen, chosen.typing)
    if chosen.typing == "priority":
        return _typed_priority(name, chosen)
    if name in ("escape", "backspace"):
        text = text[:-1] if name == "backspace" else ""
    elif len(name) == 1 and name.isprintable():
        text += name
    found: dict[str, Any] = {chosen.typing: text}
    return replace(chosen, typing="" if name in ("enter", "escape") else chosen.typing, selected=None, **found)


def _typed_priority(name: str, chosen: Chosen) -> Chosen:
    """A whole number, which is asked about when it is complete; nothing else is typed."""
    if name == "escape" or (name == "enter" and not chosen.priority.lstrip("-")):
        return replace(chosen, typing="", asked=None)
    if name == "enter":
        return replace(chosen, typing="")
    if name == "backspace":
        return replace(chosen, priority=chosen.priority[:-1])
    text = chosen.priority + name
    return replace(chosen, priority=text) if _PRIORITY.fullmatch(text) else chosen


@contextmanager
def _keyboard() -> Iterator[int]:
    """Standard input, key by key and without an echo. However this ends, the terminal is as it was."""
    keyboard = sys.stdin.fileno()
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    signal.signal(signal.SIGTSTP, signal.SIG_IGN)  # stopped by Ctrl-Z, it would leave the shell this screen
    before = termios.tcgetattr(keyboard)
    try:
        tty.setcbreak(keyboard)
        yield keyboard
    finally:
        termios.tcsetattr(keyboard, termios.TCSAFLUSH, before)


def _keys(keyboard: int) -> Iterator[str]:
    """What was typed, key by key. A key that sends several bytes counts as one key."""
    typed = os.read(keyboard, 1024)
    while typed.endswith((b"\x1b", b"\x1b[", b"\x1bO")) and select.select([keyboard], [], [], _REST_OF_KEY_SECONDS)[0]:
        typed += os.read(keyboard, 1024)
    if not typed:
        raise click.Abort  # the terminal is gone
    yield from _KEY.findall(typed.decode("utf-8", "ignore"))


# What is drawn.


def moved(view: FarmView, chosen: Chosen, by: int) -> Chosen:
    """The choice with another job selected: the one that is ``by`` places below the present one."""
    jobs = [job["id"] for job in sorted(view["jobs"], key=SORTS[chosen.sort])]
    if not jobs:
        return replace(chosen, selected=None)
    place = jobs.index(chosen.selected) + by if chosen.selected in jobs else 0
    return replace(chosen, selected=jobs[min(max(place, 0), len(jobs) - 1)])


def draw(read: Read, chosen: Chosen, *, width: int, height: int) -> list[Text]:
    """The whole screen, the help in its last line."""
    if chosen.explained is None:
        lines = farm_lines(read, chosen, width, height - 1)
    else:
        wrapped = [part for line in read.explanation for part in textwrap.wrap(line, width, subsequent_indent="    ")]
        shown = wrapped[min(chosen.scrolled, max(0, len(wrapped) - 1)) :]
        lines = [*_header(read), ("", ""), *((line, "") for line in shown)]
    lines = [*lines, *[("", "")] * height][: height - 1]
    return _texts([*lines, (_help(chosen, read.view), "reverse")], width)


def _texts(lines: Iterable[Line], width: int) -> list[Text]:
    """Lines, cut to the width."""
    texts = []
    for line, style in lines:
        text = Text(line, no_wrap=True)
        text.stylize(style)  # as a span: texts that differ by their own style alone are equal
        text.truncate(width, overflow="ellipsis")
        texts.append(text)
    return texts


_BREAKING_HOSTS = 3
"""Hosts that break frames, told at most."""


def farm_lines(read: Read, chosen: Chosen, width: int, height: int) -> list[Line]:
    """The farm: allocations, what waits, the fleet, and what there is room for of shows and jobs."""
    view = read.view
    lines = [*_header(read), *_allocations(view["allocations"], width, max(2, height // 6))]
    lines += [(host["words"], "red") for host in view["breaking_hosts"][:_BREAKING_HOSTS]]
    found = sorted(view["waiting_by_verdict"].items(), key=lambda by_verdict: -by_verdict[1])
    said = [f"{name.replace('_', ' ')} {count}" for name, count in found]
    said += [f"paused {view['waiting_paused']}"] if view["waiting_paused"] else []
    if said:
        at = view["waiting_counted_at"]
        age = f" ({duration_text(view['at'] - at)} ago)" if at is not None else ""
        lines.append((f"why frames wait: {', '.join(said)}{age}", ""))
    lines += [*_fleet(view), ("", "")]
    shows = [show for show in view["shows"] if chosen.show.lower() in show["name"].lower()]
    rows = [row for show in shows for row in _rows(show)]
    jobs = sorted(view["jobs"], key=SORTS[chosen.sort])
    room = max(0, height - len(lines) - 3)
    fit = min(len(rows), max(room // 3, room - len(jobs)))
    styles = ["" if row["busy"] else "dim" for row in rows]
    lines += [*_table(SHOW_COLUMNS, rows[:fit], styles, width, more=len(rows) - fit), ("", "")]
    room -= fit
    ids = [job["id"] for job in jobs]
    at = ids.index(chosen.selected) if chosen.selected in ids else -1
    start = max(0, at - max(1, room) + 1)
    styles = ["red" if job["trouble"] else "green" if job["why"] in _AT_WORK else "" for job in jobs]
    if at >= 0:
        styles[at] = "reverse"
    shown = jobs[start : start + room]
    lines += _table(JOB_COLUMNS, shown, styles[start:], width, more=view["jobs_total"] - len(shown))
    return lines if jobs else [*lines, ("no pending job", "dim")]


def _header(read: Read) -> Iterator[Line]:
    """The lines at the top: the farm's figures, and in red how old these are while they cannot be read."""
    view = read.view
    hosts, down, locked = (
        sum(allocation[name] for allocation in view["allocations"]) for name in ("hosts", "hosts_down", "hosts_locked")
    )
    off = ", ".join(f"{count} {word}" for count, word in ((down, "down"), (locked, "locked")) if count)
    clock = datetime.fromtimestamp(view["at"]).astimezone().strftime("%H:%M:%S")
    parts = (
        view["facility"] or "farm",
        clock,
        plural(hosts, "host") + (f" ({off})" if off else ""),
        "frames: {running} running, {waiting} waiting, {dead} dead".format_map(view),
        f"{view['bookings_per_second']:g} booked/s",
    )
    yield "  ".join(parts), "bold"
    if read.problem:
        yield f"figures of {duration_text(time.time() - view['at'])} ago: {read.problem}", "bold red"


def _allocations(allocations: Sequence[AllocationUse], width: int, most: int) -> Sequence[Line]:
    """A table of the allocations that have hosts, the largest first."""
    found = [allocation for allocation in allocations if allocation["hosts"]]
    found.sort(key=lambda allocation: (-allocation["cores"], allocation["name"]))
    if not found:
        return [("no hosts", "bold red")]
    styles = ["red" if allocation["down"] == allocation["cores"] else "" for allocation in found]
    return _table(ALLOCATION_COLUMNS, found[:most], styles, width, more=max(0, len(found) - most))


def _fleet(view: FarmView) -> Iterator[Line]:
    """The line that says who leads, and the one of the workers; in red where nobody does their work."""
    leader, workers = view["fleet"]["leader"], view["fleet"]["workers"]
    if leader["fence"] is None:
        yield "no beat leads: nothing periodic is done; start `celery -A opencue_sched beat`", "bold red"
    else:
        yield leader["words"], ""
    if not workers:
        yield "no worker is alive: nothing is booked; start `celery -A opencue_sched worker`", "bold red"
    else:
        states = (
            f"{worker['instance']} {worker['in_flight']}/{worker['capacity']} {worker['state']}" for worker in workers
        )
        yield f"{plural(len(workers), 'worker')}: {', '.join(states)}", ""


def _rows(show: ShowUse) -> Iterable[Mapping[str, Any]]:
    """A row for each subscription of a show; the show's frames stand in the first of them only."""
    counts: Mapping[str, Any] = {name: show[name] for name in ("running", "waiting", "dead")}
    nothing = dict.fromkeys(("allocation", "size", "burst", "share", "due")) | {"used": show["cores"]}
    for use in show["subscriptions"] or [nothing]:
        yield {**use, **counts, "show": show["name"], "off": show["off"], "busy": show["running"] + show["waiting"]}
        counts = dict.fromkeys(counts)


def _table(columns: Columns, rows: Sequence[Any], styles: Sequence[str], width: int, *, more: int = 0) -> list[Line]:
    """A line of titles and one for each row, of the columns that fit. The last column's text may be cut."""
    table = columns.lay_out(rows, width)
    title = table.line(table.titles) + (f"  ({more} more)" if more else "")
    return [(title, "bold underline"), *zip(map(table.line, table.cells), styles, strict=False)]


def _help(chosen: Chosen, view: FarmView) -> str:
    """The line at the bottom: a question and its keys, what came of a change, or the keys that do something now."""
    if chosen.asked is not None:
        names = {job["id"]: job["name"] for job in view["jobs"]}
        name = names.get(chosen.on or "", "this job")
        if chosen.agreed:
            return f" {name}: working on it"
        if chosen.typing:
            return f" priority of {name}: {chosen.priority}_   enter: set it   esc: leave it"
        return f" {chosen.asked.question.format(job=name, priority=chosen.priority)} y: yes   any other key: no"
    if chosen.said:
        return f" {chosen.said}"
    if chosen.typing:
        text = getattr(chosen, chosen.typing)
        return f" {chosen.typing} with in its name: {text}_   enter: done   esc: all"
    if chosen.explained is not None:
        return f" esc back  up/down scroll  q quit  {_CHANGE_KEYS}"
    if chosen.selected is not None:
        return f" q quit  {_CHANGE_KEYS}  enter explain  s sort: {chosen.sort}"
    show, job = (f"={text}" if text else "" for text in (chosen.show, chosen.job))
    return f" q quit  s sort: {chosen.sort}  f show{show}  / job{job}  esc all  up/down choose  enter explain"
