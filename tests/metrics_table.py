"""The tables of docs/metrics.md, as the code declares the metrics. ``python -m tests.metrics_table`` writes them."""

from __future__ import annotations

import re
from pathlib import Path

from prometheus_client.metrics import MetricWrapperBase

from opencue_sched.worker import fleet_metrics, metrics

PATH = Path(__file__).resolve().parents[1] / "docs" / "metrics.md"
HEAD = "| metric | kind | what it says |\n|---|---|---|\n"
_TABLE = re.compile(rf"(?<=\n){re.escape(HEAD)}(?:\|.*\n)*")


def _row(family: MetricWrapperBase) -> str:
    name = family._name + ("_total" if family._type == "counter" else "")
    labels = f"{{{','.join(family._labelnames)}}}" if family._labelnames else ""
    return f"| `{name}{labels}` | {family._type} | {family._documentation} |\n"


def tables() -> list[str]:
    """Of the farm, of the fleet, of every beat, and of workers, in the order in which they are declared."""
    declared = [
        *fleet_metrics.OF_USE.values(),
        *(it for module in (fleet_metrics, metrics) for it in vars(module).values()),
    ]
    families = list(dict.fromkeys(it for it in declared if isinstance(it, MetricWrapperBase)))
    of_farm = set(fleet_metrics.OF_USE.values())
    of_leader = {it for figures in fleet_metrics.LEADING for it in _registered(figures.registry)} - of_farm
    of_beats = set(_registered(fleet_metrics.BEAT)) - of_leader - of_farm
    groups: list[list[MetricWrapperBase]] = [[], [], [], []]
    for it in families:
        groups[0 if it in of_farm else 1 if it in of_leader else 2 if it in of_beats else 3].append(it)
    return [HEAD + "".join(map(_row, group)) for group in groups]


def _registered(registry: object) -> list[MetricWrapperBase]:
    collectors = registry._collector_to_names  # type: ignore[attr-defined]
    return [it for it in collectors if isinstance(it, MetricWrapperBase)]


def with_tables(document: str) -> str:
    """The document with its tables as they have to be."""
    wanted = iter(tables())
    return _TABLE.sub(lambda _: next(wanted), document)


if __name__ == "__main__":
    PATH.write_text(with_tables(PATH.read_text()))
