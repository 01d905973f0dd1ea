"""The farm at one moment, as `opencue-sched top` and the farm page show it.

The view costs a constant number of statements and of round trips to Redis, whatever the farm; what may grow with
it is summed by the database or bounded here. Cores, KB, seconds; things have their names, and all is as JSON has it.
"""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import redis
import structlog
from sqlalchemy import Connection, Engine, Row

from opencue_sched.dispatch.cooldown import EMPTY_SLEEP_SECONDS
from opencue_sched.dispatch.verdicts import BELIEVED_SECONDS, RecordedVerdict, VerdictLog, most_telling
from opencue_sched.domain.clusters import spelled_tags
from opencue_sched.domain.units import CENTICORES_PER_CORE, duration_text
from opencue_sched.domain.verdicts import Verdict
from opencue_sched.insight.breaking_hosts import find_breaking_hosts
from opencue_sched.insight.explain import (
    OLD_VERDICT_SECONDS,
    WaitReason,
    listed,
    switch_reasons,
    verdict_text,
)
from opencue_sched.insight.fleet import fleet_view, named
from opencue_sched.insight.limit_words import why_open
from opencue_sched.settings import Settings
from opencue_sched.store import insight as figures
from opencue_sched.store.fences import PersistentFences
from opencue_sched.store.jobs import list_jobs_by_wait
from opencue_sched.store.limit_reports import has_holders
from opencue_sched.store.limits import fetch_limits
from opencue_sched.store.shows import list_shows, list_subscriptions, list_use

log = structlog.get_logger(__name__)
_TROUBLE = {Verdict.QUARANTINED, Verdict.FAILED, Verdict.NO_FIT, Verdict.NO_HOST, Verdict.COOLED_DOWN, "dead"}
LayerVerdicts = Mapping[str, Sequence[RecordedVerdict]]
MOST_JOBS = 200
"""How many jobs the page and `top` show at most."""
MOST_SHOWS = 200
"""How many shows the page and `top` show at most."""
MOST_LIMITS = 50
"""How many limits the page and `top` show at most."""
BOOKINGS_SECONDS = 30.0
"""The time over which bookings per second are averaged."""


FarmView = Mapping[str, Any]
"""The farm as the page shows it, of the settings' facility or of all; shows, waiting frames by verdict and bookings are
always of all.

``jobs`` are those of ``jobs_total`` that wait longest, of which nothing runs first. ``waiting_by_verdict`` is as the
leading beat counted last (``waiting_counted_at``), like scheduler_waiting_frames; ``waiting_paused``: those of paused
jobs, which have no verdict. ``breaking_hosts``: those that may break frames, with words. ``fleet`` is as
fleet_view has it.
"""
AllocationUse = Mapping[str, Any]
"""``cores`` are ``booked``, ``idle``, ``locked`` (those of locked hosts that nothing runs on) and ``down`` (of hosts
that are silent or not UP)."""
ShowUse = Mapping[str, Any]
"""A show that is active or has something: its pending jobs, their frames by state, and cores in use. ``off``: what
keeps all of it from being booked, in words.

``subscriptions``: what the show has of allocations. ``share``: the show's part of what is in use there. ``due``: the
part that the show's size is of the sizes of all shows with frames running or waiting there. Each is None where there is
nothing to divide by, ``due`` also for a show without such frames."""
JobUse = Mapping[str, Any]
"""A pending job, its frames by state and cores in use. ``waiting_seconds``: how long its next frame has waited; None
when none waits. ``why`` is a reason of `explain` or a verdict; ``trouble``: it does not pass by itself. The texts are
for people."""
LimitUse = Mapping[str, Any]
"""A limit (a licence), the fullest first: how much of ``most`` is ``used``, in frames or machines (``counts``);
``settled`` and ``report_age`` are None where no licence server reports of it. ``open``: why it keeps nothing from
starting, in words."""
_OF_HOSTS = ("facility", "name", "hosts", "hosts_locked", "hosts_down")
_OF_CORES = ("cores", "booked", "idle", "locked", "down")
_OF_JOB = ("id", "name", "show", "user", "priority", "paused", "frames", "waiting", "running", "dead", "done")


def farm_view(engine: Engine, client: redis.Redis, settings: Settings, *, show: str = "", job: str = "") -> FarmView:
    """Read the farm. ``show`` and ``job`` are parts of names, and choose the jobs. Raises SQLAlchemyError and
    RedisError."""
    facility = settings.scheduler.facility
    with engine.connect() as connection:
        groups = figures.host_groups(connection, facility, staleness=settings.host_cache.host_staleness_threshold)
        shows = show_uses(connection, facility)
        jobs = list_jobs_by_wait(connection, facility=facility, show_part=show, part=job, most=MOST_JOBS)
        unreached = {layer.job_id: layer for layer in figures.unreached_layers(connection, [row.id for row in jobs])}
        bookings = figures.bookings(connection, seconds=BOOKINGS_SECONDS)
        window = settings.accounting.limit_settle_window_seconds
        limits = fetch_limits(connection, window, has_holders=has_holders(connection)).values()
        breaking = find_breaking_hosts(connection, settings)
    verdict_log = VerdictLog(client, settings.coordination.namespace)
    verdicts = verdict_log.of_jobs([row.id for row in jobs if row.waiting])
    by_verdict = verdict_log.waiting(believed_seconds=believed_seconds(settings))
    now = time.time()
    return {
        "at": now,
        "facility": facility,
        **{state: sum(use[state] for use in shows) for state in ("running", "waiting", "dead")},
        "bookings_per_second": round(bookings / BOOKINGS_SECONDS, 2),
        "waiting_by_verdict": dict(by_verdict.frames),
        "waiting_counted_at": by_verdict.counted_at,
        "waiting_paused": sum(use["paused_waiting"] for use in shows),
        "allocations": [named(group, _OF_HOSTS + _OF_CORES) for group in groups if group.name is not None],
        "breaking_hosts": [{"host": host, "words": words} for host, words in breaking.items()],
        "shows": shows[:MOST_SHOWS],
        "limits": sorted(map(_limit, limits), key=_fullest)[:MOST_LIMITS],
        "jobs": [_job(row, verdicts.get(row.id, {}), unreached.get(row.id), now) for row in jobs],
        "jobs_total": jobs[0].jobs if jobs else 0,
        "fleet": fleet_view(client, settings, PersistentFences(engine)),
    }


def believed_seconds(settings: Settings) -> float:
    """How long to believe a verdict: each cluster with work has a pass at least once in the longest sleep of a
    cluster."""
    return max(BELIEVED_SECONDS, 3 * max(EMPTY_SLEEP_SECONDS, settings.queue.cluster_saturated_sleep))


def show_uses(connection: Connection, facility: str | None) -> Sequence[ShowUse]:
    """The shows that are active or have something, the busy ones first, with their subscriptions in a facility, or in
    all (None)."""
    shows = list_shows(connection, use=False)
    subscriptions = [
        subscription
        for subscription in list_subscriptions(connection, use=False)
        if facility in (None, subscription.facility)
    ]
    cores_of: Counter[tuple[str, str]] = Counter()
    centicores_of: Counter[str] = Counter()
    for use in list_use(connection):
        cores_of[use.show_id, use.alloc_id] = use.cores
        centicores_of[use.show_id] += use.centicores
    busy = {show.id for show in shows if show.running_frames or show.waiting_frames}
    used: defaultdict[str, int] = defaultdict(int)
    sizes: defaultdict[str, int] = defaultdict(int)
    of_show: defaultdict[str, list[dict[str, Any]]] = defaultdict(list)
    for subscription in subscriptions:
        used[subscription.alloc_id] += cores_of[subscription.show_id, subscription.alloc_id]
        sizes[subscription.alloc_id] += max(0, subscription.size_centicores) if subscription.show_id in busy else 0
    for subscription in subscriptions:
        cores = cores_of[subscription.show_id, subscription.alloc_id]
        of_show[subscription.show_id].append(
            {
                "facility": subscription.facility,
                "allocation": subscription.allocation,
                "size": subscription.size_centicores / CENTICORES_PER_CORE,
                "burst": subscription.burst_centicores / CENTICORES_PER_CORE,
                "used": cores,
                "share": _part(cores, used[subscription.alloc_id]),
                "due": _part(max(0, subscription.size_centicores), sizes[subscription.alloc_id])
                if subscription.show_id in busy
                else None,
            }
        )
    found = [
        {
            "name": show.name,
            "off": _off(show, of_show[show.id]),
            "jobs": show.pending_jobs,
            "running": show.running_frames,
            "waiting": show.waiting_frames,
            "paused_waiting": show.paused_waiting_frames,
            "dead": show.dead_frames,
            "cores": centicores_of[show.id] / CENTICORES_PER_CORE,
            "subscriptions": of_show[show.id],
        }
        for show in shows
        if show.active or show.pending_jobs or centicores_of[show.id]
    ]
    return sorted(found, key=lambda use: (-use["cores"], -use["waiting"], use["name"]))


def _limit(limit: Row[Any]) -> LimitUse:
    """What the farm view says of a row of fetch_limits."""
    return {
        "name": limit.name,
        "counts": "machines" if limit.counts_machines else "frames",
        "used": limit.running,
        "most": limit.threshold,
        "frames": limit.frames,
        "settled": None if limit.reported_at is None else limit.settled,
        "report_age": limit.report_age,
        "open": why_open(limit),
    }


def _fullest(limit: LimitUse) -> tuple[float, str]:
    """A key that sorts limits by how much of them is used, the fullest first, then by name."""
    return -limit["used"] / max(1, limit["most"]), limit["name"]


def _off(show: Row[Any], subscriptions: Sequence[object]) -> str:
    """Why a show may not book, in words with commas between; empty where nothing keeps it from that."""
    words = (
        (not show.active, "inactive"),
        (not show.managed, "not managed"),
        (show.paused, "paused"),
        (not (show.booking and show.dispatch), "booking off"),
        (not subscriptions, "no subscription"),
    )
    return ", ".join(word for holds, word in words if holds)


def _job(row: Row[Any], verdicts: LayerVerdicts, unreached: Row[Any] | None, now: float) -> JobUse:
    """What the farm view says of a job: its figures, and why it waits. ``now``: epoch seconds."""
    why = _why(row, verdicts, unreached, now)
    return {
        **named(row, _OF_JOB),
        "cores": row.centicores / CENTICORES_PER_CORE,
        "waiting_seconds": row.waiting_seconds,
        "waiting_text": "" if row.waiting_seconds is None else duration_text(row.waiting_seconds),
        "why": str(why.code),
        "why_text": why.text,
        "trouble": why.code in _TROUBLE,
    }


def _why(row: Row[Any], verdicts: LayerVerdicts, unreached: Row[Any] | None, now: float) -> WaitReason:
    """What keeps the job from going on. `explain` says more, and of each layer."""
    if switched := next(switch_reasons(row), None):
        return switched
    if unreached is not None:  # no pass looks at such a layer
        whose = f" that show {row.show} may use" if unreached.elsewhere else ""
        words = listed(sorted(spelled_tags(unreached.tags).values()), last="or")
        return WaitReason(Verdict.NO_HOST, f"no host{whose} has the tag {words} of layer {unreached.layer}")
    if row.waiting:
        newest = filter(None, map(most_telling, verdicts.values()))
        said = max(newest, key=lambda verdict: (verdict.verdict.waiting, verdict.at), default=None)
        # A verdict that left no frame waiting is believed less long: it says nothing of other layers, or of frames that
        # came later.
        if said and now - said.at <= (OLD_VERDICT_SECONDS if said.verdict.waiting else BELIEVED_SECONDS):
            return WaitReason(said.verdict.verdict, verdict_text(said.verdict))
        return WaitReason("not_seen", "no pass has looked at it lately")
    if row.running:
        return WaitReason("running", "everything that may run does")
    if row.dead:
        return WaitReason("dead", "nothing goes on before its dead frames are retried or eaten")
    return WaitReason("depend", "waits for other frames")


def _part(number: float, of: float) -> float | None:
    return round(number / of, 4) if of > 0 else None
