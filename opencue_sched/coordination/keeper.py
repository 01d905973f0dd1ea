"""Prolongs claims while their work goes on, and says when they can no longer be relied on."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Generic, Protocol, TypeVar

from opencue_sched.coordination.leader import boot_clock
from opencue_sched.coordination.rounds import Rounds


class Held(Protocol):
    """A claim: a job's id, and the fence and the token it was claimed under."""

    @property
    def uuid(self) -> str: ...

    @property
    def fence(self) -> int: ...

    @property
    def token(self) -> str: ...


C = TypeVar("C", bound=Held)
_Key = tuple[str, int, str]


def _key(claim: Held) -> _Key:
    return claim.uuid, claim.fence, claim.token


class Prolongs(Protocol[C]):
    """What can prolong claims; returns those still held."""

    def extend(self, claims: Sequence[C], *, ttl_seconds: float) -> list[C]: ...


class Keeper(Generic[C]):
    """Prolongs this process's claims from one thread, at a third of their life.

    A claim that was not prolonged in time counts as lost (``alive`` is False) from ``ttl - ttl / 4`` after the last
    success on, by this process's own clock: before anybody else can have it.
    """

    def __init__(self, board: Prolongs[C], *, ttl_seconds: float, clock: Callable[[], float] = boot_clock) -> None:
        self._board = board
        self._ttl = ttl_seconds
        self._clock = clock
        self._lock = threading.Lock()
        self._held: dict[_Key, tuple[C, float]] = {}
        self._rounds = Rounds(
            "claim-keeper", self._prolong, failed="claims_not_prolonged", retry_seconds=ttl_seconds / 3
        )
        self._begun = False

    def keep(self, claim: C, *, claimed_at: float) -> None:
        """Start prolonging ``claim``; ``claimed_at`` is the clock before the claim was asked for."""
        with self._lock:
            self._held[_key(claim)] = (claim, claimed_at)
            if not self._begun:
                self._begun = True
                self._rounds.start()
        self._rounds.want()

    def drop(self, claim: C) -> None:
        """Stop prolonging ``claim``."""
        with self._lock:
            self._held.pop(_key(claim), None)

    def held(self) -> list[C]:
        """The claims kept at this moment."""
        with self._lock:
            return [claim for claim, _ in self._held.values()]

    def alive(self, claim: C) -> bool:
        """Whether ``claim`` is certainly still this process's."""
        with self._lock:
            held = self._held.get(_key(claim))
        return held is not None and self._clock() - held[1] < self._ttl * 0.75

    def stop(self) -> None:
        """End the thread; what is held is left to expire."""
        self._rounds.stop(self._ttl)

    def _prolong(self) -> float | None:
        claims = self.held()
        if not claims:
            return None
        now = self._clock()
        held = {_key(claim) for claim in self._board.extend(claims, ttl_seconds=self._ttl)}
        with self._lock:
            for claim in claims:
                key = _key(claim)
                if key in held and key in self._held:
                    self._held[key] = (claim, now)
                else:
                    self._held.pop(key, None)
        # Not as the wait for the next round: that ends with each claim that is made.
        self._rounds.pause(self._ttl / 3)
        return 0.0
