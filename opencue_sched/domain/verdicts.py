"""Why a layer did, or did not, get a host in a pass. Every layer looked at ends with exactly one verdict."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Verdict(StrEnum):
    FLOWING = "flowing"
    CAPACITY = "capacity"
    NO_FIT = "no_fit"
    NO_HOST = "no_host"
    OVER_SUBSCRIPTION = "over_subscription"
    OVER_FOLDER = "over_folder"
    OVER_JOB = "over_job"
    OVER_FOLDER_GPUS = "over_folder_gpus"
    OVER_JOB_GPUS = "over_job_gpus"
    OVER_LIMIT = "over_limit"
    PERMIT_HELD = "permit_held"
    BACKING_OFF = "backing_off"
    QUARANTINED = "quarantined"
    """Of frames of a job that is left alone, because booking or launching it failed; never given by a pass."""
    FAILED = "failed"
    BEHIND = "behind"
    """Of frames that no pass has looked at; never given by one."""
    COOLED_DOWN = "cooled_down"
    """Of frames that no pass looks at now, because those over their cluster fail; never given by one."""


@dataclass(frozen=True, slots=True)
class LayerVerdict:
    """``detail`` is one sentence for an operator; ``frames`` is how many were placed, ``waiting`` how many were not."""

    job_id: str
    layer_id: str
    verdict: Verdict
    frames: int
    waiting: int
    detail: str = ""
