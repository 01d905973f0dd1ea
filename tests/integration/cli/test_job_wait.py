"""`opencue-sched job wait` and `submit --wait`: progress in lines and on terminals, and how each end is told."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import struct
import termios
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
from sqlalchemy import Engine, text
from sqlalchemy.exc import OperationalError

from opencue_sched.cli import job_wait
from opencue_sched.embedded.farms.farm import Farm
from opencue_sched.embedded.farms.farm_specs import JobIds, LayerSpec
from tests.kit.command import Cli
from tests.kit.polling import eventually
from tests.kit.statements import listening, naming
from tests.kit.wording import lacks

Build = Callable[[Callable[[Farm], Any]], Any]

NAME = "show-sh010-artist_comp"
LONG_LAYER = "beauty_of_a_layer_with_a_name_longer_than_any_column_has_room_for"
JOB_FILE = """
name: waited
show: show
shot: sh010
user: artist
layers:
  - {name: render, range: 1-2, command: "true"}
"""


@dataclass(frozen=True)
class Waited:
    """A job of layers render (4 frames) and one with a long name (2 frames)."""

    job: JobIds
    engine: Engine

    def do(self, sql: str, **parameters: Any) -> None:
        with self.engine.begin() as connection:
            connection.execute(text(sql), parameters)

    def frames(self, state: str, *numbers: int) -> None:
        ids = [self.job.frames[number] for number in numbers or range(6)]
        self.do(
            "UPDATE frame SET str_state = :state, int_version = int_version + 1 WHERE pk_frame = ANY(:ids)",
            state=state,
            ids=ids,
        )

    def finish(self) -> None:
        self.do("UPDATE job SET str_state = 'FINISHED', str_visible_name = NULL WHERE pk_job = :job", job=self.job.id)


@pytest.fixture
def waited(build: Build, engine: Engine) -> Waited:
    layers = [LayerSpec(name="render", frames=4), LayerSpec(name=LONG_LAYER, frames=2)]
    return Waited(build(lambda farm: farm.job(layers, name=NAME)), engine)


@pytest.fixture(autouse=True)
def looks(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Grows with each look at the jobs but the last: with the pause after that, which is short here."""
    pauses: list[float] = []

    def sleep(seconds: float) -> None:
        pauses.append(seconds)
        time.sleep(0.02)

    monkeypatch.setattr(job_wait, "time", SimpleNamespace(monotonic=time.monotonic, sleep=sleep))
    return pauses


def meanwhile(looks: list[float], *steps: Callable[[], None]) -> threading.Thread:
    """Does the steps, each after the next look but one at the jobs: the one that is under way may be older."""

    def run() -> None:
        for step in steps:
            seen = len(looks)
            eventually(lambda seen=seen: len(looks) > seen + 1)
            step()

    thread = threading.Thread(target=run)
    thread.start()
    return thread


def removed(waited: Waited) -> None:
    waited.frames("WAITING")
    waited.do("DELETE FROM frame")
    waited.do("DELETE FROM layer")


@pytest.mark.parametrize(
    ("ending", "outcome", "status"),
    [
        (lambda it: it.frames("SUCCEEDED"), "succeeded", 0),
        (lambda it: (it.frames("SUCCEEDED"), it.finish()), "succeeded", 0),
        (lambda it: (it.frames("DEAD", 1), it.frames("SUCCEEDED", 0, 2, 3, 4, 5)), "dead", 1),
        (lambda it: (it.frames("DEAD", 0, 1, 2, 3), it.frames("DEPEND", 4, 5)), "dead", 1),
        (lambda it: (it.frames("SUCCEEDED", 0, 1, 2, 3), it.frames("EATEN", 4, 5)), "eaten", 1),
        (lambda it: it.finish(), "killed", 1),
        (lambda it: (it.frames("DEAD", 0), it.finish()), "killed", 1),
        (removed, "removed", 1),
    ],
)
def test_each_end_of_a_job_has_its_outcome_and_exit_status(
    cli: Cli, waited: Waited, looks: list[float], ending: Callable[[Waited], object], outcome: str, status: int
) -> None:
    change = meanwhile(looks, lambda: ending(waited))
    ran = cli("job", "wait", NAME, "--json")
    change.join()
    assert ran.status == status
    (ended,) = ran.json
    assert (ended["job"], ended["outcome"]) == (NAME, outcome)
    assert cli("job", "wait", waited.job.id).status in (status, 1)


def test_a_job_that_goes_on_is_waited_for_paused_or_with_dead_frames(
    cli: Cli, waited: Waited, looks: list[float]
) -> None:
    change = meanwhile(
        looks,
        lambda: waited.do("UPDATE job SET b_paused = true"),
        lambda: waited.frames("DEAD", 0),
        lambda: waited.frames("DEPEND", 1, 2, 3, 4, 5),
    )
    ran = cli("job", "wait", NAME)
    change.join()
    assert ran.status == 1
    assert ran.out.splitlines()[0] == f"{NAME} render: 0/4 done"
    assert not lacks(ran.out.splitlines()[-1], NAME, "0 of 6", "1 dead", "`opencue-sched explain")


def test_what_a_success_frees_a_moment_later_is_waited_for(cli: Cli, waited: Waited, looks: list[float]) -> None:
    """Between the end of a frame and the freeing of what waits for it, nothing can run."""
    waited.frames("SUCCEEDED", 1, 2, 3)
    waited.frames("DEAD", 0)
    waited.frames("DEPEND", 4, 5)
    blocked = [True]

    def free() -> None:
        if blocked:
            blocked.clear()
            waited.frames("WAITING", 4, 5)

    with listening(Engine, "after_cursor_execute", naming(waited.job.id, free)):
        change = meanwhile(looks, lambda: waited.frames("SUCCEEDED", 4, 5))
        ran = cli("job", "wait", NAME)
        change.join()
    assert not lacks(ran.out, NAME, "5 of 6", "1 dead")


def test_several_jobs_are_one_statement_a_look(cli: Cli, waited: Waited, looks: list[float], build: Build) -> None:
    others = [build(lambda farm, n=n: farm.job(name=f"other{n}", show=waited.job.show)) for n in range(3)]
    asked: list[int] = []

    def note(*seen: Any) -> None:
        asked.append(sum(job.id in str(seen[3]) for job in (waited.job, *others)))

    change = meanwhile(
        looks,
        lambda: waited.do("UPDATE frame SET str_state = 'SUCCEEDED' WHERE pk_job = :job", job=others[0].id),
        lambda: waited.do("UPDATE frame SET str_state = 'SUCCEEDED', int_version = 9 WHERE str_state = 'WAITING'"),
    )
    with listening(Engine, "before_cursor_execute", note):
        ran = cli("job", "wait", NAME, "other0", "other1", "other2")
        change.join()
    assert ran.status == 0
    assert asked.count(4) == len(looks) + 1
    assert [line.split(":")[0] for line in ran.out.splitlines()[-4:]] == [NAME, "other0", "other1", "other2"]


def test_it_waits_through_a_failure_of_the_database(cli: Cli, waited: Waited) -> None:
    failures = iter([True, True])

    def fail() -> None:
        if next(failures, False):
            raise OperationalError("SELECT", {}, Exception("server closed the connection"))
        waited.frames("SUCCEEDED")

    with listening(Engine, "before_cursor_execute", naming(waited.job.id, fail)):
        ran = cli("job", "wait", NAME)
    assert ran.status == 0
    assert ran.err.count("note: ") == 1


def on_terminal(cli: Cli, columns: int, rows: int, *words: str) -> tuple[int, str]:
    """The exit status, and all that was written to a terminal of this size."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))
    written: list[bytes] = []

    def read() -> None:
        while True:
            try:
                block = os.read(ours, 65536)
            except OSError:
                return
            if not block:
                return
            written.append(block)

    reader = threading.Thread(target=read)
    reader.start()
    with pytest.MonkeyPatch.context() as patch, os.fdopen(theirs, "w", encoding="utf-8") as terminal:
        patch.delenv("COLUMNS")
        patch.setenv("TERM", "xterm")
        patch.setenv("COLUMNS", str(columns))
        patch.setenv("LINES", str(rows))
        patch.setattr("sys.stdout", terminal)
        status = cli(*words).status
    reader.join()
    os.close(ours)
    return status, b"".join(written).decode()


@pytest.mark.parametrize("state", ["WAITING", "RUNNING"])
def test_a_job_of_which_nothing_runs_says_so(cli: Cli, waited: Waited, looks: list[float], state: str) -> None:
    waited.frames(state, 0)
    change = meanwhile(looks, lambda: waited.frames("SUCCEEDED"))
    _, written = on_terminal(cli, 80, 24, "job", "wait", NAME)
    change.join()
    assert ("`opencue-sched explain JOB`" in written) == (state == "WAITING")


@pytest.mark.parametrize("columns", [80, 120, 200])
def test_a_terminal_shows_a_bar_for_each_layer(cli: Cli, waited: Waited, looks: list[float], columns: int) -> None:
    waited.do(
        "UPDATE layer_usage SET int_clock_time_success = 600, int_frame_success_count = 2 WHERE pk_layer = :layer",
        layer=waited.job.layers[0].id,
    )
    waited.frames("SUCCEEDED", 0, 1)
    waited.frames("RUNNING", 2)
    waited.frames("DEAD", 4)
    change = meanwhile(looks, lambda: waited.frames("SUCCEEDED"))
    status, written = on_terminal(cli, columns, 24, "job", "wait", NAME)
    change.join()
    assert status == 0
    shown = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", written).replace("\r", "\n")
    # Of the four frames two are left: one is half through, one has not begun, and one runs at a time.
    assert re.search(r"render +━+.* 2/4 done +1 running +7m left *\n", shown)
    assert re.search(r"0/2 done +1 dead", shown)
    assert re.search(r"render +━+ +4/4 done", shown)
    assert all(len(line) <= columns for line in shown.splitlines())
    # no name is cut: the long one goes on in the lines below
    if columns < 200:
        folded = [line.split("  ")[0] for line in shown.splitlines()]
        assert LONG_LAYER in "".join(folded)
    else:
        assert LONG_LAYER in shown
    assert not lacks(shown.rstrip().splitlines()[-1], NAME, "6 of 6")


def test_of_more_layers_than_lines_those_that_go_on_are_shown(cli: Cli, build: Build, waited: Waited) -> None:
    many = build(lambda farm: farm.job([LayerSpec(name=f"l{n:02}") for n in range(40)], show=waited.job.show, name="m"))
    waited.do("UPDATE frame SET str_state = 'SUCCEEDED' WHERE pk_frame = ANY(:ids)", ids=list(many.frames[:30]))
    waited.do("UPDATE frame SET str_state = 'DEAD' WHERE pk_frame = ANY(:ids)", ids=list(many.frames[30:]))
    status, written = on_terminal(cli, 80, 12, "job", "wait", "m")
    assert status == 1
    assert "l30" in written
    assert "l05" not in written
    assert "l39" in written


def interrupted(_seconds: float) -> None:
    raise KeyboardInterrupt


def test_a_job_is_submitted_and_waited_for(cli: Cli, waited: Waited, looks: list[float], build: Build) -> None:
    assert cli("submit", "-", "--wait", "--dry-run", given=JOB_FILE).status == 2
    succeed = "UPDATE frame SET str_state = 'SUCCEEDED' WHERE str_state = 'WAITING'"
    change = meanwhile(looks, lambda: waited.do(succeed))
    ran = cli("submit", "-", "--wait", "--json", given=JOB_FILE)
    change.join()
    assert ran.json["submitted"], ran.err
    assert (ran.status, ran.json["ended"]["outcome"]) == (0, "succeeded")
    with pytest.MonkeyPatch.context() as patch:
        # when Ctrl-C ends the waiting, then the job is named all the same
        patch.setattr(job_wait.time, "sleep", interrupted)
        ran = cli("submit", "-", "--wait", "--json", given=JOB_FILE.replace("waited", "left"))
    assert (ran.status, ran.out) == (130, "")
    assert re.search(r"\bshow-sh010-artist_left\b.*\n.* [0-9a-f-]{36}\n", ran.err), "its name and its id"
    change = meanwhile(looks, lambda: waited.do("UPDATE frame SET str_state = 'DEAD' WHERE str_state = 'WAITING'"))
    ran = cli("submit", "-", "--wait", given=JOB_FILE.replace("waited", "again"))
    change.join()
    assert ran.status == 1
    assert "2 dead" in ran.out.splitlines()[-1]


@pytest.mark.parametrize("columns", [80, 120, 200])
def test_a_list_of_jobs_is_watched(
    cli: Cli, waited: Waited, build: Build, columns: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in range(12):
        build(lambda farm, number=number: farm.job(name=f"watched{number}", show=waited.job.show, priority=number))
    shown: list[float] = []

    def change(seconds: float) -> None:
        if shown:
            raise KeyboardInterrupt
        shown.append(seconds)
        waited.do("UPDATE job SET b_paused = true WHERE str_name = 'watched11'")

    monkeypatch.setattr("opencue_sched.cli.output.time.sleep", change)
    words = ("job", "list", "--watch", "--name", "watched")
    status, written = on_terminal(cli, columns, 12, *words)
    assert status == 130
    first, second = written.split("every 2 s")[1:]
    assert "watched11" in first
    assert ("PAUSED" in first, "PAUSED" in second) == (False, True)
    assert "watched5" in second
    assert "watched1 " not in second  # no more than the terminal has lines
    assert written.index("\x1b[?1049h") < written.index("\x1b[?1049l")


def test_a_watched_list_needs_a_terminal(cli: Cli, waited: Waited) -> None:
    assert cli("job", "list", "--watch").status == 2
    assert cli("job", "list", "--watch", "--json").status == 2
