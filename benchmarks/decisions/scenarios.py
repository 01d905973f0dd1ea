"""The scenarios: what is asked of a farm's decisions, with the figures that an answer must keep.

Farms are small, so that two cores bear them: a few hundred cores, tens of ends a second, run times of seconds in place
of minutes. Figures are taken from a window in which the farm has come to rest; before it, what was decided while the
farm filled would be counted. Parts are of 1.
"""

from __future__ import annotations

import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import replace

from benchmarks.decisions import record as of
from benchmarks.decisions.large_farms import LARGE_FARMS
from benchmarks.decisions.licences import LICENCES
from benchmarks.decisions.record import Record
from benchmarks.decisions.scenario import Bound, Control, Event, Hosts, Licence, Scenario, Show, Work
from benchmarks.decisions.stage import Stage

ONE_KIND = (Hosts("cpu", 40, 16),)
LEAST_USE = 0.93
"""Of a farm whose work never ends: the rest are cores between two frames."""

# A control is over when the figure that it is to fail is known.

# Shares. Frames of one size: layers go in their dispatch order, and what is left of mixed ones would not fit the holes
# that the other shows' smaller frames leave, which those may fill.


def judge_two_shows(record: Record, begin: float = 8.0, slack: float = 0.03) -> list[Bound]:
    shows = record.shows(begin, record.seconds)
    return [
        Bound(
            "part of the quarter", shows.get("quarter", 0.0) / max(1.0, sum(shows.values())), 0.25 - slack, 0.25 + slack
        ),
        Bound("utilisation", record.utilisation(begin, record.seconds), LEAST_USE),
    ]


SHARES_TWO = Scenario(
    name="shares-two",
    says="two shows of sizes 1 to 3 with endless work have cores 1 to 3",
    hosts=ONE_KIND,
    shows=(Show("quarter", 160), Show("rest", 480)),
    work=(
        Work("quarter", "quarter", 500, cores=(4,), seconds=(3, 5)),
        Work("rest", "rest", 1000, cores=(4,), seconds=(3, 5)),
    ),
    seconds=18,
    judge=judge_two_shows,
    control=Control("shares off", "part of the quarter", queue={"shares": "false"}, changes={"seconds": 14}),
)

_FIVE = {"tenth": 64, "sixth": 107, "modest": 107, "leaver": 181, "late": 181}
_MODEST_CORES = 32
_LATE_AT, _LEAVES_AT = 8.0, 18.0


def judge_five_shows(record: Record) -> list[Bound]:
    late, left = record.marks["late comes"], record.marks.get("leaver goes", record.seconds)
    windows = {
        "gap at first": (4.0, late, set(_FIVE) - {"late"}),
        "gap with the late": (late + 5, left, set(_FIVE)),
        "gap without the leaver": (left + 5, record.seconds, set(_FIVE) - {"leaver"}),
    }
    found = []
    for name, (begin, end, there) in windows.items():
        if begin >= end:
            continue
        shows = record.shows(begin, end)
        due = of.max_min(sum(shows.values()), {show: _FIVE[show] for show in there}, {"modest": _MODEST_CORES})
        found.append(Bound(name, of.gap(shows, due), most=0.06))
    return [*found, Bound("utilisation", record.utilisation(5.0, record.seconds), LEAST_USE)]


def _leaver_goes(stage: Stage) -> None:
    stage.pause("leaver")


SHARES_FIVE = Scenario(
    name="shares-five",
    says="five shows of unequal sizes have their shares; one wants little, one comes late, one goes",
    hosts=ONE_KIND,
    shows=tuple(Show(name, size) for name, size in _FIVE.items()),
    work=(
        Work("tenth", "tenth", 350, cores=(4,), seconds=(3, 4)),
        Work("sixth", "sixth", 140, cores=(4,), jobs=4, seconds=(3, 4)),
        Work("modest", "modest", 250, cores=(2, 4), job_cap=_MODEST_CORES, seconds=(3, 4)),
        Work("leaver", "leaver", 700, cores=(4,), seconds=(3, 4)),
        Work("late", "late", 100, cores=(4,), jobs=6, at=_LATE_AT, seconds=(3, 4)),
    ),
    events=(Event(_LATE_AT, "late comes", lambda _: None), Event(_LEAVES_AT, "leaver goes", _leaver_goes)),
    seconds=27,
    judge=judge_five_shows,
    control=Control("shares off", "gap with the late", queue={"shares": "false"}, changes={"seconds": _LEAVES_AT}),
)

# Priority within a show

_CLASSES = tuple(range(10, 101, 10))
# Epochs are drawn show by show, two seconds each: eight shows make enough draws in so short a run.
_EIGHT = tuple(f"show{number}" for number in range(8))
_EIGHT_SHOWS = tuple(Show(name, 48) for name in _EIGHT)
_CLASS_WORK = tuple(
    Work(f"{show} {priority}", show, 200 if priority == 100 else 60, cores=(4,), priority=priority)
    for show in _EIGHT
    for priority in _CLASSES
)
_WARM_UP = 4.0


def class_parts(record: Record) -> dict[int, float]:
    """The part of the starts that each priority had, after the farm had filled."""
    starts = record.starts(_WARM_UP, record.seconds, lambda run: run.layer.priority)
    return {priority: starts[priority] / max(1, starts.total()) for priority in _CLASSES}


def _lower_half(parts: Mapping[int, float]) -> float:
    return sum(part for priority, part in parts.items() if priority <= 50)


def judge_rank(record: Record) -> list[Bound]:
    parts = class_parts(record)
    return [Bound("part of the highest", parts[100], 0.9), Bound("part of the lower half", _lower_half(parts), most=0)]


def judge_part_by_draw(record: Record) -> list[Bound]:
    # A quarter of the epochs of a run are three or four: too few to rank ten classes by, as `judge_draw` does.
    parts = class_parts(record)
    return [
        Bound("part of the highest", parts[100], 0.55, 0.95),
        Bound("part of the lower half", _lower_half(parts), 0.01, 0.25),
        Bound("classes that start", sum(part > 0 for part in parts.values()), 5),
    ]


def judge_draw(record: Record) -> list[Bound]:
    parts = class_parts(record)
    return [
        Bound("part of the highest", parts[100], 0.05, 0.45),
        Bound("part of the lower half", _lower_half(parts), 0.1, 0.45),
        Bound("classes that start", sum(part > 0 for part in parts.values()), 8),
        Bound("rank correlation", of.rank_correlation((priority, part) for priority, part in parts.items()), 0.5),
    ]


_TEN_CLASSES = Scenario(
    name="priority-rank",
    says="priority_draw 0: nothing starts while something of a higher priority waits",
    hosts=(Hosts("cpu", 24, 16),),
    shows=_EIGHT_SHOWS,
    work=_CLASS_WORK,
    seconds=24,
    judge=judge_rank,
    queue={"priority_draw": "0"},
    control=Control("priority_draw 1", "part of the highest", queue={"priority_draw": "1"}),
)


def _classes(name: str, says: str, draw: str, judge: object) -> Scenario:
    return replace(
        _TEN_CLASSES,
        name=name,
        says=says,
        queue={"priority_draw": draw},
        judge=judge,  # type: ignore[arg-type]
        control=Control("priority_draw 0", "part of the lower half", queue={"priority_draw": "0"}),
    )


PRIORITY_PART = _classes(
    "priority-part", "priority_draw 0.25: the highest has most, and no half starves", "0.25", judge_part_by_draw
)
PRIORITY_DRAW = _classes("priority-draw", "priority_draw 1: starts in proportion to priority", "1", judge_draw)


def judge_low_stream(record: Record) -> list[Bound]:
    starts = record.starts(_WARM_UP, record.seconds, lambda run: run.layer.work)
    return [Bound("part of the low stream", starts["low"] / max(1, starts.total()), 0.005, 0.25)]


LOW_STREAM = Scenario(
    name="low-stream",
    says="a stream of half the priority starts beside a flood",
    hosts=(Hosts("cpu", 24, 16),),
    shows=_EIGHT_SHOWS,
    work=(
        *(Work("flood", show, 130, cores=(4,), jobs=2, priority=100) for show in _EIGHT),
        *(
            Work("low", show, 10, cores=(4,), priority=50, at=float(second))
            for show in _EIGHT
            for second in range(1, 20, 4)
        ),
    ),
    seconds=20,
    judge=judge_low_stream,
    control=Control("priority_draw 0", "part of the low stream", queue={"priority_draw": "0"}, changes={"seconds": 14}),
)

# Wide frames

_WIDE_AT = 4.0


def judge_wide(record: Record) -> list[Bound]:
    starts = record.starts(_WIDE_AT, record.seconds, lambda run: run.layer.work)
    return [
        Bound("wide frames started", starts["wide"], 5),
        Bound("utilisation", record.utilisation(_WIDE_AT, record.seconds), 0.80),
    ]


WIDE = Scenario(
    name="wide",
    says="frames as wide as a host start beside a flood of narrow ones",
    hosts=(Hosts("cpu", 24, 16), Hosts("wide", 8, 32)),
    shows=(Show("show", 640),),
    work=(
        Work("narrow", "show", 600, cores=(4,), jobs=4, seconds=(2, 4)),
        Work("wide", "show", 40, cores=(32,), at=_WIDE_AT),
    ),
    seconds=36,
    queue={"reservation_block_time": "3s"},
    judge=judge_wide,
    control=Control("reservations off", "wide frames started", queue={"reservations": "false"}),
)


def _wide(name: str, says: str, **changes: object) -> Scenario:
    return replace(WIDE, name=name, says=says, control=None, **changes)  # type: ignore[arg-type]


def _granter_dies(stage: Stage) -> None:
    stage.kill_leading_beat()
    stage.kill_worker()
    stage.new_worker()


WIDE_NO_HISTORY = _wide("wide-no-history", "the same where no run time is known: nothing is backfilled", history=False)
WIDE_KILLED = _wide(
    "wide-killed",
    "the same while the leading beat and a worker are killed",
    beats=2,
    events=(Event(14, "granter dies", _granter_dies),),
    seconds=44,
)

# Hosts

_GPU_AT = 5.0


def judge_gpus(record: Record) -> list[Bound]:
    end = record.seconds
    return [
        Bound("GPUs in use", record.gpu_use(_GPU_AT + 8, end), 0.85),
        Bound("CPU work on GPU hosts before", record.utilisation(2.5, _GPU_AT, "gpu"), 0.9),
        Bound("utilisation elsewhere", record.utilisation(_GPU_AT, end, "cpu"), LEAST_USE),
    ]


GPUS = Scenario(
    name="gpu-guard",
    says="GPUs are in use although work without GPUs of a higher priority floods their hosts",
    hosts=(Hosts("cpu", 24, 16), Hosts("gpu", 8, 16, gpus=4)),
    shows=(Show("show", 512),),
    work=(
        Work("cpu", "show", 300, cores=(2, 4), jobs=3, seconds=(3, 5), priority=200),
        Work("gpu", "show", 400, cores=(3,), gpus=1, at=_GPU_AT, seconds=(3, 5)),
    ),
    seconds=22,
    judge=judge_gpus,
    control=Control("GPU guard off", "GPUs in use", queue={"gpu_guard": "false"}, changes={"seconds": 18}),
)


def judge_locality(record: Record) -> list[Bound]:
    return [
        Bound("starts where the layer ran", of.refills_at_home(record, 6.0, remembered=3), 0.5),
        Bound("utilisation", record.utilisation(4.0, record.seconds), 0.70),
    ]


LOCALITY = Scenario(
    name="locality",
    says="a layer goes back to the hosts that ran it, where there is a choice",
    hosts=(Hosts("cpu", 30, 16),),
    shows=(Show("show", 480),),
    work=(Work("layer", "show", 60, cores=(4,), jobs=30, job_cap=12),),
    seconds=13,
    judge=judge_locality,
    control=Control("locality off", "starts where the layer ran", queue={"locality": "false"}, changes={"seconds": 12}),
)

_ALONE_AT = 12.0


def layer_bound(host: of.Machine) -> float:
    """Frames of one layer on a host while others want it."""
    return max(8, host.cores / 4)


def judge_flooding(record: Record) -> list[Bound]:
    alone = record.marks.get("others go", record.seconds)
    found = [
        Bound("host time above its share", of.flooded(record, "flood", 3.0, alone, bound=layer_bound), most=0.03),
        Bound("utilisation beside others", record.utilisation(3.0, alone), LEAST_USE),
    ]
    if alone < record.seconds:
        found.append(Bound("utilisation alone", record.utilisation(alone + 6, record.seconds), 0.9))
    return found


def _others_go(stage: Stage) -> None:
    stage.pause("others")


FLOODING = Scenario(
    name="flooding",
    says="one layer has at most a quarter of a host while others want it, and all of it when nobody does",
    hosts=(Hosts("cpu", 8, 32),),
    shows=(Show("show", 128), Show("others", 128)),
    work=(
        Work("flood", "show", 1500, cores=(1,), seconds=(5, 8), priority=200),
        Work("others", "others", 60, cores=(2,), jobs=12, seconds=(3, 5)),
    ),
    events=(Event(_ALONE_AT, "others go", _others_go),),
    seconds=23,
    judge=judge_flooding,
    control=Control(
        "a layer's share of a host off",
        "host time above its share",
        queue={"layer_host_share": "false"},
        changes={"seconds": _ALONE_AT},
    ),
)


def judge_one_layer(record: Record) -> list[Bound]:
    one, fifty = (of.filled_at(record, work, 0.95) for work in ("one", "fifty"))
    return [
        Bound("fill time, one layer to fifty", one / fifty if math.isfinite(fifty) else math.inf, most=1.5),
        Bound("seconds of one layer", one),
        Bound("seconds of fifty", fifty),
    ]


ONE_LAYER = Scenario(
    name="one-layer",
    says="one layer fills a farm as fast as fifty",
    hosts=(Hosts("one", 100, 16, tag="one"), Hosts("fifty", 100, 16, tag="fifty")),
    shows=(Show("show", 3200),),
    work=(
        # A fleet that starts divides the farm, and its first plans are small: neither is asked about here.
        Work("before", "show", 40, jobs=20, seconds=(0.5, 1.0), tag="one"),
        Work("one", "show", 1600, seconds=(600, 600), tag="one", at=9),
        Work("fifty", "show", 32, jobs=50, seconds=(600, 600), tag="fifty", at=16),
    ),
    seconds=25,
    judge=judge_one_layer,
    control=Control("whole rounds off", "fill time, one layer to fifty", queue={"whole_rounds": "false"}),
)

# What is never passed, whatever is decided

_BURSTS = {"alpha": 200, "beta": 150}
_FOLDER_CAP, _JOB_CAP, _LICENCES = 96, 24, 12


def judge_caps(record: Record) -> list[Bound]:
    caps = {
        "burst of alpha": (_BURSTS["alpha"], lambda run: run.cores * (run.layer.show == "alpha")),
        "burst of beta": (_BURSTS["beta"], lambda run: run.cores * (run.layer.show == "beta")),
        "folder of gamma": (_FOLDER_CAP, lambda run: run.cores * (run.layer.show == "gamma")),
        "nuke": (_LICENCES, lambda run: float(run.layer.work == "licensed")),
        "capped job": (_JOB_CAP, lambda run: run.cores * (run.layer.work == "capped")),
    }
    found = []
    for name, (cap, weight) in caps.items():
        peak = max(record.peak(weight), record.counters.get(name, 0.0))
        found.append(Bound(f"most of {name} to its cap", peak / cap, 0.9, 1.0))
    return found


CAPS = Scenario(
    name="caps",
    says="bursts, folders, jobs and licences are used and never passed, with every policy on",
    hosts=(Hosts("cpu", 36, 16),),
    shows=(
        Show("alpha", 100, burst=_BURSTS["alpha"]),
        Show("beta", 300, burst=_BURSTS["beta"]),
        Show("gamma", 200, folder_cap=_FOLDER_CAP),
    ),
    work=(
        Work("alpha", "alpha", 200, cores=(1, 2, 4), priority=50, seconds=(3, 5)),
        Work("licensed", "alpha", 300, cores=(2,), licences=("nuke",), priority=150),
        Work("beta", "beta", 200, cores=(2, 4), seconds=(3, 5)),
        Work("capped", "beta", 150, cores=(4,), job_cap=_JOB_CAP, priority=200),
        Work("gamma", "gamma", 100, cores=(1, 2, 4), jobs=2, seconds=(3, 5)),
    ),
    licences={"nuke": Licence(_LICENCES)},
    seconds=14,
    judge=judge_caps,
    control=Control("the caps lifted", "most of nuke to its cap", changes={"capped": False, "seconds": 6}),
)


def judge_dependencies(record: Record) -> list[Bound]:
    chained = [wait for wait in record.waits if wait.layer.work == "chain"]
    started = {run.frame for run in record.runs}
    return [
        Bound("starts before what they need", of.premature(record), most=0),
        Bound("part of the chain started", len(started & record.needs.keys()) / max(1, len(record.needs)), 0.9),
        Bound("frames that became free", len(chained), 1),
    ]


DEPENDENCIES = Scenario(
    name="dependencies",
    says="no frame starts before what it depends on has ended, and all of a chain starts beside a flood",
    hosts=(Hosts("cpu", 24, 16),),
    shows=(Show("show", 400),),
    work=(
        Work("chain", "show", 40, cores=(1, 2, 1, 4), jobs=3, seconds=(1, 2), priority=150, ordered=True),
        Work("flood", "show", 700, cores=(4,), priority=100),
    ),
    seconds=16,
    judge=judge_dependencies,
    control=Control("no dependencies", "starts before what they need", changes={"ordered": False, "seconds": 6}),
)

_HEAVY = 2


def judge_frame_memory(record: Record) -> list[Bound]:
    return [
        Bound("heavy frames done", record.counters.get("heavy frames done", 0), _HEAVY),
        # Three frames of four are 0.75 of a host.
        Bound("utilisation", record.utilisation(10.0, record.seconds), 0.85),
    ]


FRAME_MEMORY = Scenario(
    name="frame-memory",
    says="few frames of a layer that run out of memory ask for more, and the others stay as small as they are",
    hosts=(Hosts("cpu", 24, 16),),
    shows=(Show("show", 384),),
    # A host of 64 GB takes four frames of 15 GB, also where one or two ask for 17. Where all do, it takes three.
    work=(Work("layer", "show", 800, cores=(4,), memory_gb_a_core=3.75, heavy=_HEAVY),),
    seconds=18,
    judge=judge_frame_memory,
    control=Control("the layer asks for more", "utilisation", changes={"frame_memory": False}),
)

# Losing processes

_LOSS_AT = 10.0


def judge_failover(record: Record) -> list[Bound]:
    loss = record.marks["a worker and the leading beat die"]
    before = record.starts(4, loss, lambda _: "all")["all"] / (loss - 4)
    begin = record.seconds - 8
    after = record.starts(begin, record.seconds, lambda _: "all")["all"] / 8
    return [
        *judge_two_shows(record, begin),
        Bound("starts after to before", after / max(1e-9, before), 0.75),
        Bound("frames that ran twice at once", of.overlapping(record), most=0),
    ]


def _loss(stage: Stage) -> None:
    stage.kill_leading_beat()
    stage.kill_worker()
    stage.new_worker()


def _loss_for_good(stage: Stage) -> None:
    for name in list(stage.fleet.processes):
        stage.fleet.processes.pop(name).kill()


FAILOVER = Scenario(
    name="failover",
    says="a killed worker and a killed leading beat change nothing but seconds",
    hosts=ONE_KIND,
    shows=SHARES_TWO.shows,
    work=tuple(Work(name, name, 1400, cores=(4,), seconds=(3, 5)) for name in ("quarter", "rest")),
    seconds=34,
    judge=judge_failover,
    beats=2,
    events=(Event(_LOSS_AT, "a worker and the leading beat die", _loss),),
    control=Control(
        "nobody takes over",
        "starts after to before",
        changes={"events": (Event(_LOSS_AT, "a worker and the leading beat die", _loss_for_good),), "seconds": 22},
    ),
)

# A day's farm

_DAY_HOSTS = (Hosts("16", 16, 16), Hosts("32", 5, 32), Hosts("128", 3, 128))
_DAY_CORES = sum(hosts.count * hosts.cores for hosts in _DAY_HOSTS)
_DEMAND = 0.95
_ARRIVALS = 24
_PARTS = {1: 23.0, 2: 26.0, 4: 34.0, 8: 14.5, 16: 1.9}
_WIDE_FRAMES = {32: (2, 6, 10), 64: (4, 9)}
"""Cores of a frame to the seconds at which one comes: as parts of a hundred (0.3 and 0.05) they would be too few."""
_DAY_SECONDS = (2.0, 8.0)
_LONGEST_MEAN_WAIT = 12.0
"""Seconds, of the widest: the block time, the longest run on the host that drains, and a frame before it."""


def day_work(seed: int = 5) -> tuple[Work, ...]:
    """Jobs that arrive each second and ask for 95 % of the farm; the first second brings what fills it.

    Sizes in the parts of a farm's day; memory a core grows with the cores, to 3.6 GB.
    """
    chance = random.Random(seed)
    mean_seconds = sum(_DAY_SECONDS) / 2
    work = []
    for second in range(_ARRIVALS):
        wide = [cores for cores, at in _WIDE_FRAMES.items() for when in at if when == second]
        cores_due = _DEMAND * _DAY_CORES / mean_seconds * (mean_seconds if second == 0 else 1.0) - sum(wide)
        counts = dict.fromkeys(_PARTS, 0)
        while cores_due > 0:
            cores = chance.choices(list(_PARTS), list(_PARTS.values()))[0]
            counts[cores] += 1
            cores_due -= cores
        counts.update({cores: wide.count(cores) for cores in wide})
        work += [
            Work(
                f"{cores}",
                "day",
                count,
                cores=(cores,),
                seconds=_DAY_SECONDS,
                at=float(second),
                memory_gb_a_core=2.0 + 1.6 * math.log2(cores) / 6,
            )
            for cores, count in counts.items()
            if count
        ]
    return tuple(work)


def judge_day(record: Record) -> list[Bound]:
    begin, end = 6.0, float(_ARRIVALS)
    wide = [wait for wait in record.waits if wait.layer.cores >= 32]
    narrow = [wait for wait in record.waits if wait.layer.cores < 32 and wait.since < end - 6]
    mean_wait = {
        cores: _mean([_waited(record, wait) for wait in record.waits if wait.layer.cores == cores])
        for cores in (1, 4, 16, 32, 64)
    }
    return [
        Bound("utilisation", record.utilisation(begin, end), 0.88),
        Bound("wide frames started", sum(wait.began is not None for wait in wide) / max(1, len(wide)), 1.0),
        Bound("narrow frames started", sum(wait.began is not None for wait in narrow) / max(1, len(narrow)), 0.98),
        *(
            Bound(f"mean wait of {cores} cores", seconds, most=_LONGEST_MEAN_WAIT if cores > 32 else math.inf)
            for cores, seconds in mean_wait.items()
        ),
    ]


def _waited(record: Record, wait: of.Wait) -> float:
    return (record.seconds if wait.began is None else wait.began) - wait.since


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else 0.0


STEADY = Scenario(
    name="steady",
    says="at 95 % demand of a farm's mix the farm is full, and frames of every size start",
    hosts=_DAY_HOSTS,
    shows=(Show("day", _DAY_CORES),),
    work=day_work(),
    seconds=28,
    queue={"reservation_block_time": "3s"},
    judge=judge_day,
)

SCENARIOS: tuple[Scenario, ...] = (
    SHARES_TWO,
    SHARES_FIVE,
    _TEN_CLASSES,
    PRIORITY_PART,
    PRIORITY_DRAW,
    LOW_STREAM,
    WIDE,
    WIDE_NO_HISTORY,
    WIDE_KILLED,
    GPUS,
    LOCALITY,
    FLOODING,
    ONE_LAYER,
    CAPS,
    DEPENDENCIES,
    FRAME_MEMORY,
    FAILOVER,
    STEADY,
    *LARGE_FARMS,
    *LICENCES,
)


def reduced() -> tuple[Scenario, ...]:
    """Small farms and short runs of three scenarios, for the test suite."""
    small = (Hosts("cpu", 10, 16),)
    return (
        replace(
            SHARES_TWO,
            hosts=small,
            shows=(Show("quarter", 40), Show("rest", 120)),
            work=tuple(replace(work, frames=250) for work in SHARES_TWO.work),
            seconds=16,
            judge=lambda record: judge_two_shows(record, begin=8.0, slack=0.08),
        ),
        replace(CAPS, work=tuple(replace(work, frames=120) for work in CAPS.work), seconds=10),
        replace(
            DEPENDENCIES,
            hosts=small,
            work=tuple(replace(work, frames=work.frames // 4) for work in DEPENDENCIES.work),
            seconds=14,
        ),
    )
