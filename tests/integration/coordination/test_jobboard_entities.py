"""Entities, such as conductors, that register with a board for a while."""

from __future__ import annotations

from itertools import count

import redis

from opencue_sched.coordination.jobboard import Entity, JobBoard
from tests.kit.polling import eventually


def test_registered_entities_are_remembered_for_their_life(board):
    board.register_entity(Entity("conductor", "c1", {"host": "a"}))
    board.register_entity(Entity("conductor", "c2"), ttl_seconds=0.05)
    eventually(lambda: len(board.entities()) == 1)
    (left,) = board.entities()
    assert (left.kind, left.name, left.metadata) == ("conductor", "c1", {"host": "a"})


def test_entities_are_listed_by_kind_and_name(board):
    entities = [Entity(kind, name) for kind in ("a", "a b", "z", "ä") for name in ("1", "1 2", "z", "ä")]
    for entity in reversed(entities):
        board.register_entity(entity)
    assert board.entities() == entities


def test_an_entity_that_registers_again_while_another_looks_stays_listed(board, redis_server, monkeypatch):
    conductor = Entity("conductor", "c1")
    with (
        redis.Redis.from_url(redis_server.url, decode_responses=True) as client,
        JobBoard(client, "cue", name="tests", clustered=board.keys.clustered) as looked_at,
    ):
        commands: list[str] = []
        execute = client.execute_command

        def execute_and_let_it_register(*args, **options):
            answer = execute(*args, **options)
            commands.append(args[0])
            if len(commands) == step:
                board.register_entity(conductor)
            return answer

        monkeypatch.setattr(client, "execute_command", execute_and_let_it_register)
        for step in count(1):
            # given an entity whose registration is over
            board.register_entity(conductor, ttl_seconds=0.001)
            eventually(lambda: not board.client.exists(board.keys.entity("conductor", "c1")))
            # when it registers after one of the commands of who looks, each in turn
            commands.clear()
            looked_at.entities()
            if len(commands) < step:
                break
            # then it is there
            assert board.entities() == [conductor], f"after {commands[step - 1]} of {commands}"
    assert step > 1
