"""The rows of a synthetic farm, column by column."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime, timedelta
from typing import Any

from opencue_sched.domain.units import CENTICORES_PER_CORE, UNLIMITED
from opencue_sched.embedded.farm_specs import HostIds, HostSpec, JobIds, JobSpec, LayerSpec

KB_PER_GB = 1024 * 1024


def centicores(cores: float) -> int:
    """Cores to centicores; the sentinel -1 stays -1."""
    return UNLIMITED if cores == UNLIMITED else round(cores * CENTICORES_PER_CORE)


def kilobytes(gigabytes: float) -> int:
    return round(gigabytes * KB_PER_GB)


def host_row(spec: HostSpec, ids: HostIds, tags: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    idle_cores = spec.cores if spec.idle_cores is None else spec.idle_cores
    idle_memory = spec.memory_gb if spec.idle_memory_gb is None else spec.idle_memory_gb
    return {
        "pk_host": ids.id,
        "pk_alloc": ids.alloc_id,
        "str_name": ids.name,
        "str_lock_state": spec.lock,
        "b_nimby": spec.nimby,
        "int_cores": centicores(spec.cores),
        "int_procs": 1,
        "int_cores_idle": centicores(idle_cores),
        "int_mem": kilobytes(spec.memory_gb),
        "int_mem_idle": kilobytes(idle_memory),
        "int_gpus": spec.gpus,
        "int_gpus_idle": spec.gpus,
        "int_gpu_mem": kilobytes(spec.gpu_memory_gb),
        "int_gpu_mem_idle": kilobytes(spec.gpu_memory_gb),
        "int_thread_mode": spec.thread_mode,
        "str_tags": " ".join(str(tag["str_tag"]) for tag in sorted(tags, key=_tag_order)),
    }


def _tag_order(tag: Mapping[str, Any]) -> tuple[str, str]:
    return str(tag["str_tag_type"]), str(tag["str_tag"])


def host_stat_row(spec: HostSpec, ids: HostIds, stat_id: str) -> dict[str, Any]:
    free = spec.memory_gb if spec.free_memory_gb is None else spec.free_memory_gb
    pinged = datetime.now(UTC) - timedelta(seconds=spec.ping_age)
    return {
        "pk_host_stat": stat_id,
        "pk_host": ids.id,
        "int_mem_total": kilobytes(spec.memory_gb),
        "int_mem_free": kilobytes(free),
        "int_swap_total": kilobytes(2),
        "int_swap_free": kilobytes(2),
        "int_mcp_total": kilobytes(100),
        "int_mcp_free": kilobytes(80),
        "int_gpu_mem_total": kilobytes(spec.gpu_memory_gb),
        "int_gpu_mem_free": kilobytes(spec.gpu_memory_gb),
        "ts_ping": pinged.isoformat(),
        "ts_booted": (pinged - timedelta(days=1)).isoformat(),
        "str_state": spec.state,
        "str_os": spec.os,
    }


def job_row(spec: JobSpec, ids: JobIds, facility_id: str) -> dict[str, Any]:
    return {
        "pk_job": ids.id,
        "pk_folder": ids.folder_id,
        "pk_show": ids.show.id,
        "pk_facility": facility_id,
        "pk_dept": ids.show.dept_id,
        "str_name": ids.name,
        "str_visible_name": ids.name,
        "str_shot": spec.shot,
        "str_user": spec.user,
        "str_state": "STARTUP",
        "str_log_dir": spec.log_dir,
        "int_uid": spec.uid,
        "b_paused": spec.paused,
        "b_autoeat": spec.autoeat,
        "int_max_retries": spec.max_retries,
        "str_email": spec.email,
        "str_show": ids.show.name,
        "str_os": spec.os,
    }


def job_resource_row(spec: JobSpec, ids: JobIds) -> dict[str, Any]:
    return {
        "job": ids.id,
        "min_cores": centicores(spec.min_cores),
        "max_cores": centicores(spec.max_cores),
        "max_gpus": spec.max_gpus,
        "priority": spec.priority,
    }


def layer_row(spec: LayerSpec, job: JobIds, position: int) -> dict[str, Any]:
    return {
        "pk_layer": job.layers[position].id,
        "pk_job": job.id,
        "str_name": job.layers[position].name,
        "str_cmd": spec.command,
        "str_range": spec.frame_range(),
        "int_chunk_size": spec.chunk,
        "int_dispatch_order": position + 1,
        "int_cores_min": round(spec.cores * CENTICORES_PER_CORE),
        "int_cores_max": round(spec.cores_max * CENTICORES_PER_CORE),
        "int_mem_min": kilobytes(spec.memory_gb),
        "int_gpus_min": spec.gpus,
        "int_gpus_max": max(spec.gpus, spec.gpus_max),
        "int_gpu_mem_min": kilobytes(spec.gpu_memory_gb),
        "str_tags": spec.tags,
        "str_type": spec.type,
        "b_threadable": spec.threadable,
        "b_optimize": spec.optimize,
        "str_services": spec.services,
        "int_timeout": spec.timeout,
        "int_timeout_llu": spec.timeout_llu,
    }


def frame_rows(spec: LayerSpec, job: JobIds, position: int) -> list[dict[str, Any]]:
    layer = job.layers[position]
    return [
        {
            "pk_frame": frame_id,
            "pk_layer": layer.id,
            "pk_job": job.id,
            "str_name": f"{number:04d}-{layer.name}",
            "str_state": "SETUP",
            "int_number": number,
            "int_dispatch_order": order,
            "int_layer_order": position + 1,
        }
        for order, (number, frame_id) in enumerate(zip(spec.frame_numbers(), layer.frames, strict=True))
    ]


def er_columns(layer: tuple[JobIds, int]) -> dict[str, str]:
    return {"pk_job_depend_er": layer[0].id, "pk_layer_depend_er": layer[0].layers[layer[1]].id}


def on_columns(layer: tuple[JobIds, int]) -> dict[str, str]:
    return {"pk_job_depend_on": layer[0].id, "pk_layer_depend_on": layer[0].layers[layer[1]].id}
