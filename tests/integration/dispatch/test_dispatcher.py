"""What becomes of a cluster's posting when a pass ends: how long it rests, who is told, and what is refused."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import ExitStack, closing, contextmanager, nullcontext
from dataclasses import replace
from threading import Thread
from typing import Any, cast

import pytest
from pydantic import SecretStr
from redis.exceptions import ConnectionError as RedisConnectionError
from sqlalchemy import Engine, make_url, text
from sqlalchemy.exc import OperationalError, ProgrammingError

from opencue_sched.clients.postgres import make_engine
from opencue_sched.coordination.postings import ClaimRefused, ClaimRenewer, Enqueued
from opencue_sched.dispatch.cooldown import Cooldowns
from opencue_sched.dispatch.dispatcher import Dispatcher
from opencue_sched.dispatch.report import PassEnd, PassReport
from opencue_sched.dispatch.sweep import Sweeper, pause_between_wakes
from opencue_sched.domain.clusters import Cluster
from opencue_sched.embedded.farms.farm import Farm
from opencue_sched.embedded.farms.farm_specs import LayerSpec
from opencue_sched.errors import NotReady
from opencue_sched.settings import Rqd, Settings
from opencue_sched.worker.events import Waker
from tests.kit.frozen_clock import Clock
from tests.kit.gathering import with_start_times
from tests.kit.lossy_proxy import LossyProxy
from tests.kit.passes import Passes, dispatch, passes
from tests.kit.polling import eventually
from tests.kit.statements import failing_statements, listening
from tests.kit.wording import lacks

SENT: list[Enqueued] = []
RESTS: list[float] = []


@pytest.fixture
def here(engine: Engine, settings: Settings) -> Iterator[Passes]:
    SENT.clear()
    RESTS.clear()
    patient = settings.accounting.model_copy(update={"commit_deadline": 100.0})
    changed = settings.model_copy(update={"rqd": Rqd(dry_run_mode=True), "accounting": patient})
    with passes(engine, changed) as runner:
        yield runner


@pytest.fixture
def dispatcher(here: Passes) -> Iterator[Dispatcher]:
    renewer = ClaimRenewer(here.postings, ttl_seconds=3)
    yield Dispatcher(
        here.settings,
        here.postings,
        renewer,
        here.runner,
        "one",
        SENT.append,
        RESTS.append,
    )
    renewer.stop()


def a_posting(here: Passes) -> str:
    ((_, enqueued),) = here.sweeper.sweep().send
    return enqueued.uuid


def rests(here: Passes, posting: str) -> float:
    """Seconds from the end of its last claim until the posting may be claimed again."""
    due = here.client.zscore("cue:board:clusters:delayed", posting)
    ended = here.client.hget(f"cue:board:clusters:job:{posting}", "modified")
    return 0.0 if due is None else (due - float(str(ended))) / 1000


def sent_for_at_its_end(here: Passes, posting: str) -> bool:
    """Whether any worker sends a message for the posting when its rest is over."""
    due, awaited = (here.client.zscore(f"cue:board:clusters:{part}", posting) for part in ("delayed", "awaited"))
    assert due is not None
    return due == awaited


def plant(engine: Engine, **layer: Any) -> None:
    with engine.begin() as connection:
        farm = Farm(connection)
        farm.host(cores=2, hostname_tag=False)
        farm.job([LayerSpec(**layer)])


def test_a_cluster_whose_plan_was_full_goes_on_at_once_with_a_message_of_its_own(
    here: Passes, dispatcher: Dispatcher, engine: Engine
) -> None:
    with engine.begin() as connection:
        farm = Farm(connection)
        farm.host(cores=300, memory_gb=2_000, hostname_tag=False)
        farm.job([LayerSpec(frames=300)])
    posting = a_posting(here)
    report = dispatch(dispatcher, posting)
    assert isinstance(report, PassReport)
    assert (report.ended, report.frames_booked) == (PassEnd.BOOKED, 250)
    assert [enqueued.uuid for enqueued in SENT] == [posting]
    assert rests(here, posting) <= 0
    # the message that began this pass has been answered: a copy of it does nothing
    assert isinstance(dispatch(dispatcher, posting, SENT[0].ticket - 1), ClaimRefused)


def test_a_cluster_that_placed_all_it_could_rests_until_it_is_woken(
    here: Passes, dispatcher: Dispatcher, engine: Engine
) -> None:
    plant(engine, frames=3)
    posting = a_posting(here)
    report = dispatch(dispatcher, posting)
    assert isinstance(report, PassReport)
    assert (report.ended, report.frames_booked) == (PassEnd.BOOKED, 2)
    assert rests(here, posting) == pytest.approx(5, abs=1)
    assert SENT == []


@pytest.mark.parametrize("others", [[], [LayerSpec(memory_gb=500)]], ids=["nothing else", "work without a host"])
def test_a_cluster_sleeps_no_longer_than_until_its_next_layer_may_start(
    here: Passes, engine: Engine, others: list[LayerSpec]
) -> None:
    # given a cluster that would sleep for a minute where nothing has a place, and for 30 s where nothing waits
    with_start_times(engine)
    queue = here.settings.queue.model_copy(update={"cluster_saturated_sleep": 60})
    postings = here.postings
    renewer = ClaimRenewer(postings, ttl_seconds=3)
    settings = here.settings.model_copy(update={"queue": queue})
    dispatcher = Dispatcher(settings, postings, renewer, here.runner, "one", SENT.append, RESTS.append)
    with engine.begin() as connection:
        farm = Farm(connection)
        farm.host(hostname_tag=False)
        farm.job([LayerSpec(name="late"), LayerSpec(name="later"), *others])
        start = text("UPDATE layer SET ts_start_after = now() + make_interval(secs => :secs) WHERE str_name = :name")
        connection.execute(start, [{"secs": 20, "name": "late"}, {"secs": 25, "name": "later"}])

    # when a pass finds the first of its layers to start in 20 s
    report = dispatch(dispatcher, posting := a_posting(here))
    assert isinstance(report, PassReport)
    assert report.frames_booked == 0

    # then it is dispatched when the 20 s are over, whoever lives then
    assert 5 < rests(here, posting) <= 20
    assert sent_for_at_its_end(here, posting)
    assert len(RESTS) == 1
    assert 5 < RESTS[0] <= 20

    # when the start is further away than the cluster would sleep
    with engine.begin() as connection:
        connection.execute(text("UPDATE layer SET ts_start_after = 'infinity' WHERE str_name = 'later'"))
        connection.execute(text("UPDATE layer SET ts_start_after = now() + interval '1 h' WHERE str_name = 'late'"))
        shows = connection.execute(text("SELECT pk_show FROM show")).scalars().all()
    here.sweeper.sweep(wake_shows=shows)
    dispatch(dispatcher, posting)
    # then that is how long it sleeps
    assert rests(here, posting) == pytest.approx(60 if others else 30, abs=1)
    renewer.stop()


def test_a_cluster_does_not_sleep_past_the_return_of_a_host_that_somebody_had_locked(
    here: Passes, dispatcher: Dispatcher, engine: Engine
) -> None:
    # given a farm whose only host is locked by another transaction during a pass
    clock = Clock()
    dispatcher = replace(dispatcher, runner=replace(here.runner, locked=Cooldowns(3.0, 3.0, clock)))
    plant(engine, frames=1)
    posting = a_posting(here)
    with engine.connect() as somebody, somebody.begin():
        somebody.execute(text("SELECT FROM host FOR UPDATE"))
        report = dispatch(dispatcher, posting)
    assert isinstance(report, PassReport)
    assert report.losses == {"host_locked": 1}

    assert 0 < rests(here, posting) <= 3.0

    # when the cluster is roused before the host may be tried again
    with engine.connect() as connection:
        shows = connection.execute(text("SELECT pk_show FROM show")).scalars().all()
    here.sweeper.sweep(wake_shows=shows)
    report = dispatch(dispatcher, posting)
    assert isinstance(report, PassReport)
    assert not (report.losses or report.frames_booked)

    # then the cluster is back when the host is, and not only after the time of a full farm
    assert 0 < rests(here, posting) <= 3.0 < here.settings.queue.cluster_saturated_sleep
    assert len(RESTS) == 2
    assert all(0 < seconds <= 3.0 for seconds in RESTS)
    clock.advance(3.0)
    eventually(lambda: isinstance(found := dispatch(dispatcher, posting), PassReport) and found.frames_booked == 1)


def test_a_cluster_is_looked_at_again_when_a_frame_has_waited_for_the_delay_of_its_layer(
    engine: Engine, settings: Settings
) -> None:
    # given a frame that ended just now with a status of which a Cuebot delays layers, which may be about to be written
    RESTS.clear()
    queue = settings.queue.model_copy(update={"uncounted_exit_statuses": (200,)})
    settings = settings.model_copy(update={"rqd": Rqd(dry_run_mode=True), "queue": queue})
    with passes(engine, settings) as here, dispatching(here, patience=10.0, ttl=10.0) as dispatcher:
        plant(engine, frames=1)
        with engine.begin() as connection:
            connection.execute(text("UPDATE frame SET int_exit_status = 200, ts_updated = clock_timestamp()"))
        posting = a_posting(here)

        # when a pass finds nothing else
        report = dispatch(dispatcher, posting)

        # then it plans nothing, and its cluster is back when the frame is
        assert isinstance(report, PassReport)
        assert (report.ended, report.frames_booked, report.verdicts) == (PassEnd.SATURATED, 0, ())
        assert 0 < rests(here, posting) <= 2.0 < settings.queue.cluster_saturated_sleep
        assert sent_for_at_its_end(here, posting)
        eventually(lambda: isinstance(found := dispatch(dispatcher, posting), PassReport) and found.frames_booked == 1)


def test_a_message_leads_to_one_pass_over_every_cluster_that_is_ready(
    dispatcher: Dispatcher, here: Passes, engine: Engine
) -> None:
    # given work in three clusters
    with engine.begin() as connection:
        farm = Farm(connection)
        for tag in "abc":
            alloc = farm.alloc(tag)
            farm.subscription(farm.default_show(), alloc, size=1000)
            farm.host(cores=256, memory_gb=1024, alloc=alloc, hostname_tag=False)
            farm.job([LayerSpec(frames=70, tags=tag)])
    first, *others = [enqueued for _, enqueued in here.sweeper.sweep().send]
    assert len(others) == 2

    # when the first message comes
    reports = dispatcher.dispatch(first.uuid, first.ticket)

    # then all three had their pass, in one commit, and the other messages are answered
    assert not isinstance(reports, ClaimRefused)
    assert reports[0].cluster == first.cluster
    assert sorted(report.cluster.tags for report in reports) == [("a",), ("b",), ("c",)]
    assert [report.frames_booked for report in reports] == [70] * 3
    assert sum("commit" in report.seconds for report in reports) == 1
    for other in others:
        assert isinstance(dispatcher.dispatch(other.uuid, other.ticket), ClaimRefused)
    # and none goes out, for all three placed what they could
    assert SENT == []


def test_rows_that_fail_one_cluster_do_not_fail_the_others_of_the_pass(
    dispatcher: Dispatcher, here: Passes, engine: Engine
) -> None:
    # given two clusters, of which one cannot be planned by anybody
    jobs = {}
    with engine.begin() as connection:
        farm = Farm(connection)
        for tag in "ab":
            alloc = farm.alloc(tag)
            farm.subscription(farm.default_show(), alloc, size=1000)
            farm.host(cores=8, alloc=alloc, hostname_tag=False)
            jobs[tag] = farm.job([LayerSpec(frames=2, tags=tag)])
    postings = {enqueued.cluster.tags: enqueued for _, enqueued in here.sweeper.sweep().send}

    def fail(*seen: Any) -> None:
        if any(frame in str(seen[3]) for frame in jobs["a"].frames):
            raise KeyError("nobody thought of this")

    # when there is a message for either
    with listening(here.engine, "before_cursor_execute", fail):
        reports = dispatcher.dispatch(postings["b",].uuid, postings["b",].ticket)

    # then the other one's frames run, and the one is cooled down
    with engine.connect() as connection:
        assert connection.execute(text("SELECT count(*) FROM proc")).scalar() == 2
    (failed,) = here.postings.skipped()
    assert failed.cluster is not None
    assert (failed.cluster.tags, failed.failures) == (("a",), 1)
    assert not isinstance(reports, ClaimRefused)
    assert {it.cluster.tags: it.ended for it in reports} == {("a",): PassEnd.QUERY_ERROR, ("b",): PassEnd.BOOKED}


def test_a_saturated_cluster_does_not_run_busily(here: Passes, dispatcher: Dispatcher, engine: Engine) -> None:
    plant(engine, frames=1, cores=64)
    posting = a_posting(here)
    report = dispatch(dispatcher, posting)
    assert isinstance(report, PassReport)
    assert report.ended is PassEnd.SATURATED
    assert rests(here, posting) == pytest.approx(5, abs=1)
    assert SENT == []
    assert isinstance(dispatch(dispatcher, posting), ClaimRefused)


def test_an_empty_cluster_rests_longest(here: Passes, dispatcher: Dispatcher, engine: Engine) -> None:
    plant(engine, frames=1)
    posting = a_posting(here)
    with engine.begin() as connection:
        connection.execute(text("UPDATE job SET b_paused = true"))
    report = dispatch(dispatcher, posting)
    assert isinstance(report, PassReport)
    assert report.ended is PassEnd.NO_JOBS
    assert rests(here, posting) == pytest.approx(30, abs=1)
    assert not sent_for_at_its_end(here, posting), "a sweep or an event tells when it has work again"


def test_an_emptied_redis_is_looked_at_again_in_a_second(here: Passes, dispatcher: Dispatcher, engine: Engine) -> None:
    plant(engine, frames=1)
    posting = a_posting(here)
    here.client.delete("acct:epoch")
    report = dispatch(dispatcher, posting)
    assert isinstance(report, PassReport)
    assert report.ended is PassEnd.NOT_READY
    assert RESTS == [], "the sweeps bring it back, with the others"
    assert 0 < rests(here, posting) <= 1
    assert sent_for_at_its_end(here, posting), "also while no beat leads"


def test_an_epoch_of_a_wrong_type_does_not_count_against_the_cluster(
    here: Passes, dispatcher: Dispatcher, engine: Engine
) -> None:
    plant(engine, frames=1)
    posting = a_posting(here)
    here.client.delete("acct:epoch")
    here.client.hset("acct:epoch", "not", "an epoch")
    report = dispatch(dispatcher, posting)
    assert isinstance(report, PassReport)
    assert report.ended is PassEnd.NOT_READY
    assert here.client.hget(f"cue:board:clusters:job:{posting}", "failures") == "0"


def test_a_pass_that_hangs_in_postgresql_loses_its_cluster_to_a_healthy_worker(
    engine: Engine, settings: Settings
) -> None:
    """Its connection is a proxy's that still acknowledges what it gets; Redis answers."""
    plant(engine, frames=1)
    dry = settings.model_copy(update={"rqd": Rqd(dry_run_mode=True)})
    url = make_url(settings.sqlalchemy_url)
    assert url.host is not None and url.port is not None
    reports: list[PassReport | ClaimRefused] = []
    with ExitStack() as stack:
        # given a worker whose PostgreSQL falls silent in the midst of a pass
        proxy = stack.enter_context(closing(LossyProxy(url.host, url.port)))
        through = url.set(host="127.0.0.1", port=proxy.port).render_as_string(hide_password=False)
        behind = make_engine(dry.model_copy(update={"database_url": SecretStr(through)}))
        stack.callback(behind.dispose)
        sick, well = (stack.enter_context(passes(it, dry, name)) for it, name in ((behind, "sick"), (engine, "well")))
        hung = stack.enter_context(dispatching(sick, patience=0.5))
        healthy = stack.enter_context(dispatching(well, patience=60))
        posting = a_posting(well)
        proxy.hold("SELECT")
        threads = [Thread(target=lambda: reports.append(dispatch(hung, posting))) for _ in range(2)]
        threads[0].start()
        assert proxy.holds.wait(30)

        # then it is given up, and what it is sent for next claims nothing either
        eventually(lambda: hung.renewer.hangs, 30)
        threads[1].start()
        report = eventually(lambda: isinstance(it := dispatch(healthy, posting), PassReport) and it, 30)
        assert (report.ended, report.frames_booked) == (PassEnd.BOOKED, 1)

        # and does nothing when it goes on
        proxy.let_go()
        for thread in threads:
            thread.join(30)
        assert [it.frames_booked for it in reports if isinstance(it, PassReport)] in ([0], [0, 0])
        assert not hung.renewer.hangs
        with engine.connect() as connection:
            assert connection.execute(text("SELECT count(*) FROM proc")).scalar_one() == 1


def test_a_pass_that_takes_long_keeps_its_cluster_while_each_step_is_short(
    settings: Settings, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    # given a PostgreSQL in which a transaction takes almost as long as a step may
    now, given_up = [1000.0], list[bool]()
    monkeypatch.setattr("opencue_sched.coordination.postings.boot_clock", lambda: now[0])
    dry = settings.model_copy(update={"rqd": Rqd(dry_run_mode=True)})
    with passes(engine, dry, named=True) as here, dispatching(here, patience=10.0) as slow:
        plant(engine, frames=1)
        here.runner.backlog.follow()
        with engine.connect() as connection:
            here.runner.backlog.note(connection.execute(text("SELECT pk_layer FROM layer")).scalars().all())
        posting = a_posting(here)

        def life() -> float | None:
            return here.client.zscore("cue:board:clusters:claimed", posting)

        def renewed() -> None:
            before = life()
            slow.renewer.wake()
            eventually(lambda: life() != before or not slow.renewer.held())

        def pass_time(_: object) -> None:
            now[0] += 9.0
            renewed()  # which may have begun before
            renewed()
            given_up.append(slow.renewer.hangs)

        # when a pass needs several
        with listening(engine, "begin", pass_time):
            report = dispatch(slow, posting)

    # then it does its work
    assert given_up == 5 * [False]
    assert isinstance(report, PassReport)
    assert (report.ended, report.frames_booked) == (PassEnd.BOOKED, 1)


@contextmanager
def dispatching(here: Passes, *, patience: float, ttl: float = 0.9) -> Iterator[Dispatcher]:
    postings = here.postings
    renewer = ClaimRenewer(postings, ttl_seconds=ttl, patience_seconds=patience)
    yield Dispatcher(here.settings, postings, renewer, here.runner, "one", SENT.append, lambda *_: None)
    renewer.stop()


def test_a_query_that_fails_costs_a_rest_and_not_the_scheduler(
    here: Passes, dispatcher: Dispatcher, engine: Engine
) -> None:
    """Upstream's feed ended for good with the first query that failed."""
    plant(engine, frames=1)
    posting = a_posting(here)
    with failing_statements(here.engine, OperationalError("SELECT", {}, Exception("server closed the connection"))):
        report = dispatch(dispatcher, posting)
    assert isinstance(report, PassReport)
    assert (report.ended, report.frames_booked) == (PassEnd.QUERY_ERROR, 0)
    assert 0 < rests(here, posting) <= 1
    # when it is roused and PostgreSQL is back, it books
    ((_, again),) = here.sweeper.sweep(wake_shows=[report.cluster.show_id]).send
    after = dispatch(dispatcher, again.uuid, again.ticket)
    assert isinstance(after, PassReport)
    assert after.frames_booked == 1


def test_a_pass_that_crashes_is_told_and_tried_again_soon(here: Passes, dispatcher: Dispatcher, engine: Engine) -> None:
    plant(engine, frames=1)
    posting = a_posting(here)
    with failing_statements(here.engine, KeyError("nobody thought of this")):
        report = dispatch(dispatcher, posting)
    assert isinstance(report, PassReport)
    assert (report.ended, "nobody thought of this" in report.error) == (PassEnd.QUERY_ERROR, True)
    assert 1 < rests(here, posting) <= 2


AWAY = OperationalError("SELECT", {}, Exception("server closed the connection"))
POISON = ProgrammingError("SELECT", {}, Exception("a row that no query can read"))


def one_pass(here: Passes, dispatcher: Dispatcher, posting: str, error: Exception | None = None) -> dict[str, str]:
    """End the cluster's cooldown, have a process that has just started wake it and pass over it, which fails with the
    error; its posting afterwards."""
    for posted in here.postings.posted().values():
        here.client.hset(f"cue:board:clusters:job:{posted}", mapping={"sent": 0, "rest": 0})
    Sweeper(here.engine, here.settings, here.postings).sweep()
    with failing_statements(here.engine, error) if error else nullcontext():
        dispatch(dispatcher, posting)
    return cast("dict[str, str]", here.client.hgetall(f"cue:board:clusters:job:{posting}"))


def test_a_cluster_whose_passes_fail_is_cooled_down_longer_and_longer_whatever_wakes_it(
    here: Passes, dispatcher: Dispatcher, engine: Engine
) -> None:
    plant(engine, frames=1)
    posting = a_posting(here)
    shows = [next(iter(here.sweeper.clusters)).show_id]
    cooled: list[float] = []

    # given a cluster whose passes fail ten times in a row
    for _ in range(10):
        one_pass(here, dispatcher, posting, POISON)
        cooled.append(rests(here, posting))
        # when something wakes it, then nobody looks at it
        assert here.sweeper.sweep(wake_shows=shows).send == ()
        assert isinstance(dispatch(dispatcher, posting), ClaimRefused)
        end_cooldown(here, posting)

    # then it is left alone for longer each time, to a bound, and sent for at the end
    assert cooled == pytest.approx([2, 4, 8, 16, 32, 64, 128, 256, 300, 300], abs=0.1)
    (cooldown,) = here.postings.skipped()
    assert (cooldown.failures, cooldown.kind) == (10, "postgresql")
    assert not lacks(cooldown.reason, "ProgrammingError", "a row that no query can read")
    error = here.client.hget(f"cue:board:clusters:job:{posting}", "error") or ""
    assert not lacks(error, "cluster_pass.py", "ProgrammingError", "a row that no query can read"), "with its traceback"

    # when the cause is gone, then it books, and begins anew
    report = dispatch(dispatcher, posting)
    assert isinstance(report, PassReport)
    assert report.frames_booked == 1
    assert here.postings.skipped() == []


def end_cooldown(here: Passes, posting: str) -> None:
    """Let the time of a cooldown pass: any worker sends a message for the posting then."""
    assert sent_for_at_its_end(here, posting)
    here.client.hset(f"cue:board:clusters:job:{posting}", "rest", 0)
    here.client.zadd("cue:board:clusters:delayed", {posting: 1})


def test_a_store_that_is_away_neither_counts_against_a_cluster_nor_acquits_it(
    here: Passes, dispatcher: Dispatcher, engine: Engine
) -> None:
    plant(engine, frames=1)
    posting = a_posting(here)
    met = (POISON, AWAY, RedisConnectionError("refused"), POISON, NotReady("the counters are gone"), None)
    failures = [one_pass(here, dispatcher, posting, error)["failures"] for error in met]
    assert failures == ["1", "1", "1", "2", "2", "0"]


def test_a_table_that_is_away_counts_against_no_cluster(here: Passes, dispatcher: Dispatcher, engine: Engine) -> None:
    plant(engine, frames=1)
    posting = a_posting(here)

    # given our tables away, as between `migrate --down` and `migrate` beside workers
    with engine.begin() as connection:
        connection.execute(text("ALTER TABLE opencue_sched_quarantine RENAME TO away"))
    for _ in range(6):
        one_pass(here, dispatcher, posting)
    assert here.postings.skipped() == []
    assert sent_for_at_its_end(here, posting), "the worker tries again by itself"
    assert 0 < rests(here, posting) <= 1, "soon: nothing tells when they are back"

    # when they are back and the cluster is woken, then it books
    with engine.begin() as connection:
        connection.execute(text("ALTER TABLE away RENAME TO opencue_sched_quarantine"))
    one_pass(here, dispatcher, posting)
    with engine.connect() as connection:
        assert connection.scalar(text("SELECT count(*) FROM proc")) == 1


def test_a_posting_that_is_gone_is_refused(dispatcher: Dispatcher) -> None:
    assert isinstance(dispatch(dispatcher, "0" * 40), ClaimRefused)


def test_a_scan_that_fails_keeps_the_clusters_that_were_awake(
    here: Passes, dispatcher: Dispatcher, engine: Engine
) -> None:
    """Upstream cleared its awake set when a scan failed, and slept over waiting work."""
    plant(engine, frames=1)
    posting = a_posting(here)
    timeout = OperationalError("SELECT", {}, Exception("canceling statement due to statement timeout"))
    with failing_statements(here.engine, timeout), pytest.raises(OperationalError):
        here.sweeper.sweep()
    assert here.postings.posted() != {}
    report = dispatch(dispatcher, posting)
    assert isinstance(report, PassReport)
    assert report.frames_booked == 1


def test_a_sweep_says_that_it_held_a_cluster_back_until_it_may_be_roused_again(here: Passes, engine: Engine) -> None:
    # given a cluster that was roused for a freed host as often as it may at once
    sweeper, clock, host = sweeper_of_one_host(here, engine)
    roused_in_a_row(sweeper, clock, host)

    # when the host is freed again, then the sweep asks to be told once more, when the cluster may be roused
    pause = sweeper.sweep(wake_hosts=[host]).ask_again
    assert 0 < pause <= pause_between_wakes(1)
    assert sweeper.sweep().ask_again == 0
    clock.advance(pause)
    assert sweeper.sweep(wake_hosts=[host]).ask_again == 0


def test_a_cluster_that_was_not_roused_for_long_is_roused_a_few_times_without_a_pause(
    here: Passes, engine: Engine
) -> None:
    sweeper, clock, host = sweeper_of_one_host(here, engine)
    # when a host comes free again and again, then the cluster is roused at once three times, and after that at its pace
    assert roused_in_a_row(sweeper, clock, host) == 3
    for _ in range(3):
        clock.advance(pause_between_wakes(1))
        assert roused_in_a_row(sweeper, clock, host) == 1
    # and when no host came free for long, at once again
    clock.advance(60.0)
    assert roused_in_a_row(sweeper, clock, host) == 3


def sweeper_of_one_host(here: Passes, engine: Engine) -> tuple[Sweeper, Clock, str]:
    """A sweeper, its clock, and the id of a host that the only cluster with work could use."""
    with engine.begin() as connection:
        farm = Farm(connection)
        host = farm.host(cores=2)
        farm.job([LayerSpec(frames=1)])
    clock = Clock()
    return Sweeper(engine, here.settings, here.postings, clock=clock), clock, host.id


def roused_in_a_row(sweeper: Sweeper, clock: Clock, host_id: str) -> int:
    """How often hosts that come free one soon after the other rouse their cluster until one of them has to wait."""
    for roused in range(20):
        if sweeper.sweep(wake_hosts=[host_id]).ask_again:
            return roused
        clock.advance(0.001)
    pytest.fail("no host had to wait")


def test_the_more_clusters_could_use_a_freed_host_the_less_often_it_rouses_them() -> None:
    pauses = {clusters: pause_between_wakes(clusters) for clusters in (0, 1, 6, 12, 18, 20, 1000)}
    assert pauses == {0: 0.1, 1: 0.1, 6: 0.1, 12: 0.2, 18: 0.3, 20: 0.33, 1000: 0.33}


@pytest.mark.parametrize("fails", [False, True])
def test_what_is_heard_during_a_pass_is_swept_for_when_its_claims_have_ended(
    here: Passes, engine: Engine, dispatcher: Dispatcher, fails: bool
) -> None:
    # given a pass during which a host comes free
    plant(engine, frames=1)
    posting = a_posting(here)
    states: list[str | None] = []

    def sweep(_shows: Collection[str], _hosts: Collection[str]) -> float:
        states.append(here.client.hget(f"cue:board:clusters:job:{posting}", "state"))
        return 0.0

    waker = Waker(sweep)

    def follows(_clusters: Collection[Cluster]) -> None:
        waker.note(["host"])
        if fails:
            raise OperationalError("rows that make no sense", None, Exception())

    held = replace(dispatcher, runner=replace(here.runner, follows=follows), hold_sweeps=waker.hold)
    waker.start()
    try:
        report = dispatch(held, posting)
        eventually(lambda: states, 10, "a sweep")
    finally:
        waker.stop()

    # then the cluster is not a pass's any more when it is swept for
    assert isinstance(report, PassReport)
    assert report.frames_booked == (not fails)
    assert "claimed" not in states
