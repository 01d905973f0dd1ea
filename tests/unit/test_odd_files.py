"""Job and settings files that nobody meant: each is refused by file and field, in bounded time and memory."""

from __future__ import annotations

import io
import json
import random
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from pydantic import ValidationError

from opencue_sched.errors import InvalidInput, WrongConfiguration
from opencue_sched.jobs.job_file import JobSpec
from opencue_sched.settings import Settings
from opencue_sched.text_file import MOST_BYTES, InvalidFile, read_yaml
from tests.kit.wording import lacks

ROOT = Path(__file__).resolve().parents[2]
JOB = """\
show: demo
shot: sh010
user: alice
name: comp
layers:
  - name: render
    command: 'render #FRAME#'
    range: 1-10
    memory: 4GiB
    env: {THREADS: "4"}
"""
SETTINGS_YAML = """\
# What a person may write about the settings of this farm, and nobody reads: who asked for which of them, and when.
# The database and the Redis are named by the environment, where their passwords stand.
logging: {level: info, path: opencue-sched.log}
queue:
  active_scan_interval: 2s
  worker_threads: 4
  metrics_port: 9090
database: {db_host: localhost, db_port: 5432, pool_size: 10}
scheduler: {facility: local}
accounting: {commit_deadline: 10, release_feed: proc-trigger}
"""
PIECES = [
    *(
        "!!timestamp x",
        "!!int abc",
        "!!int ",
        "!!float x",
        "!!float ",
        "!!bool x",
        "!!binary x",
        "!!set [a]",
        "!!omap x",
        "!!python/name:os.x",
    ),
    *("\x00", "\x07", "\x1b[2J", "\x85", '"\\x07"', '"\\ud800"', '"\\UFFFFFFFF"', "\ud800", "\ufeff", "\r", "\t"),
    *("9" * 5000, "-" + "9" * 5000, "1e999", "1.0e999", "NaN", "-Infinity", "0x10", ".inf", "1_0", "0o17"),
    *("..", ".", "../..", "~", "null", "[]", "{}", "[", "]", "{", "}", ":", "- ", "? ", "&a ", "*a", "<<: ", "|", ">"),
    *("a" * 300, "#IFRAME#", " #FRAME# ", "'", '"', "%", "@", "`", "---", "...", "2026-01-01", "1:30", "\n", "  "),
]


def refused(content: bytes | str) -> tuple[str, ...]:
    with pytest.raises(InvalidFile) as caught:
        JobSpec.parse(
            read_yaml(io.BytesIO(content if isinstance(content, bytes) else content.encode("utf-8", "surrogatepass")))
        )
    assert all(len(problem) < 1100 for problem in caught.value.problems)
    return caught.value.problems


def job(**fields: object) -> str:
    """The job with other text for the values of these keys."""
    text = JOB
    for key, value in fields.items():
        line = next(line for line in JOB.splitlines() if line.strip().startswith(f"{key}:"))
        text = text.replace(line, f"{line.partition(':')[0]}: {value}")
    return text


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (job(shot=".."), ["shot: ", "'..'"]),
        (job(shot='"sh\\n"'), None),
        (job(shot='"s\\ud800"'), ["shot: "]),
        (job(command='"a\\x07b"'), ["layers[0].command: ", "U+0007"]),
        (job(command='"a\\0b"'), ["layers[0].command: ", "U+0000"]),
        (job(env='{"A\\x1b": x}'), ["layers[0].env.A\\x1b: "]),
        (job(env='{A: "\\ud800"}'), ["layers[0].env.A: "]),
        (job(show="de\x07mo"), ["line 1: ", "U+0007"]),
        (job(memory="!!timestamp x"), ["line 9, column 13: "]),
        (job(memory="!!int abc"), ["'abc'"]),
        (job(memory="!!int "), ["line 9, column 13: ", "''"]),
        (job(memory='!!float ""'), ["line 9, column 13: ", "''"]),
        (job(memory="!!set {a}"), ["line 9, column 13: "]),
        (job(memory="!!bool x"), ["'x'"]),
        (job(memory="9" * 5000), ["layers[0].memory: ", "'99999"]),
        (job(memory="[" * 40 + "]" * 40), ["layers[0].memory: "]),
        (job(memory="[" * 100_000), ["deep"]),
        (job(memory="&a [*a]"), ["layers[0].memory: "]),
        (job(name='"a\\tb"'), ["name: ", "'a\\tb'"]),
        (json.dumps({"show": "de\ud800mo"}), ["show: "]),
        ('{"priority": ' + "9" * 5000 + "}", ["YAML"]),
        ('{"priority": NaN}', ["priority: "]),
        ('{"layers": ' + "[" * 100_000, ["deep"]),
        ('{"layers": ' + "[" * 100 + "]" * 100 + "}", ["layers[0]: "]),
        ("#" * (MOST_BYTES + 1), ["2 MiB"]),
    ],
)
def test_an_odd_job_file_is_refused_by_its_field(text, words):
    if words is None:
        assert JobSpec.parse(read_yaml(io.BytesIO(text.encode()))).shot == "sh"
    else:
        assert any(not lacks(problem, *words) for problem in refused(text)), refused(text)


def bomb(levels: int, width: int) -> str:
    """Aliases of aliases: ``width`` to the ``levels`` texts in a few lines."""
    lists = (f"x{level}: &x{level} [{', '.join([f'*x{level - 1}'] * width)}]" for level in range(1, levels + 1))
    return "\n".join(["x0: &x0 lol", *lists])


@pytest.mark.parametrize(("levels", "width"), [(9, 10), (20, 2), (28, 9), (100, 2)])
@pytest.mark.parametrize("key", ["shot", "command", "range", "memory", "env"])
def test_an_alias_bomb_is_refused_without_being_written_out(key, levels, width):
    problems = refused(f"{bomb(levels, width)}\n{job(**{key: f'*x{levels}'})}")
    assert any(f"x{levels}: " in problem for problem in problems)
    assert any(key in problem for problem in problems)


def test_aliases_of_a_long_text_are_refused_without_being_written_out():
    (problem, _) = refused(f"x: &x {'a' * 1024**2}\n{job(memory='[' + '*x,' * 100_000 + ']')}")
    assert problem.startswith("layers[0].memory: ")


def test_an_alias_that_stands_for_little_is_read():
    text = "x: &common {A: b}\n"
    with pytest.raises(InvalidFile, match=r"\Ax: [^\n]*\Z"):
        JobSpec.parse(read_yaml(io.BytesIO(f"{text}{job(env='*common')}".encode())))


def test_a_file_without_an_end_is_refused(tmp_path, monkeypatch):
    with Path("/dev/zero").open("rb") as endless, pytest.raises(InvalidFile, match="2 MiB"):
        JobSpec.parse(read_yaml(endless))
    endless_settings = tmp_path / "settings.yaml"
    endless_settings.symlink_to("/dev/zero")
    monkeypatch.setenv("OPENCUE_SCHED_CONFIG", str(endless_settings))
    with pytest.raises(WrongConfiguration, match=r"settings\.yaml: .*2 MiB"):
        Settings()


def settings_of(content: str | bytes, file: Path, monkeypatch: pytest.MonkeyPatch) -> Settings:
    file.write_bytes(content if isinstance(content, bytes) else content.encode("utf-8", "surrogatepass"))
    monkeypatch.setenv("OPENCUE_SCHED_CONFIG", str(file))
    return Settings()


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("s.yaml", b"\xff\xfe", ["0xff", "position 0"]),
        (
            "s.yaml",
            "queue: {worker_threads: !!timestamp x}",
            ["line 1, column 25: "],
        ),
        ("s.yaml", "queue: {worker_threads: !!int }", ["line 1, column 25: ", "''"]),
        ("s.yaml", "queue: {priority_draw: !!float }", ["line 1, column 24: ", "''"]),
    ],
)
def test_an_odd_settings_file_is_refused_by_file_and_field(tmp_path, monkeypatch, name, content, words):
    with pytest.raises(WrongConfiguration) as caught:
        settings_of(content, tmp_path / name, monkeypatch)
    assert str(caught.value).startswith(str(tmp_path / name))
    assert not lacks(str(caught.value), *words)


def mutated(text: str, chance: random.Random, *, most: int = 4) -> str:
    """The text with one to ``most`` pieces put in, cut out, doubled or put in the place of a value."""
    for _ in range(chance.randint(1, most)):
        at = chance.randrange(len(text) + 1)
        match chance.randrange(4):
            case 0:
                text = text[:at] + chance.choice(PIECES) + text[at:]
            case 1:
                text = text[:at] + text[at + chance.randint(1, 20) :]
            case 2:
                text = text[:at] + text[at : at + 60] + text[at:]
            case _:
                start = text.find(": ", at)
                end = text.find("\n", start)
                if start >= 0 <= end:
                    text = text[: start + 2] + chance.choice(PIECES) + text[end:]
    return text


def test_no_mutated_job_file_ends_in_a_traceback():
    """Three thousand, the same each time."""
    chance, ends = random.Random(1), {True: 0, False: 0}
    as_json = json.dumps(
        {"show": "s", "shot": "x", "user": "u", "name": "n", "layers": [{"name": "l", "range": "1-9"}]}
    )
    originals = [JOB, as_json, *((ROOT / "examples" / name).read_text() for name in ("animation.yaml", "minimal.json"))]
    for number in range(3000):
        content = mutated(originals[number % len(originals)], chance).encode("utf-8", "surrogatepass")
        try:
            spec = JobSpec.parse(read_yaml(io.BytesIO(content)), default_user="alice")
        except InvalidFile as error:
            assert error.problems
            assert not re.search(r"[\x00-\x09\x0b-\x1f\x7f-\x9f\ud800-\udfff]", str(error))
            ends[False] += 1
        else:
            assert_storable(spec)
            ends[True] += 1
    assert min(ends.values()) > 100, ends


def texts_in(value: object) -> Iterator[str]:
    """Every text in a value, however deep."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        yield from texts_in([*value, *value.values()])
    elif isinstance(value, list | tuple):
        for each in value:
            yield from texts_in(each)


def assert_storable(spec: JobSpec) -> None:
    """PostgreSQL takes each text: it is UTF-8 and has no NUL."""
    for text in texts_in(spec.model_dump()):
        assert "\0" not in text
        text.encode()
    assert {spec.show, spec.shot, spec.user}.isdisjoint({".", ".."})


def test_no_mutated_settings_file_ends_in_a_traceback(tmp_path, monkeypatch):
    chance, ends = random.Random(2), {True: 0, False: 0}
    for _ in range(1000):
        try:
            settings_of(mutated(SETTINGS_YAML, chance, most=2), tmp_path / "s.yaml", monkeypatch)
        except (InvalidInput, ValidationError):
            ends[False] += 1
        else:
            ends[True] += 1
    assert min(ends.values()) > 50, ends
