"""The farm page in a real browser: what it shows of a farm at work, whom it asks, and what it survives."""

from __future__ import annotations

import base64
import re
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from sqlalchemy import NullPool, create_engine, text

from opencue_sched.embedded.farms.farm import Farm
from opencue_sched.embedded.farms.farm_specs import LayerSpec
from opencue_sched.embedded.rqds.simulated_host import Behaviour
from opencue_sched.embedded.servers.processes import free_port
from tests.kit.browser import Browser
from tests.kit.failed_runs import failed_on
from tests.kit.polling import eventually, tail_of
from tests.kit.wording import lacks

from .fleets import FleetOnTest, fleet_on

HELD = Behaviour(run_seconds=(300.0, 300.0))
EVIL = "<img src=x onerror=alert(1)>"


class NoRedirect(urllib.request.HTTPRedirectHandler):
    def redirect_request(self, *_: object) -> None:
        return None


def status(address: str, password: str = "") -> int:
    """The HTTP status of an address, redirections as they are; 0 while nobody listens."""
    request = urllib.request.Request(address)  # noqa: S310 - of our own Flower
    if password:
        request.add_header("Authorization", f"Basic {base64.b64encode(password.encode()).decode()}")
    try:
        with urllib.request.build_opener(NoRedirect).open(request, timeout=30) as answer:
            return int(answer.status)
    except urllib.error.HTTPError as refused:
        refused.close()
        return refused.code
    except OSError:
        return 0


@contextmanager
def flower(fleet: FleetOnTest, *options: str, **environment: str) -> Iterator[str]:
    """A Flower of the fleet's, stopped afterwards; its address."""
    port = free_port()
    process = fleet.fleet.flower(port, *options, **environment)
    address = f"http://127.0.0.1:{port}"
    try:
        eventually(lambda: status(f"{address}/farm"), 60, "Flower's answer", told=tail_of(process.log))
        yield address
    finally:
        fleet.fleet.stop("flower")


LONGEST_TIME_FITS = """(() => {
  const [text, cell] = [document.createRange(), document.querySelectorAll("td.number")[2]];
  cell.textContent = "23h 59m";
  text.selectNodeContents(cell);
  return text.getBoundingClientRect().width <= cell.clientWidth - parseFloat(getComputedStyle(cell).paddingRight);
})()"""


@pytest.fixture(scope="module")
def chromium() -> Iterator[Browser]:
    with Browser() as browser:
        yield browser


@pytest.fixture
def fleet(settings, engine, redis_client, tmp_path) -> Iterator[FleetOnTest]:
    with engine.begin() as connection:
        Farm(connection).default_show()
    with fleet_on(settings, engine, redis_client, tmp_path, hosts=3, cores=2, behaviour=HELD) as fleet:
        yield fleet


def job_of(fleet: FleetOnTest, *layers: LayerSpec, name: str) -> str:
    """A job of a show of its own that may use 4 cores; its id."""
    with fleet.engine.begin() as connection:
        farm = Farm(connection)
        show = farm.show(f"show-{name}")
        farm.subscription(show, farm.default_alloc(), size=4, burst=4)
        return farm.job(layers=layers, show=show, name=name, os=None).id


def test_a_browser_shows_jobs_hosts_shows_and_workers_and_what_changes(fleet, chromium):
    # given a job of which as much runs as its show may have
    wide = LayerSpec(frames=6, name="render")
    paused = job_of(fleet, LayerSpec(frames=2, name=EVIL), name="paused-job")
    with fleet.engine.begin() as connection:
        connection.execute(text("UPDATE job SET b_paused = true WHERE pk_job = :job"), {"job": paused})
    job_of(fleet, wide, name="lively-job")
    fleet.wait_for("four frames on hosts", lambda: len(fleet.farm.running()) == 4)
    with flower(fleet) as address, chromium.visit() as browser:
        browser.open(f"{address}/farm")

        def row(job: str) -> str:
            return next((it for it in browser.texts("#jobs tbody tr") if job in it), "")

        # then the page has it, why the rest waits, the hosts by use, the show and who works
        seen = eventually(lambda: "4 running" in row("lively-job") and row("lively-job"), 30, "the job")
        assert "0 of 6" in seen
        eventually(lambda: "over subscription: " in row("lively-job"), 30, "why", told=lambda: row("lively-job"))
        assert "paused" in row("paused-job").replace("paused-job", "")
        assert "4 of 6" in browser.text("#totals")
        # and its figures stand side by side
        assert browser.script("document.querySelector('header').offsetHeight") < 90
        use = "[...document.querySelectorAll('#hosts .cell')].map((it) => it.style.getPropertyValue('--use'))"
        assert sorted(int(it.strip("%")) for it in browser.script(use)) in ([0, 100, 100], [50, 50, 100])
        assert "4 of 4 (4)" in next(it for it in browser.texts("#shows .part") if it.startswith("show-lively"))
        eventually(lambda: re.search(r"tick \d", browser.text("#leader")), 30, "a tick that the leader fired")
        assert "worker1" in browser.text("#workers")
        # when frames end, then it says so, by itself
        for frame, host in list(fleet.farm.running().items())[:2]:
            fleet.farm.finish(host, frame)
        eventually(
            lambda: not lacks(row("lively-job"), "2 of 6", "4 running"), 60, "progress", told=lambda: row("lively-job")
        )
        # when a host is locked, then its cell is
        fleet.farm.crash(fleet.farm.specs[0].name)
        lock = text("UPDATE host SET str_lock_state = 'LOCKED' WHERE str_name = :name")
        with fleet.engine.begin() as connection:
            connection.execute(lock, {"name": fleet.farm.specs[1].name})
        eventually(lambda: browser.script("document.querySelectorAll('#hosts .locked').length") == 1, 30, "the lock")
        # and what points at it is told about it
        told = browser.script("document.querySelector('#hosts .locked').title")
        assert told.startswith(f"{fleet.farm.specs[1].name}: locked, ")
        # when somebody looks for a job and opens it with the keyboard
        browser.script("document.querySelector('#filter').focus()")
        for letter in "paused-job":
            browser.press(letter)
        eventually(lambda: len(browser.texts("#jobs tbody tr")) == 1, 10, "the filter")
        browser.script("document.querySelector('.job').focus()")
        browser.press("Enter", 13)
        # then they see the explanation, in which what people wrote is text
        told = "opencue-sched job unpause paused-job"
        shown = lambda: browser.text("#job")  # noqa: E731
        eventually(lambda: browser.text("#explained code") == told, 30, "explanation", told=shown)
        assert browser.text("#explained").startswith(EVIL)
        browser.press("Escape", 27)
        assert browser.script("document.querySelector('#job').open") is False
        # and nothing came from elsewhere, and nothing broke the page's policy
        assert {it for it in browser.requested() if not it.startswith((address, "about:", "data:"))} == set()
        assert browser.complaints() == []


# Whether no word of the jobs is broken: each cell is as wide as its longest word needs.
WORDS_ARE_WHOLE = """[...document.querySelectorAll("#jobs td")].every((cell) => {
  const words = cell.innerText.split(/\\s+/).map((word) => word.length);
  return cell.clientWidth >= Math.min(8, Math.max(0, ...words)) * 6;
})"""


@pytest.fixture
def died(fleet, tmp_path) -> str:
    """A job with two dead frames, whose log is visible here, and a paused job of three frames; the first one's name."""
    with fleet.engine.begin() as connection:
        farm = Farm(connection)
        show = farm.show("show-died")
        name = "show-sh010-alice_lighting_of_the_harbour_v012"
        job = farm.job([LayerSpec(frames=5, name="render")], show=show, name=name, log_dir=str(tmp_path / "logs"))
        farm.job([LayerSpec(frames=3)], show=show, name="show-sh020-bob_rest", paused=True)
        dead = text(
            "UPDATE frame SET str_state = 'DEAD', int_exit_status = 139, str_host = 'render01', ts_stopped = now()"
            " WHERE pk_frame = ANY(:frames)"
        )
        connection.execute(dead, {"frames": list(job.frames[:2])})
    (tmp_path / "logs").mkdir()
    lines = [f"line {number}" for number in range(40)]
    (tmp_path / "logs" / f"{name}.0001-render.rqlog").write_text("\n".join([*lines, "no texture <b>wood.tx</b>"]))
    (tmp_path / "logs" / f"{name}.0002-render.rqlog").write_text("\n".join([*lines, "no texture <b>wood.tx</b>"]))
    return name


def test_on_a_phone_the_jobs_are_a_list_that_can_be_read(fleet, died, chromium):
    with flower(fleet) as address, chromium.visit() as browser:
        for width in (400, 500, 768):
            browser.resize(width, 900)
            browser.open(f"{address}/farm")
            eventually(lambda: died in browser.texts(".job"), 30, "the job")
            assert browser.script("document.documentElement.scrollWidth") <= width
            assert browser.script(WORDS_ARE_WHOLE)
            # what waits is counted, also what nobody can book as its job is paused
            eventually(
                lambda: any("paused 3" in " ".join(use.split()) for use in browser.texts("#verdicts .use")), 30, "a use"
            )
            # and how old these figures are
            age = eventually(lambda: browser.text("#verdicts-note"), 30, "the age")
            assert re.fullmatch(r"counted \d+ seconds? ago", age)
        assert browser.complaints() == []


def test_a_host_that_breaks_frames_is_named_above_the_hosts(fleet, chromium):
    # given a host on which frames of three jobs failed
    with fleet.engine.begin() as connection:
        farm = Farm(connection)
        names = (f"harbour-sh0{number}0-a_rather_long_name_of_a_job" for number in range(3))
        failed_on(farm, "render07", [farm.job(name=name, os="none") for name in names])
    with flower(fleet) as address, chromium.visit() as browser:
        for width in (1280, 768, 400):
            browser.resize(width, 900)
            browser.open(f"{address}/farm")
            said = eventually(lambda: browser.text("#breaking"), 30, "the host")
            assert not lacks(said, "render07", "3 frames", "3 jobs")
            assert browser.script("document.documentElement.scrollWidth") <= width
        assert browser.complaints() == []


def test_the_popup_tells_of_what_frames_died_and_leads_to_their_logs(fleet, died, chromium):
    with flower(fleet) as address, chromium.visit() as browser:
        # given Flower's own pages, then their menu leads to the farm, and from there to a job
        browser.open(f"{address}/workers")
        link = "[...document.querySelectorAll('nav a')].find((it) => it.textContent === 'Farm').href"
        assert eventually(lambda: browser.script(link), 30, "the menu") == f"{address}/farm"
        browser.open(f"{address}/farm")
        eventually(lambda: died in browser.texts(".job"), 30, "the job")
        click = "[...document.querySelectorAll('.job')].find((it) => it.textContent === '{}').click()"
        browser.script(click.format(died))
        # when it is opened, then the popup has what `explain` has of its dead frames
        said = eventually(lambda: browser.text("#deaths"), 30, "deaths", told=lambda: browser.text("#job"))
        assert not lacks(said, "render", "2 frames", "139", "(SIGSEGV)")
        assert browser.text("#deaths pre").endswith("line 39\nno texture <b>wood.tx</b>")
        assert "retry" in browser.text("#explained")
        # and the link has more of the log, as text
        browser.open(browser.script("document.querySelector('#deaths a').href"))
        assert browser.text("body").startswith("line 0")
        assert browser.text("body").endswith("no texture <b>wood.tx</b>")
        assert browser.complaints() == []
        assert status(f"{address}/farm/log?frame=nobody") == 404


def test_a_store_that_is_away_is_said_and_the_page_comes_back_by_itself(fleet, chromium):
    job_of(fleet, LayerSpec(frames=2), name="some-job")
    with flower(fleet) as address, chromium.visit(width=800, height=900) as browser:
        browser.open(f"{address}/farm")
        eventually(lambda: browser.texts(".job") == ["some-job"], 30, "the job")
        # given no wider page than the window
        assert browser.script("document.documentElement.scrollWidth") <= 800
        # and a column as wide as the longest time in it
        assert browser.script(LONGEST_TIME_FITS)
        # when the database lets nobody in
        name, elsewhere = fleet.engine.url.database, fleet.engine.url.set(database="postgres")
        away = "ALTER DATABASE {} ALLOW_CONNECTIONS {}"
        with create_engine(elsewhere, isolation_level="AUTOCOMMIT", poolclass=NullPool).connect() as connection:
            connection.execute(text(away.format(name, "false")))
            ours = text("SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE application_name = :name")
            connection.execute(ours, {"name": "opencue-sched-page"})
            try:
                # then a banner says which store, and of when the rest is, and no password
                said = eventually(lambda: browser.text("#banner"), 60, "the banner")
                assert said.startswith("PostgreSQL ")
                assert re.search(r"\b\d+:\d\d:\d\d\b", said)
                assert browser.texts(".job") == ["some-job"]
                assert (fleet.engine.url.password or "no password") not in said
            finally:
                connection.execute(text(away.format(name, "true")))
        # and when it is back, so is the page
        eventually(lambda: not browser.text("#banner"), 60, "the end of the banner")


def test_who_may_not_see_flower_may_not_see_the_farm(fleet, chromium):
    paths = ("/farm", "/farm.css", "/farm.js", "/farm/data", "/farm/data?job=x", "/farm/log?frame=x")
    with flower(fleet, FLOWER_BASIC_AUTH="artist:secret") as address, chromium.visit() as browser:
        assert {path: status(address + path) for path in paths} == dict.fromkeys(paths, 401)
        assert {path: status(address + path, "artist:wrong") for path in paths} == dict.fromkeys(paths, 401)
        assert status(f"{address}/farm/data?job=nobody", "artist:secret") == 404
        # and who may, sees it, also with the password in the address
        browser.open(f"{address.replace('//', '//artist:secret@')}/farm")
        eventually(lambda: "3 of 3" in browser.text("#totals"), 30, "the farm", told=lambda: browser.text("body"))
    sign_in = ("--auth=.*@studio.example", "--auth_provider=flower.views.auth.GithubLoginHandler")
    with flower(fleet, *sign_in, "--url_prefix=cue") as address:
        assert {path: status(f"{address}/cue{path}") for path in ("/workers", *paths)} == dict.fromkeys(
            ("/workers", *paths), 302
        )
