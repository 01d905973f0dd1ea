"""The reservation task: counts how long wide layers have been blocked, reserves hosts for them, and ends reservations.

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
from opencue_sched.domain.hosts import Host, Reservation
from opencue_sched.domain.verdicts import Verdict
from opencue_sched.errors import FencedOff
from opencue_sched.placement.policies import reservations as policy
from opencue_sched.placement.policies.reservations import RunningFrame, WideLayer
from opencue_sched.settings import Settings
from opencue_sched.store import reservations as store
from opencue_sched.store.hosts import fetch_hosts_by_id
from opencue_sched.store.pending import fetch_requirements, fetch_shares, fetch_waiting_work
from opencue_sched.store.schema import SchemaFacts

log = structlog.get_logger(__name__)

_CANDIDATES = 50
"""How many hosts are looked at for a layer that is due a reservation."""


@dataclass(frozen=True, slots=True)
class ReservationReport:
    """What one run of the reservation task did."""

    kept: bool = True
    """False where another process did the same work, so that this run did nothing."""
    granted: Mapping[str, Reservation] = field(default_factory=dict)
    """The new reservations, by host id. Not changed after the run."""
    ended: frozenset[str] = frozenset()
    """The ids of the hosts that are reserved no more."""
    renewed: frozenset[str] = frozenset()
    """The ids of the hosts that stay reserved."""

    @property
    def changed(self) -> frozenset[str]:
        """The ids of the hosts that others should read again."""
        return self.ended | self.granted.keys()

    def summary(self) -> dict[str, object]:
        """The answer of the task: its figures by name."""
        return {"kept": self.kept, **{name: len(getattr(self, name)) for name in ("granted", "renewed", "ended")}}


def keep_reservations(
    engine: Engine,
    settings: Settings,
    facts: SchemaFacts,
    in_use: CoresInUse,
    *,
    role: str = "",
    fence: int | None = None,
) -> ReservationReport:
    """Bring blocked seconds and reservations up to date. With ``queue.reservations`` off, every reservation ends.

    ``fence`` is that of the leader of ``role`` that sent the task. Raises FencedOff, with nothing changed, when a newer
    leader was elected. The caller publishes the hosts that changed.
    """
    with engine.begin() as connection:
        begun = store.begin_task(connection, role)
        if begun is None:
            return ReservationReport(kept=False)
        if fence is not None and (begun.fence or 0) > fence:
            raise FencedOff(f"the leader of fence {fence} was succeeded by that of fence {begun.fence}")
        if not begun.needed:
            return ReservationReport()
        facilities = scoped_facilities(connection, settings)
        reserved = store.reserved_hosts(connection, facilities)
        report = _Run(connection, settings, facts, in_use, facilities, begun.now).run(reserved)
    for host_id, granted in report.granted.items():
        expected = None if granted.free_at is None else round(granted.free_at - begun.now)
        log.info("host_held", host=host_id, layer=granted.layer_id, job=granted.job_id, free_in_seconds=expected)
    for host_id in report.ended:
        log.info("hold_ended", host=host_id)
    return report


@dataclass(slots=True)
class _Run:
    """One run of the task: everything is read, then decided, then written, so that rows are locked briefly."""

    connection: Connection
    settings: Settings
    facts: SchemaFacts
    in_use: CoresInUse
    facilities: Sequence[str] | None
    """The names of the facilities in scope; None: all."""
    now: float
    """The time of the transaction, in epoch seconds of the database's clock."""

    def run(self, reserved: frozenset[str]) -> ReservationReport:
        """Decide and write. ``reserved``: the ids of all hosts in scope with a row of a reservation, counting or
        not."""
        wide = self._wide_layers() if self.settings.queue.reservations else {}
        if not wide:
            store.write_blocked(self.connection, {}, self.facilities)
            ended = store.end_reservations(self.connection, reserved) if reserved else frozenset[str]()
            return ReservationReport(ended=ended)
        block_seconds = self.settings.queue.reservation_block_time
        demands = {layer_id: layer.demand for layer_id, layer in wide.items()}
        # Of the reserved hosts, those that are down, locked or gone are not read here, and their reservations end. A
        # host that is read without a reservation has a row that no longer counts.
        hosts = self._hosts(reserved)
        over = policy.ended(hosts.values(), demands) | (reserved - hosts.keys())
        draining = [host for host_id, host in hosts.items() if host_id not in over]
        may_run = [layer for layer in wide.values() if layer.demand.alloc_ids]
        present = [host.reservation for host in draining if host.reservation is not None]
        due = policy.due_a_host(may_run, present, block_seconds=block_seconds, now=self.now)
        candidates, runs = self._candidates(due, draining)
        granted = policy.grants(due, draining, candidates, runs, now=self.now)
        renewed = self._renewed(draining, demands, runs)

        blocked = {layer_id: (layer.blocked_seconds, layer.demand.frames) for layer_id, layer in wide.items()}
        store.write_blocked(self.connection, blocked, self.facilities)
        ended = store.end_reservations(self.connection, over)
        store.renew_reservations(self.connection, renewed)
        there = store.grant_reservations(self.connection, granted)
        granted = {host_id: reservation for host_id, reservation in granted.items() if host_id in there}
        return ReservationReport(granted=granted, ended=ended, renewed=frozenset(renewed))

    def _wide_layers(self) -> dict[str, WideLayer]:
        """The wide layers that wait, with their blocked seconds now, by id. A layer that a cap keeps waiting reaches no
        host."""
        work = fetch_requirements(self.connection, self.facilities, self.facts)
        # A row of waiting work is one set of requirements that layers of a show have.
        if not (requirements := [row for row in work if row.why != Verdict.QUARANTINED]):
            return {}
        ignored = frozenset(map(normalise_tag, self.settings.scheduler.ignore_tags))
        tags_of = [frozenset(row.tags.split("|")) - ignored - {""} for row in requirements]
        staleness = self.settings.host_cache.host_staleness_threshold
        tags = frozenset[str]().union(*tags_of)
        counts = store.fetch_host_kinds(self.connection, self.facilities, tags, staleness)
        hosts = sorted(self._hosts(counts).values(), key=lambda host: host.total_centicores, reverse=True)

        @cache
        def reached(tags: frozenset[str]) -> Sequence[tuple[Host, int]]:
            return [(host, counts[host.id]) for host in hosts if not host.tags.isdisjoint(tags)]

        shares = fetch_shares(self.connection, {row.pk_show for row in requirements})
        left = cores_left(subscriptions([share for share in shares if share.burst_centicores > 0], self.in_use))
        wide: list[tuple[Row[Any], Demand, int]] = []
        for row, its_tags in zip(requirements, tags_of, strict=True):
            demand = Demand(row.pk_facility, search_of(row, its_tags), frozenset(left[row.pk_show]), 0)
            if count := policy.hosts_of_a_wide_layer(demand, reached(its_tags)):
                wide.append((row, demand, count))
        capped = self._capped([row for row, _, _ in wide])
        found: dict[str, tuple[Demand, int]] = {}
        for row, demand, count in wide:
            allocs = left[row.pk_show]
            open_allocs = frozenset(alloc_id for alloc_id, cores in allocs.items() if cores >= row.least_cores)
            for layer_id in row.layers:
                may_use = frozenset[str]() if layer_id in capped else open_allocs
                found[layer_id] = replace(demand, alloc_ids=may_use), count
        layers = store.fetch_layers(self.connection, found.keys())
        return {layer.pk_layer: self._with_blocked_seconds(layer, *found[layer.pk_layer]) for layer in layers}

    def _capped(self, wide: Sequence[Row[Any]]) -> frozenset[str]:
        """The ids of the layers, out of those with these requirements, that a cap keeps waiting. What runs is summed
        only of the layers' own jobs, unless one is in a folder with a cap, which all jobs of the folder share."""
        if not wide:
            return frozenset()
        job_ids = None if any(row.in_capped_folder for row in wide) else {job_id for row in wide for job_id in row.jobs}
        work = fetch_waiting_work(
            self.connection,
            self.facilities,
            self.facts,
            settle_window_seconds=self.settings.accounting.limit_settle_window_seconds,
            layer_ids=[layer_id for row in wide for layer_id in row.layers],
            job_ids=job_ids,
        )
        return frozenset(layer_id for row in work if row.why != Verdict.BEHIND for layer_id in row.layers)

    def _with_blocked_seconds(self, row: Row[Any], demand: Demand, hosts: int) -> WideLayer:
        """A wide layer from its row, with its blocked seconds as of now; ``hosts`` could ever take a frame of it."""
        blocked_seconds = policy.blocked_after(
            row.blocked_seconds,
            row.elapsed,
            placed=bool(row.placed),
            may_run=bool(demand.alloc_ids),
            block_seconds=self.settings.queue.reservation_block_time,
        )
        demand = replace(demand, frames=row.waiting)
        return WideLayer(row.pk_layer, row.pk_job, row.priority, demand, blocked_seconds, hosts)

    def _hosts(self, ids: Collection[str]) -> dict[str, Host]:
        """The hosts of these ids that may take frames, by id."""
        staleness = self.settings.host_cache.host_staleness_threshold
        hosts = fetch_hosts_by_id(self.connection, sorted(ids), staleness)
        return {host.id: host for host in hosts}

    def _candidates(
        self, due: Sequence[WideLayer], reserved: Sequence[Host]
    ) -> tuple[dict[str, list[Host]], Mapping[str, Sequence[RunningFrame]]]:
        """Hosts that may be reserved for the layers that are ``due`` one, by layer id; and what runs on these and on
        the ``reserved`` hosts, by host id."""
        staleness = self.settings.host_cache.host_staleness_threshold
        wanted = [
            {
                "layer_id": layer.layer_id,
                "facility_id": layer.demand.facility_id,
                "tags": layer.demand.search.tags,
                "alloc_ids": sorted(layer.demand.alloc_ids),
                **asdict(layer.demand.search.need),
            }
            for layer in due
        ]
        found = store.fetch_candidates(self.connection, wanted, staleness, most=_CANDIDATES)
        hosts = self._hosts({host_id for ids in found.values() for host_id in ids})
        runs: defaultdict[str, list[RunningFrame]] = defaultdict(list)
        for row in store.fetch_runs(self.connection, hosts.keys() | {host.id for host in reserved}):
            runs[row.pk_host].append(RunningFrame(row.ends_at, row.centicores, row.memory_kb, row.gpus))
        candidates = {
            layer_id: [hosts[host_id] for host_id in ids if host_id in hosts] for layer_id, ids in found.items()
        }
        return candidates, runs

    def _renewed(
        self, draining: Sequence[Host], demands: Mapping[str, Demand], runs: Mapping[str, Sequence[RunningFrame]]
    ) -> dict[str, Reservation]:
        """The reservations that go on, with a later end, and the time at which the host is expected to be free."""
        renewed = {}
        for host in draining:
            reservation = host.reservation
            if reservation is not None and (need := demands[reservation.layer_id].need_on(host)) is not None:
                free_at = policy.free_at(host, runs.get(host.id, ()), need, self.now)
                until = self.now + policy.RESERVATION_SECONDS
                renewed[host.id] = replace(reservation, until=until, free_at=free_at)
        return renewed
