"""Where our schema differs from Cuebot's: on purpose, with the reason, or by mistake."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

from tests.compat.catalog import Catalog

MADE_FOR_VERSION = (47,)
"""The Cuebot migration our schema is a counterpart of."""

_LEFT_OUT = {
    "what is left of Cuebot's move from Oracle, which nothing calls or reads": {
        "table": "duplicate_cursors history_period_bak uncommitted_transactions uncommitted_transactions_bak",
        "function": "calculate_core_hours epoch_to_ts genkey history__period_clear history__period_shift render_weeks"
        " rename_allocs tmp_populate_folder tmp_populate_point tmp_populate_sub",
    },
    "an index on values that bookings change, which no query selects by": {
        "index": "i_folder_resource_int_cores i_folder_resource_fl_tier i_frame_int_gpu_mem_reserved i_host_int_gpu"
        " i_host_int_gpu_idle i_host_int_gpu_mem i_host_int_gpu_mem_idle i_host_int_gpus i_host_int_gpus_idle"
        " i_host_stat_int_gpu_mem_free i_host_stat_int_gpu_mem_total i_host_local_int_gpu_idle"
        " i_host_local_int_gpu_max i_host_local_int_gpus_idle i_host_local_int_gpus_max i_job_mem_int_max_rss"
        " i_job_resource_cores i_job_resource_gpus i_job_stat_int_waiting_count i_job_tier i_job_ts_updated"
        " i_layer_mem_int_max_rss i_layerstat_int_waiting_count i_max_pss_job i_max_pss_layer i_point_tier"
        " i_proc_int_gpu_mem_reserved i_sub_tier i_host_str_tags i_frame_history_int_ts_stopped"
        " i_frame_history_int_exit_stat i_frame_history_str_state",
    },
    "an index on a value too common or too seldom asked for to be of use, or a copy of another": {
        "index": "i_booking_3 i_depend_b_composite i_depend_str_target i_depend_str_type i_folder_res_int_max_cores"
        " i_folder_res_int_max_gpus i_frame_dispatch_idx i_host_stat_str_os i_job_history_b_archived"
        " i_job_int_min_cores i_job_resource_gpus_min_max i_job_resource_max_c i_job_resource_max_gpus"
        " i_job_resource_min_max i_job_str_os i_layer_b_threadable i_layer_cores_gpus_mem"
        " i_layer_cores_gpus_mem_thread i_layer_cores_mem i_layer_cores_mem_thread i_layer_history_b_archived"
        " i_layer_history_str_type i_layer_int_cores_max i_layer_int_dispatch_order i_layer_int_gpu_mem_min"
        " i_layer_int_gpus_mem_min_1 i_layer_int_gpus_min i_layer_mem_min i_layer_str_tags"
        " i_limit_record_pk_limit_record i_service_int_gpu_mem_min i_service_int_gpus_min"
        " i_show_service_int_gpu_mem_min i_show_service_int_gpus_min",
    },
}

_ADDED = {
    "finds the open run of a frame": {"index": "i_frame_history_open"},
    "one place for what two triggers do": {"function": "history__record_job history__record_layers"},
}

_CHANGED = {
    "no uuid-ossp": {"column": "frame_history.pk_frame_history history_period.pk"},
    "a constant is written as one": {"column": "history_period.dt_begin"},
    "once a statement, on transition tables": {"trigger": "frame.frame_history_open frame.update_frame_status_counts"},
}


@dataclass(frozen=True)
class Difference:
    """One object that is not the same on both sides; ``reason`` is empty when nobody meant it."""

    kind: str
    name: str
    cuebot: str | None
    ours: str | None
    reason: str


def _trigger(definition: str) -> str:
    """When a trigger fires and on what; its condition may be inside or in front of the function."""
    timing = re.search(r"(BEFORE|AFTER) [A-Z ]+ ON [\w.]+", definition)
    level = re.search(r"FOR EACH (ROW|STATEMENT)", definition)
    return f"{timing.group(0) if timing else definition} {level.group(0) if level else ''}"


def _comparable(catalog: Catalog) -> Catalog:
    """The catalogue without what may differ freely: bodies, parameter names, storage parameters, view texts."""
    dropped = {name for name in catalog["table"] if name.endswith("flyway_schema_history")}
    return {
        "table": {name: "" for name in catalog["table"] if name not in dropped},
        "column": {
            name: definition for name, definition in catalog["column"].items() if name.split(".")[0] not in dropped
        },
        "constraint": {
            name: definition for name, definition in catalog["constraint"].items() if name.split(".")[0] not in dropped
        },
        "index": {
            name: definition for name, definition in catalog["index"].items() if "flyway_schema_history" not in name
        },
        "sequence": catalog["sequence"],
        "view": dict.fromkeys(catalog["view"], ""),
        "function": {name.split("(")[0]: "" for name in catalog["function"]},
        "trigger": {name: _trigger(definition) for name, definition in catalog["trigger"].items()},
    }


def _reason(table: dict[str, dict[str, str]], kind: str, name: str) -> str:
    for reason, kinds in table.items():
        if name in kinds.get(kind, "").split():
            return reason
        if kind in ("column", "constraint") and name.split(".")[0] in kinds.get("table", "").split():
            return reason
    return ""


def _explain(kind: str, name: str, cuebot: str | None, ours: str | None) -> str:
    if kind == "index" and cuebot is not None and ours is None and "history_period_bak" in name:
        return _reason(_LEFT_OUT, "table", "history_period_bak")
    table = _LEFT_OUT if ours is None else _ADDED if cuebot is None else _CHANGED
    return _reason(table, kind, name)


def compare(cuebot: Catalog, ours: Catalog) -> Iterable[Difference]:
    """Every difference between a database made by Cuebot and one made by us."""
    left, right = _comparable(cuebot), _comparable(ours)
    for kind in left:
        for name in sorted({*left[kind], *right[kind]}):
            theirs, mine = left[kind].get(name), right[kind].get(name)
            if theirs != mine:
                yield Difference(kind, name, theirs, mine, _explain(kind, name, theirs, mine))
