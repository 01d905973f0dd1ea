"""Watches for cluster postings that should have been worked on by now, and sends messages for them: those whose message
nobody took, and those for which nobody sent one when their rest was over.

A sweep does, too, but only while a beat leads: what was lost with the leader's machine, or falls due while none is
elected, would wait for the election. So every worker watches. It costs one command every two seconds while no message
is waited for and nothing rests but clusters without work, and two else. The board gives the ticket of the next message
to one of those who ask.
"""

from __future__ import annotations

from collections.abc import Callable

import structlog

from opencue_sched.coordination.postings import ClusterPostings, Offered
from opencue_sched.coordination.rounds import Rounds

log = structlog.get_logger(__name__)

LOOK_SECONDS = 2.0
"""With the time after which a message is overdue, less than the 3 s that a cluster may be stranded."""


class MessageWatch(Rounds):
    """One thread. ``send`` puts a message for a posting on a dispatch queue."""

    def __init__(self, postings: ClusterPostings, *, send: Callable[[Offered], None]) -> None:
        super().__init__("message-watch", self.look, failed="messages_not_watched", retry_seconds=LOOK_SECONDS)
        self._postings = postings
        self._send = send

    def look(self) -> float:
        """Send a message for every posting for which one is overdue. Seconds until the next look. Raises RedisError."""
        for offered in self._postings.overdue():
            log.debug("message_overdue", posting=offered.uuid, cluster=offered.cluster.key, again=offered.again)
            self._send(offered)
        return LOOK_SECONDS
