"""``opencue-sched top``, as its user sees it: on a pseudo-terminal, and printed once."""

from __future__ import annotations

import json
import re
import signal
from collections.abc import Callable
from typing import Any

import pytest
import redis
from sqlalchemy import Engine

from opencue_sched.cli.top import Chosen, Read, draw, moved
from opencue_sched.dispatch.verdicts import VerdictLog
from opencue_sched.domain.verdicts import LayerVerdict, Verdict
from opencue_sched.embedded.farms.farm import Farm
from opencue_sched.embedded.farms.farm_specs import HostSpec, LayerSpec
from opencue_sched.embedded.servers.services import EmbeddedRedis
from opencue_sched.insight.farm_view import farm_view
from opencue_sched.settings import Settings
from tests.kit.command import Cli
from tests.kit.polling import MOST_SECONDS, eventually
from tests.kit.terminal import MAIN, on_terminal
from tests.kit.wording import lacks

WHY = "no host has 4 cores idle just now"
Build = Callable[[Callable[[Farm], Any]], Any]
pytestmark = pytest.mark.usefixtures("a_farm")


@pytest.fixture
def a_farm(build: Build, redis_client: redis.Redis) -> None:
    """Two shows; of a job of each all waits, of another a frame runs, and a host is down."""

    def make(farm: Farm) -> None:
        alloc, show, other = farm.default_alloc(), farm.show("moonrise"), farm.show("harbour")
        host, *_ = farm.hosts([HostSpec(cores=8), HostSpec(cores=8, lock="LOCKED"), HostSpec(cores=4, state="DOWN")])
        farm.subscription(show, alloc, size=6, burst=12)
        farm.subscription(other, alloc, size=2)
        running = farm.job([LayerSpec(frames=3)], show=show, name="moonrise-sh020-alice_light_v003")
        waiting = farm.job([LayerSpec(frames=7, name="sim")], show=other, name="harbour-sh010-bob_water_v012")
        farm.job([LayerSpec(frames=2)], show=show, name="moonrise-sh030-alice_comp_v001", paused=True)
        farm.run(running.frames[:1], host, cores=4)
        verdict = LayerVerdict(waiting.id, waiting.layers[0].id, Verdict.CAPACITY, 0, 7, WHY)
        log = VerdictLog(redis_client, "cue")
        log.record({"alloc-1": [verdict]})
        log.record_waiting("", {"capacity": 7})

    build(make)


def squeezed(text: str) -> str:
    return re.sub(r"\s+", " ", text)


@pytest.mark.parametrize("columns", [80, 120, 200])
def test_the_farm_is_on_one_screen_of_any_width(environment: pytest.MonkeyPatch, columns: int) -> None:
    with on_terminal(["top"], columns=columns, rows=24) as (terminal, process):
        lines = terminal.shows("harbour-sh010-bob_water_v012", "quit")
        # The cores of the allocation, what holds frames back, and that nobody would book them
        assert "local.general" in terminal.text()
        titles = next(line.split() for line in lines if line.startswith("ALLOCATION"))
        figures = next(line.split() for line in lines if line.startswith("local.general"))
        of_allocation = dict(zip(titles[-6:], figures[-6:], strict=True))
        assert of_allocation == {"CORES": "20", "BOOKED": "4", "IDLE": "4", "LOCKED": "8", "DOWN": "4", "HOSTS": "3"}
        assert not lacks(terminal.text(), "capacity 7", "`celery -A opencue_sched worker`")
        # Shows with what they use, may use and are due
        titles = next(line.split() for line in lines if line.startswith("SHOW"))
        moonrise = next(line.split() for line in lines if line.startswith("moonrise "))
        values = dict(zip(titles, moonrise, strict=False))
        assert (values["CORES"], values["SIZE"], values["SHARE"], values["DUE"]) == ("4", "6", "100%", "75%")
        # The jobs, the one that waits for hosts before the one that runs, and their reasons
        of_jobs = lines[next(number for number, line in enumerate(lines) if line.startswith("JOB")) :]
        names = [line.split()[0] for line in of_jobs[1:] if "_v0" in line]
        assert names.index("harbour-sh010-bob_water_v012") < names.index("moonrise-sh020-alice_light_v003")
        (waits,) = [line for line in of_jobs if line.startswith("harbour")]
        assert "capacity: " + (WHY if columns == 200 else WHY[:12]) in waits
        # On every line no more than there is room for, and help on the last
        assert not terminal.overrun
        assert "quit" in lines[-1]
        terminal.type("q")
        assert process.wait(MOST_SECONDS) == 0


def test_keys_filter_sort_and_explain(environment: pytest.MonkeyPatch, cli: Cli) -> None:
    with on_terminal(["top"], columns=120) as (terminal, process):
        terminal.shows("moonrise-sh020", "harbour-sh010")
        # When a part of a name is typed, only jobs with it are there, until escape
        terminal.type("/BOB\r")
        lines = terminal.shows("job=BOB")
        eventually(lambda: "moonrise-sh020" not in terminal.text(), what="the filter", told=terminal.text)
        terminal.type("\x1b")
        terminal.shows("moonrise-sh020")
        terminal.type("fmoonx\x7f\r")
        eventually(lambda: "harbour" not in terminal.text(), what="the show's filter", told=terminal.text)
        terminal.type("\x1b")
        terminal.shows("harbour-sh010")
        # The orders go round
        for order in ("frames", "cores"):
            terminal.type("s")
            lines = terminal.shows(f"sort: {order}")
        jobs = [line.split()[0] for line in lines if "_v0" in line and "-sh0" in line]
        assert jobs[0] == "moonrise-sh020-alice_light_v003", "the one that uses cores"
        # Enter has the text of `explain JOB`, and escape goes back
        terminal.type("/water\r")
        eventually(lambda: "moonrise-sh020" not in terminal.text(), what="the filter", told=terminal.text)
        terminal.type("\x1b[B\r")
        terminal.shows("sim (7 waiting)")
        explained = re.sub(r"\d+s\b", "", squeezed(cli("explain", "harbour-sh010-bob_water_v012").out))
        shown = re.sub(r"\d+s\b", "", squeezed(terminal.text()))
        assert explained.strip() in shown
        terminal.type("\x1b")
        terminal.shows("sort:")
        terminal.type("q")
        assert process.wait(MOST_SECONDS) == 0
        assert terminal.is_as_before


def test_keys_change_the_chosen_job_when_a_person_agrees(
    environment: pytest.MonkeyPatch, rows: Callable[..., list[Any]]
) -> None:
    name = "harbour-sh010-bob_water_v012"

    def job() -> tuple[bool, int, str]:
        ((found),) = rows(
            "SELECT b_paused, int_priority, str_state FROM job JOIN job_resource USING (pk_job)"
            " WHERE str_name LIKE 'harbour%'"
        )
        return tuple(found)

    with on_terminal(["top"], columns=120) as (terminal, process):
        terminal.shows(name)
        terminal.type("p")  # no job is chosen yet
        terminal.type("/water\r")
        eventually(lambda: "moonrise-sh020" not in terminal.text(), what="the filter", told=terminal.text)
        terminal.type("\x1b[B")
        terminal.shows("p pause  u unpause  k kill")
        # A person is asked, and any key but y is a no
        terminal.type("p")
        terminal.shows(f"Pause {name}? y: yes")
        terminal.type("n")
        terminal.shows("p pause  u unpause")
        assert job()[0] is False
        terminal.type("py")
        terminal.shows(f"{name}: paused")
        assert job()[0] is True
        terminal.type("uy")
        terminal.shows(f"{name}: unpaused")
        # Of a priority the number is typed first
        terminal.type("ix-7\x7f80\r")
        terminal.shows(name, "-80", "y: ")
        terminal.type("y")
        terminal.shows(f"{name}: priority -80")
        assert job() == (False, -80, "PENDING")
        terminal.type("ry")
        # The question has the job's name and "dead" too, but no colon after the name
        refusal = re.compile(rf"{name}: .*\bdead\b")
        eventually(lambda: refusal.search(terminal.text()), what="the refusal", told=terminal.text)
        terminal.type("ky")
        terminal.shows(f"{name}: killed, 0 ")
        assert job()[2] == "FINISHED"
        terminal.type("q")
        assert process.wait(MOST_SECONDS) == 0
    said = [subject for (subject,) in rows("SELECT str_subject FROM comments ORDER BY ts_created")]
    assert said == ["paused", "unpaused", "priority -80", "killed"]


BROKEN = """
import select
def fail(*_): raise OSError("a terminal that nobody thought of")
select.select = fail
"""


@pytest.mark.parametrize(
    ("program", "end", "status"),
    [
        (MAIN, "\x03", 130),
        (MAIN, signal.SIGTERM, 128 + signal.SIGTERM),
        (BROKEN + MAIN, None, 1),
    ],
    ids=["Ctrl-C", "SIGTERM", "error"],
)
def test_the_terminal_is_as_before_however_it_ends(
    environment: pytest.MonkeyPatch, program: str, end: Any, status: int
) -> None:
    with on_terminal(["top"], program=program) as (terminal, process):
        before = terminal.attributes
        if end is not None:
            terminal.shows("quit", "harbour")
            assert terminal.attributes != before
            assert terminal.modes["?1049"]
        if isinstance(end, str):
            terminal.type(end)
        elif end is not None:
            process.send_signal(end)
        eventually(lambda: terminal.screen() and process.poll() is not None, 20, "its end", told=terminal.text)
        assert process.returncode == status
        assert terminal.attributes == before
        assert terminal.is_as_before


def test_a_store_that_goes_away_is_said_and_comes_back(environment: pytest.MonkeyPatch) -> None:
    with EmbeddedRedis() as server:
        environment.setenv("OPENCUE_SCHED_REDIS_URL", server.url)
        with on_terminal(["top"], columns=200) as (terminal, process):
            terminal.shows("harbour-sh010")
            server.kill()
            terminal.shows(f"redis://127.0.0.1:{server.port}/", "harbour-sh010")
            server.revive()
            eventually(lambda: "redis://" not in terminal.text(), 20, "Redis again", told=terminal.text)
            assert "harbour-sh010" in terminal.text()
            assert process.poll() is None


def test_a_job_that_is_selected_is_drawn_otherwise(
    settings: Settings, engine: Engine, redis_client: redis.Redis
) -> None:
    view = farm_view(engine, redis_client, settings)
    first = moved(view, Chosen(), 1)
    for before, after in ((Chosen(), first), (first, moved(view, first, 1))):
        drawn = [draw(Read(view), chosen, width=100, height=30) for chosen in (before, after)]
        assert [line.plain for line in drawn[0][:-1]] == [line.plain for line in drawn[1][:-1]]
        assert drawn[0] != drawn[1]


def test_once_prints_everything_for_people_and_for_scripts(cli: Cli) -> None:
    whole = cli("top", "--once")
    assert whole.status == 0
    assert WHY in whole.out
    assert "quit" not in whole.out
    assert "\x1b" not in whole.out
    document = json.loads(cli("top", "--json", "--job", "water").out)
    (job,) = document["jobs"]
    assert (job["name"], job["why"], job["waiting"]) == ("harbour-sh010-bob_water_v012", "capacity", 7)
    assert document["waiting_by_verdict"] == {"capacity": 7}
    assert {it["name"]: it["cores"] for it in document["shows"]}["moonrise"] == 4
    assert document["fleet"]["workers"] == []


def test_without_a_terminal_it_says_what_to_ask_for(cli: Cli) -> None:
    refused = cli("top")
    assert refused.status == 2
    assert "--once" in refused.err
