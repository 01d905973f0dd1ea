"""Entities, such as conductors, that register with a board for a while."""

from __future__ import annotations

from opencue_sched.coordination.jobboard import Entity
from tests.kit.polling import eventually


def test_registered_entities_are_remembered_for_their_life(board):
    board.register_entity(Entity("conductor", "c1", {"host": "a"}))
    board.register_entity(Entity("conductor", "c2"), ttl_seconds=0.05)
    eventually(lambda: len(board.entities()) == 1)
    (left,) = board.entities()
    assert (left.kind, left.name, left.metadata) == ("conductor", "c1", {"host": "a"})
