"""Addresses of hosts and the pool of connections."""

from __future__ import annotations

import contextlib
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
import pytest
from structlog.testing import capture_logs

from opencue_sched.embedded.rqds.simulated_rqd import SimulatedFarm, host_specs
from opencue_sched.embedded.servers.processes import free_port
from opencue_sched.errors import RqdFailure
from opencue_sched.rqd.channels import CALLS_TO_UNREACHED, RqdChannels
from opencue_sched.rqd.kill import RqdKiller, Whereabouts, look
from opencue_sched.rqd.launch import launch_all
from opencue_sched.settings import Rqd
from tests.kit.launches import request
from tests.kit.polling import eventually
from tests.kit.relay import Relay

_A_FARM = """
import sys
from opencue_sched.embedded.rqds.simulated_rqd import SimulatedFarm, host_specs
with SimulatedFarm(host_specs(1)) as farm:
    print(farm.addresses["sim0001"], flush=True)
    sys.stdin.readline()
"""


class Garbled(grpc.GenericRpcHandler):
    """Some program on RQD's port, whose answers are no messages."""

    def service(self, handler_call_details: object) -> object:
        return grpc.unary_unary_rpc_method_handler(lambda _request, _context: b"\xff\xff")


def test_an_answer_that_cannot_be_read_is_a_failed_call_and_no_traceback(caplog: pytest.LogCaptureFixture) -> None:
    # given a host on whose port something answers that is no RQD
    server = grpc.server(ThreadPoolExecutor(1), handlers=[Garbled()])
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        # when it is asked
        with RqdChannels(Rqd(addresses={"odd": f"127.0.0.1:{port}"})) as channels:
            said = RqdKiller(channels).silence("odd", 20)
    finally:
        server.stop(None)
    # then it counts as one that does not answer
    assert f"127.0.0.1:{port}" in said
    assert "Traceback" not in caplog.text


@pytest.mark.parametrize(
    ("host", "address"),
    [
        ("render1", "render1:8444"),
        ("render2.farm.example", "render2.farm.example:8444"),
        ("10.0.0.7", "10.0.0.7:8444"),
        ("fd00::7", "[fd00::7]:8444"),
        ("[fd00::7]", "[fd00::7]:8444"),
        ("special", "127.0.0.9:9000"),
    ],
)
def test_a_host_is_at_its_name_and_the_usual_port_unless_settings_say_otherwise(host: str, address: str) -> None:
    with RqdChannels(Rqd(addresses={"special": "127.0.0.9:9000"})) as channels:
        assert channels.address(host) == address


def test_a_host_is_dialled_by_the_name_with_its_domain_where_a_setting_says_so() -> None:
    full = {"pod1": "pod1.rqd.svc.cluster.local", "v6": "fd00::7"}
    settings = Rqd(dial_by="full", addresses={"special": "127.0.0.9:9000"})
    with RqdChannels(settings, full_name=full.__getitem__) as channels:
        assert channels.address("pod1") == "pod1.rqd.svc.cluster.local:8444"
        assert channels.address("v6") == "[fd00::7]:8444"
        assert channels.address("special") == "127.0.0.9:9000"


def test_a_host_whose_full_name_is_not_known_is_out_of_reach_and_gets_no_frames() -> None:
    def away(_name: str) -> str:
        raise RqdFailure("PostgreSQL did not tell its full name (OperationalError)")

    with RqdChannels(Rqd(dial_by="full"), full_name=away) as channels:
        seen = look(channels, request("pod1").ref)
        assert (seen.place, "OperationalError" in seen.detail) == (Whereabouts.UNREACHABLE, True)
        assert not RqdKiller(channels).answers("pod1", 1.0)
        assert not RqdKiller(channels).ask("pod1", "frame", "test")
        (outcome,) = launch_all(channels, [request("pod1")])
        assert (outcome.sends, outcome.unfit_host) == (0, True)


def test_a_host_whose_full_name_changes_is_dialled_by_the_new_one() -> None:
    # given a host that is dialled by its full name, under which nobody listens any more
    names = {"sim0001": "127.0.0.2"}
    with SimulatedFarm(host_specs(1)) as farm:
        port = int(farm.addresses["sim0001"].rpartition(":")[2])
        with RqdChannels(Rqd(dial_by="full", grpc_port=port), full_name=names.__getitem__) as channels:
            for _ in range(CALLS_TO_UNREACHED):
                assert look(channels, request("sim0001").ref).place is Whereabouts.UNREACHABLE
            # when it reports under another one
            names["sim0001"] = "127.0.0.1"
            # then it is dialled by that
            eventually(lambda: look(channels, request("sim0001").ref).place is Whereabouts.ABSENT)


def test_a_host_has_its_entry_in_the_settings_in_any_case_and_the_exact_one_first() -> None:
    addresses = {"render-pc01": "127.0.0.9:9001", "RENDER-PC02": "127.0.0.9:9002", "render-pc02": "127.0.0.9:9003"}
    with RqdChannels(Rqd(addresses=addresses)) as channels:
        asked = ("RENDER-PC01", "RENDER-PC02", "render-pc02")
        assert [channels.address(name)[-4:] for name in asked] == ["9001", "9002", "9003"]


def test_the_usual_port_is_a_setting() -> None:
    with RqdChannels(Rqd(grpc_port=7000)) as channels:
        assert channels.address("render1") == "render1:7000"


def test_a_farm_on_one_port_needs_only_that_setting() -> None:
    port = free_port()
    with SimulatedFarm(host_specs(2), port=port) as farm:
        names = {name: address.rpartition(":")[0] for name, address in farm.addresses.items()}
        with RqdChannels(Rqd(grpc_port=port)) as channels:
            for name in names.values():
                assert look(channels, request(name).ref).place is Whereabouts.ABSENT


def sockets() -> set[str]:
    """The open sockets of this process."""
    targets = set()
    for descriptor in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):
            targets.add(str(descriptor.readlink()))
    return {target for target in targets if target.startswith("socket:")}


def test_idle_connections_are_closed_and_opened_again() -> None:
    # given a connection that may be idle for a second, to a farm of another process
    farm = subprocess.Popen([sys.executable, "-c", _A_FARM], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert farm.stdout is not None
    try:
        rqd = Rqd(addresses={"sim0001": farm.stdout.readline().strip()}, timeout=20.0)
        with RqdChannels(rqd, idle_seconds=1.0) as channels:
            before = sockets()
            assert look(channels, request("sim0001").ref).place is Whereabouts.ABSENT
            opened = sockets() - before
            assert opened
            # when nobody calls for that long, then it is closed
            eventually(lambda: not opened & sockets())
            # and opened by the next call
            assert look(channels, request("sim0001").ref).place is Whereabouts.ABSENT
    finally:
        farm.communicate("over")


def test_one_host_has_one_connection_however_many_threads_use_it(channels: RqdChannels) -> None:
    places = channels.each(lambda _: look(channels, request("sim0001").ref).place, range(40))
    assert places == [Whereabouts.ABSENT] * 40
    assert len(set(channels.each(lambda _: channels.stub("sim0001"), range(40)))) == 1


def test_the_first_error_of_many_is_raised_after_all_have_ended(channels: RqdChannels) -> None:
    done: list[int] = []

    def work(number: int) -> int:
        if number == 1:
            raise ValueError("one of them")
        done.append(number)
        return number

    with pytest.raises(ValueError, match="one of them"):
        channels.each(work, range(5))
    assert sorted(done) == [0, 2, 3, 4]


def test_a_closed_pool_says_so(channels: RqdChannels) -> None:
    channels.close()
    with pytest.raises(RuntimeError, match="closed"):
        channels.stub("sim0001")


@pytest.fixture
def moving(farm: SimulatedFarm) -> Iterator[tuple[Relay, RqdChannels]]:
    """The address of sim0001, which can be lost, and connections to it."""
    with (
        Relay(farm.addresses["sim0001"]) as place,
        RqdChannels(Rqd(addresses={"sim0001": place.address}, timeout=2.0)) as channels,
    ):
        assert look(channels, request("sim0001").ref).place is Whereabouts.ABSENT
        yield place, channels


def test_a_host_whose_address_changed_is_reached_again_over_a_new_connection(
    moving: tuple[Relay, RqdChannels],
) -> None:
    # given a connection over which nothing comes back any more, and nobody says so
    place, channels = moving
    place.lose()
    assert look(channels, request("sim0001").ref).place is Whereabouts.UNREACHABLE

    # when calls run into their deadlines one after the other, then the name is looked up and dialled again
    places = [look(channels, request("sim0001").ref).place for _ in range(2)]
    assert places[-1] is Whereabouts.ABSENT
    assert place.opened == 2


def test_one_late_answer_costs_no_connection(farm: SimulatedFarm, moving: tuple[Relay, RqdChannels]) -> None:
    place, channels = moving
    for _ in range(2):
        farm.freeze("sim0001")
        assert look(channels, request("sim0001").ref).place is Whereabouts.UNREACHABLE
        farm.thaw("sim0001")
        assert look(channels, request("sim0001").ref).place is Whereabouts.ABSENT
    assert place.opened == 1


def test_a_deadline_too_short_for_any_answer_says_nothing_of_the_connection(
    moving: tuple[Relay, RqdChannels],
) -> None:
    place, channels = moving
    for _ in range(20):
        look(channels, request("sim0001").ref, timeout=0.0001)
    assert channels.unreached() == ()
    assert look(channels, request("sim0001").ref).place is Whereabouts.ABSENT
    assert place.opened == 1


def test_a_host_that_does_not_answer_is_told_until_it_does(moving: tuple[Relay, RqdChannels]) -> None:
    # given a host of which two calls in a row got no answer
    place, channels = moving
    assert channels.unreached() == ()
    place.lose()
    with capture_logs() as logs:
        for _ in range(2):
            look(channels, request("sim0001").ref)

    # then it is told, with its address and what was heard, and once in the log
    ((host, words),) = channels.unreached()
    assert host == "sim0001"
    assert place.address in words and "DEADLINE_EXCEEDED" in words
    (line,) = [line for line in logs if line["event"] == "rqd_does_not_answer"]
    assert (line["log_level"], line["host"], line["address"]) == ("warning", "sim0001", place.address)

    # and no more once it answers
    assert look(channels, request("sim0001").ref).place is Whereabouts.ABSENT
    assert channels.unreached() == ()


def test_a_call_that_others_wait_for_outlives_the_end_of_its_connection(
    farm: SimulatedFarm, moving: tuple[Relay, RqdChannels]
) -> None:
    # given a host that is frozen, and a call that has time
    _, channels = moving
    farm.freeze("sim0001")
    patient = ThreadPoolExecutor(1).submit(look, channels, request("sim0001").ref, timeout=100.0)
    # when others give up, so that the connection is replaced
    for _ in range(3):
        assert look(channels, request("sim0001").ref).place is Whereabouts.UNREACHABLE
    farm.thaw("sim0001")
    # then that call has its answer all the same
    assert patient.result().place is Whereabouts.ABSENT
