"""Games: no frame waits that a scheduler without a memory would place, no host goes to a job while one of a higher
priority would have it, and nothing is booked against a hold except by the backfill rule.

Always the same games, unless OPENCUE_SCHED_TEST_GAMES says how many others are to be played.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from random import Random

import pytest
from sqlalchemy import Engine

from opencue_sched.settings import Rqd, Settings
from tests.kit.passes import Passes, passes

from .farm_game import WINDOW, Game, a_game, covers, process

ANEW = "OPENCUE_SCHED_TEST_GAMES" in os.environ
GAMES = int(os.environ.get("OPENCUE_SCHED_TEST_GAMES", "4"))
HOSTS_AT_FIRST, JOBS_AT_FIRST, ROUNDS = 3, 8, 8
BETWEEN_ROUNDS_SECONDS = 0.1


@pytest.fixture
def here(engine: Engine, settings: Settings) -> Iterator[Passes]:
    queue = settings.queue.model_copy(update={"max_jobs_per_cluster_pass": WINDOW})
    with passes(engine, settings.model_copy(update={"rqd": Rqd(dry_run_mode=True), "queue": queue})) as runner:
        yield runner


def test_nothing_waits_that_could_run_and_nothing_runs_before_what_is_more_urgent(here: Passes, engine: Engine) -> None:
    for number in range(GAMES):
        play(a_game(here, engine, Random(None if ANEW else number)))


def play(game: Game) -> None:
    for _ in range(HOSTS_AT_FIRST):
        game.do_host()
    for _ in range(JOBS_AT_FIRST):
        game.do_job()
    for number in range(ROUNDS):
        game.tell(number)
        before = game.running().keys()
        holds, known = game.holds(), game.layers_with_history()
        game.drain()
        new = [proc for proc in game.running().values() if proc.pk_proc not in before]
        wrong = game.against_holds(holds, known, new)
        assert not wrong, f"against {holds}: {wrong}\n{game.told()}"
        waiting = game.waiting()
        for proc in (proc for proc in new if proc.pk_host not in holds):
            sooner = [layer for layer in waiting if covers(proc, layer)]
            assert not sooner, f"{proc} before {sooner}\n{game.told()}"
        forgetful = process(game.here, "forgetful", game.clock, window=1000)
        report = forgetful.run([game.cluster], alive=lambda: True)[0]
        assert report.frames_booked == 0, f"somebody else books more:\n{report.verdicts}\n{game.told()}"
        game.clock.now += BETWEEN_ROUNDS_SECONDS
        for _ in range(game.chance.choice([1, 1, 2, 3])):
            game.play()
