"""requirements.lock serves any machine and satisfies what pyproject.toml asks for."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

from packaging.requirements import Requirement

ROOT = Path(__file__).resolve().parents[2]
LOCK = (ROOT / "requirements.lock").read_text(encoding="utf-8")
PINNED = dict(re.findall(r"^([a-z0-9-]+)==(\S+) \\$", LOCK, re.MULTILINE))


def test_the_lock_names_no_index_and_no_place_of_a_machine() -> None:
    assert len(PINNED) > 40
    unexpected = [
        line
        for line in LOCK.splitlines()
        if not re.fullmatch(r"[a-z0-9-]+==\S+ \\|    --hash=sha256:[0-9a-f]{64}( \\)?", line)
        and not line.startswith("# The following packages are considered to be unsafe")
        and line
    ]
    assert not unexpected


def test_every_pin_satisfies_the_project() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = project["optional-dependencies"]
    wanted = [
        Requirement(text) for text in (*project["dependencies"], *(text for extra in extras.values() for text in extra))
    ]
    wrong = [
        str(one)
        for one in wanted
        if PINNED.get(one.name.lower()) is None or PINNED[one.name.lower()] not in one.specifier
    ]
    assert not wrong, f"make lock, these are not satisfied: {wrong}"


def test_demo_and_dev_have_all_that_embedded_has() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["optional-dependencies"]
    assert set(extras["embedded"]) <= set(extras["demo"])
    assert set(extras["embedded"]) <= set(extras["dev"])
