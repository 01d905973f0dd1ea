"""Why a job's frames wait, in an operator's words: what the database says by itself, and the last passes' verdicts.

What the database says decides (a paused job waits whatever a pass once said of it), so it comes first; then comes the
newest verdict. Reasons are ordered by how much they explain: the first one is what to change. Where a verdict of the
passes (``Verdict``, also the label of scheduler_waiting_frames) means the same as a reason, it is the reason's code.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime

import redis
from sqlalchemy import Connection

from opencue_sched.coordination.names import BoardKeys, cluster_board
from opencue_sched.coordination.postings import ClusterPostings, SkippedCluster
from opencue_sched.dispatch.verdicts import RecordedVerdict
from opencue_sched.domain.cluster import Verdict, normalise_tags
from opencue_sched.domain.depends import DependType
from opencue_sched.domain.farm import HardwareState, JobState, LockState
from opencue_sched.domain.units import CENTICORES_PER_CORE, near, os_names
from opencue_sched.settings import Settings
from opencue_sched.store import jobs, pending, waiting
from opencue_sched.store.jobs import Depend
from opencue_sched.store.pending import Limit, SubscriptionRow, fetch_limits
from opencue_sched.store.schema import SchemaFacts
from opencue_sched.store.waiting import Situation, TaggedHost

"""A cluster that no pass looks at now."""

# Sentences about what waits, for people.


def describe_depend(depend: Depend, job_name: str) -> str:
    """What is waited for: ``layer sim``, ``frame 0002-sim of job x``, ``layer sim, frame by frame``."""
    elsewhere = "" if depend.on_job == job_name else f" of job {depend.on_job}"
    if depend.on_frame is not None:
        return f"frame {depend.on_frame}{elsewhere}"
    if depend.on_layer is None:
        return f"job {depend.on_job}"
    what = f"layer {depend.on_layer}{elsewhere}"
    if depend.any_frame:
        return f"any frame of {what}"
    if depend.type == DependType.FRAME_BY_FRAME:
        return f"{what}, frame by frame"
    if depend.type == DependType.PREVIOUS_FRAME:
        return f"{what}, each frame for the one before"
    return what


def listed(words: list[str], *, most: int = 4, last: str = "and") -> str:
    """``a``, ``a and b``, ``a, b and 3 more``."""
    if len(words) > most:
        words = [*words[: most - 1], f"{len(words) - most + 1} more"]
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} {last} {words[-1]}"


# What holds a whole job back, as its rows and its show's say.


@dataclass(frozen=True, slots=True)
class WaitReason:
    """One reason. ``decides``: nothing can be booked while it holds, whatever else is true."""

    code: str
    text: str
    decides: bool = False


def job_reasons(
    situation: Situation,
    subscriptions: Sequence[SubscriptionRow],
    quarantine: jobs.QuarantinedJob | None,
    *,
    facility_scope: str | None,
    scope_exists: bool,
) -> tuple[WaitReason, ...]:
    """In the order in which an operator would have to change things. ``facility_scope`` is scheduler.facility."""
    name, state, show = situation.name, situation.state, situation.show
    show_on = f"`opencue-sched show {{}} {show} on`".format
    until = "" if quarantine is None else quarantine.until.astimezone().strftime("%H:%M:%S")
    why = "" if quarantine is None else quarantine.reason
    scoped_out = facility_scope is not None and facility_scope != situation.facility
    scope = f"the job is in facility {situation.facility}; this scheduler works on {facility_scope} only"
    if not scope_exists:
        scope = f"scheduler.facility names {facility_scope!r}, which is no facility"
    possible = [
        (state == JobState.FINISHED.value, "finished", "the job is finished"),
        (state not in (JobState.FINISHED.value, JobState.PENDING.value), "state", f"the job is {state}, not PENDING"),
        (situation.paused, "paused", f"the job is paused; `opencue-sched job unpause {name}`"),
        (not situation.auto_book, "auto_book", "booking is off for the job (b_auto_book)"),
        (
            quarantine is not None,
            Verdict.QUARANTINED,
            f"the job is in quarantine until {until}, because booking it failed: {why}",
        ),
        (not situation.show_active, "show_inactive", f"show {show} is not active; {show_on('active')}"),
        (
            not situation.show_managed,
            "show_unmanaged",
            f"show {show} is not managed by this scheduler; {show_on('managed')}",
        ),
        (not situation.show_booking, "show_booking", f"booking is off for show {show}; {show_on('booking')}"),
        (situation.show_paused, "show_paused", f"show {show} is paused"),
        (scoped_out, "facility", scope),
    ]
    switched = [WaitReason(code, text, decides=True) for holds, code, text in possible if holds]
    return (*switched, *_of_subscriptions(situation, subscriptions), *_of_caps(situation))


def _of_subscriptions(situation: Situation, subscriptions: Sequence[SubscriptionRow]) -> list[WaitReason]:
    show = situation.show
    here = [one for one in subscriptions if one.facility_id == situation.facility_id]
    create = f"`opencue-sched subscription create {show} ALLOCATION CORES`"
    if not subscriptions:
        return [WaitReason("no_subscription", f"show {show} has no subscription; {create}", decides=True)]
    if not here:
        text = f"show {show} has no subscription in facility {situation.facility}, where the job is; {create}"
        return [WaitReason("no_subscription", text, decides=True)]
    usable = [one for one in here if one.burst_centicores >= CENTICORES_PER_CORE]
    if not usable:
        return [WaitReason("burst_zero", f"the burst of show {show} is {_small_bursts(here)}", decides=True)]
    if all(one.cores >= one.burst_centicores // CENTICORES_PER_CORE for one in usable):
        full = listed([f"{one.allocation} ({one.cores} of {_burst(one)} cores)" for one in usable])
        return [WaitReason(Verdict.OVER_SUBSCRIPTION, f"show {show} is at its burst in {full}", decides=True)]
    return []


def _small_bursts(subscriptions: Sequence[SubscriptionRow]) -> str:
    """Bursts below one core, and where."""
    if all(one.burst_centicores <= 0 for one in subscriptions):
        return f"0 in {listed([one.allocation for one in subscriptions])}"
    return f"below one core in {listed([f'{one.allocation} ({_burst(one)} cores)' for one in subscriptions])}"


def _burst(subscription: SubscriptionRow) -> str:
    """In cores."""
    return f"{subscription.burst_centicores / CENTICORES_PER_CORE:g}"


def _of_caps(situation: Situation) -> list[WaitReason]:
    """Caps that are used up. GPUs concern only layers that want some, so they decide nothing by themselves."""
    reasons = []
    job_cap, folder_cap = situation.max_centicores, situation.folder_max_centicores
    if 0 < job_cap < (situation.cores + 1) * CENTICORES_PER_CORE:
        text = f"the job uses {situation.cores} of the {job_cap / CENTICORES_PER_CORE:g} cores it may"
        reasons.append(WaitReason(Verdict.OVER_JOB, f"{text}; `opencue-sched job max-cores`", decides=True))
    if 0 < folder_cap < (situation.folder_cores + 1) * CENTICORES_PER_CORE:
        cap = f"{folder_cap / CENTICORES_PER_CORE:g}"
        text = f"folder {situation.folder} uses {situation.folder_cores} of the {cap} cores it may"
        reasons.append(WaitReason(Verdict.OVER_FOLDER, text, decides=True))
    if 0 < situation.max_gpus <= situation.gpus:
        reasons.append(
            WaitReason(Verdict.OVER_JOB_GPUS, f"the job uses {situation.gpus} of the {situation.max_gpus} GPUs it may")
        )
    if 0 < situation.folder_max_gpus <= situation.folder_gpus:
        text = f"folder {situation.folder} uses {situation.folder_gpus} of the {situation.folder_max_gpus} GPUs it may"
        reasons.append(WaitReason(Verdict.OVER_FOLDER_GPUS, text))
    return reasons


# Whether there is any host a layer could go to, by tag, facility, allocation, lock, state and last report.


def host_reasons(
    layer: jobs.LayerView,
    situation: Situation,
    hosts: Sequence[TaggedHost],
    subscriptions: Sequence[SubscriptionRow],
    settings: Settings,
    known_tags: Sequence[str],
) -> list[WaitReason]:
    """At most one reason: the first of these that leaves no host over."""
    tags = normalise_tags(layer.tags)
    if not tags:
        return [WaitReason("no_tags", "the layer has no tags, so no host takes it", decides=True)]
    ignored = tags & set(settings.scheduler.ignore_tags)
    tags -= ignored
    if not tags:
        text = f"scheduler.ignore_tags leaves out {_tags(ignored)}, all the tags it has"
        return [WaitReason("ignored_tags", text, decides=True)]
    words = _tags(tags)
    tagged = [host for host in hosts if host.tags & tags]
    if not tagged:
        hint = near(next(iter(tags)), known_tags) if len(tags) == 1 else ""
        return [WaitReason(Verdict.NO_HOST, f"no host has the tag {words}{hint}", decides=True)]
    here = [host for host in tagged if host.facility_id == situation.facility_id]
    if not here:
        places = listed(sorted({host.facility for host in tagged}))
        text = f"hosts with the tag {words} are in facility {places}; the job is in {situation.facility}"
        return [WaitReason("other_facility", text, decides=True)]
    allocs = {one.alloc_id for one in subscriptions}
    subscribed = [host for host in here if host.alloc_id in allocs]
    if not subscribed:
        places = listed(sorted({host.allocation for host in here}))
        text = f"hosts with the tag {words} are in {places}; show {situation.show} has no subscription there"
        return [WaitReason("not_subscribed", text, decides=True)]
    ready, states = _ready(subscribed, settings.host_cache.host_staleness_threshold)
    if not ready:
        counts = ", ".join(f"{count} {state}" for state, count in states.most_common())
        return [WaitReason("hosts_unavailable", f"no host with the tag {words} can be used: {counts}", decides=True)]
    if situation.os and not any(situation.os in os_names(host.os) for host in ready):
        found = listed(sorted({host.os for host in ready}))
        text = f"the job wants the OS {situation.os}; hosts with the tag {words} have {found}"
        return [WaitReason("os", text, decides=True)]
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


SAME_PASS_SECONDS = 120.0
"""Verdicts of several clusters on one layer are compared when they are no further apart than this."""

OLD_VERDICT_SECONDS = 600.0
RECENT_VERDICT_SECONDS = 60.0
"""A job that passes have not looked at for so long has others before it."""

_TELLING = (
    Verdict.FLOWING,
    Verdict.QUARANTINED,
    Verdict.FAILED,
    Verdict.OVER_LIMIT,
    Verdict.OVER_JOB,
    Verdict.OVER_JOB_GPUS,
    Verdict.OVER_FOLDER,
    Verdict.OVER_FOLDER_GPUS,
    Verdict.OVER_SUBSCRIPTION,
    Verdict.CAPACITY,
    Verdict.NO_FIT,
    Verdict.NO_HOST,
    Verdict.BACKING_OFF,
    Verdict.PERMIT_HELD,
    Verdict.BEHIND,
    Verdict.COOLED_DOWN,
)
"""Of the verdicts of several clusters the first of these says most: hosts of one tag are busy, those of the other do
not exist."""


@dataclass(frozen=True, slots=True)
class LayerExplanation:
    """Why a layer's frames wait, the reason that explains most first, and the most telling verdict of the passes."""

    layer: jobs.LayerView
    reasons: tuple[WaitReason, ...]
    verdict: RecordedVerdict | None


@dataclass(frozen=True, slots=True)
class Explanation:
    """A job: what holds all of it back, and each layer."""

    job_id: str
    job: str
    state: str
    reasons: tuple[WaitReason, ...]
    layers: tuple[LayerExplanation, ...]


def explain_job(
    connection: Connection,
    job_id: str,
    settings: Settings,
    facts: SchemaFacts,
    verdicts: Mapping[str, Sequence[RecordedVerdict]],
    held: Sequence[SkippedCluster] = (),
    *,
    clock: Callable[[], float] = time.time,
) -> Explanation:
    """Explain a job. ``verdicts`` are those of its layers (VerdictLog.of_job), ``held`` the clusters that no pass looks
    at now; both are empty when Redis does not answer."""
    situation = waiting.situation(connection, job_id)
    subscriptions = pending.fetch_subscriptions(connection, situation.show_id)
    whole = job_reasons(
        situation,
        subscriptions,
        next(iter(jobs.quarantined_jobs(connection, job_id)), None),
        facility_scope=settings.scheduler.facility,
        scope_exists=settings.scheduler.facility is None
        or bool(pending.facility_ids(connection, settings.scheduler.facility)),
    )
    layers = jobs.layers_of(connection, job_id, has_start_after=facts.has_start_after)
    tags = {tag for layer in layers for tag in normalise_tags(layer.tags)}
    hosts = waiting.tagged_hosts(connection, tags)
    seen = {tag for host in hosts for tag in host.tags}
    known_tags = waiting.all_tags(connection) if tags - seen else []
    limits = {limit.name: limit for limit in fetch_limits(connection).values()}
    depends = jobs.depends_of(connection, job_id)
    now = clock()
    newest = {layer.id: most_telling(verdicts.get(layer.id, ())) for layer in layers}
    unseen = {layer for layer, seen in newest.items() if seen is None or now - seen.at > RECENT_VERDICT_SECONDS}
    behind = _behind_reasons(waiting.jobs_ahead(connection, job_id), settings) if unseen else []
    explained = []
    for layer in layers:
        found = _cluster_reasons(layer, situation, held)
        found += _start_reasons(layer, situation) + _limit_reasons(layer, limits)
        found += host_reasons(layer, situation, hosts, subscriptions, settings, known_tags)
        own = tuple(found if layer.waiting else ())
        own += tuple(behind) if layer.waiting and layer.id in unseen else ()
        explained.append(_explained(layer, whole, own, depends, newest[layer.id], situation.name, now))
    return Explanation(job_id, situation.name, situation.state, whole, tuple(explained))


def most_telling(recorded: Sequence[RecordedVerdict]) -> RecordedVerdict | None:
    """Of the verdicts of several clusters on one layer, newest first, the one that says most."""
    if not recorded:
        return None
    recent = [one for one in recorded if recorded[0].at - one.at <= SAME_PASS_SECONDS]
    return min(recent, key=lambda one: _TELLING.index(one.verdict.verdict))


def verdict_words(recorded: RecordedVerdict, now: float) -> str:
    """``capacity: a frame needs ... (4 s ago)``."""
    verdict = recorded.verdict
    detail = f": {verdict.detail}" if verdict.detail else ""
    placed = f", {verdict.frames} placed" if verdict.frames else ""
    return f"{verdict.verdict.value.replace('_', ' ')}{detail}{placed} ({_span(now - recorded.at)} ago)"


def _explained(
    layer: jobs.LayerView,
    whole: tuple[WaitReason, ...],
    own: tuple[WaitReason, ...],
    depends: Sequence[Depend],
    verdict: RecordedVerdict | None,
    job_name: str,
    now: float,
) -> LayerExplanation:
    reasons = _waiting_reasons(whole, own, verdict, now) if layer.waiting else []
    if layer.depend:
        reasons.append(_depend_reason(layer, depends, job_name))
    if layer.dead:
        frames = "1 frame is" if layer.dead == 1 else f"{layer.dead} frames are"
        reasons.append(WaitReason("dead", f"{frames} dead; `opencue-sched job retry {job_name}` lets them run again"))
    if not reasons and (layer.running or layer.checkpoint):
        reasons.append(WaitReason("running", "everything left of it is running"))
    elif not reasons:
        reasons.append(WaitReason("done", "it is done"))
    return LayerExplanation(layer, tuple(reasons), verdict)


def _waiting_reasons(
    whole: tuple[WaitReason, ...], own: tuple[WaitReason, ...], verdict: RecordedVerdict | None, now: float
) -> list[WaitReason]:
    """What decides; where nothing does, what the last pass said."""
    deciding = [reason for reason in (*whole, *own) if reason.decides]
    others = [reason for reason in (*whole, *own) if not reason.decides]
    if deciding:
        return [*deciding, *others]
    ask = "do workers and a beat run? `opencue-sched doctor` says"
    if verdict is None:
        return [WaitReason("not_seen", f"no pass has looked at it in the last day; {ask}"), *others]
    reasons = [WaitReason(verdict.verdict.verdict, verdict_words(verdict, now))]
    if now - verdict.at > OLD_VERDICT_SECONDS:
        reasons.append(WaitReason("not_seen", f"no pass has looked at it since; {ask}"))
    return [*reasons, *others]


def _behind_reasons(ahead: int, settings: Settings) -> list[WaitReason]:
    """A pass looks at the first jobs that may book something, and at those behind when it can place nothing of them."""
    window = settings.queue.max_jobs_per_cluster_pass
    if ahead < window:
        return []
    text = f"{ahead} jobs of its show with waiting frames come before it (priority, then age); a pass looks at {window}"
    return [WaitReason(Verdict.BEHIND, text)]


def _cluster_reasons(layer: jobs.LayerView, situation: Situation, held: Sequence[SkippedCluster]) -> list[WaitReason]:
    """The clusters of the layer that no pass looks at. They decide when they have all of its tags."""
    tags, left = frozenset(normalise_tags(layer.tags)), set(normalise_tags(layer.tags))
    here = []
    for it in held:
        cluster = it.cluster
        if cluster is None or (cluster.facility_id, cluster.show_id) != (situation.facility_id, situation.show_id):
            continue
        if not tags.isdisjoint(cluster.tags):
            left.difference_update(cluster.tags)
            here.append(it)
    return [
        WaitReason("trashed" if it.until is None else Verdict.COOLED_DOWN, cluster_words(it), decides=not left)
        for it in here
    ]


def cluster_postings(client: redis.Redis, settings: Settings) -> ClusterPostings:
    """The postings of the clusters of one's own facility scope."""
    return ClusterPostings(
        client, BoardKeys(settings.coordination.namespace, cluster_board(settings.scheduler.facility))
    )


def cluster_words(held: SkippedCluster) -> str:
    """Why no pass looks at a cluster, and what to do."""
    key = held.key
    if held.until is None:
        return f"cluster {key} was put into the trash ({held.reason}); `opencue-sched board restore {key}`"
    again = datetime.fromtimestamp(held.until).astimezone().strftime("%H:%M:%S")
    times = "the last pass" if held.failures == 1 else f"the last {held.failures} passes"
    return (
        f"{times} over cluster {key} failed ({held.reason}), the next one comes at {again}; "
        f"`opencue-sched board show {key}` has the traceback"
    )


def _start_reasons(layer: jobs.LayerView, situation: Situation) -> list[WaitReason]:
    if layer.start_after is None or layer.start_after <= situation.now:
        return []
    seconds = (layer.start_after - situation.now).total_seconds()
    moment = layer.start_after.astimezone().strftime("%Y-%m-%d %H:%M:%S")
    return [WaitReason("start_after", f"not to be started before {moment} (in {_span(seconds)})", decides=True)]


def _limit_reasons(layer: jobs.LayerView, limits: Mapping[str, Limit]) -> list[WaitReason]:
    text = "limit {0.name} is full ({0.running} of {0.max_value} frames run)"
    full = [limits[name] for name in layer.limits if name in limits and limits[name].full]
    return [WaitReason(Verdict.OVER_LIMIT, text.format(limit), decides=True) for limit in full]


def _depend_reason(layer: jobs.LayerView, depends: Sequence[Depend], job_name: str) -> WaitReason:
    own = [one for one in depends if one.er_layer == layer.name or one.er_layer is None]
    on = list(dict.fromkeys(describe_depend(one, job_name) for one in own))
    waits = "1 frame waits" if layer.depend == 1 else f"{layer.depend} frames wait"
    if not on:
        return WaitReason("depend", f"{waits} for something that is gone; the scheduler frees such within ten minutes")
    return WaitReason("depend", f"{waits} for {listed(on)}")


def _span(seconds: float) -> str:
    seconds = max(0.0, seconds)
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"
