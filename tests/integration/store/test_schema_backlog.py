"""What our triggers name on opencue_sched_backlog: shows, jobs and layers that a worker has to read again."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import pytest
from sqlalchemy import Engine, text

from opencue_sched.embedded.farms.farm import Farm
from opencue_sched.embedded.farms.farm_specs import JobIds, LayerSpec
from opencue_sched.store.schema import absent_backlog_triggers, check_schema
from opencue_sched.worker.events import BACKLOG_CHANNEL
from tests.kit.notifications import Listener

Named = dict[str, list[str]]

SHOW_FLAGS = ("b_active", "b_booking_enabled", "b_dispatch_enabled", "b_paused")
JOB_CHANGES = {
    "str_state": "'FINISHED'",
    "b_paused": "NOT b_paused",
    "b_auto_book": "NOT b_auto_book",
    "pk_folder": ":folder",
    "pk_dept": ":dept",
    "str_os": "'another'",
}
LAYER_CHANGES = {
    "int_cores_min": "int_cores_min + 100",
    "int_cores_max": "int_cores_max + 100",
    "int_gpus_min": "int_gpus_min + 1",
    "int_gpus_max": "int_gpus_max + 1",
    "int_gpu_mem_min": "int_gpu_mem_min + 1",
    "int_mem_min": "int_mem_min + 1",
    "int_dispatch_order": "int_dispatch_order + 1",
    "str_tags": "str_tags || ' | more'",
    "b_threadable": "NOT b_threadable",
}
ADD_LIMIT = "INSERT INTO layer_limit (pk_layer_limit, pk_layer, pk_limit_record) VALUES ('new', :{whose}_layer, :limit)"
QUARANTINE = "INSERT INTO opencue_sched_quarantine (pk_job, reason, until) VALUES (:{whose}_job, 'bad', 'infinity')"
MOVE = "UPDATE frame SET str_state = :state WHERE pk_frame = ANY(CAST(:frames AS varchar[]))"


def _set(table: str, column: str, value: str, *, whose: str = "our") -> str:
    """A statement that changes a column of one show, job or layer."""
    return f"UPDATE {table} SET {column} = {value} WHERE pk_{table} = :{whose}_{table}"  # noqa: S608 - names are ours


@dataclass
class Site:
    """Two shows, of which ``ours`` is managed, with a job of two layers each, and a session that listens."""

    engine: Engine
    listener: Listener
    ours: JobIds
    theirs: JobIds
    ids: Mapping[str, str]
    has_start_after: bool

    def write(self, statement: str, **parameters: object) -> None:
        with self.engine.begin() as connection:
            connection.execute(text(statement), {**self.ids, **parameters})

    def named(self) -> Named:
        """Every id named since the last call, each once, and on no other field than the three there are."""
        ids: dict[str, list[str]] = {}
        for payload in self.listener.heard(self.engine).get("backlog", []):
            assert payload
            for field, named in payload.items():
                assert named
                ids.setdefault(field, []).extend(named)
        assert ids.keys() <= {"shows", "jobs", "layers"}
        assert all(len(named) == len(set(named)) for named in ids.values()), ids
        return {field: sorted(named) for field, named in ids.items()}

    def named_after(self, statement: str, **parameters: object) -> Named:
        self.write(statement, **parameters)
        return self.named()


@pytest.fixture
def site(engine: Engine, database_url: str) -> Iterator[Site]:
    with engine.begin() as connection:
        farm = Farm(connection)
        shows = farm.show("ours"), farm.show("theirs", managed=False)
        ours, theirs = (farm.job([LayerSpec(frames=3), LayerSpec(frames=3)], show=show) for show in shows)
        ids = {
            "folder": farm.folder(shows[0], "another"),
            "their_folder": farm.folder(shows[1], "another"),
            "dept": farm.dept("another"),
            "limit": farm.limit("nuke", 3),
            "our_show": shows[0].id,
            "our_job": ours.id,
            "our_layer": ours.layers[0].id,
            "their_show": shows[1].id,
            "their_job": theirs.id,
            "their_layer": theirs.layers[0].id,
        }
        has_start_after = check_schema(connection).has_start_after
    listener = Listener(database_url, [BACKLOG_CHANNEL])
    made = Site(engine, listener, ours, theirs, ids, has_start_after)
    try:
        yield made
    finally:
        listener.close()


@pytest.mark.parametrize("column", JOB_CHANGES)
def test_a_job_that_a_worker_has_to_look_at_again_is_named(site: Site, column: str) -> None:
    assert site.named_after(_set("job", column, JOB_CHANGES[column])) == {"jobs": [site.ours.id]}


@pytest.mark.parametrize("column", LAYER_CHANGES)
def test_a_layer_that_needs_something_else_is_named(site: Site, column: str) -> None:
    change = _set("layer", column, LAYER_CHANGES[column])
    assert site.named_after(change) == {"layers": [site.ours.layers[0].id]}
    # also while its job is paused: who unpauses it names the job alone
    site.write("UPDATE job SET b_paused = true")
    site.named()
    assert site.named_after(change) == {"layers": [site.ours.layers[0].id]}


def test_a_layer_whose_start_is_set_anew_is_named(site: Site) -> None:
    if not site.has_start_after:
        pytest.skip("a Cuebot before V47 knows no start times")
    for start in ("now() + interval '12 s'", "NULL"):
        assert site.named_after(_set("layer", "ts_start_after", start)) == {"layers": [site.ours.layers[0].id]}
        assert site.named_after(_set("layer", "ts_start_after", "ts_start_after")) == {}


def test_a_layer_of_another_limit_is_named(site: Site) -> None:
    assert site.named_after(ADD_LIMIT.format(whose="our")) == {"layers": [site.ours.layers[0].id]}
    taken = site.named_after("DELETE FROM layer_limit WHERE pk_layer = :our_layer AND pk_limit_record = :limit")
    assert taken == {"layers": [site.ours.layers[0].id]}


def test_a_job_in_quarantine_or_out_of_it_is_named(site: Site) -> None:
    assert site.named_after(QUARANTINE.format(whose="our")) == {"jobs": [site.ours.id]}
    assert site.named_after("UPDATE opencue_sched_quarantine SET until = now()") == {"jobs": [site.ours.id]}
    assert site.named_after("DELETE FROM opencue_sched_quarantine") == {"jobs": [site.ours.id]}


@pytest.mark.parametrize("flag", SHOW_FLAGS)
def test_a_show_with_another_flag_is_named(site: Site, flag: str) -> None:
    for _ in range(2):
        assert site.named_after(_set("show", flag, f"NOT {flag}")) == {"shows": [site.ours.show.id]}


def test_a_show_that_is_handed_over_or_back_is_named(site: Site) -> None:
    shows = sorted([site.ours.show.id, site.theirs.show.id])
    for _ in range(2):
        assert site.named_after("UPDATE show SET b_scheduler_managed = NOT b_scheduler_managed") == {"shows": shows}


def test_what_decides_no_booking_is_not_named(site: Site) -> None:
    for statement in (
        "UPDATE layer SET int_mem_min = int_mem_min - 1",
        "UPDATE layer SET str_cmd = 'another', str_range = '7-9', int_timeout = 5, b_optimize = NOT b_optimize",
        "UPDATE layer SET str_tags = str_tags, int_cores_min = int_cores_min, int_mem_min = int_mem_min",
        "UPDATE job SET ts_updated = now(), int_max_retries = 9, b_autoeat = true, b_paused = b_paused",
        "UPDATE show SET int_default_max_cores = 5, b_paused = b_paused",
        # These name their vertices on opencue_sched_caps.
        "UPDATE job_resource SET int_priority = 99, int_max_cores = 500",
        "UPDATE folder_resource SET int_max_cores = 500",
        "UPDATE limit_record SET int_max_value = 1",
    ):
        assert site.named_after(statement) == {}, statement


def test_nothing_of_an_unmanaged_show_is_named(site: Site) -> None:
    statements = [
        *(_set("layer", column, value, whose="their") for column, value in LAYER_CHANGES.items()),
        *(_set("show", flag, f"NOT {flag}", whose="their") for flag in SHOW_FLAGS),
        ADD_LIMIT.format(whose="their"),
        "DELETE FROM layer_limit",
        QUARANTINE.format(whose="their"),
        "DELETE FROM opencue_sched_quarantine",
    ]
    for statement in statements:
        assert site.named_after(statement) == {}, statement
    for state in ("RUNNING", "WAITING"):
        assert _move(site, site.theirs.frames, state) == {}
    for column, value in sorted(JOB_CHANGES.items()):
        assert site.named_after(_set("job", column, value.replace(":folder", ":their_folder"), whose="their")) == {}


def _move(site: Site, frames: Sequence[str], state: str) -> Named:
    return site.named_after(MOVE, state=state, frames=list(frames))


def test_a_layer_is_named_with_its_first_waiting_frame_alone(site: Site) -> None:
    layer = site.ours.layers[0]
    # given frames that start one after the other, and one that comes back while another waits
    assert _move(site, layer.frames[:2], "RUNNING") == {}
    assert _move(site, layer.frames[:1], "WAITING") == {}
    assert _move(site, [layer.frames[0], layer.frames[2]], "RUNNING") == {}
    # when frames end, none waits;
    assert _move(site, layer.frames[:1], "SUCCEEDED") == {}
    # when the first is retried, or several at once, the layer is news, and the next is none
    assert _move(site, layer.frames[1:2], "WAITING") == {"layers": [layer.id]}
    assert _move(site, layer.frames[2:], "WAITING") == {}
    assert _move(site, layer.frames[1:], "RUNNING") == {}
    assert _move(site, layer.frames[1:], "WAITING") == {"layers": [layer.id]}


def test_a_chain_frame_by_frame_names_its_layer_alone_each_time(site: Site) -> None:
    with site.engine.begin() as connection:
        farm = Farm(connection)
        job = farm.job([LayerSpec(frames=4), LayerSpec(frames=4)], show=site.ours.show, name="chain", activate=False)
        farm.frame_by_frame((job, 1), (job, 0))
        farm.activate([job])
    # A job that goes live is named with all that is in it.
    assert site.named() == {"jobs": [job.id]}
    first, second = job.layers
    for before, after in zip(first.frames, second.frames, strict=True):
        assert _move(site, [before], "RUNNING") == {}
        assert _move(site, [before], "SUCCEEDED") == {}
        freed = "UPDATE frame SET int_depend_count = 0 WHERE pk_frame = :frame"
        assert site.named_after(freed, frame=after) == {"layers": [second.id]}
        assert _move(site, [after], "RUNNING") == {}


def test_a_job_that_goes_live_is_named_and_its_layers_with_limits_are_not(site: Site, engine: Engine) -> None:
    with engine.begin() as connection:
        job = Farm(connection).job([LayerSpec(limits=[site.ids["limit"]])] * 3, show=site.ours.show, name="live")
    assert site.named() == {"jobs": [job.id]}


def test_a_thousand_layers_changed_by_one_statement_are_all_named(site: Site) -> None:
    with site.engine.begin() as connection:
        job = Farm(connection).job([LayerSpec()] * 1000, show=site.ours.show, name="wide")
    site.named()
    # Each payload is within the bound of PostgreSQL's: the listener looks.
    named = site.named_after("UPDATE layer SET int_cores_min = int_cores_min + 100 WHERE pk_job = :job", job=job.id)
    assert named == {"layers": sorted(layer.id for layer in job.layers)}
    site.write("UPDATE frame SET str_state = 'RUNNING' WHERE pk_job = :job", job=job.id)
    assert site.named() == {}
    named = site.named_after("UPDATE frame SET str_state = 'WAITING' WHERE pk_job = :job", job=job.id)
    assert named == {"layers": sorted(layer.id for layer in job.layers)}


def test_what_is_rolled_back_is_not_named(site: Site, engine: Engine) -> None:
    with engine.connect() as connection:
        connection.execute(text("UPDATE layer SET str_tags = 'another'"))
        connection.rollback()
    assert site.named() == {}


@pytest.mark.parametrize("way", ["ALTER TABLE {table} DISABLE TRIGGER {name}", "DROP TRIGGER {name} ON {table}"])
@pytest.mark.parametrize(
    ("table", "name"),
    [
        ("job", "opencue_sched_backlog"),
        ("layer", "opencue_sched_backlog"),
        ("layer_limit", "opencue_sched_backlog"),
        ("layer_stat", "opencue_sched_work_arrived"),
        ("opencue_sched_quarantine", "opencue_sched_backlog"),
        ("show", "opencue_sched_backlog"),
    ],
)
def test_a_trigger_of_the_backlog_that_is_missing_or_disabled_is_known(
    site: Site, table: str, name: str, way: str
) -> None:
    def found() -> tuple[bool, list[str]]:
        with site.engine.connect() as connection:
            return check_schema(connection).backlog_is_named, absent_backlog_triggers(connection)

    assert found() == (True, [])
    site.write(way.format(table=table, name=name))
    assert found() == (False, [f"{name} on {table}"])
