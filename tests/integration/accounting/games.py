"""Games of the model-based test: the machine on services of its own, and how many games are played."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from unittest.mock import patch

import structlog
from hypothesis import HealthCheck, Phase, seed, settings
from hypothesis.stateful import run_state_machine_as_test
from sqlalchemy import create_engine, make_url

from opencue_sched.accounting import bootstrap, recompute
from opencue_sched.clients.lua_scripts import load_script, lua_directory
from opencue_sched.clients.postgres import OURS
from tests.integration.accounting.machine import Accounting, bind
from tests.integration.accounting.stepped_disk import SteppedDisk
from tests.integration.accounting.stepped_farm import SteppedFarm
from tests.integration.accounting.stepping import Clock, SteppedRedis, step_statements

DEEP_STEPS, DEEP_STEPS_PER_GAME, _DEEP_BATCH = 50_000, 50, 40

GENERATED = (Phase.generate,)
"""Games as they come, none made smaller."""


@contextmanager
def machine_on(database_url: str, redis_url: str) -> Iterator[type[Accounting]]:
    """The machine, on an empty database with our schema and a Redis, with a clock of its own."""
    clock = Clock()
    url = make_url(database_url).set(drivername="postgresql+psycopg2")
    engine = create_engine(url.update_query_dict({"application_name": f"{OURS}-game"}), pool_size=20)
    client = SteppedRedis.from_url(redis_url, decode_responses=True)
    step_statements(engine)  # first: what the disk changes of a statement, it changes when the actor goes on
    farm, disk = SteppedFarm(engine), SteppedDisk(engine, clock)
    for script in lua_directory().glob("*.lua"):
        client.script_load(load_script(script.stem).text)
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.CRITICAL))
    try:
        # Also the recompute of a show that is handed over: marks of two clocks are no ages.
        marks = patch.dict(recompute.recompute.__kwdefaults__, {"clock": clock.monotonic})
        with patch.object(bootstrap, "time", clock), marks:
            yield bind(farm, disk, client, clock)
    finally:
        structlog.reset_defaults()
        disk.close()
        farm.close()
        client.close()
        engine.dispose()


def play(machine: type[Accounting], *, games: int, steps: int, number: int, **rest: object) -> None:
    """Play as many steps as are in that many games of so many: always the same ones for the same ``number``.

    Hypothesis ends some of its games after a step or two. Others are played for them.
    """
    wanted = machine.done["steps"] + games * steps
    while (left := wanted - machine.done["steps"]) > 0:
        examples = -(-left // steps)
        _play(seed(number)(machine), max_examples=examples, stateful_step_count=steps, derandomize=True, **rest)
        number += 1000


def play_deep(machine: type[Accounting]) -> None:
    """Play random games and say how far they are. A failure prints the game, smaller, and how to play it again."""
    while machine.done["steps"] < DEEP_STEPS:
        _play(machine, max_examples=_DEEP_BATCH, stateful_step_count=DEEP_STEPS_PER_GAME, print_blob=True)
        print(", ".join(f"{count} {what}" for what, count in machine.done.items()), flush=True)


def _play(machine: type[Accounting], **how: object) -> None:
    checks = list(HealthCheck)
    how_played = settings(deadline=None, database=None, suppress_health_check=checks, **how)  # type: ignore[arg-type]
    run_state_machine_as_test(machine, settings=how_played)
