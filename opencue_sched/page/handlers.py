"""``/farm`` among Flower's own pages: the farm as ``opencue-sched top`` shows it, live in a browser.

The page is three files of ours and asks for JSON every two seconds: of the farm, and of the job that is opened. Flower
asks for its password here as it does on its other pages. Nothing is written: neither store, nor anything of Flower's.
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
from opencue_sched.domain.names import counted
from opencue_sched.domain.units import CENTICORES_PER_CORE
from opencue_sched.errors import SchedulerError
from opencue_sched.insight.explain import Explanation, explain_job, explanation_lines, passes_over, unavailable
from opencue_sched.insight.farm_view import farm_view
from opencue_sched.insight.frame_logs import Deaths, deaths_among, end_of_log
from opencue_sched.insight.health import describe_failure
from opencue_sched.settings import Settings
from opencue_sched.store.hosts import list_hosts
from opencue_sched.store.jobs import dead_frames, frames_by_id, job_of

FILES = {"farm": "text/html", "farm.css": "text/css", "farm.js": "text/javascript"}
"""What the page consists of, with the media types."""
HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "img-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}
KEPT_SECONDS = 1.0
"""How long an answer is given to others who ask the same: a hundred viewers cost what one costs."""
LOGS_SECONDS = 2.0
"""How long a viewer waits for the file server of the logs."""
LOG_BYTES = 256 * 1024
"""How much of a log is shown, its end."""
MOST_HOSTS = 2000
"""How many hosts are shown one by one, the first by name."""


class PageAnswer(NamedTuple):
    """The answer to a request of the page."""

    status: int
    """The status of the HTTP answer."""
    body: bytes
    """JSON in gzip."""
    at: float
    """The time at which the farm was read (monotonic seconds)."""


class FarmReader:
    """Reads the stores for all viewers together: one read at a time, in a thread of its own, off Tornado's loop."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="farm-page")
        self._answers: dict[str | None, PageAnswer] = {}
        """Answers of the last KEPT_SECONDS, by job id; None: of the farm. Only ``_thread`` touches it."""
        self._log_thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="farm-page-logs")
        """Reads logs: their file server may hang, and then this thread with it, and no other."""
        self._reading: Future[list[Deaths]] | None = None
        self._redis = guarded_redis(settings.redis_dsn, settings)
        self._engine = make_engine(settings, application_name="opencue-sched-page", pool_size=1)

    async def answer(self, job_id: str | None = None) -> PageAnswer:
        """What insight.farm_view says, and the hosts one by one; of a job, what ``opencue-sched explain`` says.

        503 while a store is away, with what a person can do; 404 where there is no such job.
        """
        return await asyncio.get_running_loop().run_in_executor(self._thread, self._answer, job_id)

    def _answer(self, job_id: str | None) -> PageAnswer:
        """Read an answer, unless it was read a moment ago. Reads run in ``_thread`` one after the other, so a request
        that waited for a read of the same finds its answer. What fails is an answer too; the next read tries again."""
        now = time.monotonic()
        self._answers = {key: answer for key, answer in self._answers.items() if now - answer.at < KEPT_SECONDS}
        if job_id in self._answers:
            return self._answers[job_id]
        status = 200
        try:
            found = self._farm() if job_id is None else self._explanation(job_id)
        except NoResultFound:
            status, found = 404, {"error": "there is no such job"}
        except (SQLAlchemyError, RedisError, SchedulerError) as error:
            status, found = 503, {"error": describe_failure(error, self.settings)}
        body = gzip.compress(json.dumps(found, separators=(",", ":")).encode(), compresslevel=1)
        return self._answers.setdefault(job_id, PageAnswer(status, body, time.monotonic()))

    def _farm(self) -> dict[str, Any]:
        hosts = ask(self._engine, list_hosts, most=MOST_HOSTS)
        view = farm_view(self._engine, self._redis, self.settings)
        staleness = self.settings.host_cache.host_staleness_threshold
        grid = [_host(row, staleness) for row in hosts if view["facility"] in (None, row.facility)]
        return {**view, "grid": grid}

    def _explanation(self, job_id: str) -> dict[str, Any]:
        """Raises NoResultFound where there is no such job."""
        show_id = ask(self._engine, job_of, job_id).show_id
        passes = passes_over(self._redis, self.settings, job_id, show_id)
        found = ask(self._engine, explain_job, job_id, self.settings, passes)
        deaths, note = self._deaths(ask(self._engine, dead_frames, job_id))
        lines = explanation_lines(found, every_reason=True)
        return {
            "state": found.state,
            "lines": lines,
            "deaths": [_death(death, found) for death in deaths],
            "note": note,
        }

    def _deaths(self, dead: Sequence[Row[Any]]) -> tuple[Sequence[Deaths], str]:
        """Why frames died, with the ends of their logs, and a note where the logs' file server does not answer.

        No viewer waits for it longer than LOGS_SECONDS, and while a read of it hangs nothing more is read.
        """
        hangs = "the file server of the logs does not answer, so nothing is told of the dead frames"
        if self._reading is not None and not self._reading.done():
            return (), hangs
        self._reading = self._log_thread.submit(deaths_among, dead)
        try:
            return self._reading.result(LOGS_SECONDS), ""
        except TimeoutError:
            return (), hangs

    async def log_of(self, frame_id: str) -> str | None:
        """The end of the log of a frame; None where there is no such frame, or its log is not visible here. Raises
        TimeoutError where the file server does not answer, and SQLAlchemyError."""
        loop = asyncio.get_running_loop()
        frames = await loop.run_in_executor(self._thread, partial(ask, self._engine, frames_by_id, [frame_id]))
        if not frames:
            return None
        path = log_path(frames[0].log_dir, frames[0].job, frames[0].name)
        reading = loop.run_in_executor(self._log_thread, end_of_log, path, LOG_BYTES)
        return await asyncio.wait_for(reading, LOGS_SECONDS)


def _death(death: Deaths, job: Explanation) -> dict[str, Any]:
    """What the page shows of frames that died alike."""
    layers = {layer["id"]: layer["layer"] for layer in job.layers}
    shown = ("frames", "exit_status", "meaning", "frame", "frame_id", "host", "log", "lines")
    return {"layer": layers.get(death.layer_id, ""), **{name: getattr(death, name) for name in shown}}


def _host(row: Row[Any], staleness: float) -> dict[str, Any]:
    """A host of the grid: how it looks, its cores, and how it is in words; it is silent after ``staleness`` seconds."""
    why = unavailable(row, staleness)
    cores = row.centicores / CENTICORES_PER_CORE
    booked = (row.centicores - row.idle_centicores) / CENTICORES_PER_CORE
    look = "locked" if why.endswith("locked") else "down" if why else ""
    words = f"{row.host}: {why or 'up'}, {booked:g} of {cores:g} cores booked, {counted(row.frames, 'frame')}"
    known = {"name": row.host, "allocation": row.allocation, "cores": cores, "booked": booked}
    return known | {"look": look, "words": words}


class _Guarded(BaseHandler):  # type: ignore[misc]
    """A page of Flower's, under its password, that loads nothing from elsewhere."""

    def set_default_headers(self) -> None:
        super().set_default_headers()
        for name, value in HEADERS.items():
            self.set_header(name, value)


class FarmFile(_Guarded):
    """One of FILES."""

    @authenticated
    def get(self, name: str) -> None:
        self.set_header("Content-Type", f"{FILES[name]}; charset=utf-8")
        path = Path(__file__).parent / "static" / (name if "." in name else f"{name}.html")
        self.finish(path.read_bytes())


class FarmData(_Guarded):
    """The farm as JSON; with ``job``, the explanation of that job."""

    def initialize(self, reader: FarmReader) -> None:
        self.reader = reader

    @authenticated
    async def get(self) -> None:
        answer = await self.reader.answer(self.get_query_argument("job", None))
        self.set_status(answer.status)
        self.set_header("Content-Type", "application/json")
        self.set_header("Content-Encoding", "gzip")
        self.finish(answer.body)


class FarmLog(_Guarded):
    """The end of a frame's log, as text."""

    def initialize(self, reader: FarmReader) -> None:
        self.reader = reader

    @authenticated
    async def get(self) -> None:
        self.set_header("Content-Type", "text/plain; charset=utf-8")
        self.set_header("X-Content-Type-Options", "nosniff")
        try:
            told = await self.reader.log_of(self.get_query_argument("frame"))
        except TimeoutError:
            self.set_status(503)
            told = "The file server of the logs does not answer.\n"
        except SQLAlchemyError as error:
            self.set_status(503)
            told = f"{describe_failure(error, self.reader.settings)}\n"
        if told is None:
            self.set_status(404)
            told = "There is no such frame, or its log is not visible on this machine.\n"
        self.finish(told)


def add_to_flower(settings: Settings) -> None:
    """Have Flower serve the page. Before Flower's application is made: that is when it reads its list."""
    reader = FarmReader(settings)
    flower_handlers[:0] = [
        url(r"/(farm|farm\.css|farm\.js)", FarmFile),
        url(r"/farm/data", FarmData, {"reader": reader}),
        url(r"/farm/log", FarmLog, {"reader": reader}),
        url(r"/farm/", RedirectHandler, {"url": "../farm", "permanent": False}),
    ]
