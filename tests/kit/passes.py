"""A pass runner on the test's own stores, with its round trips counted."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, ClassVar

import redis
from sqlalchemy import Engine, create_engine, event

from opencue_sched.accounting.caps import load_caps
from opencue_sched.accounting.epoch import Epoch
from opencue_sched.accounting.keys import VertexCaps
from opencue_sched.accounting.ledger import Ledger
from opencue_sched.accounting.seats import Settling
from opencue_sched.coordination.change_log import BacklogChanges, HostChanges
from opencue_sched.coordination.permits import FramePermits
from opencue_sched.coordination.postings import ClaimRefused, ClusterPostings
from opencue_sched.dispatch.backlog_feed import BacklogFeed
from opencue_sched.dispatch.cluster_pass import PassRunner
from opencue_sched.dispatch.dispatcher import Dispatcher
from opencue_sched.dispatch.host_feed import HostFeed
from opencue_sched.dispatch.report import PassReport
from opencue_sched.dispatch.sweep import Sweeper
from opencue_sched.dispatch.verdicts import VerdictLog
from opencue_sched.domain.clusters import Cluster
from opencue_sched.domain.shards import ALL_BUCKETS, Division
from opencue_sched.rqd.channels import RqdChannels
from opencue_sched.settings import Accounting, Settings
from opencue_sched.store.schema import check_schema
from tests.kit.gathering import largest_use, live_caps
from tests.kit.patient_postings import patient_postings


class ReadingAnew(BacklogFeed):
    """A backlog that reads all that a test changed before each pass, as if it had been named."""

    def follow(self) -> None:
        self.missed()
        self.resync()
        super().follow()


class LedgerOfBuiltFarm(Ledger):
    """A ledger for farms that are built and changed by SQL, past the ledger: of what caps are used it says what it
    would if it had been told."""

    def __init__(self, database: Engine, client: redis.Redis, **named: Any) -> None:
        super().__init__(client, **named)
        self.database = database

    def caps(self, vertices: Sequence[str]) -> dict[str, VertexCaps]:
        return largest_use(super().caps(vertices), live_caps(self.database, vertices))


class CountingConnection(redis.Connection):
    """Counts what is sent: one packet is one round trip, however many commands it carries. What a connection says of
    itself when it is made is left out: whether a launch needs one of its own is chance."""

    sent: ClassVar[list[object]] = []
    greets = False

    def on_connect_check_health(self, check_health=True):
        self.greets = True
        try:
            super().on_connect_check_health(check_health)
        finally:
            self.greets = False

    def send_packed_command(self, command, check_health=True):
        if not self.greets:
            CountingConnection.sent.append(command)
        return super().send_packed_command(command, check_health)


@dataclass
class Counted:
    """What a process sent meanwhile, from any of its threads."""

    texts: list[str] = field(default_factory=list)
    answers: list[int] = field(default_factory=list)
    """How many rows PostgreSQL returned or changed for each statement."""
    packets: int = 0

    @property
    def statements(self) -> int:
        return len(self.texts)

    @property
    def rows(self) -> int:
        return sum(self.answers)


@dataclass
class Passes:
    engine: Engine
    client: redis.Redis
    settings: Settings
    runner: PassRunner
    sweeper: Sweeper
    postings: ClusterPostings
    clusters: list[Cluster] = field(default_factory=list)

    def drain(self, *, rounds: int = 50) -> list[PassReport]:
        """Pass over every cluster with work until a round books nothing and has nothing left to look at."""
        reports: list[PassReport] = []
        clusters = self.clusters = [cluster for cluster, _ in self.sweeper.sweep().send] or self.clusters
        for _ in range(rounds):
            latest = [self.run([cluster])[0] for cluster in clusters]
            reports += latest
            if not any(report.frames_booked or report.go_on for report in latest):
                return reports
        raise AssertionError(f"still booking after {rounds} rounds")

    def run(self, clusters: Sequence[Cluster]) -> list[PassReport]:
        """One pass."""
        return self.runner.run(clusters, alive=lambda: True)

    @contextmanager
    def counted(self) -> Iterator[Counted]:
        count = Counted()

        def statement(_conn, _cursor, text, *_):
            count.texts.append(text)

        def answer(_conn, cursor, *_):
            count.answers.append(max(0, cursor.rowcount))

        event.listen(self.engine, "before_cursor_execute", statement)
        event.listen(self.engine, "after_cursor_execute", answer)
        CountingConnection.sent.clear()
        try:
            yield count
        finally:
            count.packets = len(CountingConnection.sent)
            event.remove(self.engine, "before_cursor_execute", statement)
            event.remove(self.engine, "after_cursor_execute", answer)


def dispatch(dispatcher: Dispatcher, posting: str, ticket: int | None = None) -> PassReport | ClaimRefused:
    """What a message for the posting leads to, of its own cluster."""
    answer = dispatcher.dispatch(posting, ticket)
    return answer if isinstance(answer, ClaimRefused) else answer[0]


@contextmanager
def passes(
    engine: Engine,
    settings: Settings,
    instance: str = "one",
    *,
    named: bool = False,
    past_ledger: bool = True,
    own: frozenset[int] = ALL_BUCKETS,
    division: Division = (),
    clock: Callable[[], float] = time.monotonic,
    sweep_clock: Callable[[], float] = time.monotonic,
) -> Iterator[Passes]:
    """Collaborators of one process, in dry run, on an open (empty) store. ``named``: only what the test notes is read
    again before a pass. ``past_ledger``: the test builds its farm by SQL and tells the ledger nothing. ``own``: the
    buckets of layers that its resync compares. ``division``: the instances among which the hosts are divided. ``clock``
    is that of the backlog, ``sweep_clock`` that of the sweeps."""
    pool = redis.ConnectionPool.from_url(
        settings.redis_dsn, decode_responses=True, connection_class=CountingConnection, socket_timeout=10
    )
    client = redis.Redis(connection_pool=pool)
    client.set("acct:epoch", Epoch.new(client.info("server")["run_id"]).text, nx=True)
    channels = RqdChannels(settings.rqd)
    beside, accounting = create_engine(engine.url, pool_size=1), Accounting()
    settling = Settling(accounting.limit_settle_window_seconds, accounting.commit_deadline)
    kind = partial(LedgerOfBuiltFarm, beside) if past_ledger else Ledger
    ledger = kind(client, owner=instance, settling=settling)
    ledger.load_caps = partial(load_caps, engine, ledger)
    changes = HostChanges(client, "cue")
    with engine.connect() as connection:
        facts = check_schema(connection)
    postings = patient_postings(client)
    sweeper = Sweeper(engine, settings, postings, clock=sweep_clock)
    backlog = (BacklogFeed if named else ReadingAnew)(
        engine, settings, lambda: facts, BacklogChanges(client, "cue"), own=lambda: own, clock=clock
    )
    runner = PassRunner(
        engine,
        settings,
        ledger,
        HostFeed(
            engine,
            changes,
            settings.host_cache,
            instance=instance,
            taken_seconds=settings.accounting.commit_deadline + 2,
            division=lambda: division,
        ),
        backlog,
        FramePermits(client, "cue"),
        channels,
        lambda: facts,
        verdicts=VerdictLog(client, "cue"),
        at_caps=sweeper.at_caps,
    )
    try:
        yield Passes(engine, client, settings, runner, sweeper, postings)
    finally:
        beside.dispose()
        channels.close()
        client.close()
        pool.disconnect()
