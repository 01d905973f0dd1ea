"""Whether there is any host a layer could go to, by tag, facility, allocation, lock, state and last report."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from opencue_sched.domain.names import os_names
from opencue_sched.domain.spec_fields import near
from opencue_sched.domain.states import HardwareState, LockState
from opencue_sched.domain.tags import normalise_tags
from opencue_sched.operate.explain_job import Reason
from opencue_sched.operate.waiting_words import listed
from opencue_sched.settings import Settings
from opencue_sched.store.jobs import Layer
from opencue_sched.store.waiting import Situation, Subscribed, TaggedHost


def host_reasons(
    layer: Layer,
    situation: Situation,
    hosts: Sequence[TaggedHost],
    subscriptions: Sequence[Subscribed],
    settings: Settings,
    known_tags: Sequence[str],
) -> list[Reason]:
    """At most one reason: the first of these that leaves no host over."""
    tags = normalise_tags(layer.tags)
    if not tags:
        return [Reason("no_tags", "the layer has no tags, so no host takes it", decides=True)]
    ignored = tags & set(settings.scheduler.ignore_tags)
    tags -= ignored
    if not tags:
        text = f"scheduler.ignore_tags leaves out {_tags(ignored)}, all the tags it has"
        return [Reason("ignored_tags", text, decides=True)]
    words = _tags(tags)
    tagged = [host for host in hosts if host.tags & tags]
    if not tagged:
        hint = near(next(iter(tags)), known_tags) if len(tags) == 1 else ""
        return [Reason("no_host", f"no host has the tag {words}{hint}", decides=True)]
    here = [host for host in tagged if host.facility_id == situation.facility_id]
    if not here:
        places = listed(sorted({host.facility for host in tagged}))
        text = f"hosts with the tag {words} are in facility {places}; the job is in {situation.facility}"
        return [Reason("other_facility", text, decides=True)]
    allocs = {one.alloc_id for one in subscriptions}
    subscribed = [host for host in here if host.alloc_id in allocs]
    if not subscribed:
        places = listed(sorted({host.allocation for host in here}))
        text = f"hosts with the tag {words} are in {places}; show {situation.show} has no subscription there"
        return [Reason("not_subscribed", text, decides=True)]
    ready, states = _ready(subscribed, settings.host_cache.host_staleness_threshold)
    if not ready:
        counts = ", ".join(f"{count} {state}" for state, count in states.most_common())
        return [Reason("hosts_unavailable", f"no host with the tag {words} can be used: {counts}", decides=True)]
    if situation.os and not any(situation.os in os_names(host.os) for host in ready):
        found = listed(sorted({host.os for host in ready}))
        text = f"the job wants the OS {situation.os}; hosts with the tag {words} have {found}"
        return [Reason("os", text, decides=True)]
    return []


def _ready(hosts: Sequence[TaggedHost], staleness: float) -> tuple[list[TaggedHost], Counter[str]]:
    """The hosts that can be used, and why the others cannot, counted."""
    ready = []
    states: Counter[str] = Counter()
    for host in hosts:
        if host.state != HardwareState.UP.value:
            states[host.state.lower().replace("_", " ")] += 1
        elif host.lock_state != LockState.OPEN.value:
            states[host.lock_state.lower().replace("_", " ")] += 1
        elif host.report_age > staleness:
            states[f"silent for over {staleness:g} s"] += 1
        else:
            ready.append(host)
    return ready, states


def _tags(tags: frozenset[str] | set[str]) -> str:
    return listed(sorted(tags), last="or")
