"""``opencue-sched dispatch --wait``: what a script learns from its exit status."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import redis

from opencue_sched.celery import app
from opencue_sched.coordination import replies
from opencue_sched.coordination.board import Update
from opencue_sched.coordination.keys import BoardKeys
from opencue_sched.coordination.postings import ClusterPostings
from opencue_sched.dispatch.clusters import load_clusters
from opencue_sched.dispatch.report import PassEnd
from opencue_sched.embedded.farms.farm import Farm
from opencue_sched.settings import Settings
from tests.kit.command import Cli
from tests.kit.wording import lacks

Build = Callable[[Callable[[Farm], Any]], Any]


@pytest.fixture
def cluster(build: Build, settings: Settings) -> str:
    """Key of the cluster of a job that waits."""

    def made(farm: Farm) -> str:
        farm.host(hostname_tag=False)
        farm.job()
        return next(cluster.key for cluster in load_clusters(farm.connection, settings))

    return str(build(made))


@pytest.fixture
def worker(monkeypatch: pytest.MonkeyPatch, redis_client: redis.Redis) -> Callable[..., None]:
    """Lets what takes the message answer so."""

    def answers(**summary: object) -> None:
        def take(_task: str, *, args: tuple[str], kwargs: dict[str, str], **_: object) -> None:
            assert len(args[0]) == 40
            replies.answer_job(redis_client, "cue", kwargs["reply"], summary)

        monkeypatch.setattr(app, "send_task", take)

    return answers


DONE = (PassEnd.BOOKED, PassEnd.SATURATED, PassEnd.NO_JOBS)


@pytest.mark.parametrize("ended", [*PassEnd, "dropped", "given back", "failed", "something newer"])
@pytest.mark.parametrize("output", [[], ["--json"]])
def test_the_exit_status_says_whether_the_pass_did_its_work(
    cli: Cli, cluster: str, worker: Callable[..., None], ended: str, output: list[str]
) -> None:
    why = {"reason": "held", "owner": "w1"} if ended == "dropped" else {"error": "no such table"}
    worker(cluster=cluster, ended=str(ended), **why)
    ran = cli("dispatch", "--cluster", cluster, "--wait", *output)
    assert ran.status == (0 if ended in DONE else 1)
    assert str(ended) in ran.out
    if ended in DONE:
        assert ran.err == ""
    else:
        assert not lacks(ran.err, "error: ", cluster, ended)
        assert ("held" if ended == "dropped" else "no such table") in ran.err


def test_a_cluster_in_the_trash_is_told_with_the_way_out(cli: Cli, cluster: str, worker: Callable[..., None]) -> None:
    worker(cluster=cluster, ended="dropped", reason="trashed")
    ran = cli("dispatch", "--cluster", cluster, "--wait")
    assert ran.status == 1
    assert f"`opencue-sched board restore {cluster}`" in ran.err


@pytest.fixture
def no_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    """Messages reach a broker, and lie there."""
    monkeypatch.setattr(app, "send_task", lambda *_, **__: None)


@pytest.mark.usefixtures("no_worker")
def test_nobody_answers(cli: Cli, cluster: str) -> None:
    ran = cli("dispatch", "--cluster", cluster, "--wait", "--timeout", "0.1")
    assert (ran.status, ran.out) == (1, "")
    assert "worker" in ran.err


@pytest.mark.usefixtures("no_worker")
def test_without_wait_only_the_message_matters(cli: Cli, cluster: str) -> None:
    ran = cli("dispatch", "--cluster", cluster, "--json")
    assert (ran.status, ran.json["cluster"], ran.json["sent"]) == (0, cluster, True)


@pytest.mark.usefixtures("no_worker")
@pytest.mark.parametrize(("how", "state"), [("trash", "trash"), ("rest", "delayed")])
def test_without_wait_a_cluster_that_no_worker_takes_is_told_of(
    cli: Cli, cluster: str, redis_client: redis.Redis, how: Update, state: str
) -> None:
    assert cli("dispatch", "--cluster", cluster).status == 0
    assert cli("dispatch", "--cluster", cluster).status == 0, "a message is under way"
    postings = ClusterPostings(redis_client, BoardKeys("cue", "clusters"))
    assert postings.update(postings.posted().get(cluster) or "", how, 600_000)[0] == 1
    ran = cli("dispatch", "--cluster", cluster, "--json")
    assert (ran.status, ran.json["state"], ran.json["sent"]) == (0, state, False)


def test_the_statuses_are_told_in_the_help(cli: Cli) -> None:
    shown = " ".join(cli("dispatch", "--help").out.split())
    assert not lacks(shown, "--wait", "booked", "saturated", "no_jobs")
