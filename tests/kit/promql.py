"""What the dashboards and alerts of deploy/ ask Prometheus, and which metrics and labels that names."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

DEPLOY = Path(__file__).resolve().parents[2] / "deploy"
DASHBOARDS = sorted((DEPLOY / "grafana" / "dashboards").glob("*.json"))
OF_PROMETHEUS = {"le", "instance", "job"}
"""Labels that no process exports, or only as part of a histogram."""
_VARIABLE = re.compile(r"\$\{?(\w+)\}?")


def dashboard(path: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(path.read_text())
    return found


def panel_expressions(path: Path) -> list[str]:
    """What the panels of a dashboard ask, as they stand there."""
    return [target["expr"] for panel in dashboard(path)["panels"] for target in panel.get("targets", ())]


def variables(path: Path) -> dict[str, dict[str, Any]]:
    """The variables of a dashboard by name."""
    return {each["name"]: each for each in dashboard(path).get("templating", {}).get("list", ())}


def with_all_chosen(expression: str) -> str:
    """The expression as Grafana sends it while every variable is at "All"."""
    return _VARIABLE.sub(".*", expression)


def alerts() -> dict[str, str]:
    rules = yaml.safe_load((DEPLOY / "prometheus" / "rules.yaml").read_text())
    return {rule["alert"]: rule["expr"] for group in rules["groups"] for rule in group["rules"]}


def named_metrics(text: str) -> set[str]:
    return set(re.findall(r"\b((?:scheduler|cuebot)_[a-z_]+)\b", text))


def unknown_labels(expression: str, labels: Mapping[str, Iterable[str]]) -> set[str]:
    """Labels an expression selects, groups or joins by that none of its metrics has, by the ``labels`` of each."""
    has = OF_PROMETHEUS.union(*(labels[name] for name in named_metrics(expression) if name in labels))
    return set(_labels(expression)) - has


def _labels(expression: str) -> Iterator[str]:
    for group in re.findall(r"\b(?:by|on|without|ignoring|group_left|group_right) ?\(([^)]*)\)", expression):
        yield from (label.strip() for label in group.split(",") if label.strip())
    for selection in re.findall(r"\{([^}]*)\}", expression):
        yield from re.findall(r"(\w+)\s*(?:=|!)", re.sub(r'"[^"]*"', '""', selection))


def promtool(*arguments: str | Path, cwd: Path | None = None) -> None:
    """Run Prometheus' own tool, which Debian's package prometheus has."""
    program = shutil.which("promtool")
    if program is None and not os.environ.get("CI"):
        pytest.skip("promtool is not installed: apt-get install prometheus")
    assert program is not None, "CI needs promtool: apt-get install prometheus"
    ran = subprocess.run([program, *arguments], cwd=cwd, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stdout + ran.stderr
