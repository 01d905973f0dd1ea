"""The real ledger under anything that can happen to it: nothing above a cap, sums right, and the truth in the end."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator

import pytest
import redis
import structlog
from hypothesis import HealthCheck, settings
from hypothesis.stateful import run_state_machine_as_test
from sqlalchemy import create_engine, make_url

from opencue_sched.accounting import bootstrap
from opencue_sched.lua_scripts import load_script, lua_directory
from tests.integration.accounting.machine import Accounting, bind
from tests.integration.accounting.stepped_farm import SteppedFarm
from tests.integration.accounting.stepping import Clock, SteppedRedis, step_statements

DEEP = bool(os.environ.get("OPENCUE_SCHED_TEST_DEEP"))
EXAMPLES, STEPS = (1000, 50) if DEEP else (300, 30)


@pytest.fixture
def machine(
    database_url: str, redis_client: redis.Redis, settings_url: str, monkeypatch: pytest.MonkeyPatch
) -> Iterator[type[Accounting]]:
    """The machine on services of its own, with a clock of its own."""
    clock = Clock()
    monkeypatch.setattr(bootstrap, "time", clock)
    engine = create_engine(make_url(database_url).set(drivername="postgresql+psycopg2"), pool_size=20)
    client = SteppedRedis.from_url(settings_url, decode_responses=True)
    farm = SteppedFarm(engine)
    step_statements(engine)
    for script in lua_directory().glob("*.lua"):
        client.script_load(load_script(script.stem).text)
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.CRITICAL))
    try:
        yield bind(farm, client, clock)
    finally:
        structlog.reset_defaults()
        farm.close()
        client.close()
        engine.dispose()


def run(machine: type[Accounting], *, examples: int, steps: int = STEPS, **rest: object) -> None:
    """Play ``examples`` games of ``steps`` steps: the same ones each time, unless it is the deep test."""
    run_state_machine_as_test(  # type: ignore[no-untyped-call]
        machine,
        settings=settings(
            max_examples=examples,
            stateful_step_count=steps,
            deadline=None,
            database=None,
            derandomize=not DEEP,
            print_blob=True,
            suppress_health_check=list(HealthCheck),
            **rest,  # type: ignore[arg-type]
        ),
    )


@pytest.mark.timeout(7200)
def test_the_ledger_holds_whatever_happens(machine: type[Accounting]) -> None:
    run(machine, examples=EXAMPLES)
    print(machine.done)
    assert machine.done["accepted"] > EXAMPLES
