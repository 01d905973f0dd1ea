"""Whole passes that end on simulated RQDs: what a host is sent is what its layer, the host and every cap allow."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from opencue_proto import rqd_pb2
from sqlalchemy import Engine, text

from opencue_sched.accounting.imported_shows import note_imported
from opencue_sched.clients.postgres import make_engine
from opencue_sched.dispatch.clusters import load_clusters
from opencue_sched.dispatch.report import PassReport
from opencue_sched.domain.verdicts import Verdict
from opencue_sched.embedded.farms.farm import Farm
from opencue_sched.embedded.farms.farm_specs import HostSpec, JobIds, LayerSpec, ShowIds
from opencue_sched.embedded.rqds.simulated_host import Behaviour
from opencue_sched.embedded.rqds.simulated_host import HostSpec as Machine
from opencue_sched.embedded.rqds.simulated_rqd import SimulatedFarm
from opencue_sched.insight.audit import run_audit
from opencue_sched.settings import Rqd, Settings
from opencue_sched.store.accounting import managed_show_versions
from tests.kit.gathering import with_start_times
from tests.kit.passes import Passes, passes
from tests.kit.polling import eventually
from tests.kit.wording import lacks

GPU_MEMORY_KB = 1024 * 1024


@dataclass
class Site:
    """Simulated hosts that render without end, the same hosts in the database, and a scheduler for them."""

    engine: Engine
    rqds: SimulatedFarm
    runner: Passes
    show: ShowIds
    jobs: int = 0

    def job(self, layers: Sequence[LayerSpec], **fields: Any) -> JobIds:
        self.jobs += 1
        with self.engine.begin() as connection:
            return Farm(connection).job(list(layers), name=f"job{self.jobs}", show=self.show, **fields)

    def execute(self, sql: str) -> None:
        with self.engine.begin() as connection:
            connection.execute(text(sql))

    def rows(self, sql: str) -> list[tuple[Any, ...]]:
        with self.engine.connect() as connection:
            return [tuple(row) for row in connection.execute(text(sql))]

    def passes(self) -> list[PassReport]:
        """One pass over every cluster."""
        with self.engine.connect() as connection:
            clusters = load_clusters(connection, self.runner.settings)
        return [self.runner.runner.run([cluster], alive=lambda: True)[0] for cluster in clusters]

    def sent(self) -> list[tuple[str, rqd_pb2.RunFrame]]:
        """Pass until nothing more can be booked; then all that runs, with the name of its host."""
        while any(report.frames_booked for report in self.passes()):
            continue
        found = [(host, self._frame(host, frame_id)) for frame_id, host in self.rqds.running().items()]
        report = run_audit(self.engine, self.runner.client, self.runner.settings)
        assert not report.failed, "\n".join(report.lines())
        assert self.rqds.violations() == []
        return found

    def _frame(self, host: str, frame_id: str) -> rqd_pb2.RunFrame:
        return eventually(lambda: self.rqds.host(host).listed(frame_id), what=f"a run of {frame_id}")


@contextmanager
def site(engine: Engine, settings: Settings, hosts: Sequence[HostSpec], **queue: Any) -> Iterator[Site]:
    machines = [Machine(str(host.name), cores=int(host.cores), gpus=host.gpus) for host in hosts]
    with SimulatedFarm(machines, behaviour=Behaviour(hang_ratio=1.0)) as rqds:
        with engine.begin() as connection:
            farm = Farm(connection)
            farm.hosts(list(hosts))
            show = farm.default_show()
        changed = settings.model_copy(
            update={
                "rqd": Rqd(addresses=rqds.addresses, timeout=60.0),
                "queue": settings.queue.model_copy(update=queue),
            }
        )
        with passes(engine, changed) as runner:
            with engine.begin() as connection:
                note_imported(runner.client, managed_show_versions(connection))
            yield Site(engine, rqds, runner, show)


def machine(name: str, **fields: Any) -> HostSpec:
    return HostSpec(name=name, hostname_tag=False, **fields)


def cores_by_job(sent: Sequence[tuple[str, rqd_pb2.RunFrame]]) -> dict[str, list[int]]:
    found: dict[str, list[int]] = defaultdict(list)
    for _, frame in sent:
        found[frame.job_id].append(frame.num_cores)
    return found


def test_a_gpu_farm_gives_out_each_gpu_once_and_leaves_its_hosts_to_gpu_work(
    engine: Engine, settings: Settings
) -> None:
    # given two hosts with 4 GPUs of together 48 GB, one without, and work for either
    hosts = [machine(f"gpu{n}", cores=16, memory_gb=64, gpus=4, gpu_memory_gb=48) for n in (1, 2)]
    # (a layer's share of a host would send a part of the work without GPUs on to hosts with them)
    fleet = [*hosts, machine("cpu1", cores=16, memory_gb=64)]
    with site(engine, settings, fleet, layer_host_share=False) as here:
        large = here.job([LayerSpec(frames=9, gpus=1, gpu_memory_gb=20)], priority=300)
        pair = here.job([LayerSpec(frames=9, gpus=2, gpu_memory_gb=4)], priority=200)
        capped = here.job([LayerSpec(frames=3, gpus=1)], max_gpus=1, priority=250)
        without = here.job([LayerSpec(frames=16)], priority=100)

        # when the farm is filled
        sent = here.sent()

    # then GPU memory bounds the first, the job's own cap the second and what is left the third
    frames = Counter(frame.job_id for _, frame in sent)
    assert frames == {large.id: 4, capped.id: 1, pair.id: 1, without.id: 16}
    gpus, memory = Counter[str](), Counter[str]()
    for host, frame in sent:
        gpus[host] += frame.num_gpus
        memory[host] += int(frame.environment["CUE_GPU_MEMORY"])
        assert frame.environment["CUE_GPUS"] == str(frame.num_gpus)
    assert max(gpus["gpu1"], gpus["gpu2"]) <= 4
    assert max(memory["gpu1"], memory["gpu2"]) <= 48 * GPU_MEMORY_KB
    assert gpus["cpu1"] == memory["cpu1"] == 0
    assert {host for host, frame in sent if frame.job_id == without.id} == {"cpu1"}


def test_work_without_gpus_takes_gpu_hosts_when_there_are_no_others(engine: Engine, settings: Settings) -> None:
    with site(engine, settings, [machine("gpu1", cores=4, gpus=2, gpu_memory_gb=8)]) as here:
        here.job([LayerSpec(frames=6)])
        sent = here.sent()
    assert [frame.num_gpus for _, frame in sent] == [0] * 4


def test_a_gpu_layer_that_no_host_can_take_says_so_and_holds_back_nobody(engine: Engine, settings: Settings) -> None:
    with site(engine, settings, [machine("gpu1", gpus=1, gpu_memory_gb=8)]) as here:
        greedy = here.job([LayerSpec(gpus=2)], priority=300)
        modest = here.job([LayerSpec(gpus=1)])
        (report,) = here.passes()
        sent = here.sent()
    assert [frame.job_id for _, frame in sent] == [modest.id]
    verdicts = {it.job_id: it for it in report.verdicts}
    assert verdicts[greedy.id].verdict is Verdict.NO_FIT
    assert "GPU" in verdicts[greedy.id].detail


def test_every_limit_of_a_layer_holds_and_is_shared(engine: Engine, settings: Settings) -> None:
    with engine.begin() as connection:
        farm = Farm(connection)
        wide, narrow, free = farm.limit("arnold", 4), farm.limit("nuke", 2), farm.limit("maya", 50)
    with site(engine, settings, [machine("one", cores=16), machine("two", cores=16)]) as here:
        both = here.job([LayerSpec(frames=9, limits=[wide, narrow, free])], priority=200)
        only = here.job([LayerSpec(frames=9, limits=[wide])])
        frames = Counter(frame.job_id for _, frame in here.sent())
        # a licence more is one frame more, of the first in line
        here.execute("UPDATE limit_record SET int_max_value = int_max_value + 1")
        after = Counter(frame.job_id for _, frame in here.sent())
    assert frames == {both.id: 2, only.id: 2}
    assert after == {both.id: 3, only.id: 2}


def test_a_layer_starts_after_its_time_and_not_before(engine: Engine, settings: Settings) -> None:
    with_start_times(engine)
    with site(engine, settings, [machine("one")]) as here:
        job = here.job([LayerSpec(frames=2), LayerSpec(frames=3, start_after=datetime.now(UTC) + timedelta(minutes=5))])
        before = {frame.layer_id for _, frame in here.sent()}
        here.execute("UPDATE layer SET ts_start_after = now() WHERE ts_start_after IS NOT NULL")
        after = Counter(frame.layer_id for _, frame in here.sent())
    assert before == {job.layers[0].id}
    assert after == {job.layers[0].id: 2, job.layers[1].id: 3}


def test_a_selfish_service_gets_all_idle_cores_of_its_host(engine: Engine, settings: Settings) -> None:
    with site(engine, settings, [machine("one", cores=8, memory_gb=64)], selfish_services=("arnold",)) as here:
        modest = here.job([LayerSpec(frames=1, services="maya")], priority=200)
        selfish = here.job([LayerSpec(frames=2, services="maya,arnold")])
        sent = here.sent()
    assert cores_by_job(sent) == {modest.id: [100], selfish.id: [700]}
    assert {frame.environment["CUE_THREADS"] for _, frame in sent} == {"1", "7"}


def test_a_frame_that_strands_the_memory_of_its_host_gets_its_cores_too(engine: Engine, settings: Settings) -> None:
    with site(engine, settings, [machine("one", cores=8, memory_gb=16)]) as here:
        here.job([LayerSpec(memory_gb=14)])
        ((_, frame),) = here.sent()
    assert frame.num_cores == 800


def test_a_hosts_thread_mode_decides_how_many_cores_a_frame_gets(engine: Engine, settings: Settings) -> None:
    """0 AUTO by need, 1 ALL whole hosts for layers that thread, 2 VARIABLE never fewer than two for those."""
    modes = [machine(name, cores=8, memory_gb=64, thread_mode=mode, tags=[name]) for mode, name in enumerate("abc")]
    with site(engine, settings, modes) as here:
        layers = [LayerSpec(frames=1, tags=tag, threadable=threads) for tag in "abc" for threads in (True, False)]
        jobs = [here.job([layer]) for layer in layers]
        sent = cores_by_job(here.sent())
    assert [sent.get(job.id) for job in jobs] == [[100], [100], [800], None, [200], [100]]


def test_zero_negative_and_fractional_minimums_as_opencue_means_them(engine: Engine, settings: Settings) -> None:
    minimums = {"a": 0, "b": -2, "c": 0.5}
    with site(engine, settings, [machine(tag, cores=8, memory_gb=64, tags=[tag]) for tag in minimums]) as here:
        whole, all_but, fraction = (
            here.job([LayerSpec(frames=1, cores=cores, tags=tag)]) for tag, cores in minimums.items()
        )
        sent = cores_by_job(here.sent())
    assert sent == {whole.id: [800], all_but.id: [600], fraction.id: [100]}


def test_tags_and_operating_systems_in_every_spelling(engine: Engine, settings: Settings) -> None:
    hosts = [machine("one", os="rhel7,rhel9", tags=["fast"]), machine("two", os="Windows", tags=["fast"])]
    with site(engine, settings, hosts) as here:
        jobs = [
            here.job([LayerSpec(tags=tags)], os=os)
            for tags, os in (("fast|x", "rhel9"), ("x | fast", "Windows"), (" fast |y", None), ("fast", "rhel8"))
        ]
        where = {frame.job_id: host for host, frame in here.sent()}
    assert [where.get(job.id) for job in jobs][:2] == ["one", "two"]
    assert jobs[2].id in where
    assert jobs[3].id not in where


def test_a_pass_holds_no_lock_and_no_transaction_while_hosts_are_asked(engine: Engine, settings: Settings) -> None:
    """Upstream kept a session's advisory lock, and a transaction, open during the call to RQD."""
    held = (
        "SELECT (SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' AND database ="
        " (SELECT oid FROM pg_database WHERE datname = current_database())),"
        " (SELECT count(*) FROM pg_stat_activity WHERE datname = current_database()"
        " AND xact_start IS NOT NULL AND pid <> pg_backend_pid())"
    )
    with site(engine, settings, [machine("one")]) as here:
        here.job([LayerSpec(frames=1)])
        here.rqds.freeze("one")
        with ThreadPoolExecutor(1) as pool:
            passing = pool.submit(here.passes)
            eventually(lambda: here.rows("SELECT pk_proc FROM proc"), what="a commit")
            eventually(lambda: here.rows(held) == [(0, 0)], what="an end of all locks and transactions")
            assert not passing.done(), "and that is while the host is asked"
            here.rqds.thaw("one")
            (report,) = passing.result(timeout=60)
    assert report.frames_launched == 1


def test_a_pass_needs_one_connection_at_a_time(engine: Engine, settings: Settings) -> None:
    """Upstream needed two a dispatch, and with as many dispatches as connections they waited for each other."""
    one = make_engine(
        settings.model_copy(update={"database": settings.database.model_copy(update={"pool_size": 1})}),
        application_name="opencue-sched one connection",
    )
    with site(engine, settings, [machine("one")]) as here:
        here.job([LayerSpec(frames=3)])
        with passes(one, here.runner.settings, "small") as small:
            assert [report.frames_launched for report in small.drain()] == [3, 0]
    one.dispose()


def test_a_host_whose_rqd_is_gone_is_left_for_another(engine: Engine, settings: Settings) -> None:
    """PostgreSQL calls it UP and idle for minutes yet, and best fit would choose it again and again."""
    with site(engine, settings, [machine("gone", cores=2), machine("there", cores=8)]) as here:
        here.rqds.crash("gone")
        job = here.job([LayerSpec(frames=3)])
        launched = [sum(report.frames_launched for report in here.passes()) for _ in range(3)]
        assert sum(launched) == 3
        assert set(here.rqds.running().values()) == {"there"}
        # what was tried in vain has been given back
        assert here.sent()
        assert len(here.rqds.runs()) == len(job.frames)


def test_why_a_frame_does_not_run_is_not_that_there_is_no_host_where_its_rqd_refuses(
    engine: Engine, settings: Settings
) -> None:
    with site(engine, settings, [machine("gone", cores=2), machine("away", cores=2)]) as here:
        here.rqds.crash("gone")
        here.rqds.crash("away")
        here.job([LayerSpec(frames=8)])
        here.passes()
        (report,) = here.passes()
    (verdict,) = report.verdicts
    assert verdict.verdict is Verdict.NO_HOST
    assert not lacks(verdict.detail, "2 hosts", "refusal", "UNAVAILABLE")


def test_a_job_that_every_host_refuses_is_set_aside_and_costs_no_host_its_work(
    engine: Engine, settings: Settings
) -> None:
    """Submitted by root: RQD runs nothing as uid 0, on whatever host."""
    with site(engine, settings, [machine(f"h{n}", cores=4) for n in range(6)]) as here:
        bad = here.job([LayerSpec(frames=24)], uid=0, priority=300)
        good = here.job([LayerSpec(frames=24)])
        first, second = (here.passes()[0] for _ in range(2))
        assert first.losses["rqd_failure"] == 20
        assert first.frames_launched + second.frames_launched == 24
        with engine.connect() as connection:
            job, reason = connection.execute(text("SELECT pk_job, reason FROM opencue_sched_quarantine")).one()
        assert job == bad.id
        assert "uid=0" in reason, "as RQD says it"
        assert {frame.job_id for _, frame in here.sent()} == {good.id}


@pytest.mark.parametrize("rows", ["int_chunk_size = 0", "str_cmd = ' '", "str_range = '1-5,7..'"])
def test_a_layer_that_cannot_be_launched_costs_nobody_else_a_frame(
    engine: Engine, settings: Settings, rows: str
) -> None:
    with site(engine, settings, [machine("one", cores=4)]) as here:
        # given a host with cores for one job, whose first layer makes no sense, and work behind it
        mixed = here.job([LayerSpec(frames=4), LayerSpec(frames=2)], priority=300)
        behind = here.job([LayerSpec(frames=2)])
        bad, good = mixed.layers
        here.execute(f"UPDATE layer SET {rows} WHERE pk_layer = '{bad.id}'")  # noqa: S608 - our own constants
        # when a pass meets it
        (report,) = here.passes()
        # then it says why it is not booked, nothing of it is counted, and the next pass comes at once
        (verdict,) = [it for it in report.verdicts if it.layer_id == bad.id]
        assert (verdict.verdict, verdict.frames, verdict.waiting) == (Verdict.FAILED, 0, 4)
        assert any(word in verdict.detail for word in ("int_chunk_size", "str_cmd", "'7..'"))
        assert report.frames_booked == 0
        assert report.go_on
        # and all else runs, the other layer of its job too
        assert Counter(frame.layer_id for _, frame in here.sent()) == {good.id: 2, behind.layers[0].id: 2}


def test_a_job_that_the_hosts_refuse_keeps_none_of_them_from_other_jobs(engine: Engine, settings: Settings) -> None:
    words = "Not launching, insufficient hyperthreading cores available"
    # given a job of high priority, of which both hosts refuse all that the first pass sends, and one of low priority
    with site(engine, settings, [machine(f"h{n}", cores=4) for n in range(2)]) as here:
        bad = here.job([LayerSpec(frames=24)], priority=300)
        good = here.job([LayerSpec(frames=24)])
        here.rqds.behave(refusal=words, refusals_left=8)  # each is sent twice
        first, second = (here.passes()[0] for _ in range(2))

        # then the hosts work for the other one at once, and the verdict has the words of the RQDs
        assert (first.losses["rqd_failure"], first.frames_launched, second.frames_launched) == (8, 0, 8)
        assert {frame.job_id for _, frame in here.sent()} == {good.id}
        (refused,) = [it for it in second.verdicts if it.job_id == bad.id]
        assert refused.verdict is Verdict.BACKING_OFF
        assert words in refused.detail
