"""``opencue-sched demo`` as a stranger runs it: real RQDs, a real job, a picture, and nothing left behind."""

from __future__ import annotations

import json
import os
import pty
import re
import signal
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import pytest

from opencue_sched.embedded.demo.pictures import read_png
from tests.kit.left_behind import MARKER, nothing_is_left

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "minimal.json"
DEMO = [sys.executable, "-c", "from opencue_sched.cli import main; main()", "demo"]


@pytest.fixture
def environment() -> dict[str, str]:
    inherited = {key: value for key, value in os.environ.items() if not key.startswith("OPENCUE_SCHED_")}
    return {**inherited, MARKER: f"marker-{os.getpid()}-{time.monotonic_ns()}"}


@pytest.mark.long(50)
def test_ctrl_c_stops_everything_it_started(tmp_path, environment):
    # given a demo on a terminal, which shows each second how far the job is; lines come every ten seconds, in which a
    # processor renders most of the frames
    screen, terminal = pty.openpty()
    demo = subprocess.Popen(
        [*DEMO, "--frames", "40", "--hosts", "1", "--workers", "1"],
        env={**environment, "TERM": "xterm", "COLUMNS": "200"},
        cwd=tmp_path,
        stdout=terminal,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )
    os.close(terminal)
    try:
        # when it is told to stop while frames run
        shown_until(screen, r"render +[━╸╺]+ +\d+/40 done +[1-9]\d* running")
        os.kill(demo.pid, signal.SIGINT)
        # then it does
        shown_until(screen, None)
        assert demo.wait(timeout=60) == 130
    finally:
        os.close(screen)
        demo.kill()
        demo.wait()
    nothing_is_left(environment[MARKER])


@pytest.mark.long(60)
def test_the_demo_renders_a_picture_and_leaves_nothing_behind_when_a_kept_farm_is_no_longer_wanted(
    tmp_path, environment
):
    # given a demo on a terminal
    screen, terminal = pty.openpty()
    demo = subprocess.Popen(
        [*DEMO, "--frames", "4", "--hosts", "2", "--workers", "1", "--output", "out", "--keep"],
        env={**environment, "TERM": "xterm", "COLUMNS": "200"},
        cwd=tmp_path,
        stdout=terminal,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )
    os.close(terminal)
    try:
        shown = shown_until(screen, "Ctrl-C")
        # then it was told how far the job is, the books are right, and there is a picture
        assert re.search(r"render +━+ +4/4 done", shown)
        assert re.search(r"contact_sheet +━+ +1/1 done", shown)
        assert "5 of 5 frames" in shown
        for invariant in (
            "counters-match-ledger",
            "within-caps",
            "ledger-matches-procs",
            "running-frames-have-procs",
            "host-idle-matches-procs",
            "counters-open",
        ):
            assert re.search(rf"^ *ok +{invariant} ", shown, re.M)
        assert re.search(r" out/contact-sheet\.png\s*$", shown, re.M)
        assert read_png(tmp_path / "out" / "contact-sheet.png").width > 500
        assert len(list((tmp_path / "out" / "frames").glob("frame.*.png"))) == 4
        # and the farm answers by what is told of it
        addresses = re.findall(r" http://127\.0\.0\.1:(\d+)(\S*)", shown)
        assert len(addresses) > 2
        for port, path in addresses:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=10) as answer:
                assert answer.status == 200
        of_the_farm = {**environment, **dict(re.findall(r"export (OPENCUE_SCHED_\w+)='(.*)'", shown))}
        command = [*DEMO[:-1], "job", "list", "--state", "finished", "--json"]
        listed = subprocess.run(command, env=of_the_farm, capture_output=True, check=True)
        assert [job["state"] for job in json.loads(listed.stdout)] == ["FINISHED"]
        # and what is submitted by it has its logs where those of the demo's own frames are
        command = [*DEMO[:-1], "submit", str(EXAMPLE), "--dry-run", "--json"]
        submitted = subprocess.run(command, env=of_the_farm, capture_output=True, check=True)
        root = Path(json.loads(submitted.stdout)["log_dir"]).parent
        assert [log.name for log in root.glob("*/*.0001-contact_sheet.rqlog")] == [
            "demo-sh010-demo_turntable.0001-contact_sheet.rqlog"
        ]
        # when it is told to stop, then it does, and all went well
        os.kill(demo.pid, signal.SIGINT)
        shown_until(screen, None)
        assert demo.wait(timeout=60) == 0
    finally:
        os.close(screen)
        demo.kill()
        demo.wait()
    nothing_is_left(environment[MARKER])


def shown_until(screen: int, end: str | None) -> str:
    """What a program writes to its terminal until that has ``end``, a pattern, or until it ends; without colours and
    movements."""
    written, shown = b"", ""
    while end is None or not re.search(end, shown):
        try:
            written += os.read(screen, 65536)
        except OSError:  # nobody has the terminal open any more
            assert end is None, shown
            break
        shown = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", written.decode(errors="replace"))
    return shown


def test_what_cannot_be_started_says_so_and_leaves_nothing_of_what_was(tmp_path, environment):
    # given a Redis that cannot be started, after PostgreSQL was
    environment["OPENCUE_SCHED_EMBEDDED_REDIS"] = "no-such-server"
    demo = subprocess.run(DEMO, env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False)
    assert demo.returncode == 1
    assert "no-such-server" in demo.stderr
    assert "Traceback" not in demo.stdout + demo.stderr
    nothing_is_left(environment[MARKER])
