"""``python -m benchmarks accounting``: what exact accounting costs. Ratios are the point; absolute figures drift."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import click
import redis
import structlog
from pydantic import SecretStr
from sqlalchemy import Engine

from benchmarks.booking_cost import BOUND, booking_cost, booking_rates
from benchmarks.figures import Spread, columns, console, show, show_list, write_json
from benchmarks.recompute_cost import LONGEST_SCRIPT_MS, recompute_costs
from benchmarks.script_cost import script_costs
from benchmarks.trigger_cost import trigger_costs
from opencue_sched.clients.postgres import make_engine
from opencue_sched.embedded.servers.services import PROGRAM_VARIABLE, EmbeddedPostgres, EmbeddedRedis
from opencue_sched.settings import Settings
from opencue_sched.store import schema

PARTS = ("booking", "scripts", "recompute", "triggers")
_PROCS_DELETED = 10_000


@contextmanager
def _database(url: str | None = None) -> Iterator[tuple[Engine, Settings]]:
    with ExitStack() as stack:
        if url is None:
            url = stack.enter_context(EmbeddedPostgres()).url
        settings = Settings(database_url=SecretStr(url))
        schema.upgrade(settings.sqlalchemy_url)
        engine = make_engine(settings)
        stack.callback(engine.dispose)
        yield engine, settings


def _first_on_the_processor(client: redis.Redis) -> bool:
    """Let Redis run before everything else here, as on a machine of its own; False where the system does not allow it.

    Times by the clock are then those for which it runs, and seldom those for which others were let before it.
    """
    server: Any = client.info("server")
    try:
        os.setpriority(os.PRIO_PROCESS, server["process_id"], -20)
    except PermissionError:
        return False
    return True


def _tell_of_the_allocator(client: redis.Redis) -> None:
    """The wheel's Redis is built with libc's, others with jemalloc."""
    memory: Any = client.info("memory")
    if memory["mem_allocator"] == "libc":
        console.print(
            "this Redis was built with libc's allocator: when much was freed in the background, the next call may have "
            f"to tidy up for milliseconds. {PROGRAM_VARIABLE} names another, such as redis-server of a distribution"
        )


@click.command()
@click.option("--part", "parts", multiple=True, type=click.Choice(PARTS), default=PARTS, show_default=True)
@click.option("--procs", multiple=True, type=int, default=(10_000,), show_default=True, help="Sizes of ledgers.")
@click.option("--rounds", default=5, show_default=True, help="Rounds of each measurement.")
@click.option("--database-url", help="triggers: a database (empty, or a new Cuebot's) instead of one from a wheel.")
@click.option("--redis-first/--redis-as-others", default=True, show_default=True, help="Redis's turn on the processor.")
@click.option("--json", "json_path", type=click.Path(path_type=Path), help="Also write the figures here.")
def main(
    parts: tuple[str, ...],
    procs: tuple[int, ...],
    rounds: int,
    database_url: str | None,
    redis_first: bool,
    json_path: Path | None,
) -> None:
    """The cost of a ledgered booking, of scripts, of a recompute, and of our triggers. Medians, least and greatest.

    Exit status 1 if a booking costs more than 1.5 times the reference's, a cycle of the recompute was skipped, or a
    script took more than 10 ms of Redis's processor time in its largest call or, beside a recompute, in the longest
    call of a round, by the median of the rounds.

    Example: python -m benchmarks accounting --procs 10000 --procs 100000
    """
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.ERROR))
    figures: dict[str, Any] = {}
    passed = True
    with EmbeddedRedis() as server:
        client = redis.Redis.from_url(server.url, decode_responses=True)
        if redis_first and not _first_on_the_processor(client):
            console.print("Redis has to wait for the processor like the others: times by the clock contain that")
        _tell_of_the_allocator(client)
        if "booking" in parts:
            booking = booking_cost(client, rounds=rounds)
            figures["booking"] = columns(booking)
            figures["bookings"] = columns(booking_rates(client, server.url, rounds=min(rounds, 3)))
            ratio = booking[0].ratio_by_server_time
            passed &= isinstance(ratio, Spread) and ratio.median <= BOUND
        if "scripts" in parts:
            scripts = script_costs(client, procs)
            figures["scripts"] = columns(scripts)
            passed &= all(cost.milliseconds.greatest <= LONGEST_SCRIPT_MS for cost in scripts)
        if "recompute" in parts:
            costs = []
            for count in procs:
                console.print(f"recompute of {count} procs")
                with _database() as (engine, _):
                    costs += recompute_costs(engine, client, server.url, count, rounds=rounds)
            figures["recompute"] = columns(costs)
            passed &= all(cost.passed for cost in costs)
        client.close()
    if "triggers" in parts:
        with _database(database_url) as (engine, settings):
            figures["triggers"] = columns(trigger_costs(engine, settings, procs=_PROCS_DELETED, rounds=rounds))
    for title, rows in figures.items():
        (show_list if title == "scripts" else show)(rows, title)
    write_json(json_path, figures)
    if not passed:
        sys.exit(1)


if __name__ == "__main__":
    main()
