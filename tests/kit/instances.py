"""Instances as presences announce them, and the queues of their group and type."""

from __future__ import annotations

from collections.abc import Sequence

from opencue_sched.coordination.keys import QueueName, consumed_queues
from opencue_sched.coordination.presence import Presence
from opencue_sched.domain.clusters import Cluster, ClusterKind

CLUSTER = Cluster("fac", "show", ClusterKind.ALLOC, ("general",), "alloc")
TYPE, GROUP = QueueName("cue", "dispatch"), QueueName("cue", "dispatch", "default")


def present(
    client,
    instance: str,
    *,
    capacity: int = 2,
    group: str = "default",
    facility: str | None = None,
    consumes: Sequence[str] | None = None,
    **state,
) -> Presence:
    """Announce an instance that consumes all of its queues, or these."""
    presence = Presence(
        client,
        "cue",
        types=("dispatch",),
        group=group,
        instance=instance,
        capacity=capacity,
        facility=facility,
        capabilities=consumed_queues("cue", "dispatch", group, instance) if consumes is None else consumes,
    )
    presence.announce()
    presence.refresh(**state)
    return presence
