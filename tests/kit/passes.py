"""A pass runner on the test's own stores, with its round trips counted."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import redis
from sqlalchemy import Engine, create_engine, event

from opencue_sched.accounting.caps import make_ledger
from opencue_sched.accounting.epoch import Epoch
from opencue_sched.coordination.change_log import HostChanges
from opencue_sched.coordination.keys import BoardKeys
from opencue_sched.coordination.permits import LayerPermits
from opencue_sched.coordination.postings import ClaimRefused, ClusterPostings
from opencue_sched.dispatch.cluster_pass import PassRunner
from opencue_sched.dispatch.cooldown import LayerCooldowns
from opencue_sched.dispatch.dispatcher import Dispatcher
from opencue_sched.dispatch.gather import GpuWaits
from opencue_sched.dispatch.host_feed import HostFeed
from opencue_sched.dispatch.report import PassReport
from opencue_sched.dispatch.sweep import Sweeper
from opencue_sched.dispatch.verdicts import VerdictLog
from opencue_sched.domain.clusters import Cluster
from opencue_sched.rqd.channels import RqdChannels
from opencue_sched.settings import Settings
from opencue_sched.store.schema import check_schema
from tests.kit.gathering import live_use


class CountingConnection(redis.Connection):
    """Counts what is sent: one packet is one round trip, however many commands it carries."""

    sent = 0

    def send_packed_command(self, command, check_health=True):
        CountingConnection.sent += 1
        return super().send_packed_command(command, check_health)


@dataclass
class Counted:
    statements: int = 0
    packets: int = 0
    texts: list[str] = field(default_factory=list)


@dataclass
class Passes:
    engine: Engine
    client: redis.Redis
    settings: Settings
    runner: PassRunner
    sweeper: Sweeper
    clusters: list[Cluster] = field(default_factory=list)

    def drain(self, *, rounds: int = 50) -> list[PassReport]:
        """Pass over every cluster with work until a round books nothing and has nothing left to look at."""
        reports: list[PassReport] = []
        clusters = self.clusters = [cluster for cluster, _ in self.sweeper.sweep().send] or self.clusters
        for _ in range(rounds):
            latest = [self.runner.run([cluster], alive=lambda: True)[0] for cluster in clusters]
            reports += latest
            if not any(report.frames_booked or report.go_on for report in latest):
                return reports
        raise AssertionError(f"still booking after {rounds} rounds")

    @contextmanager
    def counted(self) -> Iterator[Counted]:
        count = Counted()

        def statement(_conn, _cursor, text, *_):
            count.statements += 1
            count.texts.append(text)

        event.listen(self.engine, "before_cursor_execute", statement)
        CountingConnection.sent = 0
        try:
            yield count
        finally:
            count.packets = CountingConnection.sent
            event.remove(self.engine, "before_cursor_execute", statement)


def dispatch(dispatcher: Dispatcher, posting: str, ticket: int | None = None) -> PassReport | ClaimRefused:
    """What a message for the posting leads to, of its own cluster."""
    answer = dispatcher.dispatch(posting, ticket)
    return answer if isinstance(answer, ClaimRefused) else answer[0]


@contextmanager
def passes(engine: Engine, settings: Settings, instance: str = "one", *, claim_ttl: float = 3) -> Iterator[Passes]:
    """Collaborators of one process, in dry run, on an open (empty) store."""
    pool = redis.ConnectionPool.from_url(
        settings.redis_dsn, decode_responses=True, connection_class=CountingConnection, socket_timeout=10
    )
    client = redis.Redis(connection_pool=pool)
    client.set("acct:epoch", Epoch.new(client.info("server")["run_id"]).text, nx=True)
    channels = RqdChannels(settings.rqd)
    ledger = make_ledger(engine, client, owner=instance)
    # The farms of these tests are built and changed by SQL, past the ledger: it says what it would if it had been told.
    beside = create_engine(engine.url, pool_size=1)
    ledger.cores_in_use = lambda _: live_use(beside)  # type: ignore[method-assign]
    changes = HostChanges(client, "cue")
    with engine.connect() as connection:
        facts = check_schema(connection)
    sweeper = Sweeper(engine, settings, ClusterPostings(client, BoardKeys("cue", "clusters")))
    runner = PassRunner(
        engine,
        settings,
        ledger,
        HostFeed(
            engine,
            changes,
            settings.host_cache,
            instance=instance,
            hold_seconds=settings.accounting.commit_deadline + 2,
        ),
        LayerPermits(client, "cue", claim_ttl=claim_ttl),
        channels,
        lambda: facts,
        LayerCooldowns(5.0),
        verdicts=VerdictLog(client, "cue"),
        at_caps=sweeper.at_caps,
        gpu_waits=GpuWaits(engine, lambda: facts, ledger.cores_in_use),
    )
    try:
        yield Passes(engine, client, settings, runner, sweeper)
    finally:
        beside.dispose()
        channels.close()
        client.close()
        pool.disconnect()
