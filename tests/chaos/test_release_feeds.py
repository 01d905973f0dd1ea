"""The feed cuebot-redis, between real processes: two workers that book, and a double that ends what they start.

Who ends runs is the only one who takes from what is booked, so it sees every booking that passes a cap.
"""

from __future__ import annotations

import json
import select
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path

from celery import Celery
from kombu import Queue
from sqlalchemy import text

from opencue_sched.accounting import keys
from opencue_sched.coordination.keys import QueueName
from opencue_sched.coordination.transport import broker_settings
from opencue_sched.embedded.farms.farm import Farm
from opencue_sched.embedded.farms.farm_specs import HostSpec, LayerSpec
from opencue_sched.insight.audit import run_audit
from tests.chaos.conftest import Site
from tests.kit.brief_fleet import open_counters
from tests.kit.polling import eventually, tail_of

FEED = "cuebot-redis"
ROOT = Path(__file__).resolve().parents[2]
BURST, FOLDER = 8, 6
"""Cores. A frame takes one."""

WORKERS = ("w1", "w2")
TRIGGERS = {"proc": ["opencue_sched_proc_released"], "subscription": ["opencue_sched_caps_update"]}


class Scene:
    """Two workers, the double, and a show with more frames than room."""

    def __init__(self, site: Site, app: Celery, double: subprocess.Popen[str], folder: str) -> None:
        self.site, self.app, self.double = site, app, double
        self.folder = keys.folder(folder)
        self.sent: dict[str, float] = {}

    def periodically(self, task: str) -> None:
        """Once a second, when it is called more often."""
        if time.monotonic() - self.sent.get(task, float("-inf")) > 1.0:
            self.send(task)

    def send(self, task: str) -> None:
        """A periodic task, sent by hand: so that a test knows when there is a recompute, and when there is none."""
        self.sent[task] = time.monotonic()
        queue = Queue(str(QueueName("cue", task.split(".")[1], "default")))
        self.app.send_task(task, queue=queue, declare=[], priority=0)

    def release(self, count: int, *, lost: bool = False) -> None:
        """So many runs end, as soon as they are there. The fleet sweeps, as every fleet does: a pass that a commit woke
        may ask the counters before the double has told them, and nothing but a sweep follows it."""
        assert self.double.stdin is not None
        assert self.double.stdout is not None
        self.double.stdin.write(json.dumps({"release": count, "lost": lost}) + "\n")
        self.double.stdin.flush()
        while not select.select([self.double.stdout], [], [], 0.2)[0]:
            self.periodically("opencue_sched.sweep.sweep_clusters")
        answer = json.loads(self.double.stdout.readline())
        assert answer["violations"] == []
        assert answer["released"] == count, tail_of(*map(self.site.fleet.log, WORKERS))()

    def running(self) -> int:
        """Cores of the proc table."""
        with self.site.engine.connect() as connection:
            query = "SELECT coalesce(sum(int_cores_reserved) / 100, 0) FROM proc"
            return int(connection.execute(text(query)).scalar_one())

    def counted(self) -> int:
        """Cores of the show's folder by the counters."""
        return int(self.site.client.hget(self.folder, "int_cores") or 0)

    def until(self, running: int) -> None:
        """So many cores are in use, and that is all there is room for."""

        def full() -> bool:
            self.periodically("opencue_sched.sweep.sweep_clusters")
            return self.running() == running

        eventually(full, 30, f"{running} cores in use", told=tail_of(*map(self.site.fleet.log, WORKERS)))

    def is_true(self) -> None:
        """Counters, ledger, hosts and frames say the same as the proc table, at the latest after recomputes."""

        def clean() -> bool:
            self.periodically("opencue_sched.accounting.recompute")
            return not run_audit(self.site.engine, self.site.client, self.site.settings).failed

        eventually(clean, 30, "a clean audit", told=tail_of(*map(self.site.fleet.log, WORKERS)))
        assert self.counted() == self.running()


@contextmanager
def scene(site: Site) -> Iterator[Scene]:
    """Both workers book, and all that may run does."""
    open_counters(site.client, dual=True)
    site.settings = site.settings.model_copy(
        update={"accounting": site.settings.accounting.model_copy(update={"release_feed": FEED})}
    )
    with site.engine.begin() as connection:
        farm = Farm(connection)
        show = farm.show("show")
        farm.subscription(show, farm.default_alloc(), size=BURST)
        farm.hosts([HostSpec(name=f"h{number}", cores=8) for number in range(2)])
        folder = farm.folder(show, "capped", max_cores=FOLDER)
        farm.job([LayerSpec(frames=400, threadable=False)], show=show, folder_id=folder)
    with ThreadPoolExecutor() as threads:
        options = {"OPENCUE_SCHED_ACCOUNTING__RELEASE_FEED": FEED}
        for started in [threads.submit(site.fleet.worker, name, "--concurrency", "2", **options) for name in WORKERS]:
            started.result()
    with ExitStack() as stack:
        app = Celery("sender", broker=broker_settings(site.server.url).url, set_as_current=False)
        stack.enter_context(closing(app))
        app.conf.update(broker_transport_options={"sep": ":prio:"})
        found = Scene(site, app, stack.enter_context(_double(site)), folder)
        found.until(FOLDER)
        yield found


@contextmanager
def _double(site: Site) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-m", "tests.chaos.cuebot_double", site.settings.sqlalchemy_url, site.server.url]
    with subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        try:
            yield process
        finally:
            process.kill()


def test_what_a_cuebot_takes_off_the_counters_makes_room_and_what_it_forgets_is_found(site: Site) -> None:
    with scene(site) as here:
        # when a Cuebot ends runs and takes them off the counters, then others start at once
        here.release(40)
        here.until(FOLDER)
        assert here.counted() == FOLDER

        # and when it forgets some, then fewer run, never more, until a recompute has looked
        here.release(4, lost=True)
        here.until(FOLDER - 4)
        assert here.counted() == FOLDER
        here.send("opencue_sched.accounting.recompute")
        here.until(FOLDER)
        here.release(10)
        here.until(FOLDER)
        here.is_true()
