"""What a command works on: the stores it connects to, and the names and numbers that are typed after it.

redis and what plans bookings are imported where they are used: commands that only read PostgreSQL start without them.
"""

from __future__ import annotations

import getpass
import os
import re
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import wraps
from inspect import cleandoc
from typing import TYPE_CHECKING, Any, TypeVar

import click
from click.shell_completion import CompletionItem
from sqlalchemy import Connection, Engine
from sqlalchemy.exc import OperationalError, SQLAlchemyError

from opencue_sched.cli import COMMANDS
from opencue_sched.cli.output import Done
from opencue_sched.clients.postgres import ask, make_engine
from opencue_sched.domain.frame_range import FrameRange
from opencue_sched.domain.names import NAME, NAME_CHARACTERS, near
from opencue_sched.domain.units import CENTICORES_PER_CORE, INT_MAX, UNLIMITED, centicores_of
from opencue_sched.errors import InvalidInput
from opencue_sched.insight.health import check_redis, describe_failure
from opencue_sched.settings import get_settings
from opencue_sched.store import jobs, named_rows
from opencue_sched.store.named_rows import Kind, NamedRow
from opencue_sched.store.schema import check_schema

if TYPE_CHECKING:
    import redis

_ID = re.compile(r"\b[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}\b")
_NAMES_COMPLETED = 100
"""How many names a shell is offered at most."""
_SHORT_LIMITS = {"connect_seconds": 2, "statement_seconds": 1}
"""The time-outs of a command that must not wait long; two seconds is the shortest time to connect that libpq knows."""

NEGATIVE_NUMBERS = {"ignore_unknown_options": True}
"""Context settings of a command that takes -1 as a value rather than for an option."""
_ASK_AGAIN_SECONDS = 1.0
"""The time between two questions to a PostgreSQL that is away."""

T = TypeVar("T")


@contextmanager
def database(**limits: int) -> Iterator[Engine]:
    """An engine on the configured database; with the time-outs of make_engine unless ``limits`` has others."""
    engine = make_engine(get_settings(), application_name="opencue-sched cli", pool_size=2, **limits)
    try:
        yield engine
    finally:
        engine.dispose()


@contextmanager
def farm() -> Iterator[Engine]:
    """An engine on a database that answers and has a schema we can use. Raises WrongSchema."""
    with database() as engine:
        ask(engine, check_schema)
        yield engine


def patiently(engine: Engine, read: Callable[[Connection], T]) -> T:
    """The answer of ``read`` for a command that goes on for long. Where PostgreSQL is away, a note says so once, and
    ``read`` is called again until it answers."""
    told = False
    while True:
        try:
            return ask(engine, read)
        except OperationalError as error:
            if not told:
                click.echo(f"note: {describe_failure(error, get_settings())}; still waiting", err=True)
            told = True
            time.sleep(_ASK_AGAIN_SECONDS)


@contextmanager
def redis_store() -> Iterator[redis.Redis]:
    """A client of a Redis that answers and does not evict. Raises StoreUnusable saying what to set."""
    from opencue_sched.accounting.epoch import guarded_redis

    with guarded_redis(get_settings().redis_dsn, get_settings()) as client:
        check_redis(client, get_settings())
        yield client


def current_user() -> str | None:
    """The name of the user who runs this command; None for a user id without a name (a container's, say)."""
    try:
        return getpass.getuser()
    except (KeyError, OSError):
        return None


def choose(connection: Connection, kind: Kind, names: Sequence[str]) -> list[NamedRow]:
    """The rows of these names or ids, each once. Raises InvalidInput for all that are unknown, with the names that were
    probably meant."""
    found = named_rows.find_rows(connection, kind, names)
    if unknown := [name for name in dict.fromkeys(names) if name not in found]:
        hints = [near(name, named_rows.similar_names(connection, kind, name)) for name in unknown]
        said = [f"there is no {kind} {name!r}{hint}" for name, hint in zip(unknown, hints, strict=True)]
        raise InvalidInput("\n".join(said))
    return list(dict.fromkeys(found[name] for name in names))


def layer_ids(connection: Connection, job: NamedRow, names: Sequence[str]) -> list[str] | None:
    """The ids of a job's layers of these names; None for no name. Raises InvalidInput for one the job has not."""
    if not names:
        return None
    by_name = {row.name: row.id for row in jobs.layers_of(connection, job.id)}
    unknown = [name for name in names if name not in by_name]
    if unknown:
        raise InvalidInput(f"job {job.name} has no layer {unknown[0]!r}{near(unknown[0], by_name)}")
    return [by_name[name] for name in names]


def with_names(lines: Sequence[str]) -> list[str]:
    """Lines with names instead of ids. They stay as they are where the database does not answer."""
    ids = {found for line in lines for found in _ID.findall(line)}
    try:
        with database(**_SHORT_LIMITS) as engine, engine.connect() as connection:
            names = named_rows.names_by_id(connection, ids)
    except SQLAlchemyError:
        return list(lines)
    return [_ID.sub(lambda found: names.get(found[0], found[0]), line) for line in lines]


class WholeNumber(click.IntRange):
    """An integer in a range, which a message calls an integer: no word is "a valid integer range"."""

    name = "integer"


class Number(click.FloatRange):
    """A number in a range, which a message calls a number."""

    name = "number"


class NameOf(click.types.StringParamType):
    """The name or id of something in the database, completed in a shell. The function of an `on_farm` command, and of
    one that reads or writes, gets its row instead."""

    def __init__(self, kind: Kind) -> None:
        self.kind, self.name = kind, kind.value

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Bytes that are no text stand in no name: with their replacement there is none of that name."""
        return os.fsencode(super().convert(value, param, ctx)).decode("utf-8", "replace")

    def get_metavar(self, param: click.Parameter, ctx: click.Context) -> str:  # noqa: ARG002 - click's signature
        return self.name.upper()

    def shell_complete(self, ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:  # noqa: ARG002
        """A few names; none where the database does not answer at once."""
        try:
            with database(**_SHORT_LIMITS) as engine, engine.connect() as connection:
                names = named_rows.similar_names(connection, self.kind, incomplete)
        except Exception:
            return []
        return [CompletionItem(name) for name in names if name.startswith(incomplete)][:_NAMES_COMPLETED]


ALLOCATION, HOST, JOB, LIMIT, SERVICE, SHOW = map(
    NameOf, (Kind.ALLOCATION, Kind.HOST, Kind.JOB, Kind.LIMIT, Kind.SERVICE, Kind.SHOW)
)


def ask_first(question: str) -> None:
    """End the command, which changes nothing then, unless a person agrees."""
    status = 1
    try:
        # With --json standard output has the document alone.
        if click.confirm(question, err=bool(click.get_current_context().params.get("as_json"))):
            return
    except click.Abort as abort:  # at Ctrl-C, and where there is nobody to ask
        click.echo(err=True)
        status = 1 if isinstance(abort.__context__, EOFError) else 130
    click.echo("nothing was changed", err=True)
    raise click.exceptions.Exit(status)


Body = Callable[..., Done]
"""What a command does, as a function: its parameters are the command's."""
_Decorator = Callable[[Body], click.Command]


class Commands(click.Group):
    """A group whose commands answer what is to be printed, as a table or lines, or with --json as a document.

    A command is declared with the words of an example for its help, the first of which is its name. The group's example
    is that of its first command. The function of a command that works on the database gets the rows of the names that
    the command is given (`NameOf`).
    """

    def __init__(self, words: str, does: str = "") -> None:
        self._words = ("opencue-sched", *words.split())
        super().__init__(self._words[-1], help=does or COMMANDS[words][1])

    def _help(self, does: str, example: str) -> str:
        """The help of a command of this group: what it does, and an example."""
        return f"{does}\n\nExample: {' '.join(self._words)} {example}"

    def answers(
        self, example: str, does: str = "", params: Sequence[click.Parameter] = (), **settings: Any
    ) -> _Decorator:
        """A command that opens what it needs itself. ``does`` is its help in place of the function's docstring, and
        ``params`` are what it takes besides those of its decorators."""

        def decorate(function: Body) -> click.Command:
            @wraps(function)
            def run(*, as_json: bool, **given: Any) -> None:
                function(**given).show(as_json=as_json)

            said = self._help(does or cleandoc(function.__doc__ or ""), example)
            if not self.commands:
                self.help = self._help(self.help or "", example)
            as_json = "Print JSON for scripts instead of a table."
            made = self.command(example.split()[0], help=said, **settings)(run)
            made.params += [*params, click.Option(["--json", "as_json"], is_flag=True, help=as_json)]
            return made

        return decorate

    def on_farm(self, example: str, **settings: Any) -> _Decorator:
        """A command on a database that answers: its function gets the engine."""

        def decorate(function: Body) -> click.Command:
            @wraps(function)
            def run(**given: Any) -> Done:
                with farm() as engine:
                    given |= ask(engine, _rows_of_names, given)
                    return function(engine, **given)

            return self.answers(example, **settings)(run)

        return decorate

    def in_transaction(self, example: str, **settings: Any) -> _Decorator:
        """A command on a database that answers: its function gets a connection, in one transaction."""

        def decorate(function: Body) -> click.Command:
            @wraps(function)
            def run(engine: Engine, **given: Any) -> Done:
                with engine.begin() as connection:
                    return function(connection, **given)

            return self.on_farm(example, **settings)(run)

        return decorate


def _rows_of_names(connection: Connection, given: dict[str, Any]) -> dict[str, Any]:
    """The rows that parameters name, by parameter. A parameter that is not given is missing."""
    rows: dict[str, Any] = {}
    for parameter in click.get_current_context().command.params:
        if parameter.name and isinstance(parameter.type, NameOf) and (names := given[parameter.name]) not in (None, ()):
            found = choose(connection, parameter.type.kind, names if isinstance(names, tuple) else [names])
            rows[parameter.name] = found if isinstance(names, tuple) else found[0]
    return rows


TOP = Commands("", "-")
"""Declares commands that are in no group."""


def most_option(most: int) -> Callable[[Body], Body]:
    """The option --most, by which a list is bounded."""
    said = "List no more than this many."
    return click.option("--most", type=WholeNumber(1), default=most, show_default=True, help=said)


def new_name(what: str, name: str) -> str:
    """A name for something new. Raises InvalidInput for one that would break paths and commands; the database refuses
    one that is too long."""
    if not NAME.match(name):
        raise InvalidInput(f"{what} {name!r} may contain only {NAME_CHARACTERS}")
    return name


def core_count(value: str) -> int:
    """A number of cores, which may have a fraction, as centicores."""
    try:
        return centicores_of(Number(0)(value))
    except InvalidInput as error:
        raise click.BadParameter(str(error)) from error


def core_cap(value: str) -> int:
    """A number of cores as a cap, in centicores; 0 and -1 are no cap.

    A cap below one core is refused: nothing could run under it.
    """
    if value in ("0", "-1"):
        return UNLIMITED
    centicores = core_count(value)
    if centicores < CENTICORES_PER_CORE:
        raise click.BadParameter(f"{value} is less than one core, so nothing could ever run; 0 or -1 is no cap")
    return centicores


def gpu_cap(value: str) -> int:
    """A number of GPUs as a cap: 0 and -1 are no cap."""
    return WholeNumber(UNLIMITED, INT_MAX)(value) or UNLIMITED


def frame_range(value: str) -> FrameRange:
    """A frame range."""
    try:
        return FrameRange.parse(value)
    except InvalidInput as error:
        raise click.BadParameter(str(error)) from error
