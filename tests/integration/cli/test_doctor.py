"""`opencue-sched doctor`, and what every command says when a store is not there or not fit for use."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from typing import Any, cast

import pytest
import redis
from sqlalchemy import Engine, make_url, text

from opencue_sched.accounting import keys
from opencue_sched.accounting.bootstrap import ensure_bootstrapped
from opencue_sched.accounting.caps import make_ledger
from opencue_sched.accounting.epoch import Epoch
from opencue_sched.accounting.recompute import recompute
from opencue_sched.accounting.show_handover import ImportedShows
from opencue_sched.clients.postgres import engine_at
from opencue_sched.coordination.board import End
from opencue_sched.coordination.keys import BoardKeys
from opencue_sched.coordination.postings import ClusterPostings
from opencue_sched.coordination.presence import Presence, WorkerState
from opencue_sched.domain.clusters import Cluster, ClusterKind
from opencue_sched.embedded.farms.farm import Farm
from opencue_sched.embedded.farms.farm_specs import LayerSpec
from opencue_sched.embedded.rqds.simulated_host import HostSpec as SimulatedSpec
from opencue_sched.embedded.rqds.simulated_rqd import SimulatedFarm
from opencue_sched.insight.audit import Severity
from opencue_sched.insight.doctor import diagnose
from opencue_sched.settings import Accounting, Settings
from opencue_sched.store.quarantine import quarantine_jobs
from opencue_sched.store.schema import REVISION, check_schema
from tests.kit.command import Cli, Ran
from tests.kit.limits import before_v49, has_types
from tests.kit.wording import lacks

Build = Callable[[Callable[[Farm], Any]], Any]

JOB = "show: demo\nshot: s\nuser: u\nname: n\nlayers: [{name: a, command: x, range: 1}]\n"


@pytest.fixture
def change(engine: Engine) -> Callable[[str], None]:
    def run(sql: str) -> None:
        with engine.begin() as connection:
            connection.execute(text(sql))

    return run


@pytest.fixture
def healthy(build: Build, engine: Engine, redis_client: redis.Redis, environment: pytest.MonkeyPatch) -> Iterator[None]:
    """A farm that could render: a show with a subscription, a host with an RQD, counters open for booking."""

    def make(farm: Farm) -> None:
        farm.subscription(farm.show("demo"), farm.alloc("general"), size=10)
        farm.alloc("empty")
        farm.host(name="render01")

    build(make)
    ensure_bootstrapped(engine, make_ledger(engine, redis_client, owner="test", accounting=Accounting()), wait_age=0.1)
    with SimulatedFarm([SimulatedSpec("render01")]) as farm:
        environment.setenv("OPENCUE_SCHED_RQD__ADDRESSES", json.dumps(farm.addresses))
        yield


@pytest.fixture
def evicting(redis_client: redis.Redis) -> Iterator[None]:
    before = str(redis_client.config_get("maxmemory-policy")["maxmemory-policy"])
    redis_client.config_set("maxmemory-policy", "allkeys-lru")
    yield
    redis_client.config_set("maxmemory-policy", before)


def levels(ran: Ran) -> dict[str, str]:
    """The worst level of each thing looked at."""
    found: dict[str, str] = {}
    for finding in ran.json["findings"]:
        before = found.get(finding["what"], "ok")
        found[finding["what"]] = max(before, finding["level"], key=["ok", "warn", "FAIL"].index)
    return found


def finding(ran: Ran, level: str) -> dict[str, str]:
    (found,) = [one for one in ran.json["findings"] if one["level"] == level]
    return dict(found)


def test_a_farm_that_could_render_is_well_but_for_workers(cli: Cli, healthy: None) -> None:
    ran = cli("doctor", "--json")
    assert (ran.status, ran.json["failed"]) == (0, False)
    assert levels(ran) == {
        "PostgreSQL": "ok",
        "Redis": "ok",
        "schema": "ok",
        "shows": "ok",
        "hosts": "ok",
        "RQD": "ok",
        "release feed": "ok",
        "counters": "ok",
        "workers": "warn",
    }
    lines = cli("doctor").out.splitlines()
    assert any(line.startswith("ok    shows ") and not lacks(line, "1 managed", "demo") for line in lines)
    assert any(line.startswith("ok    RQD ") and "1 of 1 hosts" in line for line in lines)
    hosts = next(line for line in lines if line.startswith("ok    hosts "))
    assert not lacks(hosts, "1 in 1 allocation", "1 usable", "0 locked", "0 down")
    assert any(line.startswith("warn  workers ") for line in lines)
    assert lines[-1].startswith("                    -> `celery -A opencue_sched worker`")


def test_frames_that_wait_while_no_worker_lives_must_be_put_right(
    cli: Cli, healthy: None, build: Build, redis_client: redis.Redis, change: Callable[[str], None]
) -> None:
    # given three frames that wait, and no worker
    build(lambda farm: farm.job([LayerSpec(frames=3)]))
    ran = cli("doctor", "--json")
    assert (ran.status, finding(ran, "FAIL")["what"]) == (1, "workers")
    assert "3 frames" in finding(ran, "FAIL")["text"]
    # when somebody pauses their job, or a worker comes
    change("UPDATE job SET b_paused = true")
    assert cli("doctor").status == 0
    change("UPDATE job SET b_paused = false")
    worker = Presence(redis_client, "cue", types=["dispatch"], group="default", instance="one")
    worker.announce()
    # then nothing has to be done
    assert (cli("doctor").status, levels(cli("doctor", "--json"))["workers"]) == (0, "ok")


def test_workers_that_all_were_told_to_dispatch_nothing_are_a_warning_with_the_way_back(
    cli: Cli, healthy: None, build: Build, redis_client: redis.Redis
) -> None:
    # given frames that wait, a worker that is paused and one that works
    build(lambda farm: farm.job([LayerSpec(frames=3)]))
    for name, state in (("one", WorkerState.PAUSED), ("two", WorkerState.WORKING)):
        worker = Presence(redis_client, "cue", types=["dispatch"], group="default", instance=name, state=state)
        worker.announce()
    assert levels(cli("doctor", "--json"))["workers"] == "ok"
    # when the other drains, too
    worker.refresh(state=WorkerState.DRAINING)
    # then doctor says who dispatches nothing, and how that ends
    ran = cli("doctor", "--json")
    assert (ran.status, finding(ran, "warn")["what"]) == (0, "workers")
    assert not lacks(finding(ran, "warn")["text"], "1 paused", "1 draining", "3 frames")
    assert "`opencue-sched ctl resume`" in finding(ran, "warn")["remedy"]


def test_beside_a_cuebot_nobody_is_told_to_start_a_report_service_or_to_make_a_show(
    cli: Cli, change: Callable[[str], None]
) -> None:
    # given a database that a Cuebot made, on which nothing is yet
    change("UPDATE opencue_sched_origin SET origin = 'cuebot'")
    remedies = {one["what"]: one["remedy"] for one in cli("doctor", "--json").json["findings"]}
    assert "report-service" not in remedies["hosts"]
    assert "Cuebot" in remedies["hosts"]
    assert "show managed NAME on" in remedies["shows"]


@pytest.mark.parametrize(
    ("sql", "what", "level", "words"),
    [
        ("UPDATE show SET b_scheduler_managed = false", "shows", "warn", ["managed"]),
        ("UPDATE subscription SET int_burst = 0", "shows", "warn", ["demo", "subscription"]),
        (
            "UPDATE show SET b_active = false",
            "shows",
            "warn",
            ["demo is managed, but not active", "show active demo on"],
        ),
        ("UPDATE show SET b_booking_enabled = false", "shows", "warn", ["not to be booked", "show booking demo on"]),
        ("UPDATE show SET b_dispatch_enabled = false", "shows", "warn", ["not to be dispatched", "b_dispatch_enabled"]),
        ("UPDATE show SET b_paused = true", "shows", "warn", ["demo is managed, but paused", "b_paused"]),
        ("UPDATE host SET str_lock_state = 'LOCKED'", "hosts", "warn", ["none"]),
        (
            "UPDATE host_stat SET ts_ping = now() - interval '1 h'",
            "hosts",
            "warn",
            ["0 usable", "0 locked", "1 down"],
        ),
        (
            "DROP TRIGGER opencue_sched_guard_update ON proc",
            "guard",
            "warn",
            ["proc"],
        ),
        (
            "ALTER TABLE layer DISABLE TRIGGER opencue_sched_backlog",
            "backlog",
            "warn",
            ["opencue_sched_backlog on layer"],
        ),
        (
            "DROP TRIGGER opencue_sched_backlog ON show; DROP TRIGGER opencue_sched_work_arrived ON layer_stat",
            "backlog",
            "warn",
            ["opencue_sched_work_arrived on layer_stat", "opencue_sched_backlog on show"],
        ),
    ],
)
def test_what_somebody_probably_did_not_mean_is_a_warning(
    cli: Cli, healthy: None, change: Callable[[str], None], sql: str, what: str, level: str, words: list[str]
) -> None:
    change(sql)
    ran = cli("doctor", "--json")
    assert ran.status == 0
    assert levels(ran)[what] == level
    assert not lacks(cli("doctor").out, *words)


def test_a_fresh_database_without_a_farm_is_not_broken(cli: Cli, change: Callable[[str], None]) -> None:
    change("UPDATE opencue_sched_origin SET origin = 'opencue-sched'")
    ran = cli("doctor", "--json")
    assert ran.status == 0
    assert (levels(ran)["hosts"], levels(ran)["shows"], levels(ran)["counters"]) == ("warn", "warn", "warn")
    remedies = {one["what"]: one["remedy"] for one in ran.json["findings"]}
    assert "OPENCUE_SCHED_RELEASE__HOST" in remedies["hosts"]
    assert "show create NAME" in remedies["shows"]


def test_who_waits_for_a_worker_that_fills_the_counters_is_not_told_to_start_one(
    cli: Cli, healthy: None, redis_client: redis.Redis
) -> None:
    # given counters that are being filled
    run_id = str(redis_client.info("server")["run_id"])
    redis_client.set(keys.EPOCH, Epoch.new(run_id, state="filling").text)
    told = [one for one in cli("doctor", "--json").json["findings"] if one["what"] == "counters"]
    assert ["celery -A opencue_sched worker" in one["remedy"] for one in told] == [True]
    # when a worker is there
    Presence(redis_client, "cue", types=["dispatch"], group="default", instance="one").announce()
    # then doctor says that it takes a while
    ran = cli("doctor", "--json")
    assert (ran.status, finding(ran, "warn")["what"]) == (0, "counters")
    assert finding(ran, "warn")["remedy"]
    assert "celery" not in finding(ran, "warn")["remedy"]


def test_a_pool_that_hides_who_we_are_from_the_guard_is_said(
    database_url: str, redis_client: redis.Redis, settings: Settings
) -> None:
    renamed = engine_at(database_url, application_name="pooler")
    told = [finding for finding in diagnose(renamed, redis_client, settings).findings if "'pooler'" in finding.text]
    renamed.dispose()
    assert [(finding.what, finding.level) for finding in told] == [("PostgreSQL", Severity.FAIL)]


def test_statuses_of_which_a_cuebot_delays_layers_are_compared_with_ours(
    cli: Cli, healthy: None, build: Build, engine: Engine, environment: pytest.MonkeyPatch
) -> None:
    # given layers that a Cuebot delayed for two statuses, and one that a person did
    job = build(lambda farm: farm.job([LayerSpec(), LayerSpec(), LayerSpec()]))
    reasons = ("Automatic backoff: exit status 330", "Automatic backoff: exit status -7", "the disks are moved")
    with engine.begin() as connection:
        connection.execute(text("ALTER TABLE layer ADD COLUMN IF NOT EXISTS str_start_after_reason varchar(255)"))
        delay = text("UPDATE layer SET str_start_after_reason = :reason WHERE pk_layer = :layer")
        rows = [{"reason": reason, "layer": layer.id} for reason, layer in zip(reasons, job.layers, strict=True)]
        connection.execute(delay, rows)

    # when nothing is set, then doctor names both, and what to set
    ran = cli("doctor", "--json")
    (found,) = [found for found in ran.json["findings"] if found["what"] == "retries"]
    assert found["level"] == "warn"
    assert "-7, 330" in found["text"]
    assert "OPENCUE_SCHED_QUEUE__UNCOUNTED_EXIT_STATUSES" in found["remedy"]

    # and when both are set, then all is well
    environment.setenv("OPENCUE_SCHED_QUEUE__UNCOUNTED_EXIT_STATUSES", "330, -7")
    assert "retries" not in levels(cli("doctor", "--json"))


def test_jobs_in_quarantine_are_named(cli: Cli, healthy: None, build: Build, engine: Engine) -> None:
    job = build(lambda farm: farm.job(name="show-s-u_bad"))
    with engine.begin() as connection:
        quarantine_jobs(connection, {job.id: "broken"}, 600)
    assert "show-s-u_bad" in cli("doctor").out


def test_clusters_that_no_pass_looks_at_are_named_with_the_reason(
    cli: Cli, healthy: None, redis_client: redis.Redis
) -> None:
    postings = ClusterPostings(redis_client, BoardKeys("cue", "clusters"))
    cooled, trashed = (Cluster("fac", "show", ClusterKind.MANUAL, (tag,)) for tag in ("cooled", "trashed"))
    for cluster, how in ((cooled, "fail"), (trashed, "trash")):
        (enqueued,) = postings.enqueue([cluster])
        claim = postings.claim(enqueued.uuid, "w1", ttl_seconds=10)
        assert claim is not None
        postings.end(claim, cast(End, how), delay_seconds=60, reason="program: KeyError: x", error="bad hosts")
    ran = cli("doctor", "--json")
    told = [it for it in ran.json["findings"] if it["what"] == "clusters"]
    assert [it["level"] for it in told] == ["warn", "warn"]
    assert not lacks(told[0]["text"], cooled.key, "KeyError: x")
    assert not lacks(told[1]["text"], trashed.key, "bad hosts")


@pytest.mark.parametrize(
    ("variable", "value", "what", "level", "words"),
    [
        ("RQD__ADDRESSES", '{"render01": "here"}', "RQD", "FAIL", "render01 (here)"),
        ("RQD__ADDRESSES", '{"render01": "127.0.0.1:1"}', "RQD", "FAIL", "0 of 1"),
        ("RQD__ADDRESSES", '{"rendr01": "127.0.0.1:1"}', "RQD", "FAIL", "0 of 1"),
        ("RQD__DRY_RUN_MODE", "true", "RQD", "warn", "OPENCUE_SCHED_RQD__DRY_RUN_MODE"),
        ("ACCOUNTING__RELEASE_FEED", "recompute-only", "release feed", "FAIL", "accounting.release_feed"),
    ],
)
def test_settings_that_cannot_work_are_said(
    cli: Cli,
    healthy: None,
    environment: pytest.MonkeyPatch,
    variable: str,
    value: str,
    what: str,
    level: str,
    words: str,
) -> None:
    environment.setenv(f"OPENCUE_SCHED_{variable}", value)
    ran = cli("doctor", "--json")
    assert levels(ran)[what] == level
    assert words in cli("doctor").out
    assert ran.status == (1 if level == "FAIL" else 0)


def test_a_feed_that_only_a_cuebot_could_feed_is_said(
    cli: Cli, healthy: None, environment: pytest.MonkeyPatch, engine: Engine
) -> None:
    environment.setenv("OPENCUE_SCHED_ACCOUNTING__RELEASE_FEED", "cuebot-redis")
    with engine.connect() as connection:
        ours = check_schema(connection).origin == "opencue-sched"
    ran = cli("doctor", "--json")
    assert levels(ran)["release feed"] == ("FAIL" if ours else "ok")


def test_a_limit_whose_report_is_too_old_is_said(cli: Cli, healthy: None, engine: Engine) -> None:
    with engine.begin() as connection:
        if not has_types(connection):
            pytest.skip("no reports before V49")
        Farm(connection).limit("nuke", 5)
    assert "limits" not in levels(cli("doctor", "--json"))
    with engine.begin() as connection:
        connection.execute(text("UPDATE limit_record SET ts_reported = now() - interval '1 hour'"))
    ran = cli("doctor", "--json")
    assert (ran.status, levels(ran)["limits"]) == (0, "warn")
    (told,) = [found["text"] for found in ran.json["findings"] if found["what"] == "limits"]
    assert not lacks(told, "nuke", "1h 0m", "15m")


def test_a_cuebot_that_counts_frames_of_a_limit_that_counts_machines_is_said(
    cli: Cli, healthy: None, engine: Engine
) -> None:
    with engine.begin() as connection:
        Farm(connection).limit("nuke", 5)
        before_v49(connection)
        connection.execute(text("UPDATE limit_record SET b_host_limit = true"))
        connection.execute(text("UPDATE opencue_sched_origin SET origin = 'cuebot'"))
    said = [found["text"] for found in cli("doctor", "--json").json["findings"] if found["what"] == "limits"]
    assert len(said) == 1
    assert not lacks(said[0], "nuke", "b_host_limit", "Cuebot")
    # and whoever migrates is told, too
    assert not lacks(cli("migrate").err, "note: ", "nuke", "b_host_limit")


def test_missing_triggers_must_be_put_right(cli: Cli, healthy: None, change: Callable[[str], None]) -> None:
    change("DROP TRIGGER opencue_sched_proc_released ON proc")
    ran = cli("doctor", "--json")
    assert (ran.status, levels(ran)["release feed"]) == (1, "FAIL")
    assert "-> `opencue-sched migrate`" in cli("doctor").out


@pytest.mark.parametrize(("revision", "level"), [("0005", "FAIL"), ("9999", "ok")])
def test_triggers_of_an_older_version_are_said(
    cli: Cli, healthy: None, engine: Engine, revision: str, level: str
) -> None:
    assert levels(cli("doctor", "--json"))["schema"] == "ok"
    with engine.begin() as connection:
        connection.execute(text("UPDATE opencue_sched_version SET version_num = :there"), {"there": revision})
    ran = cli("doctor", "--json")
    assert levels(ran)["schema"] == level
    if level == "FAIL":
        assert revision in finding(ran, level)["text"]


def test_a_redis_that_evicts_is_refused(cli: Cli, healthy: None, evicting: None) -> None:
    ran = cli("doctor", "--json")
    assert (ran.status, finding(ran, "FAIL")["what"]) == (1, "Redis")
    assert not lacks(finding(ran, "FAIL")["text"], "maxmemory-policy", "allkeys-lru", "noeviction")


# Stores that are not there


@pytest.fixture
def no_database(environment: pytest.MonkeyPatch) -> None:
    environment.setenv("OPENCUE_SCHED_DATABASE_URL", "postgresql://someone:sesame@127.0.0.1:1/farm")


def test_doctor_says_which_database_does_not_answer(cli: Cli, no_database: None) -> None:
    ran = cli("doctor", "--json")
    assert ran.status == 1
    assert (levels(ran)["PostgreSQL"], levels(ran)["Redis"]) == ("FAIL", "ok")
    assert not lacks(cli("doctor").out, "127.0.0.1:1/farm", "OPENCUE_SCHED_DATABASE_URL")
    assert "sesame" not in ran.out + ran.err + cli("doctor").out


def test_doctor_says_which_redis_does_not_answer(cli: Cli, environment: pytest.MonkeyPatch) -> None:
    environment.setenv("OPENCUE_SCHED_REDIS_URL", "redis://:sesame@127.0.0.1:1/0")
    ran = cli("doctor")
    assert ran.status == 1
    assert any(line.startswith("FAIL  Redis ") and "redis://127.0.0.1:1/0" in line for line in ran.out.splitlines())
    assert "OPENCUE_SCHED_REDIS_URL" in ran.out
    assert "sesame" not in ran.out + ran.err
    assert "ok    PostgreSQL" in ran.out


@pytest.mark.parametrize(
    "words", [("submit", "-"), ("show", "list"), ("job", "list"), ("explain", "x"), ("host", "list")]
)
def test_every_command_says_which_database_does_not_answer(cli: Cli, no_database: None, words: tuple[str, ...]) -> None:
    ran = cli(*words, given=JOB)
    assert (ran.status, ran.out) == (1, "")
    assert ran.err.startswith("error: ")
    assert "postgresql+psycopg2://someone:***@127.0.0.1:1/farm" in ran.err
    assert "OPENCUE_SCHED_DATABASE_URL" in ran.err


def test_a_schema_that_is_too_old_is_refused_and_left_alone(cli: Cli, change: Callable[[str], None]) -> None:
    change("ALTER TABLE show DROP COLUMN b_scheduler_managed CASCADE")
    for words in (("submit", "-"), ("show", "create", "demo"), ("limit", "create", "x", "1")):
        ran = cli(*words, given=JOB)
        assert (ran.status, ran.out) == (78, "")
        assert "V45" in ran.err
    doctor = cli("doctor", "--json")
    assert (doctor.status, levels(doctor)["schema"]) == (1, "FAIL")


def test_a_database_without_a_schema_is_refused(
    cli: Cli, environment: pytest.MonkeyPatch, empty_database_url: str
) -> None:
    environment.setenv("OPENCUE_SCHED_DATABASE_URL", empty_database_url)
    ran = cli("show", "list")
    assert (ran.status, "`opencue-sched migrate`" in ran.err) == (78, True)
    assert levels(cli("doctor", "--json"))["schema"] == "FAIL"


def test_a_wrong_setting_is_named(cli: Cli, environment: pytest.MonkeyPatch) -> None:
    environment.setenv("OPENCUE_SCHED_RQD__GRPC_PORT", "many")
    ran = cli("doctor")
    assert ran.status == 78
    assert "OPENCUE_SCHED_RQD__GRPC_PORT" in ran.err


@pytest.mark.parametrize(
    ("variable", "value"), [("DATABASE_URL", "mysql://a/b"), ("DATABASE_URL", "notaurl"), ("REDIS_URL", "http://h/0")]
)
@pytest.mark.parametrize("words", [("job", "list"), ("doctor",), ("report-service",), ("audit",), ("migrate",)])
def test_a_url_that_is_none_is_a_wrong_configuration(
    cli: Cli, environment: pytest.MonkeyPatch, variable: str, value: str, words: tuple[str, ...]
) -> None:
    environment.setenv(f"OPENCUE_SCHED_{variable}", value)
    ran = cli(*words)
    assert (ran.status, ran.out) == (78, "")
    assert ran.err.startswith("error: ")
    assert f" OPENCUE_SCHED_{variable}: " in ran.err
    assert ran.err.count("\n") == 1


def test_an_option_of_the_database_url_that_is_none_is_named_with_the_variable(
    cli: Cli, environment: pytest.MonkeyPatch
) -> None:
    environment.setenv("OPENCUE_SCHED_DATABASE_URL", "postgresql://someone:sesame@127.0.0.1:1/farm?colour=red")
    for words, status in ((("job", "list"), 1), (("migrate",), 78)):
        ran = cli(*words)
        assert ran.status == status
        assert "colour" in ran.err
        assert "OPENCUE_SCHED_DATABASE_URL" in ran.err
        assert "sesame" not in ran.err


@pytest.mark.parametrize(
    "url",
    [
        "postgresql://127.0.0.1:1/farm?user=someone&password=sesame",
        "postgresql://someone@127.0.0.1:1/farm?sslpassword=sesame",
        "postgresql://someone:open@sesame@127.0.0.1:1/farm",
        "postgresql://someone:12/sesame@127.0.0.1:1/farm",
    ],
)
@pytest.mark.parametrize("words", [("job", "list"), ("doctor",), ("fleet",), ("migrate",)])
def test_no_password_of_a_database_url_is_shown_wherever_it_stands(
    cli: Cli, environment: pytest.MonkeyPatch, url: str, words: tuple[str, ...]
) -> None:
    environment.setenv("OPENCUE_SCHED_DATABASE_URL", url)
    ran = cli(*words)
    assert "OPENCUE_SCHED_DATABASE_URL" in ran.out + ran.err
    assert "sesame" not in ran.out + ran.err


def test_audit_says_which_variable_names_a_redis_that_does_not_answer(
    cli: Cli, environment: pytest.MonkeyPatch
) -> None:
    environment.setenv("OPENCUE_SCHED_REDIS_URL", "redis://:sesame@127.0.0.1:1/0")
    ran = cli("audit")
    assert (ran.status, ran.out) == (1, "")
    assert "OPENCUE_SCHED_REDIS_URL" in ran.err
    assert "sesame" not in ran.err


def test_a_misspelt_variable_is_warned_of_once(cli: Cli, environment: pytest.MonkeyPatch) -> None:
    environment.setenv("OPENCUE_SCHED_QEUEU__METRICS_PORT", "1")
    ran = cli("show", "list", "--json")
    assert (ran.status, ran.json) == (0, [])
    (line,) = ran.err.splitlines()
    assert line.startswith("warning: OPENCUE_SCHED_QEUEU__METRICS_PORT ")


def test_migrate_says_what_it_did(environment: pytest.MonkeyPatch, cli: Cli, empty_database_url: str) -> None:
    environment.setenv("OPENCUE_SCHED_DATABASE_URL", empty_database_url)
    first, again = cli("migrate", "--json"), cli("migrate", "--json")
    assert (first.status, again.status) == (0, 0)
    assert first.json == {"before": None, "revision": REVISION}
    assert again.json == {"before": REVISION, "revision": REVISION}
    assert REVISION in cli("migrate").out


def test_migrate_down_says_that_everything_goes_where_everything_is_ours(
    environment: pytest.MonkeyPatch, cli: Cli, empty_database_url: str
) -> None:
    environment.setenv("OPENCUE_SCHED_DATABASE_URL", empty_database_url)
    cli("migrate")
    asked = cli("migrate", "--down", given="n\n")
    assert asked.status == 1
    assert "nothing" in asked.err
    assert str(make_url(empty_database_url).database) in asked.out
    assert not lacks(asked.out, "everything", "backup")


def test_migrate_down_says_that_only_ours_goes_where_a_cuebot_made_the_database(
    cli: Cli, change: Callable[[str], None]
) -> None:
    change("UPDATE opencue_sched_origin SET origin = 'cuebot'")
    asked = cli("migrate", "--down", given="n\n")
    assert asked.status == 1
    assert not lacks(asked.out, "opencue_sched_", "Cuebot's tables stay")
    assert "everything" not in asked.out


def test_migrate_down_asks_nothing_where_nothing_is_to_be_removed(
    environment: pytest.MonkeyPatch, cli: Cli, empty_database_url: str
) -> None:
    environment.setenv("OPENCUE_SCHED_DATABASE_URL", empty_database_url)
    ran = cli("migrate", "--down")
    assert (ran.status, ran.out) == (0, "nothing of opencue-sched is there\n")


@pytest.mark.parametrize("words", [("fleet",), ("show", "list"), ("explain", "x")])
def test_a_command_on_a_database_that_was_not_migrated_says_what_to_run(
    cli: Cli, change: Callable[[str], None], words: tuple[str, ...]
) -> None:
    change("DROP TABLE opencue_sched_version, opencue_sched_fence, opencue_sched_quarantine")
    ran = cli(*words)
    assert (ran.status, ran.out) == (78, "")
    assert "`opencue-sched migrate`" in ran.err
    assert "relation" not in ran.err


def test_fleet_without_postgresql_is_shown_with_a_warning(cli: Cli, no_database: None) -> None:
    ran = cli("fleet", "--json")
    assert (ran.status, ran.json["workers"]) == (0, [])
    assert not lacks(ran.err, "127.0.0.1:1/farm", "OPENCUE_SCHED_DATABASE_URL")
    assert "sesame" not in ran.err
    assert "Background on" not in ran.err


@pytest.fixture
def running(healthy: None, build: Build, engine: Engine, redis_client: redis.Redis) -> str:
    """The id of the proc of a frame that runs, and is counted."""

    def make(farm: Farm) -> str:
        return farm.run(farm.job([LayerSpec(frames=1)]).frames[:1], farm.host(name="render02"))[0]

    proc = str(build(make))
    ledger = make_ledger(engine, redis_client, owner="test", accounting=Accounting())
    ImportedShows(engine, ledger, quarantine_seconds=0, age_seconds=40).import_all()
    recompute(engine, ledger)
    return proc


def counter_words(ran: Ran) -> list[str]:
    """What doctor says of counters that need a look, with the offenders."""
    return [
        " ".join([found["text"], *found["offenders"]])
        for found in ran.json["findings"]
        if (found["what"], found["level"]) == ("counters", "warn")
    ]


def test_a_difference_that_the_next_recompute_will_put_right_is_no_news(
    cli: Cli, running: str, change: Callable[[str], None], redis_client: redis.Redis
) -> None:
    # given a release that nobody heard, and a proc that somebody else booked, both since the last recompute
    change("DELETE FROM proc")
    assert counter_words(cli("doctor", "--json")) == []
    # when no recompute has come for three times as long as it should have
    redis_client.decrby("acct:recomputed", 360)
    # then that is said, and what it leaves undone
    told = counter_words(cli("doctor", "--json"))
    assert any("recompute" in text for text in told)
    assert any(running in text for text in told)
    assert cli("doctor").status == 0


def test_a_difference_that_a_recompute_has_had_its_turn_at_is_a_warning(
    cli: Cli, running: str, change: Callable[[str], None], redis_client: redis.Redis
) -> None:
    # given a proc of an hour ago, which the last recompute must have seen
    change("UPDATE proc SET ts_booked = now() - interval '1 hour'")
    assert counter_words(cli("doctor", "--json")) == []
    # when the ledger does not have it
    redis_client.hdel("acct:ledger", running)
    # then that is a warning, as it is an audit's failure
    told = counter_words(cli("doctor", "--json"))
    assert [text for text in told if running in text] == told != []


def test_a_counter_that_no_recompute_corrects_is_a_warning(
    cli: Cli, running: str, redis_client: redis.Redis, engine: Engine
) -> None:
    with engine.connect() as connection:
        job = str(connection.execute(text("SELECT pk_job FROM proc")).scalar_one())
    redis_client.hincrby(f"acct:job:{job}", "int_cores", 5)
    redis_client.decrby("acct:recomputed", 360)
    assert any(not lacks(text, "(6, 0)", "(1, 0)") for text in counter_words(cli("doctor", "--json")))


def test_an_entry_that_a_recompute_found_without_a_proc_and_is_still_there_is_a_warning(
    cli: Cli, running: str, change: Callable[[str], None], redis_client: redis.Redis, engine: Engine
) -> None:
    # given an entry that a recompute found without a proc
    entry = str(redis_client.hget("acct:ledger", running))
    change("DELETE FROM proc")
    recompute(engine, make_ledger(engine, redis_client, owner="test", accounting=Accounting()))
    assert counter_words(cli("doctor", "--json")) == []
    # when it is there as before
    redis_client.hset("acct:ledger", running, entry)
    # then the recompute has had its turn at it
    told = counter_words(cli("doctor", "--json"))
    assert [text for text in told if running in text] == told != []


def test_a_counter_that_a_recompute_found_and_is_off_as_before_is_a_warning(
    cli: Cli, running: str, redis_client: redis.Redis, engine: Engine
) -> None:
    with engine.connect() as connection:
        job = keys.job(str(connection.execute(text("SELECT pk_job FROM proc")).scalar_one()))
    # given a counter that a recompute found 5 cores off, and corrected
    redis_client.hincrby(job, "int_cores", 5)
    recompute(engine, make_ledger(engine, redis_client, owner="test", accounting=Accounting()))
    # when it is off by another amount, then that is news to the next recompute; by the same, then it is a warning
    redis_client.hincrby(job, "int_cores", 4)
    assert counter_words(cli("doctor", "--json")) == []
    redis_client.hincrby(job, "int_cores", 1)
    assert any(not lacks(words, "(6, 0)", "(1, 0)") for words in counter_words(cli("doctor", "--json")))


@pytest.mark.parametrize("written", ["", "yesterday", "[1]", '{"entries": 1}', '{"entries": {}, "counters": {"x": 1}}'])
def test_what_somebody_writes_in_place_of_the_findings_of_a_recompute_says_nothing(
    cli: Cli, running: str, redis_client: redis.Redis, change: Callable[[str], None], written: str
) -> None:
    change("DELETE FROM proc")
    redis_client.delete("acct:recomputed:found")
    if written:
        redis_client.set("acct:recomputed:found", written)
    else:
        redis_client.rpush("acct:recomputed:found", "x")
    ran = cli("doctor", "--json")
    assert counter_words(ran) == []
    assert levels(ran)["counters"] == "ok"


def test_what_workers_do_not_reach_is_told_though_this_machine_does(
    cli: Cli, healthy: None, redis_client: redis.Redis
) -> None:
    # given an RQD that answers here, and a worker whose calls it leaves unanswered
    worker = Presence(redis_client, "cue", types=["dispatch"], group="default", instance="one")
    worker.announce()
    worker.refresh(unreached=(("render01", "(render01:8444) does not answer: DEADLINE_EXCEEDED, since 17:03:11"),))
    ran = cli("doctor", "--json")
    # then both are told
    here, there = (one for one in ran.json["findings"] if one["what"] == "RQD")
    assert (here["level"], there["level"]) == ("ok", "warn")
    assert all(fact in there["text"] for fact in ("render01", "worker one", "DEADLINE_EXCEEDED, since 17:03:11"))


def test_hosts_that_a_worker_does_not_name_are_counted(cli: Cli, healthy: None, redis_client: redis.Redis) -> None:
    # given a worker that does not reach more hosts than it names
    worker = Presence(redis_client, "cue", types=["dispatch", "sweep"], group="default", instance="one")
    worker.announce()
    worker.refresh(unreached=[(f"render0{number}", "does not answer") for number in range(5)], more_unreached=30)
    # then some are named, and all counted
    text = finding(cli("doctor", "--json"), "warn")["text"]
    assert [text.count(fact) for fact in ("render0", " 2 ", " 30 ")] == [3, 1, 1]


def test_a_worker_whose_backlog_is_old_is_named(cli: Cli, healthy: None, redis_client: redis.Redis) -> None:
    # given two workers, one of which has not compared what it keeps of waiting work for two minutes
    for instance, age in (("one", 3.0), ("two", 125.0)):
        worker = Presence(redis_client, "cue", types=["dispatch", "sweep"], group="default", instance=instance)
        worker.announce()
        worker.refresh(backlog_age_seconds=age)
    # then it is named, once
    told = [one for one in cli("doctor", "--json").json["findings"] if one["what"] == "backlog"]
    assert [one["level"] for one in told] == ["warn"]
    assert all(fact in told[0]["text"] for fact in ("worker two", "2m", "10 s"))


def test_a_worker_that_hears_no_notification_is_named(cli: Cli, healthy: None, redis_client: redis.Redis) -> None:
    worker = Presence(redis_client, "cue", types=["dispatch", "sweep"], group="default", instance="one")
    worker.announce()
    worker.refresh(deaf=True)
    told = finding(cli("doctor", "--json"), "warn")
    assert told["what"] == "notifications"
    assert all(fact in told["text"] for fact in ("worker one", "5 s"))
    assert "pool_mode = session" in told["remedy"]


def test_a_host_whose_name_leads_to_another_machine_is_told_with_both_names(
    cli: Cli, build: Build, healthy: None, environment: pytest.MonkeyPatch
) -> None:
    # given a host that is reported up, and whose name leads to the RQD of another one
    build(lambda farm: farm.host(name="render02"))
    addresses = json.loads(os.environ["OPENCUE_SCHED_RQD__ADDRESSES"])
    there = addresses["render01"]
    environment.setenv("OPENCUE_SCHED_RQD__ADDRESSES", json.dumps({**addresses, "render02": there}))
    ran = cli("doctor", "--json")
    assert (levels(ran)["RQD"], ran.err) == ("warn", "")
    (told,) = [found["text"] for found in ran.json["findings"] if found["what"] == "RQD"]
    assert not lacks(told, f"render02 ({there})", "render01")


def test_two_rows_whose_names_differ_in_case_alone_are_named_with_the_remedy(
    cli: Cli, build: Build, healthy: None
) -> None:
    build(lambda farm: farm.host(name="RENDER01"))
    findings = cli("doctor", "--json").json["findings"]
    (told,) = [one for one in findings if (one["what"], one["level"]) == ("hosts", "warn")]
    assert all(name in told["text"] for name in ("RENDER01", "render01"))
    assert "`opencue-sched host delete`" in told["remedy"]


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda client: client.set("acct:seq", "9223372036854775807"), ["acct:seq", "'9223372036854775807'"]),
        (lambda client: client.set("acct:seq", "0"), ["acct:seq"]),
        (lambda client: client.rename("acct:seq", "acct:counted"), ["acct:counted", "string", "hash"]),
    ],
)
def test_damaged_counters_must_be_put_right(
    cli: Cli, running: str, redis_client: redis.Redis, damage: Callable[[redis.Redis], object], words: list[str]
) -> None:
    damage(redis_client)
    ran = cli("doctor", "--json")
    assert (ran.status, finding(ran, "FAIL")["what"]) == (1, "counters")
    assert not lacks(finding(ran, "FAIL")["text"], *words)
    assert redis_client.exists("acct:epoch"), "doctor only looks"


def test_events_of_jobs_that_cannot_be_delivered_are_told_without_the_url(
    cli: Cli, healthy: None, change: Callable[[str], None], environment: pytest.MonkeyPatch
) -> None:
    # given a farm with a receiver, which is well
    change("UPDATE opencue_sched_origin SET origin = 'opencue-sched'")
    environment.setenv("OPENCUE_SCHED_EVENTS__URL", "https://me:secret@hooks.studio:8443/secret?key=secret")
    ran = cli("doctor", "--json")
    assert levels(ran)["events"] == "ok"
    assert "https://hooks.studio:8443/***" in ran.out
    assert "secret" not in ran.out

    # when it refuses one event, and nobody sends another
    change(
        "INSERT INTO opencue_sched_job_event (event, facility, body, made_at, tries, last_error) VALUES"
        " ('job_ended', 'local', '{}', now() - interval '2 hours', 3, 'it answered 503'),"
        " ('job_ended', 'local', '{}', now() - interval '5 minutes', 0, NULL)"
    )
    # then both are told, with what to do
    ran = cli("doctor", "--json")
    told = [finding for finding in ran.json["findings"] if finding["what"] == "events"]
    assert [finding["level"] for finding in told] == ["warn", "warn"]
    assert not lacks(told[0]["text"], "1 event", "https://hooks.studio:8443/***", "2h")
    assert "it answered 503" in told[0]["text"]
    assert "1 event" in told[1]["text"]


def test_a_receiver_on_a_cuebots_database_is_said_to_have_no_effect(
    cli: Cli, healthy: None, change: Callable[[str], None], environment: pytest.MonkeyPatch
) -> None:
    change("UPDATE opencue_sched_origin SET origin = 'cuebot'")
    environment.setenv("OPENCUE_SCHED_EVENTS__COMMAND", "/usr/local/bin/notify")
    assert levels(cli("doctor", "--json"))["events"] == "warn"


def test_a_command_that_is_no_program_here_is_told(
    cli: Cli, healthy: None, change: Callable[[str], None], environment: pytest.MonkeyPatch
) -> None:
    change("UPDATE opencue_sched_origin SET origin = 'opencue-sched'")
    environment.setenv("OPENCUE_SCHED_EVENTS__COMMAND", "/nowhere/notify,--farm")
    assert levels(cli("doctor", "--json"))["events"] == "warn"
