"""Reconciliation: each way in which the ledger and the proc table can differ, and what must stay untouched."""

from __future__ import annotations

import uuid
from collections import Counter
from typing import Any

import pytest
from redis.connection import AbstractConnection
from sqlalchemy import event, text

from opencue_sched.accounting import keys
from opencue_sched.accounting import recompute as recompute_module
from opencue_sched.accounting.caps import reseed_limits
from opencue_sched.accounting.consistency import check_consistency, drift
from opencue_sched.accounting.epoch import look_at_store
from opencue_sched.accounting.keys import EntryState
from opencue_sched.accounting.ledger import PROCS_PER_CALL, Booking, Change
from opencue_sched.accounting.recompute import may_still_commit, recompute
from opencue_sched.embedded.farms.farm import Farm
from opencue_sched.embedded.farms.farm_specs import LayerSpec
from opencue_sched.insight.audit import compare_procs
from opencue_sched.settings import Accounting
from tests.integration.accounting.stepping import about_to, around, check_over, interrupted, stepped
from tests.kit.mutants import changed_code
from tests.kit.statements import listening, once_after_snapshot
from tests.kit.world import AGE, World


def test_a_proc_the_ledger_lacks_is_added(world: World) -> None:
    world.run(3)
    report = world.recompute()
    assert report.causes == {"missing": 3}
    assert world.job_cores() == 6
    world.exact()


def test_a_foreign_fraction_of_a_core_counts_as_one_core_per_proc(world: World) -> None:
    world.run(3, cores=0.5)
    world.recompute()
    assert world.job_cores() == 3


def test_a_second_pass_changes_nothing(world: World) -> None:
    world.run(3)
    world.recompute()
    seq = world.store.seq()
    assert world.recompute().healed == 0
    assert len(world.store.ids()) == 3
    assert world.store.seq() == seq


def test_a_confirmed_entry_whose_proc_is_gone_is_removed(world: World) -> None:
    (proc,) = world.run()
    world.recompute()
    world.delete(proc)
    assert world.recompute().causes == {"missed_release": 1}
    assert world.job_cores() == 0
    world.exact()


def test_a_removed_entry_leaves_no_tombstone_so_a_late_settle_can_restore_it(world: World) -> None:
    (proc,) = world.run()
    world.recompute()
    booked = world.entry(proc)
    world.delete(proc)
    world.recompute()
    world.ledger.settle([booked])
    assert world.job_cores() == 2


def test_a_booking_in_flight_is_left_alone_until_it_is_too_old_on_both_clocks(world: World) -> None:
    (proc,) = world.run()
    crashed = Booking("crashed", world.entry(proc).vertices, 4)
    world.ledger.book([crashed])
    assert world.recompute().causes == {"missing": 1}

    world.age("crashed", 3600)  # Redis TIME jumped ahead
    world.now += AGE - 1
    assert world.recompute().causes == {}
    assert world.job_cores() == 6

    world.now += 1
    assert world.recompute().causes == {"crashed_booking": 1}
    assert world.job_cores() == 2
    world.exact()


def test_an_age_on_the_boot_clock_alone_is_not_enough(world: World) -> None:
    (proc,) = world.run()
    world.ledger.book([Booking("young", world.entry(proc).vertices, 4)])
    world.recompute()
    world.now += 10 * AGE
    assert world.recompute().causes == {}


def test_a_booking_that_was_moved_is_judged_by_the_marks_since(world: World) -> None:
    booked = Booking("p", world.entry(world.run()[0]).vertices, 4)
    world.ledger.book([booked])
    world.recompute()
    world.age("p", 3600)
    moved = [Change(r.proc_id, r.changed_seq, r.entry, r.state) for r in world.ledger.records() if r.proc_id == "p"]
    world.ledger.apply(moved, epoch=world.ledger.epoch())
    world.now += AGE
    assert world.recompute().causes == {}
    world.now += AGE
    assert world.recompute().causes == {"crashed_booking": 1}


ASKED = "    stalled = may_still_commit(engine, age_seconds)\n"
SNAPSHOT = "    managed, entries = read_snapshot(engine, only)\n"
"""Two steps of our recompute, for its controls."""


@pytest.mark.parametrize("asks", [True, False], ids=["ours", "naive"])
def test_a_booking_is_left_alone_as_long_as_postgresql_has_not_ended_its_commit(world: World, asks: bool) -> None:
    """A COMMIT takes as long as it takes, however old the booking is: on a slow disk, without its standby.

    Naive is our recompute without its question: the control that shows what is lost then.
    """
    unasked = {ASKED: "    stalled = False\n"}
    with changed_code(recompute_module, {} if asks else unasked), world.stalled_commit() as (booked, finish):
        assert not may_still_commit(world.engine, AGE), "it does not hang yet: every farm commits all the time"
        world.ledger.book([booked])
        for _ in range(3):
            recompute_later(world, booked)
        assert world.store.ids() == ({booked.proc_id} if asks else set())
        finish()
        assert world.job_cores() == (booked.cores if asks else 0), "and it runs"
    assert world.recompute().causes == ({"late_settle": 1} if asks else {"missing": 1})
    world.exact()


def test_a_commit_sent_at_the_last_moment_is_asked_for_before_its_booking_is_too_old(world: World) -> None:
    asked: list[Any] = []
    age = Accounting(commit_deadline=10.0).in_flight_age
    with listening(world.engine, "before_cursor_execute", lambda *seen: asked.append(seen[3])):
        may_still_commit(world.engine, age)
    ((seconds,),) = (parameters.values() for parameters in asked)
    assert seconds <= age - 10.0, "for so long it hangs, at least, when an age has passed"


@pytest.mark.parametrize("before", [True, False], ids=["ours", "after the snapshot"])
def test_a_commit_that_ends_right_after_the_snapshot_has_been_asked_for(world: World, before: bool) -> None:
    """The snapshot lacks its proc, and whoever asks only then finds no COMMIT that hangs: the control is our recompute
    with that order."""
    asked_later = {ASKED + SNAPSHOT: SNAPSHOT + ASKED}
    with changed_code(recompute_module, {} if before else asked_later), world.stalled_commit() as (booked, finish):
        world.ledger.book([booked])
        recompute_later(world, booked)

        with once_after_snapshot(world.engine, finish):
            recompute_later(world, booked)
    assert world.job_cores() == (booked.cores if before else 0), "and it runs"


def recompute_later(world: World, booked: Booking) -> None:
    """With an age so short that a COMMIT of a moment ago hangs; then more than an age passes on both clocks."""
    recompute(world.engine, world.ledger, age_seconds=0.003, clock=world.boot_clock, write_tables=False)
    world.now += 100
    if booked.proc_id in world.store.ids():
        world.age(booked.proc_id, 100)


def test_a_committed_booking_whose_settle_was_lost_becomes_confirmed(world: World) -> None:
    (proc,) = world.run()
    world.ledger.book([world.entry(proc)])
    world.recompute()
    world.age(proc, 3600)
    world.now += AGE
    assert world.recompute().causes == {"late_settle": 1}
    assert next(world.ledger.records()).state is EntryState.CONFIRMED
    world.exact()


def test_entries_follow_jobs_and_hosts_that_move(world: World) -> None:
    world.run()
    world.recompute()
    with world.engine.begin() as connection:
        farm = Farm(connection)
        folder = farm.folder(world.show, "other")
        alloc = farm.alloc("other")
        farm.subscription(world.show, alloc)
    world.sql("UPDATE job SET pk_folder = :folder", folder=folder)
    world.sql("UPDATE host SET pk_alloc = :alloc", alloc=alloc.id)
    report = world.recompute()
    assert report.causes == {"moved": 1}
    assert world.store.counter(keys.folder(world.show.folder_id)) == (0, 0)
    assert world.store.counter(keys.folder(folder)) == (2, 0)
    assert world.store.counter(keys.subscription(world.show.id, alloc.id)) == (2, 0)
    world.exact()


def test_a_move_keeps_a_young_booking_in_flight(world: World) -> None:
    (proc,) = world.run()
    world.ledger.book([world.entry(proc)])
    world.age(proc, 5)
    booked_at = next(world.ledger.records()).booked_at
    world.sql("UPDATE proc SET int_cores_reserved = 300 WHERE pk_proc = :id", id=proc)
    assert world.recompute().causes == {"moved": 1}
    moved = next(world.ledger.records())
    assert (moved.state, moved.booked_at) == (EntryState.IN_FLIGHT, booked_at)
    assert world.job_cores() == 3


def test_local_procs_count_everywhere_but_in_the_subscription(world: World) -> None:
    (proc,) = world.run()
    world.sql("UPDATE proc SET b_local = true")
    world.recompute()
    assert world.entry(proc).vertices.alloc_id == ""
    assert world.job_cores() == 2
    assert world.store.client.keys(keys.subscription(world.show.id, "*")) == []


def test_entries_of_a_show_that_is_not_managed_any_more_are_retired(world: World) -> None:
    world.run(2)
    world.recompute()
    world.sql("UPDATE show SET b_scheduler_managed = false")
    assert world.recompute().causes == {"retired": 2}
    assert world.store.ids() == set()


def test_a_hint_reconciles_only_the_show_it_names(world: World) -> None:
    (proc,) = world.run()
    world.recompute()
    world.delete(proc)
    assert world.recompute("another-show").causes == {}
    assert world.recompute(world.show.id).causes == {"missed_release": 1}


class TestCommutes:
    """Things that happen between the readings of a pass."""

    def test_a_booking_committed_and_settled_after_the_snapshot_stays(self, world: World) -> None:
        def book() -> None:
            (proc,) = world.run()
            booked = world.entry(proc)
            world.ledger.book([booked])
            world.ledger.settle([booked])

        with once_after_snapshot(world.engine, book):
            assert world.recompute().causes == {}
        assert world.job_cores() == 2
        world.exact()

    def test_a_booking_made_after_the_mark_was_not_seen_at_it(self, world: World) -> None:
        booked = Booking("young", world.entry(world.run()[0]).vertices, 1)
        with once_after_snapshot(world.engine, lambda: world.ledger.book([booked])):
            world.recompute()
        world.age("young", 3600)
        world.now += AGE
        assert world.recompute().causes == {}

    def test_a_proc_released_after_the_snapshot_is_not_added_again(self, world: World) -> None:
        (proc,) = world.run()

        interrupted(stepped(world).recompute, check_over(world), lambda: world.ledger.release([proc]))
        assert world.store.ids() == set()
        assert world.job_cores() == 0

    def test_a_proc_deleted_after_the_snapshot_is_not_added_even_if_nobody_releases_it(self, world: World) -> None:
        (proc,) = world.run()
        report = interrupted(stepped(world).recompute, check_over(world), lambda: world.delete(proc))
        assert report.causes == {}
        world.exact()

    def test_an_entry_that_changed_since_it_was_read_is_passed_over(self, world: World) -> None:
        (proc,) = world.run()
        booked = world.entry(proc)
        world.ledger.book([booked])
        world.sql("UPDATE proc SET int_cores_reserved = 300 WHERE pk_proc = :id", id=proc)
        report = interrupted(stepped(world).recompute, check_over(world), lambda: world.ledger.settle([booked]))
        assert report.causes == {"moved": 1}, "found, but what was settled meanwhile stands"
        (settled,) = world.ledger.records()
        assert (settled.state, settled.entry) == (EntryState.CONFIRMED, booked.packed())
        assert world.recompute().causes == {"moved": 1}
        world.exact()

    def test_a_release_between_reading_and_applying_is_not_taken_off_twice(self, world: World) -> None:
        one, two = world.run(2)
        world.recompute()
        world.delete(one)
        interrupted(stepped(world).recompute, check_over(world), lambda: world.ledger.release([one]))
        assert world.store.ids() == {two}
        assert world.job_cores() == 2


class TestDrift:
    """Counters that somebody else wrote to."""

    def test_counters_are_put_back_to_the_sum_of_their_entries(self, world: World) -> None:
        world.run(2)
        world.recompute()
        client = world.store.client
        client.hincrby(keys.job(world.job.id), "int_cores", 5)
        client.hset(keys.folder(world.show.folder_id), "int_gpus", -3)
        client.delete(keys.layer(world.job.layers[0].id))
        assert world.recompute().drifted == {"job": 1, "folder": 1, "layer": 1}
        world.exact()

    @pytest.mark.parametrize("dual", [False, True])
    def test_a_counter_that_is_no_number_is_put_right_and_harms_no_other(self, world: World, dual: bool) -> None:
        (proc,) = world.run()
        world.store.open(dual=dual)
        world.ledger.learn_epoch()
        world.recompute()
        client, vertices = world.store.client, world.entry(proc).vertices
        client.hset(keys.folder(vertices.folder_id), "int_cores", "2,5")
        client.hset(keys.job(world.job.id), mapping={"int_cores": "9" * 30, "int_gpus": "0.5"})
        client.delete(keys.point(vertices.dept_id, vertices.show_id))
        client.set(keys.point(vertices.dept_id, vertices.show_id), "2")
        if not dual:
            check_consistency(world.ledger)
            assert set(world.ledger.book([Booking("more", vertices, 1)]).refusals) == {"more"}, "not before it is right"
        report = world.recompute()
        assert report.drifted == ({} if dual else {"folder": 1, "job": 1, "point": 1})
        world.exact()
        assert len(world.ledger.book([Booking("again", vertices, 1)]).accepted) == 1
        assert drift(check_consistency(world.ledger)) == {}

    @pytest.mark.parametrize("spoilt", ["", "garbage", b"\xff", "amount", "vertex"])
    def test_an_entry_that_somebody_spoilt_is_written_anew(self, world: World, spoilt: str | bytes) -> None:
        (proc, _) = world.run(2)
        world.recompute()
        client = world.store.client
        parts = str(client.hget(keys.LEDGER, proc)).split("|")
        if spoilt == "amount":
            parts[5] = "two"
        elif spoilt == "vertex":
            parts[8] = "elsewhere"
        client.hset(keys.LEDGER, proc, "|".join(parts) if spoilt in ("amount", "vertex") else spoilt)
        world.recompute()
        world.exact()

    def test_a_spoilt_entry_is_told_by_the_audit_and_retired_with_its_show(self, world: World) -> None:
        (proc, _) = world.run(2)
        world.recompute()
        parts = str(world.store.client.hget(keys.LEDGER, proc)).split("|")
        parts[5] = "two"
        world.store.client.hset(keys.LEDGER, proc, "|".join(parts))
        (told,) = compare_procs(world.engine, world.ledger, age_seconds=AGE).offenders
        assert proc in told
        world.sql("UPDATE show SET b_scheduler_managed = false")
        assert world.recompute().causes == {"retired": 2}
        world.exact()

    def test_what_somebody_who_died_taking_stock_has_logged_is_forgotten(self, world: World) -> None:
        (proc,) = world.run()
        world.recompute()
        ghost = Booking("ghost", world.entry(proc).vertices, 4).packed()
        world.store.client.rpush(keys.AUDIT_LOG, f"1|+|ghost|{ghost}", f"{world.store.seq() + 5}|-|{proc}|{ghost}")
        assert drift(check_consistency(world.ledger)) == {}

    def test_nothing_is_corrected_when_the_log_of_changes_was_cut_off(self, world: World) -> None:
        """The token is gone before all is read: what is booked from then on looks like somebody's writing."""
        (proc,) = world.run()
        world.recompute()
        more = Booking("more", world.entry(proc).vertices, 4)

        def cut_off() -> None:
            world.store.client.delete(keys.AUDIT, keys.AUDIT_LOG)
            world.ledger.book([more])

        # The keys are listed, then the counters are read.
        report = interrupted(stepped(world).recompute, [about_to("SCAN"), about_to("EVALSHA")], cut_off)
        assert (report.drifted, world.job_cores()) == ({}, 6)

    def test_a_stale_counter_without_any_entry_converges_to_zero(self, world: World) -> None:
        world.store.client.hset(keys.job(world.job.id), "int_cores", 7)
        assert world.recompute().drifted == {"job": 1}
        assert world.job_cores() == 0

    def test_drift_is_exact_while_bookings_go_on(self, world: World) -> None:
        (proc,) = world.run()
        vertices = world.entry(proc).vertices
        names = ("early", "undone", "late", "brief")
        early, undone, late, brief = (Booking(name, vertices, 2**bit) for bit, name in enumerate(names))
        world.ledger.book([early, undone])
        world.store.client.hincrby(keys.job(world.job.id), "int_cores", 5)

        def race() -> None:
            world.ledger.release(["early"])
            world.ledger.rollback([undone])
            world.ledger.book([late, brief])

        # when others are at work between the reading of entries and of counters, and after that
        ledger = stepped(world).ledger
        epoch = ledger.mark().epoch
        with around(ledger, "inventory", before=race, after=lambda: world.ledger.rollback([brief])):
            check = check_consistency(ledger, epoch)
        assert check.records.keys() == {"early", "undone"}
        assert drift(check) == {keys.job(world.job.id): (5, 0)}


UNREADABLE = [
    b"junk",
    b"",
    b"\xff",
    b"1|X|1|1|me|1|0|show|a|f|j|l|d|",
    b"1|F|1|1|me|1|0",
    b"1|F|1|+1|me|1|0|show|a|f|j|l|d|",
    b"1|F|1|9999999999999999999999|me|1|0|show|a|f|j|l|d|",
]


@pytest.mark.parametrize("record", UNREADABLE)
def test_an_entry_nobody_can_read_counts_for_nothing(world: World, record: bytes) -> None:
    world.run(1)
    world.recompute()
    world.store.client.hset(keys.LEDGER, "ghost", record)  # type: ignore[arg-type]
    assert (world.recompute().causes, world.recompute().drifted) == ({}, {})
    world.store.client.hdel(keys.LEDGER, "ghost")
    world.exact()


@pytest.mark.parametrize("record", UNREADABLE)
def test_an_entry_nobody_can_read_is_written_anew_if_its_proc_runs(world: World, record: bytes) -> None:
    (proc,) = world.run(1)
    world.recompute()
    world.store.client.hset(keys.LEDGER, proc, record)
    assert world.recompute().causes == {"missing": 1}
    assert world.recompute().causes == {}
    world.exact()


def test_a_layer_that_is_listed_twice_under_a_limit_takes_it_once(world: World) -> None:
    with world.engine.begin() as connection:
        limit = Farm(connection).limit("nuke", 5)
        for _ in range(2):
            row = {"id": str(uuid.uuid4()), "layer": world.job.layers[0].id, "limit": limit}
            connection.execute(text("INSERT INTO layer_limit VALUES (:id, :layer, :limit) ON CONFLICT DO NOTHING"), row)
    (proc,) = world.run()
    world.recompute()
    assert world.entry(proc).vertices.limit_ids == (limit,)
    assert world.store.running(limit) == 1


def test_keys_of_finished_and_deleted_jobs_are_freed_once_they_count_nothing(world: World) -> None:
    (proc,) = world.run()
    world.recompute()
    world.store.caps(keys.job("deleted"), int_max_cores=-1, int_max_gpus=-1)
    world.sql("UPDATE job SET str_state = 'FINISHED'")
    reseed_limits(world.engine, world.ledger)
    assert not world.store.client.exists(keys.job("deleted"))
    assert world.job_cores() == 2  # the finished job still has a proc
    world.delete(proc)
    world.recompute()
    reseed_limits(world.engine, world.ledger)
    assert not world.store.client.exists(keys.job(world.job.id), keys.layer(world.job.layers[0].id))


def test_a_quiet_recompute_reads_each_thing_once(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    world.run(2)
    world.recompute()
    statements: list[str] = []
    event.listen(world.engine, "before_cursor_execute", lambda _c, _cursor, sql, *_: statements.append(sql))
    sent: list[str] = []
    one, many = AbstractConnection.send_command, AbstractConnection.pack_commands

    def send_command(connection: Any, *command: Any, **how: Any) -> None:
        sent.append(" ".join(map(str, command)))
        one(connection, *command, **how)

    def pack_commands(connection: Any, commands: Any) -> Any:
        sent.extend(" ".join(map(str, command)) for command in commands)
        return many(connection, commands)

    monkeypatch.setattr(AbstractConnection, "send_command", send_command)
    monkeypatch.setattr(AbstractConnection, "pack_commands", pack_commands)
    world.recompute()
    assert len(statements) == len(set(statements))
    reads = [command.split() for command in sent if command.split()[0] in ("GET", "MGET", "HSCAN", "SCAN", "LRANGE")]
    read = Counter(key for _, *named in reads for key in named if key.startswith("acct:"))
    assert set(read.values()) == {1}


def test_only_a_whole_pass_is_remembered_as_the_last(world: World) -> None:
    world.run()
    client = world.store.client
    world.recompute(world.show.id)
    assert look_at_store(client)[1] is None
    world.recompute()
    assert look_at_store(client)[1] < 100
    client.decrby(keys.RECOMPUTED_AT, 100)
    assert 100 <= look_at_store(client)[1] < 200


def test_the_report_tells_how_many_bookings_are_in_flight_and_since_when(world: World) -> None:
    (proc,) = world.run()
    vertices = world.entry(proc).vertices
    world.ledger.book([Booking("a", vertices, 1), Booking("b", vertices, 1)])
    world.age("a", 30)
    report = world.recompute()
    assert report.in_flight == 2
    assert 30 <= report.oldest_in_flight_seconds < 40


def test_changes_are_applied_in_pieces_a_script_may_take(world: World) -> None:
    entry = world.entry(world.run()[0]).packed()
    changes = [Change(f"p{i}", None, entry) for i in range(2601)]
    passed_over, seqs = world.ledger.apply(changes, epoch=world.ledger.epoch())
    assert passed_over == []
    assert len(seqs) >= 2601 / PROCS_PER_CALL, "one sequence number a call"
    assert world.job_cores() == 2601 * 2


def test_an_entry_somebody_spoilt_is_written_anew_from_its_proc(world: World) -> None:
    (proc,) = world.run()
    world.recompute()
    world.store.client.hset(keys.LEDGER, proc, "junk")
    assert world.recompute().causes == {"missing": 1}
    world.recompute()
    assert world.job_cores() == 2
    world.exact()


def test_an_id_that_no_key_can_hold_keeps_nothing_else_from_being_counted(world: World) -> None:
    """Somebody's database has a folder like that: its cap counts for nobody, all else does."""
    good, bad = world.run(2)
    with world.engine.begin() as connection:
        job = Farm(connection).job([LayerSpec(frames=1)], name="odd-job")
    world.sql("UPDATE proc SET pk_job = :job WHERE pk_proc = :bad", job=job.id, bad=bad)
    insert = "INSERT INTO folder (pk_folder, pk_show, str_name, pk_dept) VALUES ('odd|id', :show, 'odd', :dept)"
    world.sql(insert, show=world.show.id, dept=world.show.dept_id)
    world.sql("UPDATE job SET pk_folder = 'odd|id' WHERE pk_job = :job", job=job.id)
    assert world.recompute().causes == {"missing": 2}
    assert world.store.ids() == {good, bad}
    assert world.job_cores() == 2
    assert world.store.counter(keys.job(job.id)) == (2, 0)
    world.exact()
