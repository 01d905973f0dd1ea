"""What the metrics of our processes are called, which kind they are and which labels they have, as they are declared.

A metric with labels shows no sample before it is used, so one is shown for a moment.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from types import ModuleType

from prometheus_client.metrics import MetricWrapperBase

from opencue_sched.worker import fleet_metrics

_MOST_LABELS = 8


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
        labels = _labels_of(metric)
        found.append(Declared(metric, family.name, family.type, labels, family.documentation, family.name in of_beats))
    return found


def _labels_of(metric: MetricWrapperBase) -> tuple[str, ...]:
    for count in range(1, _MOST_LABELS + 1):
        values = [f"declared {number}" for number in range(count)]
        try:
            metric.labels(*values)
        except ValueError:  # it has no labels, or another number of them
            continue
        (family,) = metric.collect()
        metric.remove(*values)
        named = ({value: name for name, value in sample.labels.items()} for sample in family.samples)
        return next(tuple(names[value] for value in values) for names in named if names.keys() >= set(values))
    return ()
