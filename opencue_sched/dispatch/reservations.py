"""The task that keeps the promises to wide frames: who owes how much, who is granted a host, whose hold ends.

One process does it every few seconds, in one transaction of PostgreSQL (store/reservations.py); the rules are those of
placement/policies/reservations.py. It is set-based and can be repeated at any time. docs/architecture.md says where the
process may die, and what holds then.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cache
from typing import Any

import structlog
from sqlalchemy import Connection, Engine, Row

from opencue_sched.dispatch.clusters import scoped_facilities
from opencue_sched.dispatch.headroom import CoresInUse, search_of, subscriptions
from opencue_sched.domain.caps import cores_left
from opencue_sched.domain.clusters import normalise_tag
from opencue_sched.domain.frame_needs import Demand
from opencue_sched.domain.hosts import Hold, Host
from opencue_sched.domain.verdicts import Verdict
from opencue_sched.errors import FencedOff
from opencue_sched.placement.policies import reservations as policy
from opencue_sched.placement.policies.reservations import Asked, RunningFrame
from opencue_sched.settings import Settings
from opencue_sched.store import reservations as store
from opencue_sched.store.hosts import fetch_hosts_by_id
from opencue_sched.store.pending import fetch_shares, fetch_waiting_work
from opencue_sched.store.schema import SchemaFacts

log = structlog.get_logger(__name__)

_CANDIDATES = 50
"""Hosts looked at for a layer that asks."""


@dataclass(frozen=True, slots=True)
class PromiseReport:
    """``kept`` is False where another process was at it. ``granted``: host id -> hold. ``ended`` and ``renewed`` are
    ids of hosts."""

    kept: bool = True
    granted: Mapping[str, Hold] = field(default_factory=dict)
    ended: frozenset[str] = frozenset()
    renewed: frozenset[str] = frozenset()

    @property
    def changed(self) -> frozenset[str]:
        """Hosts that others should read again."""
        return self.ended | self.granted.keys()

    def summary(self) -> dict[str, object]:
        return {"kept": self.kept, **{name: len(getattr(self, name)) for name in ("granted", "renewed", "ended")}}


def keep_promises(
    engine: Engine,
    settings: Settings,
    facts: SchemaFacts,
    in_use: CoresInUse,
    *,
    role: str = "",
    fence: int | None = None,
) -> PromiseReport:
    """Bring debts and holds up to date. With ``queue.reservations`` off, every hold ends.

    ``fence`` is that of the leader of ``role`` that asked for it: raises FencedOff, with nothing changed, when a newer
    one was elected. The caller publishes the hosts that changed.
    """
    with engine.begin() as connection:
        begun = store.begin_duty(connection, role)
        if begun is None:
            return PromiseReport(kept=False)
        if fence is not None and (begun.fence or 0) > fence:
            raise FencedOff(f"the leader of fence {fence} was succeeded by that of fence {begun.fence}")
        if not begun.needed:
            return PromiseReport()
        facilities = scoped_facilities(connection, settings)
        held = store.held_hosts(connection, facilities)
        report = _Duty(connection, settings, facts, in_use, facilities, begun.now).run(held)
    for host_id, hold in report.granted.items():
        expected = None if hold.free_at is None else round(hold.free_at - begun.now)
        log.info("host_held", host=host_id, layer=hold.layer_id, job=hold.job_id, free_in_seconds=expected)
    for host_id in report.ended:
        log.info("hold_ended", host=host_id)
    return report


@dataclass(slots=True)
class _Duty:
    """One turn of the task: everything is read, then decided, then written, so that rows are locked briefly."""

    connection: Connection
    settings: Settings
    facts: SchemaFacts
    in_use: CoresInUse
    facilities: Sequence[str] | None
    now: float

    def run(self, held: frozenset[str]) -> PromiseReport:
        wide = self._wide_layers() if self.settings.queue.reservations else {}
        if not wide:
            store.write_debts(self.connection, {}, self.facilities)
            return PromiseReport(ended=store.end_holds(self.connection, held) if held else frozenset())
        block_seconds = self.settings.queue.reservation_block_time
        demands = {layer_id: it.demand for layer_id, it in wide.items()}
        # A host that is not here is down, locked or gone. One that has no hold here has one that counts no more.
        holders = self._hosts(held)
        ended = policy.ended(holders.values(), demands) | (held - holders.keys())
        kept = [host for host_id, host in holders.items() if host_id not in ended]
        asked = [it for it in wide.values() if it.demand.alloc_ids]
        holds = [host.hold for host in kept if host.hold is not None]
        asking = policy.who_asks(asked, holds, block_seconds=block_seconds, now=self.now)
        candidates, runs = self._candidates(asking, kept)
        granted = policy.grants(asking, kept, candidates, runs, now=self.now)
        renewed = self._renewed(kept, demands, runs)

        debts = {layer_id: (it.debt_seconds, it.demand.frames) for layer_id, it in wide.items()}
        store.write_debts(self.connection, debts, self.facilities)
        gone = store.end_holds(self.connection, ended)
        store.renew_holds(self.connection, renewed)
        there = store.grant_holds(self.connection, granted)
        granted = {host_id: hold for host_id, hold in granted.items() if host_id in there}
        return PromiseReport(granted=granted, ended=gone, renewed=frozenset(renewed))

    def _wide_layers(self) -> dict[str, Asked]:
        """The wide layers that wait, with what they owe now, by id. One that a cap keeps waiting reaches no host."""
        work = fetch_waiting_work(self.connection, self.facilities, self.facts)
        if not (kinds := [kind for kind in work if kind.why != Verdict.QUARANTINED]):
            return {}
        ignored = frozenset(map(normalise_tag, self.settings.scheduler.ignore_tags))
        tags_of = [frozenset(kind.tags.split("|")) - ignored - {""} for kind in kinds]
        staleness = self.settings.host_cache.host_staleness_threshold
        tags = frozenset[str]().union(*tags_of)
        counts = store.fetch_host_kinds(self.connection, self.facilities, tags, staleness)
        hosts = sorted(self._hosts(counts).values(), key=lambda host: host.total_centicores, reverse=True)

        @cache
        def reached(tags: frozenset[str]) -> Sequence[tuple[Host, int]]:
            return [(host, counts[host.id]) for host in hosts if not host.tags.isdisjoint(tags)]

        shares = fetch_shares(self.connection, {kind.pk_show for kind in kinds})
        left = cores_left(subscriptions([it for it in shares if it.burst_centicores > 0], self.in_use))
        found: dict[str, tuple[Demand, int]] = {}
        for kind, its_tags in zip(kinds, tags_of, strict=True):
            allocs = left[kind.pk_show]
            demand = Demand(kind.pk_facility, search_of(kind, its_tags), frozenset(allocs), 0)
            if count := policy.hosts_of_a_wide_layer(demand, reached(its_tags)):
                may_run = kind.why == Verdict.BEHIND
                open_allocs = frozenset(it for it, cores in allocs.items() if may_run and cores >= kind.least_cores)
                found.update(dict.fromkeys(kind.layers, (replace(demand, alloc_ids=open_allocs), count)))
        rows = store.fetch_layers(self.connection, found.keys())
        return {row.pk_layer: self._with_debt(row, *found[row.pk_layer]) for row in rows}

    def _with_debt(self, row: Row[Any], demand: Demand, hosts: int) -> Asked:
        debt_seconds = policy.debt_after(
            row.debt,
            row.elapsed,
            placed=bool(row.placed),
            may_run=bool(demand.alloc_ids),
            block_seconds=self.settings.queue.reservation_block_time,
        )
        demand = replace(demand, frames=row.waiting)
        return Asked(row.pk_layer, row.pk_job, row.priority, demand, debt_seconds, hosts)

    def _hosts(self, ids: Collection[str]) -> dict[str, Host]:
        staleness = self.settings.host_cache.host_staleness_threshold
        hosts = fetch_hosts_by_id(self.connection, sorted(ids), staleness)
        return {host.id: host for host in hosts}

    def _candidates(
        self, asking: Sequence[Asked], kept: Sequence[Host]
    ) -> tuple[dict[str, list[Host]], Mapping[str, Sequence[RunningFrame]]]:
        """The candidates of those that ask, by layer id; and what runs on them and on the hosts held, by host id."""
        staleness = self.settings.host_cache.host_staleness_threshold
        wanted = [
            {
                "layer_id": it.layer_id,
                "facility_id": it.demand.facility_id,
                "tags": it.demand.search.tags,
                "alloc_ids": sorted(it.demand.alloc_ids),
                **asdict(it.demand.search.need),
            }
            for it in asking
        ]
        found = store.fetch_candidates(self.connection, wanted, staleness, most=_CANDIDATES)
        hosts = self._hosts({host_id for ids in found.values() for host_id in ids})
        runs: defaultdict[str, list[RunningFrame]] = defaultdict(list)
        for row in store.fetch_runs(self.connection, hosts.keys() | {host.id for host in kept}):
            runs[row.pk_host].append(RunningFrame(row.ends_at, row.centicores, row.memory_kb, row.gpus))
        return {layer_id: [hosts[it] for it in ids if it in hosts] for layer_id, ids in found.items()}, runs

    def _renewed(
        self, kept: Sequence[Host], demands: Mapping[str, Demand], runs: Mapping[str, Sequence[RunningFrame]]
    ) -> dict[str, Hold]:
        renewed = {}
        for host in kept:
            if host.hold is not None and (need := demands[host.hold.layer_id].need_on(host)) is not None:
                free_at = policy.free_at(host, runs.get(host.id, ()), need, self.now)
                renewed[host.id] = replace(host.hold, until=self.now + policy.HOLD_SECONDS, free_at=free_at)
        return renewed
