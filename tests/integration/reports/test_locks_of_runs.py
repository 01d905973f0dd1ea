"""Which procs are locked before runs end, and in which order, whether they are named themselves or by their frames."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import pytest
from sqlalchemy import Engine, text

from opencue_sched.embedded.farms.farm_specs import LayerSpec
from opencue_sched.store.procs import lock_and_read_runs
from tests.kit.runs import FarmView, start


@dataclass(frozen=True)
class Runs:
    """Four runs in the order of their procs' ids; the proc of the last has lost its frame."""

    procs: list[str]
    frames: list[str]
    waiting: str
    """A frame without a proc."""

    def named(self, names: Sequence[str]) -> list[tuple[str, str]]:
        """The (proc id, frame id) that names of two letters stand for, the proc first. A number stands for that of a
        run, ``w`` for the frame that waits, ``x`` for what does not exist and ``-`` for nothing."""
        no_run = {"-": "", "x": "gone", "w": self.waiting}
        procs = {**no_run, **{str(place): proc for place, proc in enumerate(self.procs)}}
        frames = {**no_run, **{str(place): frame for place, frame in enumerate(self.frames)}}
        return [(procs[proc], frames[frame]) for proc, frame in names]


@pytest.fixture
def runs(view: FarmView) -> Runs:
    """Four runs on a farm on which nothing else runs."""
    running = start(view, LayerSpec(frames=5), running=4)
    owned = sorted(zip(running.procs, running.frames, strict=True))
    view.run_sql("UPDATE proc SET pk_frame = NULL WHERE pk_proc = :proc", proc=owned[-1][0])
    return Runs([proc for proc, _ in owned], [frame for _, frame in owned], running.job.frames[4])


def unlocked(view: FarmView, runs: Runs) -> list[int]:
    """The places of the procs that nobody has locked."""
    free = view.rows("SELECT pk_proc FROM proc ORDER BY pk_proc FOR UPDATE SKIP LOCKED")
    return [runs.procs.index(row.pk_proc) for row in free]


@pytest.mark.parametrize(
    ("names", "locked"),
    [
        pytest.param(["1-"], {1}, id="a proc"),
        pytest.param(["-1"], {1}, id="a frame"),
        pytest.param(["11"], {1}, id="a proc and its frame"),
        pytest.param(["12"], {1, 2}, id="a proc and the frame of another"),
        pytest.param(["1w", "-3"], {1}, id="frames without a proc"),
        pytest.param(["3-"], {3}, id="a proc without a frame"),
        pytest.param(["xx", "x2"], {2}, id="what does not exist"),
        pytest.param(["2-", "02", "-1", "00"], {0, 1, 2}, id="several"),
        pytest.param([], set(), id="nothing"),
    ],
)
def test_procs_are_locked_by_their_ids_and_by_their_frames(
    engine: Engine, view: FarmView, runs: Runs, names: list[str], locked: set[int]
) -> None:
    with engine.begin() as connection:
        # When runs are locked
        lock_and_read_runs(connection, runs.named(names))
        # Then the procs that are named, or own frames that are, are locked, and no others
        assert unlocked(view, runs) == sorted(set(range(4)) - locked)


@pytest.mark.parametrize("names", [["2-", "1-", "0-"], ["-2", "-1", "-0"], ["2-", "-1", "-0"], ["-2", "1-", "0-"]])
def test_procs_are_locked_in_the_order_of_their_ids(
    engine: Engine, view: FarmView, runs: Runs, names: list[str]
) -> None:
    def lock() -> None:
        with engine.begin() as connection:
            lock_and_read_runs(connection, runs.named(names))

    with ThreadPoolExecutor(1) as threads:
        with engine.begin() as other:
            # Given another transaction that has locked the second proc
            other.execute(text("SELECT FROM proc WHERE pk_proc = :proc FOR UPDATE"), {"proc": runs.procs[1]})
            # When three runs are to be locked, the last proc named first
            locked = threads.submit(lock)
            view.wait_for_waiters(1)
            # Then the first proc was locked by then, the third was not
            assert unlocked(view, runs) == [2, 3]
        locked.result()
