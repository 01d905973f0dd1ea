"""Scenarios of licences: limits that count machines or frames, beside licence servers that artists use as well.

On a farm of 256 hosts, so that each of four workers has a shard of its own, beside a flood without licences. Most hosts
are small: a seat on one of them runs four frames, and on a large one sixteen.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from benchmarks.decisions import record as of
from benchmarks.decisions.large_farms import LEAST_USE
from benchmarks.decisions.licence_server import SETTLE_WINDOW_SECONDS
from benchmarks.decisions.record import Record, Use
from benchmarks.decisions.scenario import Bound, Control, Event, Hosts, Licence, Scenario, Show, Work
from benchmarks.decisions.stage import Stage

SMALL, LARGE = 4, 16
"""Cores of a host."""
HOSTS = (Hosts("small", 224, SMALL), Hosts("large", 32, LARGE))
_SHOWS = (Show("licensed", 700), Show("flood", 708))
_FRAME_SECONDS = (4.0, 6.0)
_FLOOD_SECONDS = (5.0, 8.0)
_FULL_AT = 12.0
"""When all frames that filled the farm have ended, with time to spare."""
LEAST_FRAMES_A_SEAT = 8.0
"""Where frames go anywhere there are five or six, for the first seats are not on small hosts alone."""
SEATS = 6
_SPARE = 2
"""Seats that the maximum leaves to artists: as many as come within a report and a window."""
_STATUS = 330


def _flood(seconds: float) -> Work:
    frames = math.ceil(300 * (2 + seconds / 6.5) / 10)
    return Work("flood", "flood", frames, cores=(SMALL,), jobs=10, seconds=_FLOOD_SECONDS)


def _under(*products: str, frames: int, jobs: int, cores: int = 1, at: float = 0.0, name: str = "") -> Work:
    return Work(
        name or " and ".join(products),
        "licensed",
        frames,
        cores=(cores,),
        jobs=jobs,
        seconds=_FRAME_SECONDS,
        priority=200,
        licences=products,
        at=at,
    )


def _most_seats(record: Record, product: str, begin: float = 0.0, end: float = math.inf) -> int:
    """The most machines of the farm and artists at once."""
    return of.most_used(of.uses(record, product), begin, end, lambda use: use.machines + use.artists)


def _unlicensed(record: Record, begin: float = _FULL_AT) -> list[Bound]:
    flood = record.shows(begin, record.seconds).get("flood", 0.0)
    return [
        Bound("utilisation", record.utilisation(begin, record.seconds), LEAST_USE),
        Bound("part of the cores with the flood", flood / record.cores, 0.4),
    ]


def _waits(record: Record) -> list[Bound]:
    """What is denied waits."""
    delay = 60.0
    early = [
        run
        for run in record.runs
        for denial in record.denials
        if denial.layer == run.layer.id and denial.at + 1.0 < run.began < denial.at + delay
    ]
    return [
        Bound("dead frames", record.found.get("dead frames", math.inf), most=0),
        Bound("retries used", record.found.get("retries used", math.inf), most=0),
        Bound("starts of layers that are to wait", len({(run.frame, run.began) for run in early}), most=0),
    ]


# Seats

_LOSS_AT = 32.0
_NUKES, _ARNOLDS = 90, 40
_NUKE_SPARE = 10


def judge_seats(record: Record) -> list[Bound]:
    houdini, nuke, arnold = (of.uses(record, product) for product in ("houdini", "nuke", "arnold"))
    frames = of.mean_use(houdini, _FULL_AT, record.seconds, lambda use: use.frames)
    free = of.mean_use(houdini, _FULL_AT, record.seconds, lambda use: SEATS - use.artists)
    seats = of.mean_use(houdini, _FULL_AT, record.seconds, lambda use: use.machines)
    return [
        Bound("most houdini seats", _most_seats(record, "houdini"), most=SEATS + _SPARE),
        Bound("most houdini machines", of.most_used(houdini, 0, math.inf, lambda use: use.machines), most=SEATS),
        Bound("frames a houdini seat", frames / free, LEAST_FRAMES_A_SEAT),
        Bound("mean houdini machines", seats),
        Bound("most nuke frames", _most_frames(nuke), most=_NUKES + _NUKE_SPARE),
        Bound("mean nuke frames", of.mean_use(nuke, _FULL_AT, record.seconds, lambda use: use.frames), 0.3 * _NUKES),
        Bound("most arnold frames", _most_frames(arnold), most=_ARNOLDS),
        Bound("mean arnold frames", of.mean_use(arnold, _FULL_AT, record.seconds, lambda use: use.frames)),
        Bound("frames denied", len(record.denials), most=0),
        Bound("frames that ran twice at once", of.overlapping(record), most=0),
        *_unlicensed(record),
        *_lost(record),
    ]


def _most_frames(used: Sequence[Use]) -> int:
    return of.most_used(used, 0.0, math.inf, lambda use: use.frames + use.artists)


def _lost(record: Record) -> list[Bound]:
    """Bookings that came to nothing for a changed cap or report."""
    changed = record.found.get("lost: cap_changing", 0.0) + record.found.get("lost: cap_exceeded", 0.0)
    started = max(1, len(record.runs))
    return [
        Bound("bookings lost by changes, %", 100 * changed / (started + changed)),
        Bound("bookings lost, %", 100 * record.found.get("lost", 0.0) / (started + record.found.get("lost", 0.0))),
    ]


def _loss(stage: Stage) -> None:
    stage.kill_leading_beat()
    stage.kill_worker()
    stage.new_worker()


_SEATS_SECONDS = 64.0
_HOUDINI = Licence(SEATS, machines=True, seats=SEATS + _SPARE, reported=True, exit_status=_STATUS)
_PRODUCTS = {
    "houdini": _HOUDINI,
    "nuke": Licence(_NUKES, seats=_NUKES + _NUKE_SPARE, reported=True, exit_status=_STATUS + 1),
    "arnold": Licence(_ARNOLDS, seats=_ARNOLDS, exit_status=_STATUS + 2),
}
_FRAME_LICENCE = Licence(SEATS, seats=SEATS + _SPARE, reported=True, exit_status=_STATUS)

SEATS_TAKEN = Scenario(
    name="seats",
    says="machines that hold a seat and artists are never more than there are seats, and each runs many frames",
    hosts=HOSTS,
    shows=_SHOWS,
    work=(
        _under("houdini", frames=220, jobs=8),
        _under("houdini", "arnold", frames=60, jobs=2),
        _under("nuke", frames=300, jobs=5, cores=2),
        _under("arnold", frames=200, jobs=4, cores=2),
        _flood(_SEATS_SECONDS),
    ),
    licences=_PRODUCTS,
    events=(
        Event(14.0, "an artist comes", lambda stage: stage.licences.artists_come("houdini", 1)),
        Event(16.0, "artists come for nuke", lambda stage: stage.licences.artists_come("nuke", 6)),
        Event(24.0, "another comes", lambda stage: stage.licences.artists_come("houdini", 1)),
        Event(_LOSS_AT, "a worker and the leading beat die", _loss),
        Event(44.0, "the artists go", lambda stage: stage.licences.artists_go("houdini")),
        Event(46.0, "the artists of nuke go", lambda stage: stage.licences.artists_go("nuke")),
    ),
    beats=2,
    seconds=_SEATS_SECONDS,
    judge=judge_seats,
    control=Control(
        "a limit of frames",
        "frames a houdini seat",
        changes={"licences": {**_PRODUCTS, "houdini": _FRAME_LICENCE}, "seconds": 28.0},
    ),
    more_controls=(
        Control(
            "seats go anywhere",
            "frames a houdini seat",
            changes={"imports": "benchmarks.decisions.any_machine", "seconds": 28.0},
        ),
    ),
    sharded=True,
)

# Denied

_GRABBED = "artists take the last seats"
_GRAB_AT = 16.5
"""Of the reports at 16, 20 and 24 s the second comes too early: the third is the first to show them."""
_MORE_AT = 30.0
_GONE = "artists go"
_GONE_AT = 62.0
_KNOWN_SECONDS = 8.0
"""When a report shows artists at the latest."""


def judge_denied(record: Record) -> list[Bound]:
    grabbed, gone = (record.marks.get(name, record.seconds) for name in (_GRABBED, _GONE))
    seated = [(use.at, use.farm + use.artists) for use in record.seated if use.product == "houdini"]
    window = SETTLE_WINDOW_SECONDS + _KNOWN_SECONDS
    known = [denial for denial in record.denials if denial.at > grabbed + window]
    return [
        Bound("frames denied", len(record.denials), 1),
        Bound("frames denied once it is known", len(known), most=0),
        Bound("most houdini seats", max((count for _, count in seated), default=0), most=SEATS),
        Bound("seats in use with the artists", _mean_level(seated, grabbed + window, gone) / SEATS, 0.95),
        Bound("seats in use without them", _mean_level(seated, gone + window, record.seconds) / SEATS, 0.95),
        Bound("layers denied that start again", _start_again(record), 1),
        *_waits(record),
        *_unlicensed(record),
    ]


def _mean_level(levels: Sequence[tuple[float, int]], begin: float, end: float) -> float:
    """The mean between two times of what is so high from each moment on."""
    ends = [at for at, _ in levels[1:]] + [math.inf]
    spans = ((level, min(end, until) - max(begin, at)) for (at, level), until in zip(levels, ends, strict=False))
    return sum(level * span for level, span in spans if span > 0) / max(1e-9, end - begin)


def _start_again(record: Record) -> int:
    last = {denial.layer: denial.at for denial in record.denials}
    return len({run.layer.id for run in record.runs if run.began > last.get(run.layer.id, math.inf) + 60.0})


_FEW_CORES = 4
"""Each of four workers gives a frame a seat in its shard at most: two seats are free when the artists come."""


def _first_wave() -> Work:
    return Work(
        "few",
        "licensed",
        120,
        seconds=_FRAME_SECONDS,
        priority=200,
        licences=("houdini",),
        job_cap=_FEW_CORES,
    )


DENIED = Scenario(
    name="denied",
    says="what artists leave no seats waits, uses no retry, and the others use what there is",
    hosts=HOSTS,
    shows=_SHOWS,
    work=(
        _first_wave(),
        _under("houdini", frames=120, jobs=6, at=_GRAB_AT + 0.2, name="surprised"),
        _under("houdini", frames=500, jobs=4, at=_MORE_AT, name="more"),
        _flood(100.0),
    ),
    licences={"houdini": Licence(SEATS, machines=True, seats=SEATS, reported=True, exit_status=_STATUS)},
    events=(
        Event(_GRAB_AT, _GRABBED, lambda stage: stage.licences.artists_come("houdini", SEATS)),
        Event(_GONE_AT, _GONE, lambda stage: stage.licences.artists_go("houdini")),
    ),
    seconds=100.0,
    judge=judge_denied,
    sharded=True,
)

# Silence

_SILENT, _TOLD = "reports stop", "reports come again"
_SILENT_AT = 16.5
_LIFE_SECONDS = 60
_TOLD_AT = 91.0


def judge_silence(record: Record) -> list[Bound]:
    silent = record.marks.get(_SILENT, record.seconds)
    opens = max((at for at, _ in record.reports if at < silent), default=silent) + _LIFE_SECONDS
    told = min((at for at, _ in record.reports if at > silent), default=record.seconds)
    denied_at = [denial.at for denial in record.denials]
    houdini = of.uses(record, "houdini")
    return [
        Bound("most houdini seats before it opens", _most_seats(record, "houdini", 0.0, opens), most=SEATS + _SPARE),
        Bound("frames denied before it opens", sum(at < opens for at in denied_at), most=0),
        Bound("frames denied while it is open", sum(opens <= at < told + 1.0 for at in denied_at), 1),
        Bound("frames denied once it is enforced", sum(at >= told + 1.0 for at in denied_at), most=0),
        Bound("doctor says so", record.found.get("doctor says so", 0.0), 1),
        Bound("doctor says so after a report", record.found.get("doctor says so after a report", 1.0), most=0),
        Bound("most houdini seats afterwards", _most_seats(record, "houdini", told + 8.0), most=SEATS),
        Bound(
            "mean houdini seats afterwards",
            of.mean_use(houdini, told + 8.0, record.seconds, lambda use: use.machines + use.artists),
            SEATS - 1,
        ),
        *_waits(record),
        *_unlicensed(record),
    ]


def _stop_reports(stage: Stage) -> None:
    stage.licences.reporting = False


def _report_again(stage: Stage) -> None:
    stage.licences.reporting = True


def _ask_doctor(stage: Stage) -> None:
    stage.found["doctor says so"] = stage.doctor_says("keeps nothing from starting")


def _ask_doctor_again(stage: Stage) -> None:
    stage.found["doctor says so after a report"] = stage.doctor_says("keeps nothing from starting")


SILENCE = Scenario(
    name="silence",
    says="without reports nothing is overrun up to the time to live; then the limit opens, until the next report",
    hosts=HOSTS,
    shows=_SHOWS,
    work=(
        _under("houdini", frames=330, jobs=8),
        *(_under("houdini", frames=40, jobs=1, at=at, name="new") for at in (80.0, 84.0, 88.0)),
        _under("houdini", frames=200, jobs=6, at=_TOLD_AT + 4.0, name="late"),
        _flood(124.0),
    ),
    licences={"houdini": _HOUDINI},
    events=(
        Event(12.0, "artists come", lambda stage: stage.licences.artists_come("houdini", 1)),
        Event(_SILENT_AT, _SILENT, _stop_reports),
        Event(30.0, "another comes", lambda stage: stage.licences.artists_come("houdini", 1)),
        Event(81.0, "doctor is asked", _ask_doctor),
        Event(_TOLD_AT, _TOLD, _report_again),
        Event(_TOLD_AT + 15.0, "doctor is asked again", _ask_doctor_again),
    ),
    seconds=124.0,
    judge=judge_silence,
    sharded=True,
)

# Lowered

_LOWERED = "the maximum is lowered"
_LOWERED_AT = 26.0
_FEWER_SEATS = 3


def judge_lowered(record: Record) -> list[Bound]:
    lowered = record.marks.get(_LOWERED, record.seconds / 2)
    after = lowered + 2 * _FRAME_SECONDS[1]
    houdini = of.uses(record, "houdini")
    held = _hosts_of(record, "houdini", lowered - 1.0, lowered)
    lost = held - _hosts_of(record, "houdini", after, record.seconds)
    by_others = record.busy(after, record.seconds, lambda run: "all" if run.host in lost else None).get("all", 0.0)
    before_it = of.mean_use(houdini, _FULL_AT, lowered, lambda use: use.frames) / SEATS
    afterwards = of.mean_use(houdini, after, record.seconds, lambda use: use.frames) / _FEWER_SEATS
    return [
        Bound("most houdini seats", _most_seats(record, "houdini"), most=SEATS),
        Bound("machines two frame times after it", _most_seats(record, "houdini", after), _FEWER_SEATS, _FEWER_SEATS),
        Bound("frames a seat before", before_it, LEAST_FRAMES_A_SEAT),
        Bound("frames a seat after to before", afterwards / max(1e-9, before_it), 0.9),
        Bound("machines that lost their seat", len(lost), SEATS - _FEWER_SEATS),
        Bound(
            "part of their cores in use",
            by_others / max(1, sum(record.hosts[host].cores for host in lost)),
            LEAST_USE,
        ),
        Bound("frames denied", len(record.denials), most=0),
        *_unlicensed(record),
        *_lost(record),
    ]


def _hosts_of(record: Record, product: str, begin: float, end: float) -> set[str]:
    """The hosts with frames under a product at some moment between two times."""
    return {
        run.host
        for run in record.runs
        if product in run.layer.licences and run.began < end and record.end_of(run) > begin
    }


LOWERED = Scenario(
    name="lowered",
    says="when a maximum of machines is lowered, as many as are too many do other work, and the others go on",
    hosts=HOSTS,
    shows=_SHOWS,
    work=(_under("houdini", frames=220, jobs=8), _flood(52.0)),
    licences={"houdini": _HOUDINI},
    events=(Event(_LOWERED_AT, _LOWERED, lambda stage: stage.licences.set_most("houdini", _FEWER_SEATS)),),
    seconds=52.0,
    judge=judge_lowered,
    sharded=True,
)

# Counts only

MOST_LOST_PERCENT = 2.0


def judge_counts(record: Record) -> list[Bound]:
    houdini = of.uses(record, "houdini")
    frames = of.mean_use(houdini, _FULL_AT, record.seconds, lambda use: use.frames)
    free = of.mean_use(houdini, _FULL_AT, record.seconds, lambda use: SEATS - use.artists)
    lost = _lost(record)
    artists = of.most_used(houdini, 0.0, math.inf, lambda use: use.artists)
    return [
        Bound("most houdini seats", _most_seats(record, "houdini"), most=SEATS + _SPARE),
        Bound("frames a houdini seat", frames / free, LEAST_FRAMES_A_SEAT),
        Bound("artists with a seat", artists, 2 * _SPARE),
        Bound("frames denied", len(record.denials), most=0),
        Bound(lost[0].name, lost[0].value, most=MOST_LOST_PERCENT),
        *lost[1:],
        *_unlicensed(record),
    ]


COUNTS_ONLY = Scenario(
    name="counts-only",
    says="a maximum that is set by how many seats are free is never passed, and loses few bookings",
    hosts=HOSTS,
    shows=_SHOWS,
    work=(_under("houdini", frames=220, jobs=8), _flood(56.0)),
    licences={
        "houdini": Licence(SEATS, machines=True, seats=SEATS + _SPARE, set_to_free=True, exit_status=_STATUS),
    },
    events=(
        *(
            Event(at, f"artists come after {at:g} s", lambda stage: stage.licences.artists_come("houdini", 1))
            for at in (14.5, 18.5, 30.5, 34.5)
        ),
        Event(42.5, "the artists go", lambda stage: stage.licences.artists_go("houdini")),
    ),
    seconds=56.0,
    judge=judge_counts,
    sharded=True,
)

LICENCES: tuple[Scenario, ...] = (SEATS_TAKEN, DENIED, SILENCE, LOWERED, COUNTS_ONLY)
