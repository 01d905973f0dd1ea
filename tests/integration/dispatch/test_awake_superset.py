"""The awake gate never misses work that a pass could book, whatever the farm looks like."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

from hypothesis import HealthCheck, given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from sqlalchemy import Connection, Engine, text

from opencue_sched.dispatch.clusters import load_clusters
from opencue_sched.dispatch.sweep import with_work
from opencue_sched.embedded.farms.farm import Farm
from opencue_sched.embedded.farms.farm_specs import LayerSpec
from opencue_sched.settings import Queue, Settings
from opencue_sched.store.pending import fetch_waiting_work, waiting_tags
from opencue_sched.store.reservations import begin_task
from opencue_sched.store.schema import SchemaFacts, check_schema
from tests.kit.examples import examples
from tests.kit.gathering import with_bookable_work

TAGS = ["general", "Desktop", "M1", "m2", "M 3", "linux", "Absent"]
FACILITIES = ["spi", "lax"]

layers = st.fixed_dictionaries(
    {
        "tags": st.lists(st.sampled_from(TAGS), max_size=3, unique=True),
        "separator": st.sampled_from(["|", " | ", " |"]),
        "frames": st.integers(0, 3),
        "cores": st.sampled_from([-1, 0, 0.5, 1, 4]),
        "gpus": st.integers(0, 1),
        "limited": st.booleans(),
        "delayed": st.sampled_from([None, -1, 1]),
        "state": st.sampled_from(["WAITING", "WAITING", "WAITING", "DEPEND", "SUCCEEDED"]),
    }
)
jobs = st.fixed_dictionaries(
    {
        "show": st.integers(0, 2),
        "facility": st.sampled_from(FACILITIES),
        "layers": st.lists(layers, min_size=1, max_size=3),
        "paused": st.sampled_from([False, False, False, True]),
        "activate": st.sampled_from([True, True, True, False]),
        "max_cores": st.sampled_from([-1, 0, 0.5, 1, 100]),
        "max_gpus": st.sampled_from([-1, 0, 1]),
        "running": st.integers(0, 2),
    }
)
shows = st.fixed_dictionaries(
    {
        "managed": st.sampled_from([True, True, False]),
        "active": st.sampled_from([True, True, False]),
        "booking_enabled": st.sampled_from([True, True, False]),
        "folder_max_cores": st.sampled_from([-1, 0, 1, 50]),
        "bursts": st.lists(st.sampled_from([0, 0.5, 1, 100]), min_size=4, max_size=4),
    }
)
farms = st.fixed_dictionaries(
    {
        "shows": st.lists(shows, min_size=3, max_size=3),
        "jobs": st.lists(jobs, min_size=1, max_size=5),
        "chunk": st.integers(1, 3),
        "limit": st.integers(0, 2),
    }
)


def build(connection: Connection, spec: dict[str, Any], facts: SchemaFacts) -> None:
    farm = Farm(connection)
    allocs = [farm.alloc(tag, facility=facility) for facility in FACILITIES for tag in ("general", "desktop")]
    made = []
    for number, show in enumerate(spec["shows"]):
        made.append(farm.show(f"show{number}", **{key: value for key, value in show.items() if key != "bursts"}))
        for alloc, burst in zip(allocs, show["bursts"], strict=True):
            if burst:
                farm.subscription(made[-1], alloc, size=burst)
    hosts = [farm.host(alloc=alloc, cores=32, gpus=4, tags=["m1", "m 3"], hardware_tags=["Linux"]) for alloc in allocs]
    hosts += [farm.host(alloc=alloc, tags=["m2"], state="DOWN") for alloc in allocs]
    limit = farm.limit("licence", spec["limit"])
    now = datetime.now(UTC)
    for job in spec["jobs"]:
        wanted = [layer_spec(layer, limit, now if facts.has_start_after else None) for layer in job["layers"]]
        caps = {key: job[key] for key in ("paused", "activate", "max_cores", "max_gpus")}
        ids = farm.job(wanted, show=made[job["show"]], facility_id=farm.facility(job["facility"]), **caps)
        if job["activate"]:
            for layer, layer_ids in zip(job["layers"], ids.layers, strict=True):
                if layer["state"] != "WAITING" and layer_ids.frames:
                    connection.execute(
                        text("UPDATE frame SET str_state = :state WHERE pk_layer = :layer"),
                        {"state": layer["state"], "layer": layer_ids.id},
                    )
            waiting = [
                f
                for layer, l_ids in zip(job["layers"], ids.layers, strict=True)
                for f in l_ids.frames
                if layer["state"] == "WAITING"
            ]
            farm.run(waiting[: job["running"]], hosts[0])


def layer_spec(layer: dict[str, Any], limit: str, now: datetime | None) -> LayerSpec:
    delay = layer["delayed"]
    return LayerSpec(
        frames=layer["frames"],
        tags=layer["separator"].join(layer["tags"]),
        cores=layer["cores"],
        gpus=layer["gpus"],
        limits=[limit] if layer["limited"] else [],
        start_after=now + timedelta(hours=delay) if now is not None and delay is not None else None,
        numbers=tuple(range(1, layer["frames"] + 1)),
        range="1",
    )


@hypothesis_settings(
    max_examples=examples(30),
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(spec=farms)
def test_every_cluster_with_pending_jobs_is_awake(engine: Engine, settings: Settings, spec: dict[str, Any]) -> None:
    queue = Queue(manual_tags_chunk_size=spec["chunk"], hostname_tags_chunk_size=spec["chunk"])
    changed = settings.model_copy(update={"queue": queue})
    with engine.connect() as connection, connection.begin() as transaction:
        facts = check_schema(connection)
        build(connection, spec, facts)

        clusters = load_clusters(connection, changed)
        awake = with_work(waiting_tags(connection, None), clusters)
        asleep = [cluster for cluster in clusters if cluster not in awake]
        missed = with_bookable_work(connection, asleep, facts)
        work = fetch_waiting_work(connection, None, facts, settle_window_seconds=120)
        run = begin_task(connection, "")

        transaction.rollback()
    assert not missed
    # nor does the task that reserves hosts miss what may wait for one
    assert run is not None
    assert run.needed or not work


def test_the_random_farms_do_have_clusters_with_work(engine: Engine, settings: Settings) -> None:
    """Guards the property above against passing for want of work."""
    layer = {"tags": ["m1", "general"], "separator": " | ", "frames": 2, "cores": 1, "gpus": 0, "limited": False}
    job = {"show": 0, "facility": "spi", "layers": [{**layer, "delayed": -1, "state": "WAITING"}], "paused": False}
    show = {"managed": True, "active": True, "booking_enabled": True, "folder_max_cores": -1, "bursts": [100] * 4}
    spec = {
        "shows": [show] * 3,
        "jobs": [{**job, "activate": True, "max_cores": 0, "max_gpus": 0, "running": 1}],
        "chunk": 1,
        "limit": 1,
    }
    with engine.begin() as connection:
        facts = check_schema(connection)
        build(connection, spec, facts)
        clusters = load_clusters(connection, settings)

        with_work = with_bookable_work(connection, clusters, facts)

    assert {kind for cluster in with_work for kind in [cluster.kind.value]} == {"alloc", "manual"}
