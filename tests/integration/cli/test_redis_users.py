"""Redis users that may not do all that a fleet does: refused by name, as the configuration that it is."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator

import pytest
import redis
from pydantic import SecretStr

from benchmarks.warm_start import ROOT, run
from opencue_sched.accounting.epoch import guarded_redis
from opencue_sched.coordination.jobboard import Entity, JobBoard, JobFailure
from opencue_sched.errors import StoreUnusable
from opencue_sched.insight.redis_access import access_of, check_access
from opencue_sched.settings import Settings
from tests.conftest import RedisServer
from tests.kit.command import Cli
from tests.kit.polling import MOST_SECONDS, eventually
from tests.kit.wording import lacks

PROCESSES = {
    "worker": ("-m", "celery", "-A", "opencue_sched", "worker", "-P", "solo"),
    "beat": ("-m", "celery", "-A", "opencue_sched", "beat"),
    "flower": ("-m", "celery", "-A", "opencue_sched", "flower", "--port=0"),
    "report service": ("-c", "from opencue_sched.cli import main; main()", "report-service"),
}
WithoutRules = Callable[..., Settings]


@pytest.fixture
def user_with(settings: Settings, redis_server: RedisServer, redis_client: redis.Redis) -> Iterator[WithoutRules]:
    """Settings of a user that has these ACL rules, in place of those of a fleet."""

    def make(*rules: str) -> Settings:
        redis_client.execute_command("ACL", "SETUSER", "studio", "reset", "on", ">secret", *rules)
        place = redis_server.url.rpartition("@")[2]
        return settings.model_copy(update={"redis_url": SecretStr(f"redis://studio:secret@{place}")})

    yield make
    redis_client.execute_command("ACL", "DELUSER", "studio")


def rules_without(settings: Settings, *left_out: str) -> list[str]:
    kept = [rule for rule in access_of(settings).rules() if rule not in left_out]
    return ["resetkeys", "resetchannels", "-@all", *kept]


def start(process: str, settings: Settings) -> subprocess.CompletedProcess[str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith("OPENCUE_SCHED_")}
    variables = {
        "OPENCUE_SCHED_DATABASE_URL": settings.sqlalchemy_url,
        "OPENCUE_SCHED_REDIS_URL": settings.redis_dsn,
        "OPENCUE_SCHED_QUEUE__METRICS_PORT": "0",
    }
    return run([sys.executable, *PROCESSES[process]], env={**kept, **variables}, cwd=ROOT)


@pytest.mark.parametrize("process", PROCESSES)
@pytest.mark.parametrize(
    ("rules", "said"),
    [
        (("+@all", "-@dangerous", "~*", "&*"), "'info' command"),
        (("+@read", "+info", "~*", "&*"), " +exec "),
        (("+@all", "~cue:*", "&*"), ": MGET acct:epoch)"),
    ],
)
def test_a_process_whose_redis_user_lacks_a_permission_names_it_and_is_not_started_again(
    process: str, rules: tuple[str, ...], said: str, user_with: WithoutRules
) -> None:
    ran = start(process, user_with(*rules))
    assert ran.returncode == 78, ran.stderr
    (line,) = [line for line in ran.stderr.splitlines() if "refuses" in line]
    assert said in line
    assert "docs/run.md" in line
    assert "secret" not in ran.stdout + ran.stderr
    assert "Traceback" not in ran.stderr


@pytest.mark.parametrize("process", ["worker", "beat", "flower"])
def test_a_process_that_may_not_use_the_channels_of_the_broker_does_not_start(
    process: str, user_with: WithoutRules, settings: Settings
) -> None:
    """With the keys alone it would work, and nobody could steer or see it."""
    channels = [f"&{channel}" for channel in access_of(settings).channels]
    ran = start(process, user_with(*rules_without(settings, *channels), "&/9.others"))
    assert ran.returncode == 78, ran.stderr
    assert "&/0.cue.control.pidbox &/0.celeryev/*" in ran.stderr


def test_a_report_service_needs_nothing_of_the_broker(user_with: WithoutRules, settings: Settings) -> None:
    broker = set(access_of(settings).rules()) - set(access_of(settings, broker=False).rules())
    given = user_with(*rules_without(settings, *broker))
    with guarded_redis(given.redis_dsn, given) as client:
        check_access(client, given, broker=False)
        with pytest.raises(StoreUnusable, match=r"~_kombu\.binding\*"):
            check_access(client, given)


@pytest.mark.parametrize(
    ("lacking", "told"),
    [
        (("+eval", "+evalsha"), ("+eval", "+evalsha")),
        (("+psubscribe",), ("+psubscribe",)),
        (("~*.cue.control.pidbox*",), ("~*.cue.control.pidbox*",)),
        (("~unacked*",), ("~unacked*",)),
        (("~cue:*", "~handed-back:shows"), ("~cue:*", "~handed-back:shows")),
        (("&/0.celeryev/*",), ("&/0.celeryev/*",)),
        (("+multi",), ("+multi",)),
    ],
)
def test_doctor_says_what_the_redis_user_lacks(
    cli: Cli,
    environment: pytest.MonkeyPatch,
    user_with: WithoutRules,
    settings: Settings,
    redis_client: redis.Redis,
    lacking: tuple[str, ...],
    told: tuple[str, ...],
) -> None:
    before = redis_client.dbsize()
    environment.setenv("OPENCUE_SCHED_REDIS_URL", user_with(*rules_without(settings, *lacking)).redis_dsn)
    ran = cli("doctor", "--json")
    (found,) = [finding for finding in ran.json["findings"] if finding["what"] == "Redis"]
    assert (ran.status, found["level"]) == (1, "FAIL")
    assert not lacks(found["text"], "studio", f": {' '.join(told)};")
    assert redis_client.dbsize() == before, "what was tried was not carried out"


def test_a_command_says_which_command_redis_refuses(
    cli: Cli, environment: pytest.MonkeyPatch, user_with: WithoutRules
) -> None:
    environment.setenv("OPENCUE_SCHED_REDIS_URL", user_with("+@read", "+info", "+time", "~*").redis_dsn)
    ran = cli("board", "list")
    assert ran.status == 78
    assert not lacks(ran.err, "redis://127.0.0.1:", "'eval")
    assert "docs/run.md" in ran.err, "where the rules stand, not the URL"


def test_a_program_with_a_jobboard_of_its_own_needs_no_more_than_the_boards_keys(
    user_with: WithoutRules, settings: Settings
) -> None:
    commands = [f"+{command}" for command in access_of(settings, broker=False).commands]
    url = user_with("resetkeys", "resetchannels", "-@all", *commands, "~studio:board:conversions:*").redis_dsn
    with redis.Redis.from_url(url, decode_responses=True) as client:
        with JobBoard(client, "studio", name="conversions") as board:
            heard: list[str] = []
            board.notifier.register("POSTED", lambda kind, **_: heard.append(kind))
            job = board.post("convert", delay=0.1)
            assert next(board.wait(MOST_SECONDS)) == job
            claim = board.claim_next("me", 5)
            board.register_entity(Entity("conductor", "c1"))
            assert [entity.name for entity in board.entities()] == ["c1"]
            board.trash(claim, "me")
            eventually(lambda: heard == ["POSTED"], what="the event")
        with JobBoard(client, "studio", name="others") as board, pytest.raises(JobFailure, match="Redis refuses: "):
            board.post("convert")
