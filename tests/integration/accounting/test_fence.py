"""A periodic task's mutations carry the fence of its leader: after a take-over they are refused and change nothing."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import redis
from sqlalchemy import text

from opencue_sched.accounting import keys
from opencue_sched.accounting import ledger as scripts
from opencue_sched.accounting.caps import reseed_limits
from opencue_sched.accounting.keys import Booking
from opencue_sched.accounting.ledger import Change
from opencue_sched.accounting.recompute import recompute
from opencue_sched.clients.lua_scripts import Fence, ScriptCall
from opencue_sched.coordination.keys import LeaderKeys
from opencue_sched.errors import FencedOff
from tests.kit.counters import Store, booking
from tests.kit.polling import eventually
from tests.kit.redis_log import RedisLog
from tests.kit.world import AGE, World

LEADER = LeaderKeys("cue", "beat")
BOOKED = booking(3, proc_id="p")


def contents(client: redis.Redis) -> dict[str, str]:
    """Every counter and entry: a digest of what Redis would write down."""
    found = client.scan_iter(match=keys.EVERYTHING, count=1000)
    return {key: client.eval("return redis.sha1hex(redis.call('DUMP', KEYS[1]))", 1, key) for key in found}  # type: ignore[misc]


def elect(client: redis.Redis) -> Fence:
    """The fence of a new leader of the beats, which Redis knows as the lease is granted."""
    return Fence(LEADER.fence, client.incr(LEADER.fence))


CALLS: dict[str, Callable[[str], list[ScriptCall]]] = {
    "reconcile": lambda epoch: scripts.reconcile_calls(epoch, [Change("q", None, booking(2).packed())], "me"),
    "caps": lambda epoch: scripts.caps_calls(
        epoch, f"test|{10**18}", [(keys.folder("folder"), ("int_max_cores", "7"))]
    ),
    "adjust": lambda epoch: scripts.adjust_calls(
        epoch, "token", [(keys.job("job"), 5, 0), (keys.folder("folder"), 1, 1)]
    ),
    "free": lambda epoch: scripts.id_calls("free", [keys.job("idle"), keys.layer("idle")], epoch, "idle"),
    "machines": lambda epoch: scripts.machines_calls(epoch, [("nuke", "ghost", "")], heal=True),
    "inventory": lambda epoch: scripts.id_calls("inventory", [keys.job("job")], epoch),
    "reseed_cas": lambda epoch: scripts.reseed_cas_calls(epoch, 1, [(keys.job("job"), 9, 9)]),
    "foreign": lambda epoch: scripts.id_calls("foreign", [keys.job("job"), keys.folder("folder")], epoch, "after", 0),
    "release": lambda epoch: scripts.id_calls("release", ["p"], epoch),
    "book": lambda epoch: [scripts.book_call(epoch, "check", booking(1, proc_id="new"), "me")],
}


@pytest.fixture
def booked(store: Store) -> Store:
    """A store with an entry, a job's vertex nobody needs, and a machine of a limit without a frame."""
    store.ledger.book([BOOKED])
    store.client.zadd(keys.MACHINES_PREFIX + "nuke", {"ghost": 5})
    store.caps(keys.job("idle"), int_max_cores=1)
    store.client.set(keys.AUDIT, "token|0")
    return store


@pytest.mark.parametrize("name", sorted(CALLS))
def test_a_script_does_nothing_for_a_former_leader_and_as_ever_for_the_present_one(booked: Store, name: str) -> None:
    former, present = elect(booked.client), elect(booked.client)
    epoch = booked.ledger.epoch().text
    before = contents(booked.client)
    with pytest.raises(FencedOff, match=rf"\b{former.number}\b.*\b{present.number}\b"):
        booked.ledger.under(former).call_under(CALLS[name](epoch))
    assert contents(booked.client) == before
    (answer,) = booked.ledger.under(present).call_under(CALLS[name](epoch))
    assert answer[0] == 1
    assert name == "inventory" or contents(booked.client) != before


def test_every_script_of_the_ledger_heeds_the_fence() -> None:
    from tests.kit.script_calls import CALLS as ALL

    assert {name for name, (call, _) in ALL.items() if call.keys == keys.LEDGER_KEYS} == CALLS.keys()


def test_without_a_fence_nothing_changes_and_a_lost_one_refuses_nobody(booked: Store) -> None:
    former = elect(booked.client)
    elect(booked.client)
    assert booked.ledger.under(None) is booked.ledger
    assert booked.ledger.release(["p"]) == 1
    booked.client.delete(LEADER.fence)
    assert booked.ledger.under(former).book([booking()]).accepted


def test_the_fence_of_a_task_is_not_that_of_others_of_its_process(booked: Store) -> None:
    former = elect(booked.client)
    elect(booked.client)
    under = booked.ledger.under(former)
    with pytest.raises(FencedOff):
        under.release(["p"])
    assert booked.ledger.release(["p"]) == 1


@contextmanager
def procs_locked(world: World) -> Iterator[None]:
    """A recompute waits for its snapshot: after its mark, before it changes anything."""
    with world.engine.connect() as connection:
        connection.execute(text("LOCK TABLE proc IN ACCESS EXCLUSIVE MODE"))
        yield
        connection.rollback()


def somebody_waits_for_procs(world: World) -> bool:
    with world.engine.connect() as connection:
        query = text("SELECT count(*) FROM pg_locks WHERE NOT granted AND relation = 'proc'::regclass")
        return bool(connection.execute(query).scalar())


class Task(threading.Thread):
    """A periodic task of another process. ``end`` is what it raised, or its report."""

    def __init__(self, work: Callable[[], object]) -> None:
        super().__init__(daemon=True)
        self._work = work
        self.end: object = None
        self.start()

    def run(self) -> None:
        try:
            self.end = self._work()
        except FencedOff as error:
            self.end = error


def test_a_recompute_paused_past_a_take_over_changes_nothing_and_the_new_leaders_works(world: World) -> None:
    stale, moved = world.run(2)
    world.recompute()
    world.delete(stale)
    world.run(3)
    client = world.store.client

    def recompute_under(fence: Fence) -> object:
        return recompute(
            world.engine,
            world.ledger.under(fence),
            age_seconds=AGE,
            clock=world.boot_clock,
        )

    former = elect(client)
    with procs_locked(world):
        paused = Task(lambda: recompute_under(former))
        eventually(lambda: somebody_waits_for_procs(world), what="a recompute under way")
        present = elect(client)
        before = contents(client)
    paused.join(30)
    assert isinstance(paused.end, FencedOff)
    assert contents(client) == before
    assert moved in world.store.ids()
    report = recompute_under(present)
    assert report.causes == {"missed_release": 1, "missing": 3}  # type: ignore[attr-defined]
    world.exact()


def test_a_reseed_paused_past_a_take_over_writes_no_cap(world: World) -> None:
    world.run()
    world.recompute()
    client, shows = world.store.client, [world.show.id]
    former = elect(client)
    reseed_limits(world.engine, world.ledger, shows)
    with world.engine.connect() as connection:
        connection.execute(text("LOCK TABLE subscription IN ACCESS EXCLUSIVE MODE"))
        paused = Task(lambda: reseed_limits(world.engine, world.ledger.under(former), shows))
        query = text("SELECT count(*) FROM pg_locks WHERE NOT granted AND relation = 'subscription'::regclass")
        eventually(lambda: connection.execute(query).scalar(), what="a reseed under way")
        present = elect(client)
        connection.execute(text("UPDATE subscription SET int_burst = int_burst + 100"))
        connection.commit()
    paused.join(30)
    assert isinstance(paused.end, FencedOff)
    before = contents(client)
    assert reseed_limits(world.engine, world.ledger.under(present), shows)[0] > 0
    assert contents(client) != before


def test_the_hot_path_sends_nothing_more_than_before(booked: Store, settings_url: str) -> None:
    with RedisLog(settings_url) as log:
        booked.ledger.book([Booking("r", BOOKED.vertices, 1, 0)])
        (call,) = log.calls("book")
    _evalsha, _sha, number_of_keys, *_rest = call.text.split()
    assert int(number_of_keys) == len(keys.LEDGER_KEYS)
