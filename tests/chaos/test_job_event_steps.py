"""Events of jobs: whoever ends a frame, and whoever sends, killed after each single thing it does."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator
from dataclasses import asdict
from itertools import count
from typing import Any

import pytest
from pydantic import SecretStr
from sqlalchemy import Engine

from opencue_sched.clients.lua_scripts import load_script
from opencue_sched.embedded.farms.farm_specs import HostIds, LayerSpec
from opencue_sched.reports.event_receivers import receiver_of
from opencue_sched.reports.job_events import send_events
from opencue_sched.reports.run_ends import CompletedFrame
from opencue_sched.settings import Events
from tests.chaos.forker import forker
from tests.chaos.stepped_pass import COMMIT
from tests.chaos.stepped_task import DELIVERED
from tests.chaos.wire import SCRIPTS
from tests.kit.event_receiver import EventReceiver, event_receiver
from tests.kit.runs import FarmView, Running, complete_frame

Dies = Callable[..., list[str]]


@pytest.fixture
def receiver() -> Iterator[EventReceiver]:
    with event_receiver() as made:
        yield made


@pytest.fixture
def view(engine: Engine) -> FarmView:
    made = FarmView(engine)
    # The tables are ours, whoever made this database: events are sent where there is no Cuebot.
    made.run_sql("UPDATE opencue_sched_origin SET origin = 'opencue-sched'")
    return made


@pytest.fixture
def host(view: FarmView) -> HostIds:
    with view.farm() as farm:
        return farm.host(cores=64, memory_gb=256)


@pytest.fixture
def dies(view: FarmView, receiver: EventReceiver, database_url, redis_server, redis_client) -> Iterator[Dies]:
    """``dies(after, ...)``: what a process had done when it died after so many things; one that has fewer to do, or any
    number with 0, goes to its end."""
    for name in SCRIPTS.values():
        redis_client.script_load(load_script(name).text)
    environment = {
        "OPENCUE_SCHED_DATABASE_URL": database_url,
        "OPENCUE_SCHED_REDIS_URL": redis_server.url,
        "OPENCUE_SCHED_EVENTS__URL": receiver.url,
    }
    with forker("stepped_task", environment) as tasks:

        def dies(after: int, **what: Any) -> list[str]:
            answer = tasks.forks(die_after=after, **what)
            done = list(answer["done"])
            assert answer["status"] == (-9 if len(done) == after else 0), answer
            return done

        yield dies


def tell(engine: Engine, receiver: EventReceiver) -> dict[str, int]:
    """Send what is due, by a process that nothing happens to."""
    to = receiver_of(Events(url=SecretStr(receiver.url)))
    return send_events(engine, to, facility=None, count=lambda *_: None)


def job_that_ends(view: FarmView, host: HostIds) -> Running:
    """Its two frames run: one is going to die, the other to succeed, with which a second job ends."""
    with view.farm() as farm:
        name = uuid.uuid4().hex
        dying = farm.job([LayerSpec(frames=1)], max_retries=0, name=f"dying-{name}")
        ending = farm.job([LayerSpec(frames=1)], name=f"ending-{name}")
        frames = (dying.frames[0], ending.frames[0])
        procs = farm.run(frames, host, cores=1, memory_gb=1)
    return Running(ending, host, frames, tuple(procs))


def waiting(view: FarmView) -> list[Any]:
    return view.rows("SELECT id, event, body FROM opencue_sched_job_event ORDER BY event")


def test_an_event_is_there_exactly_if_what_it_tells_of_has_happened_wherever_a_completion_dies(
    engine: Engine, view: FarmView, host: HostIds, receiver: EventReceiver, dies: Dies
) -> None:
    tell(engine, receiver)
    for step in count(1):
        view.run_sql("DELETE FROM opencue_sched_job_event")
        run = job_that_ends(view, host)
        reports: list[CompletedFrame] = [run.report(0, exit_status=1), run.report(1)]
        # when a process that ends both dies after a step, until one has come to its end,
        fields = [{key: value for key, value in asdict(report).items() if key != "received_at"} for report in reports]
        done = dies(step, complete=fields)
        # then there are both events or none, as both frames have ended or none has
        told = [row.event for row in waiting(view)]
        assert told == (["frame_died", "job_ended"] if COMMIT in done else []), done
        assert view.states(run.frames) == (["DEAD", "SUCCEEDED"] if COMMIT in done else ["RUNNING", "RUNNING"])
        # and when the reports come again, there is one of each
        for report in reports:
            complete_frame(engine, report)
        assert [row.event for row in waiting(view)] == ["frame_died", "job_ended"]
        if len(done) < step:
            break
    assert step > 3


def test_nothing_is_lost_wherever_a_sender_dies_and_it_comes_twice_with_one_id_at_most(
    engine: Engine, view: FarmView, host: HostIds, receiver: EventReceiver, dies: Dies, redis_client: Any
) -> None:
    tell(engine, receiver)
    for step in count(1):
        # given an event that was never sent, and one that was refused before
        receiver.got.clear()
        run = job_that_ends(view, host)
        complete_frame(engine, run.report(0, exit_status=1))
        complete_frame(engine, run.report(1))
        view.run_sql("UPDATE opencue_sched_job_event SET tries = 1 WHERE event = 'frame_died'")
        ids = {row.id for row in waiting(view)}
        # when a sender dies after a step, until one has come to its end,
        redis_client.flushdb()
        done = dies(step, task="send_events")
        # then each event is either with the receiver or still there, and what nobody has got is never gone
        got, left = set(receiver.ids), {row.id for row in waiting(view)}
        assert len(receiver.ids) == done.count(DELIVERED) or len(done) == step
        assert got | left == ids, done
        # and what is still there comes with the next sender, once its time has come: twice at most
        view.run_sql("UPDATE opencue_sched_job_event SET due_at = clock_timestamp()")
        tell(engine, receiver)
        assert waiting(view) == []
        assert set(receiver.ids) == ids
        assert max(map(receiver.ids.count, ids)) <= 2
        if len(done) < step:
            assert done.count(DELIVERED) == 2
            break
    assert step > 8


def test_a_sender_that_dies_while_the_receiver_hangs_delays_no_end_and_loses_nothing(
    engine: Engine, view: FarmView, host: HostIds, receiver: EventReceiver, dies: Dies
) -> None:
    # given a receiver that hangs at the first event
    tell(engine, receiver)
    first, second = job_that_ends(view, host), job_that_ends(view, host)
    complete_frame(engine, first.report(1))
    receiver.answer = lambda _told: None
    # when a sender dies right after it had taken that event
    done = dies(0, task="send_events")
    asked = next(place for place, what in enumerate(done) if what.startswith("UPDATE opencue_sched_job_event"))
    taken = done.index(COMMIT, asked)
    view.run_sql("UPDATE opencue_sched_job_event SET due_at = clock_timestamp(), tries = 0")
    dies(taken + 1, task="send_events")
    # then another frame ends as ever, and once the receiver answers both events come
    assert complete_frame(engine, second.report(1)).state is not None
    receiver.answer = lambda _told: 200
    receiver.got.clear()
    view.run_sql("UPDATE opencue_sched_job_event SET due_at = clock_timestamp()")
    tell(engine, receiver)
    assert {told["job"]["id"] for told in receiver.got} == {first.job.id, second.job.id}
