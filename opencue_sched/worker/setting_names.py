"""What a wrong setting is called, and variables that look like settings and are none.

A wrong key in a known section (``OPENCUE_SCHED_QUEUE__X``, or ``queue.x`` of the file) is refused when the settings are
read, and named as whoever wrote it did. A variable that names no section is nobody's: whoever starts a process warns of
it. It is not refused, because others may use the prefix too: Kubernetes gives every pod such variables for a service of
the name ``opencue-sched``.
"""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import structlog
from pydantic import BaseModel, ValidationError

from opencue_sched.settings import Settings, read_settings_file, setting_fields, settings_file

log = structlog.get_logger(__name__)

PREFIX = "OPENCUE_SCHED_"
CONFIG_VARIABLE = "OPENCUE_SCHED_CONFIG"
_OF_TESTS = ("OPENCUE_SCHED_TEST_", "OPENCUE_SCHED_COMPAT_", "OPENCUE_SCHED_CHAOS_")
_HOST_OF_A_SERVICE = "_SERVICE_HOST"
_OF_A_SERVICE = re.compile(r"_(SERVICE_HOST|SERVICE_PORT(_\w+)?|PORT(_\d+_(TCP|UDP|SCTP)(_(PROTO|PORT|ADDR))?)?)")
_ALIKE = 0.75
_ALIKE_IN_A_SECTION = 0.5
"""Whoever has the section right means one of few."""

_NOT_NEEDED = "that is not needed here"
_STRATEGY = "queue.host_booking_strategy"
_ONE_STRATEGY = "that does not exist here: hosts are chosen by core_saturation and memory_saturation"
_OF_THE_REFERENCE = {
    "sentry_dsn": f"{_NOT_NEEDED}: errors are in the log",
    "accounting.recompute_interval": "that is accounting.recompute_interval_seconds here",
    "accounting.limit_reseed_interval": "that is accounting.limit_reseed_interval_seconds here",
    "accounting.redis": f"{_NOT_NEEDED}: accounting.redis_url says where Redis is, accounting.redis_pool_size its pool",
    "database.core_multiplier": f"{_NOT_NEEDED}: a core is 100 centicores",
    "host_cache.monitoring_interval": f"{_NOT_NEEDED}: the host cache is in the metrics",
    "queue.monitor_interval": f"{_NOT_NEEDED}: queues are in the metrics",
    "queue.empty_job_cycles_before_quiting": f"{_NOT_NEEDED}: a worker runs until it is told to stop",
    f"{_STRATEGY}.type": _ONE_STRATEGY,
    f"{_STRATEGY}.weights": _ONE_STRATEGY,
    f"{_STRATEGY}.max_candidates": _ONE_STRATEGY,
}
"""Keys of the reference configuration that do not exist here."""


@dataclass(frozen=True, slots=True)
class UnknownVariable:
    """``meant`` is the variable most like it, empty when none is."""

    name: str
    meant: str

    def __str__(self) -> str:
        hint = f"; did you mean {self.meant}?" if self.meant else ""
        return f"{self.name} is no setting and has no effect{hint}"


def setting_problems(error: ValidationError) -> list[str]:
    """What is wrong with the settings: one sentence each, with the variable, or the key and the file, to change."""
    file = settings_file()
    written = {} if file is None else read_settings_file(file)
    problems = []
    for problem in error.errors():
        path = [str(part) for part in problem["loc"]]
        in_file = file if _is_written(written, path) and not _is_in_environment(path) else None
        reason = problem["msg"].removeprefix("Value error, ")
        if problem["type"] == "extra_forbidden":
            reason = _unknown_key(path, in_file)
        problems.append(f"setting {_as_written(path, in_file)}: {reason}" if path else reason)
    return problems


def _as_written(path: Sequence[str], file: Path | None) -> str:
    return PREFIX + "__".join(path).upper() if file is None else f"{'.'.join(path)} in {file}"


def _is_written(sections: Any, path: Sequence[str]) -> bool:
    """Whether the file has a value at ``path``."""
    for part in path:
        if not isinstance(sections, Mapping) or part not in sections:
            return False
        sections = sections[part]
    return bool(path)


def _is_in_environment(path: Sequence[str]) -> bool:
    """Whether a variable sets what is at ``path``, alone or with what is beside it. A whole section's leaves the rest
    of the section to the file."""
    given = {name.upper() for name in os.environ}
    shortest = min(2, len(path))
    return any(_as_written(path[:end], None) in given for end in range(shortest, len(path) + 1))


def _unknown_key(path: Sequence[str], file: Path | None) -> str:
    key = ".".join(path).lower()
    for theirs, said in _OF_THE_REFERENCE.items():
        if key == theirs or key.startswith(f"{theirs}."):
            return f"a key of the reference scheduler {said}"
    meant = closest_variable(PREFIX + "__".join(path)) if file is None else ".".join(_closest_setting(path))
    return "there is no such setting" + (f"; did you mean {meant}?" if meant else "")


def _closest_setting(path: Sequence[str]) -> tuple[str, ...]:
    """The setting or section most like it beside it, else the first of the same name anywhere; empty for none."""
    *section, name = (part.lower() for part in path)
    depth = len(section)
    settings = [setting for setting, _ in setting_fields()]
    beside = {setting[depth] for setting in settings if list(setting[:depth]) == section}
    if near := difflib.get_close_matches(name, beside, n=1, cutoff=_ALIKE_IN_A_SECTION):
        return (*section, near[0])
    return next((setting for setting in settings if setting[-1] == name), ())


def unknown_variables(environment: Mapping[str, str]) -> list[UnknownVariable]:
    """What of ``environment`` begins as our settings do, and is read by nobody."""
    services = [name.removesuffix(_HOST_OF_A_SERVICE) for name in environment if name.endswith(_HOST_OF_A_SERVICE)]
    return [
        UnknownVariable(name, closest_variable(name))
        for name in sorted(environment)
        if name.upper().startswith(PREFIX)
        and not _is_read(name.upper())
        and not any(name.startswith(one) and _OF_A_SERVICE.fullmatch(name.removeprefix(one)) for one in services)
    ]


def log_unknown_variables(environment: Mapping[str, str]) -> None:
    """Warn of them in the log of a service."""
    for unknown in unknown_variables(environment):
        log.warning("variable_is_no_setting", variable=unknown.name, did_you_mean=unknown.meant)


def closest_variable(name: str) -> str:
    """The variable of a setting that ``name`` is most like, or its section and ``...``; empty when it is like none."""
    settings = ["__".join(path).upper() for path, _ in setting_fields()]
    # Whoever forgets the section, or writes one _ for two, has the words right. Of equal names the first is meant.
    known = {words.rpartition("__")[2]: words for words in reversed(settings)}
    known |= {words.replace("__", "_"): words for words in settings} | {words: words for words in settings}
    given = name.upper().removeprefix(PREFIX)
    if found := difflib.get_close_matches(given, known, n=1, cutoff=_ALIKE):
        return PREFIX + known[found[0]]
    sections = {words.partition("__")[0] for words in settings if "__" in words}
    section, separator, _ = given.partition("__")
    if section in sections:
        return _as_written(closest, None) if (closest := _closest_setting(given.split("__"))) else ""
    near = difflib.get_close_matches(section, sections, n=1, cutoff=_ALIKE) if separator else []
    return f"{PREFIX}{near[0]}__..." if near else ""


def _is_read(name: str) -> bool:
    if name == CONFIG_VARIABLE or name.startswith(_OF_TESTS):
        return True
    first, _, rest = name.removeprefix(PREFIX).lower().partition("__")
    field = Settings.model_fields.get(first)
    if field is None:
        return False
    section = isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel)
    return section or not rest
