"""The guardrail on the release feed."""

from __future__ import annotations

import pytest
from sqlalchemy import Engine, text

from opencue_sched.accounting.show_handover import check_release_feed
from opencue_sched.embedded.farms.farm import Farm


@pytest.fixture
def shows(engine: Engine) -> dict[str, str]:
    with engine.begin() as connection:
        farm = Farm(connection)
        return {
            "ours": farm.show("ours").id,
            "theirs": farm.show("theirs", managed=False).id,
            "resting": farm.show("resting", active=False).id,
        }


@pytest.mark.parametrize(
    ("feed", "misconfigured"),
    [("proc-trigger", False), ("cuebot-redis", False), ("recompute-only", True)],
)
def test_a_feed_that_cannot_deliver_releases_is_told(
    engine: Engine, shows: dict[str, str], feed: str, misconfigured: bool
) -> None:
    found, message = check_release_feed(engine, feed)
    assert found is misconfigured
    assert message.startswith("2 ")


def test_a_missing_trigger_is_told_with_what_to_do(engine: Engine, shows: dict[str, str]) -> None:
    with engine.begin() as connection:
        connection.execute(text("DROP TRIGGER opencue_sched_proc_released ON proc"))
    misconfigured, message = check_release_feed(engine, "proc-trigger")
    assert misconfigured
    assert "opencue-sched migrate" in message
    assert not check_release_feed(engine, "cuebot-redis")[0]


def test_without_managed_shows_nothing_is_wrong(engine: Engine) -> None:
    assert not check_release_feed(engine, "recompute-only")[0]
