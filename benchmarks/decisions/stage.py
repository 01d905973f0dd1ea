"""One scenario on stores and a fleet of its own: planted, played, recorded."""

from __future__ import annotations

import contextlib
import json
import secrets
import tempfile
import time
import zlib
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import redis
from pydantic import SecretStr
from sqlalchemy import Engine, create_engine, text

from benchmarks.decisions.licence_server import SETTLE_WINDOW_SECONDS, LicenceServer
from benchmarks.decisions.record import Denial, Layer, Machine, Record, Run, Seated, Wait
from benchmarks.decisions.scenario import MEMORY_GB_A_CORE, Scenario, Work
from benchmarks.frame_ends import FrameEnds, RunningProc
from benchmarks.proc_times import Reading, parent_of, read
from opencue_sched.accounting import keys
from opencue_sched.accounting.epoch import Epoch
from opencue_sched.accounting.ledger import Ledger
from opencue_sched.clients.postgres import make_engine
from opencue_sched.coordination.change_log import HostChanges
from opencue_sched.coordination.keys import beat_keys
from opencue_sched.coordination.postings import cluster_postings
from opencue_sched.coordination.presence import list_members
from opencue_sched.domain.states import ExitStatus
from opencue_sched.embedded.farms.farm import Farm
from opencue_sched.embedded.farms.farm_specs import AllocIds, HostSpec, JobIds, JobSpec, LayerSpec, ShowIds
from opencue_sched.embedded.servers.fleet import Fleet
from opencue_sched.embedded.servers.services import EmbeddedPostgres, EmbeddedRedis
from opencue_sched.insight.audit import Severity, run_audit
from opencue_sched.insight.doctor import diagnose
from opencue_sched.insight.fleet import leader_view
from opencue_sched.settings import Accounting, Queue, Rqd, Settings
from opencue_sched.store.schema import upgrade

UNCAPPED = 1_000_000
"""Cores of a burst that nobody can reach."""
SAMPLE_SECONDS = 0.05
DENIED_SECONDS = 0.3
"""After which a render gives up that got no licence."""
MEMORY_OF_HEAVY = 1.1
"""What a heavy frame needs to what it asks for."""
KB_A_GB = 1024 * 1024
_FIRST_BOOKING_SECONDS = 60.0

ENVIRONMENT = {
    "OPENCUE_SCHED_RQD__DRY_RUN_MODE": "true",
    "OPENCUE_SCHED_QUEUE__METRICS_PORT": "0",
    "OPENCUE_SCHED_QUEUE__CLUSTER_RELOAD_INTERVAL": "2s",
    "OPENCUE_SCHED_HOST_CACHE__HOST_STALENESS_THRESHOLD": "1h",
    "OPENCUE_SCHED_COORDINATION__LEASE_TTL": "6s",
    "OPENCUE_SCHED_ACCOUNTING__LIMIT_SETTLE_WINDOW_SECONDS": str(SETTLE_WINDOW_SECONDS),
}

# Every proc's beginning and end, by triggers: exact, and in the order in which procs took each other's place, because
# what a proc had is free for others only after the transaction that deleted it.
_LOG = """
CREATE UNLOGGED TABLE decisions_log (
    at float8, begins boolean, proc varchar, frame varchar, layer varchar, host varchar, cores bigint, gpus int);
CREATE FUNCTION decisions_began() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN
    INSERT INTO decisions_log SELECT extract(epoch FROM clock_timestamp()), true, pk_proc, pk_frame, pk_layer, pk_host,
           int_cores_reserved, int_gpus_reserved FROM gone_or_new; RETURN NULL; END $$;
CREATE FUNCTION decisions_ended() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN
    INSERT INTO decisions_log (at, begins, proc) SELECT extract(epoch FROM clock_timestamp()), false, pk_proc
    FROM gone_or_new; RETURN NULL; END $$;
CREATE TRIGGER decisions_began AFTER INSERT ON proc REFERENCING NEW TABLE AS gone_or_new
    FOR EACH STATEMENT EXECUTE FUNCTION decisions_began();
CREATE TRIGGER decisions_ended AFTER DELETE ON proc REFERENCING OLD TABLE AS gone_or_new
    FOR EACH STATEMENT EXECUTE FUNCTION decisions_ended();
"""
_NO_HISTORY = """
CREATE FUNCTION decisions_forget() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN RETURN NULL; END $$;
CREATE TRIGGER decisions_forget BEFORE UPDATE ON layer_usage FOR EACH ROW EXECUTE FUNCTION decisions_forget();
"""
_FIRST = text("SELECT min(at) FROM decisions_log")
_READ_LOG = text("SELECT * FROM decisions_log ORDER BY at, begins")
_READ_WAITS = text(
    "SELECT pk_frame AS frame, pk_layer AS layer, CAST(extract(epoch FROM ts_eligible) AS float8) AS since FROM frame "
    "WHERE ts_eligible IS NOT NULL"
)
_TERMS = text(
    "UPDATE limit_record SET str_type = CASE WHEN :machines THEN 'HOST' ELSE 'FRAME' END,"
    " int_report_ttl = :life_seconds, int_exit_status = :exit_status, int_delay_minutes = :delay_minutes"
    " WHERE pk_limit_record = :limit"
)
_FRAMES = text(
    "SELECT count(*) FILTER (WHERE str_state = 'DEAD') AS \"dead frames\","
    ' CAST(coalesce(sum(int_retries), 0) AS bigint) AS "retries used" FROM frame'
)
_PAUSE = text("UPDATE job SET b_paused = :paused WHERE pk_show = :show")


def known_setting(name: str) -> bool:
    """Whether this version has ``queue.NAME``."""
    return name in Queue.model_fields


class Stores:
    """A PostgreSQL and a Redis of one's own; every run gets an empty database and an empty Redis."""

    def __init__(self) -> None:
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> Stores:
        self._postgres = self._stack.enter_context(EmbeddedPostgres(in_memory=True))
        self._redis = self._stack.enter_context(EmbeddedRedis())
        self._admin = create_engine(self._postgres.url, isolation_level="AUTOCOMMIT", pool_size=1)
        self._stack.callback(self._admin.dispose)
        self._make("template")
        upgrade(self._postgres.database_url("template"))
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    @contextlib.contextmanager
    def fresh(self) -> Iterator[tuple[str, str]]:
        """URLs of a migrated database without rows and of an empty Redis."""
        name = f"run_{secrets.token_hex(4)}"
        self._make(name, "template")
        with redis.Redis.from_url(self._redis.url) as client:
            client.flushall()
        try:
            yield self._postgres.database_url(name), self._redis.url
        finally:
            with self._admin.connect() as connection:
                connection.execute(text(f"DROP DATABASE {name} WITH (FORCE)"))

    def _make(self, name: str, template: str = "template0") -> None:
        with self._admin.connect() as connection:
            connection.execute(text(f"CREATE DATABASE {name} TEMPLATE {template} STRATEGY FILE_COPY"))


@dataclass
class Stage:
    """A farm at work. ``layers`` is everything that was submitted.

    ``pace`` seconds pass for each second of the scenario: a slow machine is given more. Records are in the scenario's.
    """

    scenario: Scenario
    engine: Engine
    client: redis.Redis
    settings: Settings
    fleet: Fleet
    licences: LicenceServer
    pace: float = 1.0
    shows: dict[str, ShowIds] = field(default_factory=dict)
    allocs: dict[str, AllocIds] = field(default_factory=dict)
    hosts: dict[str, Machine] = field(default_factory=dict)
    layers: dict[str, Layer] = field(default_factory=dict)
    run_seconds: dict[str, tuple[float, float]] = field(default_factory=dict)
    needs: dict[str, tuple[str, ...]] = field(default_factory=dict)
    heavy: dict[str, float] = field(default_factory=dict)
    watched: dict[str, tuple[str, str]] = field(default_factory=dict)
    peaks: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    marks: dict[str, float] = field(default_factory=dict)
    found: dict[str, float] = field(default_factory=dict)
    _limits: dict[str, str] = field(default_factory=dict)
    _workers: int = 0

    # Before anything runs

    def plant(self) -> None:
        """Hosts, shows and caps, without work."""
        scenario = self.scenario
        with self.engine.begin() as connection:
            connection.exec_driver_sql(_LOG)
            if not scenario.history:
                connection.exec_driver_sql(_NO_HISTORY)
            farm = Farm(connection, seed=1)
            for hosts in scenario.hosts:
                alloc = self.allocs.setdefault(hosts.tag, farm.alloc(hosts.tag))
                spec = HostSpec(
                    alloc=alloc,
                    cores=hosts.cores,
                    memory_gb=hosts.cores * MEMORY_GB_A_CORE,
                    gpus=hosts.gpus,
                    gpu_memory_gb=16 * hosts.gpus,
                    name=hosts.name,
                    hostname_tag=hosts.name is not None,
                )
                for host in farm.hosts([spec] * hosts.count):
                    self.hosts[host.id] = Machine(host.name, hosts.kind, hosts.cores, hosts.gpus)
            for name, licence in scenario.licences.items():
                self._limits[name] = farm.limit(name, licence.most if scenario.capped else UNCAPPED)
                connection.execute(_TERMS, {**asdict(licence), "limit": self._limits[name]})
                self.watched[name] = (keys.limit(self._limits[name]), "int_running")
            for show in scenario.shows:
                folder_cap = show.folder_cap if scenario.capped and show.folder_cap is not None else -1
                ids = self.shows[show.name] = farm.show(show.name, folder_max_cores=folder_cap)
                for alloc in self.allocs.values():
                    burst = show.burst if scenario.capped and show.burst is not None else UNCAPPED
                    farm.subscription(ids, alloc, size=show.size, burst=burst)
                    self.watched[f"burst of {show.name}"] = (keys.subscription(ids.id, alloc.id), "int_cores")
                self.watched[f"folder of {show.name}"] = (keys.folder(ids.folder_id), "int_cores")

    def start_fleet(self, workers: int) -> None:
        """Workers and beats, all at once; the counters of an empty farm are complete as they are."""
        self.client.set(keys.EPOCH, Epoch.new(str(self.client.info("server")["run_id"])).text)
        for number in range(1, self.scenario.beats + 1):
            self.fleet.beat(f"beat{number}", OPENCUE_SCHED_INSTANCE=f"beat{number}")
        with ThreadPoolExecutor(workers) as starting:
            list(starting.map(lambda _: self.new_worker(), range(workers)))

    def new_worker(self) -> None:
        self._workers += 1
        options = ["--include", self.scenario.imports] if self.scenario.imports else []
        self.fleet.worker(f"worker{self._workers}", *options)

    # While it runs

    def submit(self, work: Sequence[Work]) -> None:
        """Write jobs, in one transaction."""
        specs = [(part, number) for part in work for number in range(part.jobs)]
        with self.engine.begin() as connection:
            farm = Farm(connection)
            made = farm.jobs([self._job(*spec) for spec in specs])
            for (part, number), job in zip(specs, made, strict=True):
                self._note(part, number, job)
                if part.ordered:
                    self._order(farm, job)
            farm.activate(made)

    def _job(self, part: Work, number: int) -> JobSpec:
        capped = self.scenario.capped and part.job_cap is not None
        layers = [
            LayerSpec(
                frames=part.frames,
                cores=cores,
                memory_gb=cores * part.memory_gb_a_core,
                gpus=part.gpus,
                gpu_memory_gb=part.gpus,
                tags=part.tag,
                cores_max=cores,
                optimize=False,
                limits=[self._limits[name] for name in part.licences],
            )
            for cores in part.cores
        ]
        return JobSpec(
            layers=layers,
            show=self.shows[part.show],
            name=f"{part.show}-{part.name}-{part.at:g}-{number}".replace(" ", "_"),
            priority=part.priority,
            max_cores=part.job_cap if capped and part.job_cap else UNCAPPED,
            paused=part.paused,
            activate=False,
        )

    def _note(self, part: Work, number: int, job: JobIds) -> None:
        for cores, layer in zip(part.cores, job.layers, strict=True):
            self.layers[layer.id] = Layer(
                layer.id, part.name, part.show, number, cores, part.gpus, part.priority, part.licences
            )
            self.run_seconds[layer.id] = part.seconds
            needed = MEMORY_OF_HEAVY * cores * part.memory_gb_a_core * KB_A_GB
            self.heavy.update(dict.fromkeys(layer.frames[: part.heavy], needed))

    def _order(self, farm: Farm, job: JobIds) -> None:
        for position in range(1, len(job.layers)):
            if self.scenario.ordered:
                farm.frame_by_frame((job, position), (job, position - 1))
            for frame, before in zip(job.layers[position].frames, job.layers[position - 1].frames, strict=True):
                self.needs[frame] = (before,)

    def pause(self, show: str) -> None:
        """The show has no more work that may start."""
        self._pause(show, paused=True)

    def resume(self, show: str) -> None:
        """What waits of the show may start."""
        self._pause(show, paused=False)

    def _pause(self, show: str, *, paused: bool) -> None:
        with self.engine.begin() as connection:
            connection.execute(_PAUSE, {"show": self.shows[show].id, "paused": paused})

    def kill_worker(self) -> None:
        """The oldest worker that lives."""
        name = min(name for name in self.fleet.processes if name.startswith("worker"))
        self.fleet.processes.pop(name).kill()

    def kill_leading_beat(self) -> None:
        members = list_members(self.client, self.settings.coordination.namespace)
        role = beat_keys(self.settings.coordination.namespace, self.settings.scheduler.facility)
        leader = str(leader_view(self.client, role, members)["instance"]).rpartition("-")[0]
        beats = [name for name in self.fleet.processes if name.startswith("beat")]
        self.fleet.processes.pop(leader if leader in beats else beats[0]).kill()

    def seconds_of(self, proc: RunningProc) -> float:
        """How long a frame runs: evenly spread between its layer's bounds; one that gets no licence ends soon."""
        layer = self.layers[proc.layer_id]
        if layer.licences and not self.licences.ask(proc.id, self.hosts[proc.host_id].name, layer):
            return DENIED_SECONDS
        least, most = self.run_seconds[proc.layer_id]
        return self.pace * (least + (most - least) * (zlib.crc32(proc.frame_id.encode()) % 1000) / 1000)

    def exit_status(self, proc: RunningProc) -> int:
        """Of a frame that ends, whose licences are given back: heavy ones need the memory they need, and are counted
        once they had it."""
        if denied := self.licences.give_back(proc.id):
            return denied
        if proc.memory_kb < self.heavy.get(proc.frame_id, 0):
            return ExitStatus.MEMORY_FAILURE
        self.peaks["heavy frames done"] += proc.frame_id in self.heavy
        return 0

    def first_booking(self) -> float:
        """When the farm began to work, by the database's clock: how long the fleet took to find it is not judged."""
        deadline = time.monotonic() + _FIRST_BOOKING_SECONDS
        while time.monotonic() < deadline:
            with self.engine.connect() as connection:
                first = connection.execute(_FIRST).scalar()
            if first is not None:
                return float(first)
            time.sleep(SAMPLE_SECONDS)
        raise TimeoutError(f"{self.scenario.name}: nothing was booked in {_FIRST_BOOKING_SECONDS:.0f} s")

    def doctor_says(self, words: str) -> bool:
        """Whether one of doctor's findings has these words."""
        report = diagnose(self.engine, self.client, self.settings)
        return any(words in finding.text for finding in report.findings)

    def sample(self) -> None:
        """Note the most that Redis counts under each watched name."""
        pipeline = self.client.pipeline(transaction=False)
        for key, name in self.watched.values():
            pipeline.hget(key, name)
        for name, value in zip(self.watched, pipeline.execute(), strict=True):
            self.peaks[name] = max(self.peaks[name], float(value or 0))

    # Afterwards

    def cpu(self) -> Reading:
        """CPU time so far of everything that belongs to this run."""
        with self.engine.connect() as connection:
            backend = int(connection.execute(text("SELECT pg_backend_pid()")).scalar_one())
        fleet = [process.pid for process in self.fleet.processes.values()]
        stores = [parent_of(backend), int(self.client.info("server")["process_id"])]
        return read({"fleet": fleet, "stores": stores})

    def shards(self) -> int:
        """Among how many shards the hosts are divided, by the postings of the clusters."""
        posted = cluster_postings(self.client, self.settings).posted()
        return len({key.partition("@")[2] for key in posted})

    def record(self, began: float, seconds: float, audit: Sequence[str], others_percent: int) -> Record:
        with self.engine.connect() as connection:
            log, waits = connection.execute(_READ_LOG).all(), connection.execute(_READ_WAITS).all()

        def at(moment: float) -> float:
            return (moment - began) / self.pace

        last = began + seconds
        ends = {row.proc: at(row.at) for row in log if not row.begins and row.at <= last}
        runs = [
            Run(
                frame=row.frame,
                layer=self.layers[row.layer],
                host=row.host,
                cores=row.cores // 100,
                began=at(row.at),
                ended=ends.get(row.proc),
                gpus=row.gpus,
            )
            for row in log
            if row.begins and row.at <= last
        ]
        first: dict[str, float] = {}
        for run in runs:
            first.setdefault(run.frame, run.began)
        return Record(
            seconds=seconds / self.pace,
            hosts=self.hosts,
            runs=runs,
            waits=[Wait(self.layers[row.layer], at(row.since), first.get(row.frame)) for row in waits],
            marks={name: at(moment) for name, moment in self.marks.items()},
            needs=self.needs,
            counters=dict(self.peaks),
            audit=tuple(audit),
            others_percent=others_percent,
            shards=self.shards(),
            seated=[Seated(at(moment), name, farm, artists) for moment, name, farm, artists in self.licences.seated],
            reports=[(at(moment), product) for moment, product in self.licences.reports],
            denials=[Denial(at(moment), product, layer) for moment, product, layer in self.licences.denials],
            found={**self.found, **self._look_back()},
        )

    def _look_back(self) -> dict[str, float]:
        """What is left to be read in the end."""
        with self.engine.connect() as connection:
            frames = connection.execute(_FRAMES).one()._asdict()
        lost = Counter[str]()
        for log in self.fleet.directory.glob("worker*.log"):
            for line in log.read_text(encoding="utf-8", errors="replace").splitlines():
                if '"bookings_lost"' in line:
                    lost.update({name: count for name, count in json.loads(line).items() if type(count) is int})
        return {**frames, **{f"lost: {reason}": count for reason, count in lost.items()}, "lost": lost.total()}


def play(
    scenario: Scenario,
    workers: int,
    database_url: str,
    redis_url: str,
    *,
    pace: float = 1.0,
    fleet_type: type[Fleet] = Fleet,
    logs: Path | None = None,
) -> Record:
    """Plant, start, play, record. Settings that this version does not have are left out."""
    environment: dict[str, str] = {
        **ENVIRONMENT,
        "OPENCUE_SCHED_DATABASE_URL": database_url,
        "OPENCUE_SCHED_REDIS_URL": redis_url,
        **{
            f"OPENCUE_SCHED_QUEUE__{name.upper()}": value
            for name, value in scenario.queue.items()
            if known_setting(name)
        },
    }
    settings = Settings(
        database_url=SecretStr(database_url),
        redis_url=SecretStr(redis_url),
        instance="decisions",
        rqd=Rqd(dry_run_mode=True),
        accounting=Accounting(limit_settle_window_seconds=SETTLE_WINDOW_SECONDS),
    )
    with contextlib.ExitStack() as stack:
        directory = logs or Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="opencue-sched-decisions-")))
        directory.mkdir(parents=True, exist_ok=True)
        engine = make_engine(settings, application_name="opencue-sched-decisions", pool_size=8)
        stack.callback(engine.dispose)
        client = redis.Redis.from_url(redis_url, decode_responses=True, socket_timeout=30)
        stack.callback(client.close)
        fleet = stack.enter_context(fleet_type(environment, directory))
        stack.callback(_kill_all, fleet)
        licences = LicenceServer(engine, scenario.licences)
        stage = Stage(scenario, engine, client, settings, fleet, licences, pace)
        stage.plant()
        stage.start_fleet(workers)
        return _play(stage)


def _kill_all(fleet: Fleet) -> None:
    """Draining would only take its time."""
    for process in fleet.processes.values():
        process.kill()


def _play(stage: Stage) -> Record:
    scenario = stage.scenario
    due: list[tuple[float, Any]] = [(at, work) for at, work in _by_time(scenario.work).items()]
    due += [(event.at, event) for event in scenario.events]
    due.sort(key=lambda entry: entry[0])
    ends = FrameEnds(
        stage.engine,
        stage.seconds_of,
        ledger=Ledger(stage.client, owner="frame-ends"),
        changes=HostChanges(stage.client, stage.settings.coordination.namespace),
        exit_status=stage.exit_status,
        frame_memory=scenario.frame_memory,
    )
    with ends:
        stage.submit(due.pop(0)[1])
        began = stage.first_booking()
        cpu, started = stage.cpu(), time.monotonic()
        with stage.licences:
            while (now := (time.monotonic() - started) / stage.pace) < scenario.seconds:
                while due and due[0][0] <= now:
                    _, what = due.pop(0)
                    if isinstance(what, list):
                        stage.submit(what)
                    else:
                        stage.marks[what.name] = time.time()
                        what.happens(stage)
                stage.sample()
                time.sleep(SAMPLE_SECONDS)
        seconds = time.monotonic() - started
        others_percent = stage.cpu().since(cpu).others_percent(seconds)
    report = run_audit(stage.engine, stage.client, stage.settings)
    broken = [check.what for check in report.findings if check.level is Severity.FAIL]
    return stage.record(began, seconds, broken, others_percent)


def _by_time(work: Sequence[Work]) -> Mapping[float, list[Work]]:
    parts: dict[float, list[Work]] = defaultdict(list)
    for part in work:
        parts[part.at].append(part)
    return parts
