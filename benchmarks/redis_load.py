"""Processes beside a measurement, with an interpreter lock of their own: a steady load of bookings, and a stopwatch."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing import get_context
from multiprocessing.connection import Connection
from time import perf_counter, sleep
from typing import Any

import redis

from benchmarks.script_clock import scripts_timed
from opencue_sched.accounting.keys import Booking
from opencue_sched.accounting.ledger import Ledger
from opencue_sched.domain.caps import Vertices

_PLAN = 50
_SPAWN = get_context("spawn")


@dataclass
class Load:
    """What a load did, known when it has ended."""

    bookings: int = 0
    refused: int = 0
    seconds: float = 0.0

    @property
    def per_second(self) -> float:
        return self.bookings / self.seconds if self.seconds else 0.0


@dataclass
class Stall:
    """How long a PING took: the longest, and the one in a hundred; milliseconds."""

    longest_ms: float = 0.0
    p99_ms: float = 0.0


@contextmanager
def booking_load(url: str, vertices: Vertices, *, per_second: int) -> Iterator[Load]:
    """Bookings that are checked, settled and released at a steady rate meanwhile; PostgreSQL knows nothing of them."""
    load = Load()
    with _beside(_book, url, vertices, per_second) as ended:
        yield load
        load.bookings, load.refused, load.seconds = ended()


@contextmanager
def stopwatch(url: str) -> Iterator[Stall]:
    """A PING every millisecond meanwhile."""
    stall = Stall()
    with _beside(_ping, url) as ended:
        yield stall
        times = sorted(ended())
        stall.longest_ms, stall.p99_ms = times[-1], times[int(len(times) * 0.99)]


@contextmanager
def _beside(work: Callable[..., None], *arguments: Any) -> Iterator[Callable[[], Any]]:
    """``work(pipe, ...)`` in a process; it sends once when it is ready, and once more when it is told to end."""
    mine, theirs = _SPAWN.Pipe()
    process = _SPAWN.Process(target=work, args=(theirs, *arguments))
    process.start()
    theirs.close()  # so that the end of the process is the end of the pipe
    try:
        mine.recv()

        def ended() -> Any:
            mine.send(None)
            return mine.recv()

        yield ended
    finally:
        process.terminate()
        process.join()
        mine.close()


def _book(pipe: Connection, url: str, vertices: Vertices, per_second: int) -> None:
    client = redis.Redis.from_url(url, decode_responses=True)
    ledger = Ledger(client, owner="load")
    ledger.learn_epoch()
    pipe.send(None)
    booked, refused = 0, 0
    began = due = perf_counter()
    with scripts_timed():
        while not pipe.poll():
            plan = [Booking(str(uuid.uuid4()), vertices, 1) for _ in range(_PLAN)]
            answers = ledger.book(plan)
            accepted = [booking for booking in plan if booking.proc_id in answers.accepted]
            ledger.settle(accepted)
            ledger.release([booking.proc_id for booking in accepted])
            booked, refused = booked + len(accepted), refused + len(plan) - len(accepted)
            due += _PLAN / per_second
            sleep(max(0.0, due - perf_counter()))
    pipe.send((booked, refused, perf_counter() - began))


def _ping(pipe: Connection, url: str) -> None:
    client = redis.Redis.from_url(url)
    client.ping()
    pipe.send(None)
    times = []
    while not pipe.poll():
        began = perf_counter()
        client.ping()
        times.append(1000 * (perf_counter() - began))
        sleep(0.001)
    pipe.send(times)
