"""The board under kills and pauses, and at size."""

from __future__ import annotations

import os
import signal
import sys
import textwrap
from collections import Counter
from pathlib import Path

import pytest

from benchmarks.warm_start import Started
from opencue_sched.coordination.jobboard import ClaimLost, JobBoard
from opencue_sched.coordination.keys import BoardKeys
from tests.kit.polling import eventually, tail_of

ROOT = Path(__file__).resolve().parents[2]

CLAIMANT = """
    import sys
    import redis
    from opencue_sched.coordination.jobboard import JobFailure, NotFound
    from opencue_sched.coordination.jobboard import JobBoard

    client = redis.Redis.from_url(sys.argv[1], decode_responses=True)
    with JobBoard(client, "cue", name="chaos", claim_ttl=0.3) as board:
        print("ready", flush=True)
        number = 0
        while True:
            number += 1
            board.post("more", delay=0.05 if number % 3 == 0 else 0.0)
            job = board.claim_next(sys.argv[2])
            if job is None:
                continue
            try:
                if number % 7 == 0:
                    board.trash(job, sys.argv[2], "odd")
                elif number % 5 == 0:
                    board.abandon(job, sys.argv[2])
                else:
                    board.consume(job, sys.argv[2])
            except (JobFailure, NotFound):
                pass
"""


@pytest.fixture
def start_script(redis_server, tmp_path):
    """Starts a Python script of this test with the URL of Redis and a name; returns when it prints a line."""
    started: list[Started] = []

    def start(source: str, name: str) -> Started:
        said = tmp_path / f"{name}.out"
        command = [sys.executable, "-c", textwrap.dedent(source), redis_server.url, name]
        with said.open("wb") as out:
            process = Started(command, env=os.environ, cwd=ROOT, stdout=out, stderr=out)
        started.append(process)
        eventually(lambda: said.read_text().startswith("ready\n"), 30, "the script's start", told=tail_of(said))
        return process

    yield start
    for process in started:
        process.kill()
        process.wait()


def places(client, keys: BoardKeys) -> Counter:
    """How often each job is in one of the places a job can be in."""
    found: Counter = Counter()
    for part in ("ready", "delayed", "claimed", "trash"):
        found.update(client.zrange(keys.of(part), 0, -1))
    return found


def test_killed_at_any_moment_each_job_is_in_exactly_one_place(redis_client, start_script):
    keys = BoardKeys("cue", "chaos")
    for generation in range(4):
        processes = [start_script(CLAIMANT, f"w{generation}-{number}") for number in range(2)]
        enough = 300 * (generation + 1)
        eventually(lambda enough=enough: int(redis_client.get(keys.of("seq")) or 0) > enough, 60)
        for process in processes:
            assert process.poll() is None, "a claimant ended by itself"
            process.kill()
            process.wait()
        where = places(redis_client, keys)
        hashes = {key.removeprefix(keys.job("")) for key in redis_client.scan_iter(f"{keys.job('')}*", count=1000)}
        assert set(where) == hashes
        assert set(where.values()) == {1}
        listed = set(redis_client.zrange(keys.of("listed"), 0, -1))
        assert listed == hashes - set(redis_client.zrange(keys.of("trash"), 0, -1))
    with JobBoard(redis_client, "cue", name="chaos") as board:
        eventually(lambda: board.counts().claimed == 0)
        assert board.claim_next("survivor") is not None


SLEEPER = """
    import sys
    import redis
    from opencue_sched.coordination.jobboard import JobFailure
    from opencue_sched.coordination.jobboard import JobBoard

    client = redis.Redis.from_url(sys.argv[1], decode_responses=True)
    with JobBoard(client, "cue", name="chaos") as board:
        job = board.claim_next("me", 60)
        print("ready", flush=True)
        while True:
            try:
                job.extend_expiry(60)
            except JobFailure as error:
                client.set("refusal", type(error).__name__)
                sys.exit()
"""


def test_an_owner_paused_past_its_claim_writes_nothing_afterwards(redis_client, start_script):
    """SIGSTOP past the claim's life, another of the same name claims, SIGCONT."""
    with JobBoard(redis_client, "cue", name="chaos") as board:
        job = board.post("render")
        owner = start_script(SLEEPER, "me")
        eventually(lambda: board.find_owner(job) == "me")
        os.kill(owner.pid, signal.SIGSTOP)
        keys = BoardKeys("cue", "chaos")
        redis_client.hset(keys.job(job.uuid), "expires", 1)
        redis_client.zadd(keys.of("claimed"), {job.uuid: 1}, xx=True)
        successor = eventually(lambda: board.claim_next("me", 600))
        os.kill(owner.pid, signal.SIGCONT)
        assert owner.wait(60) == 0
        assert redis_client.get("refusal") == ClaimLost.__name__
        assert job.expires_in() > 500
        assert board.find_owner(job) == "me"
        board.consume(successor, "me")
