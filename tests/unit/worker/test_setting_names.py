"""Variables that begin like settings and are none."""

from __future__ import annotations

import pytest

from opencue_sched.settings import setting_fields
from opencue_sched.worker.setting_names import closest_variable, unknown_variables


def unknown(*names: str) -> list[str]:
    return [variable.name for variable in unknown_variables(dict.fromkeys(names, "1"))]


def test_no_setting_is_unknown() -> None:
    names = ["OPENCUE_SCHED_" + "__".join(path).upper() for path, _ in setting_fields()]
    assert len(names) > 50
    assert unknown(*names, *(name.lower() for name in names)) == []


@pytest.mark.parametrize(
    "name",
    [
        "OPENCUE_SCHED_CONFIG",
        "OPENCUE_SCHED_TEST_DATABASE_URL",
        "OPENCUE_SCHED_TEST_DEEP",
        "OPENCUE_SCHED_COMPAT_DATABASE_URL",
        "OPENCUE_SCHED_CHAOS_DATABASE",
        "OPENCUE_SCHED_QUEUE",
        "OPENCUE_SCHED_QUEUE__HOST_BOOKING_STRATEGY__CORE_SATURATION",
        "OPENCUE_HOME",
        "PATH",
    ],
)
def test_what_somebody_reads_is_known(name: str) -> None:
    assert unknown(name) == []


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("QEUEU__METRICS_PORT", "QUEUE__METRICS_PORT"),
        ("QEUEU__X", "QUEUE__..."),
        ("QUEUE_METRICS_PORT", "QUEUE__METRICS_PORT"),
        ("METRICS_PORT", "QUEUE__METRICS_PORT"),
        ("DATABASE_UR", "DATABASE_URL"),
        ("REDISURL", "REDIS_URL"),
        ("FACILITY", "SCHEDULER__FACILITY"),
        ("REDIS_URL__X", "REDIS_URL"),
    ],
)
def test_a_misspelt_variable_is_named_with_the_one_that_was_meant(name: str, meant: str) -> None:
    (found,) = unknown_variables({f"OPENCUE_SCHED_{name}": "1"})
    assert str(found) == f"OPENCUE_SCHED_{name} is no setting and has no effect; did you mean OPENCUE_SCHED_{meant}?"


@pytest.mark.parametrize(
    ("name", "meant"),
    [("QUEUE__WORKR", "QUEUE__WORKER_THREADS"), ("QUEUE__STREAM__JOB_BUFER", "QUEUE__STREAM__JOB_BUFFER_SIZE")],
)
def test_a_wrong_variable_of_a_section_gets_the_one_most_like_it_in_that_section(name: str, meant: str) -> None:
    assert closest_variable(f"OPENCUE_SCHED_{name}") == f"OPENCUE_SCHED_{meant}"
    assert closest_variable("OPENCUE_SCHED_QUEUE__ZZZ") == ""


def test_what_is_like_nothing_gets_no_hint() -> None:
    assert closest_variable("OPENCUE_SCHED_ZZZZZ") == ""
    (found,) = unknown_variables({"OPENCUE_SCHED_ZZZZZ": "1"})
    assert str(found) == "OPENCUE_SCHED_ZZZZZ is no setting and has no effect"


def test_what_kubernetes_says_of_services_of_our_name_is_none_of_ours() -> None:
    stems = ("OPENCUE_SCHED", "OPENCUE_SCHED_WORKER")
    ends = ("SERVICE_HOST", "SERVICE_PORT", "SERVICE_PORT_GRPC", "PORT", "PORT_8443_TCP", "PORT_8443_TCP_ADDR")
    assert unknown(*(f"{stem}_{end}" for stem in stems for end in ends)) == []
    assert unknown("OPENCUE_SCHED_PORT") == ["OPENCUE_SCHED_PORT"]
