"""The example that reports who holds an RLM server's licences: what it makes of recorded output, and of failures."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from io import BytesIO
from pathlib import Path

import pytest

from opencue_sched.reports.limit_reports import Holder, read_holders
from tests.kit.wording import lacks

ROOT = Path(__file__).resolve().parents[3]
SCRIPT = ROOT / "examples" / "licences" / "report_rlm_holders.py"
RECORDED = (Path(__file__).parent / "rlmstat.txt").read_text()
LIMITS = ("nuke=nuke_r,nuke_i", "katana=katana_r")

Run = Callable[..., "Reported"]


class Reported:
    """How the script ended, and the reports that it made: words of each command and what that read."""

    def __init__(self, status: int, err: str, folder: Path) -> None:
        self.status, self.err = status, err
        self.calls = [json.loads(call) for call in (folder / "calls").read_text().splitlines()]


@pytest.fixture
def run(tmp_path: Path) -> Run:
    """Runs the script with an rlmutil that prints ``said`` and ends with ``status``, and an opencue-sched that notes
    what it is told."""

    def program(name: str, body: str) -> None:
        (tmp_path / name).write_text(f"#!{sys.executable}\nimport json, sys\n{body}")
        (tmp_path / name).chmod(0o755)

    def start(said: str, *limits: str, status: int = 0, takes: int = 0) -> Reported:
        (tmp_path / "said").write_text(said)
        (tmp_path / "calls").write_text("")
        program("rlmutil", f"print(open({str(tmp_path / 'said')!r}).read())\nsys.exit({status})")
        note = f"open({str(tmp_path / 'calls')!r}, 'a').write(json.dumps([sys.argv[1:], sys.stdin.read()]) + chr(10))"
        program("opencue-sched", f"{note}\nsys.exit({takes})")
        environment = {**os.environ, "PATH": str(tmp_path)}
        command = [sys.executable, str(SCRIPT), "--server", "5053@lic01", *limits]
        ended = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)
        return Reported(ended.returncode, ended.stderr, tmp_path)

    return start


def test_recorded_output_becomes_a_report_of_every_limit(run: Run) -> None:
    # given what a server printed, when it is reported
    reported = run(RECORDED, *LIMITS)
    # then the limit that somebody holds has its holders, one for a machine, and the other one has nobody
    (words, lines), (nobody, _) = reported.calls
    assert (reported.status, words[:2], words[-2:]) == (0, ["limit", "report"], ["--source", "rlm 5053@lic01"])
    assert nobody[:4] == ["limit", "report", "katana", "--nobody"]
    assert read_holders(BytesIO(lines.encode()), None) == {
        "nuke": [
            Holder("r001", 2, "render"),
            Holder("r002", 1, "render"),
            Holder("WS018", 1, "bob smith"),
            Holder("ws017.farm.example", 1, "alice"),
        ]
    }
    # and both are of one moment
    assert words[words.index("--asked-at") + 1] == nobody[nobody.index("--asked-at") + 1]


@pytest.mark.parametrize(
    ("said", "limits", "why"),
    [
        ("", LIMITS, ["katana_r"]),
        ("Error connecting to rlm server on lic01 (port 5053)\n", LIMITS, ["katana_r"]),
        (RECORDED, ("mari=mari_r",), ["mari_r"]),
        (RECORDED.partition("foundry license pool")[0], LIMITS, ["katana_r"]),
        (
            RECORDED.partition("foundry license usage")[0],
            LIMITS,
            ["nuke_i", " 0"],
        ),
        (RECORDED.replace("render@r002 1/0", "render@r002 ?"), LIMITS, ["nuke_r", "3"]),
        (
            RECORDED.replace("inuse: 0", "inuse: 4"),
            LIMITS,
            ["katana_r", "4", " 0"],
        ),
    ],
    ids=["nothing", "away", "product", "vendor", "cut off", "unreadable", "sums"],
)
def test_output_that_does_not_add_up_reports_nothing(
    run: Run, said: str, limits: tuple[str, ...], why: list[str]
) -> None:
    reported = run(said, *limits)
    assert (reported.status, reported.calls) == (1, [])
    assert not lacks(reported.err, *why)


def test_a_failure_of_rlmutil_reports_nothing(run: Run) -> None:
    reported = run(RECORDED, *LIMITS, status=3)
    assert (reported.status, reported.calls) == (1, [])
    assert not lacks(reported.err, "rlmutil", " 3")


def test_a_report_that_is_refused_fails_the_script(run: Run) -> None:
    assert run(RECORDED, *LIMITS, takes=1).status == 1


def test_the_service_starts_the_script_more_often_than_the_settle_window() -> None:
    """And names programs that are there, and the settings of the other services."""
    folder = SCRIPT.parent
    service = (folder / "opencue-limit-report.service").read_text()
    assert f"/{SCRIPT.relative_to(ROOT)} --server " in service
    others = (ROOT / "deploy" / "systemd" / "opencue-sched-report-service.service").read_text()
    assert re.findall("^EnvironmentFile=.*", service, re.M) == re.findall("^EnvironmentFile=.*", others, re.M)
    assert "OnUnitActiveSec=1min" in (folder / "opencue-limit-report.timer").read_text()
    assert os.access(SCRIPT, os.X_OK)
