"""Another program's plain decrements, played at random: a store that is *dual* under everything that can happen to it.

Whoever ends a proc publishes at once, later, or never; or releases it by id. A recompute finds its quiet moment or not.
At every step the ledger's own counters are the sums of their entries, and no counter is below what runs, but for the
decrements that came after their entry had been swapped away: the reference's own bound. In the end all is the truth.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import pytest
from hypothesis import HealthCheck, given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from sqlalchemy import text

from opencue_sched.accounting import cas as cas_module
from opencue_sched.accounting import keys
from opencue_sched.accounting import reconcile as reconcile_module
from opencue_sched.accounting.entries import Booking
from opencue_sched.accounting.inventory import expected, take_stock
from opencue_sched.accounting.snapshot import read_snapshot
from tests.integration.accounting.games import GENERATED
from tests.integration.accounting.stepped_store import grow_older
from tests.integration.accounting.test_cas import publish
from tests.integration.accounting.world import AGE, World

GRACE = 30.0
CORES = 2

Step = tuple[object, ...]

_START = text(
    """
    INSERT INTO proc (pk_proc, pk_host, pk_job, pk_show, pk_layer, pk_frame, int_cores_reserved, int_mem_reserved)
    SELECT CAST(:proc AS varchar), :host, frame.pk_job, job.pk_show, frame.pk_layer, frame.pk_frame, 200, 1
      FROM frame JOIN job USING (pk_job)
     WHERE job.pk_job = :job AND NOT EXISTS (SELECT 1 FROM proc WHERE proc.pk_frame = frame.pk_frame) LIMIT 1
    """
)

which = st.integers(0, 9)
small_steps = st.one_of(
    st.tuples(st.just("book"), st.sampled_from(["settled", "settled", "in flight"])),
    st.tuples(st.just("end"), which, st.sampled_from(["at once", "at once", "later", "lost", "by id"])),
    st.tuples(st.just("deliver")),
)
windows = st.one_of(st.just(((), (), ())), st.tuples(*[st.lists(small_steps, max_size=2)] * 3))
steps = st.lists(
    st.one_of(
        small_steps,
        small_steps,
        st.tuples(st.just("recompute"), windows),
        st.tuples(st.just("time passes")),
        st.tuples(st.just("stray")),
    ),
    min_size=6,
    max_size=12,
)


@dataclass
class Game:
    """``busy``: no recompute finds a quiet moment for its swap.

    ``late``: cores of decrements that came too late, or for nothing, since the last whole swap. Too late are those of
    ``settled`` procs: what their entries left on the counters was swapped away, or taken off after the grace.
    ``aged``: the grace of these is over.
    """

    world: World
    busy: bool
    made: int = 0
    pattern: Booking = field(init=False)
    live: dict[str, Booking] = field(default_factory=dict)
    queued: list[Booking] = field(default_factory=list)
    late: int = 0
    settled: set[str] = field(default_factory=set)
    aged: set[str] = field(default_factory=set)

    def begin(self) -> None:
        self.world.store.client.flushdb()
        self.world.store.open(dual=True)
        self.world.ledger.forget_epoch()
        self.world.sql("DELETE FROM proc")
        for _ in range(4):
            self.book("settled")
        self.world.recompute()

    def play(self, step: Step) -> None:
        name, *rest = step
        how: dict[str, Callable[..., None]] = {
            "book": self.book,
            "end": self.end,
            "deliver": self.deliver,
            "recompute": self.recompute,
            "time passes": self.time_passes,
            "stray": self.stray,
        }
        how[str(name)](*rest)

    def book(self, state: str) -> None:
        self.made += 1
        proc_id = f"p{self.made}"
        row = {"proc": proc_id, "host": self.world.host.id, "job": self.world.job.id}
        with self.world.engine.begin() as connection:
            connection.execute(_START, row)
        booked = self.pattern = self.live[proc_id] = self.world.entry(proc_id)
        self.world.ledger.book([booked])
        if state == "settled":
            self.world.ledger.settle([booked])

    def end(self, number: int, told: str) -> None:
        if not self.live:
            return
        proc_id = sorted(self.live)[number % len(self.live)]
        booked = self.live.pop(proc_id)
        self.world.delete(proc_id)
        if told == "at once":
            publish(self.world, booked)
        elif told == "later":
            self.queued.append(booked)
        elif told == "by id":
            self.world.ledger.release([proc_id])

    def deliver(self) -> None:
        """A decrement comes. Its entry may be there still, dropped, or swapped away."""
        if self.queued:
            booked = self.queued.pop(0)
            self.late += booked.cores if booked.proc_id in self.settled else 0
            publish(self.world, booked)

    def dropped(self) -> set[str]:
        """Procs whose decrement is under way, and whose entry is gone."""
        return {booked.proc_id for booked in self.queued} - self.world.store.ids()

    def stray(self) -> None:
        """One for a proc that nobody has ever known."""
        self.late += CORES
        publish(self.world, self.pattern)

    def time_passes(self) -> None:
        """What is in flight is older by an age, and what was dropped, was dropped longer than a grace ago."""
        self.aged |= self.dropped()
        grow_older(self.world.store.client, round(2 * AGE))
        self.world.now += 2 * AGE
        for key in self.world.store.client.scan_iter(match="acct:*:*"):
            if keys.parse(key) is not None and self.world.store.client.hexists(key, "dropped_at"):
                self.world.store.client.hincrby(key, "dropped_at", -round(2 * GRACE))

    def recompute(self, meanwhile: Sequence[Sequence[Step]] = ((), (), ())) -> None:
        self.settled |= self.aged
        with _windows([lambda part=part: self.all_of(part) for part in meanwhile]):
            report = self.world.recompute(cas_max_retries=0, publish_grace=GRACE)
        assert report.cas is not None
        if report.cas.swapped:
            self.late = 0
            self.settled |= self.dropped()

    def all_of(self, part: Sequence[Step]) -> None:
        for step in part:
            self.play(step)
        if self.busy:
            self.world.store.client.incr(keys.SEQ)

    def judge(self) -> None:
        stock = take_stock(self.world.ledger)
        sums = expected(stock)
        client = self.world.store.client
        for key, reading in stock.readings.items():
            if key.startswith(keys.LIMIT_PREFIX):
                continue
            owned, _ = (int(it or 0) for it in client.hmget(key, "ledger_cores", "ledger_gpus"))
            assert owned == sums[key][0], f"{key}: the ledger's own counter is not the sum of its entries"
            running = CORES * sum(key in keys.counted(it.vertices) for it in self.live.values())
            assert reading.counted[0] >= running - self.late, f"{key} is below what runs"

    def end_game(self) -> None:
        """No more decrements: what was queued is lost."""
        for _ in range(4):
            self.recompute()
            self.judge()
            self.time_passes()
        self.recompute()
        self.judge()
        stock = take_stock(self.world.ledger)
        entries = dict(read_snapshot(self.world.engine).entries)
        assert {i: record.entry for i, record in stock.records.items()} == entries
        assert self.world.job_cores() == CORES * len(self.live) == CORES * len(entries)


@contextmanager
def _windows(meanwhile: Sequence[Callable[[], object]]) -> Iterator[None]:
    """What happens after the snapshot, after the stock is taken, and before the swap: once each."""
    left = list(meanwhile)

    def then(function: Callable[..., object], number: int, *, before: bool = False) -> Callable[..., object]:
        def called(*args: object, **rest: object) -> object:
            action, left[number] = left[number], lambda: None
            if before:
                action()
                return function(*args, **rest)
            result = function(*args, **rest)
            action()
            return result

        return called

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(reconcile_module, "read_snapshot", then(reconcile_module.read_snapshot, 0))
        patch.setattr(reconcile_module, "take_stock", then(reconcile_module.take_stock, 1))
        patch.setattr(cas_module, "swap_counters", then(cas_module.swap_counters, 2, before=True))
        yield


@given(played=steps, busy=st.booleans())
@hypothesis_settings(
    max_examples=20,
    deadline=None,
    derandomize=True,
    phases=GENERATED,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
    print_blob=True,
)
def test_plain_decrements_never_take_a_counter_below_what_runs_and_all_is_the_truth_in_the_end(
    world: World, played: list[Step], busy: bool
) -> None:
    game = Game(world, busy)
    game.begin()
    for step in played:
        game.play(step)
        game.judge()
    game.end_game()
