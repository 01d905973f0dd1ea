"""Events of jobs in a real fleet: told at once, whoever ends the job."""

from __future__ import annotations

from pathlib import Path

import redis
from sqlalchemy import Engine

from opencue_sched.embedded.farms.farm_specs import LayerSpec
from opencue_sched.settings import Settings
from tests.e2e.fleets import SHORT_TIMES
from tests.kit.brief_fleet import brief_fleet, open_counters
from tests.kit.event_receiver import EventReceiver, event_receiver
from tests.kit.listening import eventually_listen
from tests.kit.polling import eventually
from tests.kit.runs import FarmView, Running, complete_frame


def told(receiver: EventReceiver) -> list[str]:
    """The jobs that the receiver was told of, by id."""
    return [event["job"]["id"] for event in receiver.got]


def test_an_event_is_sent_at_once_where_no_beat_asks_for_it(
    settings: Settings, engine: Engine, redis_client: redis.Redis, tmp_path: Path
) -> None:
    # given two jobs, and two workers with a receiver, in a fleet without a beat
    view = FarmView(engine)
    with view.farm() as farm:
        host, jobs = farm.host(), [farm.job([LayerSpec(frames=1)]) for _ in range(2)]
        procs = farm.run([job.frames[0] for job in jobs], host)
    running = [Running(job, host, job.frames, (proc,)) for job, proc in zip(jobs, procs, strict=True)]
    view.run_sql("UPDATE opencue_sched_origin SET origin = 'opencue-sched'")
    open_counters(redis_client)
    with event_receiver() as receiver:
        environment = {
            **SHORT_TIMES,
            "OPENCUE_SCHED_DATABASE_URL": settings.sqlalchemy_url,
            "OPENCUE_SCHED_REDIS_URL": settings.redis_dsn,
            "OPENCUE_SCHED_EVENTS__URL": receiver.url,
        }
        with brief_fleet(environment, tmp_path) as fleet:
            fleet.worker("worker1")
            fleet.worker("worker2")
            eventually_listen(engine, 2)

            # when one job after the other ends, then each is told, once
            for run in running:
                complete_frame(engine, run.report())
                eventually(lambda job=run.job.id: job in told(receiver), 20, "the event")
            eventually(lambda: not view.rows("SELECT FROM opencue_sched_job_event"), 20, "nothing left to send")
    assert told(receiver) == [job.id for job in jobs]
