"""Prolongs claims while their work goes on, and says when they can no longer be relied on."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Sequence
from typing import Generic, Protocol, TypeVar

import structlog

from opencue_sched.coordination.leader import boot_clock
from opencue_sched.coordination.rounds import Rounds

log = structlog.get_logger(__name__)


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

    A claim of which no ``progress`` was told for longer than ``patience_seconds``, or never, is given up: whoever works
    on it hangs, and others are to have it. A step that ended after all was slow: the next ones may take half as long
    again, up to ``longest_patience_seconds``. Without patience every claim is prolonged until it is dropped.
    """

    def __init__(
        self,
        board: Prolongs[C],
        *,
        ttl_seconds: float,
        patience_seconds: float = math.inf,
        longest_patience_seconds: float = 0.0,
        clock: Callable[[], float] = boot_clock,
    ) -> None:
        self._board = board
        self._ttl = ttl_seconds
        self._patience = patience_seconds
        self._longest_patience = longest_patience_seconds
        self._clock = clock
        self._lock = threading.Lock()
        self._held: dict[_Key, tuple[C, float]] = {}
        self._stepped: dict[_Key, float] = {}
        self._given_up: dict[_Key, float] = {}
        self._rounds = Rounds(
            "claim-keeper", self._prolong, failed="claims_not_prolonged", retry_seconds=ttl_seconds / 3
        )
        self._begun = False

    def keep(self, claim: C, *, claimed_at: float) -> None:
        """Start prolonging ``claim``; ``claimed_at`` is the clock before the claim was asked for."""
        with self._lock:
            self._held[_key(claim)] = (claim, claimed_at)
            self._stepped[_key(claim)] = self._clock()
            if not self._begun:
                self._begun = True
                self._rounds.start()
        self._rounds.want()

    def progress(self, claim: C) -> None:
        """The work under ``claim`` has done a step. One that was given up stays so."""
        key = _key(claim)
        with self._lock:
            if key in self._stepped:
                self._stepped[key] = self._clock()
            elif key in self._given_up:
                took = self._clock() - self._given_up.pop(key)
                self._patience = max(self._patience, min(1.5 * took, self._longest_patience))
                log.warning("step_was_slow", job=key[0], seconds=round(took, 1), patience_seconds=self._patience)

    def drop(self, claim: C) -> None:
        """Stop prolonging ``claim``."""
        with self._lock:
            self._forget(_key(claim))
            self._given_up.pop(_key(claim), None)

    @property
    def hangs(self) -> bool:
        """Whether work of this process hangs: a claim was given up, and neither did a step nor was dropped since."""
        return bool(self._given_up)

    def _forget(self, key: _Key) -> None:
        self._held.pop(key, None)
        self._stepped.pop(key, None)

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

    def _give_up(self) -> None:
        """Let go of the claims whose work hangs: this thread sees only that Redis answers."""
        with self._lock:
            now = self._clock()
            for key, stepped in list(self._stepped.items()):
                if now - stepped > self._patience:
                    log.error(
                        "claim_given_up", job=key[0], fence=key[1], seconds_without_progress=round(now - stepped, 1)
                    )
                    self._forget(key)
                    self._given_up[key] = stepped

    def _prolong(self) -> float | None:
        self._give_up()
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
                    self._forget(key)
        # Not as the wait for the next round: that ends with each claim that is made.
        self._rounds.pause(self._ttl / 3)
        return 0.0
