"""Keys and queue names are built in one place only."""

from __future__ import annotations

import re
from pathlib import Path

from opencue_sched.coordination import keys

ROOT = Path(__file__).resolve().parents[3]
KEYS = ROOT / "opencue_sched" / "coordination" / "keys.py"
KEY = re.compile(
    r":q:(work|ctl|reply)|:meta:(actor|queue)|:inst:|:prio:|:leader:|:board:|:permit:|:verdicts|:shortages:|:waiting\b"
)
# A name that begins with a namespace, whatever follows.
NAMESPACED = re.compile(r"\{[^{}]*(?:namespace|\b_?ns)\}[:.]\S*?[\"']|(?:namespace|\b_?ns)\s*\+\s*f?[\"'][:.]")


def _found(pattern: re.Pattern[str]) -> set[str]:
    elsewhere = set()
    for path in [*ROOT.glob("opencue_sched/**/*.py"), *ROOT.glob("tasks/*.py"), ROOT / "celeryconfig.py"]:
        if path != KEYS:
            code = re.sub(r'"""(?s:.)*?"""|#.*', "", path.read_text(encoding="utf-8"))
            elsewhere |= {f"{path.relative_to(ROOT)}: {match[0]}" for match in pattern.finditer(code)}
    return elsewhere


def test_no_key_is_written_out_anywhere_else():
    assert _found(KEY) == set()


def test_nothing_is_put_behind_a_namespace_anywhere_else():
    assert _found(NAMESPACED) == set()


def test_no_key_is_written_out_in_a_script():
    scripts = sorted(ROOT.glob("lua/**/*.lua"))
    assert scripts
    for path in scripts:
        code = re.sub(r"--.*", "", path.read_text(encoding="utf-8"))
        assert not KEY.search(code), path.name


def test_the_names_of_verdicts_are_built_from_the_namespace():
    assert keys.verdicts("farm", "0f3a") == "farm:verdicts:0f3a"
    assert keys.shortages("farm", "0f3a") == "farm:shortages:0f3a"
    assert keys.waiting_frames("farm") == "farm:waiting"
