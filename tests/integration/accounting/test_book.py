"""Booking: what is refused, what is counted, and that nothing counts twice."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from opencue_sched.accounting import keys
from opencue_sched.accounting.consistency import check_consistency, drift
from opencue_sched.accounting.epoch import Epoch, guarded_redis
from opencue_sched.accounting.ledger import Change, Ledger, Phase, adjust_calls, id_calls
from opencue_sched.errors import NotReady
from opencue_sched.settings import Settings
from tests.integration.accounting.stepping import SteppedRedis
from tests.kit.counters import VERTICES, Store, booking
from tests.kit.forced import force

SUB = keys.subscription("show", "alloc")
TOMBSTONES = "acct:tomb:"


def test_a_booking_is_counted_at_all_five_vertices_and_moves_the_sequence(store: Store) -> None:
    before = store.seq()
    answers = store.ledger.book([booking(4, 1, proc_id="p")])
    assert answers.accepted == {"p"}
    assert [store.counter(key) for key in keys.counted(VERTICES)] == [(4, 1)] * 5
    assert store.seq() == before + 1
    assert store.ids() == {"p"}


def test_every_mutation_moves_the_sequence(store: Store) -> None:
    """The reference's contract: whoever compares and swaps goes by it."""
    store.open(dual=True)
    taken, epoch = booking(4, proc_id="p"), store.ledger.epoch()
    store.client.set(keys.AUDIT, "token|0")

    def somebody_takes_off(cores: int) -> None:
        store.client.hincrby(SUB, "int_cores", -cores)

    def dissolve(phase: Phase) -> None:
        store.ledger.call_under(id_calls("foreign", [SUB], epoch.text, phase, 0))

    mutations: dict[str, Callable[[], object]] = {
        "book": lambda: store.ledger.book([taken]),
        "confirm": lambda: store.ledger.settle([taken]),
        "move": lambda: store.ledger.apply(_moved(store, 5), epoch=epoch),
        "correct": lambda: store.ledger.call_under(adjust_calls(epoch.text, "token", [(SUB, 3, 1)])),
        "take off what was lost": lambda: dissolve("before"),
        "release": lambda: store.ledger.release(["p"]),
        "add what was lost": lambda: store.ledger.settle([booking(2, proc_id="q")]),
        "roll back": lambda: store.ledger.rollback([booking(2, proc_id="q")]),
        "force": lambda: force(store.ledger, [booking(2, proc_id="r")]),
        "remove": lambda: store.ledger.apply(_moved(store, None), epoch=epoch),
    }
    for name, mutation in mutations.items():
        before = store.seq()
        mutation()
        assert store.seq() == before + 1, name
    somebody_takes_off(7)
    dissolve("after")
    before = store.seq()
    dissolve("after")
    assert (store.counter(SUB)[0], store.seq()) == (0, before + 1), "given back"


def _moved(store: Store, cores: int | None) -> list[Change]:
    """What gives each entry so many cores, or takes it away."""
    return [
        Change(it.proc_id, it.changed_seq, None if cores is None else booking(cores).packed())
        for it in store.ledger.records()
    ]


def test_the_answer_carries_the_caps_it_was_booked_under(store: Store) -> None:
    store.seed(burst=10, folder=20, job=-1, job_gpus=3)
    caps = store.ledger.book([booking(4, 1)]).caps
    assert (caps[SUB].max_cores, caps[SUB].cores) == (10, 4)
    assert (caps[keys.folder("folder")].max_cores, caps[keys.folder("folder")].max_gpus) == (20, None)
    assert (caps[keys.job("job")].max_cores, caps[keys.job("job")].max_gpus) == (None, 3)
    assert caps[keys.job("job")].gpus == 1


@pytest.mark.parametrize(
    ("caps", "cores", "gpus", "table", "limit"),
    [
        ({"burst": 0}, 1, 0, "subscription", 0),
        ({"burst": 3}, 4, 0, "subscription", 3),
        ({"burst": 0.5}, 1, 0, "subscription", 0.5),
        ({"folder": 3}, 4, 0, "folder", 3),
        ({"job": 3}, 4, 0, "job", 3),
        ({"job": 0.5}, 1, 0, "job", 0.5),
        ({"folder_gpus": 1}, 1, 2, "folder_gpus", 1),
        ({"job_gpus": 1}, 1, 2, "job_gpus", 1),
    ],
)
def test_a_full_vertex_refuses_and_says_which(
    store: Store, caps: dict[str, float], cores: int, gpus: int, table: str, limit: float
) -> None:
    store.seed(**caps)
    answers = store.ledger.book([booking(cores, gpus, proc_id="p")])
    assert not answers.accepted
    refused = answers.refusals["p"]
    assert (refused.table, refused.current, refused.limit) == (table, 0, limit)
    assert store.ids() == set()
    assert store.counter(SUB) == (0, 0)


def test_bookings_of_one_call_see_each_other(store: Store) -> None:
    store.seed(burst=5)
    answers = store.ledger.book([booking(3, proc_id="a"), booking(3, proc_id="b"), booking(2, proc_id="c")])
    assert answers.accepted == {"a", "c"}
    assert (answers.refusals["b"].current, answers.refusals["b"].limit) == (3, 5)
    assert store.counter(SUB) == (5, 0)


@pytest.mark.parametrize("unlimited", [-1, 0])
def test_folder_and_job_caps_of_zero_and_below_are_unlimited(store: Store, unlimited: int) -> None:
    store.seed(folder=unlimited, job=unlimited, folder_gpus=unlimited, job_gpus=unlimited)
    assert len(store.ledger.book([booking(500, 8)]).accepted) == 1


def test_gpu_caps_do_not_stop_a_booking_without_gpus(store: Store) -> None:
    store.seed(job_gpus=1)
    force(store.ledger, [booking(1, 5)])
    assert len(store.ledger.book([booking(1, 0)]).accepted) == 1


def test_force_books_over_every_cap(store: Store) -> None:
    store.seed(burst=0, folder=1, job=1, job_gpus=1)
    force(store.ledger, [booking(8, 2, proc_id="p")])
    assert store.counter(SUB) == (8, 2)


def test_a_vertex_above_its_cap_takes_nothing_more(store: Store) -> None:
    store.ledger.book([booking(8)])
    store.seed(burst=4)
    refused = next(iter(store.ledger.book([booking(1)]).refusals.values()))
    assert (refused.table, refused.current, refused.limit) == ("subscription", 8, 4)


def test_a_local_proc_is_not_counted_in_any_subscription(store: Store) -> None:
    store.seed(burst=0)
    assert len(store.ledger.book([booking(2, alloc_id="")]).accepted) == 1
    assert store.counter(SUB) == (0, 0)
    assert store.counter(keys.job("job")) == (2, 0)


class TestLimits:
    @pytest.mark.parametrize("full", ["arnold", "nuke", "vray"])
    def test_every_limit_of_a_layer_is_checked_and_counted(self, store: Store, full: str) -> None:
        limits = ("nuke", "arnold", "vray")
        for limit in limits:
            store.limit(limit, 1 if limit == full else 5)
        both = [booking(1, proc_id=name, limit_ids=limits) for name in ("a", "b")]
        answers = store.ledger.book(both)
        assert answers.accepted == {"a"}
        refused = answers.refusals["b"]
        assert (refused.table, refused.current, refused.limit) == ("limit", 1, 1)
        assert [store.running(limit) for limit in limits] == [1, 1, 1]

    def test_frames_of_unmanaged_shows_lower_what_is_left(self, store: Store) -> None:
        store.limit("nuke", 3, foreign=2)
        answers = store.ledger.book([booking(1, proc_id=name, limit_ids=("nuke",)) for name in ("a", "b")])
        assert answers.accepted == {"a"}
        assert answers.refusals["b"].limit == 1
        assert answers.caps[keys.limit("nuke")].max_frames == 1

    def test_a_limit_counts_frames_not_cores(self, store: Store) -> None:
        store.limit("nuke", 2)
        assert len(store.ledger.book([booking(16, limit_ids=("nuke",))]).accepted) == 1
        assert store.running("nuke") == 1


class TestIdempotence:
    def test_booking_an_id_again_moves_nothing_and_says_so(self, store: Store) -> None:
        once = booking(4, proc_id="p")
        store.ledger.book([once])
        seq = store.seq()
        again = store.ledger.book([once])
        assert again.accepted == {"p"}
        assert store.counter(SUB) == (4, 0)
        assert store.seq() >= seq

    def test_a_repeated_booking_that_filled_the_cap_itself_is_still_accepted(self, store: Store) -> None:
        store.seed(burst=4)
        once = booking(4, proc_id="p")
        store.ledger.book([once])
        assert store.ledger.book([once]).accepted == {"p"}
        assert store.counter(SUB) == (4, 0)

    def test_a_released_id_is_refused(self, store: Store) -> None:
        once = booking(4, proc_id="p")
        store.ledger.book([once])
        assert store.ledger.release(["p"]) == 1
        assert store.ledger.book([once]).refusals["p"].table == "tombstoned"
        force(store.ledger, [once])
        assert store.counter(SUB) == (0, 0)

    def test_a_release_that_comes_before_its_booking_wins(self, store: Store) -> None:
        assert store.ledger.release(["p"]) == 0
        assert store.ledger.book([booking(4, proc_id="p")]).refusals["p"].table == "tombstoned"

    def test_releasing_twice_moves_once(self, store: Store) -> None:
        store.ledger.book([booking(4, proc_id="p"), booking(2, proc_id="q")])
        assert [store.ledger.release(["p", "p"]), store.ledger.release(["p"])] == [1, 0]
        assert store.counter(SUB) == (2, 0)

    def test_a_rollback_takes_out_exactly_its_entry(self, store: Store) -> None:
        first, second = booking(4, 1, proc_id="p"), booking(2, proc_id="q")
        store.ledger.book([first, second])
        store.ledger.rollback([first, first])
        assert store.counter(SUB) == (2, 0)
        assert store.ids() == {"q"}
        assert store.ledger.book([first]).refusals["p"].table == "tombstoned"

    def test_a_rollback_after_the_store_was_emptied_does_not_go_below_zero(self, store: Store) -> None:
        lost = booking(4, proc_id="p")
        store.ledger.book([lost])
        store.client.flushdb()
        store.open()
        store.seed()
        store.ledger.rollback([lost])
        assert store.counter(SUB) == (0, 0)

    def test_entries_keep_the_vertices_they_were_booked_under(self, store: Store) -> None:
        store.ledger.book([booking(4, proc_id="p")])
        store.ledger.rollback([booking(9, proc_id="p", folder_id="elsewhere")])
        assert store.counter(keys.folder("folder")) == (0, 0)
        assert store.counter(keys.folder("elsewhere")) == (0, 0)


class TestSettle:
    def test_settling_confirms_once(self, store: Store) -> None:
        once = booking(4, proc_id="p")
        store.ledger.book([once])
        store.ledger.settle([once])
        seq = store.seq()
        store.ledger.settle([once, once])
        assert store.seq() == seq
        assert next(store.ledger.records()).state == "C"

    def test_settling_an_entry_the_ledger_lost_counts_it_again(self, store: Store) -> None:
        store.seed(burst=0)
        store.ledger.settle([booking(4, proc_id="p"), booking(4, proc_id="p")])
        assert store.counter(SUB) == (4, 0)
        assert next(store.ledger.records()).state == "C"

    def test_settling_a_released_id_counts_nothing(self, store: Store) -> None:
        once = booking(4, proc_id="p")
        store.ledger.book([once])
        store.ledger.release(["p"])
        store.ledger.settle([once])
        assert store.ids() == set()
        assert store.counter(SUB) == (0, 0)


class TestReadiness:
    def test_an_unseeded_vertex_refuses_and_is_named(self, store: Store) -> None:
        answers = store.ledger.book([booking(1, proc_id="p", job_id="new")])
        assert (answers.refusals["p"].table, answers.refusals["p"].text) == ("unseeded", keys.job("new"))

    def test_unseeded_vertices_are_loaded_once_and_the_booking_tried_again(self, store: Store) -> None:
        asked: list[tuple[str, ...]] = []

        def load(vertices: object) -> None:
            asked.append(tuple(vertices))  # type: ignore[arg-type]
            store.caps(keys.job("new"), int_max_cores=2, int_max_gpus=-1)

        store.ledger.load_caps = load
        answers = store.ledger.book([booking(2, proc_id="p", job_id="new"), booking(1, proc_id="q", job_id="new")])
        assert answers.accepted == {"p"}
        assert answers.refusals["q"].table == "job"
        assert asked == [(SUB, keys.folder("folder"), keys.job("new"))]
        assert answers.caps[keys.job("new")].max_cores == 2

    def test_an_emptied_store_books_nothing(self, store: Store) -> None:
        store.ledger.book([booking(1)])
        store.client.flushdb()
        with pytest.raises(NotReady):
            store.ledger.book([booking(1)])
        assert store.ids() == set()

    def test_a_new_generation_is_learnt_without_an_error(self, store: Store) -> None:
        store.ledger.book([booking(1)])
        first = store.ledger.epoch()
        store.client.set(keys.EPOCH, Epoch.new(first.run_id).text)
        assert len(store.ledger.book([booking(1)]).accepted) == 1
        assert store.ledger.epoch() != first

    def test_every_script_refuses_a_foreign_epoch(self, store: Store) -> None:
        once = booking(1)
        store.ledger.book([once])
        store.client.set(keys.EPOCH, Epoch.new("x", state="filling").text)
        for attempt in (
            lambda: store.ledger.book([booking(1)]),
            lambda: store.ledger.settle([once]),
            lambda: store.ledger.rollback([once]),
            lambda: store.ledger.release([once.proc_id]),
            lambda: store.ledger.write_caps("test|1", [(SUB, ["burst", "1"])]),
            store.ledger.mark,
        ):
            with pytest.raises(NotReady):
                attempt()
        assert store.counter(SUB) == (1, 0)

    def test_an_epoch_of_another_redis_process_closes_the_store_on_connecting(
        self, store: Store, settings_url: str
    ) -> None:
        store.client.set(keys.EPOCH, Epoch.new("0" * 40).text)
        newcomer = guarded_redis(settings_url, Settings())
        try:
            newcomer.ping()
        finally:
            newcomer.close()
        with pytest.raises(NotReady):
            store.ledger.book([booking(1)])

    def test_a_redis_that_does_not_answer_is_not_ready(self) -> None:
        client = guarded_redis("redis://127.0.0.1:1/0", Settings())
        try:
            with pytest.raises(NotReady):
                Ledger(client, owner="test").book([booking(1)])
        finally:
            client.close()

    def test_flushed_scripts_are_loaded_again_and_nothing_runs_twice(self, store: Store) -> None:
        store.ledger.book([booking(1)])
        store.client.script_flush()
        answers = store.ledger.book([booking(1) for _ in range(3)])
        assert len(answers.accepted) == 3
        assert store.counter(SUB) == (4, 0)


class TestBulk:
    def test_more_ids_than_a_script_takes_are_split(self, store: Store) -> None:
        many = [booking(1) for _ in range(601)]
        store.ledger.book(many)
        store.ledger.settle(many)
        assert {record.state for record in store.ledger.records()} == {"C"}
        assert store.ledger.release([b.proc_id for b in many]) == 601
        assert store.counter(SUB) == (0, 0)

    def test_a_plan_takes_one_round_trip(self, store: Store) -> None:
        client = SteppedRedis(connection_pool=store.client.connection_pool)
        ledger = Ledger(client, owner="test")
        assert ledger.book([booking(1)]).accepted
        before = client.used
        assert len(ledger.book([booking(1) for _ in range(100)]).accepted) == 100
        assert client.used == before + 1

    def test_nothing_to_do_takes_none(self, store: Store) -> None:
        assert store.ledger.book([]).accepted == frozenset()
        store.ledger.settle([])
        assert store.ledger.release([]) == 0


def test_tombstones_are_kept_in_two_buckets_at_most(store: Store) -> None:
    store.client.sadd(TOMBSTONES + "1", "ancient")
    for _ in range(5):
        store.ledger.release([booking(1).proc_id for _ in range(10)])
    buckets = list(store.client.scan_iter(match=TOMBSTONES + "*"))
    assert len(buckets) - 1 in (2, 3)
    assert all(store.client.ttl(bucket) > 0 for bucket in buckets if bucket != TOMBSTONES + "1")


def test_an_entry_somebody_spoilt_does_not_hold_up_the_others(store: Store) -> None:
    good, bad = booking(4), booking(2)
    store.ledger.book([good, bad])
    store.client.hset(keys.LEDGER, bad.proc_id, "junk")
    assert store.ledger.book([bad]).accepted == {bad.proc_id}
    assert [record.proc_id for record in store.ledger.records()] == [good.proc_id]
    assert store.ledger.release([good.proc_id, bad.proc_id]) == 2
    assert store.ids() == set()
    assert drift(check_consistency(store.ledger))[SUB] == (2, 0), "left for the consistency check"


def test_a_spoilt_entry_can_be_rolled_back_and_settled(store: Store) -> None:
    one, two = booking(4), booking(2)
    store.ledger.book([one, two])
    for spoilt in (one, two):
        store.client.hset(keys.LEDGER, spoilt.proc_id, "junk")
    store.ledger.rollback([one])
    store.ledger.settle([two])
    assert store.ids() == {two.proc_id}


def test_a_correction_that_is_sent_again_is_made_once(store: Store) -> None:
    store.ledger.book([booking(4)])
    store.client.set(keys.AUDIT, "token|0")
    calls = adjust_calls(store.ledger.epoch().text, "token", [(SUB, 3, 1)])
    store.ledger.call_under(calls)
    store.ledger.call_under(calls)
    assert store.counter(SUB) == (7, 1)
