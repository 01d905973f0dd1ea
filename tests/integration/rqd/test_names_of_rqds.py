"""A name, or an entry in ``rqd.addresses``, that leads to another machine than the host's."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import grpc
import pytest
from opencue_proto import rqd_pb2, rqd_pb2_grpc
from structlog.testing import capture_logs

from opencue_sched.dispatch.refusals import Refusals
from opencue_sched.embedded.rqds.simulated_host import HostSpec
from opencue_sched.embedded.rqds.simulated_rqd import SimulatedFarm, host_specs
from opencue_sched.embedded.servers.processes import free_port
from opencue_sched.rqd.channels import RqdChannels
from opencue_sched.rqd.kill import Fate, RqdKiller, RunningFrameRef, Whereabouts, kill, kill_and_confirm, look
from opencue_sched.rqd.launch import Answer, classify, launch_all
from opencue_sched.settings import Rqd
from tests.kit.launches import request
from tests.kit.polling import eventually
from tests.kit.served_rqd import served_rqd
from tests.kit.wording import lacks


@pytest.fixture
def misled(farm: SimulatedFarm) -> Iterator[RqdChannels]:
    """Connections for which sim0001 leads to the machine of sim0002, as long as they are open."""
    addresses = dict(farm.addresses, sim0001=farm.addresses["sim0002"])
    with RqdChannels(Rqd(addresses=addresses, timeout=5.0)) as channels:
        yield channels


def test_a_host_whose_name_leads_to_another_machine_gets_no_frames(farm: SimulatedFarm, misled: RqdChannels) -> None:
    with capture_logs() as logs:
        outcomes = launch_all(misled, [request("sim0001"), request("sim0001"), request("sim0002")])

    # then nothing started there, for certain, and both names are told, once
    assert [(outcome.sends, outcome.error is None) for outcome in outcomes] == [(0, False), (0, False), (1, True)]
    assert not lacks(str(outcomes[0].error), farm.addresses["sim0002"], "sim0002")
    assert not any(outcome.error and outcome.error.outcome_unknown for outcome in outcomes)
    assert {run.host_name for run in farm.runs()} == {"sim0002"} and len(farm.runs()) == 1
    (line,) = [line for line in logs if line["event"] == "rqd_answers_as_another_host"]
    assert (line["log_level"], line["host"], line["answers_as"]) == ("warning", "sim0001", "sim0002")
    # and everybody who asks this process is told
    ((host, words),) = misled.unreached()
    assert (host, lacks(words, farm.addresses["sim0002"], "sim0002")) == ("sim0001", [])
    # and the host is left alone by the next plans
    assert Refusals().blame(outcomes).hosts == {"sim0001"}


def test_what_another_machine_does_not_run_is_not_known_to_have_ended(farm: SimulatedFarm, misled: RqdChannels) -> None:
    # given a frame that sim0001 runs
    with RqdChannels(Rqd(addresses=farm.addresses, timeout=20.0)) as right:
        running = request("sim0001")
        assert launch_all(right, [running])[0].error is None
    # when its name leads elsewhere, then nobody takes the answer there for an end
    fate, words = kill_and_confirm(misled, running.ref, reason="test", timeout=1.0)
    assert fate is Fate.UNREACHABLE
    assert "sim0002" in words
    assert not RqdKiller(misled).answers("sim0001", 5.0)
    assert running.ref.frame_id in farm.running()


def test_a_run_of_another_proc_on_the_other_machine_is_not_killed(farm: SimulatedFarm, misled: RqdChannels) -> None:
    # given a frame that was lost on sim0001, and runs on sim0002 now
    again = request("sim0002")
    assert launch_all(misled, [again])[0].error is None
    lost = RunningFrameRef("sim0001", again.ref.frame_id, "the proc before")
    # when its former run is to be ended, then its present one goes on
    assert kill_and_confirm(misled, lost, reason="test", timeout=1.0)[0] is Fate.UNREACHABLE
    assert not RqdKiller(misled).ask("sim0001", lost.frame_id, "test")
    assert again.ref.frame_id in farm.running()
    assert farm.calls("sim0002")["KillRunningFrame"] == 0


def test_a_frame_that_started_on_the_other_machine_can_be_ended_there(farm: SimulatedFarm, misled: RqdChannels) -> None:
    # given a frame that was sent to sim0001 and runs on sim0002
    astray = request("sim0002")
    assert launch_all(misled, [astray])[0].error is None
    ref = RunningFrameRef("sim0001", astray.ref.frame_id, astray.ref.proc_id)
    assert kill_and_confirm(misled, ref, reason="test", timeout=1.0)[0] is not Fate.RUNNING
    eventually(lambda: not farm.running())


def test_a_host_is_booked_again_once_it_answers_by_its_own_name() -> None:
    # given an address at which another machine answers
    port = free_port()
    with RqdChannels(Rqd(addresses={"sim0001": f"127.1.0.1:{port}"}, timeout=5.0)) as channels:
        with SimulatedFarm([HostSpec("sim0002")], port=port):
            assert launch_all(channels, [request("sim0001")])[0].error is not None
        # when the host itself answers there, in its own spelling, then it gets frames
        with SimulatedFarm([HostSpec("SIM0001.farm.example")], port=port):
            eventually(lambda: launch_all(channels, [request("sim0001")])[0].error is None)


@pytest.mark.parametrize("killed", [False, True], ids=["the first call", "after a kill"])
def test_a_machine_that_takes_the_address_of_a_host_is_asked_for_its_name_at_once(killed: bool) -> None:
    # given a host that told its name a moment ago, and has taken a frame
    port = free_port()
    with RqdChannels(Rqd(addresses={"sim0001": f"127.1.0.1:{port}"}, timeout=5.0), clock=lambda: 0.0) as channels:
        with SimulatedFarm([HostSpec("sim0001")], port=port):
            assert launch_all(channels, [request("sim0001")])[0].error is None
        # when another machine answers at its address
        with SimulatedFarm([HostSpec("sim0002")], port=port) as others:
            if killed:
                assert not kill(channels, "sim0001", request("sim0001").ref.frame_id, "test")
            (outcome,) = launch_all(channels, [request("sim0001")])
            # then nothing starts there
            assert others.runs() == []
            assert "sim0002" in str(outcome.error)


def test_a_call_that_was_about_to_be_made_when_its_connection_was_replaced_fails_as_not_sent(
    misled: RqdChannels,
) -> None:
    # given somebody who is about to call a host when another call finds that its name leads elsewhere
    stub = misled.stub("sim0001")
    assert look(misled, request("sim0001").ref).place is Whereabouts.UNREACHABLE
    # when it calls, then it is told as of a host that cannot be reached
    with pytest.raises(grpc.RpcError) as failed:
        stub.LaunchFrame(rqd_pb2.RqdStaticLaunchFrameRequest())
    assert classify(failed.value.code(), failed.value.details()) is Answer.NOT_SENT


def test_a_host_known_by_its_address_is_whoever_has_it(farm: SimulatedFarm) -> None:
    with RqdChannels(Rqd(addresses={"10.0.0.7": farm.addresses["sim0001"]}, timeout=5.0)) as channels:
        assert launch_all(channels, [request("10.0.0.7")])[0].error is None


def test_a_name_is_asked_for_once_a_minute(farm: SimulatedFarm) -> None:
    now = [0.0]
    with RqdChannels(Rqd(addresses=farm.addresses, timeout=20.0), clock=lambda: now[0]) as channels:
        for now[0], asked in ((0.0, 1), (59.0, 1), (61.0, 2)):
            assert launch_all(channels, [request("sim0001")])[0].error is None
            assert farm.calls("sim0001")["ReportStatus"] == asked


def test_a_host_that_does_not_tell_its_name_gets_no_frames(farm: SimulatedFarm) -> None:
    # given a host whose RQD fails when it is asked for its name, and would take frames
    class Unnamed(rqd_pb2_grpc.RqdInterfaceServicer):  # type: ignore[misc]
        launched = 0

        def ReportStatus(self, request: Any, context: Any) -> Any:  # noqa: N802
            context.abort(grpc.StatusCode.UNKNOWN, "Exception calling application")

        def LaunchFrame(self, request: Any, context: Any) -> Any:  # noqa: N802
            self.launched += 1
            return rqd_pb2.RqdStaticLaunchFrameResponse()

    rqd = Unnamed()
    with (
        served_rqd(rqd) as address,
        RqdChannels(Rqd(addresses={"sim0001": address}, timeout=5.0)) as channels,
    ):
        # when a frame is launched, and another killed there
        (outcome,) = launch_all(channels, [request("sim0001")])
        # then neither is sent, for certain, and the host is left alone
        assert (outcome.sends, rqd.launched) == (0, 0)
        assert "UNKNOWN" in str(outcome.error)
        assert not RqdKiller(channels).ask("sim0001", "frame", "test")
        assert Refusals().blame([outcome]).hosts == {"sim0001"}


def test_a_host_whose_name_led_to_another_machine_is_found_once_it_leads_to_its_own() -> None:
    # given a name that leads to another machine, which answers over an open connection
    port = free_port()
    leads_to = {"sim0001": "127.1.0.2"}
    settings = Rqd(dial_by="full", grpc_port=port, timeout=5.0)
    with (
        SimulatedFarm(host_specs(2), port=port) as farm,
        RqdChannels(settings, full_name=leads_to.__getitem__) as channels,
    ):
        assert launch_all(channels, [request("sim0001")])[0].error is not None
        # when the name is put right, then the host gets frames, though that connection never broke
        leads_to["sim0001"] = "127.1.0.1"
        assert launch_all(channels, [request("sim0001")])[0].error is None
        assert {run.host_name for run in farm.runs()} == {"sim0001"}
