"""A worker that dies after it has noted that events of jobs have a receiver, and before it hears of any."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing

import pytest
from sqlalchemy import make_url

from opencue_sched.embedded.farms.farm_specs import LayerSpec
from tests.chaos.conftest import Site
from tests.kit.event_receiver import EventReceiver, event_receiver
from tests.kit.listening import eventually_listen
from tests.kit.lossy_proxy import LossyProxy
from tests.kit.polling import MOST_SECONDS, eventually
from tests.kit.runs import FarmView, Running, complete_frame


@pytest.fixture
def receiver() -> Iterator[EventReceiver]:
    with event_receiver() as made:
        yield made


def start_worker(site: Site, receiver: EventReceiver, name: str, **environment: str) -> None:
    site.fleet.worker(name, OPENCUE_SCHED_EVENTS__URL=receiver.url, **environment)


def dies_before_it_hears(site: Site, receiver: EventReceiver) -> None:
    """Start a worker that gets no further than to ask PostgreSQL for notifications, and kill it."""
    url = make_url(site.settings.sqlalchemy_url)
    assert url.host is not None and url.port is not None
    with closing(LossyProxy(url.host, url.port)) as proxy:
        through = url.set(host="127.0.0.1", port=proxy.port).render_as_string(hide_password=False)
        proxy.hold("LISTEN")
        start_worker(site, receiver, "died", OPENCUE_SCHED_DATABASE_URL=through)
        assert proxy.holds.wait(MOST_SECONDS), "the worker did not ask for notifications"
        site.fleet.processes.pop("died").kill()


def test_events_of_the_time_in_which_nobody_hears_reach_the_receiver_of_the_next_worker(
    site: Site, receiver: EventReceiver
) -> None:
    view = FarmView(site.engine)
    with view.farm() as farm:
        host, jobs = farm.host(), [farm.job([LayerSpec(frames=1)]) for _ in range(2)]
        procs = farm.run([job.frames[0] for job in jobs], host)
    first, second = (Running(job, host, job.frames, (proc,)) for job, proc in zip(jobs, procs, strict=True))
    view.run_sql("UPDATE opencue_sched_origin SET origin = 'opencue-sched'")

    # given a fleet whose only worker has noted that there is a receiver, and died before it heard of an event
    dies_before_it_hears(site, receiver)
    assert len(view.rows("SELECT FROM opencue_sched_receiver")) == 1

    # when a job ends, then this is written, and waits
    assert complete_frame(site.engine, first.report()).state == "SUCCEEDED"
    assert [row.body["job"]["id"] for row in view.rows("SELECT body FROM opencue_sched_job_event")] == [first.job.id]

    # when the next worker has started, and another job ends
    start_worker(site, receiver, "next")
    eventually_listen(site.engine)
    complete_frame(site.engine, second.report())

    # then its receiver gets both events, each once, and nothing is left of either
    eventually(lambda: not view.rows("SELECT FROM opencue_sched_job_event"), what="nothing left to send")
    assert sorted(told["job"]["id"] for told in receiver.got) == sorted((first.job.id, second.job.id))
    assert len(view.rows("SELECT FROM opencue_sched_receiver")) == 1
