"""Q1: keys and queue names are built in one place only."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
KEY = re.compile(r":q:(work|ctl|reply)|:meta:(actor|queue)|:inst:|:prio:|:leader:|:board:|:permit:")


def test_no_key_is_written_out_anywhere_else():
    names = ROOT / "opencue_sched" / "coordination" / "names.py"
    elsewhere = []
    for path in [*ROOT.glob("opencue_sched/**/*.py"), *ROOT.glob("tasks/*.py"), ROOT / "celeryconfig.py"]:
        if path != names:
            code = re.sub(r'"""(?s:.)*?"""|#.*', "", path.read_text(encoding="utf-8"))
            elsewhere += [f"{path.relative_to(ROOT)}: {match[0]}" for match in KEY.finditer(code)]
    assert not elsewhere


def test_no_key_is_written_out_in_a_script():
    for path in ROOT.glob("lua/**/*.lua"):
        code = re.sub(r"--.*", "", path.read_text(encoding="utf-8"))
        assert not KEY.search(code), path.name
