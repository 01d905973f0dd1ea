"""Scenarios on farms that are divided: 256 small hosts, so that each of four workers has a shard of its own.

Below 128 hosts there is one shard, whatever the number of workers, and then nothing that planners do to each other
shows. A run of these with fewer shards than workers fails. Frames are as wide as a host, so that every start is a
refill of one host, and any host is as good as another.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from benchmarks.decisions import record as of
from benchmarks.decisions.record import Record
from benchmarks.decisions.scenario import Bound, Control, Event, Hosts, Scenario, Show, Work
from benchmarks.decisions.stage import Stage

CORES = 4
"""Of a host, and of a frame."""
HOSTS = (Hosts("cpu", 256, CORES),)
_FARM_CORES = 256 * CORES
LEAST_USE = 0.85
"""Where less is in use, work waits for something else than its turn. How soon cores are refilled is not judged here."""
_FRAME_SECONDS = (3.0, 5.0)
_FILLED_AT = 8.0
"""When all frames that filled the farm have ended, with time to spare."""


def utilisation(record: Record) -> Bound:
    return Bound("utilisation", record.utilisation(_FILLED_AT, record.seconds), LEAST_USE)


# Shares, whatever number of jobs a show has

JOBS_OF_SHOWS: Mapping[str, int] = {"five": 5, "nineteen": 19, "forty": 40, "hundred": 100, "four-hundred": 400}
_FRAMES_OF_A_SHOW = 1_600
MOST_GAP = 0.06


def judge_equal_shows(record: Record) -> list[Bound]:
    shows = record.shows(_FILLED_AT, record.seconds)
    due = dict.fromkeys(JOBS_OF_SHOWS, sum(shows.values()) / len(JOBS_OF_SHOWS))
    return [
        Bound("gap", of.gap(shows, due) if shows else math.inf, most=MOST_GAP),
        *(Bound(f"part of {name}", shows.get(name, 0.0) / max(1.0, sum(shows.values()))) for name in JOBS_OF_SHOWS),
        utilisation(record),
    ]


SHARES_MANY_JOBS = Scenario(
    name="shares-many-jobs",
    says="five equal shows have equal shares, whether they have five jobs or 400",
    hosts=HOSTS,
    shows=tuple(Show(name, _FARM_CORES // len(JOBS_OF_SHOWS)) for name in JOBS_OF_SHOWS),
    work=tuple(
        Work(name, name, math.ceil(_FRAMES_OF_A_SHOW / jobs), cores=(CORES,), jobs=jobs, seconds=_FRAME_SECONDS)
        for name, jobs in JOBS_OF_SHOWS.items()
    ),
    seconds=28,
    judge=judge_equal_shows,
    control=Control("shares off", "gap", queue={"shares": "false"}, changes={"seconds": 16}),
    sharded=True,
)

# Ten priority classes in one show, none of which ever runs out

CLASSES = tuple(range(10, 101, 10))
_FRAMES_OF_A_CLASS = 2_400
LEAST_CORRELATION = 0.9
LEAST_OF_THE_HIGHEST = 0.95


def judge_rank_correlation(record: Record) -> list[Bound]:
    starts = record.starts(_FILLED_AT, record.seconds, lambda run: run.layer.priority)
    correlation = of.rank_correlation((priority, starts[priority]) for priority in CLASSES)
    return [
        Bound("rank correlation", correlation, LEAST_CORRELATION),
        Bound("part of the highest", starts[CLASSES[-1]] / max(1, starts.total())),
        utilisation(record),
    ]


def judge_highest_first(record: Record) -> list[Bound]:
    part = of.starts_of_the_highest(record, _FILLED_AT, record.seconds)
    return [Bound("starts of the highest that waits", part, LEAST_OF_THE_HIGHEST), utilisation(record)]


def _classes(jobs: int, draw: str) -> Scenario:
    name = f"classes-{'one-job' if jobs == 1 else 'four-jobs'}-{draw}"
    by_rank = draw == "0"
    control = Control("priority_draw 0", "rank correlation", queue={"priority_draw": "0"}, changes={"seconds": 20})
    return Scenario(
        name=name,
        says=f"ten priority classes of {jobs} job(s) of one layer each, priority_draw {draw}: "
        + ("the highest that waits starts" if by_rank else "they start as their priorities rank"),
        hosts=HOSTS,
        shows=(Show("show", _FARM_CORES),),
        work=tuple(
            Work(
                f"class {priority}",
                "show",
                _FRAMES_OF_A_CLASS // jobs,
                cores=(CORES,),
                jobs=jobs,
                seconds=_FRAME_SECONDS,
                priority=priority,
            )
            for priority in CLASSES
        ),
        seconds=20 if by_rank else 38,
        judge=judge_highest_first if by_rank else judge_rank_correlation,
        control=control if (jobs, draw) == (1, "1") else None,
        queue={"priority_draw": draw},
        sharded=True,
    )


CLASS_SCENARIOS = tuple(_classes(jobs, draw) for jobs in (1, 4) for draw in ("0", "0.25", "1"))

# One layer alone, then fifty

_LAYERS = 50
_FRAMES_OF_THE_LONE = 20_000
_FIFTY_AT = 22.0
MOST_OF_FIFTY = 1.5


def judge_lone_layer(record: Record) -> list[Bound]:
    fifty_at = record.marks.get("the lone layer goes", record.seconds)
    lone = of.refill_seconds(record, _FILLED_AT, fifty_at, 50)
    fifty = of.refill_seconds(record, fifty_at + _FILLED_AT, record.seconds, 50)
    known = 0 < fifty < math.inf
    return [
        Bound("refill of a lone layer to that of fifty", lone / fifty if known else math.inf, most=MOST_OF_FIFTY),
        Bound("refill p50 of the lone layer, s", lone),
        Bound("refill p50 of fifty, s", fifty),
    ]


def _lone_goes(stage: Stage) -> None:
    stage.pause("lone")
    stage.resume("fifty")


LONE_LAYER = Scenario(
    name="lone-layer",
    says="freed cores are refilled as fast with one layer of 20,000 frames as with fifty",
    hosts=HOSTS,
    shows=(Show("lone", _FARM_CORES), Show("fifty", _FARM_CORES)),
    work=(
        Work("lone", "lone", _FRAMES_OF_THE_LONE, cores=(CORES,), seconds=_FRAME_SECONDS),
        Work(
            "fifty",
            "fifty",
            _FRAMES_OF_THE_LONE // _LAYERS,
            cores=(CORES,),
            jobs=_LAYERS,
            seconds=_FRAME_SECONDS,
            paused=True,
        ),
    ),
    events=(Event(_FIFTY_AT, "the lone layer goes", _lone_goes),),
    seconds=46,
    judge=judge_lone_layer,
    sharded=True,
)

# Pinned to one host

_PINNED_HOST = "pinned-host"
_PINNED_FRAMES = 9
_PINNED_AT = 6.0
_PINNED_SECONDS = 4.0
MOST_FRAME_TIMES = 2.0


def judge_pinned(record: Record) -> list[Bound]:
    """A pinned frame waits for its host from its submission, or from the end of the pinned frame before it."""
    waits = of.waits_in_turn(record, "pinned")
    return [
        Bound(
            "longest wait for the host, frame times",
            max(waits, default=math.inf) / _PINNED_SECONDS,
            most=MOST_FRAME_TIMES,
        ),
        Bound("pinned frames started", sum(run.layer.work == "pinned" for run in record.runs), 1),
        utilisation(record),
    ]


PINNED = Scenario(
    name="pinned",
    says="frames pinned to one host start there beside a flood of their own show, of half their priority",
    hosts=(Hosts("cpu", 255, CORES), Hosts("pinned", 1, CORES, name=_PINNED_HOST)),
    shows=(Show("show", _FARM_CORES),),
    work=(
        Work("flood", "show", 900, cores=(CORES,), jobs=5, seconds=(_PINNED_SECONDS, _PINNED_SECONDS), priority=100),
        Work(
            "pinned",
            "show",
            _PINNED_FRAMES,
            cores=(CORES,),
            seconds=(_PINNED_SECONDS, _PINNED_SECONDS),
            priority=200,
            tag=_PINNED_HOST,
            at=_PINNED_AT,
        ),
    ),
    seconds=46,
    judge=judge_pinned,
    sharded=True,
)

# Many jobs of two priorities

PRIORITY_OF: Mapping[str, int] = {"high": 100, "low": 50}
_JOBS_OF_A_PRIORITY = 200
_DRAW = 0.25
"""What `queue.priority_draw` is as shipped."""
MOST_DUE_TIMES = 2.0


def judge_many_jobs(record: Record) -> list[Bound]:
    due = of.first_starts_due(record, _DRAW)
    found = []
    for name, priority in PRIORITY_OF.items():
        first = of.first_starts(record, name)
        latest = max(first.values(), default=math.inf)
        due_at = due.get(priority, math.inf)
        times = latest / due_at if math.isfinite(due_at) and math.isfinite(latest) else math.inf
        found += [
            Bound(f"latest first start of the {name}, due times", times, most=MOST_DUE_TIMES),
            Bound(f"jobs of the {name} that started", sum(math.isfinite(at) for at in first.values())),
            Bound(f"a share of the {name} is due, s", due_at),
        ]
    return [*found, utilisation(record)]


MANY_JOBS = Scenario(
    name="many-jobs",
    says="each of 400 jobs of two priorities starts soon after its share is due",
    hosts=HOSTS,
    shows=(Show("show", _FARM_CORES),),
    work=tuple(
        Work(name, "show", 40, cores=(CORES,), jobs=_JOBS_OF_A_PRIORITY, seconds=(2.0, 3.0), priority=priority)
        for name, priority in PRIORITY_OF.items()
    ),
    seconds=50,
    judge=judge_many_jobs,
    queue={"priority_draw": str(_DRAW)},
    sharded=True,
)

LARGE_FARMS: tuple[Scenario, ...] = (SHARES_MANY_JOBS, *CLASS_SCENARIOS, LONE_LAYER, PINNED, MANY_JOBS)
