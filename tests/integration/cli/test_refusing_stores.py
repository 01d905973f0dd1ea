"""Stores that answer and refuse, or that cannot take another connection: one line that says which it is, and a status
by which a supervisor knows whether to try again."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from urllib.parse import urlsplit

import pytest
import redis

from benchmarks.warm_start import ROOT, run
from opencue_sched.embedded.servers.services import EmbeddedRedis
from opencue_sched.settings import Settings
from tests.kit.refusing_postgres import refusing_postgres
from tests.kit.sentinel import watched_pair
from tests.kit.tls import private_authority, tls_front, tls_port
from tests.kit.wording import lacks

CELERY = ("-m", "celery", "-A", "opencue_sched")
OURS = ("-c", "from opencue_sched.cli import main; main()")
PROCESSES = {
    "worker": (*CELERY, "worker", "-P", "solo"),
    "beat": (*CELERY, "beat"),
    "flower": (*CELERY, "flower", "--port=0"),
    "inspect": (*CELERY, "inspect", "ping"),
    "graph": (*CELERY, "graph", "workers"),
    "report service": (*OURS, "report-service"),
    "fleet": (*OURS, "fleet"),
    "ctl": (*OURS, "ctl", "pause"),
}


def start(words: tuple[str, ...], database: str, redis_url: str) -> subprocess.CompletedProcess[str]:
    """A process or a command of ours on these stores, to its end."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("OPENCUE_SCHED_")}
    variables = {
        "OPENCUE_SCHED_DATABASE_URL": database,
        "OPENCUE_SCHED_REDIS_URL": redis_url,
        "OPENCUE_SCHED_QUEUE__METRICS_PORT": "0",
    }
    return run([sys.executable, *words], env={**kept, **variables}, cwd=ROOT)


def refusal(ran: subprocess.CompletedProcess[str], status: int = 78) -> str:
    """The one line by which a process says why it ended."""
    assert ran.returncode == status, ran.stderr
    assert "Traceback" not in ran.stderr
    (line,) = [line for line in ran.stderr.splitlines() if line.startswith(("opencue-sched ", "error: "))]
    return line


@pytest.fixture(scope="module")
def node() -> Iterator[EmbeddedRedis]:
    """A node of a Redis Cluster to which no slot is assigned."""
    with EmbeddedRedis(configuration={"cluster-enabled": "yes"}) as server:
        yield server


@pytest.mark.parametrize("process", PROCESSES)
def test_a_redis_cluster_is_refused_by_every_process_and_command(
    process: str, node: EmbeddedRedis, settings: Settings
) -> None:
    line = refusal(start(PROCESSES[process], settings.sqlalchemy_url, node.url))
    assert not lacks(line, f"127.0.0.1:{node.port}", "cluster", "OPENCUE_SCHED_REDIS_URL")


def test_a_cluster_is_named_also_where_the_url_has_a_database_that_it_has_not(
    node: EmbeddedRedis, settings: Settings
) -> None:
    assert "cluster" in refusal(start(PROCESSES["worker"], settings.sqlalchemy_url, node.database_url(3)))


@pytest.mark.parametrize("process", ["worker", "fleet"])
def test_a_redis_without_a_connection_left_is_told_by_its_limit_and_what_takes_them(
    process: str, settings: Settings
) -> None:
    with EmbeddedRedis() as server, closing(redis.Redis.from_url(server.url)) as admin:
        admin.config_set("maxclients", "1")
        ran = start(PROCESSES[process], settings.sqlalchemy_url, server.url)
    line = refusal(ran, 75 if process == "worker" else 1)
    assert not lacks(line, "maxclients", "20 ", "accounting.redis_pool_size")
    assert "OPENCUE_SCHED_REDIS_URL" not in line


POSTGRESQL = {
    "password": ("{user}:wrong@{place}/{name}", "password authentication failed"),
    "database": ("{user}:{password}@{place}/nowhere", 'database "nowhere" does not exist'),
    "sslmode": ("{user}:{password}@{place}/{name}?sslmode=maybe", "invalid sslmode value"),
    "no TLS": ("{user}:{password}@{place}/{name}?sslmode=require", "does not support SSL"),
    "value in options": ("{user}:{password}@{place}/{name}?options=-cwork_mem%3Dhuge", "invalid value for parameter"),
    "word in options": ("{user}:{password}@{place}/{name}?options=huge", "invalid command-line argument"),
}


@pytest.mark.parametrize("process", ["worker", "beat", "report service"])
@pytest.mark.parametrize("fault", POSTGRESQL)
def test_a_postgresql_that_refuses_for_good_is_told_in_a_line_and_not_asked_again(
    process: str, fault: str, settings: Settings
) -> None:
    parts = urlsplit(settings.sqlalchemy_url)
    written, words = POSTGRESQL[fault]
    place = f"{parts.hostname}:{parts.port}"
    named = written.format(user=parts.username, password=parts.password, place=place, name=parts.path[1:])
    line = refusal(start(PROCESSES[process], f"postgresql://{named}", settings.redis_dsn))
    assert not lacks(line, words, "OPENCUE_SCHED_DATABASE_URL")
    assert str(parts.password) not in line


URL = "OPENCUE_SCHED_DATABASE_URL"
IN_ANOTHER_LANGUAGE = {
    "password": (b"28P01", "Passwort-Authentifizierung für Benutzer »nobody« fehlgeschlagen".encode(), 78, URL),
    "database": (b"3D000", "la base de données « none » n'existe pas".encode("latin-1"), 78, URL),
    "user": (b"28000", 'ロール"nobody"はログインが許可されていません'.encode("euc-jp"), 78, URL),
    "right to connect": (
        b"42501",
        "keine Berechtigung für Datenbank »none«".encode(),
        78,
        "docs/tasks/database-user.md",
    ),
    "parameter": (b"42704", "unbekannter Konfigurationsparameter »lc_nothing«".encode(), 78, URL),
    "start": (b"57P03", b"das Datenbanksystem startet", 75, URL),
    "limit": (b"53300", "désolé, trop de clients sont déjà connectés".encode("latin-1"), 75, "max_connections"),
}


@pytest.mark.parametrize("fault", IN_ANOTHER_LANGUAGE)
def test_a_postgresql_is_understood_whatever_language_and_encoding_it_refuses_in(
    fault: str, settings: Settings
) -> None:
    state, text, status, told = IN_ANOTHER_LANGUAGE[fault]
    with refusing_postgres(settings, text, state=state) as elsewhere:
        ran = start(PROCESSES["worker"], elsewhere.database_url.get_secret_value(), settings.redis_dsn)
    assert told in refusal(ran, status)


@pytest.mark.parametrize("fault", ["start", "limit"])
def test_of_what_is_said_at_several_attempts_that_which_passes_counts(fault: str, settings: Settings) -> None:
    """As of a server that is full and, asked again without TLS, knows no such user there."""
    state, text, _, told = IN_ANOTHER_LANGUAGE[fault]
    lasting = b'no pg_hba.conf entry for host "127.0.0.1", no encryption'
    with (
        refusing_postgres(settings, text, state=state) as passing,
        refusing_postgres(settings, lasting, state=b"28000") as refusing,
    ):
        hosts = ",".join(f"127.0.0.1:{urlsplit(there.sqlalchemy_url).port}" for there in (passing, refusing))
        ran = start(PROCESSES["worker"], f"postgresql://nobody:any@{hosts}/none", settings.redis_dsn)
    assert told in refusal(ran, 75)


def test_a_redis_password_that_is_wrong_is_told_as_such(settings: Settings) -> None:
    place = settings.redis_dsn.rpartition("@")[2]
    line = refusal(start(PROCESSES["worker"], settings.sqlalchemy_url, f"redis://:wrong@{place}"))
    assert not lacks(line, "password", "OPENCUE_SCHED_REDIS_URL")


def test_a_database_that_redis_has_not_is_told_as_such(settings: Settings) -> None:
    line = refusal(start(PROCESSES["worker"], settings.sqlalchemy_url, f"{settings.redis_dsn[:-1]}999"))
    assert "(DB index is out of range)" in line, "as Redis says it"


def test_a_redis_whose_authority_is_unknown_is_refused_for_good(settings: Settings, tmp_path: Path) -> None:
    with EmbeddedRedis() as server, tls_front(server, tmp_path) as front:
        line = refusal(start(PROCESSES["worker"], settings.sqlalchemy_url, front.url))
    assert " refuses (" in line
    assert "CERTIFICATE_VERIFY_FAILED" in line


def test_a_password_that_sentinels_refuse_is_told_in_a_short_line(settings: Settings, tmp_path: Path) -> None:
    with watched_pair(tmp_path) as pair:
        wrong = pair.url.replace("of-the-sentinel", "wrong")
        line = refusal(start(PROCESSES["worker"], settings.sqlalchemy_url, wrong))
    assert not lacks(line, "Sentinel", "'farm'", f"127.0.0.1:{pair.port}", "password")
    assert len(line) < 300
    assert "<redis" not in line


def test_sentinels_whose_authority_is_unknown_are_refused_for_good(settings: Settings, tmp_path: Path) -> None:
    context, _authority = private_authority(tmp_path)
    with watched_pair(tmp_path) as pair, tls_port(context, pair.port) as port:
        url = f"{pair.url.replace(f':{pair.port}/', f':{port}/')}&ssl=true"
        line = refusal(start(PROCESSES["worker"], settings.sqlalchemy_url, url))
    assert not lacks(line, "Sentinel", "'farm'", f"127.0.0.1:{port}", "certificate")
