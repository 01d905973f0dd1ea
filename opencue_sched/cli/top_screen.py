"""What `opencue-sched top` shows: a farm, and what its user chose, as lines that fit a terminal."""

from __future__ import annotations

import textwrap
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from datetime import datetime
from typing import Any

from rich.cells import cell_len, set_cell_size
from rich.text import Text

from opencue_sched.cli.output import HIGH, LOW, NAME, Column, cap_text, lay_out
from opencue_sched.domain.cluster import Verdict
from opencue_sched.domain.farm import counted, duration_text
from opencue_sched.insight.explain import Explanation, explanation_lines
from opencue_sched.insight.farm import AllocationUse, FarmView, JobUse, ShowUse, SubscriptionUse

ANY_HEIGHT = 100_000
_BAR = 40
_AT_WORK = {"running", Verdict.FLOWING}
_ABOVE_ALL = 3
_WHY = 30
"""Characters of a reason for which other columns are left out."""

SORTS: dict[str, Callable[[JobUse], Any]] = {
    "wait": lambda _: 0,
    "frames": lambda it: -it.waiting,
    "cores": lambda it: -it.cores,
    "priority": lambda it: -it.priority,
    "name": lambda it: it.name,
}
"""Orders of jobs; that of the farm's view is by how long they wait."""


_PERCENT = "{:.0%}".format
SHOW_COLUMNS = (
    Column("show", "SHOW", importance=NAME),
    Column("allocation", "ALLOCATION", importance=LOW),
    Column("used", "CORES", importance=HIGH),
    Column("size", "SIZE", importance=HIGH),
    Column("burst", "BURST", show=cap_text),
    Column("share", "SHARE", show=_PERCENT, importance=HIGH),
    Column("due", "DUE", show=_PERCENT, importance=HIGH),
    *(Column(name, title) for name, title in (("running", "RUN"), ("waiting", "WAIT"), ("dead", "DEAD"))),
    Column("off", "STATE"),
)
JOB_COLUMNS = (
    Column("name", "JOB", importance=NAME),
    Column("waiting_seconds", "WAITED", show=duration_text, importance=HIGH),
    Column("waiting", "WAIT", importance=HIGH),
    Column("running", "RUN", importance=HIGH),
    Column("dead", "DEAD"),
    Column("", "DONE", lambda job: f"{job.done}/{job.frames}"),
    Column("cores", "CORES"),
    Column("priority", "PRI"),
    Column("user", "USER", importance=LOW),
    Column("show", "SHOW", importance=LOW),
    Column("why_text", "WHY", importance=_ABOVE_ALL, wraps=True),
)


@dataclass(frozen=True)
class Chosen:
    """What the user chose. ``show`` and ``job`` are parts of names; ``selected`` and ``explained`` are ids of jobs.

    ``typing`` is the filter that is being typed (``show`` or ``job``), and ``typed`` what of it is there.
    """

    sort: str = "wait"
    show: str = ""
    job: str = ""
    selected: str | None = None
    explained: str | None = None
    scrolled: int = 0
    typing: str = ""
    typed: str = ""


@dataclass(frozen=True)
class Read:
    """What was read last: None and nothing at first. ``problem``: why nothing newer could be read. ``explanation`` is
    None for a job that is gone."""

    view: FarmView | None = None
    explanation: Explanation | None = None
    of_job: str | None = None
    problem: str = ""


@dataclass
class Screen:
    """Lines of a width and height. Built line by line, so that what there is no room for is left out."""

    width: int
    height: int = ANY_HEIGHT
    lines: list[Text] = field(default_factory=list)

    def add(self, text: str | Text, style: str = "") -> None:
        """A line, cut to the width."""
        line = Text(text) if isinstance(text, str) else text
        line.stylize(style)  # as a span: texts that differ by their own style alone are equal
        line.no_wrap = True
        line.truncate(self.width, overflow="ellipsis")
        self.lines.append(line)

    @property
    def left(self) -> int:
        """Lines that are free."""
        return self.height - len(self.lines)


def sorted_jobs(view: FarmView, chosen: Chosen) -> list[JobUse]:
    """The jobs in the order that was chosen."""
    return sorted(view.jobs, key=SORTS[chosen.sort])


def moved(view: FarmView, chosen: Chosen, by: int) -> Chosen:
    """With the job selected that is ``by`` places below the one that is."""
    jobs = [it.id for it in sorted_jobs(view, chosen)]
    if not jobs:
        return replace(chosen, selected=None)
    place = jobs.index(chosen.selected) + by if chosen.selected in jobs else 0
    return replace(chosen, selected=jobs[min(max(place, 0), len(jobs) - 1)])


def draw(read: Read, chosen: Chosen, *, width: int, height: int) -> list[Text]:
    """The whole screen, the help in its last line."""
    screen = Screen(width, height - 1)
    if read.view is None:
        screen.add(read.problem or "reading the farm ...", "bold red" if read.problem else "dim")
    elif chosen.explained is not None:
        _header(screen, read.view, read.problem)
        _explanation(screen, read, chosen)
    else:
        farm_lines(screen, read.view, chosen, problem=read.problem)
    lines = screen.lines[: screen.height]
    lines += [Text("")] * (screen.height - len(lines))
    help_line = Screen(width)
    help_line.add(_help(chosen), "reverse")
    return [*lines, *help_line.lines]


def farm_lines(screen: Screen, view: FarmView, chosen: Chosen, *, problem: str = "") -> None:
    """The farm: allocations, what waits, the fleet, shows and jobs."""
    _header(screen, view, problem)
    _allocations(screen, view.allocations)
    if view.waiting_by_verdict:
        found = sorted(view.waiting_by_verdict.items(), key=lambda it: -it[1])
        screen.add("why frames wait: " + ", ".join(f"{_words(name)} {count}" for name, count in found))
    _fleet(screen, view)
    rows = [row for it in view.shows if chosen.show.lower() in it.name.lower() for row in _rows(it)]
    jobs = sorted_jobs(view, chosen)
    room = max(0, screen.left - 4)
    fit = min(len(rows), max(room // 3, room - len(jobs)))
    screen.add("")
    styles = ["" if it["busy"] else "dim" for it in rows]
    _table(screen, SHOW_COLUMNS, rows[:fit], styles, more=len(rows) - fit)
    screen.add("")
    ids = [it.id for it in jobs]
    at = ids.index(chosen.selected) if chosen.selected in ids else -1
    start = max(0, at - max(1, screen.left - 1) + 1)
    styles = ["reverse" if number == at else _style_of_job(it) for number, it in enumerate(jobs)]
    shown = jobs[start : start + max(0, screen.left - 1)]
    _table(screen, JOB_COLUMNS, shown, styles[start:], more=view.jobs_total - len(shown))
    if not jobs:
        asked = [f"{what} {text!r}" for what, text in (("show", chosen.show), ("name", chosen.job)) if text]
        screen.add("no pending job" + (f" with {' and '.join(asked)}" if asked else ""), "dim")


def _header(screen: Screen, view: FarmView, problem: str) -> None:
    hosts, down, locked = (
        sum(getattr(it, name) for it in view.allocations) for name in ("hosts", "hosts_down", "hosts_locked")
    )
    off = ", ".join(f"{count} {word}" for count, word in ((down, "down"), (locked, "locked")) if count)
    clock = datetime.fromtimestamp(view.at).astimezone().strftime("%H:%M:%S")
    parts = (
        view.facility or "farm",
        clock,
        counted(hosts, "host") + (f" ({off})" if off else ""),
        f"frames: {view.running} running, {view.waiting} waiting, {view.dead} dead",
        f"{view.bookings_per_second:g} booked/s",
    )
    screen.add("  ".join(parts), "bold")
    if problem:
        screen.add(f"figures of {duration_text(time.time() - view.at)} ago: {problem}", "bold red")


def _allocations(screen: Screen, allocations: Sequence[AllocationUse]) -> None:
    """A bar each of those with hosts, the largest first; the rest in one line."""
    found = sorted((it for it in allocations if it.hosts), key=lambda it: (-it.cores, it.name))
    most = max(2, screen.height // 6)
    shown = found if len(found) <= most else found[: most - 1]
    names = max((cell_len(it.name) for it in shown), default=0)
    for it in shown:
        screen.add(
            Text.assemble(
                set_cell_size(it.name, names), "  ", _bar(it, min(_BAR, screen.width // 6)), "  ", _cores_text(it)
            )
        )
    if rest := found[len(shown) :]:
        screen.add(
            f"and {len(rest)} more: {sum(it.booked for it in rest):g} of {sum(it.cores for it in rest):g} booked"
        )
    if not found:
        screen.add("no hosts", "bold red")


def _cores_text(it: AllocationUse) -> str:
    parts = [f"{it.booked:g} of {it.cores:g} cores booked", f"{it.idle:g} idle"]
    parts += [f"{cores:g} {word}" for cores, word in ((it.locked, "locked"), (it.down, "down")) if cores]
    return ", ".join(parts)


def _bar(it: AllocationUse, width: int) -> Text:
    bar, cores = Text(), 0.0
    for part, sign, style in ((it.booked, "█", "green"), (it.idle, "░", "dim"), (it.locked, "▒", "yellow")):
        cores += part
        bar.append(sign * ((round(width * cores / it.cores) if it.cores else 0) - len(bar)), style)
    return bar.append("x" * (width - len(bar)), "red")


def _fleet(screen: Screen, view: FarmView) -> None:
    leader, workers = view.fleet["leader"], view.fleet["workers"]
    if leader["fence"] is None:
        screen.add("no beat leads: nothing periodic is done; start `celery -A opencue_sched beat`", "bold red")
    if not workers:
        screen.add("no worker is alive: nothing is booked; start `celery -A opencue_sched worker`", "bold red")
    age = leader["tick_age_seconds"]
    ticked = "" if age is None else f" (ticked {age:.0f}s ago)"
    parts = [f"leader {leader['instance'] or '?'}{ticked}"] if leader["fence"] is not None else []
    states = [
        f"{it['instance']} {it['in_flight']}/{it['capacity']} {it['state'].replace('working', '')}".rstrip()
        for it in workers
    ]
    parts += [f"{counted(len(workers), 'worker')}: {', '.join(states)}"] if workers else []
    screen.add("  ".join(parts))


def _rows(show: ShowUse) -> Iterable[Mapping[str, Any]]:
    """A row for each subscription of a show; the show's frames stand in the first of them only."""
    counts: Mapping[str, Any] = {name: getattr(show, name) for name in ("running", "waiting", "dead")}
    nothing = dict.fromkeys(it.name for it in fields(SubscriptionUse)) | {"used": show.cores}
    for it in show.subscriptions or (None,):
        use = nothing if it is None else asdict(it)
        yield {**use, **counts, "show": show.name, "off": show.off, "busy": show.running + show.waiting}
        counts = dict.fromkeys(counts)


def _table(
    screen: Screen, columns: Sequence[Column], rows: Sequence[Any], styles: Sequence[str], *, more: int = 0
) -> None:
    """A line of titles and one for each row, of the columns that fit."""
    table = lay_out(rows, columns, screen.width, least=_WHY)
    screen.add(table.line(table.titles) + (f"  ({more} more)" if more else ""), "bold underline")
    for texts, style in zip(table.cells, styles, strict=False):
        screen.add(table.line([_cut(text, width) for text, width in zip(texts, table.widths, strict=True)]), style)


def _cut(text: str, width: int) -> str:
    return text if cell_len(text) <= width else set_cell_size(text, width - 1) + "…"


def _explanation(screen: Screen, read: Read, chosen: Chosen) -> None:
    for job in (it for it in (read.view.jobs if read.view else ()) if it.id == chosen.explained):
        screen.add("")
        screen.add(f"{job.name} (show {job.show}, {job.user}, priority {job.priority})", "bold")
        screen.add("")
    if read.of_job != chosen.explained:
        screen.add("asking ...", "dim")
        return
    found = read.explanation
    lines = ["the job is gone"] if found is None else explanation_lines(found, found.layers)
    wrapped = [part for line in lines for part in textwrap.wrap(line, screen.width, subsequent_indent="    ")]
    for line in wrapped[min(chosen.scrolled, max(0, len(wrapped) - 1)) :]:
        screen.add(line)


def _help(chosen: Chosen) -> str:
    if chosen.typing:
        return f" {chosen.typing} with in its name: {chosen.typed}_   enter: filter   esc: as before"
    if chosen.explained is not None:
        return " esc back  up/down scroll  q quit"
    show, job = (f"={text}" if text else "" for text in (chosen.show, chosen.job))
    clear = "  esc all" if show or job else ""
    return f" q quit  s sort: {chosen.sort}  f show{show}  / job{job}{clear}  up/down choose  enter explain"


def _style_of_job(job: JobUse) -> str:
    if job.trouble:
        return "red"
    return "green" if job.why in _AT_WORK else ""


def _words(code: str) -> str:
    return code.replace("_", " ")
