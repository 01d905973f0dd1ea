"""launch_all against simulated hosts with every kind of fault."""

from __future__ import annotations

from collections.abc import Callable

import grpc
import pytest

from opencue_sched.embedded.rqds.simulated_host import Answer
from opencue_sched.embedded.rqds.simulated_rqd import SimulatedFarm
from opencue_sched.rqd.channels import RqdChannels
from opencue_sched.rqd.launch import LaunchOutcome, launch_all
from opencue_sched.settings import Rqd
from tests.kit.launches import for_another_proc, request
from tests.kit.polling import eventually
from tests.kit.unclear_rqd import unclear_rqd

LAUNCHED, FAILED, UNKNOWN = "launched", "failed", "unknown"


def ends(outcomes: list[LaunchOutcome]) -> list[tuple[str, int]]:
    return [(_end(outcome), outcome.sends) for outcome in outcomes]


def _end(outcome: LaunchOutcome) -> str:
    if outcome.error is None:
        return LAUNCHED
    return UNKNOWN if outcome.error.outcome_unknown else FAILED


def test_frames_start_on_their_hosts_and_each_has_its_outcome(farm: SimulatedFarm, channels: RqdChannels) -> None:
    # given frames for three hosts, mixed
    requests = [request(f"sim000{1 + number % 3}") for number in range(18)]

    # when they are launched
    outcomes = launch_all(channels, requests)

    # then each runs where it was sent, once
    assert ends(outcomes) == [(LAUNCHED, 1)] * 18
    assert sorted(outcome.proc_id for outcome in outcomes) == sorted(it.ref.proc_id for it in requests)
    assert farm.running() == {it.ref.frame_id: it.host_name for it in requests}
    assert len(farm.runs()) == 18


def test_a_host_that_is_down_fails_for_sure_and_only_its_first_frame_is_tried(
    farm: SimulatedFarm, channels: RqdChannels
) -> None:
    # given one host that has lost power since it was last launched on
    assert ends(launch_all(channels, [request("sim0002")])) == [(LAUNCHED, 1)]
    farm.crash("sim0002")
    requests = [request(f"sim000{1 + number % 3}") for number in range(9)]

    # when frames are launched on all three
    outcomes = launch_all(channels, requests)

    # then its frames are known not to run, and nobody else noticed
    down = [outcome for outcome in outcomes if outcome.request.host_name == "sim0002"]
    assert ends(down) == [(FAILED, 0)] * 3
    assert ends([outcome for outcome in outcomes if outcome not in down]) == [(LAUNCHED, 1)] * 6
    errors = [outcome.error for outcome in down]
    assert all(
        error is not None and not error.outcome_unknown and str(error).startswith("sim0002: ") for error in errors
    )
    # and those behind the first say something else: they were not tried
    assert str(errors[0]) != str(errors[1]) == str(errors[2])


def test_a_refusal_is_tried_once_more(farm: SimulatedFarm, channels: RqdChannels) -> None:
    farm.behave("sim0001", refusal="Not launching, insufficient idle cores", refusals_left=1)
    (outcome,) = launch_all(channels, [request("sim0001")])
    assert ends([outcome]) == [(LAUNCHED, 2)]


def test_a_second_refusal_is_final_and_keeps_rqds_words(farm: SimulatedFarm, channels: RqdChannels) -> None:
    # given a host with room for one of two frames, and one more of another host's
    requests = [request("sim0001", cores=8), request("sim0001", cores=1), request("sim0002")]

    outcomes = launch_all(channels, requests)

    assert ends(outcomes) == [(LAUNCHED, 1), (FAILED, 2), (LAUNCHED, 1)]
    assert "insufficient idle cores" in str(outcomes[1].error)


@pytest.mark.parametrize(
    "code",
    [grpc.StatusCode.UNKNOWN, grpc.StatusCode.ABORTED, grpc.StatusCode.INTERNAL, grpc.StatusCode.DATA_LOSS],
    ids=lambda code: code.name,
)
@pytest.mark.parametrize(
    ("starts", "state", "sends", "runs"),
    [([False], LAUNCHED, 2, 1), ([False, False], FAILED, 2, 0), ([True], LAUNCHED, 1, 1)],
    ids=["absent-then-sent-again", "absent-twice", "runs-already"],
)
def test_after_an_unclear_answer_rqd_is_asked_and_an_absent_frame_sent_once_more(
    farm: SimulatedFarm, code: grpc.StatusCode, starts: list[bool], state: str, sends: int, runs: int
) -> None:
    # given a host that ends launches in an error, whether their frame runs or not
    with (
        unclear_rqd(farm.addresses["sim0001"], code, starts) as address,
        RqdChannels(Rqd(addresses={"sim0001": address}, timeout=20.0)) as channels,
    ):
        # when a frame is launched there
        (outcome,) = launch_all(channels, [request("sim0001")])

    # then it was sent again only where it did not run, and runs once at most
    assert ends([outcome]) == [(state, sends)]
    assert len(farm.runs()) == runs
    assert farm.violations() == []


@pytest.mark.parametrize("answer", [Answer.CUT_OFF, Answer.NEVER])
def test_a_lost_answer_is_unknown_and_the_frame_is_not_sent_again(
    farm: SimulatedFarm, connect: Callable[..., RqdChannels], answer: Answer
) -> None:
    # given a host that starts frames, slowly set up, and whose answers are lost
    farm.behave("sim0001", launch_answer=answer, setup_seconds=1.0)
    lost = request("sim0001")

    # when a frame is launched there
    (outcome,) = launch_all(connect(timeout=1.0), [lost])

    # then nobody claims to know, and RQD got it once
    assert ends([outcome]) == [(UNKNOWN, 1)]
    assert outcome.error is not None
    assert outcome.error.outcome_unknown
    assert farm.calls("sim0001")["LaunchFrame"] == 1
    assert len(farm.runs(lost.ref.frame_id)) == 1
    assert farm.violations() == []


def test_a_duplicate_of_our_own_proc_is_running_and_of_another_is_not_ours(
    farm: SimulatedFarm, channels: RqdChannels
) -> None:
    # given a running frame
    first = request("sim0001")
    assert ends(launch_all(channels, [first])) == [(LAUNCHED, 1)]
    eventually(lambda: farm.host("sim0001").listed(first.ref.frame_id))

    # when it is sent again for the same proc and for another
    outcomes = launch_all(channels, [first, for_another_proc(first)])

    # then only the first is taken as launched, and one copy runs
    assert ends(outcomes) == [(LAUNCHED, 1), (UNKNOWN, 1)]
    assert first.ref.proc_id in str(outcomes[1].error)
    assert len(farm.runs(first.ref.frame_id)) == 1


def test_a_frozen_host_delays_nobody_else(farm: SimulatedFarm, connect: Callable[..., RqdChannels]) -> None:
    # given a host that answers nothing
    channels = connect(timeout=2.0)
    assert ends(launch_all(channels, [request("sim0001")])) == [(LAUNCHED, 1)]
    farm.freeze("sim0001")

    # when many frames go to it and few to another
    requests = [*(request("sim0001") for _ in range(7)), request("sim0002"), request("sim0003")]
    outcomes = launch_all(channels, requests)

    # then one of its frames is unknown, the others were not even sent, and the rest runs
    assert ends(outcomes) == [(UNKNOWN, 1), *[(FAILED, 0)] * 6, (LAUNCHED, 1), (LAUNCHED, 1)]
    # and what was sent to it may start later, as the outcome warned
    farm.thaw("sim0001")
    eventually(lambda: requests[0].ref.frame_id in farm.running())


def test_what_cannot_be_sent_in_time_is_not_sent(farm: SimulatedFarm, channels: RqdChannels) -> None:
    # given a clock that shows the deadline has passed when the frame's turn comes
    times = iter([0.0])
    outcomes = launch_all(
        channels, [request("sim0001"), request("sim0002")], send_within=2.0, clock=lambda: next(times, 2.5)
    )
    assert ends(outcomes) == [(FAILED, 0), (FAILED, 0)]
    assert farm.runs() == []
    assert not any(outcome.error and outcome.error.outcome_unknown for outcome in outcomes)


def test_more_frames_than_calls_at_once_go_one_after_the_other(channels: RqdChannels) -> None:
    outcomes = launch_all(channels, [request(f"sim000{n % 3 + 1}") for n in range(24)])
    assert ends(outcomes) == [(LAUNCHED, 1)] * 24


def test_a_dry_run_launches_everything_without_any_host() -> None:
    with RqdChannels(Rqd(dry_run_mode=True)) as channels:
        outcomes = launch_all(channels, [request("nowhere"), request("nowhere")])
        assert ends(outcomes) == [(LAUNCHED, 0)] * 2


def test_nothing_to_launch_is_fine(channels: RqdChannels) -> None:
    assert launch_all(channels, []) == []
