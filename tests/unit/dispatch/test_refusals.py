"""Who is blamed for a frame that RQD does not take."""

from __future__ import annotations

from opencue_sched.dispatch.launch import LaunchOutcome, LaunchState
from opencue_sched.dispatch.refusals import Refusals
from opencue_sched.domain.errors import RqdFailure

UID = "Not launching, will not run frame as uid=0"
JOBS = {f"{job}{number}": job for job in "ab" for number in range(10)}


def refused(proc: str, host: str, words: str = UID, *, answered: bool = True, sends: int = 2) -> LaunchOutcome:
    error = RqdFailure(f"{host}: {words}", outcome_unknown=False, proc_id=proc, host=host)
    return LaunchOutcome(proc, host, f"frame-{proc}", LaunchState.FAILED, sends, error, answered)


def launched(proc: str, host: str) -> LaunchOutcome:
    return LaunchOutcome(proc, host, f"frame-{proc}", LaunchState.LAUNCHED, 1)


def test_a_host_that_refuses_once_rests_and_its_job_is_not_blamed():
    blame = Refusals().blame([refused("a0", "h1"), refused("a1", "h1")], JOBS)
    assert (blame.jobs, blame.hosts) == ({}, {"h1"})


def test_a_job_three_hosts_refuse_is_blamed_in_their_words_and_they_are_not():
    refusals = Refusals()
    refusals.blame([refused("a0", "h1")], JOBS)
    blame = refusals.blame([refused("a1", "h2"), refused("a2", "h3"), launched("b0", "h3")], JOBS)
    assert blame.jobs.keys() == {"a"}
    assert UID in blame.jobs["a"]
    assert blame.hosts == frozenset()
    # and after its time it is given another chance
    assert refusals.blame([refused("a3", "h1")], JOBS).jobs == {}


def test_a_launched_frame_clears_its_job():
    refusals = Refusals()
    refusals.blame([refused("a0", "h1"), refused("a1", "h2")], JOBS)
    refusals.blame([launched("a2", "h4")], JOBS)
    assert refusals.blame([refused("a3", "h3")], JOBS).jobs == {}


def test_refusals_of_an_hour_ago_do_not_count():
    now = [0.0]
    refusals = Refusals(clock=lambda: now[0])
    refusals.blame([refused("a0", "h1"), refused("a1", "h2")], JOBS)
    now[0] = 3600.0
    assert refusals.blame([refused("a2", "h3")], JOBS).jobs == {}


def test_hosts_that_say_what_they_lack_or_nothing_at_all_are_at_fault_themselves():
    words = (
        "Not launching, rqd HardwareState is not Up",
        "Not launching, rqd is waiting for idle to shutdown",
        "Not launching, rqd is lockNimby and not Ignore Nimby",
        "Not launching, insufficient idle cores",
    )
    outcomes = [refused(f"a{number}", f"h{number}", text) for number, text in enumerate(words)]
    outcomes.append(refused("a8", "h8", "failed to connect to all addresses", answered=False))
    blame = Refusals().blame(outcomes, JOBS)
    assert (blame.jobs, blame.hosts) == ({}, {"h0", "h1", "h2", "h3", "h8"})


def test_a_host_that_fails_for_others_too_rests_although_a_blamed_job_was_there():
    outcomes = [refused("a0", "h1"), refused("a1", "h2"), refused("a2", "h3"), refused("b0", "h3")]
    blame = Refusals().blame(outcomes, JOBS)
    assert (blame.jobs.keys(), blame.hosts) == ({"a"}, {"h3"})


def test_what_was_not_sent_says_nothing_of_its_host():
    blame = Refusals().blame([refused("a0", "h1", "not sent: its turn did not come", answered=False, sends=0)], JOBS)
    assert (blame.jobs, blame.hosts) == ({}, frozenset())
