"""The examples can be submitted, and the documentation of the job file says what the program does."""

from __future__ import annotations

import io
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from opencue_sched.domain.frame_command import TOKENS
from opencue_sched.domain.frame_range import FrameRange
from opencue_sched.embedded.farms.farm import Farm
from opencue_sched.jobs.job_file import Depend, JobSpec, LayerSpec
from opencue_sched.text_file import read_yaml
from tests.kit.command import Cli

Build = Callable[[Callable[[Farm], Any]], Any]
Rows = Callable[..., list[Any]]

ROOT = Path(__file__).resolve().parents[3]
EXAMPLES = sorted(path for path in (ROOT / "examples").iterdir() if path.is_file())
GUIDE = (ROOT / "docs" / "job-file.md").read_text(encoding="utf-8")


@pytest.fixture
def demo(build: Build) -> None:
    """What the comments at the head of the examples say to create."""

    def make(farm: Farm) -> None:
        farm.subscription(farm.show("demo"), farm.alloc("general"), size=100)
        for limit in ("houdini", "redshift"):
            farm.limit(limit, 10)

    build(make)


@pytest.mark.parametrize(
    "example", [path for path in EXAMPLES if path.stem != "after-other-jobs"], ids=lambda p: p.name
)
def test_an_example_can_be_submitted(cli: Cli, demo: None, rows: Rows, example: Path) -> None:
    ran = cli("submit", str(example), "--json")
    assert (ran.status, ran.err) == (0, "")
    assert ran.json["frames"] > 0
    assert_tokens_are_kept(rows, example.read_text(encoding="utf-8"))


def assert_tokens_are_kept(rows: Rows, file: str) -> None:
    """The commands that were stored hold every token that the file's lines of commands do."""
    written = [token for line in file.splitlines() if "command" in line for token in re.findall(r"#[A-Z_]+#", line)]
    stored = rows("SELECT str_cmd FROM layer ORDER BY int_dispatch_order")
    assert written
    assert [token for (command,) in stored for token in re.findall(r"#[A-Z_]+#", command)] == written


def test_the_example_of_the_guide_is_submitted_with_its_tokens(cli: Cli, demo: None, rows: Rows) -> None:
    example = re.search(r"```yaml\n(.*?)```", GUIDE, flags=re.DOTALL)
    assert example is not None
    assert cli("submit", "-", given=example[1]).status == 0
    assert_tokens_are_kept(rows, example[1])


def test_the_example_that_waits_for_others_comes_after_them_for_anybody(
    cli: Cli, build: Build, rows: Rows, monkeypatch: pytest.MonkeyPatch
) -> None:
    # given an empty farm, and somebody who pastes what the example's head says
    build(lambda farm: farm.alloc("general"))
    monkeypatch.setenv("LOGNAME", "somebody")
    monkeypatch.chdir(ROOT)
    text = (ROOT / "examples" / "after-other-jobs.yaml").read_text(encoding="utf-8")
    for command in re.findall(r"^#\s+opencue-sched (.*)", text, flags=re.MULTILINE):
        ran = cli(*command.split(), *(["--json"] if command.startswith("submit") else []))
        assert (ran.status, ran.err) == (0, ""), command
    (grade,) = ran.json["layers"]
    assert rows("SELECT str_cmd FROM layer WHERE str_name = 'grade'") == [("grade #FRAMESPEC#",)]
    assert (grade["frames"], grade["waiting"]) == (48, 0)
    waits = {one["on"] for one in cli("job", "depends", "list", ran.json["name"], "--json").json}
    assert waits == {
        "job demo-sh010-alice_animation_v001",
        "layer comp of job demo-sh020-alice_waterfall_v003, frame by frame",
        "frame 0001-sim of job demo-sh020-alice_waterfall_v003",
    }


def test_the_commands_that_examples_name_work(cli: Cli) -> None:
    text = "\n".join(example.read_text(encoding="utf-8") for example in EXAMPLES)
    commands = re.findall(r"^#\s+opencue-sched ((?:show|subscription|limit) .*)", text, flags=re.MULTILINE)
    assert {command.split()[0] for command in commands} == {"show", "subscription", "limit"}
    for command in dict.fromkeys(commands):
        ran = cli(*command.split())
        assert ran.status == 0 or "already" in ran.err, command


def test_every_key_of_the_format_is_in_the_guide() -> None:
    keys = {key for model in (JobSpec, LayerSpec, Depend) for key in model.model_fields}
    missing = {key for key in keys if f"`{key}`" not in GUIDE}
    assert not missing


def test_the_guide_names_the_tokens_and_its_example_can_be_read() -> None:
    assert {token for token in TOKENS if f"`{token}`" not in GUIDE} == set()
    example = re.search(r"```yaml\n(.*?)```", GUIDE, flags=re.DOTALL)
    assert example is not None
    assert JobSpec.parse(read_yaml(io.BytesIO(example[1].encode())), default_user="alice").frame_count == 49


@pytest.mark.parametrize(
    ("form", "numbers"), re.findall(r"`([0-9x:y-]+)` is ([0-9, ]+[0-9])", GUIDE), ids=lambda value: str(value)
)
def test_the_guide_is_right_about_ranges(form: str, numbers: str) -> None:
    assert FrameRange.parse(form).numbers == tuple(int(number) for number in numbers.split(","))
