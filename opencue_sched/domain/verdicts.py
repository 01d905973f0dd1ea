"""What a pass says of a layer: whether its frames flow, or what they wait for."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from opencue_sched.domain.hosts import Resources


class Verdict(StrEnum):
    """Why a layer did, or did not, get a host in a pass; docs/look.md says what each means. Every layer
    that is looked at ends with one; quarantined, behind and cooled down are frames that no pass looks at.

    Where several clusters judged one layer, the verdict that stands first here is shown (``most_telling``): that hosts
    of one tag are busy says more than that no host has the other. So the order counts.
    """

    FLOWING = "flowing"
    QUARANTINED = "quarantined"
    FAILED = "failed"
    OVER_LIMIT = "over_limit"
    OVER_JOB = "over_job"
    OVER_JOB_GPUS = "over_job_gpus"
    OVER_FOLDER = "over_folder"
    OVER_FOLDER_GPUS = "over_folder_gpus"
    OVER_SUBSCRIPTION = "over_subscription"
    DRAINING = "draining"
    HELD = "held"
    KEPT_FOR_GPUS = "kept_for_gpus"
    LAYER_SHARE = "layer_share"
    OVER_SHARE = "over_share"
    CAPACITY = "capacity"
    NO_FIT = "no_fit"
    NO_HOST = "no_host"
    BACKING_OFF = "backing_off"
    BEHIND = "behind"
    COOLED_DOWN = "cooled_down"


@dataclass(frozen=True, slots=True)
class LayerVerdict:
    """What a pass says of one layer."""

    job_id: str
    layer_id: str
    verdict: Verdict
    frames: int
    """How many of its frames were placed."""
    waiting: int
    """How many were not."""
    detail: str = ""
    """One sentence for an operator."""


@dataclass(frozen=True, slots=True)
class Shortage:
    """What keeps many layers of a show waiting at once: no host with one of their tags has idle what they need.

    A pass looks at none of these layers by itself, so the reason is kept once for all of them.
    """

    tags: tuple[str, ...]
    """The layers it is about have one of these."""
    need: Resources
    """The frames of the layers it is about need at least this."""
    verdict: Verdict
    detail: str
