"""What kinds of URL lead to which server, and what sessions have then."""

from __future__ import annotations

from collections.abc import Iterator
from urllib.parse import quote

import pytest
from pydantic import SecretStr
from sqlalchemy import URL, Engine, make_url, text
from sqlalchemy.exc import OperationalError

from opencue_sched.clients.postgres import ask, make_engine
from opencue_sched.embedded.servers.processes import free_port
from opencue_sched.embedded.servers.services import EmbeddedPostgres
from opencue_sched.settings import Settings
from opencue_sched.store.schema import check_writable
from tests.kit.standby import standby_server


@pytest.fixture(scope="module")
def standby() -> Iterator[EmbeddedPostgres]:
    with standby_server() as server:
        yield server


def at(settings: Settings, url: str) -> Settings:
    return settings.model_copy(update={"database_url": SecretStr(url)})


def credentials(url: URL) -> str:
    return f"{url.username}:{quote(url.password or '')}"


@pytest.mark.parametrize(
    "form",
    [
        "postgresql://{who}@127.0.0.1:{nobody},127.0.0.1:{here}/{name}",
        "postgresql://{who}@127.0.0.1,127.0.0.1/{name}?port={nobody},{here}",
        "postgresql://{who}@/{name}?host=127.0.0.1:{nobody}&host=127.0.0.1:{here}",
    ],
)
def test_of_several_hosts_the_first_that_answers_is_taken(form: str, settings: Settings) -> None:
    url = make_url(settings.sqlalchemy_url)
    named = form.format(who=credentials(url), nobody=free_port(), here=url.port, name=url.database)
    engine = make_engine(at(settings, named))
    ask(engine, check_writable)
    engine.dispose()


def test_of_several_hosts_the_one_that_takes_writes_is_taken_where_the_url_says_so(
    settings: Settings, standby: EmbeddedPostgres
) -> None:
    # given a standby, and no primary
    here = f"{credentials(make_url(standby.url))}@127.0.0.1:{free_port()},127.0.0.1:{standby.port}"
    engine = make_engine(at(settings, f"postgresql://{here}/postgres?target_session_attrs=read-write"))
    with pytest.raises(OperationalError, match="session is read-only"):
        ask(engine, check_writable)
    # when it is promoted, then it is taken
    admin = make_engine(at(settings, standby.url))
    with admin.connect() as connection:
        assert connection.scalar(text("SELECT pg_promote()"))
    ask(engine, check_writable)
    admin.dispose()
    engine.dispose()


def test_a_socket_may_stand_where_the_host_stands(settings: Settings, standby: EmbeddedPostgres) -> None:
    directory = quote(str(standby.directory / "data"), safe="")
    named = f"postgresql://{credentials(make_url(standby.url))}@{directory}:{standby.port}/postgres"
    engine = make_engine(at(settings, named))
    with engine.connect() as connection:
        assert connection.scalar(text("SELECT inet_server_addr()")) is None
    engine.dispose()


def test_options_of_the_url_hold_beside_ours(settings: Settings, engine: Engine) -> None:
    with engine.begin() as connection:
        connection.execute(text("CREATE SCHEMA farm"))
    through = make_engine(at(settings, f"{settings.sqlalchemy_url}?options=-csearch_path%3Dfarm%20-cwork_mem%3D7MB"))
    with through.connect() as connection:
        asked = "SELECT current_schema(), current_setting('work_mem'), current_setting('statement_timeout')"
        assert connection.execute(text(asked)).one() == ("farm", "7MB", "30s")
    through.dispose()
