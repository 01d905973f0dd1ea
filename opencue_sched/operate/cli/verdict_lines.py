"""The last verdicts on a job's layers and the clusters no pass looks at, as far as Redis can be asked for them."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence

import click
import redis

from opencue_sched.coordination.names import BoardKeys, cluster_board
from opencue_sched.coordination.postings import ClusterCooldown, ClusterPostings, TrashedPosting
from opencue_sched.dispatch.verdicts import RecordedVerdict, VerdictLog
from opencue_sched.operate.cli.connect import redis_store
from opencue_sched.operate.explain import most_telling, verdict_words
from opencue_sched.settings import get_settings


def recorded_verdicts(job_id: str) -> Mapping[str, Sequence[RecordedVerdict]]:
    """By layer id. Without Redis there are none, and a note on standard error says so."""
    settings = get_settings()
    try:
        with redis_store() as client:
            return VerdictLog(client, settings.coordination.namespace).of_job(job_id)
    except redis.RedisError as error:
        click.echo(f"note: Redis does not answer ({error}), so the last verdicts are not known", err=True)
        return {}


def held_clusters() -> list[ClusterCooldown | TrashedPosting]:
    """The clusters that are cooled down or in the trash. Without Redis none; ``recorded_verdicts`` has a note of it."""
    settings = get_settings()
    keys = BoardKeys(settings.coordination.namespace, cluster_board(settings.scheduler.facility))
    try:
        with redis_store() as client:
            postings = ClusterPostings(client, keys)
            return [*postings.cooldowns(), *postings.trashed()]
    except redis.RedisError:
        return []


def last_verdicts(job_id: str) -> dict[str, str]:
    """The most telling one of each layer, in words."""
    now = time.time()
    return {
        layer: verdict_words(best, now)
        for layer, recorded in recorded_verdicts(job_id).items()
        if (best := most_telling(recorded)) is not None
    }
