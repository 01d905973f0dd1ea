"""PostgreSQL is away from the workers, and whoever ends runs meanwhile does so unheard."""

from __future__ import annotations

import time
from contextlib import closing
from pathlib import Path

from celery import Celery
from kombu import Queue
from sqlalchemy import Engine, text

from opencue_sched.coordination.keys import QueueName
from opencue_sched.coordination.transport import broker_settings
from opencue_sched.embedded.farms.farm import Farm
from opencue_sched.embedded.farms.farm_specs import HostSpec, LayerSpec
from opencue_sched.insight.audit import run_audit
from tests.chaos.conftest import Site
from tests.kit.listening import eventually_listen, nobody_hears
from tests.kit.polling import eventually, tail_of

BURST = 6
"""Cores. A frame takes one."""
WORKERS = ("w1", "w2")
_RUNNING = text("SELECT count(*) FROM proc")
_SUCCEED = text(
    "UPDATE frame SET str_state = 'SUCCEEDED', int_exit_status = 0, ts_stopped = now(), ts_updated = now(),"
    " int_version = int_version + 1 WHERE str_state = 'RUNNING'"
)
_FREE_HOSTS = text("UPDATE host SET int_cores_idle = int_cores, int_mem_idle = int_mem")


def attempts_failed(log: Path) -> int:
    return log.read_text().count('"listener_cannot_connect"')


def test_a_farm_is_full_again_without_a_recompute(site: Site, engine: Engine) -> None:
    # given two workers that have booked all that a burst lets run
    with engine.begin() as connection:
        farm = Farm(connection)
        show = farm.show("show")
        farm.subscription(show, farm.default_alloc(), size=BURST)
        farm.hosts([HostSpec(name=f"h{number}", cores=4) for number in range(2)])
        farm.job([LayerSpec(frames=100, threadable=False)], show=show)
    for name in WORKERS:
        site.fleet.worker(name, "--concurrency", "2")
    logs = [site.fleet.log(name) for name in WORKERS]
    app = Celery("sender", broker=broker_settings(site.server.url).url, set_as_current=False)
    with closing(app), engine.connect() as connection:
        app.conf.update(broker_transport_options={"sep": ":prio:"})
        beside = connection.execution_options(isolation_level="AUTOCOMMIT")
        sent_at = 0.0

        def full() -> bool:
            """The fleet sweeps, as every fleet does; and nobody recomputes."""
            nonlocal sent_at
            if time.monotonic() > sent_at + 1:
                sent_at = time.monotonic()
                queue = Queue(str(QueueName("cue", "sweep", "default")))
                app.send_task("opencue_sched.sweep.sweep_clusters", queue=queue, declare=[], priority=0)
            return bool(beside.execute(_RUNNING).scalar_one() == BURST)

        eventually(full, 30, "a full burst", told=tail_of(*logs))
        eventually_listen(engine, len(WORKERS))

        # when all runs end while PostgreSQL is away from both workers
        with nobody_hears(beside):
            eventually(lambda: all(map(attempts_failed, logs)), 30, "workers that miss it", told=tail_of(*logs))
            beside.execute(text("DELETE FROM proc"))
            beside.execute(_SUCCEED)
            beside.execute(_FREE_HOSTS)

        # then others run as soon as it is back, and counters and procs agree
        eventually(full, 30, "a full burst again", told=tail_of(*logs))
        eventually(lambda: not run_audit(engine, site.client, site.settings).failed, 30, "a clean audit")
