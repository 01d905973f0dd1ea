"""Postings whose messages do not count as lost in the middle of a test."""

from __future__ import annotations

from collections.abc import Callable

import redis

from opencue_sched.coordination.keys import BoardKeys
from opencue_sched.coordination.postings import ClusterPostings
from opencue_sched.domain.shards import Division

RESEND_MS = 60_000
"""When a message of these postings counts as lost: no machine stands still for so long between two calls of a test."""


def patient_postings(client: redis.Redis, *, division: Callable[[], Division] | None = None) -> ClusterPostings:
    """The board of clusters on which a message is sent again after RESEND_MS, not after the second of a worker's."""
    return ClusterPostings(client, BoardKeys("cue", "clusters"), division=division, resend_seconds=RESEND_MS / 1000)
