"""The whole way of a frame through real processes: beat, worker, RQD (simulated), report service, and back."""

from __future__ import annotations

from opencue_sched.embedded.farms.farm import Farm
from opencue_sched.embedded.farms.farm_specs import LayerSpec
from opencue_sched.embedded.rqds.simulated_host import Behaviour

from .fleets import NONE_IS_LOST, fleet_on


def test_a_job_with_a_dependent_layer_runs_to_its_end(settings, engine, redis_client, tmp_path):
    with engine.begin() as connection:
        Farm(connection).default_show()
    with fleet_on(settings, engine, redis_client, tmp_path, workers=2, environment=NONE_IS_LOST) as fleet:
        with engine.begin() as connection:
            farm = Farm(connection)
            show = farm.show("second")
            farm.subscription(show, farm.default_alloc(), size=100)
            job = farm.job(layers=[LayerSpec(frames=20), LayerSpec(frames=1)], show=show, os=None)
            farm.layer_on_layer((job, 1), (job, 0))
        fleet.wait_for("the job's end", lambda: fleet.finished(job.id))
        assert fleet.scalar("SELECT count(*) FROM frame WHERE str_state = 'SUCCEEDED'") == 21
        assert fleet.scalar("SELECT count(*) FROM proc") == 0
        assert len(fleet.farm.runs()) == 21
        assert not fleet.farm.violations()
        last = max(run.started for run in fleet.farm.runs())
        sheet = [run for run in fleet.farm.runs() if run.frame_id == job.layers[1].frames[0]]
        assert [run.started for run in sheet] == [last]
        fleet.assert_audit()


def test_failing_frames_are_retried_and_a_lost_completion_is_noticed(settings, engine, redis_client, tmp_path):
    with engine.begin() as connection:
        Farm(connection).default_show()
    behaviour = Behaviour(run_seconds=(0.05, 0.1), failure_ratio=0.3)
    with fleet_on(settings, engine, redis_client, tmp_path, behaviour=behaviour) as fleet:
        with engine.begin() as connection:
            farm = Farm(connection)
            show = farm.show("second")
            farm.subscription(show, farm.default_alloc(), size=100)
            job = farm.job(layers=[LayerSpec(frames=12)], show=show, os=None, max_retries=20)
        fleet.wait_for("the first completions", lambda: len(fleet.farm.runs()) > 3)
        fleet.farm.behave(completions_lost=True)
        fleet.wait_for("a lost completion", lambda: any(run.completion_delivered is False for run in fleet.farm.runs()))
        fleet.farm.behave(completions_lost=False, failure_ratio=0.0)
        fleet.wait_for("the job's end", lambda: fleet.finished(job.id))
        assert fleet.scalar("SELECT count(*) FROM frame WHERE str_state = 'SUCCEEDED'") == 12
        assert fleet.scalar("SELECT count(*) FROM proc") == 0
        fleet.assert_audit()
