"""Boot and status reports on a real database."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace

import pytest
from opencue_proto import host_pb2, report_pb2
from sqlalchemy import Engine, text
from structlog.testing import capture_logs

from opencue_sched.domain.states import HardwareState
from opencue_sched.embedded.farms.farm_specs import LayerSpec
from opencue_sched.errors import InvalidInput
from opencue_sched.reports import host_reports as reports_module
from opencue_sched.reports.completion import Releaser
from opencue_sched.reports.host_reports import RECONCILE_SECONDS, HostReports, StatusOutcome, StatusReport
from opencue_sched.reports.run_ends import CompletedFrame
from opencue_sched.rqd.kill import Fate
from opencue_sched.settings import Release
from opencue_sched.store.hosts import set_state
from tests.kit.counted import Counted
from tests.kit.frozen_clock import Clock
from tests.kit.reported_hosts import GB, render_host
from tests.kit.runs import FarmView, RecordedChanges, RecordedLedger, Running, ScriptedKiller, complete_frame, start


class Desk:
    """A HostReports with everything around it recorded."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.killer = ScriptedKiller()
        self.ledger = RecordedLedger()
        self.changes = RecordedChanges()
        self.counts = Counted()
        self.clock = Clock(2_000_000_000.0)
        self.reports = HostReports(
            Releaser(
                engine,
                Release(),
                ledger=self.ledger,
                changes=self.changes,
                count=self.counts,
                clock=self.clock,
            ),
            self.killer,
        )

    def boot(self, **host: object) -> str:
        """The id of the host, known by the name without its domain."""
        report = report_pb2.BootReport(host=render_host(**host))
        self.reports.boot(report)
        with self.engine.connect() as connection:
            name = report.host.name.partition(".")[0]
            return str(connection.execute(text("SELECT pk_host FROM host WHERE str_name = :n"), {"n": name}).scalar())

    def status(self, report: report_pb2.HostReport) -> list[str]:
        """Handle a report; the hosts whose change was told to the host caches."""
        before = len(self.changes.published)
        for outcome in self.statuses([report]):
            if outcome.error is not None:
                raise outcome.error
            if outcome.kill is not None:
                outcome.kill()
        return self.changes.published[before:]

    def statuses(self, reports: Sequence[report_pb2.HostReport], *, age: float = 0.0) -> list[StatusOutcome]:
        """What becomes of reports that are handled together and waited so long for it."""
        received_at = reports_module.monotonic() - age
        return self.reports.statuses([StatusReport(report, received_at) for report in reports])


@pytest.fixture
def desk(engine: Engine) -> Desk:
    return Desk(engine)


@pytest.fixture
def allocs(view: FarmView) -> None:
    with view.farm() as farm:
        for tag in ("general", "gpu"):
            farm.alloc(tag)
        farm.alloc("general", facility="cloud")


def tags(view: FarmView, host_id: str) -> set[tuple[str, str]]:
    rows = view.rows("SELECT str_tag, str_tag_type FROM host_tag WHERE pk_host = :host", host=host_id)
    return {(row.str_tag, row.str_tag_type) for row in rows}


def read(view: FarmView, host_id: str) -> object:
    return view.one("SELECT * FROM host JOIN host_stat USING (pk_host) WHERE pk_host = :host", host=host_id)


def running_report(run: Running, *, index: int = 0, **frame: object) -> report_pb2.HostReport:
    """A status report of the host that names one running frame."""
    values = {"resource_id": run.procs[index], "frame_id": run.frames[index], "num_cores": 200, **frame}
    return report_pb2.HostReport(
        host=render_host(name=run.host.name, total_mem=64 * GB, free_mem=32 * GB),
        frames=[report_pb2.RunningFrameInfo(**values)],  # type: ignore[arg-type]
    )


def empty_report(run: Running) -> report_pb2.HostReport:
    return report_pb2.HostReport(host=render_host(name=run.host.name, total_mem=64 * GB, free_mem=32 * GB))


def age_procs(view: FarmView, seconds: int = 60) -> None:
    """As if the last report, which named the procs, had come so long ago."""
    view.run_sql("UPDATE host_stat SET ts_ping = now() - :s * interval '1 second'", s=seconds)
    view.run_sql(
        "UPDATE proc SET ts_dispatched = now() - :s * interval '1 second', ts_ping = now() - :s * interval '1 second'",
        s=seconds,
    )


@pytest.mark.usefixtures("allocs")
def test_an_unknown_host_is_created_in_the_allocation_its_tags_name(view: FarmView, desk: Desk) -> None:
    host_id = desk.boot(facility="local", tags=["rqdv-1.37", "gpu", "gpu box"], num_gpus=2, total_gpu_mem=GB)
    host = read(view, host_id)
    assert (host.str_name, host.str_fqdn) == ("node1", "node1.studio.example")
    assert (host.int_cores, host.int_cores_idle) == (800, 800)
    assert host.int_mem == host.int_mem_idle == 16 * GB - 524_288
    assert (host.int_gpus, host.int_gpus_idle, host.int_gpu_mem_idle) == (2, 2, GB)
    assert (host.str_lock_state, host.str_state, host.int_thread_mode) == ("OPEN", "UP", 0)
    assert host.int_mem_free == 12 * GB
    expected = {("gpu", "ALLOC"), ("node1", "HOSTNAME"), ("rqdv-1.37", "HARDWARE"), ("gpu box", "HARDWARE")}
    assert tags(view, host_id) == expected
    assert view.one("SELECT str_tag, b_constant FROM host_tag WHERE str_tag_type = 'ALLOC'").b_constant
    assert desk.changes.published == [host_id]


@pytest.mark.usefixtures("allocs")
def test_a_host_whose_tags_name_no_allocation_gets_the_default_one(view: FarmView, desk: Desk) -> None:
    desk.boot(name="a", facility="cloud", tags=["gpu"])
    desk.boot(name="b", facility="", tags=[])
    view.run_sql("UPDATE alloc SET b_enabled = false WHERE str_tag = 'gpu'")
    desk.boot(name="c", facility="local", tags=["gpu"])
    desk.reports.facility = "cloud"
    desk.boot(name="d", facility="", tags=[])
    desk.boot(name="e", facility="local", tags=[])
    rows = view.rows("SELECT host.str_name, alloc.str_name FROM host JOIN alloc USING (pk_alloc) ORDER BY 1")
    assert [f"{row[0]} {row[1]}" for row in rows] == [
        "a cloud.general",
        "b local.general",
        "c local.general",
        "d cloud.general",
        "e local.general",
    ]


def test_a_host_without_any_allocation_is_refused_with_what_was_looked_for(view: FarmView, desk: Desk) -> None:
    view.run_sql("UPDATE alloc SET b_default = false")
    with pytest.raises(InvalidInput, match="'mars'"):
        desk.boot(facility="mars")


@pytest.mark.usefixtures("allocs")
@pytest.mark.parametrize("fields", [{"num_procs": 0}, {"total_mem": -1}, {"name": "n" * 46}])
def test_nonsense_creates_nothing(view: FarmView, desk: Desk, fields: dict[str, object]) -> None:
    with pytest.raises(InvalidInput):
        desk.boot(**fields)
    assert view.rows("SELECT * FROM host") == []


def names(view: FarmView) -> list[tuple[str, str]]:
    rows = view.rows("SELECT str_name, str_fqdn FROM host ORDER BY str_name")
    return [(row.str_name, row.str_fqdn) for row in rows]


@pytest.mark.usefixtures("allocs")
@pytest.mark.parametrize("again", ["render-pc01.farm", "Render-PC01.FARM", "render-pc01", "RENDER-PC01"])
def test_a_host_that_spells_its_name_in_another_case_is_the_same_host(view: FarmView, desk: Desk, again: str) -> None:
    desk.boot(name="RENDER-PC01.farm")
    report = report_pb2.HostReport(host=render_host(name=again, free_mem=3 * GB))
    desk.status(report)
    assert names(view) == [("RENDER-PC01", "RENDER-PC01.farm")]
    assert view.one("SELECT int_mem_free FROM host_stat").int_mem_free == 3 * GB


@pytest.mark.usefixtures("allocs")
def test_of_two_rows_that_differ_in_case_the_exact_one_is_the_hosts(view: FarmView, desk: Desk) -> None:
    # given two rows of an earlier release, with what hangs on them
    for name in ("RENDER-PC01", "other"):
        desk.boot(name=f"{name}.farm")
    view.run_sql("UPDATE host SET str_name = 'render-pc01', str_fqdn = 'render-pc01.farm' WHERE str_name = 'other'")
    # when the machine reports by each spelling, then each row is still its own
    for name, free in (("RENDER-PC01.farm", 3 * GB), ("render-pc01.farm", 4 * GB)):
        desk.status(report_pb2.HostReport(host=render_host(name=name, free_mem=free)))
        found = "SELECT int_mem_free FROM host JOIN host_stat USING (pk_host) WHERE str_fqdn = :name"
        assert view.one(found, name=name).int_mem_free == free
    assert len(names(view)) == 2


@pytest.mark.without_cuebot("it finds the rows of its hosts by the names that it gave them")
@pytest.mark.usefixtures("allocs")
@pytest.mark.parametrize("name", ["node1", "NODE1"])
def test_a_host_whose_domain_changed_takes_its_row_over_once_that_is_silent(
    view: FarmView, desk: Desk, name: str
) -> None:
    # given a host with a tag of a person's, which has been silent as long as makes a host DOWN
    host_id = desk.boot(name="node1.old.example")
    view.run_sql(
        "INSERT INTO host_tag (pk_host_tag, pk_host, str_tag, str_tag_type) VALUES ('t', :h, 'ssd', 'MANUAL')",
        h=host_id,
    )
    view.run_sql("UPDATE host_stat SET ts_ping = now() - interval '301 seconds', str_state = 'DOWN'")
    # when it reports with another domain
    with capture_logs() as logs:
        desk.boot(name=f"{name}.new.example")
    # then its row goes on, under its name, with all that hangs on it
    assert names(view) == [("node1", f"{name}.new.example")]
    assert ("ssd", "MANUAL") in tags(view, host_id)
    assert view.one("SELECT str_state FROM host_stat").str_state == "UP"
    (line,) = [line for line in logs if line["event"] == "host_taken_over"]
    assert (line["host"], line["before"], line["now"]) == ("node1", "node1.old.example", f"{name}.new.example")
    # and one that comes back under the old name is the second machine now
    with pytest.raises(InvalidInput, match=r"node1\.old\.example: .*'node1'"):
        desk.boot(name="node1.old.example")


@pytest.mark.usefixtures("allocs")
def test_while_both_report_the_second_machine_is_refused_with_both_full_names(view: FarmView, desk: Desk) -> None:
    desk.boot(name="node1.old.example")
    view.run_sql("UPDATE host_stat SET ts_ping = now() - interval '299 seconds'")
    words = r"host NODE1\.new\.example: .*'NODE1'.* node1\.old\.example"
    for _ in range(2):
        with pytest.raises(InvalidInput, match=words):
            desk.boot(name="NODE1.new.example")
    assert names(view) == [("node1", "node1.old.example")]


@pytest.mark.usefixtures("allocs")
def test_a_row_of_a_cuebot_is_never_renamed(view: FarmView, desk: Desk) -> None:
    # given a database that a Cuebot made
    desk.boot(name="node1.old.example")
    view.run_sql("UPDATE host_stat SET ts_ping = now() - interval '1 day'")
    view.run_sql("UPDATE opencue_sched_origin SET origin = 'cuebot'")
    try:
        with pytest.raises(InvalidInput, match=r"node1\.old\.example"):
            desk.boot(name="node1.new.example")
    finally:
        view.run_sql("UPDATE opencue_sched_origin SET origin = 'opencue-sched'")
    assert names(view) == [("node1", "node1.old.example")]


@pytest.mark.usefixtures("allocs")
def test_two_hosts_with_one_short_name_are_told_apart(view: FarmView, desk: Desk) -> None:
    desk.boot(name="node1.first.example")
    with pytest.raises(InvalidInput, match="'node1'"):
        desk.boot(name="node1.second.example")
    assert len(view.rows("SELECT * FROM host")) == 1


@pytest.mark.usefixtures("allocs")
def test_many_long_tags_do_not_stop_a_host(view: FarmView, desk: Desk) -> None:
    # given more tag text than host.str_tags holds
    host_id = desk.boot(tags=[f"{number:02d}-{'x' * 40}" for number in range(20)])
    assert len(tags(view, host_id)) == 22
    assert len(read(view, host_id).str_tags) == 128


@pytest.mark.usefixtures("allocs")
def test_a_boot_resizes_an_idle_host_and_replaces_its_hardware_tags(view: FarmView, desk: Desk) -> None:
    host_id = desk.boot(tags=["old"])
    with view.engine.begin() as connection:
        connection.exec_driver_sql(
            "INSERT INTO host_tag (pk_host_tag, pk_host, str_tag, str_tag_type) VALUES ('m', %s, 'mine', 'MANUAL')",
            (host_id,),
        )
    assert desk.boot(tags=["new"], cores_per_proc=1600, total_mem=32 * GB) == host_id
    host = read(view, host_id)
    assert (host.int_cores, host.int_cores_idle, host.int_mem_idle) == (1600, 1600, 32 * GB - 524_288)
    assert tags(view, host_id) == {
        ("general", "ALLOC"),
        ("node1", "HOSTNAME"),
        ("mine", "MANUAL"),
        ("new", "HARDWARE"),
    }


def test_a_host_that_booted_with_more_has_it_at_once_though_procs_of_before_are_left(
    view: FarmView, desk: Desk
) -> None:
    run = start(view)
    desk.boot(name=run.host.name, cores_per_proc=3200, total_mem=128 * GB)
    host = view.host(run.host)
    assert (host.int_cores, host.int_cores_idle) == (3200, 3000)
    assert (host.int_mem - host.int_mem_idle, host.int_mem > 64 * GB) == (2 * GB, True)
    view.assert_consistent()


def test_a_host_that_booted_with_less_than_its_procs_have_has_nothing_idle_until_they_fit(
    view: FarmView, desk: Desk
) -> None:
    # given a host of 16 cores with four procs of 3 that boots with 8
    run = start(view, LayerSpec(frames=4), running=4, cores=3)
    desk.boot(name=run.host.name, cores_per_proc=800, total_mem=16 * GB)
    idle = [view.host(run.host).int_cores_idle]
    # when the procs of before end, one after the other
    for index in range(4):
        complete_frame(view.engine, run.report(index))
        idle.append(view.host(run.host).int_cores_idle)
    # then what is idle is the total less the procs that are left, and never less than nothing
    assert idle == [0, 0, 200, 500, 800]
    view.assert_consistent()


def test_a_host_whose_boot_report_was_lost_is_resized_when_its_old_procs_are_gone(view: FarmView, desk: Desk) -> None:
    # given a host that reports twice its cores while procs are left on it
    run = start(view)
    hardware = {"name": run.host.name, "cores_per_proc": 3200, "total_mem": 128 * GB}
    report = report_pb2.HostReport(host=render_host(**hardware))
    desk.status(report)
    assert view.host(run.host).int_cores == 1600

    # when they are gone
    complete_frame(view.engine, run.report())

    # then the next report resizes it, and those after it change nothing
    desk.status(report)
    assert view.host(run.host).int_cores == view.host(run.host).int_cores_idle == 3200
    written = view.rows("SELECT xmin FROM host")
    desk.status(report)
    assert view.rows("SELECT xmin FROM host") == written
    view.assert_consistent()


@pytest.mark.usefixtures("allocs")
def test_states_nimby_and_the_temporary_directory(view: FarmView, desk: Desk) -> None:
    host_id = desk.boot()

    def status(**fields: object) -> object:
        desk.status(report_pb2.HostReport(host=render_host(**fields)))
        return read(view, host_id)

    # a user takes the workstation, and gives it back
    host = status(nimby_locked=True)
    assert (host.str_lock_state, host.str_lock_source) == ("NIMBY_LOCKED", "NIMBY")
    assert status().str_lock_state == "OPEN"
    # the lock of a person stays
    view.run_sql("UPDATE host SET str_lock_state = 'LOCKED'")
    assert {status(nimby_locked=locked).str_lock_state for locked in (True, False)} == {"LOCKED"}
    view.run_sql("UPDATE host SET str_lock_state = 'OPEN'")
    # a full temporary directory, and room again
    assert status(free_mcp=GB).str_state == "REPAIR"
    assert len(view.rows("SELECT FROM comments")) == 1
    assert status().str_state == "UP"
    assert view.rows("SELECT FROM comments") == []
    # REPAIR by a person stays
    view.run_sql("UPDATE host_stat SET str_state = 'REPAIR'")
    assert status().str_state == "REPAIR"
    # DOWN is over with the first report
    view.run_sql("UPDATE host_stat SET str_state = 'DOWN', ts_ping = now() - interval '1 hour'")
    host = status(state=host_pb2.UP, free_mem=1000, load=250, boot_time=1_800_000_000, attributes={"SP_OS": "rocky9"})
    assert (host.str_state, host.int_mem_free, host.int_load) == ("UP", 1000, 250)
    assert (host.ts_booted.timestamp(), host.str_os) == (1_800_000_000, "rocky9")
    assert view.one("SELECT ts_ping > now() - interval '1 minute' AS heard FROM host_stat").heard
    # what somebody changed since it was read is left alone
    with view.engine.begin() as connection:
        assert not set_state(connection, host_id, old=[HardwareState.REPAIR], new=HardwareState.UP)


def report_of(locked: int | None, *, total: int = 800, **host: object) -> report_pb2.HostReport:
    """A status report of an idle host of 8 cores of which so many centicores are locked on its RQD."""
    report = report_pb2.HostReport(host=render_host(**host))
    if locked is not None:
        report.core_info.CopyFrom(report_pb2.CoreDetail(total_cores=total, locked_cores=locked))
    return report


def lock_of(view: FarmView) -> tuple[str, str, int]:
    row = view.one(
        "SELECT str_lock_state, coalesce(str_lock_source, '') AS source, coalesce(centicores, 0) AS locked"
        " FROM host LEFT JOIN opencue_sched_locked_cores USING (pk_host)"
    )
    return row.str_lock_state, row.source, row.locked


@pytest.mark.usefixtures("allocs")
def test_a_host_whose_cores_are_all_locked_on_its_rqd_is_locked_until_they_are_not(view: FarmView, desk: Desk) -> None:
    host_id = desk.boot()
    # when all cores are locked there, then the host is, with a source that says so
    desk.status(report_of(800))
    assert lock_of(view) == ("LOCKED", "RQD", 800)
    # and what says nothing of locks changes nothing: no part of that kind, or an RQD that counts no cores
    for nothing in (report_of(None), report_of(0, total=0)):
        desk.status(nothing)
        assert lock_of(view) == ("LOCKED", "RQD", 800)
    # when some are unlocked, then it opens, all its cores idle but for those, and caches are told
    assert desk.status(report_of(300)) == [host_id]
    assert lock_of(view)[::2] == ("OPEN", 300)
    assert view.one("SELECT int_cores_idle FROM host").int_cores_idle == 800
    # and a boot ends what is left
    desk.reports.boot(report_pb2.BootReport(host=render_host(), core_info=report_of(0).core_info))
    assert lock_of(view)[::2] == ("OPEN", 0)


@pytest.mark.usefixtures("allocs")
def test_a_persons_lock_and_a_user_come_before_a_lock_on_the_rqd(view: FarmView, desk: Desk) -> None:
    desk.boot()
    # given a host that a person locked
    view.run_sql("UPDATE host SET str_lock_state = 'LOCKED', str_lock_source = 'alice'")
    for locked in (800, 0):
        desk.status(report_of(locked))
        assert lock_of(view)[:2] == ("LOCKED", "alice")
    # and one that its user took back, while its RQD locks its cores or not
    view.run_sql("UPDATE host SET str_lock_state = 'OPEN'")
    for locked in (0, 800):
        desk.status(report_of(locked, nimby_locked=True))
        assert lock_of(view)[:2] == ("NIMBY_LOCKED", "NIMBY")
    # when the user is gone, then the lock on the RQD is what is left
    desk.status(report_of(800))
    assert lock_of(view)[:2] == ("LOCKED", "RQD")
    desk.status(report_of(800, nimby_locked=True))
    assert lock_of(view)[:2] == ("NIMBY_LOCKED", "NIMBY")


def test_a_running_frame_pings_its_proc_and_shows_its_memory(view: FarmView, desk: Desk) -> None:
    run = start(view, LayerSpec(frames=2, memory_gb=1), running=2)
    age_procs(view, 100)
    report = running_report(
        run, rss=800_000, max_rss=1_500_000, llu_time=1_900_000_000, used_gpu_memory=7, used_swap_memory=2**40
    )
    report.frames.append(running_report(run, index=1, rss=500, max_rss=600).frames[0])
    desk.status(report)
    proc = view.one(
        "SELECT *, now() - ts_ping < interval '30 seconds' AS fresh FROM proc WHERE pk_proc = :p", p=run.procs[0]
    )
    assert (proc.int_mem_used, proc.int_mem_max_used, proc.fresh) == (800_000, 1_500_000, True)
    assert (proc.int_gpu_mem_used, proc.int_swap_used) == (7, 2_147_483_647)
    frame = view.frame(run.frames[0])
    assert (frame.int_mem_used, frame.int_mem_max_used) == (800_000, 1_500_000)
    assert frame.ts_llu.timestamp() == 1_900_000_000
    assert view.one("SELECT int_max_rss FROM layer_mem").int_max_rss == 1_500_000
    assert view.one("SELECT int_max_rss FROM job_mem").int_max_rss == 1_500_000
    # a later report that knows less takes nothing of that back
    desk.status(running_report(run, rss=100, max_rss=200))
    assert view.frame(run.frames[0]).ts_llu.timestamp() == 1_900_000_000
    assert desk.killer.asked == []


@pytest.mark.parametrize(("frame_memory", "raises"), [(True, 3), (False, 1)])
def test_frames_that_need_more_than_their_layer_asks_for_ask_for_it_and_enough_of_them_raise_the_layer(
    view: FarmView, desk: Desk, frame_memory: bool, raises: int
) -> None:
    # given four running frames of a layer of 1 GB
    settings = desk.reports.releaser.settings.model_copy(update={"frame_memory": frame_memory})
    desk.reports.releaser = replace(desk.reports.releaser, settings=settings)
    run = start(view, LayerSpec(frames=4, memory_gb=1), running=4)
    peaks = [1_500_000, 1_300_000, 1_200_000]
    for count in range(1, 4):
        # when one after the other is reported with a peak above that, also once more with less
        report = running_report(run, rss=100, max_rss=peaks[0])
        for index in range(1, count):
            report.frames.append(running_report(run, index=index, rss=100, max_rss=peaks[index]).frames[0])
        report.frames.append(running_report(run, index=3, rss=100, max_rss=200).frames[0])
        desk.status(report)
        desk.status(running_report(run, rss=100, max_rss=200))

        # then each asks for its peak, and the layer for the peak of so many of them
        asked = view.rows("SELECT pk_frame, memory_kb FROM opencue_sched_frame_memory")
        minimum = peaks[raises - 1] if count >= raises else GB
        assert view.one("SELECT int_mem_min FROM layer").int_mem_min == minimum
        if frame_memory:
            assert dict(map(tuple, asked)) == dict(zip(run.frames, peaks[:count], strict=False))


def test_a_frame_that_needs_more_memory_gets_it_from_the_idle_of_its_host(view: FarmView, desk: Desk) -> None:
    # given two frames of 2 GB on a host of 64
    run = start(view, LayerSpec(frames=2), running=2, memory_gb=2)
    report = running_report(run, rss=5 * GB)

    # when one grows to 5 GB, then to more than there is
    desk.status(report)
    assert view.one("SELECT int_mem_reserved FROM proc WHERE pk_proc = :p", p=run.procs[0]).int_mem_reserved == 5 * GB
    view.assert_consistent()
    desk.status(running_report(run, rss=500 * GB))

    # then the first is granted and the second is not
    assert view.one("SELECT int_mem_reserved FROM proc WHERE pk_proc = :p", p=run.procs[0]).int_mem_reserved == 5 * GB
    view.assert_consistent()

    # when there is not enough for both, then the one that needs less gets it
    view.run_sql("UPDATE host SET int_mem_idle = :left", left=2 * GB)
    report = running_report(run, rss=7 * GB)
    report.frames.append(running_report(run, index=1, rss=3 * GB).frames[0])
    desk.status(report)
    reserved = {row.pk_proc: row.int_mem_reserved for row in view.rows("SELECT * FROM proc")}
    assert reserved == {run.procs[0]: 5 * GB, run.procs[1]: 3 * GB}


@pytest.mark.parametrize(("local", "workstation"), [(True, False), (False, True)])
def test_neither_local_procs_nor_workstations_lend_memory(
    view: FarmView, desk: Desk, local: bool, workstation: bool
) -> None:
    run = start(view, LayerSpec(frames=2), memory_gb=2)
    view.run_sql("UPDATE proc SET b_local = :local", local=local)
    report = running_report(run, rss=5 * GB)
    report.host.nimby_enabled = workstation
    desk.status(report)
    assert view.one("SELECT int_mem_reserved FROM proc").int_mem_reserved == 2 * GB


def test_a_process_no_proc_owns_is_killed(view: FarmView, desk: Desk) -> None:
    # given a frame whose proc was cleared a while ago although its process runs on
    run = start(view)
    view.run_sql("DELETE FROM proc")
    view.run_sql("UPDATE host SET int_cores_idle = int_cores, int_mem_idle = int_mem")
    view.run_sql("UPDATE frame SET str_state = 'WAITING' WHERE str_state = 'RUNNING'")

    # when a report comes that may be older than the change, then a later one
    desk.status(running_report(run))
    assert desk.killer.asked == []
    view.run_sql("UPDATE frame SET ts_updated = now() - interval '5 seconds'")
    desk.status(running_report(run))

    # then the second kills it
    assert desk.killer.asked == [(run.host.name, run.frames[0])]
    # and those that follow try again
    desk.status(running_report(run))
    assert (len(desk.killer.asked), desk.counts["process_killed"]) == (2, 2)


def test_a_process_of_a_frame_that_runs_elsewhere_is_killed_at_once(view: FarmView, desk: Desk) -> None:
    run = start(view)
    with view.farm() as farm:
        other = farm.host(name="elsewhere")
    view.run_sql("UPDATE proc SET pk_host = :other", other=other.id)
    report = running_report(run, resource_id="another-proc")
    desk.status(report)
    assert desk.killer.asked == [(run.host.name, run.frames[0])]


def test_a_process_that_another_host_reports_with_its_right_proc_is_owned_and_both_names_are_told(
    view: FarmView, desk: Desk
) -> None:
    # given a frame that was started where the name of its host leads by mistake
    run = start(view)
    with view.farm() as farm:
        farm.host(name="astray")
    age_procs(view)
    report = running_report(run, max_rss=GB, rss=GB)
    report.host.name = "astray.studio.example"
    # when that machine reports it, twice
    with capture_logs() as logs:
        for _ in range(2):
            desk.status(report)
    # then it goes on, its proc is known to live, and the log has both names, once
    assert desk.killer.asked == []
    assert view.one("SELECT ts_ping > now() - interval '50 seconds' AS alive FROM proc").alive
    told = [(line["booked_on"], line["reported_by"]) for line in logs if line["event"] == "frames_run_on_another_host"]
    assert told == [(run.host.name, "astray.studio.example")]


def test_kills_go_on_only_while_their_report_is_fresh(
    view: FarmView, desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    # given a host with three processes nobody owns, whose RQD takes 2 s to answer each kill
    run = start(view)
    now = [0.0]

    class Slow(ScriptedKiller):
        def ask(self, host_name: str, frame_id: str, reason: str) -> bool:
            now[0] += 2.0
            return super().ask(host_name, frame_id, reason)

    monkeypatch.setattr(reports_module, "monotonic", lambda: now[0])
    desk.reports.killer = desk.killer = Slow()
    report = empty_report(run)
    report.frames.extend(report_pb2.RunningFrameInfo(frame_id=name) for name in "abc")
    # when it reports, then what is not killed within the age of a report that is believed waits for the next one
    desk.status(report)
    assert [frame for _, frame in desk.killer.asked] == ["a", "b"]


def test_an_rqd_that_cannot_be_asked_is_asked_once_a_report(view: FarmView, desk: Desk) -> None:
    # given a host with three processes nobody owns, whose RQD does not answer
    run = start(view)
    desk.killer.fate = Fate.UNREACHABLE
    report = empty_report(run)
    report.frames.extend(report_pb2.RunningFrameInfo(frame_id=name) for name in "abc")
    # when it reports, then one of them is tried
    for _ in range(2):
        desk.status(report)
    assert [frame for _, frame in desk.killer.asked] == ["a", "a"]


def ran_for(view: FarmView, minutes: float) -> None:
    """Every frame started so long ago, by the clock of the database."""
    started = "UPDATE frame SET ts_started = clock_timestamp() - CAST(:minutes AS float8) * interval '1 minute'"
    view.run_sql(started, minutes=minutes)


@pytest.mark.parametrize("reported", ["milliseconds", "seconds", "two hours behind", "two hours ahead", "unknown"])
def test_a_run_is_timed_by_the_clock_of_the_database(view: FarmView, desk: Desk, reported: str) -> None:
    # given a frame that may run for an hour, on a host whose RQD says in its own way when it began
    run = start(view, LayerSpec(timeout=60))
    began = time.time() + {"two hours behind": -7200, "two hours ahead": 7200}.get(reported, 0)
    start_time = {"seconds": int(began), "unknown": 0}.get(reported, int(began * 1000))
    report = running_report(run, start_time=start_time)

    # when it is reported before its time is over, then it runs on
    ran_for(view, 59)
    desk.status(report)
    assert desk.killer.asked == []

    # and when its time is over, then it is killed
    ran_for(view, 61)
    desk.status(report)
    assert desk.killer.asked == [(run.host.name, run.frames[0])]


def test_a_log_is_silent_since_its_present_time_was_first_seen(view: FarmView, desk: Desk) -> None:
    # given a frame that has run for an hour and may be silent for ten minutes, and a log that other clocks date
    run = start(view, LayerSpec(timeout_llu=10))
    ran_for(view, 60)
    log_times = [int(time.time()) + hours * 3600 for hours in (-2, 2, -1)]

    # when its log gets another time each nine minutes, in whichever direction, then it runs on
    for llu_time in log_times:
        for minutes in (0, 9):
            desk.clock.now += minutes * 60
            desk.status(running_report(run, llu_time=llu_time))
            assert desk.killer.asked == []

    # and when the time stays the same for ten minutes, then it is killed
    desk.clock.now += 60
    desk.status(running_report(run, llu_time=log_times[-1]))
    assert desk.killer.asked == [(run.host.name, run.frames[0])]


def test_a_log_is_never_silent_for_longer_than_its_run(view: FarmView, desk: Desk) -> None:
    # given a log whose time has been the same for twenty minutes, of a run that began five minutes ago
    run = start(view, LayerSpec(timeout_llu=10))
    report = running_report(run, llu_time=1)
    desk.status(report)
    desk.clock.now += 1200
    ran_for(view, 5)
    # when it is reported, then it runs on
    desk.status(report)
    assert desk.killer.asked == []


def test_after_a_restart_of_the_service_the_silence_of_a_log_begins_anew(view: FarmView, desk: Desk) -> None:
    # given a log that has been silent for nine minutes of ten when the service is started again
    run = start(view, LayerSpec(timeout_llu=10))
    ran_for(view, 60)
    report = running_report(run, llu_time=1)
    desk.status(report)
    desk.clock.now += 540
    desk.reports = HostReports(desk.reports.releaser, desk.killer)
    # when the new one has heard of it for nine minutes, then it runs on; and for ten, then not
    for minutes, asked in ((0, 0), (9, 0), (1, 1)):
        desk.clock.now += minutes * 60
        desk.status(report)
        assert len(desk.killer.asked) == asked


def test_idle_resources_are_reconciled_every_ten_minutes(view: FarmView, desk: Desk) -> None:
    run = start(view)
    view.run_sql("UPDATE host SET int_mem_idle = 5, int_cores_idle = 7, int_gpus_idle = 1, int_gpu_mem_idle = 9")
    desk.status(running_report(run))
    assert view.host(run.host).int_mem_idle == 5
    desk.clock.now += RECONCILE_SECONDS
    assert desk.status(running_report(run)) == [run.host.id]
    view.assert_consistent()
    assert desk.counts["host_reconciled"] == 1


@pytest.mark.parametrize(
    ("column", "amount"),
    [
        ("int_cores_reserved", -(2**63) + 1),
        ("int_cores_reserved", 2**63 - 1),
        ("int_mem_reserved", -(2**62)),
        ("int_gpus_reserved", -(2**31)),
        ("int_gpu_mem_reserved", -(2**63) + 1),
    ],
)
def test_a_proc_that_reserves_what_no_host_has_stops_no_report_of_its_host(
    view: FarmView, desk: Desk, column: str, amount: int
) -> None:
    # given a host with such a proc
    run = start(view)
    view.run_sql(f"UPDATE proc SET {column} = :amount", amount=amount)  # noqa: S608
    # when the host boots, reports for so long that it is reconciled, and the frame's end comes
    desk.boot(name=run.host.name)
    desk.clock.now += RECONCILE_SECONDS
    desk.status(running_report(run, rss=GB))
    desk.clock.now += RECONCILE_SECONDS
    desk.status(running_report(run, rss=GB))
    # then what is idle is some of what it has
    host = view.host(run.host)
    for unit in ("cores", "mem", "gpus", "gpu_mem"):
        assert 0 <= getattr(host, f"int_{unit}_idle") <= getattr(host, f"int_{unit}")
    # and when the frame ends, of a show whose accounts are kept with it, then nothing is left
    view.run_sql("UPDATE show SET b_scheduler_managed = false")
    complete_frame(desk.engine, CompletedFrame(run.procs[0], run.frames[0], run.host.name, exit_status=0))
    assert (view.states(run.frames), view.procs()) == (["SUCCEEDED"], [])
    view.assert_consistent()
