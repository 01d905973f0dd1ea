"""Caps from PostgreSQL to Redis: units, versions, and vertices loaded on demand."""

from __future__ import annotations

import pytest
from sqlalchemy import text

from opencue_sched.accounting import keys
from opencue_sched.accounting.caps import load_caps, make_ledger, reseed_limits
from opencue_sched.accounting.imported_shows import note_imported
from opencue_sched.accounting.keys import Booking
from opencue_sched.clients.postgres import repeatable_read
from opencue_sched.domain.caps import Vertices
from opencue_sched.embedded.farms.farm import Farm
from opencue_sched.embedded.farms.farm_specs import LayerSpec
from opencue_sched.settings import Accounting
from opencue_sched.store import accounting as store
from tests.integration.accounting.stepping import Actor, current, stepped
from tests.kit.limits import list_twice
from tests.kit.statements import listening
from tests.kit.world import World


def fields(world: World, key: str) -> dict[str, str]:
    return dict(world.store.client.hgetall(key))  # type: ignore[arg-type]


def test_a_reseed_writes_the_fields_of_the_reference_in_whole_cores(world: World) -> None:
    world.sql("UPDATE subscription SET int_size = 5000, int_burst = 10050")
    world.sql("UPDATE folder_resource SET int_min_cores = 100, int_max_cores = -1, int_min_gpus = 2, int_max_gpus = 3")
    world.sql("UPDATE job_resource SET int_max_cores = 50, int_max_gpus = -1, int_priority = 77")
    world.sql("UPDATE point SET int_min_cores = 300")
    assert reseed_limits(world.engine, world.ledger, [world.show.id]) == (4, 0)
    counters = {"int_cores": "0", "int_gpus": "0"}
    with world.engine.begin() as connection:
        alloc = Farm(connection).default_alloc()
    read = {
        "sub": fields(world, keys.subscription(world.show.id, alloc.id)),
        "folder": fields(world, keys.folder(world.show.folder_id)),
        "job": fields(world, keys.job(world.job.id)),
        "point": fields(world, keys.point(world.show.dept_id, world.show.id)),
    }
    assert all(int(vertex.pop("caps_at").rpartition("|")[2]) > 0 for vertex in read.values())
    assert read["sub"] == {"size": "50", "burst": "100", **counters}
    assert read["folder"] == {
        "int_min_cores": "1",
        "int_max_cores": "-1",
        "int_min_gpus": "2",
        "int_max_gpus": "3",
        "show_id": world.show.id,
        **counters,
    }
    assert read["job"] == {"int_max_cores": "0.5", "int_max_gpus": "-1", "int_priority": "77", **counters}
    assert read["point"] == {"int_min_cores": "3", "int_max_cores": "-1", **counters}


def test_a_reseed_leaves_booked_counters_alone(world: World) -> None:
    world.run(2)
    world.recompute()
    reseed_limits(world.engine, world.ledger, [world.show.id])
    assert world.job_cores() == 4
    world.exact()


def test_a_read_that_began_late_is_not_taken_for_an_older_one(world: World) -> None:
    """Two read a cap while it changes: what was written first is not replaced by what was read before it."""
    key = keys.job(world.job.id)
    world.sql("UPDATE job_resource SET int_max_cores = 900")
    late = stepped(world).ledger
    loads = [Actor("late", lambda: load_caps(world.engine, late, [key])) for _ in range(2)]

    # when two more begin to read while the first does, and write later
    def read_by_others() -> None:
        for load in loads:
            while load.boundary != "redis EVALSHA":
                assert load.step()
        world.sql("UPDATE job_resource SET int_max_cores = 500")

    waiting = [read_by_others]

    def after_our_first_statement(*_: object) -> None:
        if waiting and current() is None:
            waiting.pop()()

    with listening(world.engine, "after_cursor_execute", after_our_first_statement):
        load_caps(world.engine, world.ledger, [key])
    written = fields(world, key)["int_max_cores"]
    while loads[0].step():
        pass
    assert fields(world, key)["int_max_cores"] == written

    load_caps(world.engine, world.ledger, [key])
    while loads[1].step():
        pass
    assert loads[1].result == (0, 1)
    assert fields(world, key)["int_max_cores"] == "5"


def test_an_older_read_never_replaces_newer_caps(world: World) -> None:
    key = keys.job("j")
    write = world.ledger.write_caps
    assert write("server|2000", [(key, ["int_max_cores", "5"])]) == (1, 0)
    assert write("server|999", [(key, ["int_max_cores", "9"])]) == (0, 1)
    assert fields(world, key)["int_max_cores"] == "5"
    assert write("server|2000", [(key, ["int_max_cores", "6"])]) == (1, 0)


def test_caps_of_a_server_that_took_over_are_taken_whatever_its_numbers_and_clock(world: World) -> None:
    key = keys.job(world.job.id)
    world.ledger.write_caps(f"the server before|{10**15}", [(key, ["int_max_cores", "1"])])
    assert load_caps(world.engine, world.ledger, [key]) == (1, 0)


def test_a_snapshot_with_a_commit_more_is_newer_whatever_number_its_transaction_has(world: World) -> None:
    def version() -> int:
        with repeatable_read(world.engine) as connection:
            return int(store.caps_version(connection).rpartition("|")[2])

    with world.engine.begin() as slow:
        slow.execute(text("UPDATE job_resource SET int_max_cores = 500"))
        seen = [version()]
        for statement in ("UPDATE folder_resource SET int_max_cores = 500", "SELECT 1"):
            world.sql(statement)
            seen.append(version())
    seen.append(version())
    assert seen[0] < seen[1] == seen[2] < seen[3]


@pytest.mark.parametrize("spoil", ["no number", "another type"])
def test_a_spoilt_vertex_keeps_no_other_from_its_caps(world: World, spoil: str) -> None:
    key, other = keys.folder(world.show.folder_id), keys.job(world.job.id)
    if spoil == "no number":
        world.store.client.hset(key, "int_cores", "abc")
    else:
        world.store.client.set(key, "abc")
    assert load_caps(world.engine, world.ledger, [key, other]) == (2, 0)
    assert int(fields(world, key)["int_cores"]) > 10**9, "nobody books there before it is put right"


def test_a_version_that_somebody_spoilt_is_none(world: World) -> None:
    key = keys.job("j")
    world.store.client.hset(key, "caps_at", "today")
    assert world.ledger.write_caps("server|1", [(key, ["int_max_cores", "9"])]) == (1, 0)


def test_a_job_that_was_never_seeded_is_loaded_when_it_is_booked(world: World) -> None:
    world.sql("UPDATE job_resource SET int_max_cores = 300")
    (proc,) = world.run()
    vertices = world.entry(proc).vertices
    answers = world.ledger.book([Booking("a", vertices, 2), Booking("b", vertices, 2)])
    assert answers.accepted == {"a"}
    assert (answers.refusals["b"].table, answers.refusals["b"].limit) == ("job", 3)


def test_a_missing_subscription_refuses_everything(world: World) -> None:
    vertices = world.entry(world.run()[0]).vertices
    elsewhere = Vertices(
        vertices.show_id, "no-alloc", vertices.folder_id, vertices.job_id, vertices.layer_id, vertices.dept_id
    )
    refused = world.ledger.book([Booking("a", elsewhere, 1)]).refusals["a"]
    assert (refused.table, refused.limit) == ("subscription", 0)


def test_a_vertex_postgresql_does_not_know_stays_unseeded(world: World) -> None:
    assert load_caps(world.engine, world.ledger, [keys.job("nobody"), keys.folder("nobody")]) == (0, 0)
    vertices = world.entry(world.run()[0]).vertices
    unknown = Vertices(vertices.show_id, vertices.alloc_id, vertices.folder_id, "nobody", "l", vertices.dept_id)
    assert world.ledger.book([Booking("a", unknown, 1)]).refusals["a"].table == "unseeded"


def test_a_deleted_subscription_gets_burst_zero_at_the_next_reseed(world: World) -> None:
    reseed_limits(world.engine, world.ledger, [world.show.id])
    world.sql("DELETE FROM subscription")
    reseed_limits(world.engine, world.ledger, [world.show.id])
    (key,) = [k for k in world.store.client.scan_iter(match="acct:sub:*") if world.show.id in k]
    assert (fields(world, key)["burst"], fields(world, key)["size"]) == ("0", "0")


def test_finished_jobs_are_not_reseeded(world: World) -> None:
    world.sql("UPDATE job SET str_state = 'FINISHED'")
    reseed_limits(world.engine, world.ledger, [world.show.id])
    assert fields(world, keys.job(world.job.id)) == {}


def test_a_limit_is_lowered_by_the_running_frames_of_unmanaged_shows(world: World) -> None:
    with world.engine.begin() as connection:
        farm = Farm(connection)
        limit = farm.limit("nuke", 5)
        other = farm.show(managed=False)
        farm.subscription(other, farm.default_alloc(), size=100)
        theirs = farm.job([LayerSpec(frames=3, limits=[limit])], show=other)
        ours_show = farm.default_show()
        ours = farm.job([LayerSpec(frames=3, limits=[limit])], show=ours_show)
        farm.run(theirs.frames[:2], world.host)
        farm.run(ours.frames[:1], world.host)
        note_imported(world.store.client, store.managed_show_versions(connection))
    reseed_limits(world.engine, world.ledger, [world.show.id])
    limits = fields(world, keys.limit(limit))
    assert (limits["int_max_value"], limits["int_foreign"], limits["int_running"]) == ("5", "2", "0")
    world.recompute()
    assert fields(world, keys.limit(limit))["int_running"] == "1"
    with world.engine.begin() as connection:
        Farm(connection).run(theirs.frames[2:], world.host)
    load_caps(world.engine, world.ledger, [keys.limit(limit)])
    assert fields(world, keys.limit(limit))["int_foreign"] == "3"
    world.exact()


def test_a_frame_of_an_unmanaged_show_takes_a_limit_once_that_its_layer_lists_twice(world: World) -> None:
    with world.engine.begin() as connection:
        farm = Farm(connection)
        limit, other = farm.limit("nuke", 5), farm.show(managed=False)
        farm.subscription(other, farm.default_alloc(), size=100)
        theirs = farm.job([LayerSpec(frames=3, limits=[limit])], show=other)
        list_twice(connection, theirs.layers[0].id)
        farm.run(theirs.frames[:2], world.host)
    load_caps(world.engine, world.ledger, [keys.limit(limit)])
    assert fields(world, keys.limit(limit))["int_foreign"] == "2"


def test_a_ledger_made_for_a_process_knows_how_to_load(world: World) -> None:
    assert make_ledger(world.engine, world.store.client, owner="x", accounting=Accounting()).load_caps is not None
