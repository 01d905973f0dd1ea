"""What a submitted job waits for: the rows, the counts, and that the ends of frames meet them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from sqlalchemy import Engine, event

from opencue_sched.domain.invariants import Invariant
from opencue_sched.embedded.farms.farm import Farm
from opencue_sched.jobs.job_file import JobSpec
from opencue_sched.jobs.submission import Submitted, submit_job
from opencue_sched.reports.completion import Releaser
from opencue_sched.reports.run_ends import CompletedFrame
from opencue_sched.settings import Settings
from opencue_sched.store.audit import judge
from opencue_sched.text_file import InvalidFile
from tests.kit.polling import eventually

Rows = Callable[..., list[Any]]


class Jobs:
    """Submits jobs to one show and lets their frames run and end."""

    def __init__(self, engine: Engine, settings: Settings, rows: Rows) -> None:
        self.engine = engine
        self.settings = settings
        self.rows = rows
        with engine.begin() as connection:
            farm = Farm(connection)
            show = farm.show("demo")
            farm.subscription(show, farm.alloc("general"), size=100)
            self.host = farm.host(cores=1000, memory_gb=1000)

    def submit(self, name: str, *layers: dict[str, Any], **fields: Any) -> Submitted:
        data = {"show": "demo", "shot": "s", "user": "u", "name": name, **fields}
        data["layers"] = [{"command": "render", "range": "1-3", **layer} for layer in layers]
        return submit_job(self.engine, JobSpec.parse(data), self.settings)

    def states(self, job: Submitted, layer: str) -> dict[int, str]:
        """States by frame number."""
        found = self.rows(
            "SELECT int_number, frame.str_state FROM frame JOIN layer USING (pk_layer)"
            " WHERE layer.pk_job = :job AND layer.str_name = :layer ORDER BY frame.int_dispatch_order",
            job=job.job_id,
            layer=layer,
        )
        return {row.int_number: row.str_state for row in found}

    def waits_for(self, job: Submitted, layer: str) -> list[int]:
        """What frames of a layer wait for, by number."""
        found = self.rows(
            "SELECT int_depend_count FROM frame JOIN layer USING (pk_layer)"
            " WHERE layer.pk_job = :job AND layer.str_name = :layer ORDER BY frame.int_dispatch_order",
            job=job.job_id,
            layer=layer,
        )
        return [row.int_depend_count for row in found]

    def depends(self, job: Submitted) -> list[Any]:
        return self.rows("SELECT * FROM depend WHERE pk_job_depend_er = :job ORDER BY str_type", job=job.job_id)

    def start(self, job: Submitted, layer: str, numbers: Sequence[int]) -> list[CompletedFrame]:
        """Run frames; the reports their ends would send."""
        found = self.rows(
            "SELECT pk_frame FROM frame JOIN layer USING (pk_layer)"
            " WHERE layer.pk_job = :job AND layer.str_name = :layer AND int_number = ANY(:numbers)",
            job=job.job_id,
            layer=layer,
            numbers=list(numbers),
        )
        frames = [row.pk_frame for row in found]
        with self.engine.begin() as connection:
            procs = Farm(connection).run(frames, self.host)
        return [
            CompletedFrame(proc, frame, self.host.name, exit_status=0, max_rss_kb=1000)
            for proc, frame in zip(procs, frames, strict=True)
        ]

    def finish(self, job: Submitted, layer: str, numbers: Sequence[int] = (1, 2, 3)) -> None:
        Releaser(self.engine).end(self.start(job, layer, numbers))

    def lock_waiters(self) -> int:
        waiting = "SELECT 1 FROM pg_stat_activity WHERE datname = current_database() AND wait_event_type = 'Lock'"
        return len(self.rows(waiting))

    def assert_counts(self) -> None:
        with self.engine.connect() as connection:
            assert judge(connection, Invariant.LAYER_COUNTERS_MATCH_FRAMES).wrong == 0


@pytest.fixture
def jobs(engine: Engine, settings: Settings, rows: Rows) -> Jobs:
    return Jobs(engine, settings, rows)


def test_a_layer_waits_for_a_whole_layer(jobs: Jobs) -> None:
    job = jobs.submit("a", {"name": "sim"}, {"name": "render", "depends": ["sim"]})
    (row,) = jobs.depends(job)
    assert (row.str_type, row.str_target, row.b_active, row.b_any, row.b_composite) == (
        *("LAYER_ON_LAYER", "INTERNAL", True, False, False),
    )
    assert jobs.waits_for(job, "render") == [1, 1, 1]
    jobs.finish(job, "sim", [1, 2])
    assert set(jobs.states(job, "render").values()) == {"DEPEND"}
    jobs.finish(job, "sim", [3])
    assert set(jobs.states(job, "render").values()) == {"WAITING"}
    jobs.assert_counts()


def test_a_layer_waits_for_any_frame_of_another(jobs: Jobs) -> None:
    job = jobs.submit("a", {"name": "sim"}, {"name": "render", "depends": [{"layer": "sim", "type": "any_frame"}]})
    assert jobs.depends(job)[0].b_any
    jobs.finish(job, "sim", [2])
    assert set(jobs.states(job, "render").values()) == {"WAITING"}


def test_frames_wait_for_frames_below_one_composite_row(jobs: Jobs) -> None:
    by_frame = {"layer": "sim", "type": "frame_by_frame"}
    job = jobs.submit("a", {"name": "sim"}, {"name": "render", "depends": [by_frame]})
    rows = jobs.depends(job)
    (parent,) = [row for row in rows if row.b_composite]
    children = [row for row in rows if not row.b_composite]
    assert (parent.str_type, parent.pk_frame_depend_er, parent.b_active) == ("FRAME_BY_FRAME", None, True)
    assert {row.str_type for row in children} == {"FRAME_ON_FRAME"}
    assert {row.pk_parent for row in children} == {parent.pk_depend}
    jobs.finish(job, "sim", [2])
    assert jobs.states(job, "render") == {1: "DEPEND", 2: "WAITING", 3: "DEPEND"}
    jobs.finish(job, "sim", [1, 3])
    assert not any(row.b_active for row in jobs.depends(job))
    jobs.assert_counts()


def test_chunks_wait_for_every_frame_they_render(jobs: Jobs) -> None:
    by_frame = {"layer": "sim", "type": "frame_by_frame"}
    sim = {"name": "sim", "range": "1-6"}
    job = jobs.submit("a", sim, {"name": "render", "range": "1-6", "chunk": 2, "depends": [by_frame]})
    assert jobs.waits_for(job, "render") == [2, 2, 2]
    jobs.finish(job, "sim", [1, 2, 3])
    assert jobs.states(job, "render") == {1: "WAITING", 3: "DEPEND", 5: "DEPEND"}


def test_frame_by_frame_with_one_large_chunk_is_layer_on_layer(jobs: Jobs) -> None:
    by_frame = {"layer": "sim", "type": "frame_by_frame"}
    job = jobs.submit("a", {"name": "sim"}, {"name": "render", "chunk": 10, "depends": [by_frame]})
    (row,) = jobs.depends(job)
    assert (row.str_type, row.b_composite) == ("LAYER_ON_LAYER", False)
    assert jobs.waits_for(job, "render") == [1]


def test_each_frame_of_a_simulation_waits_for_the_one_before(jobs: Jobs) -> None:
    job = jobs.submit("a", {"name": "sim", "depends": [{"layer": "sim", "type": "previous_frame"}]})
    assert jobs.waits_for(job, "sim") == [0, 1, 1]
    assert job.layers[0].waiting == 1
    jobs.finish(job, "sim", [1])
    assert jobs.states(job, "sim") == {1: "SUCCEEDED", 2: "WAITING", 3: "DEPEND"}


def test_a_layer_waits_for_one_frame(jobs: Jobs) -> None:
    job = jobs.submit("a", {"name": "sim"}, {"name": "render", "depends": [{"layer": "sim", "frame": 2}]})
    (row,) = jobs.depends(job)
    assert (row.str_type, row.pk_frame_depend_on is not None) == ("LAYER_ON_FRAME", True)
    jobs.finish(job, "sim", [2])
    assert set(jobs.states(job, "render").values()) == {"WAITING"}


def test_everything_a_frame_waits_for_is_counted_also_what_is_named_twice(jobs: Jobs) -> None:
    by_frame = {"layer": "sim", "type": "frame_by_frame"}
    any_frame = {"layer": "sim", "type": "any_frame"}
    waits = {"name": "render", "depends": [any_frame, "sim", by_frame, "sim", {"layer": "sim", "frame": 1}]}
    job = jobs.submit("a", {"name": "sim"}, waits)
    whole = [row for row in jobs.depends(job) if row.str_type == "LAYER_ON_LAYER"]
    assert sorted(row.b_any for row in whole) == [False, False, True]
    assert jobs.waits_for(job, "render") == [5, 5, 5]
    jobs.finish(job, "sim")
    assert jobs.waits_for(job, "render") == [0, 0, 0]
    jobs.assert_counts()


def test_a_job_waits_for_jobs_layers_and_frames_of_others(jobs: Jobs) -> None:
    first = jobs.submit("first", {"name": "sim"}, {"name": "cache"})
    on = {"job": "demo-s-u_first"}
    second = jobs.submit(
        "second",
        {"name": "render"},
        depends=["demo-s-u_first", {**on, "layer": "sim"}, {**on, "layer": "cache", "frame": 2}],
    )
    rows = jobs.depends(second)
    assert [row.str_type for row in rows] == ["JOB_ON_FRAME", "JOB_ON_JOB", "JOB_ON_LAYER"]
    assert {row.str_target for row in rows} == {"EXTERNAL"}
    assert {row.pk_layer_depend_er for row in rows} == {None}
    assert jobs.waits_for(second, "render") == [3, 3, 3]
    jobs.finish(first, "sim")
    jobs.finish(first, "cache", [2])
    assert jobs.waits_for(second, "render") == [1, 1, 1]
    jobs.finish(first, "cache", [1, 3])
    assert set(jobs.states(second, "render").values()) == {"WAITING"}
    jobs.assert_counts()


def test_a_layer_waits_for_jobs_layers_and_frames_of_others(jobs: Jobs) -> None:
    first = jobs.submit("first", {"name": "sim"})
    on = {"job": "DEMO-s-u_First", "layer": "sim"}
    second = jobs.submit(
        "second",
        {"name": "whole", "depends": [{"job": "demo-s-u_first"}]},
        {"name": "pairs", "depends": [{**on, "type": "frame_by_frame"}]},
        {"name": "one", "depends": [{**on, "frame": 3}]},
        {"name": "any", "depends": [{**on, "type": "any_frame"}]},
        {"name": "steps", "depends": [{**on, "type": "previous_frame"}]},
    )
    jobs.finish(first, "sim", [1])
    assert set(jobs.states(second, "whole").values()) == {"DEPEND"}
    assert jobs.states(second, "pairs") == {1: "WAITING", 2: "DEPEND", 3: "DEPEND"}
    assert set(jobs.states(second, "one").values()) == {"DEPEND"}
    assert set(jobs.states(second, "any").values()) == {"WAITING"}
    assert jobs.states(second, "steps") == {1: "WAITING", 2: "WAITING", 3: "DEPEND"}
    jobs.finish(first, "sim", [2, 3])
    for layer in ("whole", "pairs", "one", "any", "steps"):
        assert set(jobs.states(second, layer).values()) == {"WAITING"}
    jobs.assert_counts()


def test_what_is_over_already_is_not_waited_for(jobs: Jobs) -> None:
    first = jobs.submit("first", {"name": "sim"}, {"name": "cache"})
    jobs.finish(first, "sim")
    jobs.finish(first, "cache", [1])
    on = {"job": "demo-s-u_first"}
    second = jobs.submit(
        "second",
        {"name": "whole", "depends": [{**on, "layer": "sim"}]},
        {"name": "pairs", "depends": [{**on, "layer": "cache", "type": "frame_by_frame"}]},
    )
    assert set(jobs.states(second, "whole").values()) == {"WAITING"}
    assert jobs.states(second, "pairs") == {1: "WAITING", 2: "DEPEND", 3: "DEPEND"}
    assert any("layers[0].depends[0]: " in note for note in second.notes)
    jobs.finish(first, "cache", [2, 3])
    third = jobs.submit("third", {"name": "render"}, depends=["demo-s-u_first"])
    assert set(jobs.states(third, "render").values()) == {"WAITING"}
    assert not any(row.b_active for row in jobs.depends(third))


def test_what_can_never_be_met_is_refused(jobs: Jobs) -> None:
    jobs.submit("first", {"name": "sim"})
    with jobs.engine.begin() as connection:
        connection.exec_driver_sql("UPDATE job SET str_state = 'FINISHED', str_visible_name = NULL")
    with pytest.raises(InvalidFile, match=r"layers\[0\].depends\[0\]: .*'demo-s-u_first'"):
        jobs.submit("second", {"name": "a", "depends": [{"job": "demo-s-u_first", "layer": "sim"}]})
    assert jobs.rows("SELECT count(*) FROM job") == [(1,)]


def test_a_frame_that_ends_while_a_job_is_submitted_is_not_missed(jobs: Jobs) -> None:
    # given the frames of a job, running, and somebody whose job waits for them frame by frame
    first = jobs.submit("first", {"name": "sim"})
    reports = jobs.start(first, "sim", [1, 2, 3])
    ends = threading.Thread(target=lambda: Releaser(jobs.engine).end(reports))

    def end_frames_once_seen_running(conn: object, cursor: Any, *_: object) -> None:
        answered = {column.name for column in cursor.description or ()}
        if answered.issuperset({"state", "number"}) and ends.ident is None:
            ends.start()
            eventually(lambda: not ends.is_alive() or jobs.lock_waiters() > 0)

    # when the frames end right after the submission has looked at their states
    pairs = {"job": "demo-s-u_first", "layer": "sim", "type": "frame_by_frame"}
    event.listen(jobs.engine, "after_cursor_execute", end_frames_once_seen_running)
    second = jobs.submit("second", {"name": "render", "depends": [pairs]})
    event.remove(jobs.engine, "after_cursor_execute", end_frames_once_seen_running)
    assert ends.ident is not None
    ends.join(60)

    # then nothing waits for what is over
    assert set(jobs.states(second, "render").values()) == {"WAITING"}
    jobs.assert_counts()
