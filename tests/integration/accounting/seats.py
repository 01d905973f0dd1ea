"""Frames booked on machines under limits that count machines, and one such limit of a small farm in PostgreSQL."""

from __future__ import annotations

import uuid
from typing import Any

from opencue_sched.accounting import keys
from opencue_sched.accounting.caps import load_caps
from opencue_sched.accounting.imported_shows import note_imported
from opencue_sched.accounting.keys import Booking
from opencue_sched.accounting.recompute import follow_layers
from opencue_sched.domain.caps import Vertices
from opencue_sched.store.accounting import managed_show_versions
from tests.kit.counters import Store, booking
from tests.kit.limits import report, set_type
from tests.kit.world import World


def on(machine: str, *limits: str, proc_id: str | None = None, **rest: Any) -> Booking:
    return booking(1, proc_id=proc_id, machine=machine, limit_ids=limits or ("nuke",), **rest)


def book(store: Store, *bookings: Booking) -> list[bool]:
    """Whether each is accepted, in one call."""
    accepted = store.ledger.book(bookings).accepted
    return [it.proc_id in accepted for it in bookings]


def bind(world: World, limit: str) -> None:
    world.sql(
        "INSERT INTO layer_limit (pk_layer_limit, pk_layer, pk_limit_record) VALUES (:id, :layer, :limit)",
        id=f"bound-{limit}"[:36],
        layer=world.job.layers[0].id,
        limit=limit,
    )


def note(world: World) -> None:
    """What runs of the managed shows is in the ledger."""
    with world.engine.begin() as connection:
        note_imported(world.store.client, managed_show_versions(connection))


def become(world: World, limit: str, limit_type: str) -> None:
    with world.engine.begin() as connection:
        set_type(connection, limit, limit_type)


def may_book(world: World, limit: str, *machines: str) -> list[bool]:
    """Whether the limit lets a frame start on each machine, one after the other; what it lets is given back."""
    load_caps(world.engine, world.ledger, [keys.limit(limit)])
    of_limit_alone = Vertices("show", "", "", "", "", "", (limit,))
    asked = [Booking(f"asked-{uuid.uuid4()}", of_limit_alone, 1, machine=machine) for machine in machines]
    accepted = world.ledger.book(asked).accepted
    world.ledger.rollback([it for it in asked if it.proc_id in accepted])
    return [it.proc_id in accepted for it in asked]


def say(world: World, limit: str, *names: str, tokens: int = 1, seconds_ago: float = 0.0) -> None:
    with world.engine.begin() as connection:
        report(connection, limit, *names, tokens=tokens, seconds_ago=seconds_ago)
    load_caps(world.engine, world.ledger, [keys.limit(limit)])
    lacking = world.ledger.limits_lacking_machines([limit])
    follow_layers(world.engine, world.ledger, [world.job.layers[0].id] if lacking else [])
