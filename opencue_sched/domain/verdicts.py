"""What a pass says of a layer: whether its frames flow, or what they wait for."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from opencue_sched.domain.hosts import Resources


class Verdict(StrEnum):
    """Why a layer did, or did not, get a host in a pass; docs/look.md says what an operator can do about each.

    A pass ends with a verdict for every layer that it looks at. QUARANTINED, BEHIND and COOLED_DOWN are for layers that
    no pass looks at.

    The order counts: where several clusters judged one layer, the verdict that stands first here is shown
    (``most_telling``). That the hosts of one tag are busy says more than that no host has the other tag.
    """

    FLOWING = "flowing"
    """The pass placed as many frames as it wanted to."""
    QUARANTINED = "quarantined"
    """The job is left out for a while, because booking or launching it failed."""
    FAILED = "failed"
    """The layer's rows make no sense, or a store failed."""
    OVER_LIMIT = "over_limit"
    """A limit (licence) is used up."""
    OVER_JOB = "over_job"
    """The job is at its cap of cores."""
    OVER_JOB_GPUS = "over_job_gpus"
    """The job is at its cap of GPUs."""
    OVER_FOLDER = "over_folder"
    """The job's folder is at its cap of cores."""
    OVER_FOLDER_GPUS = "over_folder_gpus"
    """The job's folder is at its cap of GPUs."""
    OVER_SUBSCRIPTION = "over_subscription"
    """The show is at the burst of its subscription."""
    DRAINING = "draining"
    """A host that is reserved for the layer drains for it."""
    HELD = "held"
    """The hosts with room drain for wider frames of other layers."""
    KEPT_FOR_GPUS = "kept_for_gpus"
    """The hosts with room are kept for frames that wait for their GPUs."""
    LAYER_SHARE = "layer_share"
    """The hosts with room run as many frames of this layer as they may while other layers want them."""
    OVER_SHARE = "over_share"
    """The show uses more than its share, and shows that use less took what was idle."""
    CAPACITY = "capacity"
    """Every host that would do is busy."""
    NO_FIT = "no_fit"
    """No host with its tags could take a frame, even when idle."""
    NO_HOST = "no_host"
    """No host with its tags is up and open."""
    BACKING_OFF = "backing_off"
    """The only hosts left refused frames of the layer a moment ago."""
    BEHIND = "behind"
    """No pass has come to the layer lately, because other layers of the show come first."""
    COOLED_DOWN = "cooled_down"
    """Passes over the cluster fail, so none is made for a while."""


@dataclass(frozen=True, slots=True)
class LayerVerdict:
    """What a pass says of one layer, and how many of its frames the pass placed."""

    job_id: str
    layer_id: str
    verdict: Verdict
    frames: int
    """How many frames of the layer the pass placed."""
    waiting: int
    """How many frames of the layer it left waiting."""
    detail: str = ""
    """One sentence for an operator."""


@dataclass(frozen=True, slots=True)
class Shortage:
    """What keeps many layers of a show waiting at once: no host with one of their tags has idle what they need.

    A pass looks at none of these layers by itself, so the reason is kept once for all of them.
    """

    tags: tuple[str, ...]
    """The layers that wait for this reason have one of these tags."""
    need: Resources
    """The least that a frame of the layers that wait for this reason needs."""
    verdict: Verdict
    detail: str
    """One sentence for an operator."""
