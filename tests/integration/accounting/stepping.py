"""Production code, one step at a time: each call of Redis and PostgreSQL is a boundary at which a test takes over.

An actor is a thread that only runs while the test lets it; so one thing happens at a time, in the order the test says.
Killing an actor is what SIGKILL does to a process: from its present boundary on it reaches no service any more, not
even to tidy up, and PostgreSQL rolls its open transaction back.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any, cast

import redis
from redis.client import Pipeline
from sqlalchemy import Connection, Engine, event

from opencue_sched.accounting import keys
from opencue_sched.accounting.caps import make_ledger
from opencue_sched.accounting.ledger import Ledger
from opencue_sched.clients.lua_scripts import load_script
from opencue_sched.settings import Accounting
from tests.kit.world import World

_here = threading.local()
_on_its_way: Actor | None = None
"""The actor that the test lets go on at this moment."""
_STUCK_SECONDS = 60.0


class Killed(BaseException):
    """The actor was killed. Not an Exception, so that nothing handles it."""


class Actor:
    """One process under test. ``boundary`` is what it does next, None when it is over.

    ``asleep_until`` is a moment of the test's clock before which it does not go on. Some things wait for their
    occasion: ``twice`` sends the next script calls twice, as after a lost answer; ``deaf`` loses the answer to the next
    COMMIT; ``committing`` is called when that is to be sent.
    """

    def __init__(self, name: str, work: Callable[[], object]) -> None:
        self.name = name
        self.boundary: str | None = "start"
        self.asleep_until = float("-inf")
        self.twice = False
        self.deaf = False
        self.committing: Callable[[Connection], None] | None = None
        self.killed = False
        self.result: object = None
        self._work = work
        self._error: BaseException | None = None
        self._go, self._back = threading.Lock(), threading.Lock()
        self._go.acquire()
        self._back.acquire()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    @property
    def alive(self) -> bool:
        return self.boundary is not None

    def step(self) -> bool:
        """Do what the boundary says and go on to the next; whether there is one. Raises what the actor raised."""
        global _on_its_way
        if self.alive:
            _on_its_way = self
            self._go.release()
            back = self._back.acquire(timeout=_STUCK_SECONDS)
            _on_its_way = None
            if not back:
                raise AssertionError(f"{self.name} is stuck at {self.boundary}: somebody else holds what it needs")
        if not self.alive:
            self._thread.join(_STUCK_SECONDS)
            if self._error is not None:
                error, self._error = self._error, None
                raise error
        return self.alive

    def kill(self) -> None:
        """End it where it is."""
        self.killed = True
        while self.alive:
            self.step()

    def pause(self, boundary: str) -> None:
        """Called in the actor's thread before it does something."""
        if not self.killed:
            self.boundary = boundary
            self._back.release()
            self._go.acquire()
        if self.killed:
            raise Killed

    def _run(self) -> None:
        _here.actor = self
        self._go.acquire()
        try:
            if not self.killed:
                self.result = self._work()
        except Killed:
            self.result = None
        except BaseException as error:
            self._error = error
        finally:
            self.boundary = None
            self._back.release()


def current() -> Actor | None:
    """The actor this thread is, None in the test's own thread. A thread that an actor has begun, and waits for, is that
    actor: it does something only while the test lets that one go on."""
    if threading.current_thread() is threading.main_thread():
        return None
    actor = getattr(_here, "actor", None)
    if actor is None:
        actor = _here.actor = _on_its_way
    return actor


def boundary(name: str) -> None:
    """Let the test take over, if this is an actor."""
    actor = current()
    if actor is not None:
        actor.pause(name)


class Clock:
    """Seconds of the test's own time; what the bootstrap and a recompute take for the machine's.

    It is later than on any machine: what a pass of the test does by the boot clock, such as the import of a show, is
    long ago.
    """

    def __init__(self) -> None:
        self.now = 1e9

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        """An actor goes on when the test has let that much time pass."""
        actor = current()
        if actor is not None:
            actor.asleep_until = self.now + seconds
            boundary("sleep")


class SteppedPipeline(Pipeline):
    """A pipeline that pauses before it is sent, and remembers the script calls it sent."""

    parent: SteppedRedis

    def execute(self, raise_on_error: bool = True) -> list[Any]:
        stack = list(self.command_stack)
        scripts = [args for args, _ in stack if args[0] == "EVALSHA"]
        boundary("redis " + ("EVALSHA" if scripts else "MULTI"))
        actor = current()
        self.parent.used += 1
        watched = [self.parent.watched[sha] for sha in {args[1] for args in scripts} & self.parent.watched.keys()]
        for before, _ in watched:
            before()
        self.parent.pause_for((args, None) for args in scripts)
        if actor is not None:
            self.parent.sent.extend(scripts)
            if actor.twice and scripts:
                actor.twice = False
                super().execute(raise_on_error=raise_on_error)
                self.command_stack = stack
        answers = super().execute(raise_on_error=raise_on_error)
        for _, after in watched:
            after(answers)
        self.parent.pause_for(zip((args for args, _ in stack), answers, strict=True))
        return answers


class SteppedRedis(redis.Redis):
    """A client that pauses before each command of an actor.

    ``sent``: script calls of actors, oldest first. ``used``: round trips so far; as long as it stands, the store does.
    ``watched``: scripts (by SHA), and what is called before and after a pipeline that calls them. ``moments`` names the
    boundaries of its own that a script call has, beside those of every command: before it, and by its answer after it.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.sent: list[tuple[Any, ...]] = []
        self.used = 0
        self.watched: dict[str, tuple[Callable[[], object], Callable[[list[Any]], object]]] = {}
        self.moments: Callable[[tuple[Any, ...], Any], Iterable[str]] = lambda _call, _answer: ()

    def execute_command(self, *args: Any, **options: Any) -> Any:
        boundary(f"redis {args[0]}")
        self.pause_for([(args, None)])
        self.used += 1
        answer = super().execute_command(*args, **options)
        self.pause_for([(args, answer)])
        return answer

    def pause_for(self, calls: Iterable[tuple[tuple[Any, ...], Any]]) -> None:
        """Pause once at each moment that calls come to; with their answers when they have them."""
        found = (self.moments(call, answer) for call, answer in calls if call[0] == "EVALSHA")
        for name in dict.fromkeys(moment for names in found for moment in names):
            boundary(name)

    def pipeline(self, transaction: bool = True, shard_hint: str | None = None) -> SteppedPipeline:
        pipe = SteppedPipeline(self.connection_pool, self.response_callbacks, transaction, shard_hint)
        pipe.parent = self
        return pipe


def step_statements(engine: Engine) -> None:
    """Make each statement and COMMIT of an actor a boundary. For the life of the engine."""

    @event.listens_for(engine, "before_cursor_execute")
    def before_statement(connection: Connection, cursor: object, statement: str, *rest: object) -> None:
        boundary("sql " + " ".join(statement.split())[:40])

    @event.listens_for(engine, "commit")
    def before_commit(connection: Connection) -> None:
        try:
            boundary("COMMIT")
            actor = current()
            if actor is not None and actor.committing is not None:
                actor.committing, send = None, actor.committing
                send(connection)
        except Killed:
            connection.invalidate()
            raise


@contextmanager
def around(
    ledger: Ledger,
    script: str,
    *,
    before: Callable[[], object] = lambda: None,
    after: Callable[[], object] = lambda: None,
) -> Iterator[None]:
    """Act before and after each pipeline in which a ledger of a SteppedRedis calls this script."""
    ledger.client.script_load(load_script(script).text)  # a server that does not know it is asked twice
    watched, sha = cast("SteppedRedis", ledger.client).watched, load_script(script).sha
    watched[sha] = (before, lambda _answers: after())
    yield
    del watched[sha]


Moment = Callable[[Actor], object]
"""Says at a boundary whether a moment has come."""


def about_to(command: str) -> Moment:
    """The moment at which the actor is about to send this command of Redis."""
    return lambda actor: actor.boundary == f"redis {command}"


def interrupted(work: Callable[[], object], moments: Iterable[Moment], act: Callable[[], object]) -> Any:
    """What the work returns when another acts once all the moments have come, one after the other."""
    actor = Actor("interrupted", work)
    for moment in moments:
        while not moment(actor):
            assert actor.step(), "the work is over before the moment came"
    act()
    while actor.step():
        pass
    return actor.result


def stepped(world: World) -> World:
    """The same world for an actor: each command of Redis and each statement is a boundary."""
    step_statements(world.engine)
    client = SteppedRedis(connection_pool=world.store.client.connection_pool)
    same = replace(world)
    same.ledger = make_ledger(world.engine, client, owner=world.ledger.owner, accounting=Accounting())
    same.ledger.learn_epoch()
    return same


def check_over(world: World) -> tuple[Moment, Moment]:
    """The moment at which counters and entries have been compared: the check has given its lease back."""
    exists = partial(world.store.client.exists, keys.AUDIT)
    return (lambda _: exists(), lambda _: not exists())
