"""Watches for claims on cluster postings that nobody prolongs any more, and has their work go on the moment they end.

A sweep finds them too, but at its next tick, and only while a beat leads: a machine that takes a worker and the leading
beat with it would keep the worker's clusters waiting for the election. So every worker watches. It costs two commands a
third of a claim's life, and one while nothing is claimed; a claim is looked at more closely only when its holder has
missed its time to prolong it. The board gives the ticket of the message to one of those who ask.
"""

from __future__ import annotations

from collections.abc import Callable

import structlog

from opencue_sched.coordination.postings import AFTER_THE_END_SECONDS, ClusterPostings, Offered
from opencue_sched.coordination.rounds import Rounds

log = structlog.get_logger(__name__)


class ClaimWatch(Rounds):
    """One thread. ``send`` puts a message for a posting on a dispatch queue."""

    def __init__(self, postings: ClusterPostings, *, ttl_seconds: float, send: Callable[[Offered], None]) -> None:
        super().__init__("claim-watch", self.look, failed="claims_not_watched", retry_seconds=ttl_seconds / 3)
        self._postings = postings
        self._ttl = ttl_seconds
        self._send = send
        self._overdue: frozenset[str] = frozenset()

    def look(self) -> float:
        """Send a message for every posting whose claim ran out. Seconds until the next look. Raises RedisError.

        A claim that is prolonged at a third of its life has two thirds left at least. One that has less is remembered:
        whoever uses the board after its end makes the posting ready, and then it is on no list of claims.
        """
        left = self._postings.ending(self._ttl * 2 / 3)
        over = {uuid for uuid, seconds in left.items() if seconds <= 0} | (self._overdue - left.keys())
        self._overdue |= left.keys()
        for uuid in over:
            if offered := self._postings.offer_again(uuid):
                log.warning("claim_ran_out", posting=uuid, cluster=offered.cluster.key)
                self._send(offered)
        self._overdue = frozenset(left.keys() - over)
        nearest = min((left[uuid] for uuid in self._overdue), default=self._ttl)
        return min(self._ttl / 3, nearest + AFTER_THE_END_SECONDS)
