"""deploy/k8s: what the manifests say is what Kubernetes' schemas allow and what our processes do."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

from opencue_sched.settings import Settings
from tests.kit.metrics_ports import metrics_port
from tests.unit.deploy.test_deploy import check_command, known_labels, known_metrics, named_metrics, unknown_labels

DEPLOY = Path(__file__).resolve().parents[3] / "deploy"
K8S = DEPLOY / "k8s"
MANIFESTS = sorted(path for path in K8S.rglob("*.yaml") if path.name != "kustomization.yaml")
VERSIONS = ("1.29", "1.32", "1.35")
NO_SCHEMA = {"ScaledObject"}
"""Custom resources: Kubernetes publishes no schemas of these."""
FLOWER_PORT = 5555


def documents(*paths: Path) -> list[dict[str, Any]]:
    return [each for path in paths for each in yaml.safe_load_all(path.read_text(encoding="utf-8"))]


def of_kind(kind: str) -> dict[str, dict[str, Any]]:
    """The base's objects of one kind by name."""
    found = [each for each in documents(*sorted((K8S / "base").glob("*.yaml"))) if each["kind"] == kind]
    return {each["metadata"]["name"]: each for each in found}


PODS = {**of_kind("Deployment"), **of_kind("Job")}


def pod(name: str) -> dict[str, Any]:
    template: dict[str, Any] = PODS[name]["spec"]["template"]
    return template


def container(name: str) -> dict[str, Any]:
    (only,) = pod(name)["spec"]["containers"]
    return dict(only)


def environment(name: str) -> dict[str, str]:
    return {each["name"]: each.get("value", "") for each in container(name).get("env", [])}


def words(name: str) -> list[str]:
    """What a container runs, without the shell around it."""
    command: list[str] = container(name)["command"]
    return command[2].partition("; exec ")[2].split() if command[0] == "sh" else command


def ports_of(name: str) -> dict[str, int]:
    return {each["name"]: each["containerPort"] for each in container(name).get("ports", [])}


def selected(labels: dict[str, str]) -> set[str]:
    """The pods that a selector finds."""
    return {name for name in PODS if labels.items() <= pod(name)["metadata"]["labels"].items()}


@pytest.mark.parametrize("version", VERSIONS)
def test_every_manifest_is_what_kubernetes_schemas_allow(version: str) -> None:
    checked = [each for each in documents(*MANIFESTS) if each["kind"] not in NO_SCHEMA]
    assert len(checked) > 10
    for each in checked:
        kubernetes_validate.validate(each, version, strict=True)


def test_a_mistake_in_a_manifest_is_found() -> None:
    wrong = of_kind("Deployment")["opencue-sched-beat"]
    wrong["spec"]["template"]["spec"]["containers"][0]["prots"] = []
    with pytest.raises(kubernetes_validate.ValidationError, match="prots"):
        kubernetes_validate.validate(wrong, VERSIONS[0], strict=True)


def test_all_roles_are_there_and_start_commands_that_exist() -> None:
    compose = yaml.safe_load((DEPLOY / "compose" / "compose.yaml").read_text())["services"]
    roles = {name: each["command"] for name, each in compose.items() if each.get("image") == "opencue-sched"}
    assert {f"opencue-sched-{role}" for role in roles} == set(PODS)
    for role, command in roles.items():
        name = f"opencue-sched-{role}"
        check_command(container(name)["command"])
        assert words(name) == command
    assert [name for name in PODS if PODS[name]["kind"] == "Job"] == ["opencue-sched-migrate"]
    assert PODS["opencue-sched-beat"]["spec"]["replicas"] == 2


@pytest.mark.parametrize("name", PODS)
def test_a_pod_may_do_no_more_than_it_has_to(name: str) -> None:
    spec = pod(name)["spec"]
    # the user of the image, by number
    (user,) = re.findall(r"^USER (\d+):(\d+)$", (DEPLOY / "Dockerfile").read_text(), re.M)
    assert spec["securityContext"]["runAsNonRoot"] is True
    assert (str(spec["securityContext"]["runAsUser"]), str(spec["securityContext"]["runAsGroup"])) == user
    assert user[0] != "0"
    own = container(name)["securityContext"]
    assert own == {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }
    assert [each["mountPath"] for each in container(name)["volumeMounts"]] == ["/tmp"]  # noqa: S108 - its own
    assert spec["automountServiceAccountToken"] is False
    # our Services' variables would begin as our settings do, and Flower would read its own for its port
    assert spec["enableServiceLinks"] is False
    asked = container(name)["resources"]
    assert set(asked["requests"]) == {"cpu", "memory"}
    assert set(asked["limits"]) == {"memory"}


@pytest.mark.parametrize("name", PODS)
def test_no_role_is_the_first_process_of_its_container(name: str) -> None:
    """Such a process gets no signal for which it has no handler, as while it starts."""
    assert pod(name)["spec"].get("shareProcessNamespace") is True


@pytest.mark.parametrize("name", of_kind("Deployment"))
def test_probes_ask_where_the_process_answers(name: str) -> None:
    expected = {"metrics": metrics_port(words(name), environment(name))}
    paths = {"startupProbe": "/livez", "readinessProbe": "/readyz", "livenessProbe": "/livez"}
    if name.endswith("flower"):
        expected = {"http": FLOWER_PORT}
        paths = dict.fromkeys(paths, "/healthcheck")
        assert f"--port={FLOWER_PORT}" in words(name)
    elif name.endswith("report-service"):
        expected["reports"] = Settings().release.port
        assert environment(name)["OPENCUE_SCHED_RELEASE__HOST"] == "0.0.0.0"  # noqa: S104 - inside a pod
    assert ports_of(name) == expected
    for probe, path in paths.items():
        asked = container(name)[probe]["httpGet"]
        assert asked["path"] == path
        assert asked["port"] in {"metrics", "http"} & set(expected)
    if "metrics" in expected:
        assert environment(name)["OPENCUE_SCHED_QUEUE__METRICS_HOST"] == "0.0.0.0"  # noqa: S104 - inside a pod
        annotations = pod(name)["metadata"]["annotations"]
        assert annotations == {"prometheus.io/scrape": "true", "prometheus.io/port": str(expected["metrics"])}


def test_a_worker_is_given_the_time_that_it_takes_to_drain() -> None:
    grace = pod("opencue-sched-worker")["spec"]["terminationGracePeriodSeconds"]
    assert grace > Settings().coordination.drain_grace


def variables_of(*files: str) -> set[str]:
    """The variables that .env files of the example set."""
    lines = [line for file in files for line in (K8S / "example" / file).read_text().splitlines()]
    return {line.partition("=")[0] for line in lines if not line.startswith("#")}


def test_each_pod_gets_its_settings_from_what_the_example_makes_and_only_flower_its_password() -> None:
    for name in PODS:
        assert container(name)["envFrom"] == [
            {"configMapRef": {"name": "opencue-sched", "optional": True}},
            {"secretRef": {"name": "opencue-sched"}},
            *([{"secretRef": {"name": "opencue-sched-flower"}}] if name.endswith("flower") else []),
        ]
    example = yaml.safe_load((K8S / "example" / "kustomization.yaml").read_text())
    made = {each["name"]: variables_of(*each["envs"]) for each in example["secretGenerator"]}
    assert made == {
        "opencue-sched": {"OPENCUE_SCHED_DATABASE_URL", "OPENCUE_SCHED_REDIS_URL"},
        "opencue-sched-flower": {"FLOWER_BASIC_AUTH"},
    }
    assert [each["name"] for each in example["configMapGenerator"]] == ["opencue-sched"]


def test_services_lead_to_ports_of_pods_that_exist() -> None:
    services = of_kind("Service")
    assert set(services) == {"opencue-sched-report-service", "opencue-sched-flower"}
    for name, service in services.items():
        assert selected(service["spec"]["selector"]) == {name}
        for port in service["spec"]["ports"]:
            assert ports_of(name)[port["targetPort"]] == port["port"]


def test_one_pod_of_a_role_is_drained_at_a_time() -> None:
    budgets = of_kind("PodDisruptionBudget")
    several = {name for name, each in of_kind("Deployment").items() if each["spec"]["replicas"] > 1}
    assert set(budgets) == several
    for name, budget in budgets.items():
        assert selected(budget["spec"]["selector"]["matchLabels"]) == {name}
        assert budget["spec"]["maxUnavailable"] == 1


def test_every_port_is_open_to_somebody_and_to_nobody_else() -> None:
    policies = of_kind("NetworkPolicy").values()
    covered = set[str]()
    opened = set[tuple[str, str]]()
    for policy in policies:
        names = selected(policy["spec"]["podSelector"]["matchLabels"])
        covered |= names
        assert policy["spec"]["policyTypes"] == ["Ingress"]
        for rule in policy["spec"]["ingress"]:
            assert rule["from"], "nothing is open to all"
            opened |= {
                (name, each["port"]) for name in names for each in rule["ports"] if each["port"] in ports_of(name)
            }
    assert covered == set(PODS)
    assert opened == {(name, port) for name in PODS for port in ports_of(name)}


def test_the_autoscaler_scales_on_the_backlog_of_the_group_it_starts_workers_of() -> None:
    (scaler,) = documents(K8S / "keda" / "scaled-object.yaml")
    assert scaler["spec"]["scaleTargetRef"]["name"] in of_kind("Deployment")
    assert 2 <= scaler["spec"]["minReplicaCount"] < scaler["spec"]["maxReplicaCount"]
    (trigger,) = scaler["spec"]["triggers"]
    query = trigger["metadata"]["query"]
    assert named_metrics(query) == {"scheduler_backlog_per_worker"} <= known_metrics()
    assert not unknown_labels(query, known_labels())
    set_here = environment("opencue-sched-worker").keys()
    assert not {"OPENCUE_SCHED_COORDINATION__GROUP", "OPENCUE_SCHED_SCHEDULER__FACILITY"} & set_here
    assert re.findall(r'group="([^"]*)"', query) == [Settings().coordination.group]
    # Per worker already: KEDA's default type would divide it by their number.
    assert trigger["metricType"] == "Value"
    assert float(trigger["metadata"]["threshold"]) == Settings().queue.worker_threads


@pytest.mark.parametrize("directory", ["base", "keda", "example"])
def test_a_kustomization_names_files_that_exist_and_leaves_none_out(directory: str) -> None:
    kustomization = yaml.safe_load((K8S / directory / "kustomization.yaml").read_text())
    named = kustomization.get("resources", []) + kustomization.get("components", [])
    for path in named:
        assert (K8S / directory / path).exists(), path
    here = {path.name for path in (K8S / directory).glob("*.yaml")} - {"kustomization.yaml"}
    assert here <= set(named)


def flower_of(by_name: dict[tuple[str, str], dict[str, Any]]) -> dict[str, Any]:
    (only,) = by_name["Deployment", "opencue-sched-flower"]["spec"]["template"]["spec"]["containers"]
    return dict(only)


def test_the_example_is_built_from_the_base() -> None:
    """By kustomize itself, where kubectl is there."""
    kubectl = shutil.which("kubectl")
    if kubectl is None:
        pytest.skip("kubectl is not installed")
    ran = subprocess.run([kubectl, "kustomize", K8S / "example"], capture_output=True, text=True, check=True)
    built = list(yaml.safe_load_all(ran.stdout))
    for each in built:
        if each["kind"] not in NO_SCHEMA:
            kubernetes_validate.validate(each, VERSIONS[-1], strict=True)
        assert each["kind"] == "Namespace" or each["metadata"]["namespace"] == "render"
    by_name = {(each["kind"], each["metadata"]["name"]): each for each in built}
    assert {name for kind, name in by_name if kind in ("Deployment", "Job")} == set(PODS)
    for name in PODS:
        spec = by_name[PODS[name]["kind"], name]["spec"]["template"]["spec"]["containers"][0]
        assert spec["image"] == "registry.example.com/opencue-sched:0.1.0"
        assert ("Secret", spec["envFrom"][1]["secretRef"]["name"]) in by_name
    secrets = {each["secretRef"]["name"] for each in flower_of(by_name)["envFrom"][1:]}
    assert {("Secret", name) for name in secrets} < set(by_name)
    # commands typed in a worker's pod find the logs, and its names of hosts are the farm's
    worker = by_name["Deployment", "opencue-sched-worker"]["spec"]["template"]["spec"]
    (settings,) = [each["data"] for (kind, _), each in by_name.items() if kind == "ConfigMap"]
    mounts = {each["mountPath"]: each for each in worker["containers"][0]["volumeMounts"]}
    assert mounts[settings["OPENCUE_SCHED_LOG_ROOT"]]["readOnly"] is True
    assert {each["name"] for each in mounts.values()} == {each["name"] for each in worker["volumes"]}
    for role in ("worker", "report-service"):
        spec = by_name["Deployment", f"opencue-sched-{role}"]["spec"]["template"]["spec"]
        assert spec["dnsConfig"]["searches"] == ["farm.example.com"]
    assert "replicas" not in by_name["Deployment", "opencue-sched-worker"]["spec"]
    assert by_name["Service", "opencue-sched-report-service"]["spec"]["type"] == "LoadBalancer"
    reports = by_name["NetworkPolicy", "opencue-sched-report-service"]["spec"]["ingress"]
    assert reports[0]["from"] == [{"ipBlock": {"cidr": "10.20.0.0/16"}}]
