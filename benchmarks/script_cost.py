"""The largest call of each accounting script: how much processor time of Redis it takes, so how long all others wait.

By the processor's clock rather than the wall's, so that it means something on a busy machine too. The input is the
worst that calls are cut for: procs that share no vertex with one another.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import redis

from benchmarks.figures import Spread
from opencue_sched.accounting import keys
from opencue_sched.accounting import ledger as scripts
from opencue_sched.accounting.bootstrap import server_run_id
from opencue_sched.accounting.epoch import Epoch
from opencue_sched.accounting.keys import Booking, unpack
from opencue_sched.accounting.ledger import Change
from opencue_sched.clients.lua_scripts import ScriptCall, call_scripts
from opencue_sched.domain.caps import Vertices

PROCS, FRAMES_A_JOB = 2000, 100
_FIELDS_OF_CAPS = 6


@dataclass(frozen=True)
class ScriptCost:
    """``calls`` worked through PROCS procs, or as many vertices; ``milliseconds`` of the processor by a full one.

    Full calls are alike, so the greatest of many is what else Redis or the machine did meanwhile.
    """

    phase: str
    calls: int
    arguments: int
    milliseconds: Spread


def script_costs(client: redis.Redis, sizes: Sequence[int]) -> list[ScriptCost]:
    """Each script in both kinds of store, dearest first; and whole ledgers of these sizes, filled and released."""
    costs = []
    for dual in (False, True):
        epoch = _opened(client, dual=dual)
        costs += [_cost(client, f"{name}, dual" if dual else name, calls) for name, calls in _work(client, epoch)]
    for procs in sizes:
        epoch = _opened(client, dual=False)
        costs += [_cost(client, f"{procs} procs: {name}", calls) for name, calls in _whole(epoch, procs)]
    return sorted(costs, key=lambda cost: -cost.milliseconds.median)


def _opened(client: redis.Redis, *, dual: bool) -> Epoch:
    client.flushdb()
    epoch = Epoch.new(server_run_id(client), dual=dual)
    client.set(keys.EPOCH, epoch.text)
    return epoch


def _cost(client: redis.Redis, phase: str, calls: Sequence[ScriptCall]) -> ScriptCost:
    idle = sorted(_spent(client, []) for _ in range(50))[25]
    took = [1000 * max(0.0, _spent(client, [call]) - idle) for call in calls]
    largest = max(len(call.args) for call in calls)
    full = [ms for ms, call in zip(took, calls, strict=True) if len(call.args) == largest]
    return ScriptCost(phase, len(calls), largest, Spread.of(full))


def _spent(client: redis.Redis, calls: Sequence[ScriptCall]) -> float:
    """Seconds of the processor that Redis took for these calls, and for saying so."""
    before = _processor(client)
    answers, _ = call_scripts(client, calls) if calls else ([], [])
    assert all(int(answer[0]) == 1 for answer in answers)
    return _processor(client) - before


def _processor(client: redis.Redis) -> float:
    used: Any = client.info("cpu")
    return float(used["used_cpu_user"]) + float(used["used_cpu_sys"])


def _vertices() -> Vertices:
    return Vertices(_id(), _id(), _id(), _id(), _id(), _id())


def _work(client: redis.Redis, epoch: Epoch) -> Iterator[tuple[str, list[ScriptCall]]]:
    """The calls of each script, made when those before them have been carried out."""
    booked = [Booking(_id(), _vertices(), 2) for _ in range(PROCS)]
    added = [Change(it.proc_id, None, it.packed()) for it in booked]
    yield "reconcile, adding", scripts.reconcile_calls(epoch.text, added, "benchmark")
    there = [Booking(it.proc_id, _vertices(), 2) for it in booked]
    yield "reconcile, moving", scripts.reconcile_calls(epoch.text, _changes(client, there), "benchmark")
    yield "reconcile, removing", scripts.reconcile_calls(epoch.text, _changes(client, []), "benchmark")
    yield "settle, of lost entries", scripts.settle_calls(epoch.text, booked, "benchmark")
    yield "settle", scripts.settle_calls(epoch.text, booked, "benchmark")
    yield "release", scripts.id_calls("release", [it.proc_id for it in booked], epoch.text)
    vertices = [key for it in booked for key in keys.counted(it.vertices)][:PROCS]
    caps = ["int_max_cores", "1"] * _FIELDS_OF_CAPS
    yield "caps", scripts.caps_calls(epoch.text, "server|1", [(key, caps) for key in vertices])
    yield "inventory", scripts.id_calls("inventory", vertices, epoch.text)
    seq = int(str(client.get(keys.SEQ)))
    yield "adjust", scripts.adjust_calls(epoch.text, "benchmark", [(key, 1, 0) for key in vertices])
    yield "foreign", scripts.id_calls("foreign", vertices, epoch.text, "before", 0)
    seq = int(str(client.get(keys.SEQ)))
    yield "reseed_cas", scripts.reseed_cas_calls(epoch.text, seq, [(key, 0, 0) for key in vertices])
    yield "free", scripts.id_calls("free", vertices, epoch.text, "idle")


def _whole(epoch: Epoch, procs: int) -> Iterator[tuple[str, list[ScriptCall]]]:
    """The procs of a show whose jobs have FRAMES_A_JOB frames each."""
    show, alloc, folder, dept = (_id() for _ in range(4))
    jobs = [Vertices(show, alloc, folder, _id(), _id(), dept) for _ in range(-(-procs // FRAMES_A_JOB))]
    booked = [Booking(_id(), jobs[i // FRAMES_A_JOB], 2) for i in range(procs)]
    added = [Change(it.proc_id, None, it.packed()) for it in booked]
    yield "reconcile, adding", scripts.reconcile_calls(epoch.text, added, "benchmark")
    yield "release", scripts.id_calls("release", [it.proc_id for it in booked], epoch.text)


def _changes(client: redis.Redis, wanted: Sequence[Booking]) -> list[Change]:
    """What gives the procs of the ledger these entries, or none."""
    entries = {it.proc_id: it.packed() for it in wanted}
    ledger: Any = client.hgetall(keys.LEDGER)
    records = [unpack(proc_id, text) for proc_id, text in ledger.items()]
    return [Change(it.proc_id, it.changed_seq, entries.get(it.proc_id)) for it in records]


def _id() -> str:
    return str(uuid.uuid4())
