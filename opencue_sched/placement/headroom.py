"""What a plan may still take under every cap, as it fills.

Caps are those of the snapshot; the ledger and the commit check them again. Cores of subscriptions, folders and jobs,
GPUs of folders and jobs, one running frame under each limit of a layer (design section 9: every limit must have
headroom). Subscriptions have no GPU cap (facts D), and an allocation without a subscription may not be booked.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from opencue_sched.domain.cluster import Verdict
from opencue_sched.domain.farm import Job, Layer, Reservation, Snapshot
from opencue_sched.domain.reservation import Need


@dataclass(frozen=True, slots=True)
class OverCap:
    """A cap with too little left for the next frame. ``detail`` is one sentence for an operator."""

    verdict: Verdict
    detail: str


class PlanHeadroom:
    """Mutable headroom of one plan. A folder, job or limit that the snapshot has no cap of is unlimited."""

    def __init__(self, snapshot: Snapshot) -> None:
        self._snapshot = snapshot
        self._allocs = {alloc_id: caps.cores.left for alloc_id, caps in snapshot.subscriptions.items()}
        self._folder_cores = {folder_id: caps.cores.left for folder_id, caps in snapshot.folders.items()}
        self._folder_gpus = {folder_id: caps.gpus.left for folder_id, caps in snapshot.folders.items()}
        self._job_cores = {job_id: caps.cores.left for job_id, caps in snapshot.job_caps.items()}
        self._job_gpus = {job_id: caps.gpus.left for job_id, caps in snapshot.job_caps.items()}
        self._limits = {limit_id: limit.left for limit_id, limit in snapshot.limits.items()}

    def open_allocs(self, cores: int) -> frozenset[str]:
        """The allocations whose subscription still has this many cores."""
        return frozenset(alloc_id for alloc_id, left in self._allocs.items() if left >= cores)

    def cores_left(self, job: Job, alloc_id: str) -> float:
        """Cores a frame of the job may take on a host of the allocation: the least of all its caps."""
        return min(
            self._allocs.get(alloc_id, 0.0),
            self._folder_cores.get(job.folder_id, math.inf),
            self._job_cores.get(job.id, math.inf),
        )

    def over_cap(self, job: Job, layer: Layer, need: Need) -> OverCap | None:
        """The cap that no frame of the layer can pass any more, on whatever host; None if each has headroom for one.

        ``need.cores`` is the normalised minimum, so zero and negative minimums do not slip past (facts I).
        """
        if not self.open_allocs(need.cores):
            return self._over_subscriptions(need.cores)
        for verdict, whose, left, needed, what in (
            (Verdict.OVER_FOLDER, "the job's folder", self._folder_cores.get(job.folder_id), need.cores, "cores"),
            (Verdict.OVER_JOB, "its job", self._job_cores.get(job.id), need.cores, "cores"),
            (Verdict.OVER_FOLDER_GPUS, "the job's folder", self._folder_gpus.get(job.folder_id), need.gpus, "GPUs"),
            (Verdict.OVER_JOB_GPUS, "its job", self._job_gpus.get(job.id), need.gpus, "GPUs"),
        ):
            if left is not None and needed > left:
                return OverCap(verdict, f"a frame needs {needed} {what}, {whose} has {left:g} left")
        for limit_id in layer.limit_ids:
            if self._limits.get(limit_id, 1.0) < 1:
                limit = self._snapshot.limits[limit_id]
                detail = f"all {limit.cap or 0:g} of limit {limit.name or limit_id} are in use"
                return OverCap(Verdict.OVER_LIMIT, detail)
        return None

    def frames_left(self, job: Job, layer: Layer, need: Need) -> float:
        """How many more frames the GPU caps and limits allow; cores are counted as they are reserved."""
        left = min((self._limits.get(limit_id, math.inf) for limit_id in layer.limit_ids), default=math.inf)
        if need.gpus:
            folder, own = self._folder_gpus.get(job.folder_id, math.inf), self._job_gpus.get(job.id, math.inf)
            left = min(left, min(folder, own) / need.gpus)
        return left if left == math.inf else math.floor(left)

    def binding(self, job: Job, alloc_id: str, cores: int) -> OverCap:
        """The cap that kept a frame of ``cores`` off a host of the allocation, when ``cores_left`` was too little."""
        left = self.cores_left(job, alloc_id)
        if self._allocs.get(alloc_id, 0.0) <= left:
            return self.closed_alloc(alloc_id, cores)
        if self._folder_cores.get(job.folder_id, math.inf) <= left:
            return OverCap(Verdict.OVER_FOLDER, f"a frame needs {cores} cores, the job's folder has {left:g} left")
        return OverCap(Verdict.OVER_JOB, f"a frame needs {cores} cores, its job has {left:g} left")

    def take(self, job: Job, layer: Layer, alloc_id: str, taken: Reservation) -> None:
        """Count a planned frame under every cap."""
        for left, key, amount in (
            (self._allocs, alloc_id, taken.cores),
            (self._folder_cores, job.folder_id, taken.cores),
            (self._job_cores, job.id, taken.cores),
            (self._folder_gpus, job.folder_id, taken.gpus),
            (self._job_gpus, job.id, taken.gpus),
            *((self._limits, limit_id, 1) for limit_id in layer.limit_ids),
        ):
            if key in left:
                left[key] -= amount

    def closed_alloc(self, alloc_id: str, cores: int) -> OverCap:
        """The verdict when a host would do, but its allocation has no headroom for a frame of ``cores``."""
        if alloc_id not in self._allocs:
            return OverCap(Verdict.OVER_SUBSCRIPTION, "the show has no subscription to the allocation of its hosts")
        has = f"the subscription has {self._allocs[alloc_id]:g}"
        return OverCap(Verdict.OVER_SUBSCRIPTION, f"a frame needs {cores} cores, {has} left under its burst")

    def _over_subscriptions(self, cores: int) -> OverCap:
        if not self._allocs:
            return OverCap(Verdict.OVER_SUBSCRIPTION, "the show has no subscription here")
        have = f"the subscriptions have at most {max(self._allocs.values()):g}"
        return OverCap(Verdict.OVER_SUBSCRIPTION, f"a frame needs {cores} cores, {have} left under their burst")
