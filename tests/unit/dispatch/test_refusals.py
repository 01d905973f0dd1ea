"""Who is blamed for a frame that RQD does not take."""

from __future__ import annotations

from opencue_proto import rqd_pb2

from opencue_sched.dispatch.refusals import Refusals
from opencue_sched.errors import RqdFailure
from opencue_sched.rqd.launch import LaunchOutcome, LaunchRequest

UID = "Not launching, will not run frame as uid=0"


def request(proc: str, host: str) -> LaunchRequest:
    """Of a frame of the job and the layer that are in the proc's name."""
    job = proc[0]
    return LaunchRequest(host, rqd_pb2.RunFrame(resource_id=proc, job_id=job, layer_id=f"layer of {job}"))


def refused(proc: str, host: str, words: str = UID, *, answered: bool = True, sends: int = 2) -> LaunchOutcome:
    error = RqdFailure(f"{host}: {words}", outcome_unknown=False)
    return LaunchOutcome(request(proc, host), sends, error, answered)


def launched(proc: str, host: str) -> LaunchOutcome:
    return LaunchOutcome(request(proc, host), 1, answered=True)


def test_a_layer_and_a_host_that_refuses_it_are_kept_apart_longer_each_time_and_go_on_with_others():
    now = [0.0]
    refusals = Refusals(clock=lambda: now[0])
    apart = []
    # given a host that refuses a layer whenever it is asked, several frames at once
    for _ in range(6):
        blame = refusals.blame([refused("a0", "h1"), refused("a1", "h1"), refused("a2", "h1", "still")])
        assert (blame.jobs, blame.hosts) == ({}, frozenset())
        (((layer, host), words),) = refusals.apart.active().items()
        assert (layer, host) == ("layer of a", "h1")
        assert UID in words
        began = now[0]
        while refusals.apart.active():
            now[0] += 1
        apart.append(now[0] - began)
    assert apart == [5, 10, 20, 40, 60, 60]

    # when the host takes a frame of it, then it begins anew
    refusals.blame([refused("a0", "h1")])
    refusals.blame([launched("a1", "h1")])
    assert refusals.apart.active() == {}
    refusals.blame([refused("a2", "h1")])
    now[0] += 5
    assert refusals.apart.active() == {}


def test_a_host_that_refuses_several_jobs_rests_unless_it_takes_a_frame_between():
    refusals = Refusals()
    assert refusals.blame([refused("a0", "h1"), refused("b0", "h1")]).hosts == frozenset()
    assert refusals.blame([refused("c0", "h1")]).hosts == {"h1"}
    refusals.blame([refused("a1", "h2"), refused("b1", "h2")])
    refusals.blame([launched("d0", "h2")])
    assert refusals.blame([refused("c1", "h2")]).hosts == frozenset()


def test_what_a_host_lacks_for_one_job_is_not_the_hosts_fault():
    words = "Not launching, insufficient hyperthreading cores available"
    blame = Refusals().blame([refused(f"a{n}", f"h{n}", words) for n in range(3)])
    assert (blame.jobs.keys(), blame.hosts) == ({"a"}, frozenset())


def test_a_job_three_hosts_refuse_is_blamed_in_their_words_and_they_are_not():
    refusals = Refusals()
    refusals.blame([refused("a0", "h1")])
    blame = refusals.blame([refused("a1", "h2"), refused("a2", "h3"), launched("b0", "h3")])
    assert blame.jobs.keys() == {"a"}
    assert UID in blame.jobs["a"]
    assert blame.hosts == frozenset()
    # and after its time it is given another chance
    assert refusals.blame([refused("a3", "h1")]).jobs == {}


def test_a_launched_frame_clears_its_job():
    refusals = Refusals()
    refusals.blame([refused("a0", "h1"), refused("a1", "h2")])
    refusals.blame([launched("a2", "h4")])
    assert refusals.blame([refused("a3", "h3")]).jobs == {}


def test_refusals_of_an_hour_ago_do_not_count():
    now = [0.0]
    refusals = Refusals(clock=lambda: now[0])
    refusals.blame([refused("a0", "h1"), refused("a1", "h2")])
    now[0] = 3600.0
    assert refusals.blame([refused("a2", "h3")]).jobs == {}


def test_hosts_that_say_what_they_lack_or_nothing_at_all_are_at_fault_themselves():
    words = (
        "Not launching, rqd HardwareState is not Up",
        "Not launching, rqd is waiting for idle to shutdown",
        "Not launching, rqd is lockNimby and not Ignore Nimby",
        "Not launching, insufficient idle cores",
    )
    outcomes = [refused(f"a{number}", f"h{number}", text) for number, text in enumerate(words)]
    outcomes.append(refused("a8", "h8", "failed to connect to all addresses", answered=False))
    blame = Refusals().blame(outcomes)
    assert (blame.jobs, blame.hosts) == ({}, {"h0", "h1", "h2", "h3", "h8"})


def test_a_host_that_fails_for_others_too_rests_although_a_blamed_job_was_there():
    outcomes = [refused("a0", "h1"), refused("a1", "h2"), refused("a2", "h3"), refused("b0", "h3", "shutdown")]
    blame = Refusals().blame(outcomes)
    assert (blame.jobs.keys(), blame.hosts) == ({"a"}, {"h3"})


def test_what_was_not_sent_says_nothing_of_its_host():
    blame = Refusals().blame([refused("a0", "h1", "not sent: its turn did not come", answered=False, sends=0)])
    assert (blame.jobs, blame.hosts) == ({}, frozenset())
