"""What people do to jobs and frames, running or not."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
from sqlalchemy import Engine, text

from opencue_sched.embedded.farms.farm_specs import LayerSpec
from opencue_sched.errors import InvalidInput
from opencue_sched.jobs.control import JobControl
from opencue_sched.reports.completion import Releaser
from opencue_sched.reports.run_ends import RunVerdict
from opencue_sched.rqd.kill import Fate
from opencue_sched.settings import Release
from tests.kit.runs import FarmView, RecordedLedger, Running, ScriptedKiller, complete_frame, start


@pytest.fixture
def control(engine: Engine, killer: ScriptedKiller, ledger: RecordedLedger) -> JobControl:
    return JobControl(Releaser(engine, Release(), ledger), killer)


def test_a_killed_job_is_finished_and_nothing_of_it_runs(
    view: FarmView, control: JobControl, killer: ScriptedKiller, ledger: RecordedLedger
) -> None:
    # given a running job that another one waits for
    run = start(view, LayerSpec(frames=3), running=2)
    with view.farm() as farm:
        other = farm.job(name="other", show=run.job.show)
        farm.job_on_job(other, run.job)

    # when it is killed
    killed = control.kill_job(run.job.id, reason="asked by a test")

    # then it is over, its processes are dead, its host is free and the other job may go
    assert killed.finished
    assert sorted(killed.changed) == sorted(run.frames)
    assert sorted(frame for _, frame in killer.stopped) == sorted(run.frames)
    assert view.job_state(run.job) == "FINISHED"
    assert view.states(run.job.frames) == ["WAITING"] * 3
    assert view.states(other.frames) == ["WAITING"]
    assert sorted(ledger.released) == sorted(run.procs)
    view.assert_consistent()
    assert not control.kill_job(run.job.id, reason="again").finished


def test_killing_a_job_whose_host_does_not_answer_says_what_is_left(
    view: FarmView, control: JobControl, killer: ScriptedKiller
) -> None:
    run = start(view)
    killer.fate = Fate.UNREACHABLE
    killed = control.kill_job(run.job.id, reason="asked by a test")
    assert (killed.finished, killed.changed, killed.deferred) == (True, (), run.frames)
    assert view.job_state(run.job) == "FINISHED"
    assert view.procs() == list(run.procs)


def test_what_was_booked_while_a_job_is_killed_is_killed_too(view: FarmView, engine: Engine) -> None:
    # given a commit that ends just after the job was looked at
    run = start(view, LayerSpec(frames=2))

    class Slow(ScriptedKiller):
        def stop(self, host_name: str, frame_id: str, proc_id: str, reason: str) -> Fate:
            if not self.stopped:
                with view.farm() as farm:
                    farm.run(run.job.frames[1:], run.host)
            return super().stop(host_name, frame_id, proc_id, reason)

    killed = JobControl(Releaser(engine), Slow()).kill_job(run.job.id, reason="test")
    assert sorted(killed.changed) == sorted(run.job.frames)
    assert view.procs() == []
    view.assert_consistent()


def test_a_run_that_the_database_refuses_to_end_is_told_beside_those_that_ended(
    view: FarmView, control: JobControl
) -> None:
    # given two runs, and a database that keeps the proc of one
    run = start(view, LayerSpec(frames=2), running=2)
    view.run_sql(
        "CREATE FUNCTION refuses() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN"
        " IF OLD.pk_proc = TG_ARGV[0] THEN RAISE 'it stays'; END IF; RETURN NULL; END $$"
    )
    view.run_sql(f"CREATE TRIGGER refuses AFTER DELETE ON proc FOR EACH ROW EXECUTE FUNCTION refuses('{run.procs[0]}')")
    # when both are eaten
    eaten = control.eat_frames(run.frames, reason="test")
    # then one is, and the result has the refusal of the other
    assert (eaten.changed, eaten.deferred) == (run.frames[1:], ())
    assert "it stays" in str(eaten.refusal)
    assert view.states(run.frames) == ["RUNNING", "EATEN"]


@pytest.mark.parametrize("state", ["DEAD", "EATEN", "SUCCEEDED", "CHECKPOINT"])
def test_a_frame_that_is_over_waits_again(view: FarmView, control: JobControl, state: str) -> None:
    run = start(view, LayerSpec(frames=2), running=0)
    frame = run.job.frames[0]
    view.run_sql("UPDATE frame SET str_state = :state WHERE pk_frame = :f", state=state, f=frame)
    assert control.retry_frames([frame], reason="test").changed == (frame,)
    assert view.states([frame]) == ["WAITING"]
    view.assert_consistent()


def test_a_running_frame_is_killed_before_it_waits_again(
    view: FarmView, control: JobControl, killer: ScriptedKiller, engine: Engine
) -> None:
    run = start(view, LayerSpec(frames=2), running=2)
    killer.fate = Fate.UNCONFIRMED
    assert control.retry_frames(run.frames[:1], reason="test").deferred == run.frames[:1]
    assert view.states(run.frames) == ["RUNNING", "RUNNING"]
    killer.fate = Fate.NOT_RUNNING
    assert control.retry_frames(run.frames[:1], reason="test").changed == run.frames[:1]
    assert view.states(run.frames) == ["WAITING", "RUNNING"]
    # the killed process's own report comes late
    assert complete_frame(engine, run.report(exit_status=1, exit_signal=9)).verdict is RunVerdict.STALE
    view.assert_consistent()


def test_the_report_of_the_killed_process_may_come_first(engine: Engine, view: FarmView) -> None:
    # given a frame without retries whose RQD reports its end while it is being killed
    run = start(view, max_retries=0)

    class Quick(ScriptedKiller):
        def stop(self, host_name: str, frame_id: str, proc_id: str, reason: str) -> Fate:
            complete_frame(engine, run.report(exit_status=1, exit_signal=9))
            return Fate.NOT_RUNNING

    control = JobControl(Releaser(engine), Quick())
    assert control.retry_frames(run.frames, reason="test").changed == run.frames
    assert view.states(run.frames) == ["WAITING"]
    view.assert_consistent()


@pytest.mark.parametrize("layer", [0, 1])
def test_a_retried_frame_is_waited_for_again(view: FarmView, control: JobControl, engine: Engine, layer: int) -> None:
    # given a finished job whose second layer needed the first, frame by frame and as a whole
    run = start(view, LayerSpec(frames=1), LayerSpec(frames=1), running=1)
    with view.farm() as farm:
        farm.layer_on_layer((run.job, 1), (run.job, 0))
        farm.frame_by_frame((run.job, 1), (run.job, 0))
    complete_frame(engine, run.report())
    assert view.states(run.job.frames) == ["SUCCEEDED", "WAITING"]
    with view.farm() as farm:
        (proc,) = farm.run([run.job.frames[1]], run.host)
    complete_frame(engine, Running(run.job, run.host, (run.job.frames[1],), (proc,)).report())
    assert view.job_state(run.job) == "FINISHED"
    view.run_sql("UPDATE frame SET str_state = 'WAITING' WHERE pk_frame = :f", f=run.job.frames[1])

    # when the first frame is retried while another session has the counters of one of the layers
    view.run_sql(
        "CREATE SEQUENCE written; CREATE FUNCTION note() RETURNS trigger LANGUAGE plpgsql AS"
        " $$BEGIN PERFORM nextval('written'); RETURN NULL; END$$;"
        " CREATE TRIGGER note BEFORE UPDATE ON frame FOR EACH STATEMENT EXECUTE FUNCTION note()"
    )
    counters = text("SELECT 1 FROM layer_stat WHERE pk_layer = :layer FOR NO KEY UPDATE")
    with engine.connect() as other, ThreadPoolExecutor(1) as threads:
        other.execute(counters, {"layer": run.job.layers[layer].id})
        retried = threads.submit(control.retry_frames, [run.frames[0]], reason="test")
        view.wait_for_waiters(1)
        written = view.one("SELECT is_called FROM written").is_called
        other.rollback()
        retried.result(30)
    assert not written, "no frame changes before the counters of all layers are locked"

    # then the second depends on it again, and the job is pending under its name
    assert view.states(run.job.frames) == ["WAITING", "DEPEND"]
    job = view.one("SELECT * FROM job")
    assert (job.str_state, job.str_visible_name) == ("PENDING", job.str_name)
    assert view.frame(run.job.frames[1]).int_depend_count == 2
    view.assert_consistent()


def test_a_job_is_not_pending_again_while_another_of_its_name_is(view: FarmView, control: JobControl) -> None:
    # given a job that was killed, and one that got its name
    run = start(view, LayerSpec(frames=2), running=0)
    control.kill_job(run.job.id, reason="test")
    view.run_sql("UPDATE frame SET str_state = 'DEAD'")
    with view.farm() as farm:
        other = farm.job(name=run.job.name, show=run.job.show)

    # when a frame of the first is retried, then it is refused with the way out, and nothing has changed
    refusal = f"{run.job.name!r}.*`opencue-sched job kill {other.id}`"
    for hidden in (False, True):
        if hidden:  # as a Cuebot leaves a job that it retried beside another of its name
            view.run_sql("UPDATE job SET str_visible_name = NULL WHERE pk_job = :job", job=other.id)
        with pytest.raises(InvalidInput, match=refusal):
            control.retry_frames(run.job.frames, reason="test")
        assert view.job_state(run.job) == "FINISHED"
        assert view.states(run.job.frames) == ["DEAD", "DEAD"]
        view.assert_consistent()

    # and when the other is over, then it is pending again under its name
    control.kill_job(other.id, reason="test")
    assert control.retry_frames(run.job.frames, reason="test").changed == run.job.frames
    (named,) = view.rows("SELECT pk_job, str_state FROM job WHERE str_visible_name IS NOT NULL")
    assert tuple(named) == (run.job.id, "PENDING")


def test_of_two_who_want_one_name_at_once_the_first_has_it(view: FarmView, control: JobControl) -> None:
    # given a job that was killed, and one of its name that is just being put in
    run = start(view, LayerSpec(frames=1), running=0)
    control.kill_job(run.job.id, reason="test")
    view.run_sql("UPDATE frame SET str_state = 'DEAD'")
    with ThreadPoolExecutor(1) as threads:
        with view.farm() as farm:
            other = farm.job(name=run.job.name, show=run.job.show)
            # when the first is retried before that is committed
            retried = threads.submit(control.retry_frames, run.job.frames, reason="test")
            view.wait_for_waiters(1)
        # then it is refused once it is
        with pytest.raises(InvalidInput, match=other.id):
            retried.result(60)
    assert view.job_state(run.job) == "FINISHED"
    assert view.states(run.job.frames) == ["DEAD"]


def test_eating_the_last_open_frame_finishes_the_job(
    view: FarmView, control: JobControl, engine: Engine, killer: ScriptedKiller
) -> None:
    # given a job with one frame done, one running and one dead
    run = start(view, LayerSpec(frames=3), running=2)
    complete_frame(engine, run.report())
    view.run_sql("UPDATE frame SET str_state = 'DEAD' WHERE pk_frame = :f", f=run.job.frames[2])

    # when all are eaten
    eaten = control.eat_frames(run.job.frames, reason="test")

    # then what had rendered stays so, the rest is EATEN and the job is over
    assert set(eaten.changed) == set(run.job.frames[1:])
    assert view.states(run.job.frames) == ["SUCCEEDED", "EATEN", "EATEN"]
    assert view.job_state(run.job) == "FINISHED"
    assert killer.stopped == [(run.host.name, run.frames[1])]
    view.assert_consistent()


def test_whatever_a_frame_waits_for_it_is_eaten_and_what_succeeded_is_not(view: FarmView, control: JobControl) -> None:
    run = start(view, LayerSpec(frames=5), running=0)
    states = ("WAITING", "DEAD", "DEPEND", "CHECKPOINT", "SUCCEEDED")
    for frame, state in zip(run.job.frames, states, strict=True):
        view.run_sql("UPDATE frame SET str_state = :s WHERE pk_frame = :f", s=state, f=frame)
    assert set(control.eat_frames(run.job.frames, reason="test").changed) == set(run.job.frames[:4])
    assert view.states(run.job.frames) == ["EATEN"] * 4 + ["SUCCEEDED"]
    assert view.job_state(run.job) == "FINISHED"
    view.assert_consistent()


def test_a_frame_whose_process_does_not_die_is_not_eaten(
    view: FarmView, control: JobControl, killer: ScriptedKiller
) -> None:
    run = start(view)
    killer.fate = Fate.UNCONFIRMED
    assert control.eat_frames(run.frames, reason="test").deferred == run.frames
    assert view.states(run.frames) == ["RUNNING"]
