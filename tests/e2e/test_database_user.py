"""A fleet whose database user owns nothing: what it needs, and what is said where it lacks something."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import redis
from sqlalchemy import Engine, text

from opencue_sched.accounting import keys
from opencue_sched.clients.postgres import make_engine
from opencue_sched.embedded.farms.farm import Farm
from opencue_sched.embedded.farms.farm_specs import LayerSpec
from opencue_sched.insight.audit import Finding, Severity
from opencue_sched.insight.doctor import diagnose
from opencue_sched.settings import Settings
from opencue_sched.store.privileges import CHANGED
from tests.e2e.fleets import NONE_IS_LOST, fleet_on
from tests.kit.database_users import as_user, database_user, grant_what_doctor_asks_for, run_all
from tests.kit.wording import lacks

PAGE = Path(__file__).resolve().parents[2] / "docs" / "tasks" / "database-user.md"


@pytest.fixture
def user(engine: Engine) -> Iterator[str]:
    """The name, and password, of a user that owns nothing and may nothing."""
    with database_user(engine) as name:
        yield name


@pytest.fixture
def limited(settings: Settings, user: str) -> Settings:
    """Settings with that user."""
    return as_user(settings, user)


def complaints(limited: Settings, client: redis.Redis) -> list[Finding]:
    """What doctor, run as that user, says of the database."""
    engine = make_engine(limited)
    try:
        report = diagnose(engine, client, limited)
    finally:
        engine.dispose()
    return [found for found in report.findings if found.level is Severity.FAIL and found.what not in ("RQD", "workers")]


def test_a_fleet_works_with_the_privileges_that_doctor_asks_for_and_no_others(
    limited: Settings, settings: Settings, user: str, engine: Engine, redis_client: redis.Redis, tmp_path: Path
) -> None:
    # given a user with just these
    grant_what_doctor_asks_for(engine, user)
    assert complaints(limited, redis_client) == []
    with engine.begin() as connection:
        Farm(connection).default_show()

    # when hosts report, work runs to its end, and the books are kept, all as that user
    with fleet_on(limited, engine, redis_client, tmp_path, environment=NONE_IS_LOST) as fleet:
        with engine.begin() as connection:
            farm = Farm(connection)
            show = farm.show("second")
            farm.subscription(show, farm.default_alloc(), size=100)
            job = farm.job(layers=[LayerSpec(frames=12), LayerSpec(frames=1)], show=show, os=None)
            farm.layer_on_layer((job, 1), (job, 0))
        fleet.wait_for("the job's end", lambda: fleet.finished(job.id))
        recomputed = redis_client.get(keys.RECOMPUTED_AT)
        fleet.wait_for("a recompute", lambda: redis_client.get(keys.RECOMPUTED_AT) != recomputed)
        fleet.assert_audit()
        logs = "\n".join(process.log.read_text() for process in fleet.fleet.processes.values())

    # then nothing was denied
    assert "permission denied" not in logs


def test_the_statements_of_the_page_are_enough_also_for_tables_made_later(
    limited: Settings, user: str, engine: Engine, redis_client: redis.Redis
) -> None:
    (block,) = re.findall(r"```sql\n(.*?)```", PAGE.read_text(), re.DOTALL)
    owner = engine.url.username
    statements = [
        line.replace("opencue_sched;", f"{user};").replace("cuebot", f"{owner}")
        for line in filter(None, block.split("\n"))
    ]
    assert statements[0].startswith("CREATE ROLE")
    run_all(engine, *statements[1:])
    assert complaints(limited, redis_client) == []
    # and when a migration makes a table
    run_all(engine, "CREATE TABLE made_later (a int)")
    with engine.connect() as connection:
        asked = f"SELECT has_table_privilege('{user}', 'made_later', 'SELECT, INSERT, UPDATE, DELETE')"
        assert connection.scalar(text(asked))


def test_what_the_user_lacks_is_named_by_doctor(
    limited: Settings, user: str, engine: Engine, redis_client: redis.Redis
) -> None:
    run_all(
        engine,
        f"GRANT SELECT, INSERT, UPDATE ON ALL TABLES IN SCHEMA public TO {user}",
        f"GRANT DELETE ON {', '.join(name for name in CHANGED if name != 'host_tag')} TO {user}",
    )
    (told,) = complaints(limited, redis_client)
    assert (told.what, lacks(told.text, "DELETE on host_tag")) == ("privileges", [])
    assert "docs/tasks/database-user.md" in told.remedy


def test_a_user_without_rights_is_not_told_to_set_the_url(limited: Settings, redis_client: redis.Redis) -> None:
    (told,) = complaints(limited, redis_client)
    assert "permission denied" in told.text
    assert "docs/tasks/database-user.md" in told.text
    assert "OPENCUE_SCHED_DATABASE_URL" not in told.text
