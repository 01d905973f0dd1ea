"""The image is built, and each role runs from it as a pod would run it, where a container engine is there.

Where none is, `test_wheel.py::test_each_role_of_the_manifests_runs_and_answers_its_probes` runs the same commands.
"""

from __future__ import annotations

import secrets
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.conftest import RedisServer
from tests.e2e.roles import NAMES, migration, role
from tests.kit.polling import eventually

ROOT = Path(__file__).resolve().parents[2]
AS_A_POD = ["--network", "host", "--read-only", "--tmpfs", "/tmp", "--cap-drop", "ALL"]  # noqa: S108


def _engine() -> str | None:
    """The program of a container engine that answers."""
    for program in filter(None, map(shutil.which, ("docker", "podman"))):
        if subprocess.run([program, "info"], capture_output=True, timeout=30, check=False).returncode == 0:
            return program
    return None


@pytest.fixture(scope="module")
def engine_program() -> str:
    program = _engine()
    if program is None:
        pytest.skip("no container engine answers here")
    return program


@pytest.fixture(scope="module")
def image(engine_program: str) -> Iterator[str]:
    name = f"opencue-sched-test:{secrets.token_hex(4)}"
    subprocess.run([engine_program, "build", "-q", "-t", name, "-f", "deploy/Dockerfile", "."], cwd=ROOT, check=True)
    yield name
    subprocess.run([engine_program, "rmi", "--force", name], check=False, capture_output=True)


def test_each_role_runs_from_the_image(
    engine_program: str, image: str, redis_server: RedisServer, empty_database_url: str
) -> None:
    stores = {
        "OPENCUE_SCHED_DATABASE_URL": empty_database_url,
        "OPENCUE_SCHED_REDIS_URL": redis_server.url,
        "FLOWER_BASIC_AUTH": "operator:secret",  # it listens beyond this machine
        "OPENCUE_SCHED_ACCOUNTING__COMMIT_DEADLINE": "1",
    }
    roles = [role(name, stores) for name in NAMES]
    variables = {each.name: [f"--env={key}={value}" for key, value in each.environment.items()] for each in roles}
    run = [engine_program, "run", *AS_A_POD]
    subprocess.run([*run, "--rm", *variables["worker"], image, *migration()], check=True)
    started: list[str] = []
    try:
        for each in roles:
            command = [*run, "--detach", *variables[each.name], image, *each.command]
            started.append(subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip())
        for each in roles:
            eventually(each.answers, 120, f"an answer of {each.name}'s probes")
        user = subprocess.run([engine_program, "exec", started[0], "id", "-u"], check=True, capture_output=True)
        assert user.stdout.strip() == b"10001"
    finally:
        if started:
            subprocess.run([engine_program, "rm", "--force", *started], check=False, capture_output=True)
