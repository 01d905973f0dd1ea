"""``/farm`` among Flower's own pages: the farm as ``opencue-sched top`` shows it, live in a browser.

The page is made of three files (FILES). Its script asks every two seconds for JSON about the farm, and about the job
that a viewer has opened. Flower asks for its password here as it does on its other pages. The page only reads: it
writes to no store, and changes nothing in Flower.
"""

from __future__ import annotations

import asyncio
import gzip
import json
import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from flower.urls import handlers as flower_handlers
from flower.views import BaseHandler
from redis.exceptions import RedisError
from sqlalchemy import Row
from sqlalchemy.exc import NoResultFound, SQLAlchemyError
from tornado.web import RedirectHandler, authenticated, url

from opencue_sched.accounting.epoch import guarded_redis
from opencue_sched.clients.postgres import ask, make_engine
from opencue_sched.domain.frame_command import log_path
from opencue_sched.domain.names import plural
from opencue_sched.domain.states import HardwareState, LockState
from opencue_sched.domain.units import CENTICORES_PER_CORE
from opencue_sched.errors import SchedulerError
from opencue_sched.insight.explain import Explanation, explain_job, explanation_lines, passes_over, unavailable
from opencue_sched.insight.farm_view import farm_view
from opencue_sched.insight.frame_logs import Deaths, deaths_among, end_of_log
from opencue_sched.insight.health import describe_failure
from opencue_sched.settings import Settings
from opencue_sched.store.hosts import list_hosts
from opencue_sched.store.jobs import dead_frames, frames_by_id, job_of

FILES = {"farm.html": "text/html", "farm.css": "text/css", "farm.js": "text/javascript"}
"""The files of the page in the folder ``static``, each with its media type. ``/farm`` is farm.html."""
# The page loads nothing from elsewhere, and no other page may show it in a frame.
HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "img-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}
ANSWER_LIFE_SECONDS = 1.0
"""How long an answer is given to other viewers who ask the same: a hundred viewers cost what one costs. The page asks
every two seconds, so each of its questions gets a new answer."""
LOG_WAIT_SECONDS = 2.0
"""How long a viewer waits for the file server of the logs: as long as the page waits between two questions."""
LOG_BYTES = 256 * 1024
"""How many bytes of a log are shown, from its end: some 2,500 lines of a hundred characters."""
MOST_HOSTS = 2000
"""How many hosts the page shows one by one, the first by name. Its totals count all hosts."""


class PageAnswer(NamedTuple):
    """The answer to a request of the page."""

    status: int
    """The status of the HTTP answer."""
    body: bytes
    """JSON, compressed with gzip."""
    made_at: float
    """The time at which the stores had been read, in seconds of time.monotonic()."""


class FarmReader:
    """Reads the stores for all viewers together, one read at a time. A thread reads, so that Tornado's loop never waits
    for a store. The threads and connections live as long as the process: nobody closes them."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="farm-page")
        self._answers: dict[str | None, PageAnswer] = {}
        """The answers of the last ANSWER_LIFE_SECONDS, by job id; the one about the farm has the key None. Only
        ``_thread`` touches this."""
        self._log_thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="farm-page-logs")
        """Reads logs. Where the file server of the logs hangs, this thread hangs, and no other does."""
        self._reading: Future[list[Deaths]] | None = None
        """The last read of dead frames' logs, which may still run in ``_log_thread``; None before the first one. Only
        ``_thread`` touches this."""
        self._redis = guarded_redis(settings.redis_dsn, settings)
        self._engine = make_engine(settings, application_name="opencue-sched-page", pool_size=1)

    async def answer(self, job_id: str | None = None) -> PageAnswer:
        """The answer about a job: what ``opencue-sched explain`` says. Without a job it is about the farm: what
        insight.farm_view says, and the hosts one by one.

        The status is 404 where there is no such job. It is 503 while a store is away; the body then says what a person
        can do.
        """
        return await asyncio.get_running_loop().run_in_executor(self._thread, self._answer, job_id)

    def _answer(self, job_id: str | None) -> PageAnswer:
        """The answer of a moment ago, or one that is read now.

        Reads run in ``_thread`` one after the other. A request that waited while another one read the same finds that
        answer here. A failure is an answer, too, and lives as long.
        """
        now = time.monotonic()
        self._answers = {
            asked: answer for asked, answer in self._answers.items() if now - answer.made_at < ANSWER_LIFE_SECONDS
        }
        if job_id in self._answers:
            return self._answers[job_id]
        status = 200
        try:
            content = self._farm() if job_id is None else self._explanation(job_id)
        except NoResultFound:
            status, content = 404, {"error": "there is no such job"}
        except (SQLAlchemyError, RedisError, SchedulerError) as error:
            status, content = 503, {"error": describe_failure(error, self.settings)}
        body = gzip.compress(json.dumps(content, separators=(",", ":")).encode(), compresslevel=1)
        answer = PageAnswer(status, body, time.monotonic())
        self._answers[job_id] = answer
        return answer

    def _farm(self) -> dict[str, Any]:
        """The view of the farm; ``grid`` has the hosts of the facility that the settings name, or of all facilities."""
        hosts = ask(self._engine, list_hosts, most=MOST_HOSTS)
        view = farm_view(self._engine, self._redis, self.settings)
        facility = view["facility"]
        staleness_seconds = self.settings.host_cache.host_staleness_threshold
        grid = [_host(row, staleness_seconds) for row in hosts if facility is None or row.facility == facility]
        return {**view, "grid": grid}

    def _explanation(self, job_id: str) -> dict[str, Any]:
        """What ``explain`` says about a job, and why frames of it died. Raises NoResultFound for an unknown job."""
        show_id = ask(self._engine, job_of, job_id).show_id
        passes = passes_over(self._redis, self.settings, job_id, show_id)
        explanation = ask(self._engine, explain_job, job_id, self.settings, passes)
        kinds_of_death, note = self._read_deaths(ask(self._engine, dead_frames, job_id))
        return {
            "state": explanation.state,
            "lines": explanation_lines(explanation, every_reason=True),
            "deaths": [_shown_deaths(deaths, explanation) for deaths in kinds_of_death],
            "note": note,
        }

    def _read_deaths(self, dead: Sequence[Row[Any]]) -> tuple[Sequence[Deaths], str]:
        """Why frames died, with the ends of their logs; and a note, which is empty unless the file server of the logs
        does not answer.

        No viewer waits for the file server longer than LOG_WAIT_SECONDS. While a read hangs there, no other is begun.
        """
        hangs = "the file server of the logs does not answer, so nothing is told of the dead frames"
        if self._reading is not None and not self._reading.done():
            return (), hangs
        self._reading = self._log_thread.submit(deaths_among, dead)
        try:
            return self._reading.result(LOG_WAIT_SECONDS), ""
        except TimeoutError:
            return (), hangs

    async def log_of(self, frame_id: str) -> str | None:
        """The end of the log of a frame; None where there is no such frame, or its log is not visible here.

        Raises TimeoutError when the log was not read within LOG_WAIT_SECONDS: the file server does not answer, or an
        earlier read still keeps ``_log_thread`` busy. Raises SQLAlchemyError when the database cannot name the log.
        """
        loop = asyncio.get_running_loop()
        frames = await loop.run_in_executor(self._thread, partial(ask, self._engine, frames_by_id, [frame_id]))
        if not frames:
            return None
        path = log_path(frames[0].log_dir, frames[0].job, frames[0].name)
        reading = loop.run_in_executor(self._log_thread, end_of_log, path, LOG_BYTES)
        return await asyncio.wait_for(reading, LOG_WAIT_SECONDS)


def _shown_deaths(deaths: Deaths, job: Explanation) -> dict[str, Any]:
    """What the page shows of the dead frames of a layer with one exit status."""
    names_of_layers = {layer["id"]: layer["layer"] for layer in job.layers}
    return {
        "layer": names_of_layers.get(deaths.layer_id, ""),
        "frames": deaths.frames,
        "exit_status": deaths.exit_status,
        "meaning": deaths.meaning,
        "frame": deaths.frame,
        "frame_id": deaths.frame_id,
        "host": deaths.host,
        "log": deaths.log,
        "lines": deaths.lines,
    }


def _host(row: Row[Any], staleness_seconds: float) -> dict[str, Any]:
    """A host of the grid: its cores, its look (a class of farm.css) and a line of words. A host that has not reported
    for ``staleness_seconds`` is silent, which looks as DOWN does."""
    why = unavailable(row, staleness_seconds)
    cores = row.centicores / CENTICORES_PER_CORE
    booked = (row.centicores - row.idle_centicores) / CENTICORES_PER_CORE
    if not why:
        look = ""
    elif row.state == HardwareState.UP and row.lock != LockState.OPEN:
        look = "locked"
    else:
        look = "down"
    return {
        "name": row.host,
        "allocation": row.allocation,
        "cores": cores,
        "booked": booked,
        "look": look,
        "words": f"{row.host}: {why or 'up'}, {booked:g} of {cores:g} cores booked, {plural(row.frames, 'frame')}",
    }


class _PageHandler(BaseHandler):  # type: ignore[misc]
    """A handler of the page, whose answers carry HEADERS. Each ``get`` must be ``@authenticated``: that has Flower ask
    for its password."""

    def set_default_headers(self) -> None:
        """Tornado's hook: put HEADERS on every answer."""
        super().set_default_headers()
        for name, value in HEADERS.items():
            self.set_header(name, value)


class FarmFile(_PageHandler):
    """Answers with one of FILES."""

    @authenticated
    def get(self, address: str) -> None:
        name = "farm.html" if address == "farm" else address
        self.set_header("Content-Type", f"{FILES[name]}; charset=utf-8")
        self.finish((Path(__file__).parent / "static" / name).read_bytes())


class FarmData(_PageHandler):
    """Answers with the farm as JSON; with the query argument ``job``, with the explanation of that job."""

    def initialize(self, reader: FarmReader) -> None:
        self.reader = reader

    @authenticated
    async def get(self) -> None:
        answer = await self.reader.answer(self.get_query_argument("job", None))
        self.set_status(answer.status)
        self.set_header("Content-Type", "application/json")
        self.set_header("Content-Encoding", "gzip")
        self.finish(answer.body)


class FarmLog(_PageHandler):
    """Answers with the end of a log as text: that of the frame in the query argument ``frame``."""

    def initialize(self, reader: FarmReader) -> None:
        self.reader = reader

    @authenticated
    async def get(self) -> None:
        self.set_header("Content-Type", "text/plain; charset=utf-8")
        self.set_header("X-Content-Type-Options", "nosniff")
        try:
            text = await self.reader.log_of(self.get_query_argument("frame"))
        except TimeoutError:
            self.set_status(503)
            text = "The file server of the logs does not answer.\n"
        except SQLAlchemyError as error:
            self.set_status(503)
            text = f"{describe_failure(error, self.reader.settings)}\n"
        if text is None:
            self.set_status(404)
            text = "There is no such frame, or its log is not visible on this machine.\n"
        self.finish(text)


def add_to_flower(settings: Settings) -> None:
    """Have Flower serve the page. Call this before Flower's application is made, because the application copies the
    list of handlers, to which the page is added here."""
    reader = FarmReader(settings)
    ours = [
        url(r"/(farm|farm\.css|farm\.js)", FarmFile),
        url(r"/farm/data", FarmData, {"reader": reader}),
        url(r"/farm/log", FarmLog, {"reader": reader}),
        # A relative address, because Flower may be served below a prefix.
        url(r"/farm/", RedirectHandler, {"url": "../farm", "permanent": False}),
    ]
    # Before Flower's own, the last of which takes every address for an unknown page.
    flower_handlers[:0] = ours
