"""Flower as a process: what it refuses at its start, whose questions it answers, and how it ends."""

from __future__ import annotations

import base64
import errno
import http.client
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from benchmarks.warm_start import ROOT, run
from opencue_sched.embedded.servers.processes import GuardedProcess, free_port
from opencue_sched.settings import Settings
from tests.kit.polling import eventually, tail_of
from tests.kit.wording import lacks

FLOWER = [sys.executable, "-m", "celery", "-A", "opencue_sched", "flower"]


def environment(settings: Settings, **variables: str) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("OPENCUE_SCHED_", "FLOWER_"))}
    stores = {
        "OPENCUE_SCHED_DATABASE_URL": settings.sqlalchemy_url,
        "OPENCUE_SCHED_REDIS_URL": settings.redis_dsn,
    }
    return {**kept, **stores, **variables}


def refusal(settings: Settings, *words: str, **variables: str) -> str:
    """Why a Flower with these options did not start."""
    ran: subprocess.CompletedProcess[str] = run([*FLOWER, *words], env=environment(settings, **variables), cwd=ROOT)
    assert ran.returncode == 78, ran.stderr
    assert "Traceback" not in ran.stderr
    (said,) = [line for line in ran.stderr.splitlines() if line.startswith("opencue-sched ")]
    return said


@pytest.mark.parametrize(
    ("variables", "said"),
    [
        ({"FLOWER_PORT": "tcp://10.0.0.1:5555"}, "FLOWER_PORT: .* enableServiceLinks: false"),
        ({"FLOWER_DEBUG": "perhaps"}, "FLOWER_DEBUG: .* 'perhaps'"),
        ({"FLOWER_INSPECT_TIMEOUT": "long"}, "FLOWER_INSPECT_TIMEOUT: "),
        ({"FLOWER_BASIC_AUTH": "artist:ses,ame"}, "comma"),
    ],
)
def test_a_variable_of_flowers_that_makes_no_sense_is_refused_by_name(
    settings: Settings, variables: dict[str, str], said: str
) -> None:
    refused = refusal(settings, **variables)
    assert said.partition(" .* ")[0] in refused
    assert said.rpartition(" .* ")[2] in refused
    assert "ame" not in refused.replace("named", "").replace("name", "")


def test_an_option_of_flowers_that_makes_no_sense_is_refused(settings: Settings) -> None:
    assert "'many'" in refusal(settings, "--port=many")


def test_a_port_in_use_is_refused_in_a_sentence(settings: Settings) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        said = refusal(settings, f"--port={port}")
    assert not lacks(said, "127.0.0.1", str(port), os.strerror(errno.EADDRINUSE))


@contextmanager
def flower(settings: Settings, log: Path, **variables: str) -> Iterator[int]:
    """A Flower on loopback; its port."""
    port = free_port()
    variables = environment(settings, **variables)
    process = GuardedProcess([*FLOWER, "--address=127.0.0.1", f"--port={port}"], log=log, env=variables, cwd=ROOT)
    process.start()
    try:
        eventually(lambda: status(port, "127.0.0.1"), 60, "Flower's answer", told=tail_of(log))
        yield port
    finally:
        process.stop()


def answer(port: int, host: str, path: str = "/", password: str = "") -> tuple[int, str]:
    """The status and the text that Flower answers when it is asked for by ``host``; 0 while nobody listens."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
    headers = {"Host": host}
    if password:
        headers["Authorization"] = f"Basic {base64.b64encode(password.encode()).decode()}"
    try:
        connection.request("GET", path, headers=headers)
        response = connection.getresponse()
        return response.status, response.read().decode(errors="replace")
    except OSError:
        return 0, ""
    finally:
        connection.close()


def status(port: int, host: str, path: str = "/", password: str = "") -> int:
    return answer(port, host, path, password)[0]


PAGES = ["/", "/farm", "/farm/data", "/metrics", "/healthcheck", "/api/workers", "/static/css/flower.css"]


def test_where_it_asks_for_no_password_flower_answers_by_its_own_names_alone(
    settings: Settings, tmp_path: Path
) -> None:
    """A page from elsewhere whose name was made to lead here (DNS rebinding) could read it otherwise."""
    named = {"OPENCUE_SCHED_PAGE__HOSTS": "Flower.Studio,farm", "FLOWER_UNAUTHENTICATED_API": "true"}
    with flower(settings, tmp_path / "flower.log", **named) as port:
        for page in PAGES:
            code, said = answer(port, f"evil.example:{port}", page)
            assert code == 403, page
            assert "OPENCUE_SCHED_PAGE__HOSTS" in said
            assert "evil.example" in said
        for host in ("localhost", "LOCALHOST.", "127.0.0.1", "[::1]", "10.1.2.3", "flower.studio", "FARM"):
            assert status(port, f"{host}:{port}") == 200, host
        assert status(port, "notlocalhost") == 403
        assert status(port, "127.0.0.1.evil.example") == 403


def test_where_it_asks_for_a_password_flower_answers_by_any_name(settings: Settings, tmp_path: Path) -> None:
    with flower(settings, tmp_path / "flower.log", FLOWER_BASIC_AUTH="artist:sesame") as port:
        assert status(port, "flower.studio", password="artist:sesame") == 200
        assert status(port, "flower.studio") == 401
