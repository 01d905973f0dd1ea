"""What a fleet exports is what the dashboards and alerts ask for: each expression finds something in a real scrape."""

from __future__ import annotations

import json
import math
import re
import urllib.request
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample
from sqlalchemy import text

from opencue_sched.embedded.farms.farm import Farm
from opencue_sched.embedded.farms.farm_specs import LayerSpec
from opencue_sched.embedded.rqds.simulated_host import Behaviour
from opencue_sched.embedded.servers.processes import free_port
from opencue_sched.worker import fleet_metrics
from tests.kit.failed_runs import failed_on
from tests.kit.promql import (
    DASHBOARDS,
    alerts,
    named_metrics,
    panel_expressions,
    promtool,
    unknown_labels,
    variables,
    with_all_chosen,
)

from .fleets import FleetOnTest, fleet_on

SUFFIXES = {"counter": ("_total",), "histogram": ("_bucket", "_sum", "_count"), "gauge": ("",)}


class Scrape:
    """The samples that processes exported at one moment, by name, and every name they may export."""

    def __init__(self, answers: dict[str, str]) -> None:
        self.samples: defaultdict[str, list[tuple[str, Sample]]] = defaultdict(list)
        self.names: set[str] = set()
        for instance, answer in answers.items():
            for family in text_string_to_metric_families(answer):
                self.names |= {family.name + suffix for suffix in SUFFIXES.get(family.type, ("",))}
                for sample in family.samples:
                    self.samples[sample.name].append((instance, sample))

    @property
    def labels(self) -> dict[str, set[str]]:
        """Labels by the names of the metrics that have samples."""
        return {name: {key for _, it in found for key in it.labels} for name, found in self.samples.items()}

    def series(self, names: set[str]) -> Iterator[dict[str, str]]:
        """The samples of these names as promtool takes them; counters grow by one every 15 seconds."""
        for name in sorted(names):
            for instance, sample in self.samples[name]:
                labels = {"job": "opencue-sched", "instance": instance, **sample.labels}
                told = ",".join(f"{key}={json.dumps(value)}" for key, value in labels.items())
                value = "0" if math.isnan(sample.value) else f"{sample.value:.6f}"
                grows = name.endswith(("_total", "_bucket", "_sum", "_count"))
                yield {"series": f"{name}{{{told}}}", "values": f"{value}+{int(grows)}x40"}


def scraped(fleet: FleetOnTest, name: str) -> str:
    """/metrics of the process of this name, where it says in its log that it serves them."""
    for line in fleet.fleet.log(name).read_text().splitlines():
        if '"metrics_served"' in line:
            with urllib.request.urlopen(json.loads(line)["address"], timeout=10) as answer:  # noqa: S310
                return str(answer.read().decode())
    return ""


@pytest.fixture
def scrape(settings, engine, redis_client, tmp_path: Path) -> Scrape:
    """A worker and two beats, when frames run, others wait, and caps of all kinds are there."""
    with engine.begin() as connection:
        farm = Farm(connection)
        show = farm.default_show()
        folder = farm.folder(show.id, "shots", max_cores=100, max_gpus=2)
        licence = farm.limit("licence", 5)
        farm.job([LayerSpec(frames=4, limits=[licence])], show=show, folder_id=folder, os=None)
        farm.job([LayerSpec(frames=3, cores=64)], show=show, os=None)
        connection.execute(text("UPDATE limit_record SET ts_reported = now()"))
        failed_on(farm, "render07", [farm.job(os=None, paused=True) for _ in range(3)])
    environment = {"OPENCUE_SCHED_QUEUE__METRICS_PORT": str(free_port())}
    still_running = Behaviour(run_seconds=(300, 300))
    with fleet_on(
        settings, engine, redis_client, tmp_path, hosts=2, behaviour=still_running, environment=environment
    ) as fleet:

        def shown() -> dict[str, str]:
            found = {name: scraped(fleet, name) for name in ("worker1", "beat")}
            booked = 'scheduler_frames_dispatched_total{show_name="show"}' in found["worker1"]
            return found if booked and "scheduler_subscription_share{" in found["beat"] else {}

        found = fleet.wait_for("bookings, and a beat that looked at the farm since", shown)
        fleet.fleet.beat("standby")
        return Scrape({**found, "standby": fleet.wait_for("a second beat", lambda: scraped(fleet, "standby"))})


def test_a_real_scrape_has_what_dashboards_and_alerts_ask_for(scrape: Scrape, tmp_path: Path):
    panels = [expression for path in DASHBOARDS for expression in panel_expressions(path)]
    values = [each["query"]["query"] for path in DASHBOARDS for each in variables(path).values()]
    # then each metric is exported, and has the labels by which it is chosen, grouped and joined
    for expression in (*panels, *values, *alerts().values()):
        assert named_metrics(expression) <= scrape.names, expression
        if all(scrape.samples[name] for name in named_metrics(expression)):
            assert not unknown_labels(expression, scrape.labels), expression
    # and Prometheus finds something for each panel, but for what counts events that did not happen
    exported = [it for it in panels if all(scrape.samples[name] for name in named_metrics(it))]
    assert len(exported) > 0.8 * len(panels)
    something = {"eval_time": "9m", "exp_samples": [{"labels": "{}", "value": 1}]}
    asked = [{"expr": f"count({with_all_chosen(it)}) > bool 0", **something} for it in exported]
    series = list(scrape.series(set[str]().union(*map(named_metrics, panels))))
    test = {"interval": "15s", "input_series": series, "promql_expr_test": asked}
    (tmp_path / "panels.yaml").write_text(yaml.safe_dump({"tests": [test]}))
    promtool("test", "rules", tmp_path / "panels.yaml")
    # and what a beat sees of the farm comes from the one that leads
    exporters = {name: {instance for instance, _ in found} for name, found in scrape.samples.items() if found}
    kinds = "scheduler_(farm|show|subscription|folder|limit|draining|breaking)_"
    of_use = [name for name in exporters if re.match(kinds, name)]
    assert len(of_use) == len(fleet_metrics.OF_USE.gauges)
    assert [name for name in of_use if exporters[name] != {"beat"}] == []
    assert exporters["scheduler_leader_fence"] == {"beat", "standby"}
