"""The reservation task: counts how long wide layers have been blocked, reserves hosts for them, and ends reservations.

One process runs the task every few seconds, in one transaction of PostgreSQL (store/reservations.py, ``store`` here).
placement/policies/reservations.py (``policy`` here) has the rules, and says what wide and blocked mean. A run is
set-based and can be repeated at any time. docs/architecture.md says where the process may die, and what holds then.
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
"""How many hosts are looked at for a layer that is due a reservation, at most: all that runs on each is read. With
fewer, a host that would drain sooner may be none of them."""


@dataclass(frozen=True, slots=True)
class ReservationReport:
    """What one run of the reservation task did."""

    kept: bool = True
    """Whether this run did the task. False: another process was in the middle of a run, and this run changed
    nothing."""
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

    ``in_use`` returns the cores in use under subscriptions. ``role`` and ``fence`` are those of the leader that sent
    the task; a ``fence`` of None is not checked. Raises FencedOff, with nothing changed, when a newer leader of the
    role was elected. The caller publishes the hosts that changed.
    """
    with engine.begin() as connection:
        begun = store.begin_task(connection, role)
        if begun is None:
            return ReservationReport(kept=False)
        # The database has no fence of a role that never had a leader.
        if fence is not None and (begun.fence or 0) > fence:
            raise FencedOff(f"the leader of fence {fence} was succeeded by that of fence {begun.fence}")
        if not begun.needed:
            return ReservationReport()
        facilities = scoped_facilities(connection, settings)
        reserved = store.reserved_hosts(connection, facilities)
        report = _Run(connection, settings, facts, in_use, facilities, begun.now).run(reserved)
    for host_id, granted in report.granted.items():
        free_in = None if granted.free_at is None else round(granted.free_at - begun.now)
        log.info("host_held", host=host_id, layer=granted.layer_id, job=granted.job_id, free_in_seconds=free_in)
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
    """The ids of the facilities in scope; None: all."""
    now: float
    """The time of the transaction, in epoch seconds of the database's clock."""

    def run(self, reserved: frozenset[str]) -> ReservationReport:
        """Decide and write. ``reserved``: the ids of all hosts in scope that have a row of a reservation, whether the
        reservation counts or has run out."""
        wide = self._wide_layers() if self.settings.queue.reservations else {}
        if not wide:
            store.write_blocked(self.connection, {}, self.facilities)
            ended = store.end_reservations(self.connection, reserved) if reserved else frozenset[str]()
            return ReservationReport(ended=ended)
        block_seconds = self.settings.queue.reservation_block_time
        demands = {layer_id: layer.demand for layer_id, layer in wide.items()}
        # Reserved hosts that are down, locked or gone are not read here, and their reservations end. A host that is
        # read without a reservation has a row that no longer counts.
        hosts = self._hosts(reserved)
        to_end = policy.ended(hosts.values(), demands) | (reserved - hosts.keys())
        draining = [host for host_id, host in hosts.items() if host_id not in to_end]
        runnable = [layer for layer in wide.values() if layer.demand.alloc_ids]
        present = [host.reservation for host in draining if host.reservation is not None]
        due = policy.due_a_host(runnable, present, block_seconds=block_seconds, now=self.now)
        candidates, runs = self._candidates(due, draining)
        granted = policy.grants(due, draining, candidates, runs, now=self.now)
        renewed = self._renewed(draining, demands, runs)

        blocked = {layer_id: (layer.blocked_seconds, layer.demand.frames) for layer_id, layer in wide.items()}
        store.write_blocked(self.connection, blocked, self.facilities)
        ended = store.end_reservations(self.connection, to_end)
        store.renew_reservations(self.connection, renewed)
        written = store.grant_reservations(self.connection, granted)
        granted = {host_id: reservation for host_id, reservation in granted.items() if host_id in written}
        return ReservationReport(granted=granted, ended=ended, renewed=frozenset(renewed))

    def _wide_layers(self) -> dict[str, WideLayer]:
        """The wide layers that wait, with their blocked seconds now, by id. The demand of a layer that a cap keeps
        waiting has no allocation, so that no host is reserved for it."""
        work = fetch_requirements(self.connection, self.facilities, self.facts)
        # A row of waiting work is one set of requirements that layers of a show have.
        if not (requirements := [row for row in work if row.why != Verdict.QUARANTINED]):
            return {}
        ignored = frozenset(map(normalise_tag, self.settings.scheduler.ignore_tags))
        tags_of = [frozenset(row.tags.split("|")) - ignored - {""} for row in requirements]
        staleness = self.settings.host_cache.host_staleness_threshold
        tags = frozenset[str]().union(*tags_of)
        # One host stands for all that are like it: how many these are, by its id.
        alike = store.fetch_host_kinds(self.connection, self.facilities, tags, staleness)
        hosts = sorted(self._hosts(alike).values(), key=lambda host: host.total_centicores, reverse=True)

        @cache
        def kinds_with(any_of: frozenset[str]) -> Sequence[tuple[Host, int]]:
            return [(host, alike[host.id]) for host in hosts if not host.tags.isdisjoint(any_of)]

        shares = fetch_shares(self.connection, {row.pk_show for row in requirements})
        left = cores_left(subscriptions([share for share in shares if share.burst_centicores > 0], self.in_use))
        wide: list[tuple[Row[Any], Demand, int]] = []
        for row, row_tags in zip(requirements, tags_of, strict=True):
            # How many frames wait does not decide whether a layer is wide: that is read below, layer by layer.
            demand = Demand(row.pk_facility, search_of(row, row_tags), frozenset(left[row.pk_show]), frames=0)
            if able := policy.hosts_of_a_wide_layer(demand, kinds_with(row_tags)):
                wide.append((row, demand, able))
        capped = self._capped([row for row, _, _ in wide])
        demands: dict[str, Demand] = {}
        hosts_able: dict[str, int] = {}
        for row, demand, able in wide:
            allocs = left[row.pk_show]
            open_allocs = frozenset(alloc_id for alloc_id, cores in allocs.items() if cores >= row.least_cores)
            for layer_id in row.layers:
                may_use = frozenset[str]() if layer_id in capped else open_allocs
                demands[layer_id] = replace(demand, alloc_ids=may_use)
                hosts_able[layer_id] = able
        return {
            layer.pk_layer: self._with_blocked_seconds(layer, demands[layer.pk_layer], hosts_able[layer.pk_layer])
            for layer in store.fetch_layers(self.connection, demands.keys())
        }

    def _capped(self, wide: Sequence[Row[Any]]) -> frozenset[str]:
        """The ids of the layers, out of those with these requirements, that a cap keeps waiting.

        What runs is summed of the layers' own jobs only. With a layer in a folder with a cap, which all jobs of the
        folder share, it is summed of all jobs.
        """
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
        # Work that nothing keeps waiting but other work before it is BEHIND.
        return frozenset(layer_id for row in work if row.why != Verdict.BEHIND for layer_id in row.layers)

    def _with_blocked_seconds(self, row: Row[Any], demand: Demand, hosts: int) -> WideLayer:
        """A wide layer from its row, with its blocked seconds as of now. ``hosts``: how many could ever take one of its
        frames."""
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
        self, due: Sequence[WideLayer], draining: Sequence[Host]
    ) -> tuple[dict[str, list[Host]], Mapping[str, Sequence[RunningFrame]]]:
        """Hosts that may be reserved for the layers that are ``due`` one, by layer id; and what runs on these and on
        the ``draining`` hosts, by host id."""
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
        for row in store.fetch_runs(self.connection, hosts.keys() | {host.id for host in draining}):
            runs[row.pk_host].append(RunningFrame(row.ends_at, row.centicores, row.memory_kb, row.gpus))
        candidates = {
            layer_id: [hosts[host_id] for host_id in ids if host_id in hosts] for layer_id, ids in found.items()
        }
        return candidates, runs

    def _renewed(
        self, draining: Sequence[Host], demands: Mapping[str, Demand], runs: Mapping[str, Sequence[RunningFrame]]
    ) -> dict[str, Reservation]:
        """The reservations of these hosts with a later end, and with the time at which the host is expected to be free,
        by host id."""
        renewed = {}
        # Each of these hosts has a reservation, and can take its layer's frames: policy.ended has left out the others.
        for host in draining:
            reservation = host.reservation
            if reservation is not None and (need := demands[reservation.layer_id].need_on(host)) is not None:
                free_at = policy.free_at(host, runs.get(host.id, ()), need, self.now)
                until = self.now + policy.RESERVATION_SECONDS
                renewed[host.id] = replace(reservation, until=until, free_at=free_at)
        return renewed
