"""Runs nobody reports the end of: silent hosts, finished jobs, ownerless procs and frames."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import pytest
from pydantic import SecretStr
from sqlalchemy import Engine, make_url, text

from opencue_sched.clients.postgres import make_engine
from opencue_sched.embedded.farms.farm_specs import LayerSpec
from opencue_sched.reports.completion import Releaser
from opencue_sched.reports.reaper import ReaperReport, reap
from opencue_sched.rqd.kill import Fate
from opencue_sched.settings import Release, Settings
from opencue_sched.store.lost_runs import UpkeepScope
from tests.kit.runs import FarmView, RecordedChanges, RecordedLedger, Running, ScriptedKiller, start

BESIDE_A_CUEBOT = UpkeepScope(beside_cuebot=True)
Reap = Callable[[], ReaperReport]


@pytest.fixture
def reaper(engine: Engine, killer: ScriptedKiller, ledger: RecordedLedger, changes: RecordedChanges) -> Reap:
    """A reap for which a host that has not reported for half a second is silent. No host is, to a younger server."""
    with engine.connect() as connection:
        age = "extract(epoch FROM clock_timestamp() - pg_postmaster_start_time())"
        connection.execute(text(f"SELECT pg_sleep(0.6 - {age})"))
    return partial(reap, Releaser(engine, Release(host_down_after=0.5), ledger=ledger, changes=changes), killer)


def silence(view: FarmView, run: Running, seconds: int) -> None:
    for table in ("host_stat", "proc"):
        view.run_sql(
            f"UPDATE {table} SET ts_ping = now() - :s * interval '1 second' WHERE pk_host = :h",  # noqa: S608
            s=seconds,
            h=run.host.id,
        )


def keep_reporting(view: FarmView) -> None:
    """Have no host go silent for as long as a test can take."""
    view.run_sql("UPDATE host_stat SET ts_ping = now() + interval '1 hour'")


def test_a_silent_host_goes_down_and_its_frames_wait_again(
    view: FarmView, reaper: Reap, killer: ScriptedKiller, ledger: RecordedLedger
) -> None:
    # given a host that cannot be reached and has not reported for a while
    run = start(view, LayerSpec(frames=3), running=2)
    silence(view, run, 60)
    killer.fate = Fate.UNREACHABLE

    # when the reaper passes
    report = reaper()

    # then the host is DOWN, its RQD was looked for once, and the frames wait with 399
    assert report.hosts_down == (run.host.id,)
    assert view.host(run.host).str_state == "DOWN"
    assert (len(killer.probed), killer.stopped) == (1, [])
    assert view.states(run.frames) == ["WAITING", "WAITING"]
    assert {view.frame(frame).int_exit_status for frame in run.frames} == {399}
    assert sorted(ledger.released) == sorted(run.procs)
    assert (report.procs_released, report.frames_waiting, report.deferred) == (2, 2, 0)
    view.assert_consistent()


@pytest.fixture
def long_running(settings: Settings, engine: Engine) -> Iterator[Engine]:
    """The database, whose server has run for ten days by the clock that its sessions see."""
    with engine.begin() as connection:
        connection.execute(
            text(
                "CREATE FUNCTION pg_postmaster_start_time() RETURNS timestamptz"
                " LANGUAGE sql AS $$ SELECT now() - interval '10 days' $$"
            )
        )
    ours_first = make_url(settings.sqlalchemy_url).update_query_dict({"options": "-csearch_path=public,pg_catalog"})
    url = SecretStr(ours_first.render_as_string(hide_password=False))
    made = make_engine(settings.model_copy(update={"database_url": url}))
    yield made
    made.dispose()


def test_when_most_hosts_are_silent_it_waits_longer(
    long_running: Engine, view: FarmView, killer: ScriptedKiller
) -> None:
    # given a PostgreSQL that has run for long, and a farm whose three hosts are all silent (our service was away)
    run = start(view)
    with view.farm() as farm:
        for name in ("a", "b"):
            farm.host(name=name)
    changes = RecordedChanges()
    reaper = partial(reap, Releaser(long_running, Release(host_down_after=300), changes=changes), killer)

    # then five minutes of silence are not enough for any of them, but fifteen are
    view.run_sql("UPDATE host_stat SET ts_ping = now() - interval '310 seconds'")
    assert reaper().hosts_down == ()
    view.run_sql("UPDATE host_stat SET ts_ping = now() - interval '910 seconds'")
    down = reaper().hosts_down
    assert len(down) == 3
    assert set(changes.published) == set(down), "also of hosts that ran nothing, the caches are told"
    assert view.states(run.frames) == ["WAITING"]


def test_one_silent_host_of_many_goes_down_at_once(engine: Engine, view: FarmView, killer: ScriptedKiller) -> None:
    run = start(view)
    with view.farm() as farm:
        for name in ("a", "b"):
            farm.host(name=name)
    keep_reporting(view)
    silence(view, run, 2)
    # one that somebody repairs stays so, and what Cuebot runs on an artist's own machine is Cuebot's
    view.run_sql(
        "UPDATE host_stat SET str_state = 'REPAIR', ts_ping = now() - interval '1 day'"
        " WHERE pk_host = (SELECT pk_host FROM host WHERE str_name = 'a')"
    )
    view.run_sql("UPDATE proc SET b_local = true")
    report = reap(Releaser(engine, Release(host_down_after=0.5)), killer)
    assert report.hosts_down == (run.host.id,)
    assert view.procs() == list(run.procs)


def test_nothing_goes_down_right_after_postgresql_was_away(
    engine: Engine, view: FarmView, killer: ScriptedKiller
) -> None:
    # given a host silent for longer than this PostgreSQL server has run
    run = start(view)
    view.run_sql("UPDATE host_stat SET ts_ping = now() - interval '100 days'")
    settings = Release(host_down_after=99 * 24 * 3600)
    assert reap(Releaser(engine, settings), killer).hosts_down == ()
    assert view.states(run.frames) == ["RUNNING"]


def test_a_silent_proc_is_ended_only_once_its_process_is_confirmed_dead(
    view: FarmView, reaper: Reap, killer: ScriptedKiller
) -> None:
    # given a proc no report has named for six minutes, on a host that reports, and a frame that makes checkpoints
    run = start(view)
    keep_reporting(view)
    view.run_sql("UPDATE frame SET str_checkpoint_state = 'ENABLED'")
    view.run_sql("UPDATE proc SET ts_ping = now() - interval '360 seconds'")

    # when its RQD does not confirm, nothing changes
    for fate in (Fate.UNCONFIRMED, Fate.UNREACHABLE):
        killer.fate = fate
        assert reaper().deferred == 1
        assert view.states(run.frames) == ["RUNNING"]

    # when it does, the frame waits again with 301, and for no copy of a checkpoint
    killer.fate = Fate.NOT_RUNNING
    assert reaper().frames_waiting == 1
    assert view.frame(run.frames[0]).int_exit_status == 301
    view.assert_consistent()


@pytest.mark.parametrize(("fate", "state"), [(Fate.RUNNING, "RUNNING"), (Fate.NOT_RUNNING, "WAITING")])
@pytest.mark.parametrize("host", ["UP", "REPAIR"])
def test_procs_of_a_host_that_nobody_heard_are_not_killed(
    engine: Engine, view: FarmView, killer: ScriptedKiller, fate: Fate, state: str, host: str
) -> None:
    # given a proc and its host that both went silent ten minutes ago: whoever takes the reports was away
    run = start(view)
    silence(view, run, 600)
    view.run_sql("UPDATE host_stat SET str_state = :s", s=host)
    killer.fate = fate

    # when the reaper passes before the host is DOWN
    reap(Releaser(engine, Release(host_down_after=1e6)), killer)

    # then nothing is killed; a host that can never be marked DOWN is asked, and only what it does not run is ended
    assert killer.stopped == []
    assert killer.looked_for == ([] if host == "UP" else list(run.frames))
    assert view.states(run.frames) == ["RUNNING" if host == "UP" else state]
    view.assert_consistent()


@pytest.mark.parametrize("fate", [Fate.UNCONFIRMED, Fate.UNREACHABLE])
def test_a_host_whose_clock_is_ahead_keeps_its_frames_until_they_are_known_to_have_ended(
    view: FarmView, reaper: Reap, killer: ScriptedKiller, fate: Fate
) -> None:
    # given a proc of ten minutes on a host that booted an hour ago, which its clock, two hours ahead, puts in an hour
    run = start(view)
    view.run_sql("UPDATE proc SET ts_ping = now() - interval '400 s', ts_dispatched = now() - interval '600 s'")
    view.run_sql("UPDATE host_stat SET ts_booted = now() + interval '1 hour', ts_ping = now() + interval '1 hour'")
    # when its RQD does not confirm that the process has ended, then its frame is nobody else's
    killer.fate = fate
    assert reaper().deferred == 1
    assert (view.states(run.frames), view.procs()) == (["RUNNING"], list(run.procs))


def test_after_twenty_minutes_without_an_answer_a_person_must_decide(
    view: FarmView, reaper: Reap, killer: ScriptedKiller
) -> None:
    run = start(view)
    keep_reporting(view)
    view.run_sql("UPDATE proc SET ts_ping = now() - interval '1300 seconds'")
    killer.fate = Fate.UNCONFIRMED
    assert reaper().frames_dead == 1
    assert view.states(run.frames) == ["DEAD"]
    assert view.procs() == []
    view.assert_consistent()


def test_a_run_that_proves_alive_meanwhile_is_left_alone(view: FarmView, engine: Engine) -> None:
    # given a proc that reports again exactly while the reaper asks about it
    run = start(view)
    view.run_sql("UPDATE proc SET ts_ping = now() - interval '360 seconds'")

    class Late(ScriptedKiller):
        def confirm_gone(self, host_name: str, frame_id: str, proc_id: str) -> Fate:
            view.run_sql("UPDATE proc SET ts_ping = now()")
            return Fate.NOT_RUNNING

    report = reap(Releaser(engine, Release()), Late())
    assert report.procs_released == 0
    assert view.states(run.frames) == ["RUNNING"]


def test_procs_of_a_finished_job_are_ended_though_they_report_to_the_last(view: FarmView, engine: Engine) -> None:
    run = start(view)
    keep_reporting(view)
    view.run_sql("UPDATE job SET str_state = 'FINISHED'")

    class Lively(ScriptedKiller):
        def stop(self, host_name: str, frame_id: str, proc_id: str, reason: str) -> Fate:
            view.run_sql("UPDATE proc SET ts_ping = now()")
            return Fate.NOT_RUNNING

    assert reap(Releaser(engine, Release()), Lively()).procs_released == 1
    assert view.states(run.frames) == ["WAITING"]
    view.assert_consistent()


def test_a_proc_without_a_frame_is_released_after_a_minute(view: FarmView, reaper: Reap) -> None:
    run = start(view)
    keep_reporting(view)
    view.run_sql("UPDATE proc SET pk_frame = NULL")
    view.run_sql("UPDATE frame SET str_state = 'EATEN' WHERE pk_frame = :f", f=run.frames[0])
    assert reaper().procs_released == 0
    view.run_sql("UPDATE proc SET ts_ping = now() - interval '61 seconds'")
    assert reaper().procs_released == 1
    assert view.states(run.frames) == ["EATEN"]
    view.assert_consistent()


@pytest.mark.parametrize(
    ("fate", "age", "state"),
    [
        (Fate.NOT_RUNNING, 400, "WAITING"),
        (Fate.UNCONFIRMED, 400, "RUNNING"),
        (Fate.UNREACHABLE, 400, "RUNNING"),
        (Fate.UNREACHABLE, 3700, "DEAD"),
        (Fate.NOT_RUNNING, 200, "RUNNING"),
    ],
)
def test_orphan_frames(view: FarmView, reaper: Reap, killer: ScriptedKiller, fate: Fate, age: int, state: str) -> None:
    # given a frame that has been RUNNING without a proc for some time
    run = start(view)
    view.run_sql("DELETE FROM proc")
    view.run_sql("UPDATE host SET int_cores_idle = int_cores, int_mem_idle = int_mem")
    view.run_sql("UPDATE frame SET ts_updated = now() - :s * interval '1 s' WHERE str_state = 'RUNNING'", s=age)
    keep_reporting(view)
    killer.fate = fate
    reaper()
    assert view.states(run.frames) == [state]


def test_an_orphan_frame_of_a_host_that_is_gone_waits_again(
    view: FarmView, reaper: Reap, killer: ScriptedKiller
) -> None:
    run = start(view)
    view.run_sql("DELETE FROM proc")
    view.run_sql(
        "UPDATE frame SET str_host = 'removed', ts_updated = now() - interval '400 s' WHERE str_state = 'RUNNING'"
    )
    killer.fate = Fate.UNREACHABLE
    reaper()
    assert view.states(run.frames) == ["WAITING"]


@pytest.mark.parametrize(
    ("named", "scope", "managed", "judged"),
    [
        (40, BESIDE_A_CUEBOT, True, True),
        pytest.param(25, BESIDE_A_CUEBOT, True, False, id="perhaps only one report has not named it"),
        pytest.param(40, BESIDE_A_CUEBOT, False, False, id="its show is Cuebot's"),
        pytest.param(40, UpkeepScope(), False, True, id="there is no Cuebot"),
        pytest.param(25, UpkeepScope(), True, False, id="its launch may be under way"),
    ],
)
def test_rqd_is_asked_about_a_proc_that_two_reports_have_not_named(
    engine: Engine,
    view: FarmView,
    killer: ScriptedKiller,
    ledger: RecordedLedger,
    named: int,
    scope: UpkeepScope,
    managed: bool,
    judged: bool,
) -> None:
    # given a proc that the last of its host's reports do not name: its completion was never sent, or went to a Cuebot
    # that was killed
    run = start(view)
    view.run_sql("UPDATE show SET b_scheduler_managed = :m", m=managed)
    view.run_sql("UPDATE proc SET ts_ping = now() - :n * interval '1 s'", n=named)
    view.run_sql("UPDATE host_stat SET ts_ping = now() - interval '1 s'")

    # when its RQD says that it does not run the frame
    reap(Releaser(engine, Release(), ledger=ledger), killer, scope=scope)

    # then the run is over, long before it counts as an orphan, and nothing was killed
    assert killer.looked_for == (list(run.frames) if judged else [])
    assert killer.stopped == []
    assert view.states(run.frames) == ["WAITING" if judged else "RUNNING"]
    assert ledger.released == (list(run.procs) if judged and managed else [])
    view.assert_consistent()


@pytest.mark.parametrize(("named", "asked"), [(3, False), (7, True)])
def test_however_short_the_grace_a_launch_and_a_report_have_time_to_arrive(
    engine: Engine, view: FarmView, killer: ScriptedKiller, named: int, asked: bool
) -> None:
    run = start(view)
    view.run_sql("UPDATE proc SET ts_ping = now() - :n * interval '1 s'", n=named)
    view.run_sql("UPDATE host_stat SET ts_ping = now()")
    reap(Releaser(engine, Release(lost_completion_grace=0.3)), killer)
    assert killer.looked_for == (list(run.frames) if asked else [])


@pytest.mark.parametrize("fate", [Fate.RUNNING, Fate.UNCONFIRMED, Fate.UNREACHABLE])
def test_a_proc_that_reports_do_not_name_is_left_alone_unless_its_rqd_says_that_it_is_gone(
    engine: Engine, view: FarmView, killer: ScriptedKiller, fate: Fate
) -> None:
    run = start(view)
    view.run_sql("UPDATE proc SET ts_ping = now() - interval '290 s', ts_dispatched = now() - interval '1 day'")
    view.run_sql("UPDATE host_stat SET ts_ping = now()")
    killer.fate = fate
    report = reap(Releaser(engine, Release()), killer, scope=BESIDE_A_CUEBOT)
    assert (report.procs_released, report.deferred) == (0, fate is not Fate.RUNNING)
    assert (len(killer.looked_for), killer.stopped) == (1, [])
    assert view.states(run.frames) == ["RUNNING"]


def on_hosts(view: FarmView, state: str, *, hosts: int, frames: int) -> None:
    """Frames silent for six minutes on so many hosts of that state, ``frames`` on each."""
    with view.farm() as farm:
        job = farm.job([LayerSpec(frames=hosts * frames)])
        for n in range(hosts):
            host = farm.host(name=f"h{n}", cores=16, memory_gb=64)
            farm.run(job.frames[n * frames : (n + 1) * frames], host, cores=1, memory_gb=1)
    view.run_sql("UPDATE proc SET ts_ping = now() - interval '360 seconds'")
    view.run_sql("UPDATE host_stat SET str_state = :s", s=state)


def test_a_host_that_is_down_and_does_not_answer_is_looked_for_once_however_many_frames_it_has(
    engine: Engine, view: FarmView, killer: ScriptedKiller
) -> None:
    # given three dead hosts, in the database too, with four frames each
    on_hosts(view, "DOWN", hosts=3, frames=4)
    killer.fate = Fate.UNREACHABLE

    # when they are reaped
    report = reap(Releaser(engine, Release()), killer)

    # then all frames wait, and no host cost more than one short look
    assert (report.frames_waiting, report.deferred) == (12, 0)
    assert sorted(killer.probed) == ["h0", "h1", "h2"]
    assert killer.stopped == []
    view.assert_consistent()


def test_a_host_that_comes_back_while_it_is_looked_for_in_vain_keeps_its_frames(engine: Engine, view: FarmView) -> None:
    on_hosts(view, "DOWN", hosts=1, frames=1)

    class Back(ScriptedKiller):
        def answers(self, host_name: str, seconds: float) -> bool:
            view.run_sql("UPDATE host_stat SET str_state = 'UP'")
            return False

    report = reap(Releaser(engine, Release()), Back())
    assert (report.procs_released, report.deferred) == (0, 1)
    assert len(view.procs()) == 1


def test_a_host_that_is_down_but_answers_has_its_processes_killed_and_confirmed(
    engine: Engine, view: FarmView, killer: ScriptedKiller
) -> None:
    on_hosts(view, "DOWN", hosts=1, frames=2)
    killer.fate = Fate.UNCONFIRMED
    report = reap(Releaser(engine, Release()), killer)
    assert (report.procs_released, report.deferred) == (0, 2)
    assert len(killer.stopped) == 2


def test_a_host_that_is_up_is_asked_in_full_and_once_a_reap_when_it_cannot_be_reached(
    engine: Engine, view: FarmView, killer: ScriptedKiller
) -> None:
    on_hosts(view, "UP", hosts=2, frames=3)
    view.run_sql("UPDATE job SET str_state = 'FINISHED'")
    killer.fate = Fate.UNREACHABLE
    report = reap(Releaser(engine, Release(host_down_after=1e6)), killer)
    assert (report.procs_released, report.deferred) == (0, 6)
    assert killer.probed == []
    assert sorted(host for host, _ in killer.stopped) == ["h0", "h1"]


def test_what_is_too_much_for_one_reap_is_for_the_next(engine: Engine, view: FarmView, killer: ScriptedKiller) -> None:
    run = start(view, LayerSpec(frames=5), running=5)
    view.run_sql("UPDATE job SET str_state = 'FINISHED'")
    reaping = partial(reap, Releaser(engine, Release()), killer, most=2)
    assert [reaping().procs_released for _ in range(4)] == [2, 2, 1, 0]
    assert view.states(run.frames) == ["WAITING"] * 5
    view.assert_consistent()


def test_what_cannot_be_ended_is_tried_once_a_reap(engine: Engine, view: FarmView, killer: ScriptedKiller) -> None:
    on_hosts(view, "UP", hosts=1, frames=5)
    view.run_sql("UPDATE job SET str_state = 'FINISHED'")
    killer.fate = Fate.UNCONFIRMED
    report = reap(Releaser(engine, Release(host_down_after=1e6)), killer)
    assert report.deferred == 5
    assert len({frame for _, frame in killer.stopped}) == len(killer.stopped) == 5


@pytest.mark.parametrize("why", ["its time is over", "its process is to end"])
def test_a_reap_begins_nothing_more(engine: Engine, view: FarmView, why: str) -> None:
    """A frame nobody asked about is left alone, and so is one that no proc owns."""
    # given five frames whose kills take 12 seconds each, and an orphan frame on another host, one day old
    on_hosts(view, "UP", hosts=1, frames=5)
    view.run_sql("UPDATE job SET str_state = 'FINISHED'")
    with view.farm() as farm:
        orphan = farm.job([LayerSpec(frames=1)], name="orphan").frames[0]
    view.run_sql(
        "UPDATE frame SET str_state = 'RUNNING', str_host = 'h0', ts_updated = now() - interval '1 day'"
        " WHERE pk_frame = :f",
        f=orphan,
    )
    now = [0.0]

    class Slow(ScriptedKiller):
        def stop(self, host_name: str, frame_id: str, proc_id: str, reason: str) -> Fate:
            now[0] += 12.0
            return super().stop(host_name, frame_id, proc_id, reason)

    killer = Slow()
    release = Release(host_down_after=1e6)
    if why == "its time is over":
        reaping = partial(reap, Releaser(engine, release, clock=lambda: now[0]), killer)
    else:
        reaping = partial(reap, Releaser(engine, release), killer, stopping=lambda: 30.0 < now[0] < 40.0)

    # when that is after 30 seconds, then it begins three kills
    report = reaping()
    assert len(killer.stopped) == 3
    assert report.procs_released == 3
    assert report.deferred == 3
    assert view.states([orphan]) == ["RUNNING"]

    # and the next reap, of a process that goes on, does the rest
    now[0] += 10.0
    assert reaping().deferred == 0
    assert len(killer.stopped) == 6
    view.assert_consistent()
