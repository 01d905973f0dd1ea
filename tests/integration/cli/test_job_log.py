"""`opencue-sched job log`, the paths in `job frames`, and what `explain` says of dead frames."""

from __future__ import annotations

import os
import pty
import re
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import Engine, text
from sqlalchemy.exc import OperationalError

from opencue_sched.embedded.farms.farm import Farm
from opencue_sched.embedded.farms.farm_specs import HostIds, JobIds, LayerSpec
from opencue_sched.store import jobs
from tests.kit.command import Cli
from tests.kit.polling import eventually
from tests.kit.statements import listening, naming
from tests.kit.wording import lacks

Build = Callable[[Callable[[Farm], Any]], Any]

NAME = "show-sh010-artist_comp"
HEADER = "=====\nRenderQ JobSpec\nenv                  HOME=/\nenv                  zframe=0003-render\n=====\n"
FOOTER = "\n=====\nRenderQ Job Complete\n\nexitStatus          1\nexitSignal          11\nmaxrss 5\n=====\n"
FOOTER_OF_RUST = (
    "\n=====\nRender Frame Completed\nexitStatus          1\nexitSignal          9\n"
    "killMessage         too much memory\n=====\n"
)
"""What RQD of Python and of Rust write around the output of a frame."""


@dataclass(frozen=True)
class Logged:
    """A job of layers render (4 frames, the first runs on render01) and comp (2); nothing has a log yet."""

    job: JobIds
    host: HostIds
    directory: Path
    engine: Engine

    def path(self, frame: str) -> Path:
        return self.directory / f"{NAME}.{frame}.rqlog"

    def write(self, frame: str, content: str, mode: str = "w") -> None:
        with self.path(frame).open(mode, encoding="utf-8") as log:
            log.write(content)

    def set(self, number: int, state: str, status: int, host: str | None = "render01") -> None:
        with self.engine.begin() as connection:
            connection.execute(
                text(
                    "UPDATE frame SET str_state = :state, int_exit_status = :status, str_host = :host,"
                    " ts_stopped = now(), int_version = int_version + 1 WHERE pk_frame = :frame"
                ),
                {"state": state, "status": status, "frame": self.job.frames[number], "host": host},
            )


@pytest.fixture
def logged(build: Build, engine: Engine, tmp_path: Path) -> Logged:
    def make(farm: Farm) -> Logged:
        host = farm.host(name="render01", cores=8, memory_gb=16)
        layers = [LayerSpec(name="render", frames=4), LayerSpec(name="comp", frames=2)]
        job = farm.job(layers, name=NAME, log_dir=str(tmp_path))
        farm.run(job.frames[:1], host)
        return Logged(job, host, tmp_path, engine)

    made: Logged = build(make)
    return made


def test_a_log_is_shown_whole_or_its_last_lines(cli: Cli, logged: Logged) -> None:
    logged.write("0001-render", "one\ntwo\nthree\n")
    assert cli("job", "log", NAME, "0001-render").out == "one\ntwo\nthree\n"
    assert cli("job", "log", NAME, "1", "--layer", "render", "--tail", "2").out == "two\nthree\n"
    assert cli("job", "log", NAME, logged.job.frames[0], "--tail", "0").out == ""
    assert cli("job", "log", NAME, "0001-render", "--tail", "99").out == "one\ntwo\nthree\n"


@pytest.mark.parametrize("footer", [FOOTER, FOOTER_OF_RUST])
def test_the_last_lines_are_the_frames_and_not_of_rqds_account(cli: Cli, logged: Logged, footer: str) -> None:
    # given the log of a dead frame, which ends with how RQD saw its run
    logged.write("0002-render", HEADER + "loading ö\nno texture wood.tx" + footer)
    logged.set(1, "DEAD", 1)
    # when its last lines are asked for, then they are what the frame wrote
    told = cli("job", "log", NAME, "0002-render", "--tail", "2")
    assert told.out == "loading ö\nno texture wood.tx\n"
    assert cli("job", "log", NAME, "0002-render", "--tail", "1", "-f").out == "no texture wood.tx\n"
    # and also where more are asked for than it wrote
    assert cli("job", "log", NAME, "0002-render", "--tail", "20").out == "loading ö\nno texture wood.tx\n"
    # and the whole log has all
    assert cli("job", "log", NAME, "0002-render").out.endswith(footer)


def test_the_last_lines_of_a_log_of_many_blocks_are_exact(cli: Cli, logged: Logged) -> None:
    lines = [f"line {number} {'x' * (number % 700)}" for number in range(2000)]
    logged.write("0001-render", "\n".join(lines))
    for asked in (1, 2, 150, 1999, 2000):
        assert cli("job", "log", NAME, "0001-render", "--tail", str(asked)).out.splitlines() == lines[-asked:]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("1",), "--layer"),
        (("77",), "'77'"),
        (("0001-rendr",), "'0001-rendr'"),
        (("1", "--layer", "rendr"), "'render'"),
    ],
)
def test_a_frame_that_is_not_one_is_refused(cli: Cli, logged: Logged, words: tuple[str, ...], said: str) -> None:
    ran = cli("job", "log", NAME, *words)
    assert (ran.status, ran.out) == (1, "")
    assert said in ran.err


def test_of_a_log_that_is_not_visible_the_path_and_the_host_are_told(cli: Cli, logged: Logged) -> None:
    ran = cli("job", "log", NAME, "0001-render")
    assert (ran.status, ran.out) == (3, "")
    assert str(logged.path("0001-render")) in ran.err
    assert "render01" in ran.err
    # A directory of the log's name is no log, and a pipe is not waited for.
    logged.path("0001-render").mkdir()
    os.mkfifo(logged.path("0002-render"))
    assert [cli("job", "log", NAME, f"000{number}-render").status for number in (1, 2)] == [3, 3]


def test_of_a_frame_that_has_not_run_no_log_is_looked_for_elsewhere(cli: Cli, logged: Logged) -> None:
    ran = cli("job", "log", NAME, "0002-render")
    assert (ran.status, ran.out) == (3, "")
    assert not lacks(ran.err, "0002-render has not run yet", "-f", str(logged.path("0002-render")))
    assert "visible" not in ran.err


def test_frames_tell_their_logs(cli: Cli, logged: Logged) -> None:
    frames = cli("job", "frames", NAME, "--json").json
    assert frames[0]["log"] == str(logged.path("0001-render"))


@pytest.mark.parametrize(("state", "status", "ends"), [("SUCCEEDED", 0, 0), ("DEAD", 139, 1)])
def test_a_log_is_followed_until_the_frame_ends(cli: Cli, logged: Logged, state: str, status: int, ends: int) -> None:
    """RQD writes on while it is followed, the log of the run before was moved away, and PostgreSQL fails once."""
    logged.write("0001-render", "one\n")
    looked: list[str] = []

    def render() -> None:
        eventually(lambda: len(looked) > 3)  # what was there is copied
        logged.write("0001-render", "two\n", "a")
        logged.path("0001-render").rename(logged.directory / "moved")
        logged.write("0001-render", "three\n")
        logged.set(0, state, status)

    def look() -> None:
        looked.append("look")
        if len(looked) == 4:
            raise OperationalError("SELECT", {}, Exception("server closed the connection"))

    writer = threading.Thread(target=render)
    with listening(Engine, "before_cursor_execute", naming(logged.job.id, look)):
        writer.start()
        ran = cli("job", "log", NAME, "0001-render", "-f")
        writer.join()
    assert ran.status == ends
    assert ran.out.startswith("one\n")
    assert ran.out.endswith("three\n")
    assert not lacks(ran.err, "0001-render", state)
    assert ran.err.count("note: ") == 1
    assert ("SIGSEGV" in ran.err) == (status == 139)


def test_a_terminal_gets_no_controls_and_a_pipe_gets_all(
    cli: Cli, logged: Logged, monkeypatch: pytest.MonkeyPatch
) -> None:
    written = "\x1b[31mred\x1b[0m \x1b]0;owned\x07 10%\r20%\r\n\u202eturned\x9b2J\n"
    logged.write("0001-render", written)
    with logged.path("0001-render").open("w", encoding="utf-8", newline="") as log:
        log.write(written)
    assert cli("job", "log", NAME, "0001-render").out.encode() == written.encode()
    ours, theirs = pty.openpty()
    with os.fdopen(theirs, "w", encoding="utf-8") as terminal:
        monkeypatch.setattr("sys.stdout", terminal)
        cli("job", "log", NAME, "0001-render")
        monkeypatch.undo()
    shown = os.read(ours, 4096).decode()
    os.close(ours)
    assert shown.replace("\r\n", "\n") == "red ^[]0;owned^G 10%\n20%\n\ufffdturned\ufffd2J\n"


def test_explain_tells_what_dead_frames_died_of_and_the_end_of_the_log(cli: Cli, logged: Logged) -> None:
    logged.write("0002-render", "loading\n\x1b[2Jno texture wood.tx\n" + FOOTER)
    logged.write("0003-render", HEADER + "rendering\n=====\n" + FOOTER_OF_RUST)
    logged.set(1, "DEAD", 139)
    logged.set(2, "DEAD", 1)
    logged.set(4, "DEAD", 299, None)
    logged.set(5, "DEAD", 299)
    ran = cli("explain", NAME)
    assert not lacks(ran.out, "0002-render", "render01", "139", "SIGSEGV")
    assert "    | no texture wood.tx\n" in ran.out.replace("^[[2J", "")
    assert "\x1b" not in ran.out
    assert "RenderQ" not in ran.out
    assert re.search(r"0003-render.rqlog\n    \| rendering\n    \| =====\n(?!    \|)", ran.out)
    assert not lacks(ran.out, "exit status 1", "SIGKILL")
    assert not lacks(ran.out, "2 frames", "0002-comp", "299", str(logged.path("0002-comp")))
    layers = cli("explain", NAME, "--json").json["layers"]
    assert [death["exit_status"] for layer in layers for death in layer["deaths"]] == [1, 139, 299]
    assert layers[1]["deaths"][0]["lines"] is None


def test_explain_follows_no_link_that_somebody_made_in_place_of_a_log(cli: Cli, logged: Logged, tmp_path: Path) -> None:
    # The page shows these lines to others, and reads with Flower's rights.
    (tmp_path / "secret").write_text("password\n")
    logged.path("0002-render").symlink_to(tmp_path / "secret")
    logged.set(1, "DEAD", 3)
    (death,) = cli("explain", NAME, "--json").json["layers"][0]["deaths"]
    assert death["lines"] is None
    assert cli("job", "log", NAME, "0002-render").out == "password\n", "with one's own rights"


def test_dead_frames_are_read_by_what_they_died_of_however_many_they_are(engine: Engine, logged: Logged) -> None:
    for number in range(4):
        logged.set(number, "DEAD", 3)
    logged.set(4, "DEAD", 3)
    with engine.connect() as connection:
        found = jobs.dead_frames(connection, logged.job.id)
    assert [(row.frames, row.name, row.exit_status) for row in found] == [(4, "0004-render", 3), (1, "0001-comp", 3)]


def test_explain_reads_a_bounded_end_of_a_huge_log(cli: Cli, logged: Logged) -> None:
    logged.write("0002-render", "x" * 10_000_000 + "\n" + "the end\n")
    logged.set(1, "DEAD", 3)
    with_lines = cli("explain", NAME, "--json").json["layers"][0]["deaths"][0]
    assert with_lines["lines"][-1] == "the end"
    assert len("".join(with_lines["lines"])) < 40_000
    assert max(map(len, cli("explain", NAME).out.splitlines())) < 1000
