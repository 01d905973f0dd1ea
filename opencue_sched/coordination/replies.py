"""Run and wait: a job hash that says what became of a request, and a reply queue that wakes the client that waits.

The reply is pushed and given its life in the same call that ends the job hash, so neither can outlive the other; a
reader that comes late, or a reply that another client popped, is covered by the hash.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from typing import Any, cast
from uuid import uuid4

import redis

from opencue_sched.clients.lua_scripts import call_script
from opencue_sched.coordination.keys import job_hash, reply_queue
from opencue_sched.errors import SchedulerError

REPLY_KEPT_SECONDS = 3600
"""How long a reply is kept for a caller, beyond the time that the caller waits."""
_REPLY_BLOCK_SECONDS = 1
"""How long one read waits for a reply before the next."""


def open_job(client: redis.Redis, namespace: str, what: str, *, waits_seconds: float) -> str:
    """Begin a request; returns its job id. The hash lives an hour, or as long as the request waits and an hour."""
    job = uuid4().hex
    key = job_hash(namespace, job)
    fields = {"status": "dispatched", "what": what, "created_at": f"{time.time():.3f}"}
    with client.pipeline(transaction=True) as pipe:
        pipe.hset(key, mapping=cast("dict[Any, Any]", fields))
        pipe.expire(key, REPLY_KEPT_SECONDS + int(waits_seconds))
        pipe.execute()
    return job


def answer_job(
    client: redis.Redis, namespace: str, job: str, output: Mapping[str, object], *, status: str = "done"
) -> bool:
    """Answer a job; False when it was answered before."""
    keys = [reply_queue(namespace, job), job_hash(namespace, job)]
    return bool(call_script(client, "reply_push", keys, [json.dumps(dict(output)), REPLY_KEPT_SECONDS, status]))


def await_reply(client: redis.Redis, namespace: str, job: str, *, timeout_seconds: float) -> dict[str, Any]:
    """The answer to a job. Raises SchedulerError when nobody answered in time; the job hash lives on."""
    deadline = time.monotonic() + timeout_seconds
    queue, key = reply_queue(namespace, job), job_hash(namespace, job)
    while (output := client.hget(key, "output")) is None:
        left = deadline - time.monotonic()
        if left <= 0:
            late = f"no answer to job {job} in {timeout_seconds:g} s"
            raise SchedulerError(f"{late}; is a worker alive? see: opencue-sched fleet")
        client.blpop([queue], timeout=min(_REPLY_BLOCK_SECONDS, max(0.01, left)))  # only wakes: the hash has it too
    client.delete(queue)
    return cast("dict[str, Any]", json.loads(output))
