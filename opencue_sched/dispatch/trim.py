"""What of a plan still holds against the locked rows and today's caps (design 3.6 b)."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from sqlalchemy import Connection

from opencue_sched.accounting import keys
from opencue_sched.accounting.keys import VertexCaps, VertexKind
from opencue_sched.domain.farm import PlannedProc
from opencue_sched.domain.reservation import burst_cap, cores_cap, gpus_cap
from opencue_sched.domain.units import centicores
from opencue_sched.errors import AllocationOverBurst, BookingError, CapChanging, CapExceeded, HostExhausted, HostLocked
from opencue_sched.store.booking import CapRow, LockedHost, read_caps

Lost = tuple[PlannedProc, BookingError]

_INFINITY = float("inf")
_TABLES = {VertexKind.FOLDER: "folder", VertexKind.JOB: "job", VertexKind.LIMIT: "limit"}


def fit_hosts(procs: Iterable[PlannedProc], hosts: Mapping[str, LockedHost]) -> tuple[list[PlannedProc], list[Lost]]:
    """Keep, in plan order, what really fits the locked hosts.

    A host without a lock is locked by another transaction. One that went down, was locked by a person or changed its
    allocation since it was planned takes nothing.
    """
    kept: list[PlannedProc] = []
    lost: list[Lost] = []
    left = {host.id: [host.centicores, host.memory_kb, host.gpus, host.gpu_memory_kb] for host in hosts.values()}
    for proc in procs:
        error = _host_error(proc, hosts.get(proc.host.id))
        if error is not None:
            lost.append((proc, error))
            continue
        wanted = _amounts(proc)
        room = left[proc.host.id]
        if any(want > has for want, has in zip(wanted, room, strict=True)):
            text = f"host {proc.host.name} has (centicores, KB, GPUs, GPU KB) {room} left, not {list(wanted)}"
            lost.append((proc, _at(proc, HostExhausted, text)))
            continue
        left[proc.host.id] = [has - want for want, has in zip(wanted, room, strict=True)]
        kept.append(proc)
    return kept, lost


def _host_error(proc: PlannedProc, host: LockedHost | None) -> BookingError | None:
    name = proc.host.name
    if host is None:
        return _at(proc, HostLocked, f"host {name} is locked by another transaction, or gone")
    if not host.up:
        return _at(proc, HostExhausted, f"host {name} is no longer UP and OPEN")
    if host.alloc_id != proc.vertices.alloc_id:
        return _at(proc, HostExhausted, f"host {name} was moved to another allocation")
    return None


def _amounts(proc: PlannedProc) -> tuple[int, int, int, int]:
    r = proc.reservation
    return centicores(r.cores), r.memory_kb, r.gpus, r.gpu_memory_kb


def _at(proc: PlannedProc, error: type[BookingError], text: str) -> BookingError:
    return error(text, proc_id=proc.proc_id, host=proc.host.name, layer_id=proc.layer.id)


@dataclass(frozen=True, slots=True)
class _CapNow:
    """A vertex's caps in PostgreSQL, in the units of VertexCaps (cores, GPUs, frames); not ``steady`` while another
    transaction changes them."""

    cores: float = _INFINITY
    gpus: float = _INFINITY
    frames: float = _INFINITY
    steady: bool = True


def fit_caps(
    procs: Sequence[PlannedProc], booked_under: Mapping[str, VertexCaps], now: Iterable[CapRow]
) -> tuple[list[PlannedProc], list[Lost], frozenset[str]]:
    """Drop what no longer fits a cap as it is now, and all under one that is being changed.

    Dropped from the end of the plan, and only as much as the counter was over the cap right after the booking, so that
    a lowered cap which still has room stops nothing. Redis may have learnt of the lower cap between the booking and
    the reading of caps and counters, so a cap they agree on is compared too. Also returns the keys of vertices whose
    cap Redis knows higher than it is: it should load those again. A vertex without an entry in ``booked_under`` is not
    compared.
    """
    current = _current(now)
    by_vertex: dict[str, list[PlannedProc]] = defaultdict(list)
    for proc in procs:
        for key in keys.capped(proc.vertices):
            by_vertex[key].append(proc)
    errors: dict[str, BookingError] = {}
    lowered = set()
    for key, members in by_vertex.items():
        caps = booked_under.get(key)
        cap_now = current.get(key, _gone(key))
        if not cap_now.steady:
            for proc in members:
                errors[proc.proc_id] = _at(proc, CapChanging, f"another transaction is changing the cap of {key}")
        if caps is None:
            continue
        if _lower(caps, cap_now):
            lowered.add(key)
        _drop(members, caps, cap_now, errors)
    kept = [proc for proc in procs if proc.proc_id not in errors]
    return kept, [(proc, errors[proc.proc_id]) for proc in procs if proc.proc_id in errors], frozenset(lowered)


def _current(rows: Iterable[CapRow]) -> dict[str, _CapNow]:
    current = {}
    for row in rows:
        if row.kind == VertexKind.SUBSCRIPTION:
            current[keys.subscription(row.id, row.id2 or "")] = _CapNow(burst_cap(row.cores), steady=row.steady)
        elif row.kind == VertexKind.LIMIT:
            current[keys.limit(row.id)] = _CapNow(frames=max(0, row.cores), steady=row.steady)
        else:
            key = keys.folder(row.id) if row.kind == VertexKind.FOLDER else keys.job(row.id)
            cores, gpus = _or_infinity(cores_cap(row.cores)), _or_infinity(gpus_cap(row.gpus))
            current[key] = _CapNow(cores, gpus, steady=row.steady)
    return current


def _gone(key: str) -> _CapNow:
    """What a vertex without a row allows: a deleted subscription nothing; the others have no cap any more."""
    if key.startswith(f"acct:{VertexKind.SUBSCRIPTION}:"):
        return _CapNow(cores=0)
    return _CapNow()


def _lower(caps: VertexCaps, now: _CapNow) -> bool:
    return (
        now.cores < _or_infinity(caps.max_cores)
        or now.gpus < _or_infinity(caps.max_gpus)
        or now.frames < _or_infinity(caps.max_frames) + caps.foreign_frames
    )


def _drop(members: Sequence[PlannedProc], caps: VertexCaps, now: _CapNow, errors: dict[str, BookingError]) -> None:
    """Drop members, last first, until the counter as it was after the booking is within the cap again."""
    over_cores = caps.cores - now.cores
    over_gpus = caps.gpus - now.gpus
    over_frames = caps.frames + caps.foreign_frames - now.frames
    for proc in reversed(members):
        helps = over_cores > 0 or over_frames > 0 or (over_gpus > 0 and proc.reservation.gpus > 0)
        if not helps:
            continue
        if proc.proc_id not in errors:
            errors[proc.proc_id] = _cap_error(proc, caps, now, over_cores=over_cores, over_gpus=over_gpus)
        over_cores -= proc.reservation.cores
        over_gpus -= proc.reservation.gpus
        over_frames -= 1


def _cap_error(
    proc: PlannedProc, caps: VertexCaps, now: _CapNow, *, over_cores: float, over_gpus: float
) -> BookingError:
    if caps.kind is VertexKind.SUBSCRIPTION:
        text = f"the burst was lowered to {now.cores:g} cores while {caps.cores} are booked"
        return _at(proc, AllocationOverBurst, text)
    table, current, limit = _TABLES[caps.kind], float(caps.cores), now.cores
    if caps.kind is VertexKind.LIMIT:
        current, limit = float(caps.frames + caps.foreign_frames), now.frames
    elif over_cores <= 0 < over_gpus:
        table, current, limit = f"{table}_gpus", float(caps.gpus), now.gpus
    return CapExceeded(
        f"the {table} cap was lowered to {limit:g} while {current:g} are booked",
        table=table,
        current=current,
        limit=limit,
        proc_id=proc.proc_id,
        host=proc.host.name,
        layer_id=proc.layer.id,
    )


def _or_infinity(cap: float | None) -> float:
    return _INFINITY if cap is None else cap


def read_current_caps(connection: Connection, procs: Collection[PlannedProc]) -> list[CapRow]:
    """The caps of every vertex of these procs as PostgreSQL has them now, and keeps them until COMMIT."""
    vertices = [proc.vertices for proc in procs]
    return read_caps(
        connection,
        subscriptions=sorted({(v.show_id, v.alloc_id) for v in vertices}),
        folders=sorted({v.folder_id for v in vertices}),
        jobs=sorted({v.job_id for v in vertices}),
        limits=sorted({limit for v in vertices for limit in v.limit_ids}),
    )
