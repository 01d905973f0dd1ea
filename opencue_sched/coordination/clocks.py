"""By which clock ticks are named: Redis's, unless PostgreSQL's contradicts it.

Neither is to be trusted alone. A tick that is named by a clock that runs ahead is recorded as fired, for good: when the
clock is put right its task waits until the time gets there. One that is named by a clock that was put back comes before
what was fired already, and its task waits as well.
"""

from __future__ import annotations

from dataclasses import dataclass

AGREE_SECONDS = 5.0
"""Clocks this close are taken for the same: the rest is their drift, and the way of an answer on a slow machine."""


@dataclass(frozen=True, slots=True)
class Clocks:
    """One moment by both clocks, seconds since the epoch. ``postgresql`` is None where nothing is recorded there."""

    redis: float
    postgresql: float | None = None

    @property
    def apart(self) -> float:
        """How far Redis is ahead of PostgreSQL, in seconds; below 0 when it is behind."""
        return 0.0 if self.postgresql is None else self.redis - self.postgresql

    @property
    def agree(self) -> bool:
        return abs(self.apart) <= AGREE_SECONDS

    def now(self, last_fired: float | None) -> float:
        """The time for a task whose last tick began at ``last_fired``.

        Of two clocks that disagree the earlier: nothing is named that is still to come by either. Unless that one is
        behind what was fired already, for then it is the one that is wrong. As long as one of the two is right, this is
        never ahead of it by more than AGREE_SECONDS; nor behind the last tick by more than twice that, for that one may
        have been named by a clock that was ahead, and this is said by one that is behind, both as far as they may be.
        """
        if self.postgresql is None or self.agree:
            return self.redis
        earlier, later = sorted((self.redis, self.postgresql))
        return later if last_fired is not None and earlier < last_fired - AGREE_SECONDS else earlier
