"""Why a job's frames wait, in an operator's words: what the database says by itself, and the last passes' verdicts.

What the database says decides (a paused job waits whatever a pass once said of it), so it comes first; then comes the
newest verdict. Reasons are ordered by how much they explain: the first one is what to change. Where a verdict of the
passes (``Verdict``, also the label of scheduler_waiting_frames) means the same as a reason, it is the reason's code.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from operator import attrgetter
from typing import Any

import redis
from sqlalchemy import Connection, Row

from opencue_sched.coordination.postings import SkippedCluster, cluster_postings
from opencue_sched.coordination.presence import Members, list_members
from opencue_sched.dispatch.verdicts import (
    BELIEVED_SECONDS,
    RecordedShortages,
    RecordedVerdict,
    VerdictLog,
    most_telling,
)
from opencue_sched.domain.clusters import normalise_tag, normalise_tags, spelled_tags
from opencue_sched.domain.depends import DependType
from opencue_sched.domain.frame_needs import MEM_RESERVED_MIN_KB, Search, fewest_cores_anywhere, least_cores
from opencue_sched.domain.hosts import Host, Resources
from opencue_sched.domain.jobs import MEMORY_FLOOR_KB
from opencue_sched.domain.names import near, os_names, plural
from opencue_sched.domain.states import HardwareState, JobState, LockState, ThreadMode
from opencue_sched.domain.units import CENTICORES_PER_CORE, KB_PER_GIB, duration_text, memory_text
from opencue_sched.domain.verdicts import LayerVerdict, Verdict
from opencue_sched.insight.breaking_hosts import find_breaking_hosts
from opencue_sched.insight.comments import comment_document, comment_words
from opencue_sched.insight.frame_logs import Deaths
from opencue_sched.insight.limit_words import full_limit, still_running
from opencue_sched.insight.silent_hosts import SilentHost, silent_hosts
from opencue_sched.settings import Settings
from opencue_sched.store import insight as figures
from opencue_sched.store import jobs
from opencue_sched.store.comments import comments_of
from opencue_sched.store.folders import list_folders
from opencue_sched.store.hosts import list_hosts, list_procs
from opencue_sched.store.jobs import Depend
from opencue_sched.store.limit_reports import has_holders
from opencue_sched.store.limits import fetch_limits, list_holders
from opencue_sched.store.shows import list_subscriptions

OLD_VERDICT_SECONDS = 600.0
"""The age of a verdict from which the explanation also says that no pass has looked at the layer since."""
_DEATHS = 3
"""How many ways in which frames died are named for each layer, unless every reason is asked for."""
_COMMENTS = 3
"""How many comments of a job are shown, the newest."""
SEATS = "seats"
"""Code of the second reason that a limit without free seats gives: machines that hold seats start more frames."""
# The states of a layer's frames that are counted, by the columns of store.jobs.layers_of.
_STATES = ("waiting", "running", "depend", "dead", "done")


@dataclass(frozen=True, slots=True)
class WaitReason:
    """One reason why frames wait."""

    code: str
    """The name of the reason for programs: that of a Verdict where one means the same."""
    text: str
    """The reason in words, for people."""
    decides: bool = True
    """Whether nothing can be booked while the reason holds, whatever else is true."""


@dataclass(frozen=True, slots=True)
class Explanation:
    """Why a job waits: its layers, and the hosts that stand in its way. ``dataclasses.asdict`` gives JSON."""

    job: str
    """The name of the job."""
    id: str
    state: str
    rank: Mapping[str, Any] | None
    """How the job stands among the jobs of its show (store.insight.rank), with ``drawn``: the part of the show's cores
    that passes give by a draw instead of by rank. None for a job that passes do not look for."""
    silent_hosts: tuple[SilentHost, ...]
    """The hosts that stopped reporting while frames of the job run there."""
    unreached_hosts: tuple[str, ...]
    """A sentence on each host with the job's tags, or frames, that reports but whose RQD does not answer a worker."""
    breaking_hosts: tuple[str, ...]
    """A sentence on each host with the job's tags that may break frames."""
    layers: tuple[Mapping[str, Any], ...]
    """A mapping for each layer: its name and id, how many frames it has (``frames``) and how many are in each state,
    the ``reasons`` for which they wait (at least one, and the one that explains most first), and how dead frames died
    (``deaths``), if the caller has asked for that."""
    comments: tuple[Mapping[str, Any], ...]
    """The newest comments of the job, the oldest of them first: when, who, and what."""


@dataclass(frozen=True, slots=True)
class PassesSaid:
    """What passes over the clusters of a job's show said last, as Redis has it; empty where Redis does not answer."""

    verdicts: Mapping[str, Sequence[RecordedVerdict]] = field(default_factory=dict)
    """The recorded verdicts of the job's layers, by layer id."""
    skipped: Sequence[SkippedCluster] = ()
    """The clusters that no pass looks at now."""
    unreached: Mapping[str, str] = field(default_factory=dict)
    """The hosts that workers do not reach, as `unreached_hosts` has them."""
    shortages: Sequence[RecordedShortages] = ()
    """What many layers of the show wait for at once, as the last pass over each cluster found it, the newest first."""


NOTHING_SAID = PassesSaid()
"""What passes said where Redis does not answer."""


@dataclass(frozen=True, slots=True)
class _JobFacts:
    """What the reasons of each layer of a job rest on, read once for all of them."""

    job: jobs.JobView
    of_job: Sequence[WaitReason]
    """The reasons for which every layer of the job waits."""
    layers: Sequence[jobs.LayerView]
    hosts: Sequence[Row[Any]]
    """All hosts with a tag of the layers, whatever their facility and state."""
    subscriptions: Sequence[Row[Any]]
    """The subscriptions of the job's show."""
    limits: Mapping[str, Row[Any]]
    """All limits, by name."""
    rank: Mapping[str, Any] | None
    said: PassesSaid
    settings: Settings
    now: float
    """Epoch seconds of this machine."""


def explain_job(
    connection: Connection,
    job_id: str,
    settings: Settings,
    said: PassesSaid = NOTHING_SAID,
    deaths: Sequence[Deaths] = (),
) -> Explanation:
    """Explain a job, with what passes ``said`` of it, and how frames died (``deaths``, of frame_logs.deaths_of, which
    reads logs). Raises NoResultFound for a job that does not exist."""
    job = jobs.job_of(connection, job_id)
    layers = jobs.layers_of(connection, job_id)
    facts = _facts_of(connection, job, layers, settings, said)
    depends = jobs.depends_of(connection, job_id)
    explained = []
    for layer in layers:
        reasons = [*_why_waiting(connection, facts, layer), *_of_states(layer, depends, job.name)]
        died = [death for death in deaths if death.layer_id == layer.id]
        counts = {"frames": layer.total, **{state: getattr(layer, state) for state in _STATES}}
        explained.append({"layer": layer.name, "id": layer.id, **counts, "reasons": reasons, "deaths": died})
    with_its_tags = {host.host for host in facts.hosts}
    return Explanation(
        job.name,
        job_id,
        job.state,
        facts.rank,
        silent_hosts(connection, settings, job),
        tuple(_unreached(connection, settings, job, layers, said.unreached)),
        tuple(words for host, words in find_breaking_hosts(connection, settings).items() if host in with_its_tags),
        tuple(explained),
        tuple(
            {**comment_document(comment), "words": comment_words(comment)}
            for comment in comments_of(connection, "job", job_id)[-_COMMENTS:]
        ),
    )


def _facts_of(
    connection: Connection, job: jobs.JobView, layers: Sequence[jobs.LayerView], settings: Settings, said: PassesSaid
) -> _JobFacts:
    """Read what the reasons of a job's layers rest on. The number of statements does not grow with the layers."""
    subscriptions = list_subscriptions(connection, show_id=job.show_id)
    of_job = [*switch_reasons(job)]
    if (scope := settings.scheduler.facility) not in (None, job.facility):
        text = f"the job is in facility {job.facility}; this scheduler works on {scope} only"
        of_job.append(WaitReason("facility", text))
    of_job += _of_subscriptions(job, subscriptions)
    for folder in list_folders(connection, job.show_id):
        if folder.id == job.folder_id:
            of_job += _of_caps(job, folder)
    window = settings.accounting.limit_settle_window_seconds
    limits = fetch_limits(connection, window, has_holders=has_holders(connection))
    rank = figures.rank(connection, job.id)
    return _JobFacts(
        job=job,
        of_job=of_job,
        layers=layers,
        hosts=_hosts_of(connection, layers),
        subscriptions=subscriptions,
        limits={limit.name: limit for limit in limits.values()},
        rank=None if rank is None else {**rank._asdict(), "drawn": settings.queue.priority_draw},
        said=said,
        settings=settings,
        now=time.time(),
    )


def _why_waiting(connection: Connection, facts: _JobFacts, layer: jobs.LayerView) -> list[WaitReason]:
    """The reasons for which the waiting frames of a layer wait, the one to change first; none where no frame waits."""
    if not layer.waiting:
        return []
    job, said, now = facts.job, facts.said, facts.now
    reasons = [*facts.of_job, *_of_clusters(layer, job, said.skipped), *_of_start(layer, now)]
    full = [facts.limits[name] for name in layer.limits if name in facts.limits and facts.limits[name].left == 0]
    reasons += _of_limits(connection, full, layer, facts.hosts, facts.settings)
    reasons += _of_hosts(layer, job, facts.hosts, facts.subscriptions, facts.settings)
    newest = most_telling(said.verdicts.get(layer.id, ()))
    behind: list[WaitReason] = []
    if newest is None or now - newest.at > BELIEVED_SECONDS:
        # No pass has come to the layer lately, but what was found for others may hold for it. A verdict on a layer that
        # needs the same says more than a shortage.
        found_for_others = [
            *_as_another(layer, facts.layers, said.verdicts, now),
            *_of_requirements(layer, said.shortages, now),
        ]
        behind = [*found_for_others[:1], *_behind(layer, facts.layers, facts.rank)]
    return [*_in_order(reasons, behind, newest, now), *_of_memory(layer)]


def passes_over(client: redis.Redis, settings: Settings, job_id: str, show_id: str) -> PassesSaid:
    """Read what passes said of a job and its show. Raises RedisError."""
    namespace = settings.coordination.namespace
    verdicts = VerdictLog(client, namespace)
    unreached = unreached_hosts(list_members(client, namespace))
    skipped = cluster_postings(client, settings).skipped()
    return PassesSaid(verdicts.of_jobs([job_id])[job_id], skipped, unreached, verdicts.of_show(show_id))


def _in_order(
    found: list[WaitReason], behind: list[WaitReason], verdict: RecordedVerdict | None, now: float
) -> list[WaitReason]:
    """The reasons in the order to show: those that decide, or ``behind`` and what the last pass said where none does;
    then the others."""
    deciding = [reason for reason in found if reason.decides]
    # Reasons that end by themselves come last: a frame that no host takes still waits when a cap has room again.
    deciding.sort(key=lambda reason: reason.code in _USED_UP)
    if not deciding:
        ask = "do workers and a beat run? `opencue-sched doctor` says"
        if verdict is None:
            not_seen = f"no pass has looked at it yet, or in the last day; {ask}"
            deciding = [*behind, WaitReason("not_seen", not_seen, decides=False)]
        else:
            deciding = [*behind, WaitReason(verdict.verdict.verdict, verdict_words(verdict, now), decides=False)]
            if now - verdict.at > OLD_VERDICT_SECONDS:
                deciding.append(WaitReason("not_seen", f"no pass has looked at it since; {ask}", decides=False))
    return [*deciding, *(reason for reason in found if reason not in deciding)]


def verdict_words(recorded: RecordedVerdict, now: float) -> str:
    """A recorded verdict in words, with its age: ``capacity: a frame needs ... (4 s ago)``."""
    placed = f", {recorded.verdict.frames} placed" if recorded.verdict.frames else ""
    return f"{verdict_text(recorded.verdict)}{placed} ({duration_text(now - recorded.at)} ago)"


def verdict_text(verdict: LayerVerdict) -> str:
    """A verdict in words: ``capacity: a frame needs ...``."""
    words = verdict.verdict.value.replace("_", " ")
    return f"{words}: {verdict.detail}" if verdict.detail else words


def _hosts_of(connection: Connection, layers: Sequence[jobs.LayerView]) -> Sequence[Row[Any]]:
    """The hosts with any tag of the layers."""
    return list_hosts(connection, tags={tag for layer in layers for tag in normalise_tags(layer.tags)})


_USED_UP = frozenset({Verdict.OVER_SUBSCRIPTION, Verdict.OVER_JOB, Verdict.OVER_FOLDER, Verdict.OVER_LIMIT})
"""Reasons that end when frames that run have ended."""


def unserved(
    connection: Connection, job_id: str, settings: Settings, layer_ids: Collection[str] | None = None
) -> list[str]:
    """Sentences about layers of a job that no host of the farm could serve now, however idle it were, and about
    services that do not exist. ``layer_ids``: look at these layers only. At most six statements."""
    job = jobs.job_of(connection, job_id)
    subscriptions = list_subscriptions(connection, show_id=job.show_id)
    layers = [row for row in jobs.layers_of(connection, job_id) if layer_ids is None or row.id in layer_ids]
    hosts = _hosts_of(connection, layers)
    services = figures.services(connection, job.show_id)
    notes = [reason.text for reason in _of_subscriptions(job, subscriptions) if reason.code not in _USED_UP]
    of_layers: dict[str, list[str]] = {}
    for layer in layers:
        # Without a subscription no host is reached: ``notes`` have that already, for the whole job.
        found = [] if notes else _of_hosts(layer, job, hosts, subscriptions, settings)
        sentences = [reason.text for reason in found if reason.decides]
        unknown = sorted(set(layer.services.split(",")) - services)
        sentences += [f"there is no service {name!r}{near(name, services)}" for name in unknown]
        for text in sentences:
            of_layers.setdefault(text, []).append(layer.name)
    for text, names in of_layers.items():
        notes.append(f"layer{'s' if len(names) > 1 else ''} {listed(names)}: {text}")
    return notes


# What holds a whole job back, as its rows and its show's say, in the order in which an operator would change things.


def switch_reasons(job: jobs.JobView) -> Iterator[WaitReason]:
    """What is switched off for the job or its show, and the job's quarantine: while any of it lasts, no frame of the
    job can be booked."""

    def show_on(switch: str) -> str:
        return f"`opencue-sched show {switch} {job.show} on`"

    unmanaged = f"show {job.show} is not managed by this scheduler; {show_on('managed')}"
    for holds, code, text in (
        (job.state == JobState.FINISHED, "finished", "the job is finished"),
        (job.state not in (JobState.FINISHED, JobState.PENDING), "state", f"the job is {job.state}, not PENDING"),
        (job.paused, "paused", f"the job is paused; `opencue-sched job unpause {job.name}`"),
        (not job.auto_book, "auto_book", "booking is off for the job (b_auto_book)"),
        (not job.show_active, "show_inactive", f"show {job.show} is not active; {show_on('active')}"),
        (not job.show_managed, "show_unmanaged", unmanaged),
        (not job.show_booking, "show_booking", f"booking is off for show {job.show}; {show_on('booking')}"),
        (job.show_paused, "show_paused", f"show {job.show} is paused"),
    ):
        if holds:
            yield WaitReason(code, text)
    if job.quarantined is not None:
        until = job.quarantined_until.astimezone().strftime("%H:%M:%S")
        text = f"the job is in quarantine until {until}, because booking it failed: {job.quarantined}"
        yield WaitReason(Verdict.QUARANTINED, text)


def _of_subscriptions(job: jobs.JobView, subscriptions: Sequence[Row[Any]]) -> Iterator[WaitReason]:
    """Why the subscriptions of the job's show allow no frame. Each frame takes at least one core."""
    here = [subscription for subscription in subscriptions if subscription.facility_id == job.facility_id]
    usable = [subscription for subscription in here if subscription.burst_centicores >= CENTICORES_PER_CORE]
    if not here:
        where = f" in facility {job.facility}, where the job is" if subscriptions else ""
        create = f"`opencue-sched subscription create {job.show} ALLOCATION CORES`"
        yield WaitReason("no_subscription", f"show {job.show} has no subscription{where}; {create}")
    elif not usable:
        small = listed([f"{subscription.allocation} ({_burst(subscription)} cores)" for subscription in here])
        yield WaitReason("burst_zero", f"the burst of show {job.show} is below one core in {small}")
    elif all(
        subscription.used_cores >= subscription.burst_centicores // CENTICORES_PER_CORE for subscription in usable
    ):
        full = listed(
            [
                f"{subscription.allocation} ({subscription.used_cores} of {_burst(subscription)} cores)"
                for subscription in usable
            ]
        )
        yield WaitReason(Verdict.OVER_SUBSCRIPTION, f"show {job.show} is at its burst in {full}")


def _burst(subscription: Row[Any]) -> str:
    """The burst of a subscription in cores."""
    return f"{subscription.burst_centicores / CENTICORES_PER_CORE:g}"


def _of_caps(job: jobs.JobView, folder: Row[Any]) -> Iterator[WaitReason]:
    """The caps under which the job has no room for one more core or GPU. A cap of 0 or -1 is none."""
    its_folder = f"folder {folder.name} uses"
    cores = job.max_centicores / CENTICORES_PER_CORE
    folder_cores = folder.max_centicores / CENTICORES_PER_CORE
    for code, who, used, cap, what in (
        (Verdict.OVER_JOB, "the job uses", job.cores, cores, "cores it may; `opencue-sched job max-cores`"),
        (Verdict.OVER_FOLDER, its_folder, folder.used_cores, folder_cores, "cores it may"),
        (Verdict.OVER_JOB_GPUS, "the job uses", job.gpus, job.max_gpus, "GPUs it may"),
        (Verdict.OVER_FOLDER_GPUS, its_folder, folder.used_gpus, folder.max_gpus, "GPUs it may"),
    ):
        if 0 < cap < used + 1:
            # Every frame takes cores, but GPUs concern only layers that want some.
            decides = code in (Verdict.OVER_JOB, Verdict.OVER_FOLDER)
            yield WaitReason(code, f"{who} {used} of the {cap:g} {what}", decides)


# What holds one layer back.


def _of_clusters(layer: jobs.LayerView, job: jobs.JobView, skipped: Sequence[SkippedCluster]) -> list[WaitReason]:
    """The clusters of the layer that no pass looks at. These reasons decide where no other cluster has a tag of the
    layer."""
    tags = normalise_tags(layer.tags)
    here = [
        posting
        for posting in skipped
        if posting.cluster is not None
        and (posting.cluster.facility_id, posting.cluster.show_id) == (job.facility_id, job.show_id)
        and not tags.isdisjoint(posting.cluster.tags)
    ]
    all_of_it = tags <= {tag for posting in here if posting.cluster for tag in posting.cluster.tags}
    return [
        WaitReason(
            "trashed" if posting.until is None else Verdict.COOLED_DOWN, cluster_words(posting), decides=all_of_it
        )
        for posting in here
    ]


def _of_start(layer: jobs.LayerView, now: float) -> Iterator[WaitReason]:
    """The moment before which no frame of the layer may start, where it lies ahead."""
    if layer.start_after is not None and (left := layer.start_after.timestamp() - now) > 0:
        moment = layer.start_after.astimezone().strftime("%Y-%m-%d %H:%M:%S")
        why = f": {layer.start_after_reason}" if layer.start_after_reason else ""
        yield WaitReason("start_after", f"not to be started before {moment} (in {duration_text(left)}){why}")


def _of_limits(
    connection: Connection,
    limits: Sequence[Row[Any]],
    layer: jobs.LayerView,
    hosts: Sequence[Row[Any]],
    settings: Settings,
) -> Iterator[WaitReason]:
    """Reasons for ``limits``, which have nothing left. Where one counts machines, a second reason says which frames
    start all the same."""
    if not limits:
        return
    tags = normalise_tags(layer.tags)
    least = max(layer.cores_min, CENTICORES_PER_CORE)
    free = [
        host.host
        for host in hosts
        if host.idle_centicores >= min(least, host.centicores)  # a smaller host is free when nothing runs there
        and not tags.isdisjoint(map(normalise_tag, host.tags))
        and not unavailable(host, settings.host_cache.host_staleness_threshold)
    ]
    for limit in limits:
        holders = list_holders(connection, limit_ids=[limit.id]) if limit.counts_machines else ()
        yield WaitReason(Verdict.OVER_LIMIT, full_limit(limit, holders, free))
        if limit.counts_machines:
            yield WaitReason(SEATS, still_running(limit), decides=False)


def _of_hosts(
    layer: jobs.LayerView,
    job: jobs.JobView,
    hosts: Sequence[Row[Any]],
    subscriptions: Sequence[Row[Any]],
    settings: Settings,
) -> Iterator[WaitReason]:
    """Why no host can take the layer: the first condition that leaves no host. Where hosts are left, what else of them
    may be in the way."""
    spelled = spelled_tags(layer.tags)
    tags = frozenset(spelled)
    ignored = tags & set(map(normalise_tag, settings.scheduler.ignore_tags))
    named = sorted(tags - ignored) or sorted(ignored)
    words = listed([spelled[tag] for tag in named], last="or") if named else ""
    tagged = [host for host in hosts if not (tags - ignored).isdisjoint(map(normalise_tag, host.tags))]
    here = [host for host in tagged if host.facility_id == job.facility_id]
    allocs = {subscription.alloc_id for subscription in subscriptions}
    subscribed = [host for host in here if host.alloc_id in allocs]
    unfit = {host.id: unavailable(host, settings.host_cache.host_staleness_threshold) for host in subscribed}
    ready = [host for host in subscribed if not unfit[host.id]]
    fitting = [host for host in ready if not job.os or job.os in os_names(host.os)]
    if not tags:
        yield WaitReason("no_tags", "the layer has no tags, so no host takes it")
    elif tags == ignored:
        yield WaitReason("ignored_tags", f"scheduler.ignore_tags leaves out {words}, all the tags it has")
    elif not tagged:
        yield WaitReason(Verdict.NO_HOST, f"no host has the tag {words}")
    elif not here:
        places = listed(sorted({host.facility for host in tagged}))
        text = f"hosts with the tag {words} are in facility {places}; the job is in {job.facility}"
        yield WaitReason("other_facility", text)
    elif not subscribed:
        places = listed(sorted({host.allocation for host in here}))
        text = f"hosts with the tag {words} are in {places}; show {job.show} has no subscription there"
        yield WaitReason("not_subscribed", text)
    elif not ready:
        counts = ", ".join(f"{count} {state}" for state, count in Counter(unfit.values()).most_common())
        yield WaitReason("hosts_unavailable", f"no host with the tag {words} can be used: {counts}")
    elif not fitting:
        found = listed(sorted({host.os for host in ready}))
        yield WaitReason("os", f"the job wants the OS {job.os}; hosts with the tag {words} have {found}")
    else:
        yield from _too_small(layer, fitting, words)
        yield from _locked_cores(fitting)


def _locked_cores(hosts: Sequence[Row[Any]]) -> Iterator[WaitReason]:
    """The reason that names the hosts on which cores are locked, if there are any. Such cores are idle and get no
    frames."""
    locked = [host for host in hosts if host.locked_centicores > 0]
    if locked:
        cores = sum(host.locked_centicores for host in locked) / CENTICORES_PER_CORE
        where = (
            f"{listed([host.host for host in locked])} are locked on {'its RQD' if len(locked) == 1 else 'their RQDs'}"
        )
        yield WaitReason("cores_locked", f"{cores:g} cores of {where}, and get no frames", decides=False)


_SIZE = attrgetter("centicores", "locked_centicores", "memory_kb", "gpus", "gpu_memory_kb", "thread_mode")
"""The columns of a host that decide whether a frame could run there while nothing else does."""


def _too_small(layer: jobs.LayerView, hosts: Sequence[Row[Any]], words: str) -> Iterator[WaitReason]:
    """What the host that comes nearest lacks, where none could take a frame even with nothing on it. ``words``: the
    hosts' tags."""
    one_of_each_size = {_SIZE(host): host for host in sorted(hosts, key=attrgetter("host"), reverse=True)}
    lacks = {host.host: _lacks(layer, host) for host in one_of_each_size.values()}
    if all(lacks.values()):
        # The host that lacks the fewest kinds of things, and of such hosts the one that lacks the least of them.
        name = min(lacks, key=lambda host: (len(lacks[host]), sum(share for share, _ in lacks[host]), host))
        text = f"no host with the tag {words} that can be used is large enough for a frame; the nearest, {name}, "
        yield WaitReason(Verdict.NO_FIT, text + listed([lack for _, lack in lacks[name]]))


def _lacks(layer: jobs.LayerView, row: Row[Any]) -> list[tuple[float, str]]:
    """What a host has too little of for one frame even when idle: the missing share of each amount, and words."""
    mode = ThreadMode(row.thread_mode) if row.thread_mode in list(ThreadMode) else ThreadMode.AUTO
    centicores = max(0, row.centicores - row.locked_centicores)
    locked = (
        f" ({row.locked_centicores / CENTICORES_PER_CORE:g} are locked on its RQD)" if row.locked_centicores else ""
    )
    host = Host(
        id=row.id,
        name=row.host,
        facility_id=row.facility_id,
        alloc_id=row.alloc_id,
        tags=frozenset(),
        os_names=(),
        thread_mode=mode,
        total_centicores=centicores,
        idle_centicores=centicores,
        total_memory_kb=row.memory_kb,
        idle_memory_kb=row.memory_kb,
    )
    search = _search_of(layer)
    need, least = search.need, least_cores(search, host)
    # ``least`` is 0 or less where the layer leaves so many cores alone that the host has none for it.
    wanted_cores = least if least > 0 else host.total_cores + 1 - least
    sizes = (
        (f"cores{locked}", wanted_cores, host.total_cores, 1),
        ("GiB of memory", need.memory_kb, row.memory_kb, KB_PER_GIB),
        ("GPUs", need.gpus, row.gpus, 1),
        ("GiB of GPU memory", need.gpu_memory_kb, row.gpu_memory_kb, KB_PER_GIB),
    )
    found = [
        ((wanted - has) / wanted, f"has {max(0, has) / unit:.4g} of {wanted / unit:.4g} {noun}")
        for noun, wanted, has, unit in sizes
        if wanted > has
    ]
    if mode is ThreadMode.ALL and not layer.threadable:
        found.append((1.0, "takes only frames that thread"))
    return found


def _search_of(layer: jobs.LayerView) -> Search:
    """What a frame of the layer looks for in a host, whatever the tags and OS. Its cores follow from the layer's least
    and most; the one core in ``need`` stands for them."""
    need = Resources(
        cores=1,
        memory_kb=max(layer.memory_kb, MEM_RESERVED_MIN_KB),
        gpus=layer.gpus,
        gpu_memory_kb=layer.gpu_memory_kb,
    )
    return Search(
        tags=(),
        os_name=None,
        need=need,
        threadable=layer.threadable,
        cores_min_centicores=layer.cores_min,
        cores_max_centicores=layer.cores_max,
    )


def unavailable(host: Row[Any], staleness_seconds: float) -> str:
    """Why a host cannot be used; an empty text if it can. A host that has not reported for ``staleness_seconds`` is
    silent."""
    for state, usable in ((host.state, HardwareState.UP), (host.lock, LockState.OPEN)):
        if state != usable:
            return str(state).lower().replace("_", " ")
    return f"silent for over {staleness_seconds:g} s" if host.report_age > staleness_seconds else ""


def _behind(
    layer: jobs.LayerView, layers: Sequence[jobs.LayerView], rank: Mapping[str, Any] | None
) -> Iterator[WaitReason]:
    """The reason that counts what comes before a layer in its show's order, for a layer that no pass has come to
    lately. ``rank``: its place in that order, as a pass wrote it; None: nothing is yielded."""
    if rank is None:
        return
    own = [other for other in layers if other.waiting]
    before = own[: own.index(layer)]
    ahead = []
    if rank["place"] > 1:
        ahead.append(f"{plural(rank['place'] - 1, 'job')} ({plural(rank['layers_ahead'], 'layer')}) of its show")
    if before:
        ahead.append(f"{plural(len(before), 'layer')} of its own job")
    if ahead:
        text = f"no pass has come to it in the last {duration_text(BELIEVED_SECONDS)}: frames of {' and '.join(ahead)}"
        yield WaitReason(Verdict.BEHIND, f"{text} come first (priority, then age)", decides=False)


_NEEDS = attrgetter("cores_min", "cores_max", "threadable", "memory_kb", "gpus", "gpu_memory_kb", "tags", "limits")
"""The columns of a layer that decide on which hosts, and under which limits, its frames may run."""
_HOLDS_FOR_ALL = frozenset(
    {
        Verdict.OVER_SUBSCRIPTION,
        Verdict.OVER_JOB,
        Verdict.OVER_JOB_GPUS,
        Verdict.OVER_FOLDER,
        Verdict.OVER_FOLDER_GPUS,
        Verdict.OVER_LIMIT,
        Verdict.OVER_SHARE,
        Verdict.KEPT_FOR_GPUS,
        Verdict.CAPACITY,
        Verdict.NO_FIT,
        Verdict.NO_HOST,
    }
)
"""Verdicts that hold for every layer of the job with the same needs as the layer that was judged."""


def _as_another(
    layer: jobs.LayerView,
    layers: Sequence[jobs.LayerView],
    verdicts: Mapping[str, Sequence[RecordedVerdict]],
    now: float,
) -> Iterator[WaitReason]:
    """The last verdict on another layer of the job that needs the same, for a layer that no pass has come to lately; on
    the first such layer."""
    for other in layers:
        newest = most_telling(verdicts.get(other.id, ()))
        if (
            newest is not None
            and now - newest.at <= BELIEVED_SECONDS
            and newest.verdict.verdict in _HOLDS_FOR_ALL
            and _NEEDS(other) == _NEEDS(layer)
        ):
            words = f"as layer {other.name}, which needs the same: {verdict_words(newest, now)}"
            yield WaitReason(newest.verdict.verdict, words, decides=False)
            return


def _of_memory(layer: jobs.LayerView) -> Iterator[WaitReason]:
    """What became of the memory that the layer was submitted with."""
    if layer.optimize and layer.memory_kb == layer.max_rss_kb + MEMORY_FLOOR_KB:
        used, now = memory_text(layer.max_rss_kb), memory_text(layer.memory_kb)
        text = f"its memory was lowered to {now}: its frames used {used} at most; `layer set --no-optimize` ends that"
        yield WaitReason("memory_lowered", text, decides=False)
    if layer.asking_frames:
        needed = plural(layer.asking_frames, "frame of it needed", "frames of it needed")
        most = memory_text(layer.asking_kb)
        raised = f", so all ask for {memory_text(layer.memory_kb)}" if layer.asked_kb == layer.memory_kb else ""
        text = f"{needed} more memory than the layer had, up to {most}, and ask for that{raised}"
        yield WaitReason("memory_raised", text, decides=False)


def _of_requirements(layer: jobs.LayerView, shortages: Sequence[RecordedShortages], now: float) -> Iterator[WaitReason]:
    """The newest shortage that holds for the layer, because the layer has its tags and needs at least as much: for a
    layer that no pass has come to lately."""
    search = _search_of(layer)
    need = replace(search.need, cores=fewest_cores_anywhere(search))
    tags = normalise_tags(layer.tags)
    for recorded in shortages:
        for shortage in recorded.shortages:
            believed = now - recorded.at <= BELIEVED_SECONDS
            if believed and tags.issuperset(shortage.tags) and need.covers(shortage.need):
                words = f"{shortage.detail} ({duration_text(now - recorded.at)} ago)"
                verdict = shortage.verdict.value.replace("_", " ")
                yield WaitReason(shortage.verdict, f"{verdict}: {words}", decides=False)
                return


def _of_states(layer: jobs.LayerView, depends: Sequence[Depend], job_name: str) -> Iterator[WaitReason]:
    """The reasons of frames that do not wait for a host: they wait for other frames, are dead, run, or are done."""
    if layer.depend:
        own = (depend for depend in depends if depend.er_layer in (layer.name, None))
        on = list(dict.fromkeys(describe_depend(depend, job_name) for depend in own))
        on_what = listed(on) if on else "something that is gone; the scheduler frees such within ten minutes"
        waits = plural(layer.depend, "frame waits", "frames wait")
        yield WaitReason("depend", f"{waits} for {on_what}", decides=False)
    if layer.dead:
        frames = plural(layer.dead, "frame is", "frames are")
        them = "it" if layer.dead == 1 else "them"
        retry = f"`opencue-sched job retry {job_name}` lets {them} run again"
        yield WaitReason("dead", f"{frames} dead; {retry}", decides=False)
    if layer.waiting or layer.depend or layer.dead:
        return
    if layer.running or layer.checkpoint:
        yield WaitReason("running", "everything left of it is running", decides=False)
    else:
        yield WaitReason("done", "it is done", decides=False)


def _rank_words(rank: Mapping[str, Any]) -> str:
    """How the job stands in the order of its show, and in the draw of cores, if there is one."""
    among = f"{plural(rank['jobs'], 'job')} of the show with frames waiting"
    place = f"the job is number {rank['place']} of {among} by rank (priority {rank['priority']}, then age)"
    draw = f"; {rank['drawn']:.0%} of the cores are drawn, of which its part is {rank['chance']:.1%}"
    return place + (draw if rank["drawn"] else "")


# Hosts that report as ever, while their RQDs do not answer a worker.


def unreached_hosts(members: Members) -> dict[str, str]:
    """The hosts whose own RQDs do not answer a worker, with words for people, by name."""
    return {
        host: f"worker {worker.instance} cannot talk to it: its RQD {words}"
        for worker in members.alive
        for host, words in worker.unreached
    }


def _unreached(
    connection: Connection,
    settings: Settings,
    job: jobs.JobView,
    layers: Sequence[jobs.LayerView],
    unreached: Mapping[str, str],
) -> Iterator[str]:
    """A sentence on each of the unreached hosts that reports, and runs frames of the job or might."""
    if not unreached:
        return
    frames = Counter(proc.host for proc in list_procs(connection, job_id=job.id))
    tags = {tag for layer in layers if layer.waiting for tag in normalise_tags(layer.tags)}
    for host in list_hosts(connection):
        concerned = host.host in frames or not tags.isdisjoint(map(normalise_tag, host.tags))
        if host.host in unreached and concerned and not unavailable(host, settings.host_cache.host_staleness_threshold):
            running = f", with {plural(frames[host.host], 'frame')} of it," if frames[host.host] else ""
            yield f"host {host.host}{running} reports, but {unreached[host.host]}"


def explanation_lines(explanation: Explanation, *, every_reason: bool = False) -> list[str]:
    """A line for each layer with something left to do, and how the job stands where others are in the way.

    ``every_reason``: for every layer, with a line for each further reason.
    """
    lines = []
    for layer in explanation.layers:
        if not (every_reason or layer["waiting"] or layer["running"] or layer["depend"] or layer["dead"]):
            continue
        first, *others = layer["reasons"]
        numbers = ", ".join(f"{layer[state]} {state}" for state in _STATES if layer[state]) or "no frames"
        lines.append(f"{layer['layer']} ({numbers}): {first.text}")
        lines += [f"  also: {reason.text}" for reason in others if every_reason or reason.code == SEATS]
        for death in layer["deaths"] if every_reason else layer["deaths"][:_DEATHS]:
            lines += death.lines_for_people()
    lines = lines or [f"nothing of {explanation.job} waits: it is {explanation.state}"]
    lines += [*(host.words for host in explanation.silent_hosts), *explanation.unreached_hosts]
    lines += explanation.breaking_hosts
    # Where waiting frames of it may be booked, its rank says when.
    if explanation.rank and any(layer["waiting"] and not layer["reasons"][0].decides for layer in explanation.layers):
        lines.append(_rank_words(explanation.rank))
    lines += [f"comment {comment['words']}" for comment in explanation.comments]
    return lines


def cluster_words(skipped: SkippedCluster) -> str:
    """Why no pass looks at a cluster, and what to do."""
    key = skipped.key
    if skipped.until is None:
        return f"cluster {key} was put into the trash ({skipped.reason}); `opencue-sched board restore {key}`"
    again = datetime.fromtimestamp(skipped.until).astimezone().strftime("%H:%M:%S")
    times = "the last pass" if skipped.failures == 1 else f"the last {skipped.failures} passes"
    return (
        f"{times} over cluster {key} failed ({skipped.reason}), the next one comes at {again}; "
        f"`opencue-sched board show {key}` has the traceback"
    )


# Words for people.


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
    """The words in one list: ``a``, ``a and b``, ``a, b and 3 more``. There must be at least one."""
    if len(words) > most:
        words = [*words[: most - 1], f"{len(words) - most + 1} more"]
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} {last} {words[-1]}"
