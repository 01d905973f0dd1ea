"""What a plan may still take under every cap, as it fills.

Caps are those of the snapshot; the ledger and the commit check them again. Cores of subscriptions, folders and jobs,
GPUs of folders and jobs, one running frame under each limit of a layer (design section 9: every limit must have
headroom). Subscriptions have no GPU cap (facts D), and an allocation without a subscription may not be booked.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from opencue_sched.domain.cluster import Verdict
from opencue_sched.domain.farm import Caps, Headroom, Job, Layer, Reservation, Snapshot
from opencue_sched.domain.reservation import Need

_UNLIMITED = Caps(cores=Headroom(None, 0), gpus=Headroom(None, 0))
_NO_LIMIT = Headroom(None, 0)


@dataclass(frozen=True, slots=True)
class OverCap:
    """A cap with too little left for the next frame. ``detail`` is one sentence for an operator."""

    verdict: Verdict
    detail: str


class PlanHeadroom:
    """Mutable headroom of one plan."""

    def __init__(self, snapshot: Snapshot, limit_names: Mapping[str, str]) -> None:
        self._snapshot = snapshot
        self._limit_names = limit_names
        self._allocs = {alloc_id: caps.cores.left for alloc_id, caps in snapshot.subscriptions.items()}
        self._folder_cores: dict[str, float] = {}
        self._folder_gpus: dict[str, float] = {}
        self._job_cores: dict[str, float] = {}
        self._job_gpus: dict[str, float] = {}
        for job in snapshot.jobs:
            folder = snapshot.folders.get(job.folder_id, _UNLIMITED)
            self._folder_cores[job.folder_id] = folder.cores.left
            self._folder_gpus[job.folder_id] = folder.gpus.left
            caps = snapshot.job_caps.get(job.id, _UNLIMITED)
            self._job_cores[job.id] = caps.cores.left
            self._job_gpus[job.id] = caps.gpus.left
        self._limits = {limit_id: limit.left for limit_id, limit in snapshot.limits.items()}

    def open_allocs(self, cores: int) -> frozenset[str]:
        """The allocations whose subscription still has this many cores."""
        return frozenset(alloc_id for alloc_id, left in self._allocs.items() if left >= cores)

    def cores_left(self, job: Job, alloc_id: str) -> float:
        """Cores a frame of the job may take on a host of the allocation: the least of all its caps."""
        return min(
            self._allocs.get(alloc_id, 0.0),
            self._folder_cores[job.folder_id],
            self._job_cores[job.id],
        )

    def over_cap(self, job: Job, layer: Layer, need: Need) -> OverCap | None:
        """The cap that no frame of the layer can pass any more, on whatever host; None if each has headroom for one.

        ``need.cores`` is the normalised minimum, so zero and negative minimums do not slip past (facts I).
        """
        if not self.open_allocs(need.cores):
            return self._over_subscriptions(need.cores)
        if self._folder_cores[job.folder_id] < need.cores:
            return self._over_folder(job, need.cores)
        if self._job_cores[job.id] < need.cores:
            return self._over_job(job, need.cores)
        if need.gpus > self._folder_gpus[job.folder_id]:
            left = _amount(self._folder_gpus[job.folder_id])
            detail = f"a frame needs {need.gpus} GPUs, the job's folder has {left} left"
            return OverCap(Verdict.OVER_FOLDER_GPUS, detail)
        if need.gpus > self._job_gpus[job.id]:
            left = _amount(self._job_gpus[job.id])
            return OverCap(Verdict.OVER_JOB_GPUS, f"a frame needs {need.gpus} GPUs, its job has {left} left")
        for limit_id in layer.limit_ids:
            if self._limits.get(limit_id, 1.0) < 1:
                cap = self._snapshot.limits.get(limit_id, _NO_LIMIT).cap
                name = self._limit_names.get(limit_id, limit_id)
                return OverCap(Verdict.OVER_LIMIT, f"all {_amount(cap or 0)} of limit {name} are in use")
        return None

    def frames_left(self, job: Job, layer: Layer, need: Need) -> float:
        """How many more frames the GPU caps and limits allow; cores are counted as they are reserved."""
        left = min((self._limits.get(limit_id, math.inf) for limit_id in layer.limit_ids), default=math.inf)
        if need.gpus:
            left = min(left, min(self._folder_gpus[job.folder_id], self._job_gpus[job.id]) / need.gpus)
        return left if left == math.inf else math.floor(left)

    def binding(self, job: Job, alloc_id: str, cores: float) -> OverCap:
        """The cap that kept a frame of ``cores`` off a host of the allocation, when ``cores_left`` was too little."""
        left = self.cores_left(job, alloc_id)
        if self._allocs.get(alloc_id, 0.0) <= left:
            return self.closed_alloc(alloc_id, cores)
        if self._folder_cores[job.folder_id] <= left:
            return self._over_folder(job, cores)
        return self._over_job(job, cores)

    def take(self, job: Job, layer: Layer, alloc_id: str, taken: Reservation) -> None:
        """Count a planned frame under every cap."""
        self._allocs[alloc_id] -= taken.cores
        self._folder_cores[job.folder_id] -= taken.cores
        self._job_cores[job.id] -= taken.cores
        if taken.gpus:
            self._folder_gpus[job.folder_id] -= taken.gpus
            self._job_gpus[job.id] -= taken.gpus
        for limit_id in layer.limit_ids:
            if limit_id in self._limits:
                self._limits[limit_id] -= 1

    def closed_alloc(self, alloc_id: str, cores: float) -> OverCap:
        """The verdict when a host would do, but its allocation has no headroom for a frame of ``cores``."""
        if alloc_id not in self._allocs:
            return OverCap(Verdict.OVER_SUBSCRIPTION, "the show has no subscription to the allocation of its hosts")
        left = _amount(self._allocs[alloc_id])
        detail = f"a frame needs {_amount(cores)} cores, the subscription has {left} left under its burst"
        return OverCap(Verdict.OVER_SUBSCRIPTION, detail)

    def _over_subscriptions(self, cores: float) -> OverCap:
        if not self._allocs:
            return OverCap(Verdict.OVER_SUBSCRIPTION, "the show has no subscription here")
        most = _amount(max(self._allocs.values()))
        detail = f"a frame needs {_amount(cores)} cores, the subscriptions have at most {most} left under their burst"
        return OverCap(Verdict.OVER_SUBSCRIPTION, detail)

    def _over_folder(self, job: Job, cores: float) -> OverCap:
        left = _amount(self._folder_cores[job.folder_id])
        return OverCap(Verdict.OVER_FOLDER, f"a frame needs {_amount(cores)} cores, the job's folder has {left} left")

    def _over_job(self, job: Job, cores: float) -> OverCap:
        left = _amount(self._job_cores[job.id])
        return OverCap(Verdict.OVER_JOB, f"a frame needs {_amount(cores)} cores, its job has {left} left")


def _amount(value: float) -> str:
    return f"{value:g}"
