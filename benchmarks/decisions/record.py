"""What happened in one run, and the pure functions that scenarios are judged by.

Times are seconds from the submission of the first work. Cores are cores. A run that had not ended when the record was
closed has ``ended`` None and counts to the record's end.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import mean
from typing import TypeVar

Key = TypeVar("Key", bound=Hashable)


@dataclass(frozen=True, slots=True)
class Layer:
    """What was submitted. ``work`` is the name its declaration goes by; ``job`` is the job's number within it."""

    id: str
    work: str
    show: str
    job: int
    cores: int
    gpus: int = 0
    priority: int = 100
    licences: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Machine:
    """A host of the farm; ``kind`` is the name its declaration goes by."""

    name: str
    kind: str
    cores: int
    gpus: int = 0


@dataclass(frozen=True, slots=True)
class Run:
    """One proc, from its booking to its end."""

    frame: str
    layer: Layer
    host: str
    cores: int
    began: float
    ended: float | None = None
    gpus: int = 0


@dataclass(frozen=True, slots=True)
class Wait:
    """A frame that could have run from ``since`` on; ``began`` is None when it never did."""

    layer: Layer
    since: float
    began: float | None


@dataclass(frozen=True, slots=True)
class Seated:
    """How many seats of a product its licence server has given away from ``at`` on: to the farm, and to artists."""

    at: float
    product: str
    farm: int
    artists: int


@dataclass(frozen=True, slots=True)
class Denial:
    """A frame of a layer that got no seat."""

    at: float
    product: str
    layer: str


@dataclass(frozen=True)
class Record:
    """One run of a scenario. ``seconds`` is its length, ``marks`` when its events were carried out.

    ``needs``: the frames that must have ended before a frame may start. ``counters``: the most that was seen in Redis
    under each name that the scenario watches. ``audit``: the names of the invariants that the audit found broken.
    ``others_percent``: how much of the machine's processors others had meanwhile. ``shards``: among how many the hosts
    were divided at the end. ``seated`` and ``denials`` are what licence servers did, ``reports`` when what they said
    of a product was taken, and ``found`` what was read when something had happened, or in the end.
    """

    seconds: float
    hosts: Mapping[str, Machine]
    runs: Sequence[Run]
    waits: Sequence[Wait] = ()
    marks: Mapping[str, float] = field(default_factory=dict)
    needs: Mapping[str, Collection[str]] = field(default_factory=dict)
    counters: Mapping[str, float] = field(default_factory=dict)
    audit: Sequence[str] = ()
    others_percent: int = 0
    shards: int = 1
    seated: Sequence[Seated] = ()
    denials: Sequence[Denial] = ()
    reports: Sequence[tuple[float, str]] = ()
    found: Mapping[str, float] = field(default_factory=dict)

    @property
    def cores(self) -> int:
        return sum(host.cores for host in self.hosts.values())

    def end_of(self, run: Run) -> float:
        return self.seconds if run.ended is None else run.ended

    def busy(self, begin: float, end: float, by: Callable[[Run], Key | None]) -> dict[Key, float]:
        """Mean cores in use between two times, summed by key; runs whose key is None are left out."""
        sums: dict[Key, float] = defaultdict(float)
        for run in self.runs:
            key = by(run)
            if key is not None:
                sums[key] += run.cores * max(0.0, min(end, self.end_of(run)) - max(begin, run.began))
        return {key: total / (end - begin) for key, total in sums.items()}

    def utilisation(self, begin: float, end: float, kind: str | None = None) -> float:
        """The part of the farm's cores (or of the hosts of one kind) in use between two times."""
        hosts = {name for name, host in self.hosts.items() if kind in (None, host.kind)}
        cores = sum(self.hosts[name].cores for name in hosts)
        used = self.busy(begin, end, lambda run: "used" if run.host in hosts else None)
        return used.get("used", 0.0) / cores

    def gpu_use(self, begin: float, end: float) -> float:
        """The part of the farm's GPUs in use between two times."""
        spans = ((run.gpus, min(end, self.end_of(run)) - max(begin, run.began)) for run in self.runs)
        used = sum(gpus * max(0.0, span) for gpus, span in spans)
        return used / ((end - begin) * sum(host.gpus for host in self.hosts.values()))

    def starts(self, begin: float, end: float, by: Callable[[Run], Key]) -> Counter[Key]:
        """How many runs began between two times, by key."""
        return Counter(by(run) for run in self.runs if begin <= run.began < end)

    def shows(self, begin: float, end: float) -> dict[str, float]:
        """Mean cores in use by show."""
        return self.busy(begin, end, lambda run: run.layer.show)

    def peak(self, weight: Callable[[Run], float]) -> float:
        """The most that the weights of all running frames added up to at any one moment."""
        changes = [(run.began, weight(run)) for run in self.runs]
        changes += [(run.ended, -weight(run)) for run in self.runs if run.ended is not None]
        level = highest = 0.0
        for _, change in sorted(changes):  # of one moment, what ends comes first
            level += change
            highest = max(highest, level)
        return highest


@dataclass(frozen=True, slots=True)
class Use:
    """What holds a product from ``at`` on: running frames, the machines that they run on, and seats of artists."""

    at: float
    frames: int
    machines: int
    artists: int


def uses(record: Record, product: str) -> list[Use]:
    """How a product is used after each change of that, by the procs and by its licence server's artists."""
    artists = [(seated.at, seated.artists) for seated in record.seated if seated.product == product]
    runs = [run for run in record.runs if product in run.layer.licences]
    changes: list[tuple[float, int, str, int]] = [(at, 1, "", count) for at, count in artists]
    changes += [(run.ended, 0, run.host, -1) for run in runs if run.ended is not None]
    changes += [(run.began, 2, run.host, 1) for run in runs]
    frames_on: Counter[str] = Counter()
    found, frames, machines, seats = [Use(0.0, 0, 0, 0)], 0, 0, 0
    for at, _, host, change in sorted(changes):  # of one moment, what ends comes first
        if host:
            frames += change
            before = frames_on[host]
            frames_on[host] += change
            machines += (frames_on[host] > 0) - (before > 0)
        else:
            seats = change
        found.append(Use(at, frames, machines, seats))
    return found


def most_used(used: Sequence[Use], begin: float, end: float, count: Callable[[Use], int]) -> int:
    """The most of a use at any one moment between two times."""
    ends = [following.at for following in used[1:]] + [math.inf]
    return max((count(use) for use, until in zip(used, ends, strict=True) if use.at < end and until > begin), default=0)


def mean_use(used: Sequence[Use], begin: float, end: float, count: Callable[[Use], float]) -> float:
    """The mean of a use between two times."""
    ends = [following.at for following in used[1:]] + [math.inf]
    spans = ((use, min(end, until) - max(begin, use.at)) for use, until in zip(used, ends, strict=True))
    return sum(count(use) * span for use, span in spans if span > 0) / (end - begin)


def max_min(total: float, sizes: Mapping[str, float], wants: Mapping[str, float]) -> dict[str, float]:
    """Weighted max-min shares: by size, but nobody gets more than it wants, and what it leaves goes to the others."""
    due = dict.fromkeys(sizes, 0.0)
    hungry = set(sizes)
    left = total
    while hungry and left > 1e-9:
        level = left / sum(sizes[show] for show in hungry)
        full = {show for show in hungry if wants.get(show, math.inf) <= level * sizes[show]}
        if not full:
            return {**due, **{show: level * sizes[show] for show in hungry}}
        for show in full:
            due[show] = wants[show]
            left -= wants[show]
        hungry -= full
    return due


def gap(found: Mapping[str, float], due: Mapping[str, float]) -> float:
    """The part of all cores that the wrong shows have: 0 is as due, 1 is all with those to whom nothing is due."""
    total = sum(due.values())
    names = found.keys() | due.keys()
    return sum(max(0.0, found.get(name, 0.0) - due.get(name, 0.0)) for name in names) / total


def rank_correlation(pairs: Iterable[tuple[float, float]]) -> float:
    """Spearman's rank correlation, equal values sharing their mean rank; 0 when all values of a side are equal."""
    rows = list(pairs)
    first, second = (_ranks([row[column] for row in rows]) for column in (0, 1))
    middle = (len(rows) + 1) / 2
    spread = [math.sqrt(sum((rank - middle) ** 2 for rank in ranks)) for ranks in (first, second)]
    if not all(spread):
        return 0.0
    together = sum((one - middle) * (other - middle) for one, other in zip(first, second, strict=True))
    return together / (spread[0] * spread[1])


def _ranks(values: Sequence[float]) -> list[float]:
    ordered = sorted(values)
    return [mean((ordered.index(value) + 1, ordered.index(value) + ordered.count(value))) for value in values]


def refills_at_home(record: Record, begin: float, *, remembered: int) -> float:
    """Of the runs begun from ``begin`` on, the part on a host that ran their layer just then, or that had it among the
    last ``remembered`` layers whose frames ended there."""
    running: dict[str, Counter[str]] = defaultdict(Counter)
    ended: dict[str, deque[str]] = defaultdict(lambda: deque(maxlen=remembered))
    events = [(run.began, 1, run) for run in record.runs]
    events += [(run.ended, 0, run) for run in record.runs if run.ended is not None]
    home = all_of_them = 0
    for at, starts, run in sorted(events, key=lambda event: event[:2]):
        layer = run.layer.id
        if not starts:
            running[run.host][layer] -= 1
            ended[run.host].append(layer)
            continue
        if at >= begin:
            all_of_them += 1
            home += running[run.host][layer] > 0 or layer in ended[run.host]
        running[run.host][layer] += 1
    return home / max(1, all_of_them)


def flooded(record: Record, work: str, begin: float, end: float, *, bound: Callable[[Machine], float]) -> float:
    """The part of (host, time) in which one layer of ``work`` ran more frames on a host than its bound."""
    changes: dict[tuple[str, str], list[tuple[float, int]]] = defaultdict(list)
    for run in record.runs:
        if run.layer.work == work:
            place = changes[run.host, run.layer.id]
            place += [(run.began, 1), (record.end_of(run), -1)]
    over = 0.0
    for (host, _), places in changes.items():
        count, since, most = 0, begin, bound(record.hosts[host])
        for at, change in [*sorted(places), (end, 0)]:
            moment = min(max(at, begin), end)
            over += (moment - since) if count > most else 0.0
            count, since = count + change, moment
    return over / ((end - begin) * len(record.hosts))


def premature(record: Record) -> int:
    """Runs that began before a frame that they need had ended."""
    ends = {run.frame: run.ended for run in record.runs}
    count = 0
    for run in record.runs:
        for needed in record.needs.get(run.frame, ()):
            end = ends.get(needed)
            count += end is None or end > run.began
    return count


def overlapping(record: Record) -> int:
    """Runs of a frame that began before another run of the same frame had ended."""
    last: dict[str, float] = {}
    count = 0
    for run in sorted(record.runs, key=lambda run: run.began):
        count += run.began < last.get(run.frame, 0.0)
        last[run.frame] = record.end_of(run)
    return count


def filled_at(record: Record, work: str, part: float) -> float:
    """Seconds from the first start of a work's frames until this part of all its frames had begun; inf if never."""
    began = sorted(wait.began for wait in record.waits if wait.layer.work == work and wait.began is not None)
    needed = math.ceil(part * sum(wait.layer.work == work for wait in record.waits))
    return began[needed - 1] - began[0] if needed and len(began) >= needed else math.inf


def refill_seconds(record: Record, begin: float, end: float, percentile: float) -> float:
    """How long hosts stood idle between the end of a run and the next start there, of the starts between two times, by
    percentile; inf when there was none. For frames as wide as their host."""
    ended: dict[str, float] = {}
    waits = []
    for run in sorted(record.runs, key=lambda run: run.began):
        if run.host in ended and begin <= run.began < end:
            waits.append(max(0.0, run.began - ended[run.host]))
        ended[run.host] = record.end_of(run)
    waits.sort()
    return waits[max(0, math.ceil(len(waits) * percentile / 100) - 1)] if waits else math.inf


def starts_of_the_highest(record: Record, begin: float, end: float) -> float:
    """Of the starts between two times, the part that was of the highest priority that waited just then; 0 of none."""
    arrives, starts = 0, 1  # of one moment, what arrives comes first
    events = [(wait.since, arrives, wait.layer.priority) for wait in record.waits]
    events += [(wait.began, starts, wait.layer.priority) for wait in record.waits if wait.began is not None]
    waiting: Counter[int] = Counter()
    highest = all_of_them = 0
    for at, what, priority in sorted(events):
        if what == arrives:
            waiting[priority] += 1
            continue
        if begin <= at < end:
            all_of_them += 1
            highest += priority == max(level for level, count in waiting.items() if count)
        waiting[priority] -= 1
    return highest / max(1, all_of_them)


def waits_in_turn(record: Record, work: str) -> list[float]:
    """How long each frame of a work that runs one after the other waited, from its submission or from the end of the
    one before; the last is of one that still waits when the record ends, if one does."""
    waiting = [wait for wait in record.waits if wait.layer.work == work]
    since = min((wait.since for wait in waiting), default=0.0)
    waits = []
    runs = sorted((run for run in record.runs if run.layer.work == work), key=lambda run: run.began)
    for run in runs:
        waits.append(run.began - since)
        since = record.end_of(run)
    if any(wait.began is None for wait in waiting):
        waits.append(record.seconds - since)
    return waits


def first_starts(record: Record, work: str) -> dict[int, float]:
    """When each job of a work first started; inf when it never did."""
    first: dict[int, float] = {}
    for wait in record.waits:
        if wait.layer.work == work:
            first[wait.layer.job] = min(
                first.get(wait.layer.job, math.inf), math.inf if wait.began is None else wait.began
            )
    return first


def first_starts_due(record: Record, draw: float) -> dict[int, float]:
    """By when a job of each priority was due its first start, if all jobs waited from the beginning: of the starts the
    part ``draw`` is due to jobs in proportion to their priorities. A priority for which that time did not come is left
    out."""
    left = Counter((wait.layer.work, wait.layer.job) for wait in record.waits)
    priorities = {(wait.layer.work, wait.layer.job): wait.layer.priority for wait in record.waits}
    whole, virtual = float(sum(priorities.values())), 0.0
    due: dict[int, float] = {}
    for wait in sorted((wait for wait in record.waits if wait.began is not None), key=lambda wait: wait.began or 0.0):
        virtual += draw / whole
        for priority in set(priorities.values()) - due.keys():
            if virtual * priority >= 1 - 1e-9:
                due[priority] = wait.began or 0.0
        job = (wait.layer.work, wait.layer.job)
        left[job] -= 1
        if not left[job]:
            whole = max(1.0, whole - priorities[job])
    return due
