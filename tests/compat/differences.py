"""Where our schema differs from Cuebot's: on purpose, with the reason, or by mistake."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

from tests.kit.catalog import Catalog

MADE_FOR_VERSION = (47,)
"""The Cuebot migration our schema is a counterpart of."""

_V49_INDEXES = (
    "c_layer_limit_pk c_layer_limit_uk c_limit_host_pk c_limit_host_uk c_limit_record_pk c_limit_record_uk_name"
    " c_limit_usage_pk i_layer_limit_str_source i_limit_host_str_host_name i_limit_record_uk_exit_status"
    " i_proc_ts_dispatched"
)
_V49_CONSTRAINTS = (
    "layer_limit.c_layer_limit_ck_source layer_limit.c_layer_limit_pk layer_limit.c_layer_limit_uk"
    " limit_record.c_limit_record_ck_delay limit_record.c_limit_record_ck_enforcement"
    " limit_record.c_limit_record_ck_exit_status limit_record.c_limit_record_ck_type limit_record.c_limit_record_pk"
    " limit_record.c_limit_record_uk_name"
)
_V49_COLUMNS = (
    "layer_limit.str_source layer_limit.ts_created limit_record.b_auto_tag limit_record.int_delay_minutes"
    " limit_record.int_exit_status limit_record.int_report_ttl limit_record.int_soft_value limit_record.str_enforcement"
    " limit_record.str_report_source limit_record.str_type limit_record.ts_reported"
)

_LEFT_OUT = {
    "goes with the key of limits in Cuebot's V49": {"index": "i_limit_record_pk_limit_record"},
    "what is left of Cuebot's move from Oracle, which nothing calls or reads": {
        "table": "duplicate_cursors history_period_bak uncommitted_transactions uncommitted_transactions_bak",
        "function": "calculate_core_hours epoch_to_ts genkey history__period_clear history__period_shift render_weeks"
        " rename_allocs tmp_populate_folder tmp_populate_point tmp_populate_sub",
    },
}

_ADDED = {
    "comes with Cuebot's V49": {
        "table": "limit_host limit_usage",
        "column": _V49_COLUMNS,
        "constraint": _V49_CONSTRAINTS,
        "index": _V49_INDEXES,
    },
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
