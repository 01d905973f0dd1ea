"""A random game with a small farm: jobs come and frames end, hosts, caps, licences, priorities and holds change.

After every few events two processes take turns at the cluster, each with its own memory of what rests. A pass looks at
three jobs here, so that a game of a dozen has jobs behind the window. Clocks stand still but for the rests that passes
ask for, and a moment between rounds.
"""

from __future__ import annotations

import uuid
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Any

import redis
from sqlalchemy import Engine, text

from opencue_sched.accounting import keys
from opencue_sched.accounting.caps import make_ledger
from opencue_sched.coordination.change_log import BacklogChanges, HostChanges
from opencue_sched.dispatch.cluster_pass import (
    CONTENDED_SLEEP_SECONDS,
    FIRST_LOST_SECONDS,
    LONGEST_LOST_SECONDS,
    PassRunner,
)
from opencue_sched.dispatch.cooldown import FIRST_LOCKED_SECONDS, LONGEST_LOCKED_SECONDS, Cooldowns
from opencue_sched.dispatch.host_feed import HostFeed
from opencue_sched.dispatch.report import PassReport
from opencue_sched.domain.clusters import Cluster, ClusterKind
from opencue_sched.embedded.farms.farm import Farm
from opencue_sched.embedded.farms.farm_specs import AllocIds, HostSpec, JobSpec, LayerSpec, ShowIds
from opencue_sched.reports.run_ends import CompletedFrame
from opencue_sched.settings import Accounting
from tests.kit.frozen_clock import Clock
from tests.kit.passes import Passes, ReadingAnew
from tests.kit.runs import complete_frame

WINDOW = 3
PASSES_AT_MOST = 300

TAGS = (("x",), ("y",), ("x", "y"))
WEIGHTS = {
    "end": 8,
    "job": 5,
    "priority": 2,
    "pause": 2,
    "state": 2,
    "cap": 2,
    "lock": 2,
    "limit": 1,
    "host": 1,
    "hold": 3,
}


_HOSTS = """
SELECT 'host' AS what, str_name, str_tags, int_cores AS cores, int_cores_idle AS idle, int_mem_idle AS memory, str_state
FROM host JOIN host_stat USING (pk_host) WHERE pk_alloc = :alloc
"""
_LAYERS = """
SELECT 'layer' AS what, l.pk_layer, l.pk_job, l.int_cores_min AS cores, l.int_mem_min AS memory, l.str_tags AS tags,
       r.int_priority AS priority, r.int_max_cores AS cap, j.b_paused AS paused, k.pk_layer IS NOT NULL AS limited,
       count(*) FILTER (WHERE f.str_state = 'WAITING') AS waiting,
       count(*) FILTER (WHERE f.str_state = 'RUNNING') AS running
FROM layer l JOIN job j USING (pk_job) JOIN job_resource r USING (pk_job) JOIN frame f ON f.pk_layer = l.pk_layer
LEFT JOIN layer_limit k ON k.pk_layer = l.pk_layer
WHERE j.pk_show = :show
GROUP BY l.pk_layer, l.pk_job, l.int_cores_min, l.int_mem_min, l.str_tags, r.int_priority, r.int_max_cores, j.b_paused,
         k.pk_layer
ORDER BY r.int_priority DESC
"""


# What holds: for whom, how much, whether for longer than any frame of the game is expected to run, and what is idle.
_HOLDS = """
SELECT hold.pk_host, hold.pk_layer, hold.cores * 100 AS cores, hold.free_at IS NOT NULL AS expected,
       host.int_cores_idle AS idle
FROM opencue_sched_hold hold JOIN host USING (pk_host)
WHERE host.pk_alloc = :alloc
"""
_HISTORY = """
SELECT u.pk_layer FROM layer_usage u JOIN job USING (pk_job)
WHERE job.pk_show = :show AND u.int_frame_success_count > 0
"""


@dataclass
class Game:
    """A show of its own with an allocation, a licence and a cluster, and two processes."""

    here: Passes
    engine: Engine
    show: ShowIds
    alloc: AllocIds
    limit: str
    cluster: Cluster
    clock: Clock
    runners: list[PassRunner]
    chance: Random
    hosts: list[str] = field(default_factory=list)
    jobs: list[str] = field(default_factory=list)
    locked: set[str] = field(default_factory=set)
    story: list[str] = field(default_factory=list)

    def rows(self, sql: str, **parameters: object) -> list[Any]:
        with self.engine.connect() as connection:
            return list(connection.execute(text(sql), parameters))

    def execute(self, sql: str, **parameters: object) -> None:
        with self.engine.begin() as connection:
            connection.execute(text(sql), parameters)

    def play(self) -> None:
        """Let something happen."""
        (kind,) = self.chance.choices(list(WEIGHTS), list(WEIGHTS.values()))
        self.story.append(f"{kind} {getattr(self, f'do_{kind}')()}")

    def tell(self, number: int) -> None:
        """Remember how everything is, for those who want to know why a game was lost."""
        self.story += [f"round {number}", *map(str, self.rows(_HOSTS, alloc=self.alloc.id))]
        self.story += map(str, self.rows(_LAYERS, show=self.show.id))

    def told(self) -> str:
        return "\n".join(self.story)

    def do_job(self) -> str:
        choice = self.chance.choice
        layer = LayerSpec(
            frames=choice([1, 2, 3]),
            cores=choice([1, 1, 1, 2, 4, 0]),
            memory_gb=choice([1, 1, 3, 12]),
            tags=" | ".join(self.tags()),
            limits=(self.limit,) if self.chance.random() < 0.3 else (),
        )
        job = JobSpec(
            [layer],
            name=f"job-{uuid.uuid4().hex[:12]}",
            show=self.show,
            priority=choice([1, 2, 3, 4]),
            max_cores=choice([10_000, 10_000, 10_000, 1, 2]),
        )
        with self.engine.begin() as connection:
            self.jobs.append(Farm(connection).jobs([job])[0].id)
        return str(job)

    def do_host(self) -> str:
        host = HostSpec(
            name=f"host-{uuid.uuid4().hex[:12]}",
            alloc=self.alloc,
            cores=self.chance.choice([1, 2, 4]),
            tags=self.tags(),
            hostname_tag=False,
        )
        with self.engine.begin() as connection:
            self.hosts.append(Farm(connection).hosts([host])[0].id)
        self.changed(self.hosts[-1])
        return str(host)

    def do_end(self) -> str:
        running = self.rows(
            "SELECT pk_proc, pk_frame, h.str_name FROM proc JOIN host h USING (pk_host) WHERE proc.pk_show = :show "
            "ORDER BY pk_proc",
            show=self.show.id,
        )
        if not running:
            return "of nothing"
        proc, frame, host = self.chance.choice(running)
        complete_frame(
            self.engine,
            CompletedFrame(proc, frame, host, 0),
            ledger=self.here.runner.ledger,
            changes=HostChanges(self.here.client, "cue"),
        )
        return f"of frame {frame} on {host}"

    def do_state(self) -> str:
        host, state = self.chance.choice(self.hosts), self.chance.choice(["DOWN", "UP", "UP"])
        self.execute("UPDATE host_stat SET str_state = :state WHERE pk_host = :host", state=state, host=host)
        self.changed(host)
        return f"{state} of {host}"

    def do_cap(self) -> str:
        job, cap = self.chance.choice(self.jobs), self.chance.choice([100, 200, 400, -1])
        self.execute("UPDATE job_resource SET int_max_cores = :cap WHERE pk_job = :job", cap=cap, job=job)
        self.load(keys.job(job))
        return f"{cap} of job {job}"

    def do_limit(self) -> str:
        most = self.chance.choice([0, 1, 2, 4])
        self.execute(
            "UPDATE limit_record SET int_max_value = :most WHERE pk_limit_record = :limit", most=most, limit=self.limit
        )
        self.load(keys.limit(self.limit))
        return str(most)

    def do_priority(self) -> str:
        job, priority = self.chance.choice(self.jobs), self.chance.choice([1, 2, 3, 4])
        self.execute("UPDATE job_resource SET int_priority = :p WHERE pk_job = :job", p=priority, job=job)
        return f"{priority} of job {job}"

    def do_pause(self) -> str:
        job, paused = self.chance.choice(self.jobs), self.chance.random() < 0.5
        self.execute("UPDATE job SET b_paused = :paused WHERE pk_job = :job", paused=paused, job=job)
        return f"{paused} of job {job}"

    def do_hold(self) -> str:
        """A host drains for a layer, or no longer. Frames here run a second, and a host that is expected to be free is
        so in ten minutes."""
        host = self.chance.choice(self.hosts)
        self.changed(host)
        self.execute("DELETE FROM opencue_sched_hold WHERE pk_host = :host", host=host)
        layers = self.rows(_LAYERS, show=self.show.id)
        if self.chance.random() < 0.3 or not layers:
            return f"none on {host}"
        layer, cores, expected = self.chance.choice(layers), self.chance.choice([1, 2, 4]), self.chance.random() < 0.5
        self.execute(
            """
            INSERT INTO opencue_sched_hold (pk_host, pk_layer, pk_job, cores, memory_kb, gpus, until, free_at)
            VALUES (:host, :layer, :job, :cores, 0, 0, clock_timestamp() + interval '1 hour',
                    CASE WHEN :expected THEN clock_timestamp() + interval '10 minutes' END)
            """,
            host=host,
            layer=layer.pk_layer,
            job=layer.pk_job,
            cores=cores,
            expected=expected,
        )
        return f"of {cores} cores on {host} for layer {layer.pk_layer}, expected free: {expected}"

    def holds(self) -> dict[str, Any]:
        return {row.pk_host: row for row in self.rows(_HOLDS, alloc=self.alloc.id)}

    def layers_with_history(self) -> set[str]:
        return {row.pk_layer for row in self.rows(_HISTORY, show=self.show.id)}

    def against_holds(self, holds: Mapping[str, Any], known: Collection[str], new: Sequence[Any]) -> list[Any]:
        """What was booked on hosts against their ``holds``, of the ``new`` procs and the layers that had a history: not
        by the owner, nor after it, nor by the backfill rule."""
        wrong: list[Any] = []
        for host, hold in holds.items():
            procs = [proc for proc in new if proc.pk_host == host]
            if any(proc.pk_layer == hold.pk_layer for proc in procs):
                continue
            wrong += [proc for proc in procs if not (hold.expected and proc.pk_layer in known)]
            # Each found as much idle as was reserved: at the best the largest came last.
            taken = sorted(proc.cores for proc in procs)[:-1]
            if procs and hold.idle - sum(taken) < hold.cores:
                wrong += procs
        return wrong

    def do_lock(self) -> str:
        self.locked.add(self.chance.choice(self.hosts))
        return str(self.locked)

    def tags(self) -> list[str]:
        """Some of those of this game."""
        return [f"{tag}-{self.show.name}" for tag in self.chance.choice(TAGS)]

    def changed(self, host: str) -> None:
        self.here.runner.hosts.changed({host})

    def load(self, vertex: str) -> None:
        load_caps = self.here.runner.ledger.load_caps
        assert load_caps is not None
        load_caps([vertex])

    def drain(self) -> None:
        """Passes of either process, until one says that there is nothing to do for now. Hosts that somebody has locked
        are given back as soon as one of them was found so."""
        with self.engine.connect() as somebody:
            locks = somebody.begin()
            somebody.execute(
                text("SELECT FROM host WHERE pk_host = ANY(:hosts) FOR UPDATE"), {"hosts": sorted(self.locked)}
            )
            try:
                for _ in range(PASSES_AT_MOST):
                    runner = self.chance.choice(self.runners)
                    (report,) = runner.run([self.cluster], alive=lambda: True)
                    self.story += [f"pass {report.summary()}", *(f"    {verdict}" for verdict in report.verdicts)]
                    if report.losses and self.locked:
                        locks.rollback()
                        self.locked.clear()
                    pause = rest_of(report)
                    if pause is None:
                        return
                    self.clock.now += pause
            finally:
                if locks.is_active:
                    locks.rollback()
                    self.locked.clear()
        raise AssertionError(f"the cluster was not at rest after {PASSES_AT_MOST} passes")

    def running(self) -> dict[str, Any]:
        found = self.rows(
            "SELECT p.pk_proc, p.pk_host, p.int_cores_reserved AS cores, p.int_mem_reserved AS memory, "
            "r.int_priority AS priority, h.str_tags AS tags, p.pk_job, p.pk_layer "
            "FROM proc p JOIN host h USING (pk_host) "
            "JOIN job_resource r ON r.pk_job = p.pk_job WHERE p.pk_show = :show",
            show=self.show.id,
        )
        return {row.pk_proc: row for row in found}

    def waiting(self) -> list[Any]:
        """Layers that nothing but hosts keeps waiting."""
        layers = self.rows(_LAYERS, show=self.show.id)
        free = [it for it in layers if it.waiting and it.cores > 0 and not (it.paused or it.limited)]
        return [it for it in free if it.cap < 0 or it.cap > 100 * 1000]


def rest_of(report: PassReport) -> float | None:
    """Seconds until the dispatcher has the cluster passed over again; None: when something happens."""
    if report.frames_booked or report.go_on:
        return 0.0
    if report.losses.keys() - {"host_locked"}:
        return CONTENDED_SLEEP_SECONDS
    return report.look_again


def process(here: Passes, name: str, clock: Clock, *, window: int = WINDOW) -> PassRunner:
    """Another process: with caches and a memory of its own."""
    mine = here.runner
    queue = here.settings.queue.model_copy(update={"max_jobs_per_cluster_pass": window})
    client: redis.Redis = here.client
    settings = here.settings.model_copy(update={"queue": queue})
    return PassRunner(
        here.engine,
        settings,
        make_ledger(here.engine, client, owner=name, accounting=Accounting()),
        HostFeed(here.engine, HostChanges(client, "cue"), here.settings.host_cache, instance=name, clock=clock),
        ReadingAnew(here.engine, settings, mine.facts, BacklogChanges(client, "cue"), clock=clock),
        mine.permits,
        mine.channels,
        mine.facts,
        locked=Cooldowns(FIRST_LOCKED_SECONDS, LONGEST_LOCKED_SECONDS, clock, free=1),
        lost=Cooldowns(FIRST_LOST_SECONDS, LONGEST_LOST_SECONDS, clock, free=1),
    )


def a_game(here: Passes, engine: Engine, chance: Random) -> Game:
    clock = Clock()
    with engine.begin() as connection:
        farm = Farm(connection)
        name = uuid.uuid4().hex[:8]
        show, alloc = farm.show(f"show-{name}"), farm.alloc(f"alloc-{name}")
        farm.subscription(show, alloc, size=1000)
        limit = farm.limit(f"limit-{name}", 2)
        cluster = Cluster(farm.facility(), show.id, ClusterKind.MANUAL, (f"x-{show.name}", f"y-{show.name}"))
    runners = [process(here, name, clock) for name in ("one", "two")]
    return Game(here, engine, show, alloc, limit, cluster, clock, runners, chance)


def covers(proc: Any, layer: Any) -> bool:
    """Whether a frame of the layer could have had what the proc has."""
    tags = set(layer.tags.replace(" ", "").split("|"))
    return bool(
        layer.priority > proc.priority
        and layer.cores <= proc.cores
        and layer.memory <= proc.memory
        and tags & set(proc.tags.split())
    )
