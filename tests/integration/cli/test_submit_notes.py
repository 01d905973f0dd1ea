"""`opencue-sched submit`: what the farm could not serve is noted, and the job goes in all the same."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from sqlalchemy import Engine, event, text

from opencue_sched.embedded.farms.farm import Farm
from opencue_sched.embedded.farms.farm_specs import ShowIds
from opencue_sched.insight.explain import unserved
from opencue_sched.jobs.job_file import JobSpec
from opencue_sched.jobs.submission import submit_job
from opencue_sched.settings import Settings
from opencue_sched.store.reports import lock_cores
from tests.kit.command import Cli
from tests.kit.wording import lacks

Build = Callable[[Callable[[Farm], Any]], Any]
Rows = Callable[..., list[Any]]

_MAYA = """
    INSERT INTO service (pk_service, str_name, b_threadable, int_cores_min, int_mem_min, str_tags)
    VALUES ('maya', 'maya', false, 100, 3355443, 'general')
"""


@pytest.fixture
def demo(build: Build) -> ShowIds:
    """A show subscribed to local.general, with two hosts there and one in an allocation it may not use."""

    def make(farm: Farm) -> ShowIds:
        show = farm.show("demo")
        farm.subscription(show, farm.alloc("general"), size=100)
        farm.host(name="small", cores=8, memory_gb=16)
        farm.host(name="large", cores=16, memory_gb=64, gpus=1, gpu_memory_gb=8)
        farm.host(name="theirs", cores=64, alloc=farm.alloc("desk"), tags=["near"])
        return show

    made: ShowIds = build(make)
    return made


def job_file(**fields: Any) -> str:
    layer = {"name": "render", "command": "render #IFRAME#", "range": "1-4"} | fields.pop("layer", {})
    job = {"show": "demo", "shot": "s", "user": "u", "name": "job"} | fields
    return json.dumps(job | {"layers": [layer]})


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"layer": {"tags": "genral"}}, ["genral"]),
        ({"layer": {"tags": "GenRal | Away"}}, ["Away", "GenRal"]),
        ({"layer": {"tags": "NEAR"}}, ["NEAR", "local.desk", "demo"]),
        ({"layer": {"tags": "near"}}, ["near", "local.desk", "demo"]),
        ({"os": "windows"}, ["windows", "general", "linux"]),
        ({"layer": {"cores": 32, "memory": "32GiB"}}, ["general", "large", "16 of 32 cores"]),
        ({"layer": {"memory": "128GiB"}}, ["large", "64 of 128 GiB"]),
        ({"layer": {"gpus": 2}}, ["large", "1 of 2 GPUs"]),
        ({"layer": {"gpus": 1, "gpu_memory": "24GiB"}}, ["large", "8 of 24 GiB"]),
        ({"layer": {"cores": 32, "memory": "128GiB"}}, ["large", "16 of 32 cores", "64 of 128 GiB"]),
    ],
)
def test_what_no_host_can_serve_is_noted(
    cli: Cli, demo: ShowIds, rows: Rows, fields: dict[str, Any], words: list[str]
) -> None:
    # when a job is tried and then put in that no host can take
    tried = cli("submit", "-", "--dry-run", given=job_file(**fields))
    ran = cli("submit", "-", given=job_file(**fields))

    # then both say so, on standard error, and it is in
    assert (tried.status, ran.status) == (0, 0)
    for said in (tried, ran):
        (line,) = said.err.splitlines()
        assert not lacks(line, "note: ", "render", *words)
        assert "note" not in said.out
    assert rows("SELECT count(*) FROM job") == [(1,)]
    assert not lacks(cli("explain", "demo-s-u_job").out, *words)


def test_variables_that_a_shell_drops_are_noted(cli: Cli, demo: ShowIds) -> None:
    # given variables of a job and of a layer with names that no shell has for its own
    fields = {"env": {"MY-VAR": "1", "GOOD_1": "2"}, "layer": {"env": {"a.b": "3", "9TH": "4", "_x": "5"}}}
    # when the job is put in
    ran = cli("submit", "-", given=job_file(**fields))
    # then it is told where they are, and is in all the same
    assert ran.status == 0
    job, layer = ran.err.splitlines()
    assert not lacks(job, "note: env: ", "MY-VAR")
    assert not lacks(layer, "note: layers[0].env: ", "9TH", "a.b")


def test_what_a_farm_can_serve_is_put_in_without_a_note(cli: Cli, demo: ShowIds, build: Build) -> None:
    largest = {"cores": 16, "memory": "64GiB", "gpus": 1, "gpu_memory": "8GiB"}
    build(lambda farm: lock_cores(farm.connection, farm.host(name="second", cores=16).id, 200))
    for name, layer in (
        ("a", largest),
        ("b", {"cores": 0}),
        ("c", {"cores": -4}),
        ("d", {"tags": "nowhere | general"}),
    ):
        ran = cli("submit", "-", given=job_file(name=name, layer=layer))
        assert (ran.status, ran.err) == (0, ""), name


def test_a_host_that_is_down_or_not_subscribed_is_not_the_nearest(cli: Cli, demo: ShowIds, build: Build) -> None:
    build(lambda farm: farm.host(name="huge", cores=64, memory_gb=512, state="DOWN"))
    build(lambda farm: farm.host(name="desk", cores=64, alloc=farm.alloc("desk"), tags=["general"], alloc_tag=False))
    ran = cli("submit", "-", given=job_file(layer={"cores": 32}))
    assert not lacks(ran.err, "general", "large", "16 of 32 cores")


def test_a_frame_that_does_not_thread_on_hosts_for_threads(cli: Cli, demo: ShowIds, build: Build) -> None:
    build(lambda farm: farm.host(name="wide01", thread_mode=1, tags=["wide"]))
    ran = cli("submit", "-", given=job_file(layer={"tags": "wide", "threadable": False}))
    assert not lacks(ran.err, "wide01", "thread")


def test_a_show_without_a_subscription_or_a_burst(cli: Cli, demo: ShowIds, engine: Engine) -> None:
    with engine.begin() as connection:
        connection.execute(text("UPDATE subscription SET int_burst = 0"))
    assert not lacks(cli("submit", "-", given=job_file()).err, "note: ", "burst", "demo", "local.general")
    with engine.begin() as connection:
        connection.execute(text("DELETE FROM subscription"))
    ran = cli("submit", "-", "--json", given=job_file(name="second"))
    assert ran.err == ""
    (note,) = ran.json["notes"]
    assert not lacks(note, "demo", "`opencue-sched subscription create demo")


def test_unknown_services(cli: Cli, demo: ShowIds, engine: Engine) -> None:
    maya = {"services": ["mya", "default"]}
    ran = cli("submit", "-", given=job_file(layer=maya))
    assert not lacks(ran.err, "note: ", "render", "'mya'")
    assert "'default'" not in ran.err, "nothing is like it"
    with engine.begin() as connection:
        connection.execute(text(_MAYA))
    ran = cli("submit", "-", given=job_file(name="second", layer=maya))
    assert not lacks(ran.err, "'mya'", "'maya'")


def test_notes_cost_as_many_statements_whatever_the_job_and_the_farm(
    engine: Engine, settings: Settings, demo: ShowIds
) -> None:
    sent: list[str] = []
    event.listen(engine, "before_cursor_execute", lambda _c, _cur, statement, *_: sent.append(statement))

    def statements(name: str, layers: int) -> int:
        sent.clear()
        one = {"command": "render", "range": "1", "tags": ["nowhere"]}
        job = {"show": "demo", "shot": "s", "user": "u", "name": name}
        spec = JobSpec.parse({**job, "layers": [{**one, "name": f"layer{number}"} for number in range(layers)]})
        submitted = submit_job(engine, spec, settings, unserved=unserved)
        (note,) = submitted.notes
        names = ["layer0"] if layers == 1 else ["layer0", "layer1", "layer2", " 37 "]
        assert not lacks(note.partition(":")[0], *names)
        assert "nowhere" in note
        return len(sent)

    alone = statements("one", 1)
    with engine.begin() as connection:
        Farm(connection).subscription(demo, Farm(connection).alloc("more"))
        for number in range(30):
            Farm(connection).host(name=f"more{number}")
    assert statements("many", 40) == alone
