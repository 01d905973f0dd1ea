"""A job that ends, and its first frame that dies, are told to the farm's own receiver: at least once, and in nobody's
way."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from pydantic import SecretStr
from sqlalchemy import Engine
from structlog.testing import capture_logs

from opencue_sched.embedded.farms.farm_specs import LayerSpec
from opencue_sched.jobs.control import JobControl
from opencue_sched.reports.completion import Releaser
from opencue_sched.reports.event_receivers import receiver_of
from opencue_sched.reports.job_events import (
    FIRST_REPEAT_SECONDS,
    LONGEST_AGE_SECONDS,
    MOST_TRIES,
    PLACES,
    SendTimes,
    send_events,
)
from opencue_sched.reports.reaper import reap
from opencue_sched.reports.recovery import recover_depends
from opencue_sched.reports.run_ends import LostRun
from opencue_sched.rqd.kill import Fate
from opencue_sched.settings import Events, Release
from opencue_sched.store import job_events
from tests.kit.counted import Counted
from tests.kit.event_receiver import EventReceiver, event_receiver
from tests.kit.polling import eventually
from tests.kit.runs import FarmView, Running, ScriptedKiller, complete_frame, start
from tests.kit.statements import listening

IMPATIENT = SendTimes(patience=2.0)


@pytest.fixture
def receiver() -> Iterator[EventReceiver]:
    with event_receiver() as made:
        yield made


@pytest.fixture
def send(engine: Engine, receiver: EventReceiver) -> Callable[..., dict[str, int]]:
    """Send what is due to ``receiver``, or as the given settings say, in the way of the task; its figures."""

    def send(
        events: Events | None = None,
        count: Callable[..., object] = lambda *_: None,
        times: SendTimes = IMPATIENT,
        **how: Any,
    ) -> Any:
        to = receiver_of(events or Events(url=SecretStr(receiver.url)))
        return send_events(engine, to, facility=None, count=count, times=times, **how)

    send()  # from now on it is known that somebody is to be told
    return send


def several(view: FarmView, jobs: int) -> list[Running]:
    """Jobs of one frame each, which run on one host."""
    with view.farm() as farm:
        host = farm.host(cores=64, memory_gb=256)
        made = [farm.job([LayerSpec(frames=1)]) for _ in range(jobs)]
        procs = farm.run([job.frames[0] for job in made], host, cores=1, memory_gb=1)
    return [Running(job, host, job.frames, (proc,)) for job, proc in zip(made, procs, strict=True)]


def due_now(view: FarmView) -> None:
    view.run_sql("UPDATE opencue_sched_job_event SET due_at = clock_timestamp()")


def waiting(view: FarmView) -> list[str]:
    return [row.event for row in view.rows("SELECT event FROM opencue_sched_job_event ORDER BY made_at, event")]


def test_the_end_of_a_job_is_told_once_with_what_became_of_its_frames(
    engine: Engine, view: FarmView, receiver: EventReceiver, send: Callable[..., Any]
) -> None:
    # given a job of two frames that run
    run = start(view, LayerSpec(frames=2), running=2)

    # when the first ends, then nothing is told
    complete_frame(engine, run.report(0))
    assert send() == {"sent": 0, "failed": 0, "dropped": 0}

    # when the last one ends, then it is told once, with the job and its frames
    complete_frame(engine, run.report(1))
    assert send() == {"sent": 1, "failed": 0, "dropped": 0}
    assert send()["sent"] == 0
    (told,) = receiver.got
    job = view.one("SELECT * FROM job JOIN show USING (pk_show) WHERE pk_job = :job", job=run.job.id)
    assert told["event"] == "job_ended"
    assert told["job"] == {
        "id": run.job.id,
        "name": run.job.name,
        "show": run.job.show.name,
        "shot": job.str_shot,
        "user": job.str_user,
        "facility": "local",
    }
    assert told["frames"] == {"succeeded": 2, "eaten": 0, "dead": 0, "unfinished": 0}
    assert told["id"]
    assert told["at"].endswith("Z")
    assert receiver.headers["Content-Type"] == "application/json"
    assert waiting(view) == []


def test_the_first_frame_that_dies_is_told_once_until_it_is_retried(
    engine: Engine, view: FarmView, receiver: EventReceiver, send: Callable[..., Any]
) -> None:
    # given a job whose frames are not tried again
    run = start(view, LayerSpec(frames=4), running=3, max_retries=0)

    # when two frames die, and another later
    Releaser(engine).end([run.report(0, exit_status=7), run.report(1, exit_status=8)])
    complete_frame(engine, run.report(2, exit_status=9))

    # then one is told
    send()
    (told,) = receiver.got
    assert told["event"] == "frame_died"
    assert told["job"]["id"] == run.job.id
    assert told["frame"]["id"] in run.frames[:2]
    assert told["frame"]["exit_status"] in (7, 8)
    assert told["frame"]["layer"] == run.job.layers[0].name
    assert told["frame"]["host"] == run.host.name

    # when they are retried and one dies again, then that is told anew, with another id
    control = JobControl(Releaser(engine), ScriptedKiller())
    control.retry_frames(list(run.frames), reason="a test")
    with view.farm() as farm:
        (proc,) = farm.run([run.frames[0]], run.host)
    again = Running(run.job, run.host, run.frames[:1], (proc,))
    complete_frame(engine, again.report(0, exit_status=7))
    send()
    assert receiver.kinds() == ["frame_died", "frame_died"]
    assert len(set(receiver.ids)) == 2


def test_a_frame_that_waits_again_is_not_told(
    engine: Engine, view: FarmView, receiver: EventReceiver, send: Callable[..., Any]
) -> None:
    run = start(view, max_retries=3)
    complete_frame(engine, run.report(0, exit_status=7))
    assert waiting(view) == []


def ended_by_kill(engine: Engine, run: Running, _view: FarmView) -> None:
    JobControl(Releaser(engine), ScriptedKiller()).kill_job(run.job.id, reason="a test")


def ended_by_eating(engine: Engine, run: Running, _view: FarmView) -> None:
    JobControl(Releaser(engine), ScriptedKiller()).eat_frames(list(run.job.frames), reason="a test")


def ended_by_recovery(engine: Engine, run: Running, view: FarmView) -> None:
    view.run_sql("DELETE FROM proc")
    view.run_sql("UPDATE frame SET str_state = 'SUCCEEDED' WHERE pk_job = :job", job=run.job.id)
    view.run_sql("UPDATE job SET ts_started = now() - interval '5 minutes' WHERE pk_job = :job", job=run.job.id)
    recover_depends(engine, Release())


@pytest.mark.parametrize("end", [ended_by_kill, ended_by_eating, ended_by_recovery])
def test_a_job_is_told_of_whatever_ends_it(
    engine: Engine,
    view: FarmView,
    receiver: EventReceiver,
    send: Callable[..., Any],
    end: Callable[[Engine, Running, FarmView], None],
) -> None:
    run = start(view, LayerSpec(frames=2))
    end(engine, run, view)
    assert view.job_state(run.job) == "FINISHED"
    send()
    assert receiver.kinds() == ["job_ended"]
    assert receiver.got[0]["job"]["id"] == run.job.id


def test_a_frame_that_is_killed_with_its_job_is_not_told(
    engine: Engine, view: FarmView, receiver: EventReceiver, send: Callable[..., Any]
) -> None:
    # given a job without retries, that is killed while its RQD does not answer
    run = start(view, LayerSpec(frames=2), max_retries=0)
    JobControl(Releaser(engine), ScriptedKiller(Fate.UNREACHABLE)).kill_job(run.job.id, reason="a test")

    # when its frame ends by the kill, then the job's end alone is told
    complete_frame(engine, run.report(exit_status=1, exit_signal=9))
    assert view.states(run.frames) == ["DEAD"]
    send()
    assert receiver.kinds() == ["job_ended"]

    # when the other frame is retried and dies, then that is told
    control = JobControl(Releaser(engine), ScriptedKiller())
    control.retry_frames([run.job.frames[1]], reason="a test")
    with view.farm() as farm:
        (proc,) = farm.run([run.job.frames[1]], run.host)
    again = Running(run.job, run.host, run.job.frames[1:], (proc,))
    complete_frame(engine, again.report(exit_status=7))
    send()
    assert receiver.kinds() == ["job_ended", "frame_died"]


def test_a_frame_that_the_reaper_gives_up_is_told(
    engine: Engine, view: FarmView, receiver: EventReceiver, send: Callable[..., Any]
) -> None:
    # given a run that has been silent for hours on a host that is up and does not answer
    run = start(view)
    view.run_sql("UPDATE proc SET ts_ping = now() - interval '5 hours'")
    # when it is reaped, then its frame is dead, and that is told
    assert reap(Releaser(engine), ScriptedKiller(Fate.UNREACHABLE)).frames_dead == 1  # type: ignore[arg-type]
    send()
    assert receiver.kinds() == ["frame_died"]
    assert receiver.got[0]["frame"]["id"] == run.frames[0]


def test_nothing_is_written_where_nobody_is_to_be_told(engine: Engine, view: FarmView) -> None:
    run = start(view, LayerSpec(frames=1))
    Releaser(engine).end([LostRun(run.procs[0], run.frames[0], reason="a test")])
    JobControl(Releaser(engine), ScriptedKiller()).kill_job(run.job.id, reason="a test")
    assert waiting(view) == []


def test_a_receiver_that_hangs_delays_no_completion_and_no_other_event(
    engine: Engine, view: FarmView, receiver: EventReceiver, send: Callable[..., Any]
) -> None:
    # given a receiver that hangs at the event of the first job alone
    runs = several(view, 12)
    hung = runs[0].job.id
    receiver.answer = lambda told: None if told["job"]["id"] == hung else 204
    complete_frame(engine, runs[0].report())

    # when others end while it hangs, the first of them in the very moment of the sending
    ended_meanwhile: list[str] = []
    answer = receiver.answer

    def ends_another(told: dict[str, Any]) -> int | None:
        if told["job"]["id"] == hung and not ended_meanwhile:
            for run in runs[1:]:
                assert complete_frame(engine, run.report()).state is not None
                ended_meanwhile.append(run.job.id)
        return answer(told)

    receiver.answer = ends_another
    figures = send()
    figures = {key: figures[key] + value for key, value in send().items()}

    # then all of them have ended, and all were told past the one that hangs, which is to be tried again
    assert ended_meanwhile == [run.job.id for run in runs[1:]]
    assert figures == {"sent": 11, "failed": 1, "dropped": 0}
    assert {told["job"]["id"] for told in receiver.got} == {run.job.id for run in runs}
    (left,) = view.rows("SELECT tries, last_error FROM opencue_sched_job_event")
    assert (left.tries, "2 s" in left.last_error) == (1, True)


def test_events_that_hang_again_and_again_leave_the_way_free_for_new_ones(
    engine: Engine, view: FarmView, receiver: EventReceiver, send: Callable[..., Any]
) -> None:
    # given more events that hang than are sent at a time
    runs = several(view, 13)
    hanging, fresh = runs[:10], runs[10:]
    for run in hanging:
        complete_frame(engine, run.report())
    view.run_sql("UPDATE opencue_sched_job_event SET tries = 1")
    receiver.answer = lambda told: None if told["job"]["id"] in {run.job.id for run in hanging} else 200

    # when new ones come, then they are sent in the same call
    for run in fresh:
        complete_frame(engine, run.report())
    assert send(times=replace(IMPATIENT, run=1.0))["sent"] == 3


@pytest.mark.parametrize("tried", [0, 1])
def test_events_that_hang_at_their_first_try_delay_no_other(
    engine: Engine, view: FarmView, receiver: EventReceiver, send: Callable[..., Any], tried: int
) -> None:
    # given more events that hang than are sent at a time, and others after them; all new, or all tried before
    runs = several(view, 2 * PLACES + 8)
    hanging, others = runs[:-3], runs[-3:]
    hung = {run.job.id for run in hanging}
    receiver.answer = lambda told: None if told["job"]["id"] in hung else 200
    for run in runs:
        complete_frame(engine, run.report())
    view.run_sql("UPDATE opencue_sched_job_event SET tries = :tried", tried=tried)

    # when they are sent, then the others are in the same call
    figures = send(times=replace(IMPATIENT, hanging=0.2))
    assert figures == {"sent": len(others), "failed": len(hanging), "dropped": 0}
    assert len(waiting(view)) == len(hanging)


def test_another_process_may_send_while_the_last_attempts_of_one_hang(
    engine: Engine, view: FarmView, receiver: EventReceiver, send: Callable[..., Any]
) -> None:
    # given an event that hangs, and a call that is to begin nothing after the first look
    hangs, other = several(view, 2)
    receiver.answer = lambda told: None if told["job"]["id"] == hangs.job.id else 200
    complete_frame(engine, hangs.report())

    # when an event is written while that hangs, then another call sends it, before the first has ended
    answers, others = iter((False, True)), []

    def begins_no_more() -> None:
        complete_frame(engine, other.report())
        others.append(send())

    first = send(stopping=lambda: next(answers, True), begins_no_more=begins_no_more)
    assert others == [{"sent": 1, "failed": 0, "dropped": 0}]
    assert first == {"sent": 0, "failed": 1, "dropped": 0}


def test_events_are_sent_in_few_transactions(
    engine: Engine, view: FarmView, receiver: EventReceiver, send: Callable[..., Any]
) -> None:
    for run in several(view, 48):
        complete_frame(engine, run.report())
    commits: list[object] = []
    with listening(engine, "commit", commits.append):
        assert send()["sent"] == 48
    assert len(commits) < 48 / 2


def test_what_is_refused_is_tried_again_later_and_later_and_given_up_in_the_end(
    engine: Engine, view: FarmView, receiver: EventReceiver, send: Callable[..., Any]
) -> None:
    complete_frame(engine, start(view, LayerSpec(frames=1)).report())
    receiver.answer = lambda _told: 503
    counts, waits = Counted(), []
    for _ in range(MOST_TRIES):
        send(count=counts)
        (row,) = view.rows(
            "SELECT tries, last_error, extract(epoch FROM due_at - clock_timestamp()) AS wait"
            " FROM opencue_sched_job_event"
        )
        waits.append(float(row.wait))
        # not at once again
        assert send()["failed"] == 0
        due_now(view)
    assert "503" in row.last_error
    assert waits[0] > FIRST_REPEAT_SECONDS / 2
    assert waits[3] > 2 * waits[1]
    # when it has been tried often enough, then it is dropped
    assert send(count=counts) == {"sent": 0, "failed": 0, "dropped": 1}
    assert counts == {"failed": MOST_TRIES, "dropped": 1}
    assert set(receiver.ids) == {receiver.got[0]["id"]}


def test_an_event_grows_no_older_than_a_day(
    engine: Engine, view: FarmView, receiver: EventReceiver, send: Callable[..., Any]
) -> None:
    complete_frame(engine, start(view, LayerSpec(frames=1)).report())
    view.run_sql(
        "UPDATE opencue_sched_job_event SET made_at = clock_timestamp() - make_interval(secs => :age)",
        age=LONGEST_AGE_SECONDS + 60,
    )
    with capture_logs() as logs:
        assert send() == {"sent": 0, "failed": 0, "dropped": 1}
    assert receiver.got == []
    assert [line["event"] for line in logs] == ["job_events_dropped"]


def test_a_redirect_is_not_followed(
    engine: Engine, view: FarmView, receiver: EventReceiver, send: Callable[..., Any]
) -> None:
    complete_frame(engine, start(view, LayerSpec(frames=1)).report())
    receiver.answer = lambda _told: 302
    receiver.extra = {"Location": "/elsewhere"}
    assert send()["failed"] == 1
    assert len(receiver.paths) == 1


def test_an_answer_is_read_no_further_than_it_may_be_long(
    engine: Engine, view: FarmView, receiver: EventReceiver, send: Callable[..., Any]
) -> None:
    complete_frame(engine, start(view, LayerSpec(frames=1)).report())
    receiver.body = bytes(2 * 1024 * 1024)
    assert send()["failed"] == 1
    (left,) = view.rows("SELECT last_error FROM opencue_sched_job_event")
    assert left.last_error


def test_no_log_and_no_error_shows_the_url(
    engine: Engine, view: FarmView, receiver: EventReceiver, send: Callable[..., Any]
) -> None:
    complete_frame(engine, start(view, LayerSpec(frames=1)).report())
    port = receiver.port
    nobody = f"http://me:secret-word@127.0.0.1:{port}/secret-path?key=secret-key"
    receiver.answer = lambda _told: 500
    events = Events(url=SecretStr(nobody))
    with capture_logs() as logs:
        assert send(events)["failed"] == 1
        due_now(view)
        closed = Events(url=SecretStr("http://me:secret-word@127.0.0.1:1/secret-path?key=secret-key"))
        assert send(closed)["failed"] == 1
    (left,) = view.rows("SELECT * FROM opencue_sched_job_event")
    assert "secret" not in repr((logs, left, events))
    assert "127.0.0.1:1/" in repr(logs)
    assert receiver.headers["Authorization"].startswith("Basic ")


def test_a_command_gets_the_event_on_standard_input_and_no_shell_reads_its_arguments(
    engine: Engine, view: FarmView, send: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OPENCUE_SCHED_DATABASE_URL", "postgresql://cuebot:secret@db/cuebot")
    run = start(view, LayerSpec(frames=1))
    complete_frame(engine, run.report())
    got = tmp_path / "got"
    script = (
        "import os, sys; open(sys.argv[1], 'w').write(sys.stdin.read() + '\\n' + sys.argv[2] + str(dict(os.environ)))"
    )
    assert send(Events(command=(sys.executable, "-c", script, str(got), "$(id); *")))["sent"] == 1
    told, rest = got.read_text().split("\n", 1)
    assert json.loads(told)["job"]["id"] == run.job.id
    assert rest.startswith("$(id); *")
    assert "secret" not in rest


@pytest.mark.parametrize(
    ("command", "why"),
    [
        ((sys.executable, "-c", "raise SystemExit(3)"), " 3"),
        ((sys.executable, "-c", "import os; os.abort()"), " 6"),
        (("/nowhere/at/all",), "No such file or directory"),
    ],
)
def test_a_command_that_fails_is_tried_again(
    engine: Engine, view: FarmView, send: Callable[..., Any], command: tuple[str, ...], why: str
) -> None:
    complete_frame(engine, start(view, LayerSpec(frames=1)).report())
    assert send(Events(command=command))["failed"] == 1
    (left,) = view.rows("SELECT tries, last_error FROM opencue_sched_job_event")
    assert left.tries == 1
    assert why in left.last_error


def test_a_command_that_hangs_ends_with_all_it_has_started(
    engine: Engine, view: FarmView, send: Callable[..., Any], tmp_path: Path
) -> None:
    complete_frame(engine, start(view, LayerSpec(frames=1)).report())
    pids = tmp_path / "pids"
    script = (
        "import os, subprocess, sys, time;"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)']);"
        "open(sys.argv[1], 'w').write(f'{os.getpid()} {child.pid}'); time.sleep(600)"
    )
    # Long enough for two processes to start on a busy machine.
    times = SendTimes(patience=6.0)
    assert send(Events(command=(sys.executable, "-c", script, str(pids))), times=times)["failed"] == 1
    for pid in pids.read_text().split():
        # A process that is killed may get its turn once more before it ends.
        eventually(partial(has_ended, pid), what=f"the end of process {pid}")


def has_ended(pid: str) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().split()[2] == "Z"
    except (FileNotFoundError, ProcessLookupError):
        return True


def test_a_fleet_tells_of_its_own_facility_alone(engine: Engine, view: FarmView, receiver: EventReceiver) -> None:
    # given receivers in two fleets, and a job of a facility
    to = receiver_of(Events(url=SecretStr(receiver.url)))
    for facility in ("far", "local"):
        send_events(engine, to, facility=facility, count=lambda *_: None)
    complete_frame(engine, start(view, LayerSpec(frames=1)).report())
    assert send_events(engine, to, facility="far", count=lambda *_: None)["sent"] == 0
    assert send_events(engine, to, facility="local", count=lambda *_: None)["sent"] == 1


def test_what_waits_is_known(engine: Engine, view: FarmView, receiver: EventReceiver, send: Callable[..., Any]) -> None:
    refused, untried = several(view, 2)
    complete_frame(engine, refused.report())
    receiver.answer = lambda _told: 500
    send()
    complete_frame(engine, untried.report())
    with engine.connect() as connection:
        found = job_events.undelivered(connection, after=0.0)
    assert (found.untried, found.refused, "500" in found.last_error) == (1, 1, True)
