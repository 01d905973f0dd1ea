"""What a worker tells the fleet of hosts whose RQDs do not answer it."""

from __future__ import annotations

from contextlib import closing

from celery import Celery
from redis import Redis

from opencue_sched.coordination.presence import list_members
from opencue_sched.rqd.kill import RunningFrameRef, look
from opencue_sched.settings import Rqd, Settings
from opencue_sched.worker.membership import MOST_UNREACHED, Membership
from opencue_sched.worker.process import Process
from tests.kit.wording import lacks


def test_a_worker_names_the_hosts_that_do_not_answer_it_with_its_heartbeat(
    settings: Settings, redis_client: Redis
) -> None:
    # given a worker whose calls to a host get no answer
    nobody = Rqd(addresses={"render01": "127.0.0.1:1"}, timeout=2.0)
    app = Celery("unreached", broker="memory://", set_as_current=False)
    with closing(app), closing(Process(settings.model_copy(update={"rqd": nobody}), app)) as worker:
        for _ in range(2):
            look(worker.channels, RunningFrameRef("render01", "", ""))
        worker.membership.join("w1@here", queues=lambda: ("cue:q:work:type:dispatch",), capacity=4)
        # when it says that it is alive
        worker.membership.heartbeat()
        # then everybody can read it
        (actor,) = list_members(redis_client, "cue").alive
        ((host, words),) = actor.unreached
        assert (host, lacks(words, "127.0.0.1:1", "UNAVAILABLE")) == ("render01", [])


def test_of_many_such_hosts_it_names_some_and_counts_the_others(settings: Settings, redis_client: Redis) -> None:
    # given a worker that does not reach more hosts than its record names
    hosts = [(f"render{number:02}", "(somewhere) does not answer") for number in range(MOST_UNREACHED + 7)]
    member = Membership(redis_client, settings, work=tuple, unreached=lambda: hosts)
    member.join("w1@here", queues=lambda: ("cue:q:work:type:dispatch",), capacity=4)
    # when it says that it is alive, and again when it reaches them
    for expected in ((MOST_UNREACHED, 7), (0, 0)):
        member.heartbeat()
        # then everybody can read how many they are
        (actor,) = list_members(redis_client, "cue").alive
        assert (len(actor.unreached), actor.more_unreached) == expected
        hosts.clear()
