"""The roles as deploy/k8s starts them: command, variables and probes, with ports and stores of a test's own."""

from __future__ import annotations

import urllib.error
import urllib.request
from dataclasses import dataclass
from pathlib import Path

import yaml

from opencue_sched.embedded.servers.processes import free_port
from tests.kit.metrics_ports import metrics_port

BASE = Path(__file__).resolve().parents[2] / "deploy" / "k8s" / "base"
NAMES = ("worker", "beat", "report-service", "flower")


@dataclass(frozen=True)
class Role:
    """``probes`` are the URLs that the manifest's probes ask."""

    name: str
    command: list[str]
    environment: dict[str, str]
    probes: list[str]

    def answers(self) -> bool:
        """Whether every probe is answered well."""
        return all(_status(url) == 200 for url in self.probes)


def migration() -> list[str]:
    """The command of the Job."""
    job = yaml.safe_load((BASE / "migrate.yaml").read_text(encoding="utf-8"))
    return list(job["spec"]["template"]["spec"]["containers"][0]["command"])


def role(name: str, stores: dict[str, str]) -> Role:
    """One of NAMES, with ``stores`` in place of the Secret, on free ports."""
    deployment = next(iter(yaml.safe_load_all((BASE / f"{name}.yaml").read_text(encoding="utf-8"))))
    (container,) = deployment["spec"]["template"]["spec"]["containers"]
    command = list(container["command"])
    if command[:2] == ["sh", "-c"]:
        command = command[2].partition("; exec ")[2].split()
    environment = {each["name"]: each.get("value", f"{name}-7d9f6b-x2x4z") for each in container.get("env", [])}
    port = free_port()
    if name == "flower":
        command = [f"--port={port}" if word.startswith("--port=") else word for word in command]
    else:
        above_the_first = metrics_port(command, {}) - metrics_port(["worker"], {})
        environment["OPENCUE_SCHED_QUEUE__METRICS_PORT"] = str(port - above_the_first)
        environment["OPENCUE_SCHED_RELEASE__PORT"] = str(free_port())
    asked = {container[probe]["httpGet"]["path"] for probe in ("startupProbe", "readinessProbe", "livenessProbe")}
    probes = [f"http://127.0.0.1:{port}{path}" for path in sorted(asked)]
    return Role(name, command, {**environment, **stores}, probes)


def _status(url: str) -> int:
    """Status of a GET; 0 while nobody listens."""
    try:
        with urllib.request.urlopen(url, timeout=5) as answer:  # noqa: S310 - ours
            return int(answer.status)
    except urllib.error.HTTPError as error:
        return error.code
    except OSError:
        return 0
