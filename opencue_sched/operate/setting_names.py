"""Variables that look like settings and are none.

A wrong key in a known section (``OPENCUE_SCHED_QUEUE__X``) is refused when the settings are read. A variable that names
no section is nobody's: whoever starts a process warns of it. It is not refused, because others may use the prefix too:
Kubernetes gives every pod such variables for a service of the name ``opencue-sched``.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping
from dataclasses import dataclass

import structlog
from pydantic import BaseModel, ValidationError

from opencue_sched.operate.settings_table import setting_fields
from opencue_sched.settings import Settings

log = structlog.get_logger(__name__)

PREFIX = "OPENCUE_SCHED_"
CONFIG_VARIABLE = "OPENCUE_SCHED_CONFIG"
_OF_TESTS = ("OPENCUE_SCHED_TEST_", "OPENCUE_SCHED_COMPAT_", "OPENCUE_SCHED_CHAOS_")
_HOST_OF_A_SERVICE = "_SERVICE_HOST"
_OF_A_SERVICE = re.compile(r"_(SERVICE_HOST|SERVICE_PORT(_\w+)?|PORT(_\d+_(TCP|UDP|SCTP)(_(PROTO|PORT|ADDR))?)?)")
_ALIKE = 0.75


@dataclass(frozen=True, slots=True)
class UnknownVariable:
    """``meant`` is the variable most like it, empty when none is."""

    name: str
    meant: str

    def __str__(self) -> str:
        hint = f"; did you mean {self.meant}?" if self.meant else ""
        return f"{self.name} is no setting and has no effect{hint}"


def setting_problems(error: ValidationError) -> list[str]:
    """What is wrong with the settings: one sentence each, with the variable to change."""
    problems = []
    for problem in error.errors():
        name = PREFIX + "__".join(str(part).upper() for part in problem["loc"])
        reason = problem["msg"].removeprefix("Value error, ")
        if problem["type"] == "extra_forbidden":
            meant = closest_variable(name)
            reason = "there is no such setting" + (f"; did you mean {meant}?" if meant else "")
        problems.append(f"setting {name}: {reason}" if problem["loc"] else reason)
    return problems


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
    sections = [words.partition("__")[0] for words in settings if "__" in words]
    section, separator, _ = given.partition("__")
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
