"""The chaos benchmark drops notices of waiting work for a while, and lets them be heard again."""

from __future__ import annotations

from contextlib import closing

from sqlalchemy import Engine, text

from benchmarks.chaos.lost_notices import drop_notices, tell_again
from opencue_sched.embedded.farms.farm import Farm
from opencue_sched.store.schema import check_schema
from tests.kit.notifications import Listener

CHANNELS = ("opencue_sched_backlog", "opencue_sched_work")


def submit(engine: Engine, name: str) -> None:
    """A job that goes live, and asks for more memory then."""
    with engine.begin() as connection:
        job = Farm(connection).job(name=name)
        connection.execute(text("UPDATE layer SET int_mem_min = 2 * int_mem_min WHERE pk_job = :job"), {"job": job.id})


def test_nothing_is_told_of_work_until_it_is_told_again(engine: Engine) -> None:
    with closing(Listener(engine.url.render_as_string(hide_password=False), CHANNELS)) as listener:
        # given triggers that tell
        submit(engine, "first")
        assert set(listener.heard(engine)) == {"backlog", "work"}

        # when they tell nothing, then a worker cannot know of it
        with engine.begin() as connection:
            definitions = drop_notices(connection)
            assert drop_notices(connection) == []
        submit(engine, "second")
        assert listener.heard(engine) == {}
        with engine.connect() as connection:
            assert check_schema(connection).backlog_is_named

        # and when it is over, then they tell as before
        with engine.begin() as connection:
            tell_again(connection, definitions)
        submit(engine, "third")
        assert set(listener.heard(engine)) == {"backlog", "work"}
