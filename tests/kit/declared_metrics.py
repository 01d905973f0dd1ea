"""What the metrics of our processes are called, which kind they are and which labels they have, as they are declared.

A metric with labels shows no sample before it is used, and prometheus_client says its labels nowhere else.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from types import ModuleType

from prometheus_client.metrics import MetricWrapperBase

from opencue_sched.worker import fleet_metrics


@dataclass(frozen=True)
class Declared:
    """A metric. ``name`` is without the suffixes of its samples, ``by_beat`` whether only beats show it."""

    metric: MetricWrapperBase
    name: str
    kind: str
    labels: tuple[str, ...]
    text: str
    by_beat: bool

    @property
    def exposed_name(self) -> str:
        """The name that a counter's samples have."""
        return self.name + ("_total" if self.kind == "counter" else "")


def declared_metrics(*modules: ModuleType) -> list[Declared]:
    """The metrics of these modules, each once, in the order of their declaration."""
    values: Iterable[object] = (value for module in modules for value in vars(module).values())
    metrics = dict.fromkeys(value for value in values if isinstance(value, MetricWrapperBase))
    of_beats = {family.name for family in fleet_metrics.BEAT.collect()}
    found = []
    for metric in metrics:
        (family,) = metric.describe()
        labels = tuple(metric._labelnames)
        found.append(Declared(metric, family.name, family.type, labels, family.documentation, family.name in of_beats))
    return found
