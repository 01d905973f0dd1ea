"""The settings tree: the seeds' keys and defaults, where values come from, and refusals that name the variable."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import redis
from pydantic import ValidationError

from opencue_sched.coordination.keys import QueueName
from opencue_sched.domain.redis_url import read_redis_url
from opencue_sched.errors import WrongConfiguration
from opencue_sched.settings import Settings, get_settings, setting_problems, unknown_variables
from tests.kit.setting_fields import setting_fields
from tests.kit.wording import lacks

ROOT = Path(__file__).resolve().parents[2]
# Read by a property of Settings itself, checked by its validator, or documented as Celery's job.
READ_ELSEWHERE = {
    "queue.stream.cluster_buffer_size",
    "queue.stream.job_buffer_size",
    "database.db_host",
    "database.db_port",
    "database.db_name",
    "database.db_user",
    "database.db_pass",
    "release.frame_memory",
}


@pytest.fixture(autouse=True)
def no_environment(monkeypatch):
    import os

    for name in [name for name in os.environ if name.startswith("OPENCUE_SCHED_")]:
        monkeypatch.delenv(name)


@pytest.mark.parametrize(
    ("key", "default"),
    [
        ("queue.worker_threads", 4),
        ("queue.dispatch_frames_per_layer_limit", 20),
        ("queue.stream.cluster_buffer_size", 3),
        ("queue.stream.job_buffer_size", 3),
        ("queue.cluster_reload_interval", 120),
        ("queue.manual_tags_chunk_size", 100),
        ("queue.hostname_tags_chunk_size", 300),
        ("queue.host_booking_strategy.core_saturation", True),
        ("queue.host_booking_strategy.memory_saturation", False),
        ("queue.frame_memory_soft_limit", 1.6),
        ("queue.frame_memory_hard_limit", 2.0),
        ("queue.metrics_port", 9090),
        ("queue.cluster_saturated_sleep", 5),
        ("queue.max_jobs_per_cluster_pass", 20),
        ("database.pool_size", 20),
        ("host_cache.memory_key_divisor", 2 * 1024**3),
        ("host_cache.group_idle_timeout", 10800),
        ("host_cache.concurrent_groups", 3),
        ("accounting.recompute_interval_seconds", 120),
        ("accounting.limit_reseed_interval_seconds", 300),
        ("accounting.redis_pool_size", 20),
        ("logging.level", "info"),
        ("scheduler.facility", None),
        ("scheduler.ignore_tags", ()),
        ("rqd.grpc_port", 8444),
    ],
)
def test_the_seeds_keys_have_the_seeds_defaults(key, default):
    value = Settings()
    for part in key.split("."):
        value = getattr(value, part)
    assert value == default


def test_values_come_from_the_environment_with_units(monkeypatch):
    monkeypatch.setenv("OPENCUE_SCHED_HOST_CACHE__GROUP_IDLE_TIMEOUT", "2h")
    monkeypatch.setenv("OPENCUE_SCHED_QUEUE__MEMORY_STRANDED_THRESHOLD", "1GiB")
    monkeypatch.setenv("OPENCUE_SCHED_SCHEDULER__IGNORE_TAGS", '["old", "broken"]')
    settings = Settings()
    assert settings.host_cache.group_idle_timeout == 7200
    assert settings.queue.memory_stranded_threshold == 1024**3
    assert settings.scheduler.ignore_tags == ("old", "broken")


@pytest.mark.parametrize("text", ["old,broken", " old , broken,", '["old", "broken"]'])
def test_a_list_comes_from_the_environment_in_either_spelling(monkeypatch, text):
    monkeypatch.setenv("OPENCUE_SCHED_SCHEDULER__IGNORE_TAGS", text)
    assert Settings().scheduler.ignore_tags == ("old", "broken")


def test_a_mapping_comes_from_the_environment_as_json(monkeypatch):
    monkeypatch.setenv("OPENCUE_SCHED_RQD__ADDRESSES", '{"node1": "10.0.0.1:8444"}')
    monkeypatch.setenv("OPENCUE_SCHED_QUEUE__HOST_BOOKING_STRATEGY_BY_SHOW", '{"demo": {"core_saturation": false}}')
    settings = Settings()
    assert settings.rqd.addresses == {"node1": "10.0.0.1:8444"}
    assert not settings.queue.host_booking_strategy_by_show["demo"].core_saturation


@pytest.mark.parametrize(
    ("text", "roots"),
    [
        ("/logs", {"default_os": "/logs"}),
        ('{"default_os": "/logs", "windows": "S:/logs"}', {"default_os": "/logs", "windows": "S:/logs"}),
    ],
)
def test_the_log_root_is_one_for_all_or_one_for_each_os(monkeypatch, text, roots):
    monkeypatch.setenv("OPENCUE_SCHED_LOG_ROOT", text)
    assert Settings().log_root == roots


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("SCHEDULER__IGNORE_TAGS", '["old"'),
        ("RQD__ADDRESSES", "node1=10.0.0.1:8444"),
        ("QUEUE__HOST_BOOKING_STRATEGY_BY_SHOW", "best"),
        ("LOG_ROOT", '{"windows"'),
    ],
)
def test_what_is_no_list_or_mapping_is_refused_by_the_variables_name(monkeypatch, name, text):
    monkeypatch.setenv(f"OPENCUE_SCHED_{name}", text)
    with pytest.raises(ValidationError) as refusal:
        Settings()
    (problem,) = setting_problems(refusal.value)
    assert f" OPENCUE_SCHED_{name}: " in problem
    assert "JSON" in problem


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("INSTANCE", "render 01"),
        ("INSTANCE", "x" * 64),
        ("SCHEDULER__FACILITY", "My Farm"),
        ("SCHEDULER__FACILITY", ""),
        ("COORDINATION__GROUP", "Default"),
    ],
)
def test_what_cannot_be_part_of_a_queues_name_is_refused_by_the_variables_name(monkeypatch, name, text):
    monkeypatch.setenv(f"OPENCUE_SCHED_{name}", text)
    with pytest.raises(ValidationError) as refusal:
        Settings()
    (problem,) = setting_problems(refusal.value)
    assert f" OPENCUE_SCHED_{name}: " in problem


@pytest.mark.parametrize("host", ["Render01", "RENDER-01.Studio.example", "x" * 63])
def test_an_instance_named_after_its_host_is_usable_in_a_queues_name(monkeypatch, host):
    monkeypatch.setattr("socket.gethostname", lambda: host)
    assert QueueName("cue", "dispatch", "default", Settings().instance)
    assert Settings(instance=f"{host[:60]}-1").instance == f"{host[:60].lower()}-1"


@pytest.mark.parametrize("text", ["fast", '{"worker_threads": 3}'])
def test_a_whole_section_is_refused_by_its_name(monkeypatch, text):
    monkeypatch.setenv("OPENCUE_SCHED_QUEUE", text)
    with pytest.raises(ValidationError) as refusal:
        Settings()
    (problem,) = setting_problems(refusal.value)
    assert " OPENCUE_SCHED_QUEUE: " in problem


def test_a_file_is_read_and_the_environment_wins(tmp_path, monkeypatch):
    (tmp_path / "s.yaml").write_text("queue:\n  cluster_reload_interval: 1m\nscheduler:\n  facility: spi\n")
    monkeypatch.setenv("OPENCUE_SCHED_CONFIG", str(tmp_path / "s.yaml"))
    assert Settings().queue.cluster_reload_interval == 60
    monkeypatch.setenv("OPENCUE_SCHED_QUEUE__CLUSTER_RELOAD_INTERVAL", "7")
    assert Settings().queue.cluster_reload_interval == 7
    assert Settings().scheduler.facility == "spi"


def test_a_missing_file_is_named(monkeypatch, tmp_path):
    monkeypatch.setenv("OPENCUE_SCHED_CONFIG", str(tmp_path / "absent.yaml"))
    with pytest.raises(WrongConfiguration, match=r"absent\.yaml"):
        Settings()


def test_unknown_keys_and_nonsense_are_refused_by_the_variables_name(monkeypatch):
    monkeypatch.setenv("OPENCUE_SCHED_QUEUE__WORKR", "3")
    monkeypatch.setenv("OPENCUE_SCHED_QUEUE__CLUSTER_RELOAD_INTERVAL", "soon")
    with pytest.raises(ValidationError) as refusal:
        Settings()
    nonsense, unknown = setting_problems(refusal.value)
    assert " OPENCUE_SCHED_QUEUE__CLUSTER_RELOAD_INTERVAL: 'soon' " in nonsense
    assert not lacks(unknown, " OPENCUE_SCHED_QUEUE__WORKR: ", "docs/settings.md")


@pytest.mark.parametrize(
    ("text", "key", "reason"),
    [
        ("queue: {metrics_prot: 1}", "queue.metrics_prot", ["'metrics_port'"]),
        ("qeueu: {worker_threads: 1}", "qeueu", ["'queue'"]),
        ("queue: {stream: {cluster_bufer_size: 1}}", "queue.stream.cluster_bufer_size", ["'cluster_buffer_size'"]),
        ("queue: {cluster_reload_interval: soon}", "queue.cluster_reload_interval", ["'soon'"]),
        ("queue: 3", "queue", []),
        ("rqd: {addresses: {a: 1}}", "rqd.addresses.a", []),
        ("sentry_dsn: x", "sentry_dsn", ["needed"]),
        ("queue: {monitor_interval: 5s}", "queue.monitor_interval", ["needed"]),
        (
            "queue: {host_booking_strategy: {type: saturation}}",
            "queue.host_booking_strategy.type",
            ["core_saturation", "memory_saturation"],
        ),
        (
            "accounting: {redis: {host: h, port: 1}}",
            "accounting.redis",
            ["accounting.redis_url"],
        ),
        (
            "accounting: {recompute_interval: 15s}",
            "accounting.recompute_interval",
            ["accounting.recompute_interval_seconds"],
        ),
        ("log_root: {windows: S:/logs}", "log_root", ["'default_os'"]),
        ("queue: {max_frames_per_plan: 5}", "queue.max_frames_per_plan", []),
        ("logging: {level: loud}", "logging.level", []),
    ],
)
def test_a_wrong_key_or_value_of_a_file_is_named_with_the_file(monkeypatch, tmp_path, text, key, reason):
    file = tmp_path / "s.yaml"
    file.write_text(text)
    monkeypatch.setenv("OPENCUE_SCHED_CONFIG", str(file))
    with pytest.raises(ValidationError) as refusal:
        Settings()
    (problem,) = setting_problems(refusal.value)
    variable = f"OPENCUE_SCHED_{key.replace('.', '__').upper()}"
    assert problem.startswith(f"setting {variable} ({key} in {file}): ")
    assert not lacks(problem, *reason)


REFERENCE_FILE = """
sentry_dsn: https://key@sentry.example/0
logging: {level: info, path: /var/log/scheduler.log, file_appender: false}
database: {pool_size: 20, db_host: h, db_name: n, db_user: u, db_pass: p, db_port: 5432, core_multiplier: 100}
rqd: {grpc_port: 8444, dry_run_mode: true}
queue:
  monitor_interval: 5s
  worker_threads: 4
  dispatch_frames_per_layer_limit: 20
  core_multiplier: 100
  memory_stranded_threshold: 2GiB
  job_back_off_duration: 300s
  cluster_empty_sleep: 30s
  cluster_reload_interval: 120s
  active_scan_interval: 2s
  cluster_saturated_sleep: 5s
  stream: {cluster_buffer_size: 3, job_buffer_size: 3}
  max_jobs_per_cluster_pass: 20
  manual_tags_chunk_size: 50
  hostname_tags_chunk_size: 50
  host_candidate_attempts_per_layer: 10
  host_candidate_attemps_per_layer: 10
  empty_job_cycles_before_quiting: 10
  mem_reserved_min: 250MiB
  subscription_recalculation_interval: 3s
  resource_recalculation_interval: 10s
  selfish_services: [service1]
  host_booking_strategy:
    {type: epvm, core_saturation: true, memory_saturation: false, max_candidates: 500, weights: {cores: 1.0}}
  frame_memory_soft_limit: 1.6
  frame_memory_hard_limit: 2.0
  metrics_port: 9090
host_cache:
  concurrent_groups: 3
  memory_key_divisor: 2GiB
  checkout_timeout: 12s
  monitoring_interval: 1s
  clean_up_interval: 5m
  group_idle_timeout: 10800s
  concurrent_fetch_permit: 4
  host_staleness_threshold: 2m
  update_stat_on_book: false
accounting: {redis: {host: h}, recompute_interval: 15s, limit_reseed_interval: 300s, managed_shows_ttl: 30s}
scheduler: {facility: eat, ignore_tags: [tag_to_ignore1]}
"""
"""Every key that the reference scheduler's own file and program have, or had, the misspelt one too."""


def test_each_key_of_the_reference_schedulers_file_is_taken_or_refused_with_the_reason(monkeypatch, tmp_path):
    file = tmp_path / "scheduler.yaml"
    file.write_text(REFERENCE_FILE)
    monkeypatch.setenv("OPENCUE_SCHED_CONFIG", str(file))
    with pytest.raises(ValidationError) as refusal:
        Settings()
    problems = setting_problems(refusal.value)
    assert all("; " in problem for problem in problems), "each with its reason"
    (attempts,) = [problem for problem in problems if "host_candidate_attempts_per_layer" in problem]
    assert "index" in attempts


def test_a_variable_for_a_key_of_the_reference_scheduler_is_refused_with_what_replaces_it(monkeypatch):
    monkeypatch.setenv("OPENCUE_SCHED_SENTRY_DSN", "https://sentry.example.com/1")
    get_settings.cache_clear()
    with pytest.raises(WrongConfiguration, match="OPENCUE_SCHED_SENTRY_DSN: "):
        get_settings()


def test_no_setting_and_nothing_of_others_is_warned_of():
    names = ["OPENCUE_SCHED_" + "__".join(path).upper() for path, _ in setting_fields()]
    others = ["OPENCUE_SCHED_CONFIG", "OPENCUE_HOME", "PATH"]
    known = [*names, *(name.lower() for name in names), "OPENCUE_SCHED_QUEUE", *others]
    assert unknown_variables(known) == []


@pytest.mark.parametrize("name", ["QEUEU__METRICS_PORT", "QUEUE_METRICS_PORT", "METRICS_PORT", "FACILITY", "ZZZ"])
def test_a_variable_that_is_no_setting_is_found(name):
    assert unknown_variables({f"OPENCUE_SCHED_{name}": "1"}) == [f"OPENCUE_SCHED_{name}"]


@pytest.mark.parametrize("name", ["EMBEDDED_POSTGRES", "EMBEDDED_REDIS"])
def test_what_names_a_server_to_start_is_no_mistake(name):
    assert unknown_variables({f"OPENCUE_SCHED_{name}": "/usr/lib/server"}) == []


def test_a_contradiction_is_reported(monkeypatch):
    monkeypatch.setenv("OPENCUE_SCHED_QUEUE__FRAME_MEMORY_HARD_LIMIT", "1")
    with pytest.raises(ValidationError) as refusal:
        Settings()
    assert "frame_memory_hard_limit" in str(refusal.value)


@pytest.mark.parametrize("scheme", ["postgres", "postgresql", "postgresql+psycopg", "postgresql+psycopg2"])
def test_every_spelling_of_a_postgresql_url_gets_our_driver(scheme):
    settings = Settings(database_url=f"{scheme}://u:p@h:5433/d")
    assert settings.sqlalchemy_url == "postgresql+psycopg2://u:p@h:5433/d"


def test_secrets_do_not_show_in_a_representation():
    settings = Settings(database_url="postgresql://u:hush@h/d", redis_url="redis://:hush@h/0")
    assert "hush" not in repr(settings)


def test_the_redis_url_of_the_section_is_a_secret_too(monkeypatch):
    settings = Settings(accounting={"redis_url": "redis://:hush@h/0"})
    assert "hush" not in repr(settings) + str(settings.model_dump())
    assert settings.redis_dsn == "redis://:hush@h/0"
    monkeypatch.setenv("OPENCUE_SCHED_REDIS_URL", "redis://:other@h/1")
    assert Settings().redis_dsn == "redis://:other@h/1"


@pytest.mark.parametrize(
    "url",
    [
        "mysql://me:hush@h/d",
        "hush",
        "",
        "postgresql:/h/hush",
        "postgresql://me:pw@h:hush/d",
        "postgresql+psycopg2:hush@h/d",
    ],
)
def test_what_is_no_database_url_is_refused_by_the_variables_name(monkeypatch, url):
    monkeypatch.setenv("OPENCUE_SCHED_DATABASE_URL", url)
    with pytest.raises(ValidationError) as refusal:
        Settings()
    (problem,) = setting_problems(refusal.value)
    assert " OPENCUE_SCHED_DATABASE_URL: database_url " in problem
    assert "postgresql://user:password@host:port/name" in problem
    assert "hush" not in problem + str(refusal.value)


@pytest.mark.parametrize(
    ("url", "reason"),
    [
        ("http://:hush@h/0", ["redis://", "rediss://", "unix://", "sentinel://"]),
        ("hush:6379", ["redis://"]),
        ("", ["redis://"]),
        ("redis://h:hush/0", ["1 to 65535"]),
        ("redis://h:70000/0", ["1 to 65535"]),
        ("redis://:hu/sh@h/0", ["%2F"]),
        ("redis://[::1", []),
        ("redis://h/hush", ["database"]),
        ("redis://h/0?socket_timeout=hush", ["redis://", "ssl_ca_certs"]),
        ("redis://h?db=2", ["redis://", "ssl"]),
        ("sentinel://h/main?password=hush", ["db", "sentinel_username", "sentinel_password", "ssl"]),
        ("unix://", ["socket"]),
        ("unix:///s?ssl=true&password=hush", ["unix://", "db", "username", "password"]),
        ("rediss://h/0?ssl_cafile=hush", ["rediss://", "ssl_ca_certs", "ssl_certfile"]),
        ("sentinel://h/main?ssl=true&ssl_cafile=hush", ["sentinel_password", "ssl_ca_certs"]),
        ("rediss://:hush@h/0?ssl_cert_reqs=maybe", ["ssl_cert_reqs", "required", "optional", "none"]),
        ("sentinel://:hush@h", ["sentinel://"]),
    ],
)
@pytest.mark.parametrize("variable", ["REDIS_URL", "ACCOUNTING__REDIS_URL"])
def test_what_is_no_redis_url_is_refused_by_the_variables_name(monkeypatch, variable, url, reason):
    monkeypatch.setenv(f"OPENCUE_SCHED_{variable}", url)
    with pytest.raises(ValidationError) as refusal:
        Settings()
    (problem,) = setting_problems(refusal.value)
    assert f" OPENCUE_SCHED_{variable}: accounting.redis_url" in problem
    assert not lacks(problem, *reason)
    assert "hush" not in problem + str(refusal.value)


@pytest.mark.parametrize(
    "url",
    [
        "redis://h",
        "redis://user:p%2Fw@h:6390/3",
        "rediss://h/0?ssl_cert_reqs=none&ssl=true",
        "rediss://h/0?ssl_cert_reqs=none",
        "unix:///run/redis.sock?db=1",
        "sentinel://a:26379,b/main?db=1",
        "redis://[::1]:6379/0",
        "REDISS://:p%2Fw@h:6390/3",
        "unix:///run/redis@farm.sock",
    ],
)
def test_every_kind_of_redis_url_is_taken(url):
    assert Settings(redis_url=url).redis_dsn == url


PASSWORD = 'p@s/s:w#o r%d?&"'


def reached_by(url):
    """Where redis-py connects with a URL, and as whom."""
    options = redis.Redis.from_url(url).connection_pool.connection_kwargs
    return {name: options.get(name) for name in ("host", "port", "path", "db", "username", "password")}


@pytest.mark.parametrize("url", ["redis://h:6390/3", "redis://user@h", "rediss://h/0?ssl_cert_reqs=none"])
def test_a_password_of_its_own_reaches_redis_as_it_is(url):
    dsn = Settings(accounting={"redis_url": url, "redis_password": PASSWORD}).redis_dsn
    assert reached_by(dsn) == {**reached_by(url), "password": PASSWORD}


@pytest.mark.parametrize("url", ["unix:///run/redis.sock", "unix:///run/redis.sock?db=1"])
def test_a_password_of_its_own_reaches_a_socket_as_it_is(url):
    dsn = Settings(redis_url=url, accounting={"redis_password": PASSWORD}).redis_dsn
    assert reached_by(dsn) == {**reached_by(url), "password": PASSWORD}


def test_a_password_of_its_own_is_that_of_the_master_behind_sentinels():
    dsn = Settings(redis_url="sentinel://a,b:1/main?db=1", accounting={"redis_password": PASSWORD}).redis_dsn
    read = read_redis_url(dsn)
    assert (read.nodes, read.service) == ((("a", 26379), ("b", 1)), "main")
    assert (read.options["password"], read.options["db"]) == (PASSWORD, 1)
    assert read.sentinel_options["password"] is None


@pytest.mark.parametrize("url", ["redis://:hush@h/0", "redis://u:hush@h", "unix:///s?password=hush"])
def test_a_second_password_is_refused_without_showing_either(url):
    with pytest.raises(ValidationError) as refusal:
        Settings(redis_url=url, accounting={"redis_password": "quiet"})
    (problem,) = setting_problems(refusal.value)
    assert all(name in problem for name in ("accounting.redis_url", "accounting.redis_password"))
    assert not {"hush", "quiet"} & set(re.findall(r"\w+", str(refusal.value)))


@pytest.mark.parametrize(
    ("variable", "url", "option"),
    [
        ("REDIS_URL", "rediss://:hush@h/0?ssl_ca_certs={path}", "accounting.redis_url: ssl_ca_certs"),
        ("REDIS_URL", "rediss://:hush@h/0?ssl_ca_path={path}", "accounting.redis_url: ssl_ca_path"),
        ("REDIS_URL", "sentinel://:hush@h/main?ssl=true&ssl_certfile={path}", "accounting.redis_url: ssl_certfile"),
        ("REDIS_URL", "rediss://:hush@h/0?ssl_keyfile={path}", "accounting.redis_url: ssl_keyfile"),
        ("DATABASE_URL", "postgresql://u:hush@h/d?sslmode=verify-full&sslrootcert={path}", "database_url: sslrootcert"),
        ("DATABASE_URL", "postgresql://u:hush@h/d?sslcert={path}", "database_url: sslcert"),
        ("DATABASE_URL", "postgresql://u:hush@h/d?sslkey={path}", "database_url: sslkey"),
    ],
)
def test_a_file_that_a_url_names_is_looked_for(monkeypatch, tmp_path, variable, url, option):
    path = tmp_path / "there.pem"
    monkeypatch.setenv(f"OPENCUE_SCHED_{variable}", url.format(path=path))
    with pytest.raises(ValidationError) as refusal:
        Settings()
    (problem,) = setting_problems(refusal.value)
    assert f" OPENCUE_SCHED_{variable}: {option} " in problem
    assert str(path) in problem
    path.touch()
    Settings()


def test_a_file_is_not_looked_for_where_libpq_takes_the_systems_authorities():
    Settings(database_url="postgresql://u@h/d?sslmode=verify-full&sslrootcert=system")


@pytest.mark.parametrize(
    "url",
    [
        "redis://user:12#hush@h:6379/0",
        "redis://:12?hush@h:6379/0",
        "redis://user:12?hush@h:6379/0",
        "unix://:hush/w@/run/redis.sock",
        "unix://:12#hush@/run/redis.sock",
        "sentinel://:12#hush@h/main",
        "rediss://u@12/hush@h:6379",
    ],
)
def test_what_may_be_half_of_a_password_is_refused_and_not_shown(monkeypatch, url):
    monkeypatch.setenv("OPENCUE_SCHED_REDIS_URL", url)
    with pytest.raises(ValidationError) as refusal:
        Settings()
    assert "hush" not in str(setting_problems(refusal.value)) + str(refusal.value)


@pytest.mark.parametrize(
    "url", ["postgresql:///d?host=/run/postgresql", "postgresql://u@[::1]:5/d", "postgres://u:p%2Fw@h/d"]
)
def test_every_kind_of_postgresql_url_is_taken(url):
    assert Settings(database_url=url).sqlalchemy_url.partition("://")[2] == url.partition("://")[2]


def test_a_receiver_of_events_is_a_url_or_a_command_and_the_url_is_never_shown(monkeypatch):
    monkeypatch.setenv("OPENCUE_SCHED_EVENTS__URL", "https://hooks.studio/hush?key=hush")
    assert "hush" not in repr(Settings())
    monkeypatch.setenv("OPENCUE_SCHED_EVENTS__COMMAND", '["/bin/tell", "a, b", "$HOME"]')
    with pytest.raises(ValidationError) as refusal:
        Settings()
    (problem,) = setting_problems(refusal.value)
    assert not lacks(problem, "events.url", "events.command")
    monkeypatch.delenv("OPENCUE_SCHED_EVENTS__URL")
    assert Settings().events.command == ("/bin/tell", "a, b", "$HOME")
    monkeypatch.delenv("OPENCUE_SCHED_EVENTS__COMMAND")
    monkeypatch.setenv("OPENCUE_SCHED_EVENTS__URL", "hush@hooks.studio")
    with pytest.raises(ValidationError) as refusal:
        Settings()
    (problem,) = setting_problems(refusal.value)
    assert " OPENCUE_SCHED_EVENTS__URL: " in problem
    assert "hush" not in problem


def test_every_setting_is_read_by_the_code():
    sources = [*ROOT.glob("opencue_sched/**/*.py"), *ROOT.glob("tasks/*.py"), ROOT / "celeryconfig.py"]
    code = "\n".join(p.read_text() for p in sources if p.name not in ("settings.py", "settings_table.py"))
    keys = {".".join(path) for path, _ in setting_fields()}
    unread = {key for key in keys if not re.search(rf"\.{key.rpartition('.')[2]}\b", code)}
    assert unread <= READ_ELSEWHERE


def test_every_setting_says_what_it_is():
    for path, field in setting_fields():
        assert field.description, ".".join(path)
