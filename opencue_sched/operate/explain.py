"""Why a job's frames wait, in an operator's words: what the database says by itself, and the last passes' verdicts.

What the database says decides (a paused job waits whatever a pass once said of it), so it comes first; then comes the
newest verdict. Reasons are ordered by how much they explain: the first one is what to change.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime

from sqlalchemy import Connection

from opencue_sched.coordination.postings import ClusterCooldown, TrashedPosting
from opencue_sched.dispatch.verdicts import RecordedVerdict
from opencue_sched.domain.tags import normalise_tags
from opencue_sched.domain.verdicts import Verdict
from opencue_sched.operate.explain_hosts import host_reasons
from opencue_sched.operate.explain_job import Reason, job_reasons
from opencue_sched.operate.waiting_words import describe_depend, listed
from opencue_sched.settings import Settings
from opencue_sched.store import jobs, waiting
from opencue_sched.store.limits import Limit, fetch_limits
from opencue_sched.store.schema import SchemaFacts

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
    """A layer, how far it is, and why its frames wait: the reason that explains most first."""

    id: str
    name: str
    total: int
    waiting: int
    running: int
    depend: int
    dead: int
    done: int
    reasons: tuple[Reason, ...]
    verdict: RecordedVerdict | None

    @property
    def open(self) -> bool:
        """Whether anything of it waits or is dead."""
        return self.waiting + self.depend + self.dead > 0


@dataclass(frozen=True, slots=True)
class Explanation:
    """A job: what holds all of it back, and each layer."""

    job_id: str
    job: str
    state: str
    reasons: tuple[Reason, ...]
    layers: tuple[LayerExplanation, ...]


def explain_job(
    connection: Connection,
    job_id: str,
    settings: Settings,
    facts: SchemaFacts,
    verdicts: Mapping[str, Sequence[RecordedVerdict]],
    held: Sequence[ClusterCooldown | TrashedPosting] = (),
    *,
    clock: Callable[[], float] = time.time,
) -> Explanation:
    """Explain a job. ``verdicts`` are those of its layers (VerdictLog.of_job), ``held`` the clusters that no pass looks
    at now; both are empty when Redis does not answer."""
    situation = waiting.situation(connection, job_id)
    subscriptions = waiting.subscriptions(connection, situation.show_id)
    whole = job_reasons(
        situation,
        subscriptions,
        waiting.quarantine(connection, job_id) if facts.has_our_objects else None,
        facility_scope=settings.scheduler.facility,
        scope_exists=settings.scheduler.facility is None
        or waiting.facility_exists(connection, settings.scheduler.facility),
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
    return f"{verdict.verdict.value.replace('_', ' ')}{detail}{placed} ({_ago(now - recorded.at)})"


def _explained(
    layer: jobs.Layer,
    whole: tuple[Reason, ...],
    own: tuple[Reason, ...],
    depends: Sequence[jobs.Depend],
    verdict: RecordedVerdict | None,
    job_name: str,
    now: float,
) -> LayerExplanation:
    reasons = _waiting_reasons(whole, own, verdict, now) if layer.waiting else []
    if layer.depend:
        reasons.append(_depend_reason(layer, depends, job_name))
    if layer.dead:
        frames = "1 frame is" if layer.dead == 1 else f"{layer.dead} frames are"
        reasons.append(Reason("dead", f"{frames} dead; `opencue-sched job retry {job_name}` lets them run again"))
    if not reasons:
        reasons.append(_over_reason(layer))
    return LayerExplanation(
        layer.id,
        layer.name,
        layer.total,
        layer.waiting,
        layer.running,
        layer.depend,
        layer.dead,
        layer.succeeded + layer.eaten,
        tuple(reasons),
        verdict,
    )


def _waiting_reasons(
    whole: tuple[Reason, ...], own: tuple[Reason, ...], verdict: RecordedVerdict | None, now: float
) -> list[Reason]:
    """What decides; where nothing does, what the last pass said."""
    deciding = [reason for reason in (*whole, *own) if reason.decides]
    others = [reason for reason in (*whole, *own) if not reason.decides]
    if deciding:
        return [*deciding, *others]
    ask = "do workers and a beat run? `opencue-sched doctor` says"
    if verdict is None:
        return [Reason("not_seen", f"no pass has looked at it in the last day; {ask}"), *others]
    reasons = [Reason("verdict", verdict_words(verdict, now))]
    if now - verdict.at > OLD_VERDICT_SECONDS:
        reasons.append(Reason("not_seen", f"no pass has looked at it since; {ask}"))
    return [*reasons, *others]


def _behind_reasons(ahead: int, settings: Settings) -> list[Reason]:
    """A pass looks at the first jobs that may book something, and at those behind when it can place nothing of them."""
    window = settings.queue.max_jobs_per_cluster_pass
    if ahead < window:
        return []
    words = (
        f"{ahead} jobs of its show with waiting frames come before it (priority, then age); a pass looks at {window}"
    )
    return [Reason("behind", words)]


def _cluster_reasons(
    layer: jobs.Layer, situation: waiting.Situation, held: Sequence[ClusterCooldown | TrashedPosting]
) -> list[Reason]:
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
        Reason("cooled_down" if isinstance(it, ClusterCooldown) else "trashed", cluster_words(it), decides=not left)
        for it in here
    ]


def cluster_words(held: ClusterCooldown | TrashedPosting) -> str:
    """Why no pass looks at a cluster, and what to do."""
    key = held.key
    if isinstance(held, TrashedPosting):
        return f"cluster {key} was put into the trash ({held.reason}); `opencue-sched board restore {key}`"
    again = datetime.fromtimestamp(held.until).astimezone().strftime("%H:%M:%S")
    times = "the last pass" if held.failures == 1 else f"the last {held.failures} passes"
    return (
        f"{times} over cluster {key} failed ({held.reason}), the next one comes at {again}; "
        f"`opencue-sched board show {key}` has the traceback"
    )


def _start_reasons(layer: jobs.Layer, situation: waiting.Situation) -> list[Reason]:
    if layer.start_after is None or layer.start_after <= situation.now:
        return []
    seconds = (layer.start_after - situation.now).total_seconds()
    moment = layer.start_after.astimezone().strftime("%Y-%m-%d %H:%M:%S")
    return [Reason("start_after", f"not to be started before {moment} (in {_span(seconds)})", decides=True)]


def _limit_reasons(layer: jobs.Layer, limits: Mapping[str, Limit]) -> list[Reason]:
    full = [limits[name] for name in layer.limits if name in limits and limits[name].full]
    return [
        Reason("limit", f"limit {limit.name} is full ({limit.running} of {limit.max_value} frames run)", decides=True)
        for limit in full
    ]


def _depend_reason(layer: jobs.Layer, depends: Sequence[jobs.Depend], job_name: str) -> Reason:
    own = [one for one in depends if one.er_layer == layer.name or one.er_layer is None]
    on = list(dict.fromkeys(describe_depend(one, job_name) for one in own))
    waits = "1 frame waits" if layer.depend == 1 else f"{layer.depend} frames wait"
    if not on:
        return Reason("depend", f"{waits} for something that is gone; the scheduler frees such within ten minutes")
    return Reason("depend", f"{waits} for {listed(on)}")


def _over_reason(layer: jobs.Layer) -> Reason:
    if layer.running or layer.checkpoint:
        return Reason("running", "everything left of it is running")
    return Reason("done", "it is done")


def _ago(seconds: float) -> str:
    return f"{_span(seconds)} ago"


def _span(seconds: float) -> str:
    seconds = max(0.0, seconds)
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"
