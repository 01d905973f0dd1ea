"""The tables of docs/metrics.md, as the code declares the metrics; ``-m tests.kit.metrics_table`` writes them."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from pathlib import Path

from opencue_sched.coordination import transport
from opencue_sched.worker import fleet_metrics, metrics
from opencue_sched.worker.fleet_metrics import RecentFigures
from tests.kit.declared_metrics import Declared, declared_metrics

PATH = Path(__file__).resolve().parents[2] / "docs" / "metrics.md"
HEAD = "| metric | kind | what it says |\n|---|---|---|\n"
_TABLE = re.compile(rf"(?<=\n){re.escape(HEAD)}(?:\|.*\n)*")


def _row(name: str, labels: Sequence[str], kind: str, text: str) -> str:
    named = f"{name}{{{','.join(labels)}}}" if labels else name
    return f"| `{named}` | {kind} | {text} |\n"


def _of_census(*collectors: RecentFigures) -> str:
    gauges = (gauge for figures in collectors for gauge in figures.gauges)
    return "".join(_row(f"scheduler_{name}", labels.split(), "gauge", text) for name, labels, text in gauges)


def _declared(metrics: Iterable[Declared]) -> str:
    return "".join(_row(metric.exposed_name, metric.labels, metric.kind, metric.text) for metric in metrics)


def tables() -> list[str]:
    """Of the farm, of the fleet, of every beat, and of workers, in the order in which they are declared."""
    found = declared_metrics(fleet_metrics, transport, metrics)
    of_beats = [metric for metric in found if metric.by_beat]
    of_workers = [metric for metric in found if not metric.by_beat]
    fleet = _of_census(fleet_metrics.OF_QUEUES, fleet_metrics.OF_WAITING)
    parts = (_of_census(fleet_metrics.OF_USE), fleet, _declared(of_beats), _declared(of_workers))
    return [HEAD + part for part in parts]


def with_tables(document: str) -> str:
    """The document with its tables as they have to be."""
    wanted = iter(tables())
    return _TABLE.sub(lambda _: next(wanted), document)


if __name__ == "__main__":
    PATH.write_text(with_tables(PATH.read_text()))
