"""``opencue-sched top``: the farm, live in a terminal.

A thread reads the farm, because a store that is away answers late; the main thread draws and takes keys meanwhile.
"""

from __future__ import annotations

import os
import re
import select
import signal
import sys
import termios
import threading
import time
import tty
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import asdict, replace
from functools import partial
from types import FrameType
from typing import Any, NoReturn

import click
import redis
import structlog
from rich.console import Console, Group
from rich.text import Text
from sqlalchemy import Engine
from sqlalchemy.exc import NoResultFound, SQLAlchemyError

from opencue_sched.cli.inputs import checked_redis, farm
from opencue_sched.cli.output import json_option, live, show_json
from opencue_sched.cli.top_screen import ANY_HEIGHT, SORTS, Chosen, Read, Screen, draw, farm_lines, moved
from opencue_sched.errors import SchedulerError
from opencue_sched.insight.explain import explain_job, passes_over
from opencue_sched.insight.farm import farm_view
from opencue_sched.insight.stores import describe_failure
from opencue_sched.settings import Settings, get_settings
from opencue_sched.store.schema import SchemaFacts

_INTERVAL_SECONDS = 2.0
_LATE_SECONDS = 5.0
_LOOK_AT_SIZE_SECONDS, _POLL_SECONDS = 0.5, 0.1
_REST_OF_KEY_SECONDS = 0.05
_KEYS = {"\x1b[A": "up", "\x1b[B": "down", "\r": "enter", "\n": "enter", "\x1b": "escape", "\x7f": "backspace"}
_KEY = re.compile(r"\x1b(?:\[[0-9;]*[@-~]|O.)?|.", re.DOTALL)
_STEPS = {"up": -1, "down": 1}
Look = Callable[[Chosen, Read], Read]


@click.command("top")
@click.option("--once", is_flag=True, help="Print the farm once and end.")
@click.option("--show", default="", metavar="PART", help="Only shows, and jobs of shows, with this in their name.")
@click.option("--job", default="", metavar="PART", help="Only jobs with this in their name.")
@click.option("--sort", type=click.Choice(list(SORTS)), default="wait", show_default=True, help="Order of the jobs.")
@json_option
def top_command(once: bool, show: str, job: str, sort: str, as_json: bool) -> None:
    """Watch the farm: cores, shows, workers, and the jobs that wait longest, with their reason; every two seconds anew.

    Keys: s sorts, f and / filter by show and by job, arrows choose a job, enter explains it, q quits. Each look costs
    the same number of statements on a farm of any size. When a store goes away, a line says so and the figures stay as
    they were. Exit status 1 if one is away at the start.

    Example: opencue-sched top --once --json | jq '.jobs[] | {name, why_text}'
    """
    watched = not (once or as_json)
    if watched and not (sys.stdin.isatty() and sys.stdout.isatty()):
        raise click.UsageError("this is no terminal; --once prints the farm once, --json for scripts")
    chosen = Chosen(sort=sort, show=show, job=job)
    settings = get_settings()
    with farm() as (engine, facts), checked_redis() as client:
        if watched:
            structlog.configure(logger_factory=structlog.ReturnLoggerFactory())  # a log would go across the screen
            look = partial(_look, engine, facts, client, settings)
            live(lambda console: _pictures(console, look, chosen), screen=True)
            return
        view = farm_view(engine, client, settings, show=show or None, job=job or None)
    if as_json:
        show_json(asdict(view))
        return
    console = Console(width=None if sys.stdout.isatty() else ANY_HEIGHT, highlight=False, soft_wrap=True)
    screen = Screen(console.width)
    farm_lines(screen, view, chosen)
    console.print(*screen.lines, sep="\n")


def _look(
    engine: Engine, facts: SchemaFacts, client: redis.Redis, settings: Settings, chosen: Chosen, before: Read
) -> Read:
    """Read what was chosen. A store that is away is the problem of what is returned."""
    job = chosen.explained
    try:
        view = farm_view(engine, client, settings, show=chosen.show or None, job=chosen.job or None)
        if job is None:
            return Read(view)
        passes = passes_over(client, settings, job)
        # The logs of dead frames may lie on a slow file server, and do not change: they are read once.
        known = before.explanation if before.of_job == job else None
        with engine.connect() as connection:
            found = explain_job(connection, job, settings, facts, *passes, with_logs=known is None)
        return Read(view, found if known is None else replace(found, deaths=known.deaths), job)
    except NoResultFound:
        return Read(view, None, job)
    except (SQLAlchemyError, redis.RedisError, SchedulerError) as error:
        return replace(before, problem=describe_failure(error, settings))


def _in_thread(look: Look, chosen: Chosen, before: Read) -> Future[Read]:
    """In a thread that the end of the process does not wait for, whatever store keeps it."""
    future: Future[Read] = Future()

    def run() -> None:
        try:
            future.set_result(look(chosen, before))
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, name="top", daemon=True).start()
    return future


def _pictures(console: Console, look: Look, chosen: Chosen) -> Iterator[Group]:
    """What is read every two seconds, and at once when something else is chosen, until the user quits."""
    read, shown = Read(), list[Text]()
    looking, asked, began = _in_thread(look, chosen, read), chosen, time.monotonic()
    with _keyboard() as keyboard:
        while True:
            if looking.done():
                read = looking.result()
                if _wanted(asked) != _wanted(chosen) or time.monotonic() >= began + _INTERVAL_SECONDS:
                    looking, asked, began = _in_thread(look, chosen, read), chosen, time.monotonic()
            waits = 0.0 if looking.done() else time.monotonic() - began
            late = f"a store has not answered for {waits:.0f} s" if waits > _LATE_SECONDS else ""
            lines = draw(
                replace(read, problem=read.problem or late), chosen, width=console.width, height=console.height
            )
            if lines != shown:
                yield Group(*lines)
                shown = lines
            pause = _LOOK_AT_SIZE_SECONDS if looking.done() else _POLL_SECONDS
            ready, _, _ = select.select([keyboard], [], [], pause)
            for key in _keys(keyboard) if ready else ():
                after = pressed(key, chosen, read)
                if after is None:
                    return
                chosen = after


def _wanted(chosen: Chosen) -> tuple[str, str, str | None]:
    return chosen.show, chosen.job, chosen.explained


def pressed(key: str, chosen: Chosen, read: Read) -> Chosen | None:
    """What is chosen after a key; None: nothing more, the user quits."""
    name = _KEYS.get(key, key)
    if chosen.typing:
        return _typed(name, chosen)
    if name == "q":
        return None
    if chosen.explained is not None:
        if name in ("escape", "enter"):
            return replace(chosen, explained=None, scrolled=0)
        return replace(chosen, scrolled=max(0, chosen.scrolled + _STEPS.get(name, 0)))
    if name in ("f", "/"):
        typing = "show" if name == "f" else "job"
        return replace(chosen, typing=typing, typed=getattr(chosen, typing))
    if name == "s":
        orders = list(SORTS)
        return replace(chosen, sort=orders[(orders.index(chosen.sort) + 1) % len(orders)])
    if read.view is not None and name in (*_STEPS, "enter"):
        after = moved(read.view, chosen, _STEPS.get(name, 0))
        return replace(after, explained=after.selected) if name == "enter" else after
    return replace(chosen, show="", job="") if name == "escape" else chosen


def _typed(name: str, chosen: Chosen) -> Chosen:
    if name == "escape":
        return replace(chosen, typing="", typed="")
    if name == "enter":
        found: dict[str, Any] = {chosen.typing: chosen.typed.strip()}
        return replace(chosen, typing="", typed="", selected=None, **found)
    if name == "backspace":
        return replace(chosen, typed=chosen.typed[:-1])
    return replace(chosen, typed=chosen.typed + name) if len(name) == 1 and name.isprintable() else chosen


@contextmanager
def _keyboard() -> Iterator[int]:
    """Standard input, key by key and without an echo. However this ends, the terminal is as it was."""
    keyboard = sys.stdin.fileno()
    before = termios.tcgetattr(keyboard)
    ended = signal.signal(signal.SIGTERM, _end)
    try:
        tty.setcbreak(keyboard)
        attributes: list[Any] = termios.tcgetattr(keyboard)
        attributes[6][termios.VSUSP] = b"\0"  # stopped by Ctrl-Z, it would leave the shell this screen
        termios.tcsetattr(keyboard, termios.TCSANOW, attributes)
        yield keyboard
    finally:
        termios.tcsetattr(keyboard, termios.TCSAFLUSH, before)
        signal.signal(signal.SIGTERM, ended)


def _end(number: int, _: FrameType | None) -> NoReturn:
    raise SystemExit(128 + number)


def _keys(keyboard: int) -> Iterator[str]:
    """What was typed, key by key; a key that sends several bytes is one."""
    typed = os.read(keyboard, 1024)
    while typed.endswith((b"\x1b", b"\x1b[", b"\x1bO")) and select.select([keyboard], [], [], _REST_OF_KEY_SECONDS)[0]:
        typed += os.read(keyboard, 1024)
    if not typed:
        raise click.Abort  # the terminal is gone
    yield from _KEY.findall(typed.decode("utf-8", "ignore"))
