"""One typed, documented, frozen tree of settings.

Read from the environment (``OPENCUE_SCHED_`` and ``__`` between levels: ``OPENCUE_SCHED_QUEUE__METRICS_PORT=9091``) and
from the YAML file named by ``OPENCUE_SCHED_CONFIG``; the environment wins. Keys and defaults are those of the
scheduler and accounting references; durations take ``30``, ``"30s"``, ``"2m"``, ``"3h"`` (seconds when bare) and sizes
``"2GiB"`` (bytes when bare). In the environment a list is ``a,b`` or JSON, and a mapping is JSON.
"""

from __future__ import annotations

import json
import os
import re
import socket
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ByteSize,
    ConfigDict,
    Field,
    SecretStr,
    StringConstraints,
    ValidationError,
    model_validator,
)
from pydantic_settings import BaseSettings, InitSettingsSource, PydanticBaseSettingsSource, SettingsConfigDict

from opencue_sched.domain.database_url import DatabaseUrl, read_database_url
from opencue_sched.domain.jobs import FRAMES_TO_RAISE_A_LAYER
from opencue_sched.domain.names import near
from opencue_sched.domain.receiver_url import read_receiver_url
from opencue_sched.domain.redis_url import FILE_OPTIONS, read_redis_url, with_password
from opencue_sched.errors import InvalidInput, WrongConfiguration

PREFIX = "OPENCUE_SCHED_"
CONFIG_VARIABLE = "OPENCUE_SCHED_CONFIG"
_EMBEDDED_PREFIX = f"{PREFIX}EMBEDDED_"
"""How variables begin that name the programs of servers which this program starts itself (embedded.servers)."""

DEFAULT_OS = "default_os"
"""The log root of jobs for an OS that has none of its own, as OpenCue's properties name it."""

# What a value of a setting may look like. The refusals quote no value that may hold a password.

_DURATION = re.compile(r"^\s*(\d{1,15}(?:\.\d+)?)\s*(ms|s|m|h|d)?\s*$")
_SECONDS = {"ms": 0.001, None: 1.0, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
_AUTHORITIES_OF_THE_SYSTEM = "system"
"""What libpq takes for sslrootcert in place of a file."""
_DATABASE_FILES = ("sslrootcert", "sslcert", "sslkey", "sslcrl")


def as_seconds(value: Any) -> Any:
    """``"2m"`` as 120.0; what is no text is left as it is. Raises InvalidInput."""
    if isinstance(value, str):
        match = _DURATION.match(value)
        if match is None:
            raise InvalidInput(f"{value!r} is not a duration; write 30, '30s', '2m' or '3h'")
        return float(match.group(1)) * _SECONDS[match.group(2)]
    return value


def json_value(value: Any) -> Any:
    """A mapping, or a list in brackets, from the environment. Raises ValueError."""
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except json.JSONDecodeError as error:
        raise ValueError(f"{value!r} is not JSON ({error})") from error


def _words(value: Any) -> Any:
    """The words of a text with commas, or of a JSON list. Raises ValueError."""
    if isinstance(value, str) and not value.lstrip().startswith("["):
        return tuple(word for part in value.split(",") if (word := part.strip()))
    return json_value(value)


def _log_roots(value: Any) -> Any:
    """One path as the log root of all jobs, or a JSON mapping by their os. Raises ValueError."""
    if isinstance(value, str) and not value.lstrip().startswith("{"):
        return {DEFAULT_OS: value}
    return json_value(value)


def _for_other_os(value: dict[str, str]) -> dict[str, str]:
    """The log roots, which must have one for any other os. Raises ValueError."""
    if DEFAULT_OS not in value:
        raise ValueError(f"{DEFAULT_OS!r} is missing: the log root of jobs for any other OS")
    return value


def _database_url(value: SecretStr) -> SecretStr:
    """The URL, if it makes sense and the files that it names can be read. Raises InvalidInput and
    WrongConfiguration."""
    options = read_database_url(value.get_secret_value()).options
    _look_for_files("database_url", {name: options.get(name) for name in _DATABASE_FILES})
    return value


def _redis_url(value: SecretStr) -> SecretStr:
    """The URL, if it makes sense and the files that it names can be read. Raises InvalidInput and
    WrongConfiguration."""
    options = read_redis_url(value.get_secret_value()).tls or {}
    _look_for_files("accounting.redis_url", {name: options.get(name) for name in FILE_OPTIONS})
    return value


def _receiver_url(value: SecretStr) -> SecretStr:
    """The URL, if events can be posted to it. Raises InvalidInput."""
    read_receiver_url(value.get_secret_value())
    return value


def _look_for_files(setting: str, named: Mapping[str, object]) -> None:
    """Refuse a URL, by WrongConfiguration, which names a file that is not there, or cannot be read."""
    for option, path in named.items():
        if isinstance(path, str) and path != _AUTHORITIES_OF_THE_SYSTEM and not os.access(path, os.R_OK):
            why = "cannot be read" if Path(path).exists() else "is not there"
            raise WrongConfiguration(f"{setting}: {option} names {path}, which {why}")


_NAME = r"^[a-z0-9][a-z0-9_.-]{0,62}$"
Name = Annotated[str, Field(pattern=_NAME)]
"""Part of a queue's name; the grammar is that of coordination/keys.py."""
FacilityName = Annotated[str, Field(pattern=_NAME.replace("a-z", "A-Za-z"))]
"""A facility's name as its row has it; in lower case it is a group's name."""
HostlikeName = Annotated[FacilityName, StringConstraints(to_lower=True)]
"""A Name that may be a host's name, in which upper case means nothing: it is kept in lower case."""
Words = Annotated[tuple[str, ...], BeforeValidator(_words)]
ExitStatuses = Annotated[tuple[Annotated[int, Field(ge=-(2**31), lt=2**31)], ...], BeforeValidator(_words)]
Texts = Annotated[dict[str, str], BeforeValidator(json_value)]
LogRoots = Annotated[dict[str, str], BeforeValidator(_log_roots), AfterValidator(_for_other_os)]
LogLevel = Annotated[str, StringConstraints(pattern="^(?i:debug|info|warning|error)$", to_lower=True)]
Seconds = Annotated[float, BeforeValidator(as_seconds), Field(gt=0)]
SecondsOrNever = Annotated[float, BeforeValidator(as_seconds), Field(ge=0)]
PostgresUrl = Annotated[SecretStr, AfterValidator(_database_url)]
RedisUrl = Annotated[SecretStr, AfterValidator(_redis_url)]
HttpUrl = Annotated[SecretStr, AfterValidator(_receiver_url)]


class _Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", hide_input_in_errors=True)


class Logging(_Section):
    level: LogLevel = Field("info", description="Log level: debug, info, warning or error.")
    path: Path | None = Field(
        None,
        description="File to append to as well, besides standard error; opened anew when it is renamed (by logrotate).",
    )


class HostBookingStrategy(_Section):
    core_saturation: bool = Field(
        True, description="True: best fit on cores (fill hosts, keep big ones free). False: worst fit."
    )
    memory_saturation: bool = Field(
        False, description="True: best fit on memory (dense; needs good estimates). False: worst fit, leaving slack."
    )


class Stream(_Section):
    """The reference's stream buffers, which are Celery's job here."""

    cluster_buffer_size: int = Field(
        3, ge=1, description="Celery's job: default of `celery worker --concurrency`, in place of worker_threads."
    )
    job_buffer_size: int = Field(
        3, ge=1, description="Celery's job: messages a worker holds for each thread. Not set, it holds 1."
    )


class Queue(_Section):
    """Clusters, passes and placement."""

    worker_threads: int = Field(4, ge=1, description="Celery's job: default of `celery worker --concurrency`.")
    dispatch_frames_per_layer_limit: int = Field(
        20,
        ge=1,
        description="Frames that a layer gets in the first round of a plan. Lower is fairer, higher finishes layers "
        "sooner.",
    )
    memory_stranded_threshold: ByteSize = Field(
        ByteSize(2 * 1024**3),
        description="A frame that would leave no more memory than this on a host takes all its idle cores.",
    )
    job_back_off_duration: Seconds = Field(300.0, description="Seconds a job whose rows failed is left alone.")
    cluster_saturated_sleep: Seconds = Field(
        5.0, description="Seconds a cluster with jobs but no booking is left alone."
    )
    cluster_reload_interval: Seconds = Field(120.0, description="Seconds between reloads of the cluster set.")
    active_scan_interval: Seconds = Field(
        2.0,
        description="Seconds between sweeps when no event asks for one. A worker scans the database for what waits "
        "in those that read the clusters again.",
    )
    stream: Stream = Field(default_factory=Stream)
    max_jobs_per_cluster_pass: int = Field(
        20,
        ge=1,
        description="Most jobs of a cluster that one plan takes frames of; another plan follows at once. However many "
        "wait, all are looked at.",
    )
    manual_tags_chunk_size: int = Field(100, ge=1, description="Manual tags per cluster.")
    hostname_tags_chunk_size: int = Field(300, ge=1, description="Hostname tags per cluster.")
    selfish_services: Words = Field((), description="Services whose frames take all idle cores of a host.")
    host_booking_strategy: HostBookingStrategy = Field(default_factory=HostBookingStrategy)
    host_booking_strategy_by_show: Annotated[dict[str, HostBookingStrategy], BeforeValidator(json_value)] = Field(
        default_factory=dict, description="Per-show override of host_booking_strategy, by show name."
    )
    uncounted_exit_statuses: ExitStatuses = Field(
        (),
        description="Exit statuses after which a frame starts again without a retry counted, besides OpenCue's own: "
        "those of the Cuebot's dispatcher.layer_delay.rules.",
    )
    shares: bool = Field(True, description="Shows that use least of their subscriptions' size go first.")
    priority_draw: float = Field(
        0.25,
        ge=0,
        le=1,
        description="Part of the cores which a show starts that its jobs get in turn, in the measure of their "
        "priorities; the rest goes by rank. 0: strict rank, in which low priorities may starve. 1: all in turn.",
    )
    whole_rounds: bool = Field(
        True, description="What is idle after every layer had its frames of a pass goes to whichever has more."
    )
    frame_memory_soft_limit: float = Field(1.6, gt=0, description="RunFrame soft memory limit / memory reserved.")
    frame_memory_hard_limit: float = Field(2.0, gt=0, description="RunFrame hard memory limit / memory reserved.")
    host_score: Literal["strategy", "convex"] = Field(
        "strategy",
        description="strategy: frames go to hosts in the order of host_booking_strategy. convex: of its first 16 to "
        "the one whose cores, memory and GPUs come to be used most evenly.",
    )
    gpu_guard: bool = Field(
        True, description="While frames wait for idle GPUs, work without GPUs leaves them cores and memory there."
    )
    locality: bool = Field(True, description="A layer goes first to hosts that run it or ran it last.")
    layer_host_share: bool = Field(
        True,
        description="While others want a host, it takes no more frames of one layer than a quarter of its cores, or 8.",
    )
    reservations: bool = Field(
        True, description="Whether hosts drain for frames that need half of the largest host or more and never start."
    )
    reservation_block_time: Seconds = Field(
        300.0,
        description="Seconds such a layer waits with nothing placed until a host drains for it. Less idles more cores.",
    )
    metrics_port: int = Field(
        9090, ge=0, le=65435, description="First port tried for /metrics, a beat's 100 above; 0 turns it off."
    )
    metrics_host: str = Field("127.0.0.1", description="Address /metrics listens on.")


class Database(_Section):
    pool_size: int = Field(20, ge=1, description="Most connections of one process.")
    db_host: str = Field("localhost", description="PostgreSQL host, when database_url is not set.")
    db_port: int = Field(5432, description="PostgreSQL port, when database_url is not set.")
    db_name: str = Field("cuebot", description="Database name, when database_url is not set.")
    db_user: str = Field("cuebot", description="User, when database_url is not set.")
    db_pass: SecretStr = Field(SecretStr(""), description="Password, when database_url is not set.")


class Rqd(_Section):
    grpc_port: int = Field(8444, description="Port of every RQD without an entry in `addresses`.")
    dry_run_mode: bool = Field(False, description="Book, but do not talk to RQD.")
    addresses: Texts = Field(
        default_factory=dict, description="host name -> address:port, for hosts that are not at name:grpc_port."
    )
    dial_by: Literal["short", "full"] = Field(
        "short",
        description="The name a host is dialled by: `short`, as OpenCue does, or `full`, with the domain it reports "
        "(host.str_fqdn), where only that resolves.",
    )
    timeout: Seconds = Field(5.0, description="Deadline of one call: LaunchFrame, KillRunningFrame or ReportStatus.")


class HostCacheSettings(_Section):
    concurrent_groups: int = Field(3, ge=1, description="Host groups refreshed from PostgreSQL at once.")
    memory_key_divisor: ByteSize = Field(ByteSize(2 * 1024**3), description="Width of a memory bucket.")
    group_idle_timeout: Seconds = Field(10800.0, description="A group not asked for this long is dropped.")
    host_staleness_threshold: Seconds = Field(
        120.0, description="Seconds without a report after which a host is not used."
    )


class SchedulerScope(_Section):
    """The part of the farm that this process works on."""

    facility: FacilityName | None = Field(
        None,
        description="Work only on this facility (by name). The report service puts hosts there that report "
        "none, or else into `local`.",
    )
    ignore_tags: Words = Field((), description="Host tags that never form a cluster, in any case.")


class Accounting(_Section):
    """Redis and the counters in it."""

    redis_url: RedisUrl = Field(
        SecretStr("redis://127.0.0.1:6379/0"), description="Redis of the counters, board and broker."
    )
    redis_password: SecretStr | None = Field(
        None, description="Password for redis_url, as it is, instead of one in the URL, where it must be escaped."
    )
    redis_pool_size: int = Field(20, ge=1, description="Most Redis connections of one process.")
    recompute_interval_seconds: Seconds = Field(120.0, description="Seconds between recomputes of booked counters.")
    limit_reseed_interval_seconds: Seconds = Field(300.0, description="Seconds between reloads of caps.")
    limit_settle_window_seconds: Seconds = Field(
        120.0,
        description="What started this long before a licence server was asked, or later, its report need not show. "
        "About twice the reporter's period, and beside a Cuebot its limit.settle_window_seconds.",
    )
    commit_deadline: Seconds = Field(
        10.0, description="Seconds after which PostgreSQL itself refuses the COMMIT of a booking."
    )
    release_feed: Literal["proc-trigger", "cuebot-redis", "recompute-only"] = Field(
        "proc-trigger", description="How releases reach the ledger."
    )

    @property
    def in_flight_age(self) -> float:
        """Seconds after which a booking without a proc row is a crash: several commit deadlines."""
        return 4 * self.commit_deadline


class Coordination(_Section):
    """Leaders, claims, queues."""

    namespace: Name = Field("cue", description="Prefix of board and queue keys.")
    group: Name = Field("default", description="Worker group of this process.")
    handover: Literal["fenced", "conservative"] = Field(
        "fenced",
        description="fenced: take over at once. conservative: fire nothing for the life of a lease after a change of "
        "leader.",
    )
    lease_ttl: Seconds = Field(
        default_factory=lambda given: 180.0 if given.get("handover") == "conservative" else 15.0,
        description="Life of the leader's lease, of all beats the same: how long no beat fires ticks after its leader "
        "died. Where the hand-over is conservative, 180 (the locking proposal's) unless set.",
    )
    drain_grace: Seconds = Field(
        25.0, description="Seconds a worker told to stop waits for what it has in hand. Less than what kills it then."
    )
    legacy_queues: Words = Field(
        (),
        description="While queues are renamed: old names that also get what is sent to the new, and are consumed last.",
    )

    @property
    def retry_interval(self) -> float:
        """The time between renewals of the leader and campaigns of a standby: five tries before a leader stops by
        itself."""
        return min(5.0, self.lease_ttl * 2 / 15)


class Page(_Section):
    """Flower's pages."""

    hosts: Words = Field(
        (),
        description="Names by which a Flower that asks for no password answers, besides localhost and addresses: those "
        "of a proxy before it.",
    )


class Release(_Section):
    """The report service, and what follows from reports."""

    host: str = Field("127.0.0.1", description="Address the report service listens on.")
    port: int = Field(8443, ge=0, le=65535, description="Port the report service listens on (Cuebot's).")
    lost_completion_grace: Seconds = Field(
        30.0,
        description="Of a frame that its host's reports have not named this long RQD is asked whether it has ended "
        "unnoticed.",
    )
    host_down_after: Seconds = Field(300.0, description="A host that has not reported this long is DOWN.")
    move_finished_jobs_after: SecondsOrNever = Field(
        259200.0,
        description="A job that has been finished this long is moved to the history tables, on a database that "
        "opencue-sched made; 0 turns it off.",
    )
    satisfy_only_on_frame_success: bool = Field(True, description="An EATEN frame does not satisfy dependencies.")
    frame_memory: bool = Field(
        True,
        description="True: a frame that runs out of memory asks for more by itself, and its layer after three frames "
        "did. False: its layer does at once.",
    )

    @property
    def frames_to_raise_a_layer(self) -> int:
        """Frames that need more memory than their layer asks for before the layer asks for more."""
        return FRAMES_TO_RAISE_A_LAYER if self.frame_memory else 1


class Events(_Section):
    """Whom events of jobs are told to, where there is no Cuebot."""

    url: HttpUrl | None = Field(
        None,
        description="An http:// or https:// URL to which a job's end and its first dead frame are posted as JSON, "
        "where there is no Cuebot. It is a secret: only its host is ever shown.",
    )
    command: Words = Field(
        (),
        description="In place of events.url, a program and its arguments, which each worker runs without a shell, with "
        "the event as JSON on standard input.",
    )


class Settings(BaseSettings):
    """The whole tree. Every field has a default, so an empty environment gives a scheduler for a local farm."""

    model_config = SettingsConfigDict(
        env_prefix="OPENCUE_SCHED_",
        env_nested_delimiter="__",
        enable_decoding=False,  # our own types read lists and mappings, and what is wrong there is told as elsewhere
        frozen=True,
        extra="forbid",
        hide_input_in_errors=True,
        nested_model_default_partial_update=True,
    )

    database_url: PostgresUrl | None = Field(
        None, description="postgresql+psycopg2://user:password@host:port/name; wins over database.db_*."
    )
    redis_url: RedisUrl | None = Field(None, description="Short for accounting.redis_url; wins over it.")
    instance: HostlikeName = Field(
        default_factory=lambda: f"{socket.gethostname().split('.')[0].lower()[:50]}-{os.getpid()}",
        description="Name of this process in its group. Default: host name and process id.",
    )
    log_root: LogRoots = Field(
        default_factory=lambda: {DEFAULT_OS: "/shots"},
        description="Jobs that name no log_dir log below this: `<log_root>/<show>/<shot>/logs/<job>--<job id>`. One "
        'for all, or by the job\'s os, as in OpenCue: `{"default_os": "/shots", "windows": "S:/shots"}`.',
    )
    # Sections are made by factories: a section given as a default would count as set by a person (see Stream).
    logging: Logging = Field(default_factory=Logging)
    queue: Queue = Field(default_factory=Queue)
    database: Database = Field(default_factory=Database)
    rqd: Rqd = Field(default_factory=Rqd)
    host_cache: HostCacheSettings = Field(default_factory=HostCacheSettings)
    scheduler: SchedulerScope = Field(default_factory=SchedulerScope)
    accounting: Accounting = Field(default_factory=Accounting)
    coordination: Coordination = Field(default_factory=Coordination)
    release: Release = Field(default_factory=Release)
    page: Page = Field(default_factory=Page)
    events: Events = Field(default_factory=Events)

    @model_validator(mode="after")
    def _consistent(self) -> Settings:
        """Refuse settings that contradict each other. Raises ValueError."""
        if self.queue.frame_memory_hard_limit < self.queue.frame_memory_soft_limit:
            raise ValueError("queue.frame_memory_hard_limit must not be below queue.frame_memory_soft_limit")
        if self.events.url is not None and self.events.command:
            raise ValueError("give events.url or events.command, not both")
        _ = self.redis_dsn  # refuses a second password
        return self

    @property
    def sqlalchemy_url(self) -> str:
        """The database URL as SQLAlchemy takes it. Contains the password: never log it."""
        return self._database.for_sqlalchemy

    @property
    def database_shown(self) -> str:
        """The database and its user for people, without a secret."""
        return self._database.shown

    @property
    def _database(self) -> DatabaseUrl:
        """The parts of ``database_url``, or of the ``database.db_`` settings where there is none. Has the password."""
        if self.database_url is not None:
            return read_database_url(self.database_url.get_secret_value())
        db = self.database
        hosts = tuple(db.db_host.split(","))
        ports = (str(db.db_port),) * len(hosts)
        return DatabaseUrl(db.db_user, db.db_pass.get_secret_value(), hosts, ports, db.db_name)

    @property
    def redis_dsn(self) -> str:
        """The Redis URL. May contain a password: never log it."""
        url = (self.accounting.redis_url if self.redis_url is None else self.redis_url).get_secret_value()
        password = self.accounting.redis_password
        return url if password is None else with_password(url, password.get_secret_value())

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,  # noqa: ARG003 - pydantic's signature
        file_secret_settings: PydanticBaseSettingsSource,  # noqa: ARG003 - pydantic's signature
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        path = settings_file()
        from_file = {} if path is None else read_settings_file(path)
        return init_settings, env_settings, InitSettingsSource(settings_cls, from_file)


def settings_file() -> Path | None:
    """The file that the settings are read from besides the environment."""
    name = os.environ.get(CONFIG_VARIABLE)
    return Path(name) if name else None


def read_settings_file(path: Path) -> dict[str, Any]:
    """Read a settings file, and return its sections. Raises WrongConfiguration."""
    from opencue_sched.text_file import InvalidFile, read_yaml  # imports yaml, for a file alone

    try:
        with path.open("rb") as file:
            data = read_yaml(file)
    except OSError as error:
        reason = f"{CONFIG_VARIABLE} names {path}, which cannot be read: {error.strerror}"
        raise WrongConfiguration(reason) from error
    except InvalidFile as error:
        raise WrongConfiguration(f"{path}: {'; '.join(error.problems)}") from error
    if data is None:
        return {}
    if not isinstance(data, dict):
        raise WrongConfiguration(f"{path}: expected a mapping of sections, found {type(data).__name__}")
    return data


@lru_cache(maxsize=1)
def get_settings() -> Settings:
    """The settings of this process, read once. Raises WrongConfiguration, or pydantic's ValidationError."""
    for name in unknown_variables(os.environ):
        # A variable of a section that does not exist would only be warned of: pydantic does not see it.
        section = name.upper().removeprefix(PREFIX).partition("__")[0].lower()
        if section in _REPLACED:
            raise WrongConfiguration(f"setting {name}: there is no such setting; {_REPLACED[section]}")
    return Settings()


# What is wrong with the settings, in words for the person who wrote them.

_REMEDIES = {
    "a terminal gets text, everything else JSON": "logging.format",
    "logs are appended to logging.path when that is set": "logging.file_appender",
    "what procs reserve is taken off what hosts report free anyway": "host_cache.update_stat_on_book",
    "use accounting.recompute_interval_seconds": "accounting.recompute_interval "
    "queue.subscription_recalculation_interval queue.resource_recalculation_interval",
    "use accounting.limit_reseed_interval_seconds": "accounting.limit_reseed_interval",
    "use accounting.redis_url and accounting.redis_pool_size": "accounting.redis",
    "it is not needed here: errors are in the log": "sentry_dsn",
    "a worker runs until it is told to stop": "queue.empty_job_cycles_before_quiting",
    "it follows from accounting.commit_deadline": "host_cache.checkout_timeout",
    "a cluster without work sleeps until there is some": "queue.cluster_empty_sleep",
    "every host that fits a layer is found at once, in an index": "queue.host_candidate_attempts_per_layer "
    "queue.host_candidate_attemps_per_layer",
    "a proc reserves 250 MiB at least, as with Cuebot": "queue.mem_reserved_min",
    "use host_cache.group_idle_timeout": "host_cache.clean_up_interval",
    "use host_cache.concurrent_groups": "host_cache.concurrent_fetch_permit",
    "whether a show is managed is read with each pass": "accounting.managed_shows_ttl",
    "a recount needs no quiet moment, and so no retries": "accounting.cas_max_retries",
    "it is not needed here: see the metrics": "host_cache.monitoring_interval queue.monitor_interval",
    "OpenCue's schema counts 100 centicores a core: remove it": "queue.core_multiplier database.core_multiplier",
    "hosts are chosen by core_saturation and memory_saturation": "queue.host_booking_strategy.type "
    "queue.host_booking_strategy.weights queue.host_booking_strategy.max_candidates",
}
_REPLACED = {key: remedy for remedy, keys in _REMEDIES.items() for key in keys.split()}
"""Keys of the reference scheduler that do not exist here, and what replaces them."""


def setting_problems(error: ValidationError) -> list[str]:
    """What is wrong with the settings: one sentence each, with the variable, and the key should a file be read."""
    file, problems = settings_file(), []
    for problem in error.errors():
        if problem["type"] == "default_factory_not_called":  # only because of another problem, which is told
            continue
        path = [str(part) for part in problem["loc"]]
        key, reason = ".".join(path).lower(), problem["msg"].removeprefix("Value error, ")
        if problem["type"] == "extra_forbidden":
            known = "; docs/settings.md has them all"
            hint = f"; {_REPLACED[key]}" if key in _REPLACED else near(path[-1].lower(), _names_beside(path)) or known
            reason = f"there is no such setting{hint}"
        where = f" ({key} in {file})" if file else ""
        problems.append(f"setting {PREFIX}{'__'.join(path).upper()}{where}: {reason}" if path else reason)
    return problems


def _names_beside(path: Sequence[str]) -> Iterable[str]:
    """The names of the settings that stand where ``path`` ends."""
    model: type[BaseModel] = Settings
    for section in path[:-1]:
        field = model.model_fields.get(section.lower())
        if field is None or not (isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel)):
            return ()
        model = field.annotation
    return model.model_fields


def unknown_variables(environment: Iterable[str]) -> list[str]:
    """Names in ``environment`` that begin as our settings do and have no effect.

    A process warns of them. It does not refuse them, because others may use the prefix too.
    """
    return sorted(
        name
        for name in environment
        if name.upper().startswith(PREFIX)
        and name.upper() != CONFIG_VARIABLE
        and not name.upper().startswith(_EMBEDDED_PREFIX)
        and name.upper().removeprefix(PREFIX).partition("__")[0].lower() not in Settings.model_fields
    )
