"""A small farm of a site, its command line, and what can be seen of its clusters."""

from __future__ import annotations

import subprocess
import sys
from contextlib import contextmanager

from sqlalchemy import Connection, text

from benchmarks import warm_start
from opencue_sched.coordination.keys import BoardKeys, LeaderKeys
from opencue_sched.coordination.leader import tick_series
from opencue_sched.dispatch.clusters import load_clusters
from opencue_sched.embedded.farms.farm import Farm
from opencue_sched.embedded.farms.farm_specs import HostSpec, LayerSpec, ShowIds
from opencue_sched.store.fences import PersistentFences
from tests.chaos.conftest import Site
from tests.kit.command import PROGRAM
from tests.kit.polling import eventually
from tests.kit.redis_log import RedisLog

BOARD = BoardKeys("cue", "clusters")


def opencue_sched(site: Site, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """The command line, as an operator has it."""
    return warm_start.run([*PROGRAM, *arguments], env={**site.fleet.environment, **environment})


def steer(site: Site, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """``opencue-sched ctl``, said again when a worker of a slow machine answered too late."""

    def said() -> subprocess.CompletedProcess[str] | None:
        ran = opencue_sched(site, "ctl", *arguments, **environment)
        return None if ran.returncode else ran

    return eventually(said, 30, f"an answer to {arguments}")


def plant(site: Site, *, frames: int = 4, cores: float = 1, hosts: int = 2) -> None:
    """A managed show with hosts and one job."""
    with site.engine.begin() as connection:
        farm = Farm(connection, seed=1)
        show = farm.show("show", managed=True)
        farm.subscription(show, farm.default_alloc(), burst=1000)
        farm.hosts([HostSpec(name=f"h{number}", cores=8) for number in range(hosts)])
        farm.job([LayerSpec(frames=frames, cores=cores)], show=show)


def add_job(site: Site, name: str, *, frames: int = 1) -> None:
    with site.engine.begin() as connection:
        farm = Farm(connection)
        farm.job([LayerSpec(frames=frames)], show=_show_of(connection), name=name)


def _show_of(connection: Connection) -> ShowIds:
    row = connection.execute(
        text(
            "SELECT s.pk_show, f.pk_folder, f.pk_dept FROM show s JOIN folder f USING (pk_show) "
            "WHERE s.str_name = 'show' ORDER BY f.b_default DESC LIMIT 1"
        )
    ).one()
    return ShowIds(row.pk_show, "show", row.pk_folder, row.pk_dept)


def booked(site: Site) -> int:
    with site.engine.connect() as connection:
        return int(connection.execute(text("SELECT count(*) FROM proc")).scalar() or 0)


@contextmanager
def commits_held_up(site: Site):
    """No pass can commit: it waits for the host table, with its claim in hand."""
    with site.engine.connect() as connection:
        connection.execute(text("LOCK TABLE host IN EXCLUSIVE MODE"))
        yield connection
        connection.rollback()


def waiting_for(site: Site, table: str) -> bool:
    with site.engine.connect() as connection:
        query = "SELECT count(*) FROM pg_locks WHERE NOT granted AND relation = to_regclass(:name)"
        return bool(connection.execute(text(query), {"name": table}).scalar())


def claim(site: Site) -> dict[str, str] | None:
    """The posting that is claimed now, if any."""
    for uuid in site.client.zrange(BOARD.of("claimed"), 0, -1):
        return {**site.client.hgetall(BOARD.job(uuid)), "uuid": uuid}
    return None


def posting(site: Site) -> dict[str, str]:
    (uuid,) = site.client.hvals(BOARD.of("names"))
    return {**site.client.hgetall(BOARD.job(uuid)), "uuid": uuid}


def has_posting(site: Site) -> bool:
    return bool(site.client.hlen(BOARD.of("names")))


def assert_sent_by_the_first_look(log: RedisLog, cluster: str, uuid: str, due: float) -> None:
    """Whoever enqueued the cluster first after a message for it was due (seconds since the epoch) sent that message.

    By what Redis was asked, in its order: a sweep or a watch that comes late is the machine's doing, one that passes by
    a cluster that has been waiting for it is ours.
    """
    asked = log.since(due - 0.01)  # scripts count in whole milliseconds, from when Redis last looked at its clock
    ticket = f"HINCRBY {BOARD.job(uuid)} ticket "
    sent = next(number for number, call in enumerate(asked) if call.text.startswith(ticket))
    looks = [call.at for call in asked[:sent] if call.runs("board_enqueue") and cluster in call.text]
    assert len(looks) <= 1, f"due {due}, sent {asked[sent].at}, looked at {looks}"


def cluster_key(site: Site) -> str:
    """The key of the cluster of the default allocation."""
    with site.engine.connect() as connection:
        (cluster,) = [c for c in load_clusters(connection, site.settings) if c.kind.value == "alloc"]
    return cluster.key


def redis_ms(site: Site) -> int:
    seconds, micros = site.client.time()
    return seconds * 1000 + micros // 1000


def last_sweep(site: Site, role: str) -> int:
    """Number of the last sweep that a leader of this role fired."""
    series = tick_series("sweep-clusters", site.settings.queue.active_scan_interval)
    return PersistentFences(site.engine).leader(LeaderKeys("cue", role).name).ticks.get(series, 0)


def celery(site: Site, *arguments: str, **environment: str) -> str:
    """What ``celery -A opencue_sched ARGUMENTS`` says."""
    command = [sys.executable, "-m", "celery", "-A", "opencue_sched", *arguments]
    ran = warm_start.run(command, env={**site.fleet.environment, **environment}, cwd=site.fleet.directory)
    ran.check_returncode()
    return ran.stdout
