"""A board whose keys share a hash tag, on a Redis Cluster of two nodes."""

from __future__ import annotations

import socket
from collections.abc import Iterator

import pytest
import redis

from opencue_sched.coordination.jobboard import Entity, JobBoard, JobState
from opencue_sched.coordination.keys import BoardKeys
from opencue_sched.embedded.servers.processes import GuardedProcess, free_port
from opencue_sched.embedded.servers.services import bundled_redis
from tests.kit.polling import MOST_SECONDS, eventually

SLOTS = 16384


def ended(nodes: list[GuardedProcess]) -> list[GuardedProcess]:
    return [node for node in nodes if not node.running]


def answers(client: redis.Redis) -> bool:
    try:
        return bool(client.ping())
    except redis.RedisError:
        return False


def port_of_a_node() -> int:
    """A node speaks to the others at its port plus 10,000, which must be free too."""
    return next(port for port in iter(free_port, None) if is_free(port + 10_000))


def is_free(port: int) -> bool:
    with socket.socket() as probe:
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[redis.RedisCluster]:
    nodes, clients, home = [], [], tmp_path_factory.mktemp("cluster")
    for number in range(2):
        directory = home / str(number)
        directory.mkdir()
        port = port_of_a_node()
        options = ["--port", str(port), "--bind", "127.0.0.1", "--cluster-enabled", "yes", "--save", ""]
        command = [bundled_redis(), *options, "--dir", str(directory)]
        nodes.append(GuardedProcess(command, log=home / f"{number}.log", cwd=directory).start())
        clients.append(redis.Redis(port=port, decode_responses=True))
    try:
        eventually(lambda: ended(nodes) or all(answers(client) for client in clients), what="two nodes")
        assert not ended(nodes), [node.log_tail() for node in ended(nodes)]
        clients[0].execute_command("CLUSTER ADDSLOTS", *range(SLOTS // 2))
        clients[1].execute_command("CLUSTER ADDSLOTS", *range(SLOTS // 2, SLOTS))
        clients[0].execute_command("CLUSTER MEET", "127.0.0.1", str(clients[1].get_connection_kwargs()["port"]))
        eventually(
            lambda: all(client.cluster("INFO")["cluster_state"] == "ok" for client in clients), what="a whole cluster"
        )
        with redis.RedisCluster(
            "127.0.0.1", clients[0].get_connection_kwargs()["port"], decode_responses=True
        ) as client:
            yield client
    finally:
        for client in clients:
            client.close()
        for node in nodes:
            node.stop()


def test_a_board_under_one_hash_tag_works_on_either_node(cluster):
    nodes = {
        cluster.keyslot(BoardKeys("cue", name, clustered=True).of("ready")) * 2 // SLOTS: name for name in "abcdefgh"
    }
    assert nodes.keys() == {0, 1}
    for name in nodes.values():
        with JobBoard(cluster, "cue", name=name, clustered=True) as board:
            job = board.post("render", details={"shot": "sh10"})
            assert [found.uuid for found in board.iterjobs(only_unclaimed=True)] == [job.uuid]
            claim = board.claim_next("me", 300)
            assert claim.extend_expiry(1000)
            assert 900 < job.expires_in() <= 1000
            board.consume(claim, "me")
            assert job.state is JobState.COMPLETE
            board.post("later", delay=0.1)
            assert next(board.wait(MOST_SECONDS)).name == "later"
            board.register_entity(Entity("conductor", "c1"))
            assert [entity.name for entity in board.entities()] == ["c1"]
            heard: list[str] = []
            board.notifier.register("POSTED", lambda _, details, heard=heard: heard.append(details["name"]))
            board.post("heard")
            eventually(lambda heard=heard: heard == ["heard"], what="the event")


def test_without_the_hash_tag_a_cluster_refuses(cluster):
    with JobBoard(cluster, "cue") as board, pytest.raises(redis.RedisClusterException, match="same key slot"):
        board.post("render")
