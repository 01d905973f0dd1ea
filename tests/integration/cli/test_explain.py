"""`opencue-sched explain`: every reason the database alone gives, and the verdicts of passes."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
import redis
from sqlalchemy import Engine, event, text

from opencue_sched.coordination.board import End
from opencue_sched.coordination.keys import BoardKeys
from opencue_sched.coordination.postings import ClusterPostings
from opencue_sched.dispatch.verdicts import VerdictLog
from opencue_sched.domain.clusters import Cluster, ClusterKind
from opencue_sched.domain.hosts import Resources
from opencue_sched.domain.verdicts import LayerVerdict, Shortage, Verdict
from opencue_sched.embedded.farms.farm import Farm
from opencue_sched.embedded.farms.farm_specs import HostIds, JobIds, JobSpec, LayerSpec, ShowIds
from opencue_sched.insight.explain import explain_job
from opencue_sched.settings import Settings
from opencue_sched.store.quarantine import quarantine_jobs
from opencue_sched.worker.membership import Membership
from tests.kit.command import Cli
from tests.kit.limits import has_types, report_held, set_type
from tests.kit.wording import lacks

Build = Callable[[Callable[[Farm], Any]], Any]

NAME = "show-sh010-artist_comp"


@dataclass(frozen=True)
class Work:
    """A job whose only layer could run: managed show, subscription with room, an idle host."""

    show: ShowIds
    job: JobIds
    host: HostIds

    @property
    def layer(self) -> str:
        return self.job.layers[0].id


@pytest.fixture
def work(build: Build) -> Work:
    def make(farm: Farm) -> Work:
        show = farm.show("demo")
        farm.subscription(show, farm.alloc("general"), size=10)
        host = farm.host(name="render01", cores=8)
        return Work(show, farm.job([LayerSpec(name="render", frames=4)], show=show, name=NAME, max_cores=100), host)

    made: Work = build(make)
    return made


@pytest.fixture
def change(engine: Engine) -> Callable[..., None]:
    def run(sql: str, **parameters: Any) -> None:
        with engine.begin() as connection:
            connection.execute(text(sql), parameters)

    return run


@pytest.fixture
def verdicts(redis_client: redis.Redis) -> VerdictLog:
    return VerdictLog(redis_client, "cue")


def reasons(cli: Cli, layer: int = 0, job: str = NAME) -> list[str]:
    """Codes of the reasons of a layer, the first one first."""
    found = cli("explain", job, "--json").json["layers"][layer]["reasons"]
    return [reason["code"] for reason in found]


@pytest.mark.parametrize(
    ("sql", "code", "words"),
    [
        ("UPDATE job SET b_paused = true", "paused", ["paused", f"`opencue-sched job unpause {NAME}`"]),
        ("UPDATE job SET b_auto_book = false", "auto_book", ["off", "job"]),
        ("UPDATE job SET str_state = 'STARTUP'", "state", ["STARTUP", "PENDING"]),
        ("UPDATE show SET b_active = false", "show_inactive", ["demo", "`opencue-sched show active demo on`"]),
        (
            "UPDATE show SET b_scheduler_managed = false",
            "show_unmanaged",
            ["demo", "`opencue-sched show managed demo on`"],
        ),
        ("UPDATE show SET b_booking_enabled = false", "show_booking", ["demo", "off"]),
        ("UPDATE show SET b_dispatch_enabled = false", "show_booking", ["demo", "off"]),
        ("UPDATE show SET b_paused = true", "show_paused", ["demo", "paused"]),
        ("DELETE FROM subscription", "no_subscription", ["demo", "`opencue-sched subscription"]),
        ("UPDATE subscription SET int_burst = 0", "burst_zero", ["demo", "local.general", "(0 cores)"]),
        ("UPDATE subscription SET int_burst = 8", "burst_zero", ["demo", "local.general", "(0.08 cores)"]),
        ("UPDATE host SET str_lock_state = 'LOCKED'", "hosts_unavailable", ["1 locked"]),
        ("UPDATE host SET str_lock_state = 'NIMBY_LOCKED'", "hosts_unavailable", ["1 nimby locked"]),
        ("UPDATE host_stat SET str_state = 'DOWN'", "hosts_unavailable", ["general", "1 down"]),
        ("UPDATE host_stat SET ts_ping = now() - interval '1 day'", "hosts_unavailable", ["1 silent", "120 s"]),
        ("DELETE FROM host_tag", "no_host", ["general"]),
        ("UPDATE host_tag SET str_tag = 'genral'", "no_host", ["general"]),
        ("UPDATE layer SET str_tags = ''", "no_tags", ["tags"]),
        ("UPDATE job SET str_os = 'windows'", "os", ["windows", "general", "linux"]),
        ("UPDATE job_resource SET int_max_cores = 50", "over_job", ["0.5 cores"]),
        ("UPDATE folder_resource SET int_max_cores = 50", "over_folder", ["demo", "0.5 cores"]),
    ],
)
def test_what_the_database_alone_says(
    cli: Cli, work: Work, change: Callable[..., None], sql: str, code: str, words: list[str]
) -> None:
    assert reasons(cli) == ["not_seen"]
    change(sql)
    assert reasons(cli)[0] == code
    ran = cli("explain", NAME)
    assert ran.status == 0
    assert ran.out.startswith("render (4 waiting): ")
    assert not lacks(ran.out, *words)
    assert len(ran.out.splitlines()) == 1


def test_cores_that_are_locked_on_the_rqds_are_told(cli: Cli, work: Work, change: Callable[..., None]) -> None:
    # given a host with six of eight cores locked on its RQD
    lock = "INSERT INTO opencue_sched_locked_cores (pk_host, centicores) VALUES (:host, 600)"
    change(lock, host=work.host.id)
    # then that is told, though it does not decide where a frame fits
    assert reasons(cli) == ["not_seen", "cores_locked"]
    assert not lacks(cli("explain", NAME, "--layer", "render").out, "6 cores", "render01", "RQD")
    # and where none fits, with what the host lacks
    change("UPDATE layer SET int_cores_min = 400")
    assert reasons(cli) == ["no_fit", "cores_locked"]
    assert not lacks(cli("explain", NAME).out, "render01", "2 of 4 cores", "(6 ")


def test_a_show_at_its_burst(cli: Cli, work: Work, build: Build) -> None:
    def fill(farm: Farm) -> None:
        farm.run(work.job.frames[:1], farm.host(cores=32), cores=9.5)

    build(fill)
    assert reasons(cli) == ["over_subscription"]
    assert not lacks(cli("explain", NAME).out, "demo", "burst", "local.general", "(10 of 10 cores)")


def test_a_layer_that_no_host_takes_says_so_though_the_show_is_at_its_burst(cli: Cli, work: Work, build: Build) -> None:
    # Given a show that uses all of its burst, and a layer of it with a tag of no host
    def make(farm: Farm) -> None:
        farm.run(work.job.frames[:1], farm.host(cores=32), cores=10)
        farm.job([LayerSpec(name="sim", tags="gpu")], show=work.show, name="tagged")

    build(make)
    # When it is explained, then the tag comes first: it would wait beyond the burst
    assert reasons(cli, job="tagged") == ["no_host", "over_subscription"]
    (line,) = cli("explain", "tagged").out.splitlines()
    assert not lacks(line, "sim (1 waiting)", "gpu")


def test_hosts_of_another_facility_or_allocation(cli: Cli, work: Work, build: Build) -> None:
    def make(farm: Farm) -> None:
        cloud = farm.alloc("cloudy", facility="cloud")
        farm.host(alloc=cloud, tags=["far"])
        farm.host(alloc=farm.alloc("desk"), tags=["near"])
        layers = [LayerSpec(name="a", tags="far"), LayerSpec(name="b", tags="near | nearby")]
        farm.job(layers, show=work.show, name="other")

    build(make)
    assert [reasons(cli, layer, "other")[0] for layer in (0, 1)] == ["other_facility", "not_subscribed"]
    a, b = cli("explain", "other").out.splitlines()
    assert not lacks(a, "a (1 waiting)", "far", "cloud", "local")
    assert not lacks(b, "b (1 waiting)", "near ", "nearby", "local.desk", "demo")


def test_tags_the_scheduler_ignores(cli: Cli, work: Work, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENCUE_SCHED_SCHEDULER__IGNORE_TAGS", '["general"]')
    assert reasons(cli) == ["ignored_tags"]


@pytest.mark.parametrize("facility", ["lcal", "cloud"])
def test_a_facility_the_scheduler_does_not_work_on(
    cli: Cli, work: Work, build: Build, monkeypatch: pytest.MonkeyPatch, facility: str
) -> None:
    build(lambda farm: farm.facility("cloud"))
    monkeypatch.setenv("OPENCUE_SCHED_SCHEDULER__FACILITY", facility)
    assert reasons(cli)[0] == "facility"
    assert not lacks(cli("explain", NAME).out, "local", facility)


def test_a_limit_that_is_full(cli: Cli, work: Work, build: Build) -> None:
    def make(farm: Farm) -> None:
        arnold = farm.limit("arnold", 1)
        job = farm.job([LayerSpec(name="render", frames=3, limits=[arnold])], show=work.show, name="limited")
        farm.run(job.frames[:1], farm.host())

    build(make)
    (line,) = cli("explain", "limited").out.splitlines()
    assert not lacks(line, "render (2 waiting, 1 running)", "arnold", "1 of 1")


@pytest.mark.parametrize(
    ("terms", "reported", "full", "left"),
    [
        ("int_max_value = 1", (), ("r07",), 0),
        ("int_max_value = 9, int_soft_value = 1", (), ("r07",), 0),
        ("int_max_value = 2, ts_reported = now()", ("artist7",), ("2 seats", "r07", "1 machine"), 0),
        ("int_max_value = 2", (), None, 1),
        ("int_max_value = 1, str_enforcement = 'ADVISORY'", (), None, None),
        ("int_max_value = 1, str_enforcement = 'DISABLED'", (), None, None),
        ("int_max_value = 1, ts_reported = now() - interval '1 hour', int_report_ttl = 60", ("artist7",), None, None),
    ],
)
def test_a_limit_that_as_many_machines_hold_as_may(
    cli: Cli,
    work: Work,
    build: Build,
    terms: str,
    reported: tuple[str, ...],
    full: tuple[str, ...] | None,
    left: int | None,
) -> None:
    # given a limit that a host holds, and perhaps an artist's machine
    def make(farm: Farm) -> None:
        if terms.count("=") > 1 and not has_types(farm.connection):
            pytest.skip("no such terms before V49")
        houdini = farm.limit("houdini", 9)
        set_type(farm.connection, houdini, "HOST")
        farm.connection.execute(text(f"UPDATE limit_record SET {terms}"))  # noqa: S608 - our own constants
        if reported:
            report_held(farm.connection, houdini, *reported)
        job = farm.job([LayerSpec(name="render", frames=3, limits=[houdini])], show=work.show, name="limited")
        farm.run(job.frames[:1], farm.host(name="r07"))

    build(make)
    # then it is said to be full where no other may, and to have room, as it is listed, where another may
    said, (row,) = cli("explain", "limited").out, cli("limit", "list", "--json").json
    assert not lacks(said, "houdini", *full) if full else "houdini" not in said
    also = [line for line in said.splitlines() if line.startswith("  also: ") and "houdini" in line]
    assert ["1 frame " in line for line in also] == ([True] if full else [])
    assert (row["left"], row["counts"]) == (left, "machines")


def test_of_a_limit_of_machines_that_is_full_it_is_told_who_holds_it_and_who_does_not(
    cli: Cli, work: Work, build: Build
) -> None:
    # given a limit that six hosts in a row and one of another name hold, with a frame each
    def make(farm: Farm) -> None:
        houdini = farm.limit("houdini", 7)
        set_type(farm.connection, houdini, "HOST")
        job = farm.job([LayerSpec(name="sim", frames=9, limits=[houdini])], show=work.show, name="limited")
        names = [*(f"r{number:02}" for number in range(8, 14)), "ws3"]
        for frame, name in zip(job.frames, names, strict=False):
            farm.run([frame], farm.host(name=name))
        farm.host(name="r14")

    build(make)
    said = cli("explain", "limited").out
    taken, _, left = said.splitlines()[0].partition("; ")
    assert not lacks(taken, "sim (2 waiting, 7 running)", "7 seats", "houdini", "r08", "r13", "ws3")
    assert "r14" in left
    also = [line for line in said.splitlines() if line.startswith("  also: ") and "houdini" in line]
    assert ["7 frames" in line for line in also] == [True]


def test_a_limit_of_machines_that_artists_share_names_who_holds_it(cli: Cli, work: Work, build: Build) -> None:
    # given a limit of eight that six hosts and two artists hold, and a host that could take frames
    def make(farm: Farm) -> None:
        if not has_types(farm.connection):
            pytest.skip("no reports before V49")
        houdini = farm.limit("houdini", 8)
        set_type(farm.connection, houdini, "HOST")
        farm.connection.execute(text("UPDATE limit_record SET ts_reported = now()"))
        report_held(farm.connection, houdini, "artist1", "artist2")
        spec = LayerSpec(name="sim", frames=9, limits=[houdini], tags="simulation")
        job = farm.job([spec], show=work.show, name="limited")
        for number, frame in enumerate(job.frames[:6], start=1):
            farm.run([frame], farm.host(name=f"r{number:02}", tags=["simulation"]))
        farm.host(name="r07", tags=["simulation"])

    build(make)
    first, second = cli("explain", "limited").out.splitlines()[:2]
    taken, _, left = first.partition("; ")
    assert not lacks(taken, "sim (3 waiting, 6 running)", "8 seats", "houdini", "r01", "r06", "2 machines")
    assert "r07" in left
    assert not lacks(second, "  also: ", "6 frames", "houdini")


def test_a_layer_that_may_not_start_yet(cli: Cli, work: Work, build: Build, change: Callable[..., None]) -> None:
    change("ALTER TABLE layer ADD COLUMN IF NOT EXISTS ts_start_after timestamptz")  # a Cuebot before V47 has none
    later = datetime.now(UTC) + timedelta(hours=3)
    build(lambda farm: farm.job([LayerSpec(name="late", start_after=later)], show=work.show, name="later"))
    assert not lacks(cli("explain", "later").out, "late (1 waiting)", "before", "(in 2h 59m)")


def test_what_frames_depend_on(cli: Cli, work: Work, build: Build) -> None:
    def make(farm: Farm) -> None:
        layers = [LayerSpec(name=name, frames=3) for name in ("sim", "render", "comp")]
        job = farm.job(layers, show=work.show, name="chain", activate=False)
        farm.frame_by_frame((job, 1), (job, 0))
        farm.layer_on_layer((job, 2), (job, 1))
        farm.layer_on_layer((job, 2), (work.job, 0))
        farm.activate([job])

    build(make)
    render, comp = (line for line in cli("explain", "chain").out.splitlines() if "(3 depend)" in line)
    assert not lacks(render, "render", "3 frames", "layer sim")
    assert not lacks(comp, "comp", "3 frames", NAME)
    assert comp.count("layer render") == 2, "of its own job, and of the other"


def test_dead_running_and_finished_layers(cli: Cli, work: Work, build: Build, change: Callable[..., None]) -> None:
    def make(farm: Farm) -> None:
        job = farm.job([LayerSpec(name=name, frames=2) for name in "abc"], show=work.show, name="mixed")
        farm.run(job.frames[:2], farm.host())

    build(make)
    change("UPDATE frame SET str_state = 'DEAD' WHERE str_name LIKE '%-b'")
    change("UPDATE frame SET str_state = 'SUCCEEDED' WHERE str_name LIKE '%-c'")
    out = cli("explain", "mixed").out
    a, b = out.splitlines()[:2]
    assert not lacks(a, "a (2 running)", "running")
    assert not lacks(b, "b (2 dead)", "2 frames", "`opencue-sched job retry mixed`")
    assert "\nc (" not in out
    assert cli("explain", "mixed", "--layer", "c").out.startswith("c (2 done): ")


def test_a_job_in_quarantine(cli: Cli, work: Work, engine: Engine) -> None:
    with engine.begin() as connection:
        quarantine_jobs(connection, {work.job.id: "value too long for column x"}, 600)
    assert reasons(cli) == ["quarantined"]
    assert "value too long for column x" in cli("explain", NAME).out


@pytest.fixture
def postings(redis_client: redis.Redis) -> ClusterPostings:
    return ClusterPostings(redis_client, BoardKeys("cue", "clusters"))


def hold(postings: ClusterPostings, cluster: Cluster, how: End) -> None:
    (enqueued,) = postings.enqueue([cluster])
    claim = postings.claim(enqueued.uuid, "w1", ttl_seconds=10)
    assert claim is not None
    reason = "postgresql: integer out of range"
    postings.end(claim, how, delay_seconds=60, reason=reason, error="bad hosts")


def test_a_cluster_that_no_pass_looks_at(
    cli: Cli, work: Work, postings: ClusterPostings, engine: Engine, change: Callable[..., None]
) -> None:
    with engine.connect() as connection:
        facility = str(connection.scalar(text("SELECT pk_facility FROM job")))
    general, gpu, other = (
        Cluster(facility, work.show.id, ClusterKind.MANUAL, (tag,)) for tag in ("general", "gpu", "other")
    )
    change("UPDATE layer SET str_tags = 'general | gpu'")
    change("INSERT INTO host_tag (pk_host_tag, pk_host, str_tag) SELECT 'gpu', pk_host, 'gpu' FROM host")
    hold(postings, general, "fail")
    hold(postings, other, "fail")
    assert reasons(cli) == ["not_seen", "cooled_down"]
    said = cli("explain", NAME, "--layer", "render").out
    assert not lacks(said, general.key, "integer out of range")
    assert re.search(r"\b\d\d:\d\d:\d\d\b", said), "when a pass looks again"
    # when no cluster of the layer is left
    hold(postings, gpu, "trash")
    assert reasons(cli) == ["cooled_down", "trashed"]
    said = cli("explain", NAME, "--layer", "render").out
    assert not lacks(said, gpu.key, "bad hosts", "`opencue-sched board restore")


def test_the_reason_that_explains_most_comes_first(cli: Cli, work: Work, change: Callable[..., None]) -> None:
    change("UPDATE job SET b_paused = true")
    change("UPDATE show SET b_active = false")
    change("UPDATE host SET str_lock_state = 'LOCKED'")
    change("UPDATE job_resource SET int_max_gpus = 1, int_gpus = 0")
    assert reasons(cli) == ["paused", "show_inactive", "hosts_unavailable"]
    ran = cli("explain", NAME, "--layer", "render")
    first, *others = ran.out.splitlines()
    assert not lacks(first, "render (4 waiting)", "paused")
    assert [line.startswith("  also: ") for line in others] == [True, True]


# Verdicts of passes


def test_the_verdict_of_the_last_pass_is_said_when_nothing_else_decides(
    cli: Cli, work: Work, verdicts: VerdictLog, change: Callable[..., None]
) -> None:
    detail = "a frame needs 16 cores, 1 GiB; no host of the 1 with its tags has that idle"
    verdicts.record({"alloc-0123456789abcdef": [LayerVerdict(work.job.id, work.layer, Verdict.CAPACITY, 2, 4, detail)]})
    out = cli("explain", NAME).out
    assert out.startswith(f"render (4 waiting): capacity: {detail}, 2 ")
    assert re.search(r"\b\d+s\b", out.splitlines()[0].partition(detail)[2]), "its age"
    layer = cli("explain", NAME, "--json").json["layers"][0]
    assert [reason["code"] for reason in layer["reasons"]] == ["capacity"]
    change("UPDATE job SET b_paused = true")
    assert reasons(cli) == ["paused"]


def test_of_several_clusters_verdicts_the_most_telling_one_is_said(
    cli: Cli, work: Work, redis_client: redis.Redis
) -> None:
    for age, verdict, cluster in (
        (1.0, Verdict.NO_HOST, "manual-1"),
        (30.0, Verdict.OVER_SUBSCRIPTION, "alloc-1"),
        (500.0, Verdict.FLOWING, "hardware-1"),
    ):
        log = VerdictLog(redis_client, "cue", clock=lambda age=age: time.time() - age)  # type: ignore[misc]
        log.record({cluster: [LayerVerdict(work.job.id, work.layer, verdict, 0, 4, f"by {cluster}")]})
    said = re.match(r"render \(4 waiting\): over subscription: by alloc-1\b.*?(\d+)s\b", cli("explain", NAME).out)
    assert said is not None
    assert int(said[1]) >= 30, "its own age, be it a little more on a slow machine"


def test_a_layer_that_passes_do_not_come_to_is_told_how_many_are_before_it(
    cli: Cli, work: Work, engine: Engine, redis_client: redis.Redis
) -> None:
    # given three jobs of its show before it, one of them with two layers, and one that is paused
    with engine.begin() as connection:
        farm = Farm(connection)
        ahead = [JobSpec(layers=[LayerSpec(frames=1)], show=work.show, priority=200) for _ in range(3)]
        ahead.append(JobSpec(layers=[LayerSpec(frames=1), LayerSpec(frames=1)], show=work.show, priority=200))
        behind = JobSpec(layers=[LayerSpec(frames=1)], show=work.show, priority=1)
        paused, *_ = farm.jobs([*ahead, behind])
        connection.execute(text("UPDATE job SET b_paused = true WHERE pk_job = :job"), {"job": paused.id})
    # then it is told its place in the order
    assert reasons(cli) == ["behind", "not_seen"]
    first, *_ = cli("explain", NAME).out.splitlines()
    assert not lacks(first, "render (4 waiting)", "90s", "3 jobs", "4 layers")
    assert cli("explain", NAME, "--json").json["rank"]["layers_ahead"] == 4
    # and once a pass has looked at it, what that said
    log = VerdictLog(redis_client, "cue")
    log.record({"alloc-1": [LayerVerdict(work.job.id, work.layer, Verdict.CAPACITY, 0, 4, "busy")]})
    assert reasons(cli) == ["capacity"]


def test_a_layer_behind_others_says_what_was_last_said_of_it_too(
    cli: Cli, work: Work, engine: Engine, redis_client: redis.Redis
) -> None:
    # given a layer that no pass has looked at for two minutes, and a job before it
    with engine.begin() as connection:
        Farm(connection).job([LayerSpec(frames=1)], show=work.show, priority=200)
    log = VerdictLog(redis_client, "cue", clock=lambda: time.time() - 120)
    log.record({"alloc-1": [LayerVerdict(work.job.id, work.layer, Verdict.CAPACITY, 0, 4, "busy")]})
    assert reasons(cli) == ["behind", "capacity"]
    assert not lacks(cli("explain", NAME).out, "1 job ", "1 layer")


def test_a_layer_behind_others_waits_for_what_another_one_of_its_job_does_that_needs_the_same(
    cli: Cli, build: Build, work: Work, redis_client: redis.Redis
) -> None:
    # given a job of four layers of which passes came to the first; the second needs the same, the others do not
    def make(farm: Farm) -> JobIds:
        same = {"frames": 2, "cores": 4}
        layers = [LayerSpec(name="first", **same), LayerSpec(name="second", **same)]
        layers += [LayerSpec(name="larger", frames=2, cores=8), LayerSpec(name="elsewhere", tags="gpu", **same)]
        return farm.job(layers, show=work.show, name="large")

    job: JobIds = build(make)
    log = VerdictLog(redis_client, "cue")
    log.record({"alloc-1": [LayerVerdict(job.id, job.layers[0].id, Verdict.CAPACITY, 0, 2, "busy")]})
    # then the second says so
    found = {layer["layer"]: layer["reasons"] for layer in cli("explain", "large", "--json").json["layers"]}
    assert [reason["code"] for reason in found["second"]] == ["capacity", "behind", "not_seen"]
    assert not lacks(found["second"][0]["text"], "first", "capacity: busy")
    assert "1 job " in found["second"][1]["text"]
    assert found["second"][1]["text"].count("1 layer") == 2, "of that job, and of its own"
    assert [reason["code"] for reason in found["larger"]] == ["behind", "not_seen"]
    assert found["elsewhere"][0]["code"] == "no_host"


def test_a_layer_behind_others_waits_for_what_no_host_of_its_tags_has_idle(
    cli: Cli, build: Build, work: Work, redis_client: redis.Redis
) -> None:
    # given layers that no pass looked at by itself, and what a pass found of their hosts
    def make(farm: Farm) -> JobIds:
        layers = [LayerSpec(name=f"of{cores}", frames=2, cores=cores) for cores in (4, 2, 8)]
        return farm.job(layers, show=work.show, name="large")

    build(make)
    needs = Resources(4, 1024 * 1024)
    busy = Shortage(("general",), needs, Verdict.CAPACITY, "no host of the 3 with the tag general has 4 cores idle")
    other = Shortage(("gpu",), Resources(1, 1), Verdict.NO_HOST, "no open host")
    shortages = {(work.show.id, "alloc-1"): [other, busy]}
    VerdictLog(redis_client, "cue").record({}, shortages=shortages)

    def found() -> dict[str, list[str]]:
        """The codes of the reasons of each layer."""
        layers = cli("explain", "large", "--json").json["layers"]
        return {layer["layer"]: [reason["code"] for reason in layer["reasons"]] for layer in layers}

    # then those that need as much say so, and their place in the order
    assert found() == {
        "of4": ["capacity", "behind", "not_seen"],
        "of2": ["behind", "not_seen"],
        "of8": ["capacity", "behind", "not_seen"],
    }
    assert f"of8 (2 waiting): capacity: {busy.detail}" in cli("explain", "large").out

    # but for what is as old as no verdict is believed
    old = VerdictLog(redis_client, "cue", clock=lambda: time.time() - 120)
    old.record({}, shortages=shortages)
    assert set(map(tuple, found().values())) == {("behind", "not_seen")}


# How the job stands


def test_a_job_that_others_are_before_is_told_how_it_stands(
    cli: Cli, work: Work, verdicts: VerdictLog, engine: Engine
) -> None:
    # given a show that uses 4 of its 10 cores, and two more jobs of it
    with engine.begin() as connection:
        farm = Farm(connection)
        host = farm.host(name="render02", cores=16)
        running = farm.job([LayerSpec(frames=2)], show=work.show, name="running", priority=1)
        farm.run(running.frames, host, cores=2)
        for priority in (300, 200):
            farm.job(show=work.show, name=f"at{priority}", priority=priority)
    detail = "its show uses 0.40 times its size, and shows that use less of theirs took what was idle"
    verdicts.record({"alloc-1": [LayerVerdict(work.job.id, work.layer, Verdict.OVER_SHARE, 0, 4, detail)]})

    # when it is explained, then its standing is said
    layer, job = cli("explain", NAME).out.splitlines()
    assert layer.startswith(f"render (4 waiting): over share: {detail}")
    assert not lacks(job, "3 of 3", "priority 100", "25%", "16.7%")
    rank = cli("explain", NAME, "--json").json["rank"]
    assert (rank["place"], rank["jobs"], rank["priority"], rank["drawn"]) == (3, 3, 100, 0.25)
    assert rank["chance"] == pytest.approx(1 / 6)


@pytest.mark.parametrize(
    "sql",
    [
        "UPDATE job SET b_paused = true",
        "UPDATE frame SET str_state = 'DEAD'",
        "UPDATE host SET str_lock_state = 'LOCKED'",
    ],
)
def test_a_job_that_no_other_is_in_the_way_of_is_not_told_how_it_stands(
    cli: Cli, work: Work, change: Callable[..., None], sql: str
) -> None:
    assert "1 of 1" in cli("explain", NAME).out
    change(sql)
    told = cli("explain", NAME).out.splitlines()
    assert len([line for line in told if not line.startswith("  ")]) == 1


def test_explaining_costs_as_many_statements_however_many_jobs_there_are(
    engine: Engine, work: Work, settings: Settings
) -> None:
    sent: list[str] = []
    event.listen(engine, "before_cursor_execute", lambda _c, _cur, statement, *_: sent.append(statement))

    def statements() -> int:
        sent.clear()
        with engine.connect() as connection:
            explain_job(connection, work.job.id, settings)
        return len(sent)

    alone = statements()
    with engine.begin() as connection:
        farm = Farm(connection)
        for show in (work.show, farm.show("other")):
            farm.subscription(show, farm.alloc("more"))
            farm.jobs([JobSpec(layers=[LayerSpec(), LayerSpec()], show=show) for _ in range(30)])
    assert statements() == alone


def test_a_job_that_came_a_moment_ago_is_not_said_to_have_waited_a_day(cli: Cli, work: Work) -> None:
    # given a job that no pass has come to yet, then it is told so before anything is said of a day
    assert "yet" in cli("explain", NAME).out
    assert reasons(cli) == ["not_seen"]


def test_an_old_verdict_is_said_to_be_old(cli: Cli, work: Work, redis_client: redis.Redis) -> None:
    log = VerdictLog(redis_client, "cue", clock=lambda: time.time() - 3600)
    log.record({"alloc-1": [LayerVerdict(work.job.id, work.layer, Verdict.NO_FIT, 0, 4, "too big")]})
    assert reasons(cli) == ["no_fit", "not_seen"]
    assert "1h 0m" in cli("explain", NAME).out


def test_without_redis_the_database_is_asked_all_the_same(
    cli: Cli, work: Work, change: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OPENCUE_SCHED_REDIS_URL", "redis://127.0.0.1:1/0")
    change("UPDATE job SET b_paused = true")
    ran = cli("explain", NAME)
    assert (ran.status, "paused" in ran.out) == (0, True)
    assert "redis://127.0.0.1:1/0" in ran.err


def test_nothing_waits_and_unknown_names(cli: Cli, work: Work, change: Callable[..., None]) -> None:
    change("UPDATE frame SET str_state = 'SUCCEEDED'")
    change("UPDATE job SET str_state = 'FINISHED', str_visible_name = NULL")
    assert not lacks(cli("explain", NAME).out, "nothing", NAME, "FINISHED")
    assert cli("explain", "show-sh010-artist_cmp").status == 1
    unknown = cli("explain", NAME, "--layer", "rendr")
    assert (unknown.status, lacks(unknown.err, "'rendr'", "'render'")) == (1, [])


@pytest.fixture
def unreached(settings: Settings, redis_client: redis.Redis) -> None:
    """A worker that gets no answer from the RQD of render01."""
    said = [("render01", "(render01:8444) does not answer: DEADLINE_EXCEEDED: Deadline Exceeded, since 17:03:11")]
    membership = Membership(redis_client, settings, tuple, lambda: said)
    membership.join("w1@here", queues=lambda: ("cue:q:work:type:dispatch",), capacity=4)
    membership.heartbeat()


def test_a_host_that_reports_and_does_not_answer_the_workers(
    cli: Cli, work: Work, build: Build, unreached: None, change: Callable[..., None]
) -> None:
    # given a host that frames could go to and that reports, while a worker does not reach its RQD
    words = ("render01", "worker ", "render01:8444", "DEADLINE_EXCEEDED", "since 17:03:11")
    assert not lacks(cli("explain", NAME).out.splitlines()[1], *words)
    # when frames of the job run there and none waits, then it is told too
    build(lambda farm: farm.run(work.job.frames, work.host))
    assert not lacks(cli("explain", NAME).out, "4 frames", *words)
    (told,) = cli("explain", NAME, "--json").json["unreached_hosts"]
    assert not lacks(told, *words)
    # and not of a job that has nothing to do with it, nor of a host that is silent itself
    build(lambda farm: farm.job([LayerSpec(tags="gpu")], show=work.show, name="elsewhere"))
    assert cli("explain", "elsewhere", "--json").json["unreached_hosts"] == []
    # whose tags are compared without case
    change("UPDATE layer SET str_tags = 'GENERAL' WHERE str_tags = 'gpu'")
    (told,) = cli("explain", "elsewhere", "--json").json["unreached_hosts"]
    assert not lacks(told, *words)
    change("UPDATE host_stat SET ts_ping = now() - interval '1 day'")
    assert cli("explain", NAME, "--json").json["unreached_hosts"] == []


def test_memory_that_follows_what_frames_used_is_told(cli: Cli, work: Work, change: Callable[..., None]) -> None:
    change("UPDATE layer_mem SET int_max_rss = 2097152")
    assert "memory_lowered" not in reasons(cli)
    change("UPDATE layer SET int_mem_min = 2097152 + 262144")
    assert reasons(cli)[-1] == "memory_lowered"
    said = cli("explain", NAME, "--layer", "render").out
    assert not lacks(said, "2.2G", "2.0G")


def test_frames_that_needed_more_memory_are_told(cli: Cli, work: Work, change: Callable[..., None]) -> None:
    ask = (
        "INSERT INTO opencue_sched_frame_memory "
        "SELECT pk_frame, pk_layer, :memory FROM frame WHERE int_number = :number"
    )
    change(ask, memory=8 * 1024**2, number=1)
    change(ask, memory=6 * 1024**2, number=2)
    said = cli("explain", NAME, "--layer", "render").out
    assert not lacks(said, "2 frames", "8.0G")
    assert "6.0G" not in said
    change("UPDATE layer SET int_mem_min = 6291456")
    (told,) = [
        reason["text"]
        for reason in cli("explain", NAME, "--json").json["layers"][0]["reasons"]
        if reason["code"] == "memory_raised"
    ]
    assert not lacks(told, "8.0G", "6.0G")


def test_one_dead_frame_is_told_in_the_singular(cli: Cli, work: Work, change: Callable[..., None]) -> None:
    change("UPDATE frame SET str_state = 'DEAD' WHERE int_number = 1")
    reasons_told = cli("explain", NAME, "--json").json["layers"][0]["reasons"]
    (told,) = [reason["text"] for reason in reasons_told if reason["code"] == "dead"]
    assert not lacks(told, "1 frame ", f"`opencue-sched job retry {NAME}`")
