"""``opencue-sched dispatch``."""

from __future__ import annotations

import click
import redis

from opencue_sched.cli.inputs import checked_redis, database
from opencue_sched.cli.output import json_option, show_json, working
from opencue_sched.coordination import control
from opencue_sched.coordination.names import BoardKeys, cluster_board, worker_group
from opencue_sched.coordination.postings import ClusterPostings, Enqueued
from opencue_sched.coordination.queues import Router
from opencue_sched.dispatch.clusters import load_clusters
from opencue_sched.dispatch.report import PassEnd
from opencue_sched.domain.cluster import Cluster
from opencue_sched.errors import InvalidInput, SchedulerError
from opencue_sched.settings import Settings, get_settings
from opencue_sched.worker.task import Messenger


@click.command("dispatch")
@click.option("--cluster", "key", required=True, help="Key of the cluster, as `opencue-sched board list` shows it.")
@click.option("--wait", is_flag=True, help="Wait for the end of the pass and print what it did.")
@click.option("--timeout", default=30.0, show_default=True, help="Seconds to wait.")
@json_option
def command(key: str, wait: bool, timeout: float, as_json: bool) -> None:
    """Have one cluster dispatched now, even if it rests.

    Exit status with --wait: 0 when the pass did its work (booked, saturated or no_jobs); 1 when it did not, or nobody
    answered in time, with the reason on standard error. Without: 0 once the cluster is up for a worker to take; 1 when
    it is in the trash, cooled down or was told to rest.

    Example: opencue-sched dispatch --cluster alloc-0f3a9c1d2b4e5f60 --wait
    """
    settings = get_settings()
    with checked_redis() as client:
        answer = _dispatch(client, settings, _cluster(settings, key), timeout if wait else None)
    if as_json:
        show_json(answer)
    else:
        click.echo(", ".join(f"{name} {value}" for name, value in answer.items() if value not in ("", None)))
    if wait and answer.get("ended") not in [end.value for end in PassEnd if end.did_its_work]:
        reason = answer.get("error") or answer.get("reason") or "see the log of the workers"
        raise SchedulerError(f"the pass over {key} did not do its work: {answer.get('ended')} ({reason})")


def _cluster(settings: Settings, key: str) -> Cluster:
    with database() as engine, engine.connect() as connection:
        clusters = {cluster.key: cluster for cluster in load_clusters(connection, settings)}
    if key not in clusters:
        raise InvalidInput(f"no cluster {key!r} among {len(clusters)}; see: opencue-sched board list")
    return clusters[key]


def _check_takeable(postings: ClusterPostings, enqueued: Enqueued) -> None:
    """Raise SchedulerError for a cluster that no worker takes now, though it was woken."""
    job = postings.job(enqueued.uuid)
    state = "" if job is None else job.fields["state"]
    key = enqueued.cluster.key
    if state == "trash":
        raise SchedulerError(f"{key} is in the trash; to take it out: opencue-sched board restore {key}")
    if state == "delayed" and job is not None and int(job.fields["failures"]) > 0:
        why = job.fields.get("reason", "")
        end = f"to try at once: opencue-sched ctl sleep --cluster {key} --for 0"
        raise SchedulerError(f"{key} is cooled down, because its passes fail ({why}); {end}")
    if state == "delayed":
        raise SchedulerError(f"{key} was told to rest; to end that: opencue-sched ctl sleep --cluster {key} --for 0")


def _dispatch(client: redis.Redis, settings: Settings, cluster: Cluster, timeout: float | None) -> dict[str, object]:
    from opencue_sched.celery import app

    namespace, facility = settings.coordination.namespace, settings.scheduler.facility
    postings = ClusterPostings(client, BoardKeys(namespace, cluster_board(facility)))
    group = worker_group(facility, settings.coordination.group)
    router = Router(client, namespace, group, fixed=facility is not None)
    messenger = Messenger(app, router, legacy_queues=settings.coordination.legacy_queues)
    (enqueued,) = postings.enqueue([cluster], wake=True)
    if timeout is None:
        if enqueued.send:
            messenger.send(enqueued)
        else:
            _check_takeable(postings, enqueued)
        return {"cluster": cluster.key, "posting": enqueued.uuid, "sent": enqueued.send}
    job = control.open_job(client, namespace, f"dispatch {cluster.key}", waits_seconds=timeout)
    messenger.ask(enqueued.uuid, reply=job)
    try:
        with working(f"waiting for a pass over {cluster.key}"):
            return control.await_reply(client, namespace, job, timeout_seconds=timeout)
    except control.NoReply as error:
        raise SchedulerError(f"{error}; is a worker alive? see: opencue-sched fleet") from error
