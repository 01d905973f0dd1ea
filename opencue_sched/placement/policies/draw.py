"""The order of a show's jobs: by rank, with a part by draw, so that nothing starves.

Time is cut into epochs of EPOCH_SECONDS. Of these the part ``queue.priority_draw`` goes by draw and the others by rank:
priority first, then age, as OpenCue's own dispatcher does. In a drawn epoch each job has a key u^(1/priority), the
largest first (Efraimidis and Spirakis), where u is a hash of the job's id and of the epoch's seed: a job of priority
200 comes first twice as often as one of 100. A hash is the same for every pass of the epoch, so a job that was drawn
keeps its turn long enough to get something done, and two passes never disagree. The query computes it
(store.pending): it is the order before the limit on jobs, not a shuffle of the first few.
"""

from __future__ import annotations

import math
from hashlib import blake2b

EPOCH_SECONDS = 2.0
"""Long enough for several passes over a full farm, short enough that a job with one core's worth of luck a minute does
not wait for many."""


def seed_of_draw(show_id: str, shard: str, now: float, part: float) -> str:
    """The seed of the epoch at ``now`` (epoch seconds of the database); '' for an epoch that goes by rank.

    ``part`` of the epochs of each show and shard, spread evenly, is drawn; different shows begin at different epochs.
    """
    epoch = math.floor(now / EPOCH_SECONDS)
    place = f"{show_id}|{shard}"
    offset = int.from_bytes(blake2b(place.encode(), digest_size=4).digest()) / 2**32
    drawn = math.floor((epoch + 1) * part + offset) > math.floor(epoch * part + offset)
    return f"{place}|{epoch}|" if drawn else ""
