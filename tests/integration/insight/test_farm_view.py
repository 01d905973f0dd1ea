"""What top and the farm page read: figures that add up, by name, at a price that does not grow."""

from __future__ import annotations

import json
import time

import pytest
import redis
from sqlalchemy import Connection, Engine, text

from opencue_sched.dispatch.verdicts import VerdictLog
from opencue_sched.domain.verdicts import LayerVerdict, Verdict
from opencue_sched.embedded.farms.farm import Farm
from opencue_sched.embedded.farms.farm_specs import HostSpec, JobIds, JobSpec, LayerSpec
from opencue_sched.insight.farm_view import BOOKINGS_SECONDS, MOST_JOBS, farm_view, show_uses
from opencue_sched.settings import Settings
from opencue_sched.store.folders import list_folders
from opencue_sched.store.quarantine import quarantine_jobs
from tests.kit.gathering import counted_statements
from tests.kit.limits import has_types, report_held, set_type
from tests.kit.wording import lacks


def build(connection: Connection, *, hosts: int, jobs: int) -> tuple[Farm, list[JobIds]]:
    """A farm whose first host is down, second locked and third runs a frame of the first job."""
    farm = Farm(connection)
    alloc, show = farm.default_alloc(), farm.show("main")
    special = [HostSpec(cores=4, state="DOWN"), HostSpec(cores=4, lock="LOCKED")]
    made = farm.hosts([*special, *(HostSpec(cores=8) for _ in range(hosts))])
    other = farm.show("other")
    farm.subscription(show, alloc, size=100)
    farm.subscription(other, alloc, size=50)
    layers = [LayerSpec(frames=5)]
    waiting = [farm.job(layers, show=other if number % 2 else show, name=f"job{number}") for number in range(jobs)]
    farm.run(waiting[0].frames[:1], made[2], cores=2)
    return farm, waiting


def test_the_figures_of_allocations_shows_and_jobs_add_up(
    engine: Engine, redis_client: redis.Redis, settings: Settings
) -> None:
    with engine.begin() as connection:
        farm, (first, second) = build(connection, hosts=2, jobs=2)
        alloc = farm.default_alloc()
    view = farm_view(engine, redis_client, settings)
    (of,) = [it for it in view["allocations"] if it["name"] == alloc.name]
    assert (of["facility"], of["hosts"], of["hosts_locked"], of["hosts_down"]) == ("local", 4, 1, 1)
    assert (of["cores"], of["booked"], of["idle"], of["locked"], of["down"]) == (24, 2, 14, 4, 4)
    assert {it["name"]: (it["running"], it["waiting"], it["cores"]) for it in view["shows"]} == {
        first.show.name: (1, 4, 2),
        "other": (0, 5, 0),
    }
    (used,), (unused,) = (it["subscriptions"] for it in view["shows"])
    assert (used["allocation"], used["size"], used["used"], used["share"]) == (alloc.name, 100, 2, 1)
    assert (unused["share"], round(unused["due"] or 0, 2), round(used["due"] or 0, 2)) == (0, 0.33, 0.67)
    assert [(it["name"], it["waiting"], it["running"], it["cores"]) for it in view["jobs"]] == [
        (second.name, 5, 0, 0),
        (first.name, 4, 1, 2),
    ], "the one that nothing runs of comes first"
    assert (view["running"], view["waiting"], view["dead"]) == (1, 9, 0)
    assert view["bookings_per_second"] == round(1 / BOOKINGS_SECONDS, 2)


def test_what_shows_use_is_read_once_and_what_runs_in_folders_without_a_cap_not_at_all(engine: Engine) -> None:
    # Given 60 frames that run, ten of them in a folder with a cap
    with engine.begin() as connection:
        farm = Farm(connection)
        capped = farm.folder(farm.default_show(), "capped", max_cores=20)
        jobs = farm.jobs([JobSpec([LayerSpec(frames=50)]), JobSpec([LayerSpec(frames=10)], folder_id=capped)])
        host = farm.host(cores=128, memory_gb=128)
        farm.run([frame for job in jobs for frame in job.layers[0].frames], host)
    with engine.begin() as connection:
        before = procs_read(connection)
        # When the uses of shows are read
        (show,) = show_uses(connection, None)
        # Then each proc was looked at once, in the table or by an index
        assert (show["cores"], show["subscriptions"][0]["used"]) == (60, 60)
        assert procs_read(connection) - before == 60
    with engine.begin() as connection:
        before = procs_read(connection)
        # And when the folders with a cap are, those in them
        (folder,) = list_folders(connection, capped=True)
        assert (folder.id, folder.used_cores) == (capped, 10)
        # Or when none has any, no proc
        connection.execute(text("UPDATE folder_resource SET int_max_cores = -1"))
        before = procs_read(connection)
        assert list_folders(connection, capped=True) == []
        assert procs_read(connection) - before == 0


def procs_read(connection: Connection) -> int:
    """How many procs were read in this transaction, by scans or by an index."""
    read = text("SELECT seq_tup_read + coalesce(idx_tup_fetch, 0) FROM pg_stat_xact_user_tables WHERE relname = 'proc'")
    return int(connection.execute(read).scalar_one())


def test_jobs_are_chosen_by_parts_of_names_and_bounded(
    engine: Engine, redis_client: redis.Redis, settings: Settings
) -> None:
    with engine.begin() as connection:
        build(connection, hosts=1, jobs=2)
    for asked, names in (({"show": "OTH"}, ["job1"]), ({"job": "B0"}, ["job0"])):
        found = [it["name"] for it in farm_view(engine, redis_client, settings, **asked)["jobs"]]
        assert [name.rpartition("-")[2] for name in found] == names
    with engine.begin() as connection:
        Farm(connection).jobs(JobSpec([LayerSpec()], name=f"more{number}") for number in range(MOST_JOBS))
    view = farm_view(engine, redis_client, settings)
    assert (len(view["jobs"]), view["jobs_total"]) == (MOST_JOBS, MOST_JOBS + 2)


def test_every_job_has_the_reason_for_which_it_waits(
    engine: Engine, redis_client: redis.Redis, settings: Settings
) -> None:
    # Given a job of each kind: paused, in quarantine, judged by a pass, never looked at, waiting for another, all dead
    with engine.begin() as connection:
        farm = Farm(connection)
        farm.host()
        paused = farm.job(paused=True)
        quarantined, judged, unseen, behind, dead = (farm.job([LayerSpec(frames=3)]) for _ in range(5))
        farm.job_on_job(behind, judged)
        quarantine_jobs(connection, {quarantined.id: "its rows fail"}, 60)
        connection.execute(text("UPDATE frame SET str_state = 'DEAD' WHERE pk_job = :job"), {"job": dead.id})
    log = VerdictLog(redis_client, "cue")
    verdict = LayerVerdict(judged.id, judged.layers[0].id, Verdict.CAPACITY, 0, 3, "no host has 1 core idle")
    log.record({"alloc-1": [verdict]})
    log.record_waiting("", {"capacity": 3})
    # When the farm is read
    view = farm_view(engine, redis_client, settings)
    # Then each says it, and the waiting frames are counted by the verdict, as the metric has them
    why = {it["id"]: it["why"] for it in view["jobs"]}
    named = (paused, quarantined, judged, unseen, behind, dead)
    assert [why[it.id] for it in named] == ["paused", "quarantined", "capacity", "not_seen", "depend", "dead"]
    assert {it["id"] for it in view["jobs"] if it["waiting_seconds"] is None} == {behind.id, dead.id}
    assert not lacks({it["id"]: it["why_text"] for it in view["jobs"]}[judged.id], "capacity", "1 core")
    assert json.loads(json.dumps(view))["waiting_by_verdict"] == {"capacity": 3}


def test_a_verdict_that_left_no_frame_waiting_is_not_why_a_job_waits_later(
    engine: Engine, redis_client: redis.Redis, settings: Settings
) -> None:
    # Given a job that waits, and a pass of minutes ago
    with engine.begin() as connection:
        farm = Farm(connection)
        farm.host()
        job = farm.job([LayerSpec(frames=3)])
    log = VerdictLog(redis_client, "cue", clock=lambda: time.time() - 120)
    for waiting, why in ((0, "not_seen"), (3, "flowing")):
        log.record({"alloc-1": [LayerVerdict(job.id, job.layers[0].id, Verdict.FLOWING, 1, waiting, "")]})
        # When the farm is read, then that pass is why the job waits only if it left frames waiting
        assert [it["why"] for it in farm_view(engine, redis_client, settings)["jobs"]] == [why]


def test_a_job_whose_tag_no_cluster_reaches_says_so(
    engine: Engine, redis_client: redis.Redis, settings: Settings
) -> None:
    # Given jobs of which a layer asks for a tag of no host, of one host of two, of others' hosts, of its own, or done
    with engine.begin() as connection:
        farm = Farm(connection)
        farm.host(tags=["own"])
        farm.host(tags=["theirs"], alloc=farm.alloc("theirs"))
        tags = ("Absent | Nowhere", "absent | OWN", "theirs", "own", "absent")
        layers = [[LayerSpec(name="first"), LayerSpec(name="wide", frames=3, tags=it)] for it in tags]
        made = [farm.job(it) for it in layers]
        farm.connection.execute(
            text("UPDATE frame SET str_state = 'SUCCEEDED' WHERE pk_layer = :layer"), {"layer": made[4].layers[1].id}
        )
    # and passes that found hosts busy for the layers that they reach
    log = VerdictLog(redis_client, "cue")
    busy = [LayerVerdict(job.id, job.layers[0].id, Verdict.CAPACITY, 0, 1, "") for job in made]
    log.record({"alloc-1": busy})
    # When the farm is read
    why = {it["id"]: it["why_text"] for it in farm_view(engine, redis_client, settings)["jobs"]}
    # Then those that no host of the show will ever take say it
    absent, second, theirs, *others = (why[it.id] for it in made)
    assert not lacks(absent, "Absent", "Nowhere", "wide")
    assert not lacks(theirs, farm.default_show().name, "theirs", "wide")
    assert [second, *others] == ["capacity"] * 3


def test_a_larger_farm_costs_no_more_statements_and_round_trips(
    engine: Engine, redis_client: redis.Redis, settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent: list[int] = []
    original = redis.connection.Connection.send_packed_command

    def counting(self: redis.connection.Connection, command: object, check_health: bool = True) -> object:
        sent.append(1)
        return original(self, command, check_health)  # type: ignore[no-untyped-call]

    monkeypatch.setattr(redis.connection.Connection, "send_packed_command", counting)
    costs = []
    with engine.begin() as connection:
        build(connection, hosts=2, jobs=2)
    for jobs in (2, 150):
        with engine.begin() as connection:
            farm = Farm(connection)
            farm.hosts(HostSpec(name=f"blade{jobs}-{number}") for number in range(jobs))
            farm.jobs(JobSpec([LayerSpec(frames=2)], name=f"more{jobs}-{number}") for number in range(jobs))
        sent.clear()
        with counted_statements(engine) as statements:
            view = farm_view(engine, redis_client, settings)
        assert view["jobs_total"] >= jobs
        costs.append((len(statements), len(sent)))
    assert costs[0] == costs[1]
    assert costs[0][0] <= 11


def test_limits_are_told_the_fullest_first_with_what_is_reported(
    engine: Engine, redis_client: redis.Redis, settings: Settings
) -> None:
    with engine.begin() as connection:
        if not has_types(connection):
            pytest.skip("no reports before V49")
        farm = Farm(connection)
        farm.limit("arnold", 20)
        houdini = farm.limit("houdini", 6)
        set_type(connection, houdini, "HOST")
        report_held(connection, houdini, "ws016", "ws017")
        connection.execute(
            text("UPDATE limit_record SET ts_reported = now() - interval '1 hour' WHERE str_name = 'houdini'")
        )
    first, second = farm_view(engine, redis_client, settings)["limits"]
    assert (first["name"], first["used"], first["most"], first["counts"]) == ("houdini", 2, 6, "machines")
    assert (first["settled"], "15m" in first["open"], first["report_age"] >= 3600) == (2, True, True)
    assert second == {
        "name": "arnold",
        "counts": "frames",
        "used": 0,
        "most": 20,
        "frames": 0,
        "settled": None,
        "report_age": None,
        "open": "",
    }
