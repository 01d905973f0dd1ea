"""Answers of Redis that are lost on their way: the client calls again, and the board must not take that for another."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from opencue_sched.coordination.board import NEVER
from opencue_sched.coordination.jobboard import JobBoard
from opencue_sched.coordination.names import BoardKeys
from opencue_sched.coordination.postings import Claim, ClusterPostings
from opencue_sched.domain.cluster import Cluster, ClusterKind

CLUSTER = Cluster("fac", "show", ClusterKind.ALLOC, ("general",), "alloc")


@pytest.fixture
def board(proxied) -> Iterator[JobBoard]:
    with JobBoard(proxied, "cue") as board:
        yield board
        assert board._scripts.counts().trash == 0


def test_a_worker_has_the_claim_whose_answer_was_lost(proxy, proxied):
    postings = ClusterPostings(proxied, BoardKeys("cue", "clusters"))
    (offered,) = postings.offer([CLUSTER])
    postings.end(postings.claim(offered.uuid, "w0", ttl_seconds=10), "abandon")
    (again,) = postings.offer([CLUSTER])
    proxy.lose("EVALSHA")
    claim = postings.try_claim(offered.uuid, "w1", ttl_seconds=10, ticket=again.ticket)
    assert proxy.lost == 1
    assert isinstance(claim, Claim), claim
    assert claim.fence == 2
    assert postings.extend([claim], ttl_seconds=10) == [claim]
    assert postings.try_claim(offered.uuid, "w1", ttl_seconds=10).owner == "w1", "another call is another claim"
    assert postings.end(claim, "again") > 0


def test_the_next_job_is_claimed_once_though_the_answer_was_lost(proxy, board):
    """A second job claimed for ever by a caller who does not know of it would never be done."""
    first, second = board.post("first"), board.post("second")
    board.abandon(board.claim_next("me"), "me")
    proxy.lose("EVALSHA")
    job = board.claim_next("me", NEVER)
    assert proxy.lost == 1
    assert job.uuid == first.uuid
    assert [found.uuid for found in board.iterjobs(only_unclaimed=True)] == [second.uuid]
    board.consume(job, "me")
    assert board.claim_next("me").uuid == second.uuid


def test_a_job_is_claimed_though_the_answer_was_lost(proxy, board):
    job = board.post("render")
    board.abandon(board.claim(job, "me"), "me")
    proxy.lose("EVALSHA")
    board.consume(board.claim(job, "me"), "me")
    assert proxy.lost == 1


def test_a_job_is_posted_once_though_the_answer_was_lost(proxy, board):
    board.post("warm")
    proxy.lose("EVALSHA")
    job = board.post("render")
    assert proxy.lost == 1
    assert board.job_count == 2
    assert job.sequence == 2


def test_a_post_made_again_leaves_alone_a_job_that_was_claimed_meanwhile(board):
    """The same call of the script twice, and a claim in between."""
    arguments = ("0" * 32, "render", "", '{"v": 1, "details": {}}', 2, 0)
    assert board._scripts.call("board_post", *arguments)[0] == 1
    claim = board.claim_next("me")
    assert board._scripts.call("board_post", *arguments)[0] == 1
    assert (board.job_count, board.find_owner(claim)) == (1, "me")
    board.consume(claim, "me")
