"""Services: what the frames of a layer run, by name, with the needs that OpenCue's submitters take from them."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from sqlalchemy import Connection, Row, text

from opencue_sched.store.shows import insert_row, set_rows

# Services with their requirements; those of these ids, or all.
_LIST = text(
    """
    SELECT pk_service AS id, str_name AS name, b_threadable AS threadable, int_cores_min AS min_centicores,
           int_cores_max AS max_centicores, int_mem_min AS memory_kb, int_gpus_min AS gpus,
           int_gpu_mem_min AS gpu_memory_kb, str_tags AS tags, int_timeout AS timeout_minutes,
           int_timeout_llu AS timeout_llu_minutes, int_min_memory_increase AS memory_increase_kb
      FROM service WHERE CAST(:ids AS varchar[]) IS NULL OR pk_service = ANY(CAST(:ids AS varchar[]))
     ORDER BY str_name
    """
)
COLUMNS = {
    "cores": "int_cores_min",
    "max_cores": "int_cores_max",
    "threadable": "b_threadable",
    "memory": "int_mem_min",
    "gpus": "int_gpus_min",
    "gpu_memory": "int_gpu_mem_min",
    "tags": "str_tags",
    "timeout": "int_timeout",
    "timeout_llu": "int_timeout_llu",
    "memory_increase": "int_min_memory_increase",
}
"""Columns of what a service says, by the name that a job file's layer has for it."""


def list_services(connection: Connection, ids: Collection[str] | None = None) -> Sequence[Row[Any]]:
    """The services of all shows, by name; a show's own are not among them. Units: centicores, KB, minutes."""
    return connection.execute(_LIST, {"ids": None if ids is None else list(ids)}).all()


def insert_service(connection: Connection, name: str, fields: Mapping[str, Any]) -> str | None:
    """Add a service with all fields of COLUMNS but those that have a default; its id, or None when there is one of this
    name."""
    made = insert_row(connection, "service", str_name=name, **{COLUMNS[key]: value for key, value in fields.items()})
    return None if made is None else str(made)


def set_service(connection: Connection, service_id: str, fields: Mapping[str, Any]) -> None:
    """Set fields of a service, as COLUMNS names them."""
    values = {COLUMNS[key]: value for key, value in fields.items()}
    set_rows(connection, "service", "pk_service", [service_id], values)
