"""Kill-and-confirm says only what RQD confirmed."""

from __future__ import annotations

import re
import socket
from collections.abc import Callable

import grpc
import pytest

from opencue_sched.embedded.rqds.simulated_rqd import SimulatedFarm
from opencue_sched.rqd.channels import RqdChannels
from opencue_sched.rqd.kill import Fate, RqdKiller, Whereabouts, kill, kill_and_confirm, look
from opencue_sched.rqd.launch import LaunchRequest, launch_all
from opencue_sched.settings import Rqd
from tests.kit.launches import for_another_proc, request
from tests.kit.polling import eventually
from tests.kit.slow_rqd import slow_rqd
from tests.kit.wording import lacks

NO_ANSWER = re.compile("UNAVAILABLE|DEADLINE_EXCEEDED")


def started(farm: SimulatedFarm, channels: RqdChannels) -> LaunchRequest:
    launch = request("sim0001")
    launch_all(channels, [launch])
    eventually(lambda: farm.host("sim0001").listed(launch.ref.frame_id))
    return launch


def test_a_running_frame_is_killed_and_seen_to_be_gone(farm: SimulatedFarm, channels: RqdChannels) -> None:
    # given a frame that takes its time to die
    farm.behave(kill_seconds=0.3)
    launch = started(farm, channels)

    fate, _ = kill_and_confirm(channels, launch.ref, reason="test", timeout=10.0)

    # then the answer came after its end
    assert fate is Fate.NOT_RUNNING
    (run,) = farm.runs(launch.ref.frame_id)
    assert (run.killed, run.exit_status, run.exit_signal) == (True, 1, 9)
    assert run.ended is not None


def test_a_frame_rqd_does_not_know_is_not_running(channels: RqdChannels, farm: SimulatedFarm) -> None:
    fate, _ = kill_and_confirm(channels, request("sim0001").ref, reason="test")
    assert fate is Fate.NOT_RUNNING
    # and that was asked for, not assumed: a report alone does not see what is still on its way
    assert farm.calls("sim0001")["KillRunningFrame"] == 1


def test_a_frame_being_set_up_is_waited_for(farm: SimulatedFarm, channels: RqdChannels) -> None:
    # given a frame that holds cores but is in no list yet
    farm.behave(setup_seconds=1.5)
    launch = request("sim0001")
    launch_all(channels, [launch])
    assert look(channels, launch.ref).place is Whereabouts.SETTING_UP

    # when somebody makes sure that it does not run
    fate, _ = kill_and_confirm(channels, launch.ref, reason="test", timeout=10.0)

    # then it was killed once it could be
    assert fate is Fate.NOT_RUNNING
    assert farm.runs(launch.ref.frame_id)[0].killed
    assert farm.running() == {}


def test_a_frame_of_ours_is_adopted_when_asked_for(farm: SimulatedFarm, channels: RqdChannels) -> None:
    farm.behave(setup_seconds=0.3)
    launch = request("sim0001")
    launch_all(channels, [launch])

    fate, _ = kill_and_confirm(channels, launch.ref, reason="test", adopt=True, timeout=10.0)

    assert fate is Fate.RUNNING
    assert farm.calls("sim0001")["KillRunningFrame"] == 0
    assert launch.ref.frame_id in farm.running()


def test_another_procs_run_of_the_frame_is_killed_even_when_adopting(
    farm: SimulatedFarm, channels: RqdChannels
) -> None:
    # given a run that a proc before ours left behind
    launch = started(farm, channels)
    ours = for_another_proc(launch)

    fate, _ = kill_and_confirm(channels, ours.ref, reason="test", adopt=True, timeout=10.0)

    assert fate is Fate.NOT_RUNNING
    assert farm.runs(launch.ref.frame_id)[0].killed
    assert farm.running() == {}


def test_other_frames_of_the_host_are_left_alone(farm: SimulatedFarm, channels: RqdChannels) -> None:
    other, launch = started(farm, channels), started(farm, channels)
    assert kill_and_confirm(channels, launch.ref, reason="test", timeout=10.0)[0] is Fate.NOT_RUNNING
    assert set(farm.running()) == {other.ref.frame_id}


@pytest.mark.parametrize("fault", ["freeze", "crash"])
def test_nothing_is_claimed_about_a_host_that_does_not_answer(
    farm: SimulatedFarm, connect: Callable[..., RqdChannels], fault: str
) -> None:
    launch = started(farm, connect())
    getattr(farm, fault)("sim0001")

    fate, detail = kill_and_confirm(connect(timeout=0.3), launch.ref, reason="test", timeout=0.6)

    assert fate is Fate.UNREACHABLE
    assert NO_ANSWER.search(detail)


def test_nothing_is_claimed_about_a_frame_that_does_not_die_in_time(farm: SimulatedFarm, channels: RqdChannels) -> None:
    farm.behave(kill_seconds=30.0)
    launch = started(farm, channels)
    fate, _ = kill_and_confirm(channels, launch.ref, reason="test", timeout=2.0)
    assert fate is Fate.UNCONFIRMED
    assert launch.ref.frame_id in farm.running()


def test_a_kill_without_a_reason_is_refused_as_the_rust_rqd_does(farm: SimulatedFarm, channels: RqdChannels) -> None:
    launch = started(farm, channels)
    with pytest.raises(grpc.RpcError) as refused:
        kill(channels, "sim0001", launch.ref.frame_id, "")
    assert refused.value.code() == grpc.StatusCode.FAILED_PRECONDITION


def test_an_rqd_that_refuses_the_kill_of_what_it_runs_is_not_out_of_reach(
    farm: SimulatedFarm, channels: RqdChannels
) -> None:
    """Of a host that is DOWN the frames are given away when its RQD is."""
    launch = started(farm, channels)

    fate, why = kill_and_confirm(channels, launch.ref, reason="", timeout=0.5)

    assert fate is Fate.UNCONFIRMED
    assert "FAILED_PRECONDITION" in why


def test_an_rqd_that_is_asked_for_the_last_time_has_a_fair_time_to_answer(
    farm: SimulatedFarm, channels: RqdChannels
) -> None:
    """The last look begins when the time of the caller is all but over."""
    # given a frame that is being set up on a host that needs a while for each answer
    farm.behave(setup_seconds=3600.0)
    launch = request("sim0001")
    launch_all(channels, [launch])
    with (
        slow_rqd(farm.addresses["sim0001"], needs_seconds=0.2) as address,
        RqdChannels(Rqd(addresses={"sim0001": address}, timeout=20.0)) as slowly,
    ):
        fate, why = kill_and_confirm(slowly, launch.ref, reason="test", timeout=0.5)

    # then what it says is told to the end
    assert fate is Fate.UNCONFIRMED
    assert why
    assert not NO_ANSWER.search(why)


def test_an_rqd_that_answered_at_first_is_not_out_of_reach(farm: SimulatedFarm, channels: RqdChannels) -> None:
    # given a frame that is being set up on a host that answers once
    farm.behave(setup_seconds=3600.0)
    launch = request("sim0001")
    launch_all(channels, [launch])
    with (
        slow_rqd(farm.addresses["sim0001"], answers=1) as address,
        RqdChannels(Rqd(addresses={"sim0001": address}, timeout=20.0)) as once,
    ):
        fate, why = kill_and_confirm(once, launch.ref, reason="test", timeout=3.0)

    # then nobody takes the frame for one of a host that is gone
    assert fate is Fate.UNCONFIRMED
    assert NO_ANSWER.search(why)


def test_whether_a_host_answers_is_found_out_within_the_time_given(farm: SimulatedFarm) -> None:
    """Not within rqd.timeout, which is longer here than any test may take."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        addresses = farm.addresses | {"silent": f"127.0.0.1:{silent.getsockname()[1]}"}
        with RqdChannels(Rqd(addresses=addresses, timeout=3600.0)) as channels:
            assert RqdKiller(channels).answers("sim0001", 20.0)
            assert not RqdKiller(channels).answers("silent", 0.2)
            farm.crash("sim0001")
            assert not RqdKiller(channels).answers("sim0001", 0.2)


def test_a_host_that_just_refused_a_connection_is_tried_again(farm: SimulatedFarm, channels: RqdChannels) -> None:
    farm.crash("sim0001")
    assert not RqdKiller(channels).answers("sim0001", 0.2)
    farm.restart("sim0001")
    assert RqdKiller(channels).answers("sim0001", 20.0)


def test_the_killer_tells_a_host_that_is_gone_from_one_that_does_not_confirm(
    farm: SimulatedFarm, connect: Callable[..., RqdChannels]
) -> None:
    # given a host without power, and one whose frames take their time to die
    running = request("sim0002")
    launch_all(connect(), [running])
    eventually(lambda: farm.host("sim0002").listed(running.ref.frame_id))
    farm.crash("sim0001")
    farm.behave("sim0002", kill_seconds=60.0)
    told: list[tuple[str, str, str]] = []
    killer, patient = (
        RqdKiller(connect(**times), notify=lambda *words: told.append(words)) for times in ({"timeout": 1.5}, {})
    )

    # then only what is known not to run may be given away
    assert killer.stop("sim0001", "any", "proc", "test") is Fate.UNREACHABLE
    assert killer.stop("sim0002", running.ref.frame_id, running.ref.proc_id, "test") is Fate.UNCONFIRMED
    assert patient.stop("sim0002", "any", "proc", "test") is Fate.NOT_RUNNING
    # and of the others is told where they run, and why it is not known that they do not
    assert [where for _, where, _ in told] == [f"{name} ({farm.addresses[name]})" for name in ("sim0001", "sim0002")]
    assert not lacks(told[0][2], "UNAVAILABLE")
    assert "runs" in told[1][2]
    # and who could not be asked is told apart
    assert not killer.ask("sim0001", "any", "test")
    assert patient.ask("sim0002", running.ref.frame_id, "test")
