"""The built wheel works in a fresh environment, far from the checkout.

The environment borrows the installed dependencies of the running one through a .pth file; the package itself comes
from the wheel, and the checkout is nowhere on its path. What may differ between a wheel and a checkout is tried with
both.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import sysconfig
import time
import urllib.request
import venv
import zipfile
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import redis
from sqlalchemy import Engine, create_engine, text

from opencue_sched import __version__
from opencue_sched.embedded.demo.pictures import read_png
from opencue_sched.embedded.farms.farm import Farm
from opencue_sched.embedded.farms.farm_specs import LayerSpec
from opencue_sched.embedded.farms.stress_farms import DRAIN, stress_farm
from opencue_sched.embedded.servers.processes import GuardedProcess, free_port
from opencue_sched.store.schema import REVISION
from tests.conftest import RedisServer
from tests.e2e.roles import NAMES, Role, migration, role
from tests.kit.left_behind import MARKER, nothing_is_left
from tests.kit.polling import eventually, tail_of

ROOT = Path(__file__).resolve().parents[2]
FARM_PAGE = ("/farm", "/farm.css", "/farm.js", "/farm/data")


def _with(changes: Mapping[str, str]) -> dict[str, str]:
    """Our environment with ``changes``, and without what would lead to this checkout or set something."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "OPENCUE_SCHED_"))}
    return {**kept, **changes}


def _run(
    command: list[str | Path], *, cwd: Path, env: Mapping[str, str] | None = None, timeout_seconds: float = 240
) -> str:
    ended = subprocess.run(
        command, cwd=cwd, env=env, capture_output=True, text=True, check=False, timeout=timeout_seconds
    )
    assert ended.returncode == 0, f"{command} ended with {ended.returncode}:\n{ended.stdout}\n{ended.stderr}"
    return ended.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel of this checkout."""
    directory = tmp_path_factory.mktemp("wheel")
    build = "import os, sys; from hatchling.build import build_wheel; print(build_wheel(sys.argv[1]))"
    name = _run([sys.executable, "-c", build, directory], cwd=ROOT).split()[-1]
    return directory / name


@pytest.fixture(scope="module")
def sdist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The source distribution of this checkout, unpacked."""
    directory = tmp_path_factory.mktemp("sdist")
    build = "import sys; from hatchling.build import build_sdist; print(build_sdist(sys.argv[1]))"
    name = _run([sys.executable, "-c", build, directory], cwd=ROOT).split()[-1]
    _run(["tar", "-xzf", name], cwd=directory)
    return directory / name.removesuffix(".tar.gz")


class Installation:
    """A Python that has the wheel and no checkout."""

    def __init__(self, directory: Path, wheel: Path) -> None:
        venv.create(directory / "venv", with_pip=False, symlinks=True)
        self.bin = directory / "venv" / "bin"
        self.site = next((directory / "venv").glob("lib/python*/site-packages"))
        # A path named in a .pth file brings no .pth files of its own: the editable checkout does not come along.
        (self.site / "borrowed.pth").write_text(sysconfig.get_paths()["purelib"] + "\n", encoding="utf-8")
        pip = [sys.executable, "-m", "pip", "--python", self.bin / "python", "--disable-pip-version-check"]
        _run([*pip, "install", "--quiet", "--no-index", "--no-deps", "--force-reinstall", wheel], cwd=directory)
        self.work = directory / "work"
        self.work.mkdir()

    def python(self, code: str, *arguments: str, **environment: str) -> Any:
        """Run code that prints JSON; returns what it printed last."""
        command: list[str | Path] = [self.bin / "python", "-c", code, *arguments]
        return json.loads(_run(command, cwd=self.work, env=_with(environment)).splitlines()[-1])

    def program(self, *words: str, timeout_seconds: float = 240, **environment: str) -> str:
        """What ``opencue-sched WORDS`` prints."""
        env = _with(environment)
        return _run([self.bin / "opencue-sched", *words], cwd=self.work, env=env, timeout_seconds=timeout_seconds)

    def role(self, role: Role) -> GuardedProcess:
        """A role as the manifests start it, not yet started."""
        program, *words = role.command
        start = [self.bin / "python", "-m", "celery"] if program == "celery" else [self.bin / program]
        env = _with(role.environment)
        return GuardedProcess([*start, *words], log=self.work / f"role-{role.name}.log", cwd=self.work, env=env)

    def celery(self, *arguments: str, directory: Path | None = None, **environment: str) -> GuardedProcess:
        """A process ``celery -A opencue_sched ARGUMENTS``, not yet started."""
        # As a module, so that its working directory stands on its path.
        return _celery([self.bin / "python", "-m", "celery"], directory or self.work, *arguments, **environment)


def _celery(program: list[str | Path], directory: Path, *arguments: str, **environment: str) -> GuardedProcess:
    """A process ``PROGRAM -A opencue_sched ARGUMENTS`` in a directory, not yet started."""
    return GuardedProcess(
        [*program, "-A", "opencue_sched", *arguments],
        log=directory / f"{arguments[0]}.log",
        cwd=directory,
        env=_with(environment),
    )


@pytest.fixture(scope="module")
def installation(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Installation:
    return Installation(tmp_path_factory.mktemp("installation"), wheel)


def test_the_wheel_has_every_part(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
    assert {"opencue_sched/settings.py", "tasks/__init__.py", "celeryconfig.py", "opencue_sched/py.typed"} <= names
    scripts = {path.relative_to(ROOT / "lua").as_posix() for path in (ROOT / "lua").rglob("*.lua")}
    assert scripts
    assert {f"opencue_sched/_lua/{script}" for script in scripts} <= names
    migrations = {
        path.relative_to(ROOT / "alembic").as_posix()
        for pattern in ("*.py", "*.mako", "*.sql")
        for path in (ROOT / "alembic").rglob(pattern)
    }
    assert migrations
    assert {f"opencue_sched/_alembic/{migration}" for migration in migrations} <= names
    assert not {name for name in names if name.startswith(("tests/", "benchmarks/", "alembic/", "lua/", "docs/"))}


def test_the_source_distribution_makes_the_same_wheel_and_its_program_runs(
    sdist: Path, wheel: Path, tmp_path: Path
) -> None:
    # given the source distribution, which has what its readers and a packager need
    assert {"CONTRIBUTING.md", "CHANGELOG.md", "LICENSE", "README.md", "docs", "deploy", "tests", "Makefile"} <= {
        path.name for path in sdist.iterdir()
    }

    # when a wheel is made of that alone
    build = "import sys; from hatchling.build import build_wheel; print(build_wheel(sys.argv[1]))"
    made = tmp_path / _run([sys.executable, "-c", build, tmp_path], cwd=sdist).split()[-1]

    # then it is the checkout's, file by file, and works where it is installed
    assert contents_of(made) == contents_of(wheel)
    assert Installation(tmp_path, made).program("--version").split()[-1] == __version__


def contents_of(wheel: Path) -> dict[str, bytes]:
    with zipfile.ZipFile(wheel) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


def test_everything_is_imported_from_the_wheel(installation: Installation) -> None:
    places = installation.python(
        "import celeryconfig, json, opencue_sched, opencue_sched.celery, tasks\n"
        "print(json.dumps([m.__file__ for m in (celeryconfig, opencue_sched, opencue_sched.celery, tasks)]))"
    )
    assert [place for place in places if Path(place).is_relative_to(installation.site)] == places


def test_the_lua_scripts_are_found_and_load(installation: Installation, redis_server: RedisServer) -> None:
    names = sorted(path.stem for path in (ROOT / "lua").glob("*.lua"))
    loaded = installation.python(
        "import json, sys, redis\n"
        "from opencue_sched.clients.lua_scripts import load_script\n"
        "scripts = [load_script(name) for name in json.loads(sys.argv[2])]\n"
        "client = redis.Redis.from_url(sys.argv[1], decode_responses=True)\n"
        "print(json.dumps([client.script_load(script.text) == script.sha for script in scripts]))\n"
        "client.close()",
        redis_server.url,
        json.dumps(names),
    )
    assert loaded == [True] * len(names)


def test_the_migrations_upgrade_an_empty_database(installation: Installation, empty_database_url: str) -> None:
    tables = installation.python(
        "import json, sys\n"
        "from sqlalchemy import create_engine, inspect\n"
        "from opencue_sched.store import schema\n"
        "schema.upgrade(sys.argv[1])\n"
        "engine = create_engine(sys.argv[1])\n"
        "print(json.dumps(inspect(engine).get_table_names()))\n"
        "engine.dispose()",
        empty_database_url,
    )
    assert {"show", "job", "layer", "frame", "host", "proc", "subscription"} <= set(tables)
    engine = create_engine(empty_database_url)
    with engine.begin() as connection:
        farm = stress_farm(connection, DRAIN.scaled(0.01))
    engine.dispose()
    assert farm.frames > 0


class Checkout:
    """This checkout, with the programs of its environment."""

    def celery(self, *arguments: str, directory: Path, **environment: str) -> GuardedProcess:
        """A process ``celery -A opencue_sched ARGUMENTS``, not yet started."""
        return _celery([Path(sys.executable).with_name("celery")], directory, *arguments, **environment)


@pytest.fixture(scope="module")
def checkout() -> Checkout:
    return Checkout()


@pytest.mark.parametrize("taken_from", ["installation", "checkout"])
def test_worker_and_beat_book_frames_in_a_directory_with_files_of_others(
    taken_from: str,
    request: pytest.FixtureRequest,
    tmp_path: Path,
    redis_server: RedisServer,
    redis_client: redis.Redis,
    database_url: str,
    engine: Engine,
) -> None:
    """Celery's manual gives these two names to everybody's files, and Celery looks in the working directory first."""
    # given a directory that holds both
    source: Installation | Checkout = request.getfixturevalue(taken_from)
    (tmp_path / "celeryconfig.py").write_text("broker_url = 'redis://127.0.0.1:1/0'\nimports = ('tasks',)\n")
    (tmp_path / "tasks.py").write_text("raise SystemExit('tasks of somebody else')\n")

    # and a farm with room for every frame
    with engine.begin() as connection:
        farm = Farm(connection)
        farm.host(cores=8, memory_gb=16)
        job = farm.job([LayerSpec(frames=5, cores=1, memory_gb=1)])
    environment = {
        "OPENCUE_SCHED_DATABASE_URL": database_url,
        "OPENCUE_SCHED_REDIS_URL": redis_server.url,
        "OPENCUE_SCHED_RQD__DRY_RUN_MODE": "true",
        "OPENCUE_SCHED_QUEUE__METRICS_PORT": "0",
        # The first worker on an empty Redis waits one age before it books.
        "OPENCUE_SCHED_ACCOUNTING__COMMIT_DEADLINE": "1",
    }

    # when a worker and a beat run there
    worker = source.celery("worker", "--concurrency", "2", directory=tmp_path, **environment)
    beat = source.celery("beat", "--schedule", "beat-schedule", directory=tmp_path, **environment)
    with worker, beat:
        # then every frame gets a proc
        told = tail_of(worker.log, beat.log)
        eventually(
            lambda: _booked(engine, job.id) == 5 or not (worker.running and beat.running), 40, "5 booked", told=told
        )
        assert _booked(engine, job.id) == 5, told()
        worker.kill()
        beat.kill()


def test_flower_of_the_wheel_serves_its_page(
    installation: Installation, redis_server: RedisServer, database_url: str
) -> None:
    environment = {"OPENCUE_SCHED_DATABASE_URL": database_url, "OPENCUE_SCHED_REDIS_URL": redis_server.url}
    port = free_port()
    with installation.celery("flower", f"--port={port}", **environment) as flower:
        told = tail_of(flower.log)
        eventually(lambda: _page(port) == 200 or not flower.running, 40, "Flower's page", told=told)
        assert flower.running, told()
        assert {path: _page(port, path) for path in FARM_PAGE} == dict.fromkeys(FARM_PAGE, 200)


def test_the_program_of_the_wheel_works_on_the_stores(
    installation: Installation, redis_server: RedisServer, database_url: str
) -> None:
    environment = {"OPENCUE_SCHED_DATABASE_URL": database_url, "OPENCUE_SCHED_REDIS_URL": redis_server.url}
    assert __version__ in installation.program("--version")
    installation.program("show", "create", "demo", "--managed", **environment)
    (show,) = json.loads(installation.program("show", "list", "--json", **environment))
    assert (show["show"], show["managed"]) == ("demo", True)


@pytest.mark.long(25)
def test_the_demo_of_the_wheel_renders_a_picture_without_a_checkout_and_leaves_nothing_up(
    installation: Installation,
) -> None:
    # when it runs to its end (the first demo of a machine makes the environment of its RQDs)
    frames = ["--frames", "2", "--hosts", "1", "--workers", "1", "--output", "out"]
    marker = f"marker-{os.getpid()}-{time.monotonic_ns()}"
    said = installation.program("demo", *frames, timeout_seconds=800, **{MARKER: marker})
    # then there is a picture
    assert read_png(installation.work / "out" / "contact-sheet.png").width > 0
    # and it was told where the farm can be watched meanwhile, and no address of what is there no more
    meanwhile, done, afterwards = said.partition("3 of 3 frames")
    assert done, said
    assert "http://" in meanwhile
    assert "http://" not in afterwards
    nothing_is_left(marker)


def test_each_role_of_the_manifests_runs_and_answers_its_probes(
    installation: Installation, redis_server: RedisServer, redis_client: redis.Redis, empty_database_url: str
) -> None:
    """The commands and variables of deploy/k8s; the image has the same wheel."""
    # given a database that the Job has migrated
    stores = {
        "OPENCUE_SCHED_DATABASE_URL": empty_database_url,
        "OPENCUE_SCHED_REDIS_URL": redis_server.url,
        "FLOWER_BASIC_AUTH": "operator:secret",  # it listens beyond this machine
        "OPENCUE_SCHED_ACCOUNTING__COMMIT_DEADLINE": "1",  # the first worker waits four times as long
    }
    program, *words = migration()
    assert program == "opencue-sched"
    assert REVISION in installation.program(*words, **stores)

    # when every role is started
    roles = [role(name, stores) for name in NAMES]
    with ExitStack() as running:
        processes = [running.enter_context(installation.role(each)) for each in roles]
        told = tail_of(*(process.log for process in processes))

        # then all their probes answer well, and each ends well when it is told to
        for each, process in zip(roles, processes, strict=True):
            eventually(
                lambda each=each, process=process: each.answers() or not process.running, 60, each.name, told=told
            )
            assert process.running, told()
        for process in processes:
            process.send_signal(signal.SIGTERM)
        for each, process in zip(roles, processes, strict=True):
            eventually(lambda process=process: not process.running, 30, f"the end of {each.name}", told=told)
            assert process.exit_code in (0, 143), told()


def _page(port: int, path: str = "/") -> int:
    """Status of a page of Flower; 0 while it does not listen, or refuses."""
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=10) as answer:
            return int(answer.status)
    except OSError:
        return 0


def _booked(engine: Engine, job_id: str) -> int:
    """How many RUNNING frames of a job have a proc."""
    query = text(
        "SELECT count(*) FROM proc JOIN frame USING (pk_frame) WHERE proc.pk_job = :job AND str_state = 'RUNNING'"
    )
    with engine.connect() as connection:
        return int(connection.execute(query, {"job": job_id}).scalar_one())
