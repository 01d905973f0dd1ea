"""Frames that failed on a host in a way that the host may be to blame for."""

from __future__ import annotations

from collections.abc import Iterable

from sqlalchemy import text

from opencue_sched.embedded.farms.farm import Farm
from opencue_sched.embedded.farms.farm_specs import JobIds

_NOTE = text(
    """
    INSERT INTO opencue_sched_failed_run (pk_frame, str_host, pk_layer, pk_job, int_exit_status)
    VALUES (:frame, :host, :layer, :job, 1)
    """
)


def failed_on(farm: Farm, host: str, jobs: Iterable[JobIds]) -> None:
    """The first frame of each of the jobs failed on the host of this name just now."""
    for job in jobs:
        farm.connection.execute(_NOTE, {"frame": job.frames[0], "host": host, "layer": job.layers[0].id, "job": job.id})
