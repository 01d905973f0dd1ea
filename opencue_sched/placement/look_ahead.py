"""Chooses whose frames a plan reads ahead: of the layers that come next, so that one statement reads them together."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from heapq import nsmallest
from itertools import islice

from opencue_sched.domain.plans import Waiting
from opencue_sched.placement.plan_state import ShowState
from opencue_sched.settings import Queue

_PORTIONS_AHEAD = 100
"""How many portions are asked for at once, at most, when a plan comes to a layer whose frames were not read."""
_LAYERS_AHEAD = 400
"""How many layers that come next by rank are looked at for portions to ask for."""
_DRAWN_AHEAD = 100
"""How many jobs that come next by the draw are looked at for portions to ask for."""
_FRAMES_OF_A_TURN = 5
"""How many frames a job is taken to start each time it is drawn."""


def look_ahead(
    show: ShowState,
    queue: Queue,
    *,
    frames: float,
    cores: float,
    may_start: Callable[[Waiting], bool],
    frames_left: Callable[[Waiting, float], float],
) -> None:
    """Add to what a show has ``wanted`` the layers that will be wanted next: those of the jobs that come next by the
    draw, and those that come next by rank.

    ``frames`` and ``cores`` are the most that the show may still start: more would be read for nothing.
    ``may_start`` says whether a layer may find a host, and is under no full cap. ``frames_left`` says how many frames
    of a layer its job's caps and its limits allow besides so many cores of the job: jobs with low caps start few frames
    each, and so more layers have to be read.
    """
    most = queue.dispatch_frames_per_layer_limit
    of_jobs: defaultdict[str, float] = defaultdict(float)
    """Cores that layers are taken to start, by job id."""

    def starts(waiting: Waiting, of_each: int) -> float:
        """How many frames of the layer are taken to start, which are counted for its job."""
        number = min(waiting.frames, of_each, frames_left(waiting, of_jobs[waiting.job.id]))
        of_jobs[waiting.job.id] += number * waiting.need.cores
        return number

    for waiting in show.wanted:
        number = starts(waiting, most)
        frames, cores = frames - number, cores - number * waiting.need.cores
    drawn = queue.priority_draw if show.drawn else 0.0
    by_draw, by_rank = _next_by_draw(show), islice(show.rest or (), _LAYERS_AHEAD)
    of_a_turn = min(most, _FRAMES_OF_A_TURN)
    _want(show, filter(may_start, by_draw), drawn * frames, drawn * cores, lambda waiting: starts(waiting, of_a_turn))
    _want(
        show,
        filter(may_start, by_rank),
        (1 - drawn) * frames,
        (1 - drawn) * cores,
        lambda waiting: starts(waiting, most),
    )


def _next_by_draw(show: ShowState) -> Iterator[Waiting]:
    """The layers of which the jobs that come next by the draw would start frames, one of each job."""
    for _, job_id in nsmallest(_DRAWN_AHEAD, show.drawn or ()):
        for waiting in show.work.of_job(job_id):
            states = show.states.get(waiting.layer.id)
            if states is None:
                yield waiting
            if states is None or any(state.reason is None for state in states):
                break


def _want(
    show: ShowState, coming: Iterable[Waiting], frames: float, cores: float, starts: Callable[[Waiting], float]
) -> None:
    """Ask for the portions of ``coming`` layers until these would start so many ``frames`` or ``cores``. ``starts``
    says how many frames each is taken to start."""
    for waiting in coming:
        if frames <= 0 or cores <= 0 or len(show.wanted) >= _PORTIONS_AHEAD:
            return
        if waiting.layer.id not in show.states and (number := starts(waiting)) > 0:
            frames, cores = frames - number, cores - number * waiting.need.cores
            if not show.work.has_portion(waiting.layer):
                show.wanted.append(waiting)
