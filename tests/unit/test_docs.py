"""The documents say what the code says."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from opencue_sched.operate.cli import cli
from opencue_sched.operate.settings_table import BEGIN, END, table

ROOT = Path(__file__).resolve().parents[2]
DOCUMENTS = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")), ROOT / "deploy" / "README.md"]


def test_the_settings_table_is_the_codes():
    guide = (ROOT / "docs" / "operator-guide.md").read_text()
    assert guide.partition(BEGIN)[2].partition(END)[0].strip() == table(), (
        "run: python -m opencue_sched.operate.settings_table docs/operator-guide.md"
    )


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_every_link_leads_somewhere(document):
    for target in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", document.read_text()):
        if not target.startswith("http"):
            assert (document.parent / target).exists(), f"{document.name}: {target}"


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_every_command_named_exists(document):
    text = document.read_text()
    code = "\n".join([*re.findall(r"```.*?```", text, re.S), *re.findall(r"`[^`\n]+`", text)])
    for name in re.findall(r"(?:^|`|\s)opencue-sched ([a-z][a-z-]+)", code):
        assert name in cli.list_commands(None), f"{document.name}: opencue-sched {name}"


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_every_make_target_named_exists(document):
    makefile = (ROOT / "Makefile").read_text()
    for name in re.findall(r"`make ([a-z-]+)", document.read_text()):
        assert re.search(rf"^{name}:", makefile, re.M), f"{document.name}: make {name}"
