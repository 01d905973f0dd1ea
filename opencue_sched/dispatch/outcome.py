"""What becomes of a plan's verdicts when not all of it is booked.

The planner says why frames wait before anybody was asked. The ledger may refuse what the snapshot had room for, because
its counters are ahead or its caps are older, and the commit loses what others took meanwhile.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace

from opencue_sched.accounting.ledger import Refused
from opencue_sched.domain.errors import BookingError
from opencue_sched.domain.farm import Host, PlannedProc
from opencue_sched.domain.verdicts import LayerVerdict, Verdict
from opencue_sched.placement.planner import Plan

_BY_TABLE = {
    "subscription": Verdict.OVER_SUBSCRIPTION,
    "folder": Verdict.OVER_FOLDER,
    "folder_gpus": Verdict.OVER_FOLDER_GPUS,
    "job": Verdict.OVER_JOB,
    "job_gpus": Verdict.OVER_JOB_GPUS,
    "limit": Verdict.OVER_LIMIT,
    "unseeded": Verdict.FAILED,
    "error": Verdict.FAILED,
}


@dataclass(frozen=True, slots=True)
class Booked:
    """Verdicts after a booking. ``refused`` are the layers of which the ledger refused frames, ``lost`` those of which
    every frame that it took went to somebody else before the commit."""

    verdicts: tuple[LayerVerdict, ...]
    refused: frozenset[str]
    lost: frozenset[str]


def after_booking(
    verdicts: Iterable[LayerVerdict],
    procs: Iterable[PlannedProc],
    refusals: Mapping[str, Refused],
    losses: Mapping[str, BookingError],
) -> Booked:
    """Take from each verdict the frames that were refused or lost, both by proc id, and say why they wait."""
    refused: dict[str, list[Refused]] = {}
    lost: dict[str, list[BookingError]] = {}
    for proc in procs:
        if proc.proc_id in refusals:
            refused.setdefault(proc.layer.id, []).append(refusals[proc.proc_id])
        elif proc.proc_id in losses:
            lost.setdefault(proc.layer.id, []).append(losses[proc.proc_id])
    judged = tuple(
        _judged(verdict, refused.get(verdict.layer_id, ()), lost.get(verdict.layer_id, ())) for verdict in verdicts
    )
    return Booked(
        judged,
        frozenset(refused),
        frozenset(it.layer_id for it in judged if it.layer_id in lost and it.layer_id not in refused and not it.frames),
    )


def after_refusals(plan: Plan, apart: Mapping[tuple[str, str], str]) -> tuple[LayerVerdict, ...]:
    """The verdicts of a plan, in RQD's words where the only hosts left are kept ``apart`` from a layer: its id
    and the host's name -> what was said."""
    said: dict[str, dict[str, str]] = {}
    for (layer, host), words in apart.items():
        said.setdefault(layer, {})[host] = words
    blocked = {it.verdict.layer_id for it in plan.blocked}
    return tuple(
        replace(it, verdict=Verdict.BACKING_OFF, detail=_said(said[it.layer_id]))
        if it.verdict is Verdict.CAPACITY and it.layer_id in said.keys() - blocked
        else it
        for it in plan.verdicts
    )


def _said(words: Mapping[str, str]) -> str:
    hosts = "1 host" if len(words) == 1 else f"{len(words)} hosts"
    return f"{hosts} refused its frames and will be tried again: {next(iter(words.values()))}"


def given_back(procs: Iterable[PlannedProc], kept: Collection[str]) -> tuple[Host, ...]:
    """The hosts of those procs of a plan, in its order, that are not ``kept`` (by id), as they are without them."""
    hosts: dict[str, Host] = {}
    some_back = set()
    for proc in procs:
        host = hosts.setdefault(proc.host.id, proc.host)
        if proc.proc_id in kept:
            hosts[host.id] = host.less(proc.reservation, last_updated=host.last_updated)
        else:
            some_back.add(host.id)
    return tuple(host for host in hosts.values() if host.id in some_back)


def _judged(
    verdict: LayerVerdict, refused: list[Refused] | tuple[()], lost: list[BookingError] | tuple[()]
) -> LayerVerdict:
    gone = len(refused) + len(lost)
    if not gone:
        return verdict
    left = replace(verdict, frames=verdict.frames - gone, waiting=verdict.waiting + gone)
    if refused:
        last = refused[-1]
        return replace(left, verdict=_BY_TABLE.get(last.table, Verdict.FLOWING), detail=_refusal(last))
    reasons = ", ".join(sorted(Counter(error.reason for error in lost)))
    return replace(left, detail=f"{gone} of its frames were lost before they were booked ({reasons}); tried again")


def _refusal(refused: Refused) -> str:
    if refused.table == "unseeded":
        return f"PostgreSQL has no row with the caps of {refused.vertex}"
    if refused.table == "error":
        return f"its counters in Redis are spoilt, and put right by the next recompute: {refused.vertex}"
    if refused.table not in _BY_TABLE:
        return "its booking was taken back before it was made; tried again"
    of = refused.table.removesuffix("_gpus")
    return f"the counters have {refused.current:g} of {refused.limit:g} in use under the cap of its {of}"
