"""The store as it is at one moment, and what must be true of it."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import redis

from opencue_sched.accounting import keys
from opencue_sched.accounting.keys import Booking, Record, amounts, unpack
from tests.integration.accounting.stepped_seats import make_older

# As JSON: Redis writes it and Python reads it faster than as many answers of the protocol.
_LOOK = """
local found = {}
for i, key in ipairs(ARGV) do
  found[i] = redis.call('HMGET', key, 'int_cores', 'int_gpus', 'int_running', 'caps_at',
                        'ledger_cores', 'ledger_gpus',
                        'burst', 'int_max_cores', 'int_max_gpus', 'int_max_value', 'int_foreign', 'terms')
end
return cjson.encode({redis.call('GET', KEYS[1]), redis.call('HGETALL', KEYS[2]), found})
"""


Amounts = tuple[int, int]


@dataclass(frozen=True)
class Seen:
    """Epoch, ledger, and of each vertex its counters, the version of its caps, and the fields that hold them.

    ``ours``: in a dual store, what the ledger alone accounts for; else the counters.
    """

    epoch: str
    records: dict[str, Record]
    counters: dict[str, Amounts]
    ours: dict[str, Amounts]
    versions: dict[str, int]
    caps: dict[str, list[str | None]]

    @property
    def is_open(self) -> bool:
        return self.epoch.startswith("open|")


def look(client: redis.Redis, vertices: Sequence[str]) -> Seen:
    """Everything, at one moment."""
    epoch, ledger, found = json.loads(str(client.eval(_LOOK, 2, keys.EPOCH, keys.LEDGER, *vertices)))
    counters, ours, versions, caps = {}, {}, {}, {}
    for key, (cores, gpus, running, version, our_cores, our_gpus, *fields) in zip(vertices, found, strict=True):
        counters[key] = int(running or cores or 0), int(gpus or 0)
        ours[key] = int(our_cores or 0), int(our_gpus or 0)
        versions[key] = int((version or "0").rpartition("|")[2])
        caps[key] = fields
    fields = list(ledger)  # an empty table of Lua is an object of JSON
    records = {i: unpack(i, record) for i, record in zip(fields[::2], fields[1::2], strict=True)}
    if not str(epoch or "").endswith("|dual"):
        ours = counters
    ours |= {key: counted for key, counted in counters.items() if key.startswith(keys.LIMIT_PREFIX)}
    return Seen(epoch or "", records, counters, ours, versions, caps)


def sums(entries: Iterable[str]) -> dict[str, Amounts]:
    """Cores (or frames) and GPUs of each vertex."""
    added: dict[str, Amounts] = {}
    for entry in entries:
        for key, cores, gpus in amounts(entry):
            had = added.get(key, (0, 0))
            added[key] = had[0] + cores, had[1] + gpus
    return added


def check_sums(seen: Seen) -> None:
    """Each counter, in a dual store the ledger's own, is the sum of its entries."""
    check_counters(seen.ours, sums(record.entry for record in seen.records.values()), "its entries")


def check_counters(counters: Mapping[str, Amounts], wanted: Mapping[str, Amounts], whose: str) -> None:
    for key, counted in counters.items():
        assert counted == wanted.get(key, (0, 0)), f"{key} counts {counted}, {whose} {wanted.get(key, (0, 0))}"


def differing(seen: Seen, procs: Mapping[str, str]) -> tuple[str, ...]:
    """Records that the proc table does not have so, and procs that the ledger does not have so."""
    ledger_only = [f"entry {i} {r.state} {r.entry}" for i, r in seen.records.items() if procs.get(i) != r.entry]
    entries = {i: record.entry for i, record in seen.records.items()}
    return (*ledger_only, *(f"proc {i} {entry}" for i, entry in procs.items() if entries.get(i) != entry))


def check_room(
    seen: Seen, booking: Booking, used: Mapping[str, Amounts], lacking: Mapping[str, Amounts] | None = None
) -> None:
    """``booking`` was accepted a moment ago: what is ``used`` with it is within its caps, and within what counters
    were ``lacking`` in a dual store."""
    for key in keys.capped(booking.vertices):
        cores, gpus = used.get(key, (0, 0))
        max_cores, max_gpus = _caps(seen, key)
        more_cores, more_gpus = (lacking or {}).get(key, (0, 0))
        max_cores, max_gpus = max_cores + more_cores, max_gpus + more_gpus
        assert cores <= max_cores, f"{cores} at {key}, whose cap is {max_cores:g}: {booking} was accepted"
        fits = gpus <= max_gpus or not booking.gpus
        assert fits, f"{gpus} GPUs at {key}, whose cap is {max_gpus:g}: {booking} was accepted"


def _caps(seen: Seen, key: str) -> tuple[float, float]:
    """Cores (or frames) and GPUs that Redis allows at a vertex."""
    infinity = float("inf")
    *fields, terms = seen.caps[key]
    burst, cores, gpus, value, foreign = (float(field or 0) for field in fields)
    if key.startswith(keys.LIMIT_PREFIX):
        return infinity if terms else value - foreign, infinity  # see stepped_seats.py
    if key.startswith("acct:sub:"):
        return burst, infinity
    return cores if cores > 0 else infinity, gpus if gpus > 0 else infinity


def grow_older(client: redis.Redis, seconds: int) -> None:
    """Redis TIME goes on: every entry was booked so much earlier."""
    ledger = client.hgetall(keys.LEDGER)
    if ledger:
        older = {i: _older(record, seconds) for i, record in ledger.items()}  # type: ignore[union-attr]
        client.hset(keys.LEDGER, mapping=older)
    make_older(client, seconds)


def _older(record: str, seconds: int) -> str:
    version, state, booked_at, rest = record.split("|", 3)
    return f"{version}|{state}|{int(booked_at) - seconds}|{rest}"
