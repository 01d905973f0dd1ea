"""The four ways in which releases reach the ledger, through what a worker runs: each with procs deleted by others."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace

import pytest
from celery import Celery
from sqlalchemy import Engine, text
from structlog.testing import capture_logs

from opencue_sched.accounting import keys
from opencue_sched.accounting.entries import Booking
from opencue_sched.accounting.recompute import RecomputeReport
from opencue_sched.embedded.farm import Farm
from opencue_sched.embedded.farm_specs import LayerSpec
from opencue_sched.operate import metrics
from opencue_sched.operate.audit import Outcome, run_audit
from opencue_sched.operate.runtime import Runtime
from opencue_sched.settings import Accounting, Coordination, Settings
from tests.cuebot_publish import PUBLISH
from tests.polling import eventually

RECENT = 20.0

Start = Callable[..., Runtime]


@pytest.fixture
def start(settings: Settings) -> Iterator[Start]:
    """A worker's stores and listener with a release feed, its counters filled."""
    with ExitStack() as stack:

        def made(feed: str, instance: str = "one", *, fleet_start: bool = True) -> Runtime:
            changed = settings.model_copy(
                update={
                    "instance": instance,
                    "accounting": Accounting(release_feed=feed, commit_deadline=0.01, in_flight_age=0.1),
                    "coordination": Coordination(lease_ttl=15, renew_deadline=10, retry_interval=0.5),
                }
            )
            app = Celery("feeds", broker="memory://", set_as_current=False)
            stack.callback(app.close)
            runtime = Runtime(changed, app)
            stack.callback(runtime.close)
            runtime.bootstrap(fleet_start=fleet_start)
            runtime.events.start()
            assert runtime.events.listener.wait_connected(RECENT)
            return runtime

        yield made


@pytest.fixture
def procs(engine: Engine) -> list[str]:
    """Six procs of two cores that run."""
    with engine.begin() as connection:
        farm = Farm(connection)
        farm.default_show()
        host = farm.host(cores=64)
        return farm.run(farm.job([LayerSpec(frames=6)]).frames, host, cores=2)


def delete(engine: Engine, proc_id: str, *, channel: str | None = None, **payload: object) -> None:
    """Somebody deletes a proc, and says so in the same transaction."""
    with engine.begin() as connection:
        connection.execute(text("DELETE FROM proc WHERE pk_proc = :id"), {"id": proc_id})
        if channel is not None:
            connection.execute(text("SELECT pg_notify(:c, :p)"), {"c": channel, "p": json.dumps(payload)})


def without_our_triggers(engine: Engine) -> None:
    """As on a database where none may be added."""
    with engine.begin() as connection:
        connection.execute(text("DROP TRIGGER opencue_sched_proc_released ON proc"))
        connection.execute(text("DROP TRIGGER opencue_sched_caps_update ON subscription"))


def ids(runtime: Runtime) -> set[str]:
    return set(runtime.client.hkeys(keys.LEDGER))


def booking(runtime: Runtime, proc_id: str) -> Booking:
    return next(record.booking for record in runtime.ledger.records() if record.proc_id == proc_id)


def burst(runtime: Runtime) -> str:
    where = show_and_alloc(runtime.engine)
    return str(runtime.client.hget(keys.subscription(where["show"], where["alloc"]), "burst"))


def show_and_alloc(engine: Engine) -> dict[str, str]:
    """Where the procs run. (A schema made by Cuebot comes with a show of its own.)"""
    query = "SELECT DISTINCT proc.pk_show, host.pk_alloc FROM proc JOIN host USING (pk_host)"
    with engine.connect() as connection:
        show, alloc = connection.execute(text(query)).one()
    return {"show": show, "alloc": alloc}


def set_burst(engine: Engine, centicores: int) -> None:
    with engine.begin() as connection:
        connection.execute(text("UPDATE subscription SET int_burst = :burst"), {"burst": centicores})


def exact(runtime: Runtime) -> None:
    """Counters are the sums of their entries, and the entries are the procs. (Frames and hosts were not told.)"""
    checks = {check.invariant: check for check in run_audit(runtime.engine, runtime.client, runtime.settings).checks}
    assert [checks[name].outcome for name in ("I1", "I4")] == [Outcome.PASS] * 2


def _noted(worker: Runtime, heard: list[str]) -> Callable[[Sequence[str]], int]:
    """Its way to release, which notes who was told of what."""
    release = worker.ledger.release

    def noted(proc_ids: Sequence[str]) -> int:
        heard.extend(f"{worker.settings.instance} {proc_id}" for proc_id in proc_ids)
        return release(proc_ids)

    return noted


def test_proc_trigger_releases_by_id_and_hears_caps(
    engine: Engine, procs: list[str], start: Start, monkeypatch: pytest.MonkeyPatch
):
    first, second = start("proc-trigger"), start("proc-trigger", "two", fleet_start=False)
    heard: list[str] = []
    for worker in (first, second):
        monkeypatch.setattr(worker.ledger, "release", _noted(worker, heard))
    delete(engine, procs[0])
    eventually(lambda: sorted(heard) == [f"one {procs[0]}", f"two {procs[0]}"], RECENT, "what every worker hears")
    eventually(lambda: ids(first) == set(procs[1:]), RECENT, "the release")
    set_burst(engine, 400)
    eventually(lambda: burst(second) == "4", RECENT, "the cap")
    exact(first)


def test_cuebot_redis_takes_plain_decrements(engine: Engine, procs: list[str], start: Start):
    runtime = start("cuebot-redis")
    released = booking(runtime, procs[0])
    five = keys.counted(released.vertices)[:5]
    job = keys.job(released.vertices.job_id)
    # when a Cuebot publishes one release, and loses another
    delete(engine, procs[0])
    runtime.client.eval(PUBLISH, 6, *five, keys.SEQ, -released.cores, -released.gpus)
    delete(engine, procs[1])
    assert runtime.client.hget(job, "int_cores") == "10"
    assert ids(runtime) == set(procs), "no release by id: it would be taken off twice"
    # then a recompute brings both in line
    runtime.recompute()
    assert runtime.client.hget(job, "int_cores") == "8"
    assert ids(runtime) == set(procs[2:])
    exact(runtime)


@contextmanager
def recomputes(*runtimes: Runtime) -> Iterator[dict[str, list[RecomputeReport]]]:
    """The reports each worker makes meanwhile."""
    made: dict[str, list[RecomputeReport]] = {runtime.settings.instance: [] for runtime in runtimes}
    before = {runtime: runtime.events._recomputed for runtime in runtimes}
    for runtime in runtimes:
        runtime.events._recomputed = made[runtime.settings.instance].append
    yield made
    for runtime, recomputed in before.items():
        runtime.events._recomputed = recomputed


def test_cuebot_notify_has_one_consumer_that_reconciles_the_show(engine: Engine, procs: list[str], start: Start):
    without_our_triggers(engine)
    first, second = start("cuebot-notify"), start("cuebot-notify", "two", fleet_start=False)
    leader = eventually(lambda: next((r for r in (first, second) if r.events.hints.leads), None), RECENT, "a leader")
    other = second if leader is first else first
    where = show_and_alloc(engine)
    with recomputes(first, second) as made:
        delete(engine, procs[0], channel="acct_release", **where, cores=-2, gpus=0)
        eventually(lambda: ids(first) == set(procs[1:]), RECENT, "the release")
        eventually(lambda: made[leader.settings.instance], RECENT, "the end of its pass")
    assert made[other.settings.instance] == []
    with engine.begin() as connection:
        connection.execute(text("UPDATE subscription SET int_burst = 400"))
        told = json.dumps({"vertex": "sub", **where, "burst": 4})
        connection.execute(text("SELECT pg_notify('acct_limit_change', :told)"), {"told": told})
    eventually(lambda: burst(first) == "4", RECENT, "the cap")
    exact(first)

    # when the consumer leaves, the other takes over, and finds what was said to nobody
    leader.events.stop()
    delete(engine, procs[1], channel="acct_release", **where, cores=-2, gpus=0)
    eventually(lambda: ids(first) == set(procs[2:]), RECENT, "the release nobody heard")
    assert other.events.hints.leads


def test_cuebot_notify_makes_up_for_a_lost_connection(
    engine: Engine, procs: list[str], start: Start, monkeypatch: pytest.MonkeyPatch
):
    without_our_triggers(engine)
    runtime = start("cuebot-notify")
    # given a consumer that has ended its first look at everything
    hints, looks = runtime.events.hints, []
    look = hints._look_at_all
    monkeypatch.setattr(hints, "_look_at_all", lambda: (looks.append("begun"), look(), looks.append("ended")))
    hints.everything()
    eventually(lambda: looks[-1:] == ["ended"] and not hints._all, RECENT, "its first look")
    # when its connection is lost, and with it what was said a moment before
    with engine.begin() as connection:
        connection.execute(text("DELETE FROM proc WHERE pk_proc = :id"), {"id": procs[0]})
        connection.execute(text("UPDATE subscription SET int_burst = 300"))
    with engine.begin() as connection:
        ended = "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE application_name = :name"
        named = {"name": "opencue-sched-listener"}
        connection.execute(text(f"{ended} AND datname = current_database()"), named)
    eventually(lambda: ids(runtime) == set(procs[1:]), RECENT, "the release nobody heard")
    eventually(lambda: burst(runtime) == "3", RECENT, "the cap nobody heard")


@pytest.mark.parametrize("payload", [{"alloc": "a"}, {"vertex": "layer", "id": "x"}])
def test_a_hint_that_makes_no_sense_costs_nothing(engine: Engine, procs: list[str], start: Start, payload):
    without_our_triggers(engine)
    runtime = start("cuebot-notify")
    eventually(lambda: runtime.events.hints.leads, RECENT, "the consumer")
    for channel in ("acct_release", "acct_limit_change"):
        with engine.begin() as connection:
            connection.execute(text("SELECT pg_notify(:c, :p)"), {"c": channel, "p": json.dumps(payload)})
    delete(engine, procs[0], channel="acct_release", **show_and_alloc(engine))
    eventually(lambda: ids(runtime) == set(procs[1:]), RECENT, "the next release")


def test_recompute_only_waits_for_the_recompute_and_is_told_of(engine: Engine, procs: list[str], start: Start):
    runtime = start("recompute-only")
    delete(engine, procs[0])
    set_burst(engine, 400)
    eventually(lambda: burst(runtime) == "4", RECENT, "the cap, which our trigger announces all the same")
    assert ids(runtime) == set(procs)
    with capture_logs() as logs:
        runtime.recompute()
    assert ids(runtime) == set(procs[1:])
    exact(runtime)
    warns(logs)


def warns(logs: Sequence[Mapping[str, object]]) -> None:
    assert metrics.publish_misconfigured._value.get() == 1
    assert [line["log_level"] for line in logs if line["event"] == "release_feed"] == ["warning"]


@pytest.mark.parametrize(("feed", "triggers"), [("recompute-only", True), ("proc-trigger", False)])
def test_a_worker_whose_feed_cannot_deliver_warns_and_starts(
    engine: Engine, procs: list[str], start: Start, feed: str, triggers: bool
):
    if not triggers:
        without_our_triggers(engine)
    runtime = start(feed)
    metrics.publish_misconfigured.set(0)
    with capture_logs() as logs:
        runtime.prepare()
    warns(logs)
    assert runtime.ledger.book([replace(booking(runtime, procs[0]), proc_id="new")]).accepted == {"new"}
