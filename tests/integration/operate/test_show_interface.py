"""ShowInterface over gRPC: what it tells of shows, and flips that answer soon, alone, and are completed when cut."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from typing import Any

import grpc
import pytest
import redis
from opencue_proto import cue_pb2, cue_pb2_grpc, show_pb2, show_pb2_grpc
from sqlalchemy import Engine, text

from opencue_sched.accounting.bootstrap import ensure_bootstrapped
from opencue_sched.accounting.caps import make_ledger
from opencue_sched.operate import flip as flip_module
from opencue_sched.operate.audit import run_audit
from opencue_sched.operate.show_interface import show_interface
from opencue_sched.settings import Settings
from tests.farm import Farm, LayerSpec
from tests.polling import eventually, soon_enough

LONG = 60.0
"""A wait no test sits out: seconds."""


@contextmanager
def served(settings: Settings, *, cuebots: bool) -> Iterator[grpc.Channel]:
    """A channel to a server of its own with the interface on it."""
    with ExitStack() as stack:
        add = stack.enter_context(show_interface(settings, cuebots=cuebots))
        server = grpc.server(ThreadPoolExecutor(8))
        add(server)
        port = server.add_insecure_port("127.0.0.1:0")
        server.start()
        stack.callback(lambda: server.stop(grace=None).wait())
        yield stack.enter_context(grpc.insecure_channel(f"127.0.0.1:{port}"))


def with_settle(settings: Settings, seconds: float) -> Settings:
    accounting = settings.accounting.model_copy(update={"commit_deadline": seconds, "in_flight_age": 3 * seconds})
    return settings.model_copy(update={"accounting": accounting})


@pytest.fixture
def flags(engine: Engine) -> Callable[[], tuple[bool, bool]]:
    """(managed, booking) of the show ``demo`` as the database has them."""

    def read() -> tuple[bool, bool]:
        with engine.connect() as connection:
            query = text("SELECT b_scheduler_managed, b_booking_enabled FROM show WHERE str_name = 'demo'")
            managed, booking = connection.execute(query).one()
        return managed, booking

    return read


@pytest.fixture
def make_show(engine: Engine) -> Callable[..., Any]:
    """Makes the show ``demo`` with a subscription and two frames running."""

    def make(**spec: Any) -> Any:
        with engine.begin() as connection:
            farm = Farm(connection)
            show = farm.show("demo", **spec)
            farm.subscription(show, farm.alloc("general"), size=10)
            farm.run(farm.job([LayerSpec(frames=5)], show=show).frames[:2], farm.host())
            return show

    return make


def find(channel: grpc.Channel, name: str = "demo") -> show_pb2.Show:
    return show_pb2_grpc.ShowInterfaceStub(channel).FindShow(show_pb2.ShowFindShowRequest(name=name), timeout=10).show


def flip(channel: grpc.Channel, show: show_pb2.Show, enabled: bool, *, timeout: float = 20.0) -> None:
    request = show_pb2.ShowSetSchedulerManagedRequest(show=show, enabled=enabled)
    show_pb2_grpc.ShowInterfaceStub(channel).SetSchedulerManaged(request, timeout=timeout)


def refusal(call: Callable[[], object]) -> tuple[grpc.StatusCode, str]:
    with pytest.raises(grpc.RpcError) as refused:
        call()
    return refused.value.code(), refused.value.details()


def test_a_show_is_told_of_as_cuebot_tells_of_it(settings, engine, make_show):
    # given a show with two frames running, and one that is not active
    made = make_show(managed=True)
    with engine.begin() as connection:
        Farm(connection).show("old", active=False, managed=False, booking_enabled=False)
        connection.execute(text("UPDATE show SET int_default_max_cores = 2050, str_comment_email = 'td@example.org'"))
    # when pycue's calls are made
    with served(settings, cuebots=False) as channel:
        stub = show_pb2_grpc.ShowInterfaceStub(channel)
        show = find(channel)
        listed = {one.name: one for one in stub.GetShows(show_pb2.ShowGetShowsRequest(), timeout=10).shows.shows}
        active = stub.GetActiveShows(show_pb2.ShowGetActiveShowsRequest(), timeout=10).shows.shows
        stats = cue_pb2_grpc.CueInterfaceStub(channel).GetSystemStats(cue_pb2.CueGetSystemStatsRequest(), timeout=10)
        unknown = refusal(lambda: find(channel, "dmeo"))
        unserved = refusal(lambda: stub.Delete(show_pb2.ShowDeleteRequest(show=show), timeout=10))
    # then
    assert (show.id, show.name, show.active, show.scheduler_managed) == (made.id, "demo", True, True)
    assert (show.booking_enabled, show.dispatch_enabled, show.comment_email) == (True, True, "td@example.org")
    assert (show.default_min_cores, show.default_max_cores) == (1.0, 20.5)
    assert (show.show_stats.running_frames, show.show_stats.pending_frames) == (2, 3)
    assert (show.show_stats.pending_jobs, show.show_stats.reserved_cores) == (1, 2.0)
    assert listed["demo"] == show
    assert (listed["old"].active, listed["old"].scheduler_managed, listed["old"].booking_enabled) == (False,) * 3
    assert [one.name for one in active] == ["demo"]
    assert stats.stats == cue_pb2.SystemStats()
    assert unknown == (grpc.StatusCode.NOT_FOUND, "there is no show 'dmeo'")
    assert unserved[0] is grpc.StatusCode.UNIMPLEMENTED
    assert "ShowInterface.Delete is not served without a Cuebot" in unserved[1]


def test_a_show_with_frames_running_goes_both_ways(settings, engine, redis_client, make_show, flags):
    # given a show of Cuebot's with frames running, and a store that is open
    settings = with_settle(settings, 0.2)
    make_show(managed=False)
    ledger = make_ledger(engine, redis_client, owner="test")
    ensure_bootstrapped(engine, ledger, wait_age=0.1)
    with served(settings, cuebots=False) as channel:
        # when it is handed over, then it is ours at once, what runs is counted, and the audit passes
        flip(channel, find(channel), True)
        eventually(lambda: flags() == (True, True), what="booking again")
        assert find(channel).scheduler_managed
        assert len(list(ledger.records())) == 2
        assert not run_audit(engine, redis_client, settings).failed
        # and when it goes back, then the tables are right and the entries retired
        flip(channel, find(channel), False)
        assert flags() == (False, True)
        assert not find(channel).scheduler_managed
        eventually(lambda: not list(ledger.records()), what="entries retired")
    with engine.connect() as connection:
        assert connection.execute(text("SELECT int_cores FROM subscription")).scalar_one() == 200
    assert not run_audit(engine, redis_client, settings).failed


def test_the_answer_does_not_wait_for_the_quarantine_and_the_other_way_is_refused(
    settings, make_show, flags, monkeypatch
):
    # given a quarantine longer than any caller waits
    monkeypatch.setattr(flip_module, "CUEBOT_CACHE_SECONDS", LONG)
    make_show(managed=False)
    with served(settings, cuebots=True) as channel, served(settings, cuebots=True) as another_service:
        # when it is handed over
        show = find(channel)
        flip(channel, show, True, timeout=15)
        # then the answer is there, the flag is set, and nothing is booked
        assert flags() == (True, False)
        assert (find(channel).scheduler_managed, find(channel).booking_enabled) == (True, False)
        # and saying it again is no error, while the other way, or through another service, it has to wait
        flip(channel, show, True, timeout=15)
        back = refusal(lambda: flip(channel, show, False))
        elsewhere = refusal(lambda: flip(another_service, show, False))
        assert back == (
            grpc.StatusCode.FAILED_PRECONDITION,
            "show demo: the show is being flipped the other way; try again in half a minute",
        )
        assert elsewhere[0] is grpc.StatusCode.FAILED_PRECONDITION
        assert "by somebody else" in elsewhere[1]
        assert flags() == (True, False)


def test_an_answer_comes_before_the_caller_gives_up(settings, make_show, flags):
    # given a way out that takes longer than the caller waits
    make_show(managed=True)
    with served(with_settle(settings, LONG), cuebots=False) as channel:
        # when it is told to go back, then the call ends well and booking is off meanwhile
        def seconds_to_answer() -> float:
            began = time.monotonic()
            try:
                flip(channel, find(channel), False, timeout=2)
            except grpc.RpcError as error:
                assert error.code() is grpc.StatusCode.DEADLINE_EXCEEDED
                return float("inf")
            return time.monotonic() - began

        soon_enough(seconds_to_answer, 2.0)
        assert flags() == (True, False)


@pytest.mark.parametrize("then", [True, False], ids=["on again", "off instead"])
def test_a_flip_that_was_cut_off_is_completed_by_the_next(settings, make_show, flags, monkeypatch, then):
    # given a service that is stopped within the quarantine
    monkeypatch.setattr(flip_module, "CUEBOT_CACHE_SECONDS", LONG)
    make_show(managed=False)
    with served(settings, cuebots=True) as channel:
        flip(channel, find(channel), True)
    assert flags() == (True, False)
    # when another is told to flip it
    monkeypatch.setattr(flip_module, "CUEBOT_CACHE_SECONDS", 0.1)
    with served(with_settle(settings, 0.1), cuebots=True) as channel:
        flip(channel, find(channel), then)
        # then it books again, whichever way it went
        eventually(lambda: flags() == (then, True), what="booking again")


def test_booking_that_a_person_switched_off_stays_off(settings, redis_client: redis.Redis, make_show, flags):
    # given a show that is ours and whose booking somebody switched off
    make_show(managed=False, booking_enabled=False)
    settings = with_settle(settings, 0.1)
    with served(settings, cuebots=False) as channel:
        # when it is handed over, twice, and back, then its booking is as it was
        for enabled in (True, True, False):
            flip(channel, find(channel), enabled)
            eventually(lambda enabled=enabled: flags() == (enabled, False), what="the flip's end")
    assert not list(redis_client.scan_iter("flip:*"))
