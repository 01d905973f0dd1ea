"""Control messages: what is understood, and what is refused with a reason."""

from __future__ import annotations

import pytest

from opencue_sched.coordination.control import Command, ControlMessage, addressees
from opencue_sched.coordination.names import QueueName
from opencue_sched.coordination.presence import Actor, Members
from opencue_sched.errors import InvalidInput


@pytest.mark.parametrize(
    "message",
    [ControlMessage(command) for command in Command if command is not Command.SLEEP]
    + [ControlMessage(Command.SLEEP, "alloc-1", 60.0)],
)
def test_what_is_written_is_read_back(message):
    assert ControlMessage.decode(message.encode()) == message


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("pause", "not JSON"),
        ("[]", "an object with a command"),
        ('{"command": 3}', "an object with a command"),
        ('{"command": "dance"}', "use stop, drain, pause, resume, sleep"),
        ('{"command": "sleep"}', "needs the key"),
        ('{"command": "sleep", "cluster": "c", "seconds": true}', "needs the key"),
        ('{"command": "sleep", "cluster": "c", "seconds": -1}', "finite"),
        ('{"command": "sleep", "cluster": "c", "seconds": Infinity}', "finite"),
    ],
)
def test_nonsense_is_refused_with_a_reason(text, reason):
    with pytest.raises(InvalidInput, match=reason):
        ControlMessage.decode(text)


def test_a_queue_speaks_to_its_type_group_or_instance():
    members = Members(
        (
            Actor("dispatch", "a", "1"),
            Actor("dispatch", "a", "2"),
            Actor("dispatch", "b", "1"),
            Actor("sweep", "a", "3"),
        ),
        (),
    )

    def names(*place: str) -> list[str]:
        queue = QueueName("cue", "dispatch", *place, family="ctl")
        return [f"{actor.group}{actor.instance}" for actor in addressees(members, queue)]

    assert names() == ["a1", "a2", "b1"]
    assert names("a") == ["a1", "a2"]
    assert names("a", "2") == ["a2"]
    assert names("c") == []


def test_a_fleet_of_a_facility_is_spoken_to_by_its_group_only():
    members = Members((Actor("dispatch", "alpha", "1", facility="alpha"), Actor("dispatch", "a", "2")), ())

    def instances(group: str | None) -> list[str]:
        return [actor.instance for actor in addressees(members, QueueName("cue", "dispatch", group, family="ctl"))]

    assert instances(None) == ["2"]
    assert instances("alpha") == ["1"]
