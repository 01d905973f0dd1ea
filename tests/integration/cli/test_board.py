"""``opencue-sched board`` and ``audit`` with people's names."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import redis

from opencue_sched.coordination.postings import cluster_postings
from opencue_sched.domain.clusters import Cluster, ClusterKind
from opencue_sched.embedded.farms.farm import Farm
from opencue_sched.embedded.farms.farm_specs import LayerSpec, ShowIds
from opencue_sched.settings import Settings
from tests.kit.brief_fleet import open_counters
from tests.kit.command import Cli
from tests.kit.wording import lacks

Build = Callable[[Callable[[Farm], Any]], Any]


def test_shows_and_facilities_have_their_names(
    cli: Cli, redis_client: redis.Redis, settings: Settings, build: Build
) -> None:
    def make(farm: Farm) -> tuple[ShowIds, str]:
        return farm.show("demo"), farm.facility("cloud")

    show, facility_id = build(make)
    cluster_postings(redis_client, settings).enqueue([Cluster(facility_id, show.id, ClusterKind.MANUAL, ("gpu",))])
    (posting,) = cli("board", "list", "--json").json
    assert (posting["show"], posting["facility"]) == ("demo", "cloud")
    assert cli("board", "show", posting["cluster"]).out.count("demo") == 1


def test_ids_are_shown_where_the_database_does_not_answer(
    cli: Cli, redis_client: redis.Redis, settings: Settings, environment: pytest.MonkeyPatch
) -> None:
    show_id, facility_id = "a" * 8 + "-aaaa-aaaa-aaaa-" + "a" * 12, "b" * 8 + "-bbbb-bbbb-bbbb-" + "b" * 12
    cluster_postings(redis_client, settings).enqueue([Cluster(facility_id, show_id, ClusterKind.MANUAL, ("gpu",))])
    environment.setenv("OPENCUE_SCHED_DATABASE_URL", "postgresql://nobody@127.0.0.1:1/none")
    (posting,) = cli("board", "list", "--json").json
    assert (posting["show"], posting["facility"]) == (show_id, facility_id)


def test_a_posting_that_cannot_be_read_hides_no_other(
    cli: Cli, redis_client: redis.Redis, settings: Settings, build: Build
) -> None:
    show = build(lambda farm: farm.show("demo"))
    facility_id = build(lambda farm: farm.facility("cloud"))
    shown = [Cluster(facility_id, show.id, ClusterKind.MANUAL, (tag,)) for tag in ("gpu", "arm")]
    cluster_postings(redis_client, settings).enqueue(shown)
    first, second = cli("board", "list", "--json").json
    (spoilt,) = redis_client.keys(f"*{first['posting']}*")
    redis_client.hset(spoilt, "details", "?")
    there = {it["cluster"]: (it["show"], it["tags"]) for it in cli("board", "list", "--json").json}
    assert there == {first["cluster"]: (None, "unreadable"), second["cluster"]: ("demo", second["tags"])}


def test_the_audit_names_the_frame_of_a_proc_that_is_not_in_the_ledger(
    cli: Cli, build: Build, redis_client: redis.Redis
) -> None:
    open_counters(redis_client)

    def make(farm: Farm) -> str:
        host, job = farm.host(name="render01"), farm.job([LayerSpec(name="render", frames=1)], name="demo-sh-user_a")
        return farm.run(job.frames[:1], host)[0]

    proc_id = build(make)
    ran = cli("audit")
    assert not lacks(ran.out, "0001-render", "demo-sh-user_a", "render01", "ledger")
    assert proc_id not in ran.out
    assert f"proc {proc_id} " in cli("audit", "--json").out
