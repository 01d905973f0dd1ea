"""The image is built, and each role runs from it with the command and the variables of its pod.

Run by ``make image-test``, with docker or podman where one answers, or else with buildah, which needs no daemon and, as
root, no namespaces. ``tests/e2e/test_wheel.py`` runs the same commands from the wheel.
"""

from __future__ import annotations

import os
import re
import secrets
import shutil
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from opencue_sched import __version__
from opencue_sched.embedded.servers.processes import GuardedProcess
from opencue_sched.store.schema import REVISION
from tests.conftest import RedisServer
from tests.e2e.roles import NAMES, migration, role
from tests.kit.polling import eventually, tail_of

ROOT = Path(__file__).resolve().parents[2]
DOCKERFILE = ROOT / "deploy" / "Dockerfile"
AS_A_POD = ["--network", "host", "--read-only", "--tmpfs", "/tmp", "--cap-drop", "ALL"]  # noqa: S108
CHROOT = ["--isolation", "chroot"]
PULL_SECONDS = 300
BUILT_OF = {"SOURCE": "https://git.example.com/opencue-sched", "REVISION": "0123abcd"}


def _succeeds(*command: str) -> bool:
    """Whether a command ends well, and in time."""
    try:
        return subprocess.run(command, capture_output=True, timeout=PULL_SECONDS, check=False).returncode == 0
    except subprocess.TimeoutExpired:
        return False


@pytest.fixture(scope="module")
def engine_program() -> str:
    """The program that builds and runs: docker or podman if its daemon answers, buildah for root."""
    programs = ["docker", "podman", *(["buildah"] if os.geteuid() == 0 else [])]
    for program in programs:
        if shutil.which(program) and _succeeds(program, "info"):
            return program
    pytest.skip("neither docker nor podman answers here, nor is there buildah for root")


@pytest.fixture(scope="module")
def image(engine_program: str) -> Iterator[str]:
    """The image of this checkout, by a name of its own."""
    (base,) = set(re.findall(r"^FROM (\S+)", DOCKERFILE.read_text(), re.MULTILINE))
    listed = subprocess.run([engine_program, "images", "-q", base], capture_output=True, text=True, check=False)
    if not listed.stdout.strip() and not _succeeds(engine_program, "pull", base):
        pytest.skip(f"{engine_program} has no {base} and cannot pull it")
    name = f"opencue-sched-test:{secrets.token_hex(4)}"
    build = ["bud", *CHROOT] if engine_program == "buildah" else ["build"]
    of = [f"--build-arg={argument}={value}" for argument, value in BUILT_OF.items()]
    subprocess.run([engine_program, *build, *of, "-q", "-t", name, "-f", DOCKERFILE, "."], cwd=ROOT, check=True)
    try:
        yield name
    finally:
        subprocess.run([engine_program, "rmi", "--force", name], check=False, capture_output=True)


class Containers:
    """Containers of one image; their logs are files in a directory."""

    def __init__(self, engine_program: str, image: str, directory: Path) -> None:
        self._program = engine_program
        self._image = image
        self._directory = directory

    @contextmanager
    def run(self, name: str, command: Sequence[str], environment: Mapping[str, str]) -> Iterator[GuardedProcess]:
        """Run a command in a container of its own, which ends with the block."""
        container = f"opencue-sched-test-{name}-{secrets.token_hex(4)}"
        variables = [f"--env={key}={value}" for key, value in environment.items()]
        if self._program == "buildah":
            made = [self._program, "from", "--name", container, self._image]
            subprocess.run(made, check=True, capture_output=True)
            words = ["run", *CHROOT, *variables, container, "--", *command]
        else:
            words = ["run", "--name", container, *AS_A_POD, *variables, self._image, *command]
        try:
            with GuardedProcess([self._program, *words], log=self._directory / f"{name}.log") as process:
                yield process
        finally:
            force = [] if self._program == "buildah" else ["--force"]
            subprocess.run([self._program, "rm", *force, container], check=False, capture_output=True)

    def output(self, name: str, command: Sequence[str], environment: Mapping[str, str]) -> str:
        """What a command prints that ends well."""
        with self.run(name, command, environment) as process:
            told = tail_of(process.log)
            eventually(lambda: not process.running, 60, f"the end of {name}", told=told)
            assert process.exit_code == 0, told()
            return process.log.read_text()


def test_each_role_runs_from_the_image(
    engine_program: str, image: str, redis_server: RedisServer, empty_database_url: str, tmp_path: Path
) -> None:
    # given the image, which runs nothing as root, and a database that the Job has migrated
    stores = {
        "OPENCUE_SCHED_DATABASE_URL": empty_database_url,
        "OPENCUE_SCHED_REDIS_URL": redis_server.url,
        "FLOWER_BASIC_AUTH": "operator:secret",  # it listens beyond this machine
        "OPENCUE_SCHED_ACCOUNTING__COMMIT_DEADLINE": "1",
    }
    containers = Containers(engine_program, image, tmp_path)
    assert containers.output("user", ["id", "-u"], {}).split() == ["10001"]
    assert REVISION in containers.output("migrate", migration(), stores)

    # when every role is started
    roles = [role(name, stores) for name in NAMES]
    with ExitStack() as running:
        processes = [running.enter_context(containers.run(each.name, each.command, each.environment)) for each in roles]

        # then its probes answer well
        told = tail_of(*(process.log for process in processes))
        for each, process in zip(roles, processes, strict=True):
            eventually(
                lambda each=each, process=process: each.answers() or not process.running, 120, each.name, told=told
            )
            assert process.running, told()


def test_the_image_says_which_version_it_is_and_of_which_source(engine_program: str, image: str) -> None:
    of_image = ["--type", "image"]
    inspected = subprocess.run([engine_program, "inspect", *of_image, image], capture_output=True, check=True)
    told = inspected.stdout.decode()
    for name, value in {"version": __version__, "source": BUILT_OF["SOURCE"], "revision": BUILT_OF["REVISION"]}.items():
        assert re.search(rf'"org\.opencontainers\.image\.{name}": "{re.escape(value)}"', told), told


def test_the_image_has_no_tools(engine_program: str, image: str, tmp_path: Path) -> None:
    listed = Containers(engine_program, image, tmp_path).output("freeze", ["pip", "freeze"], {})
    names = {line.partition("==")[0].partition(" @ ")[0].lower() for line in listed.splitlines()}
    assert {"celery", "grpcio", "opencue-sched"} <= names
    assert not {"pytest", "mypy", "ruff", "hatchling", "pip-tools"} & names
