"""The checks and rules of host reports, without a database."""

from __future__ import annotations

import pytest
from opencue_proto import host_pb2, report_pb2

from opencue_sched.domain.names import short_name
from opencue_sched.domain.states import HardwareState
from opencue_sched.errors import InvalidInput
from opencue_sched.reports.reported_host import bookable_memory_kb, checked_name, next_hardware_state, read_host
from opencue_sched.reports.reported_runs import check_frame
from tests.kit.reported_hosts import GB, render_host


def test_a_sensible_host_is_read() -> None:
    host = read_host(render_host(attributes={"SP_OS": "rocky9"}, nimby_enabled=True, tags=["a", " a ", "", "b c"]))
    assert (host.name, host.full_name) == ("node1", "node1.studio.example")
    assert host.size.centicores == 800
    assert host.status["os"] == "rocky9"
    assert host.size.nimby
    assert host.tags == ("a", "b c")


def test_numbers_that_cannot_be_are_brought_to_what_can() -> None:
    fields = {"free_mem": 20 * GB, "total_gpu_mem": 8, "free_gpu_mem": 9, "load": -1, "boot_time": -5}
    host = read_host(render_host(**fields, attributes={"SP_OS": "o" * 40}, tags=["bell\a"]))
    status = host.status
    assert (status["free_mem"], status["free_gpu_mem"], status["load"]) == (16 * GB, 8, 0)
    assert (status["boot_time"], status["os"]) == (0, "o" * 32)
    assert host.tags == ()
    assert read_host(render_host(free_gpu_mem=-1)).status["free_gpu_mem"] == 0


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"num_procs": 0}, "num_procs 0"),
        ({"cores_per_proc": 0}, "cores_per_proc 0"),
        ({"cores_per_proc": -100}, "cores_per_proc -100"),
        ({"num_procs": 100_000, "cores_per_proc": 10_000}, "1000000000"),
        ({"total_mem": 0}, "total_mem 0"),
        ({"total_mem": -5}, "total_mem -5"),
        ({"free_mem": -1}, "free_mem -1"),
        ({"num_gpus": -1}, "num_gpus -1"),
        ({"total_mem": GB // 2}, f"total_mem {GB // 2}"),
        ({"name": ""}, "''"),
        ({"name": "my node"}, "'my node'"),
        ({"name": "n" * 46}, r"\b45\b"),
        ({"name": "node." + "x" * 140}, r"\b128\b"),
        ({"name": ".."}, r"'\.\.'"),
        ({"name": ".node1"}, r"'\.node1'"),
        ({"name": "a\0b"}, "'a.x00b'"),
        ({"facility": "a\0b"}, "facility 'a.x00b'"),
        ({"attributes": {"SP_OS": "a\0b"}}, "SP_OS 'a.x00b'"),
        ({"total_mem": 2**62}, "total_mem"),
        ({"total_mem": 2**38 + 1}, "total_mem"),  # 256 TB: a host that reports bytes
        ({"total_swap": 2**62}, "total_swap"),
        ({"total_gpu_mem": 2**62}, "total_gpu_mem"),
        ({"num_gpus": 2**31 - 1}, "num_gpus"),
    ],
)
def test_nonsense_is_refused_by_name(fields: dict[str, object], named: str) -> None:
    with pytest.raises(InvalidInput, match=named):
        read_host(render_host(**fields))


@pytest.mark.parametrize(
    ("frame", "named"),
    [
        ({"frame_id": "a\0b"}, "frame_id 'a.x00b'"),
        ({"frame_id": "f" * 37}, "frame_id 'f+'"),
        ({"resource_id": "a\0b"}, "resource_id 'a.x00b'"),
        ({"rss": 2**62}, "rss"),
        ({"max_rss": 2**62}, "max_rss"),
        ({"max_pss": 2**62}, "max_pss"),
        ({"max_used_gpu_memory": 2**62}, "max_used_gpu_memory"),
    ],
)
def test_a_running_frame_that_cannot_be_is_refused_by_field(frame: dict[str, object], named: str) -> None:
    good = report_pb2.RunningFrameInfo(resource_id="p", frame_id="f", rss=500 * GB, max_vsize=2**62)
    check_frame(good, "host node1: ")
    with pytest.raises(InvalidInput, match=f"host node1: {named}"):
        check_frame(report_pb2.RunningFrameInfo(**frame), "host node1: ")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("name", "named"),
    [
        ("", "''"),
        ("a\0b", "'a.x00b'"),
        ("n" * 7_000_000, "7000000 characters"),
    ],
)
def test_a_name_that_no_host_has_is_refused_before_its_report_is_kept(name: str, named: str) -> None:
    with pytest.raises(InvalidInput, match=named) as refused:
        checked_name(name)
    assert len(str(refused.value)) < 300


def test_a_tag_over_length_is_left_out_and_the_host_kept() -> None:
    host = read_host(render_host(tags=["x" * 46, "short"]))
    assert host.tags == ("short",)


def test_short_names() -> None:
    assert short_name("node1.a.b") == "node1"
    assert short_name("10.0.0.7") == "10.0.0.7"
    assert short_name("fe80::1") == "fe80::1"


def test_memory_is_whole_gigabytes_less_half_a_gigabyte() -> None:
    total = 15 * GB + 300_000
    assert bookable_memory_kb(total, is_64bit=False, nimby=False) == 15 * GB - 524_288
    assert bookable_memory_kb(total, is_64bit=True, nimby=False) == 16 * GB - 524_288
    assert bookable_memory_kb(total, is_64bit=True, nimby=True) == int((16 * GB - 524_288) / 1.5) + 524_288
    for nimby in (False, True):
        assert bookable_memory_kb(GB - 1, is_64bit=False, nimby=nimby) <= 0


@pytest.mark.parametrize(
    ("current", "reported", "flags", "after"),
    [
        ("UP", "UP", {}, "UP"),
        ("UP", "REBOOTING", {}, "REBOOTING"),
        ("DOWN", "UP", {}, "UP"),
        ("REBOOTING", "UP", {}, "REBOOTING"),
        ("REBOOTING", "UP", {"boot": True}, "UP"),
        ("REBOOT_WHEN_IDLE", "UP", {"boot": True}, "UP"),
        ("REPAIR", "UP", {"boot": True}, "REPAIR"),
        ("UP", "UP", {"temp_full": True}, "REPAIR"),
        ("REPAIR", "UP", {"marked": True}, "UP"),
        ("REPAIR", "UP", {"marked": True, "temp_full": True}, "REPAIR"),
    ],
)
def test_hardware_states(current: str, reported: str, flags: dict[str, bool], after: str) -> None:
    rules = {"boot": False, "temp_full": False, "marked": False, **flags}
    assert next_hardware_state(HardwareState(current), HardwareState(reported), **rules) is HardwareState(after)


@pytest.mark.parametrize(
    ("fields", "full"),
    [
        ({"total_mcp": 100, "free_mcp": 4}, True),
        ({"total_mcp": 100, "free_mcp": 5}, False),
        ({"total_mcp": 0, "free_mcp": 0}, False),
        ({"total_mcp": 100, "free_mcp": 0, "attributes": {"SP_OS": "Windows"}}, False),
    ],
)
def test_a_full_temporary_directory(fields: dict[str, object], full: bool) -> None:
    assert read_host(render_host(**fields)).temp_full is full


def test_every_hardware_state_of_the_wire_is_known() -> None:
    for name, number in host_pb2.HardwareState.items():
        assert read_host(render_host(state=number)).state is HardwareState(name)
