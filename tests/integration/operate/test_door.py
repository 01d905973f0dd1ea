"""What every task does first, called as a worker calls it."""

from __future__ import annotations

import importlib
import json
from collections.abc import Iterator

import pytest
from celery import Celery
from redis import Redis

import celeryconfig
from opencue_sched.celery import app as real_app
from opencue_sched.coordination.dead_letters import read_dead_letters
from opencue_sched.operate.runtime import Runtime
from opencue_sched.settings import Settings

DISPATCH = "opencue_sched.dispatch.dispatch_cluster"
SWEEP = "opencue_sched.sweep.sweep_clusters"


@pytest.fixture(autouse=True)
def runtime(settings: Settings, redis_client: Redis, monkeypatch: pytest.MonkeyPatch) -> Iterator[Runtime]:
    for name in celeryconfig.imports:
        importlib.import_module(name)
    app = Celery("door", broker="memory://", set_as_current=False)
    made = Runtime(settings, app)
    monkeypatch.setattr("opencue_sched.operate.runtime.runtime", lambda: made)
    yield made
    made.close()
    app.close()


@pytest.mark.parametrize(
    ("task", "args", "kwargs", "words"),
    [
        (DISPATCH, [], {}, "missing a required argument: 'posting'"),
        (DISPATCH, ["one", "two", "three", "four"], {}, "too many positional arguments"),
        (DISPATCH, ["one"], {"surprise": 1}, "unexpected keyword argument 'surprise'"),
        (SWEEP, [[], 17], {}, "too many positional arguments"),
    ],
)
def test_a_message_without_the_arguments_of_its_task_is_put_aside(redis_client, task, args, kwargs, words):
    """Its sender is no version of ours; nobody else will look at the logs of one worker."""
    assert real_app.tasks[task](*args, **kwargs) == {"dropped": "malformed"}
    (letter,) = read_dead_letters(redis_client, "cue")
    assert words in letter.reason
    assert letter.reason.startswith(f"{task}: ")
    assert json.loads(letter.body) == [args, kwargs]
