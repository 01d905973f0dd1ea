"""The audit sees what is broken: each invariant violated by hand, and exactly that line fails."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import pytest
import redis
import structlog
from sqlalchemy import Engine, text

from opencue_sched.accounting import keys
from opencue_sched.accounting.keys import Booking
from opencue_sched.cli import cli
from opencue_sched.domain.caps import Vertices
from opencue_sched.domain.invariants import Invariant
from opencue_sched.embedded.farms.farm import Farm
from opencue_sched.embedded.farms.farm_specs import LayerSpec
from opencue_sched.insight.audit import Severity, run_audit
from opencue_sched.settings import Rqd, Settings, get_settings
from opencue_sched.store.audit import judge
from tests.kit.forced import force
from tests.kit.limits import has_types, report, set_type
from tests.kit.passes import Passes, passes
from tests.kit.wording import lacks


@dataclass
class World:
    """A farm at work: two of three frames of a layer with a licence and GPUs run, one waits."""

    passes: Passes
    vertices: Vertices
    procs: list[str]
    frame_waiting: str
    host: str

    def sql(self, statement: str, **parameters: object) -> None:
        with self.passes.engine.begin() as connection:
            connection.execute(text(statement), {"show": self.vertices.show_id, **parameters})

    @property
    def client(self) -> redis.Redis:
        return self.passes.client


@pytest.fixture
def world(engine: Engine, settings: Settings) -> Iterator[World]:
    dry = settings.model_copy(update={"rqd": Rqd(dry_run_mode=True)})
    with engine.begin() as connection:
        farm = Farm(connection)
        show, alloc, limit = farm.show("demo"), farm.alloc("general"), farm.limit("arnold", 2)
        farm.subscription(show, alloc, size=100)
        folder = farm.folder(show, "sequences", max_cores=50, max_gpus=50)
        host = farm.host(cores=16, gpus=4, gpu_memory_gb=16, alloc=alloc, hostname_tag=False)
        job = farm.job(
            [LayerSpec(frames=3, cores=2, gpus=1, limits=[limit])],
            show=show,
            folder_id=folder,
            max_cores=40,
            max_gpus=40,
        )
    with passes(engine, dry) as made:
        made.drain()
        with engine.connect() as connection:
            procs = list(connection.execute(text("SELECT pk_proc FROM proc ORDER BY pk_proc")).scalars())
            waiting = connection.execute(text("SELECT pk_frame FROM frame WHERE str_state = 'WAITING'")).scalar_one()
        assert len(procs) == 2
        vertices = Vertices(show.id, host.alloc_id, folder, job.id, job.layers[0].id, show.dept_id, (limit,))
        yield World(made, vertices, procs, waiting, host.name)


STRAY = "99999999-0000-0000-0000-000000000000"


def book_by_hand(world: World, *, settle: bool = True) -> None:
    """A ledger entry, with its counters, of a proc that does not exist."""
    vertices = Vertices(*("f" * 36,) * 6)
    booking = Booking(STRAY, vertices, 1, 0)
    force(world.passes.runner.ledger, [booking])
    if settle:
        world.passes.runner.ledger.settle([booking])


def sql(statement: str) -> Callable[[World], object]:
    return lambda world: world.sql(statement)


BROKEN: dict[str, tuple[str, Callable[[World], object], list[str]]] = {
    "a counter too high": (
        Invariant.COUNTERS_MATCH_LEDGER,
        lambda w: w.client.hincrby(keys.job(w.vertices.job_id), "int_cores", 1),
        ["{job}", "(5, 2)", "(4, 2)"],
    ),
    "a counter of GPUs too low": (
        Invariant.COUNTERS_MATCH_LEDGER,
        lambda w: w.client.hincrby(keys.folder(w.vertices.folder_id), "int_gpus", -1),
        ["{folder}", "(4, 1)", "(4, 2)"],
    ),
    "a licence counted twice": (
        Invariant.COUNTERS_MATCH_LEDGER,
        lambda w: w.client.hincrby(keys.limit(w.vertices.limit_ids[0]), "int_running", 1),
        ["(3,)", "(2,)"],
    ),
    "a counter without any entry": (
        Invariant.COUNTERS_MATCH_LEDGER,
        lambda w: w.client.hset(keys.layer("gone"), "int_cores", 7),
        ["gone"],
    ),
    "a counter that vanished": (
        Invariant.COUNTERS_MATCH_LEDGER,
        lambda w: w.client.delete(keys.layer(w.vertices.layer_id)),
        ["{layer}", "(0, 0)", "(4, 2)"],
    ),
    "more than the burst": (
        Invariant.WITHIN_CAPS,
        sql("UPDATE subscription SET int_burst = 300 WHERE pk_show = :show"),
        [": 4 > 3"],
    ),
    "more cores than a folder may": (
        Invariant.WITHIN_CAPS,
        sql("UPDATE folder_resource SET int_max_cores = 200"),
        ["folder", "cores"],
    ),
    "more GPUs than a folder may": (
        Invariant.WITHIN_CAPS,
        sql("UPDATE folder_resource SET int_max_gpus = 1"),
        ["folder", "gpus"],
    ),
    "more cores than a job may": (
        Invariant.WITHIN_CAPS,
        sql("UPDATE job_resource SET int_max_cores = 100"),
        ["job", "cores"],
    ),
    "more GPUs than a job may": (
        Invariant.WITHIN_CAPS,
        sql("UPDATE job_resource SET int_max_gpus = 1"),
        ["job", "gpus"],
    ),
    "more frames than licences": (
        Invariant.WITHIN_CAPS,
        sql("UPDATE limit_record SET int_max_value = 1"),
        [": 2 > 1", "arnold"],
    ),
    "an entry without a proc": (Invariant.LEDGER_MATCHES_PROCS, book_by_hand, [STRAY]),
    "a proc without an entry": (
        Invariant.LEDGER_MATCHES_PROCS,
        lambda w: w.passes.runner.ledger.release(w.procs[:1]),
        ["{proc}"],
    ),
    "a proc of another size than its entry": (
        Invariant.LEDGER_MATCHES_PROCS,
        lambda w: w.sql(
            "WITH grown AS (UPDATE proc SET int_cores_reserved = 300 WHERE pk_proc = :proc RETURNING pk_host) "
            "UPDATE host SET int_cores_idle = int_cores_idle - 100 WHERE pk_host IN (SELECT pk_host FROM grown)",
            proc=w.procs[0],
        ),
        ["{proc}", "(3, 1)"],
    ),
    "a frame that runs without a proc": (
        Invariant.RUNNING_FRAMES_HAVE_PROCS,
        lambda w: w.sql(
            "UPDATE frame SET str_state = 'RUNNING', str_host = 'h', ts_updated = now() - interval '2 minutes' "
            "WHERE pk_frame = :frame",
            frame=w.frame_waiting,
        ),
        ["{frame}", "RUNNING"],
    ),
    "a proc whose frame does not run": (
        Invariant.RUNNING_FRAMES_HAVE_PROCS,
        lambda w: w.sql(
            "WITH old AS (UPDATE proc SET ts_dispatched = now() - interval '2 minutes' WHERE pk_proc = :proc "
            "RETURNING pk_frame) UPDATE frame SET str_state = 'WAITING' WHERE pk_frame IN (SELECT pk_frame FROM old)",
            proc=w.procs[0],
        ),
        ["{proc}", "WAITING"],
    ),
    "a layer that counts wrong": (
        Invariant.LAYER_COUNTERS_MATCH_FRAMES,
        sql("UPDATE layer_stat SET int_waiting_count = int_waiting_count + 1"),
        ["{layer}", "2/2/0", "1/2/0"],
    ),
    "a host with too much idle": (
        Invariant.HOST_IDLE_MATCHES_PROCS,
        sql("UPDATE host SET int_cores_idle = int_cores_idle + 100"),
        ["{host}", "1300"],
    ),
    "a host with too few GPUs idle": (
        Invariant.HOST_IDLE_MATCHES_PROCS,
        sql("UPDATE host SET int_gpus_idle = 1"),
        ["{host}"],
    ),
    "a number that cannot be counted on from": (
        Invariant.COUNTERS_OPEN,
        lambda w: w.client.set(keys.SEQ, "somebody"),
        ["acct:seq", "'somebody'"],
    ),
    "a ledger of another type": (
        Invariant.COUNTERS_OPEN,
        lambda w: w.client.delete(keys.LEDGER) and w.client.rpush(keys.LEDGER, "x"),
        ["acct:ledger", "list", "hash"],
    ),
    "a number that was set back": (
        Invariant.COUNTERS_OPEN,
        lambda w: w.client.set(keys.SEQ, "1"),
        ["acct:seq", " 1,"],
    ),
    "counters that are not open": (
        Invariant.COUNTERS_OPEN,
        lambda w: w.client.delete("acct:epoch"),
        [],
    ),
}


def test_a_farm_at_work_passes_with_figures(world):
    report = run_audit(world.passes.engine, world.client, world.passes.settings)
    assert not report.failed, "\n".join(report.lines())
    assert [check.what for check in report.findings] == [
        "counters-match-ledger",
        "within-caps",
        "ledger-matches-procs",
        "running-frames-have-procs",
        "layer-counters-match-frames",
        "host-idle-matches-procs",
        "counters-open",
    ]
    assert {check.level for check in report.findings} == {Severity.OK}
    text_of = {check.what: check.text for check in report.findings}
    assert not lacks(text_of[Invariant.LEDGER_MATCHES_PROCS], "2 entries", "2 procs", " 0 ")


def test_counters_that_are_not_open_come_with_who_opens_them(world):
    world.client.delete("acct:epoch")
    report = run_audit(world.passes.engine, world.client, world.passes.settings)
    (failed,) = [check for check in report.findings if check.level is Severity.FAIL]
    assert "worker" in failed.remedy


@pytest.mark.parametrize("name", BROKEN)
def test_what_is_broken_by_hand_fails_exactly_its_line(world, name):
    invariant, break_it, said = BROKEN[name]
    break_it(world)
    report = run_audit(world.passes.engine, world.client, world.passes.settings)
    assert report.failed
    (failed,) = [check for check in report.findings if check.level is Severity.FAIL]
    assert failed.what == invariant
    told, v = "\n".join((failed.text, *failed.offenders)), world.vertices
    ids = {"proc": world.procs[0], "frame": world.frame_waiting, "job": v.job_id, "layer": v.layer_id}
    assert not lacks(told, *(word.format(folder=v.folder_id, host=world.host, **ids) for word in said))


def test_a_licence_that_a_layer_lists_twice_is_taken_once_by_each_frame(world):
    world.sql(
        "INSERT INTO layer_limit SELECT 'again', pk_layer, pk_limit_record FROM layer_limit ON CONFLICT DO NOTHING"
    )
    report = run_audit(world.passes.engine, world.client, world.passes.settings)
    assert not report.failed, "\n".join(report.lines())


def over_cap(world: World) -> tuple[str, ...]:
    """What the audit says of limits and caps that have more booked than they may."""
    with world.passes.engine.connect() as connection:
        return tuple(judge(connection, Invariant.WITHIN_CAPS).named or ())


def reported(world: World, limit_type: str) -> None:
    """A licence server has said a minute ago that nobody holds the limit of the two frames."""
    with world.passes.engine.begin() as connection:
        if not has_types(connection):
            pytest.skip("no reports before V49")
        set_type(connection, world.vertices.limit_ids[0], limit_type)
        report(connection, world.vertices.limit_ids[0], seconds_ago=60)


def test_of_a_reported_limit_what_the_farm_has_started_since_is_judged(world: World) -> None:
    reported(world, "FRAME")
    assert over_cap(world) == ()
    world.sql("UPDATE limit_record SET int_max_value = 1")
    (excess,) = over_cap(world)
    assert not lacks(excess, "arnold", ": 2 > 1")
    # Of older frames the licences may have been given back; and advice is no limit.
    world.sql("UPDATE limit_record SET str_enforcement = 'ADVISORY'")
    assert over_cap(world) == ()
    world.sql("UPDATE limit_record SET str_enforcement = 'ENFORCED'")
    world.sql("UPDATE proc SET ts_dispatched = now() - interval '2 minutes'")
    assert over_cap(world) == ()


def test_of_a_reported_limit_of_machines_one_may_go_on_that_held_it_by_an_older_frame(world: World) -> None:
    reported(world, "HOST")
    with world.passes.engine.begin() as connection:
        other = Farm(connection).host(name="other")
    world.sql("UPDATE proc SET pk_host = :other WHERE pk_proc = :proc", other=other.id, proc=world.procs[0])
    world.sql("UPDATE limit_record SET int_max_value = 1")
    assert over_cap(world) == ()
    world.sql("UPDATE limit_record SET int_max_value = 0")
    (excess,) = over_cap(world)
    assert not lacks(excess, "arnold", ": 2 > 1")


def test_a_booking_under_way_is_told_and_no_failure(world):
    book_by_hand(world, settle=False)
    report = run_audit(world.passes.engine, world.client, world.passes.settings)
    assert not report.failed
    (told,) = [check.text for check in report.findings if check.what == Invariant.LEDGER_MATCHES_PROCS]
    assert not lacks(told, "3 entries", "2 procs", " 1 ")


def test_a_local_proc_of_a_cuebots_may_wait_for_the_next_recompute_and_no_longer(world):
    # given a proc that a Cuebot booked for its own host's owner, which nobody told the ledger of
    local = world.procs[0]
    world.passes.runner.ledger.release([local])
    world.sql("UPDATE proc SET b_local = true, ts_booked = clock_timestamp() WHERE pk_proc = :proc", proc=local)

    # then it is told, and no failure, until a recompute has had its turn
    report = run_audit(world.passes.engine, world.client, world.passes.settings)
    assert not report.failed, "\n".join(report.lines())
    assert any("1 local" in check.text for check in report.findings)

    # and afterwards it is wrong
    interval = world.passes.settings.accounting.recompute_interval_seconds
    world.sql("UPDATE proc SET ts_booked = ts_booked - make_interval(secs => :secs)", secs=interval + 61)
    report = run_audit(world.passes.engine, world.client, world.passes.settings)
    (failed,) = [check for check in report.findings if check.level is Severity.FAIL]
    (offender,) = failed.offenders
    assert (failed.what, local in offender) == (Invariant.LEDGER_MATCHES_PROCS, True)


def test_the_command_ends_with_1_and_names_the_offender(world, monkeypatch, capsys):
    from opencue_sched.cli import main

    settings = world.passes.settings
    monkeypatch.setenv("OPENCUE_SCHED_DATABASE_URL", settings.sqlalchemy_url)
    monkeypatch.setenv("OPENCUE_SCHED_REDIS_URL", settings.redis_dsn)
    monkeypatch.setattr("sys.argv", ["opencue-sched", "audit", "--json"])
    get_settings.cache_clear()

    def run() -> tuple[int, dict[str, object]]:
        try:
            main()
            status = 0
        except SystemExit as ended:
            status = int(ended.code or 0)
        return status, json.loads(capsys.readouterr().out)

    try:
        status, answer = run()
        assert (status, answer["failed"]) == (0, False)
        world.sql("UPDATE host SET int_cores_idle = 0")
        status, answer = run()
        assert (status, answer["failed"]) == (1, True)
        (failed,) = [check for check in answer["findings"] if check["level"] == "FAIL"]
        assert failed["what"] == "host-idle-matches-procs"
        assert len(failed["offenders"]) == 1
    finally:
        get_settings.cache_clear()
        structlog.reset_defaults()
    assert "audit" in cli.list_commands(None)
