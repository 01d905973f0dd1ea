"""The farm builder of the tests: see opencue_sched.embedded.farms.farm."""

from opencue_sched.embedded.farms.farm import Farm
from opencue_sched.embedded.farms.farm_specs import (
    AllocIds,
    HostIds,
    HostSpec,
    JobIds,
    JobSpec,
    LayerIds,
    LayerSpec,
    ShowIds,
)

__all__ = ["AllocIds", "Farm", "HostIds", "HostSpec", "JobIds", "JobSpec", "LayerIds", "LayerSpec", "ShowIds"]
