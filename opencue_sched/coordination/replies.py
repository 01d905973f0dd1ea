"""Run and wait: a job hash that says what became of a request, and a reply queue that wakes the client that waits.

The reply is pushed and given its life in the same call that ends the job hash, so neither can outlive the other; a
reader that comes late, or a reply that another client popped, is covered by the hash.
"""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Callable, Mapping
from typing import Any, cast

import redis

from opencue_sched.coordination.names import job_hash, reply_queue
from opencue_sched.lua_scripts import call_script

KEPT_SECONDS = 3600
_BLOCK_SECONDS = 1


class NoReply(Exception):
    """Nobody answered in time; the job hash goes on to exist until its life ends."""


def open_job(client: redis.Redis, namespace: str, what: str, *, waits_seconds: float) -> str:
    """Begin a request; returns its job id. The hash lives an hour, or as long as the request waits and an hour."""
    job = uuid.uuid4().hex
    key = job_hash(namespace, job)
    fields = {"status": "dispatched", "what": what, "created_at": f"{time.time():.3f}"}
    with client.pipeline(transaction=True) as pipe:
        pipe.hset(key, mapping=cast("dict[Any, Any]", fields))
        pipe.expire(key, KEPT_SECONDS + int(waits_seconds))
        pipe.execute()
    return job


def is_waiting(client: redis.Redis, namespace: str, job: str) -> bool:
    """Whether a job was opened and neither answered nor given up."""
    status = client.hget(job_hash(namespace, job), "status")
    return status == "dispatched"


def answer(
    client: redis.Redis, namespace: str, job: str, output: Mapping[str, object], *, status: str = "done"
) -> bool:
    """Answer a job; False when it was answered before."""
    keys = [reply_queue(namespace, job), job_hash(namespace, job)]
    return bool(call_script(client, "reply_push", keys, [json.dumps(dict(output)), KEPT_SECONDS, status]))


def await_reply(
    client: redis.Redis,
    namespace: str,
    job: str,
    *,
    timeout_seconds: float,
    clock: Callable[[], float] = time.monotonic,
) -> dict[str, Any]:
    """The answer to a job. Raises NoReply; then the job counts as given up."""
    deadline = clock() + timeout_seconds
    queue, key = reply_queue(namespace, job), job_hash(namespace, job)
    while True:
        output = client.hget(key, "output")
        if output is not None:
            client.delete(queue)
            return cast("dict[str, Any]", json.loads(output))
        left = deadline - clock()
        if left <= 0:
            client.hset(key, "status", "given up")
            raise NoReply(f"no answer to job {job} in {timeout_seconds:g} s")
        popped = client.blpop([queue], timeout=min(_BLOCK_SECONDS, max(0.01, left)))
        if popped is not None:
            return cast("dict[str, Any]", json.loads(popped[1]))
