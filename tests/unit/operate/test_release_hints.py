"""Who follows Cuebot's notifications, and what it does about those it could not follow."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from redis.exceptions import ConnectionError as RedisConnectionError

from opencue_sched.operate.release_hints import ReleaseHints
from tests.polling import eventually


class Gate:
    """An election whose outcome the test decides."""

    def __init__(self) -> None:
        self.lease: Any = None
        self.next_look = 0.0
        self.asked = 0

    def renew(self) -> Any:
        self.asked += 1
        return self.lease

    def resign(self) -> None:
        self.lease = None


class Follower:
    """Hints under such an election, and what was done about them, in order."""

    def __init__(self) -> None:
        self.gate = Gate()
        self.done: list[object] = []
        self.broken = False
        self.hints = ReleaseHints(
            self.gate,  # type: ignore[arg-type]
            reconcile=lambda shows: self.do(sorted(shows)),
            load_caps=lambda vertices: self.do(sorted(vertices)),
            look_at_all=lambda: self.do("everything"),
        )

    def do(self, what: object) -> None:
        if self.broken:
            raise RedisConnectionError("away")
        self.done.append(what)

    def leads(self, leading: bool) -> None:
        """Until that has been noticed."""
        self.gate.lease = SimpleNamespace(fence=1) if leading else None
        asked = self.gate.asked
        eventually(lambda: self.gate.asked > asked + 1, what="the next look at the election")


@pytest.fixture
def follower() -> Iterator[Follower]:
    made = Follower()
    made.hints.start()
    yield made
    made.hints.stop()


def test_who_does_not_lead_does_nothing(follower: Follower) -> None:
    follower.hints.show("a")
    follower.leads(False)
    assert follower.done == []


def test_who_is_elected_looks_at_everything_and_then_follows(follower: Follower) -> None:
    follower.leads(True)
    eventually(lambda: follower.done == ["everything"])
    follower.hints.show("a")
    eventually(lambda: follower.done == ["everything", ["a"]])
    follower.hints.vertex("job:j")
    eventually(lambda: follower.done == ["everything", ["a"], ["job:j"]])


def test_who_is_elected_again_looks_at_everything_again(follower: Follower) -> None:
    """Whoever led meanwhile may have died before it followed what both have heard."""
    follower.leads(True)
    eventually(lambda: follower.done == ["everything"])
    follower.leads(False)
    follower.hints.show("a")
    follower.leads(False)
    follower.leads(True)
    eventually(lambda: follower.done == ["everything", "everything"])


def test_what_failed_is_made_up_for(follower: Follower) -> None:
    follower.leads(True)
    eventually(lambda: follower.done == ["everything"])
    follower.broken = True
    follower.hints.show("a")
    follower.leads(True)
    follower.broken = False
    eventually(lambda: follower.done == ["everything", "everything"])
