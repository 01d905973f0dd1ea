"""The text of a job file: what YAML would quietly make of it is said."""

from __future__ import annotations

import io

import pytest

from opencue_sched.jobs.job_file import JobSpec
from opencue_sched.text_file import InvalidFile, read_yaml
from tests.kit.wording import lacks

HEAD = "show: demo\nshot: sh010\nuser: alice\nname: cut\n"
LAYERS = HEAD + "layers:\n  - name: render\n    range: 1-4\n"


def problems(text: str) -> tuple[str, ...]:
    with pytest.raises(InvalidFile) as refused:
        JobSpec.parse(read_yaml(io.BytesIO(text.encode())))
    return refused.value.problems


@pytest.mark.parametrize(
    ("text", "where"),
    [
        (LAYERS + "    command: render --frame #IFRAME# --out x\n", "line 8: #IFRAME#"),
        (LAYERS + "    command: render --frame #IFRAM# --out x\n", "line 8: #IFRAM#"),
        (LAYERS + "    command: render -s #FRAME_START#-#FRAME_END#\n", "line 8: #FRAME_START#"),
        (LAYERS + "    command: render\r\n      --frame #IFRAME# --out x\r\n", "line 9: #IFRAME#"),
        (LAYERS + "    command: #FRAME# --out x\n", "line 8: #FRAME#"),
        (LAYERS + '    command: "render" #FRAME# --out x\n', "line 8: #FRAME#"),
        (LAYERS + "    env: {}\n    command: é #FRAME#\n", "line 9: #FRAME#"),
        (LAYERS + "    command: x\n    env:\n      OUT: /o/ #JOB#\n", "line 10: #JOB#"),
        (HEAD + "layers: []\ndepends:\n  - #JOB#\n", "line 7: #JOB#"),
        (HEAD + "layers:\n  - {name: a, command: render #IFRAME#, range: 1}\n", "line 6: #IFRAME#"),
        (HEAD + "layers: [{name: a, command: 'x' #IFRAME#, range: 1}]\n", "line 5: #IFRAME#"),
    ],
)
def test_a_value_that_a_comment_cuts_off_at_a_token_is_refused(text: str, where: str) -> None:
    (problem,) = problems(text)
    assert not lacks(problem, where, "comment", "quotes")


def test_yaml_that_begins_like_json_is_looked_at_too() -> None:
    (problem,) = problems("{show: demo,\nshot: sh010 #SHOT#\n, layers: [{command: render\n}]}")
    assert not lacks(problem, "line 2: ", "#SHOT#")


def test_what_is_no_yaml_for_another_reason_is_told_as_such() -> None:
    (problem,) = problems(HEAD + "layers:\n  - {name: a, command: 'render #IFRAME#', range: 1\n")
    assert not lacks(problem, "line 7", "not YAML")
    assert "quotes" not in problem


@pytest.mark.parametrize(
    ("yaml", "command"),
    [
        ("'render #IFRAME#'", "render #IFRAME#"),
        ('"render #IFRAME#"   # of #IFRAME#', "render #IFRAME#"),
        ("render --frame=#IFRAME#", "render --frame=#IFRAME#"),
        ("render # the number is #IFRAME#", "render"),
        ("render #hashtag", "render"),
        ("render\n    #IFRAME# is left out", "render"),
        (">\n      render #IFRAME#\n      --out #ZFRAME#\n    #FRAME#", "render #IFRAME# --out #ZFRAME#"),
    ],
)
def test_quoted_text_and_comments_of_people_are_taken_as_they_are(yaml: str, command: str) -> None:
    (layer,) = JobSpec.parse(read_yaml(io.BytesIO(f"{LAYERS}    command: {yaml}\n".encode()))).layers
    assert layer.command == command


NUMBERS = ["3.10", "20.50", "1.0e3", "1.10000000000000000001", "-0", "-0.0", "12", "0.5", "1234567890123456789012345"]


@pytest.mark.parametrize("file", ["{{show: demo, shot: s, user: u, name: cut, env: {{{0}}}, layers: [{1}]}}", "json"])
def test_numbers_that_are_text_stay_as_they_are_written(file: str) -> None:
    # given variables, of the job and of a layer, whose values look like numbers, in YAML and in JSON
    env = ", ".join(f'"V{place}": {number}' for place, number in enumerate(NUMBERS))
    layer = '{"name": "render", "range": "1-4", "command": "x", "cores": 1.50, "env": {' + env + "}}"
    if file == "json":
        file = '{{"show": "demo", "shot": "s", "user": "u", "name": "cut", "env": {{{0}}}, "layers": [{1}]}}'
    # when the file is read
    spec = JobSpec.parse(read_yaml(io.BytesIO(file.format(env, layer).encode())))
    # then none is another one, and what is a number is one
    assert list(spec.env.values()) == list(spec.layers[0].env.values()) == NUMBERS
    assert spec.layers[0].cores == 150


def test_an_alias_and_a_knot_of_them_end() -> None:
    text = LAYERS + "    command: &c render #IFRAME#\n    env: &e {A: *c, B: *e}\n"
    assert len(problems(text)) == 1
    assert problems("&a [*a, *a]")
