"""What a periodic message is worth: its leader may have been paused between its check and its message."""

from __future__ import annotations

from enum import StrEnum

import redis

from opencue_sched.coordination.leader import FenceStore
from opencue_sched.coordination.names import LeaderKeys


class Standing(StrEnum):
    """What a periodic message is worth when it is acted on."""

    CURRENT = "current"
    FORMER_LEADER = "former_leader"
    OVERTAKEN = "overtaken"


def tick_standing(
    client: redis.Redis,
    keys: LeaderKeys,
    fence: int,
    task: str | None = None,
    tick: int = 0,
    *,
    fences: FenceStore | None = None,
) -> Standing:
    """Whether a message was sent by the latest leader, and no later tick of the same task has been fired since.

    Not by age: the sender's clock and the receiver's may differ by more than the interval. A Redis that was emptied
    knows of no leader: then the fence store is asked. Raises RedisError, and SQLAlchemyError of that.
    """
    with client.pipeline(transaction=False) as pipe:
        pipe.get(keys.fence)
        pipe.hget(keys.last_ticks, task or "")
        highest, last = pipe.execute()
    if highest is None and fences is not None:
        highest = fences.highest(keys.name)
        last = fences.last_ticks(keys.name).get(task or "")
    if highest is not None and int(highest) > fence:
        return Standing.FORMER_LEADER
    if task is not None and last is not None and int(last) > tick:
        return Standing.OVERTAKEN
    return Standing.CURRENT
