"""The job file: what it may say, and that everything wrong with it is said at once, by field."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from opencue_sched.domain.depends import DependType
from opencue_sched.jobs.job_file import Depend, JobSpec, LayerSpec
from opencue_sched.text_file import InvalidFile

FULL = """
show: demo
shot: sh010
user: alice
name: Comp_v001
uid: 1000
priority: 50
facility: local
folder: lighting
dept: comp
os: linux
paused: true
max_retries: 1
autoeat: true
log_dir: /shots/demo/logs
min_cores: 1
max_cores: 200
min_gpus: 0
max_gpus: -1
env: {OCIO: /shots/demo/config.ocio, LEVEL: 3}
depends:
  - demo-sh010-alice_layout
  - {job: demo-sh010-alice_anim, layer: cache, frame: -3}
  - {job: demo-sh010-alice_anim, layer: cache}
layers:
  - name: render
    command: 'render -f #ZFRAME# -s #FRAMESPEC#'
    range: -1-100x2, 200
    type: render
    chunk: 4
    cores: 4.5
    max_cores: 8
    threadable: true
    memory: 4GiB
    gpus: 1
    gpu_memory: 2GiB
    tags: general | gpu
    services: [maya, arnold]
    limits: [arnold]
    timeout: 90
    timeout_llu: 15
    env: {THREADS: "4"}
  - name: comp
    command: 'comp #FRAME#'
    range: 1-100
    cores: -1
    memory: 1048576
    depends:
      - render
      - {layer: render, type: any_frame}
      - {layer: render, type: frame_by_frame}
      - {layer: comp, type: previous_frame}
      - {layer: render, frame: -1}
      - {job: demo-sh010-alice_fx}
      - {job: demo-sh010-alice_fx, layer: sim, type: frame_by_frame}
"""


def job(**changes: Any) -> dict[str, Any]:
    """The smallest good job file, changed; None removes a key."""
    data: dict[str, Any] = {"show": "demo", "shot": "sh010", "user": "alice", "name": "test", "layers": [layer()]}
    return {key: value for key, value in {**data, **changes}.items() if value is not None}


def layer(**changes: Any) -> dict[str, Any]:
    data: dict[str, Any] = {"name": "render", "command": "render #FRAME#", "range": "1-10"}
    return {key: value for key, value in {**data, **changes}.items() if value is not None}


def depend(it: Depend, waiting: LayerSpec | None = None) -> tuple[Any, ...]:
    return it.kind(waiting), it.job, it.layer, it.frame, it.type == "any_frame"


def problems(data: object) -> tuple[str, ...]:
    with pytest.raises(InvalidFile) as error:
        JobSpec.parse(data)
    assert str(error.value) == "\n".join(error.value.problems)
    return error.value.problems


def assert_told(expected: Sequence[tuple[str, str]], told: Sequence[str]) -> None:
    """Each problem is told with its place in the file, and says at least so much more."""
    assert [line.partition(": ")[0] for line in told] == [place for place, _ in expected]
    assert [said for (_, said), line in zip(expected, told, strict=True) if said not in line.partition(": ")[2]] == []


def test_a_full_job_file() -> None:
    spec = JobSpec.parse(yaml.safe_load(FULL))
    assert spec.full_name == "demo-sh010-alice_comp_v001"
    assert (spec.min_cores, spec.max_cores, spec.min_gpus, spec.max_gpus) == (100, 20_000, 0, -1)
    assert spec.env == {"OCIO": "/shots/demo/config.ocio", "LEVEL": "3"}
    assert (spec.paused, spec.autoeat, spec.max_retries, spec.uid, spec.priority) == (True, True, 1, 1000, 50)
    assert (spec.facility, spec.folder, spec.dept, spec.os) == ("local", "lighting", "comp", "linux")
    assert [depend(it) for it in spec.depends] == [
        (DependType.JOB_ON_JOB, "demo-sh010-alice_layout", None, None, False),
        (DependType.JOB_ON_FRAME, "demo-sh010-alice_anim", "cache", -3, False),
        (DependType.JOB_ON_LAYER, "demo-sh010-alice_anim", "cache", None, False),
    ]
    render, comp = spec.layers
    assert (render.command, comp.command) == ("render -f #ZFRAME# -s #FRAMESPEC#", "comp #FRAME#")
    assert render.range.text == "-1-100x2,200"
    assert render.frames.numbers[:3] == (-1, 7, 15)
    assert (render.cores, render.max_cores, render.threads) == (450, 800, True)
    assert (render.memory, render.gpus, render.gpu_memory) == (4 * 1024**2, 1, 2 * 1024**2)
    assert (render.tags, render.services, render.limits) == (["general", "gpu"], ["maya", "arnold"], ["arnold"])
    assert (render.timeout, render.timeout_llu, render.env) == (90, 15, {"THREADS": "4"})
    assert comp.cores == -100
    assert comp.memory == 1_048_576
    assert [depend(it, comp) for it in comp.depends] == [
        (DependType.LAYER_ON_LAYER, None, "render", None, False),
        (DependType.LAYER_ON_LAYER, None, "render", None, True),
        (DependType.FRAME_BY_FRAME, None, "render", None, False),
        (DependType.PREVIOUS_FRAME, None, "comp", None, False),
        (DependType.LAYER_ON_FRAME, None, "render", -1, False),
        (DependType.LAYER_ON_JOB, "demo-sh010-alice_fx", None, None, False),
        (DependType.FRAME_BY_FRAME, "demo-sh010-alice_fx", "sim", None, False),
    ]


def test_what_is_left_out_has_documented_defaults() -> None:
    spec = JobSpec.parse(job())
    (only,) = spec.layers
    assert (spec.priority, spec.max_retries, spec.paused, spec.autoeat, spec.uid) == (1, 3, False, False, None)
    assert (spec.max_cores, spec.min_cores, spec.max_gpus, spec.log_dir) == (None,) * 4
    assert (only.type, only.chunk, only.cores, only.max_cores) == ("RENDER", 1, 100, 0)
    assert (only.memory, only.threads, only.tags, only.services) == (4_194_304, True, ["general"], ["default"])
    assert spec.frame_count == 10


def test_the_caller_may_know_who_submits() -> None:
    assert JobSpec.parse(job(user=None), default_user="bob").full_name == "demo-sh010-bob_test"
    assert_told([("user", "missing")], problems(job(user=None)))


def test_a_name_that_is_already_full_is_kept() -> None:
    assert JobSpec.parse(job(name="demo-sh010-alice_test")).full_name == "demo-sh010-alice_test"


def test_every_problem_is_reported_at_once_by_field() -> None:
    found = problems(
        {
            "show": "demo",
            "shot": "sh 010",
            "usr": "alice",
            "name": "x" * 256,
            "priority": "high",
            "layers": [
                layer(range="1-x", cores="four", colour="red"),
                layer(command="render #FRAMES#", memory="4 apples", tags="big mem"),
                layer(name="comp", depends=["rendr", {"layer": "render", "type": "frame_by_fram"}]),
            ],
        }
    )
    assert_told(
        [
            ("layers[0].colour", ""),
            ("layers[0].cores", ""),
            ("layers[0].range", "'1-x'"),
            ("layers[1].command", "'#FRAME#'"),
            ("layers[1].memory", "'4 apples'"),
            ("layers[1].tags[0]", "'big mem'"),
            ("layers[2].depends[1].type", "'frame_by_frame'"),
            ("name", "255"),
            ("priority", ""),
            ("shot", "'sh 010'"),
            ("user", ""),
            ("usr", "'user'"),
        ],
        sorted(found),
    )


def test_everything_that_does_not_go_together_is_reported_at_once() -> None:
    layers = [layer(cores=4, max_cores=2), layer(), layer(name="comp", depends=["rendr"])]
    told = [("layers", "'render'"), ("layers[0].max_cores", ""), ("layers[2].depends[0]", "'render'?")]
    assert_told(told, problems(job(layers=layers)))


@pytest.mark.parametrize("data", [None, [], "job", 7])
def test_a_file_that_is_no_mapping(data: object) -> None:
    assert_told([("job file", "mapping")], problems(data))


def test_a_layer_that_is_no_mapping() -> None:
    assert_told([("layers[1]", "mapping")], problems(job(layers=[layer(), "render"])))


@pytest.mark.parametrize(
    ("changes", "place", "said"),
    [
        ({"layers": None}, "layers", ""),
        ({"layers": []}, "layers", "1"),
        ({"layers": {"render": {}}}, "layers", ""),
        ({"layers": [layer()] * 2001}, "layers", "2000"),
        ({"layers": [layer(range="1-100001")]}, "layers", "100001"),
        ({"shot": "s" * 65}, "shot", "64"),
        ({"user": "u" * 33}, "user", "32"),
        ({"os": "o" * 13}, "os", "12"),
        ({"facility": "f" * 37}, "facility", "36"),
        ({"show": ""}, "show", "1"),
        ({"uid": 0}, "uid", "1"),
        ({"uid": -1}, "uid", "1"),
        ({"priority": -(2**31)}, "priority", "-2147483647"),
        ({"max_retries": 40_000}, "max_retries", "32767"),
        ({"paused": "yes"}, "paused", ""),
        ({"paused": 1}, "paused", ""),
        ({"log_dir": "logs"}, "log_dir", "logs"),
        *(
            ({"log_dir": path}, "log_dir", "..")
            for path in ("/../../etc/cron.d", "/shots/..", "/..", "S:/shots/../logs", "\\\\server\\shots\\..\\logs")
        ),
        (
            {"log_dir": f"/shots/{'é' * 128}/logs"},
            "log_dir",
            "256",
        ),
        (
            {"show": "s", "shot": "s", "user": "u", "name": "n" * 212},
            "name",
            "256",
        ),
        (
            {"name": "n" * 150, "layers": [layer(), layer(name="l" * 100, range="9999-10000")]},
            "layers[1].name",
            "284",
        ),
        ({"max_cores": 0.5}, "max_cores", ""),
        ({"min_cores": -1}, "min_cores", "0"),
        ({"env": ["A=b"]}, "env", ""),
        ({"env": {"A": None}}, "env.A", ""),
        ({"env": {"A": True}}, "env.A", ""),
        *(({"env": {name: "c"}}, f"env.{name}", "") for name in ("A=B", "MY VAR", " A")),
        ({"env": {"A\n": "c"}}, "env.A\\n", ""),
        ({"env": {"": "c"}}, "env.", ""),
        ({"env": {7: "c"}}, "env[7]", ""),
        ({"env": {"CUE_THREADS": "4"}}, "env.CUE_THREADS", ""),
        ({"env": {"A": "x" * 2049}}, "env.A", "2048"),
        ({"depends": [{"layer": "render"}]}, "depends[0]", ""),
        (
            {"depends": [{"job": "other", "layer": "a", "type": "layer"}]},
            "depends[0]",
            "",
        ),
        ({"depends": [{"job": "other", "frame": 3}]}, "depends[0]", ""),
        (
            {"depends": [{"job": "other", "type": "layer"}]},
            "depends[0]",
            "",
        ),
    ],
)
def test_each_problem_of_a_job(changes: dict[str, Any], place: str, said: str) -> None:
    assert_told([(place, said)], problems(job(**changes)))


@pytest.mark.parametrize(
    ("changes", "place", "said"),
    [
        ({"name": None}, "layers[0].name", ""),
        ({"command": ""}, "layers[0].command", "1"),
        ({"command": "x" * 4001}, "layers[0].command", "4000"),
        ({"range": None}, "layers[0].range", ""),
        ({"range": ["1-5"]}, "layers[0].range", "4000"),
        (
            {"range": "1-2000000000"},
            "layers[0].range",
            "1-2000000000",
        ),
        ({"name": "n" * 245}, "layers[0].name", "244"),
        ({"chunk": 0}, "layers[0].chunk", "1"),
        ({"chunk": True}, "layers[0].chunk", ""),
        ({"type": "rendr"}, "layers[0].type", "RENDER"),
        ({"type": "post"}, "layers[0].type", "RENDER"),
        (
            {"cores": 0.001},
            "layers[0].cores",
            "0.001",
        ),
        ({"cores": float("nan")}, "layers[0].cores", "nan"),
        ({"cores": 10**400}, "layers[0].cores", f"{10**400}"),
        ({"max_cores": -1}, "layers[0].max_cores", "0"),
        ({"cores": 4, "max_cores": 2}, "layers[0].max_cores", ""),
        ({"memory": 2048}, "layers[0].memory", "262144"),
        ({"memory": "2097152TiB"}, "layers[0].memory", "1125899906842624"),
        ({"memory": "-2GiB"}, "layers[0].memory", "-2GiB"),
        ({"gpus": -1}, "layers[0].gpus", "0"),
        ({"tags": []}, "layers[0].tags", "1"),
        ({"tags": ["ok", "x" * 46]}, "layers[0].tags[1]", "45"),
        ({"tags": ["ok", {"a": 1}]}, "layers[0].tags[1]", ""),
        ({"tags": ["ok", "a/b"]}, "layers[0].tags[1]", "a/b"),
        (
            {"services": [f"service{n:020}" for n in range(5)]},
            "layers[0].services",
            "139",
        ),
        ({"depends": ["render"]}, "layers", "render -> render"),
        ({"depends": ["other"]}, "layers[0].depends[0]", "other"),
        ({"depends": [{}]}, "layers[0].depends[0]", ""),
        ({"depends": [7]}, "layers[0].depends[0]", ""),
        (
            {"depends": [{"job": "x", "type": "layer"}]},
            "layers[0].depends[0]",
            "",
        ),
    ],
)
def test_each_problem_of_a_layer(changes: dict[str, Any], place: str, said: str) -> None:
    assert_told([(place, said)], problems(job(layers=[layer(**changes)])))


def test_layers_in_a_circle_are_refused() -> None:
    layers = [
        layer(name="a", depends=["c"]),
        layer(name="b", depends=[{"layer": "a", "type": "frame_by_frame"}]),
        layer(name="c", depends=["b"]),
    ]
    assert_told([("layers", "a -> c -> b -> a")], problems(job(layers=layers)))


def test_depends_that_would_hold_nothing_back_are_refused() -> None:
    layers = [
        layer(name="a"),
        layer(name="b", range="20-30", depends=[{"layer": "a", "type": "frame_by_frame"}, {"layer": "a", "frame": 11}]),
        layer(name="c", range="40", depends=[{"layer": "a", "type": "previous_frame"}]),
    ]
    told = [
        ("layers[1].depends[0]", "'b' and 'a'"),
        ("layers[1].depends[1]", "11"),
        ("layers[2].depends[0]", "'c' and 'a'"),
    ]
    assert_told(told, problems(job(layers=layers)))


def test_a_frame_by_frame_depend_on_a_layer_in_one_chunk_is_a_depend_on_the_layer() -> None:
    layers = [layer(name="a", chunk=100), layer(name="b", depends=[{"layer": "a", "type": "frame_by_frame"}])]
    waiting = JobSpec.parse(job(layers=layers)).layers[1]
    assert waiting.depends[0].kind(waiting) is DependType.FRAME_BY_FRAME


@pytest.mark.parametrize("cap", [0, -1, -5])
def test_zero_and_negative_caps_of_a_job_are_unlimited(cap: int) -> None:
    spec = JobSpec.parse(job(max_cores=cap, max_gpus=cap, layers=[layer(cores=64, gpus=8)]))
    assert (spec.max_cores, spec.max_gpus) == (-1, -1)


@pytest.mark.parametrize("cores", [0, -1, -200])
def test_a_frame_may_ask_for_a_whole_host_or_all_but_some_of_its_cores(cores: int) -> None:
    """All but 200 is what a host of 256 can give; no farm's size is known here."""
    assert JobSpec.parse(job(layers=[layer(cores=cores)])).layers[0].cores == cores * 100


def test_a_priority_may_be_negative_as_cuebot_and_job_priority_take_it() -> None:
    assert JobSpec.parse(job(priority=-5)).priority == -5


def test_less_than_a_core_does_not_thread() -> None:
    assert JobSpec.parse(job(layers=[layer(cores=0.5)])).layers[0].threads is False


def test_a_negative_frame_number_is_a_frame_like_any_other() -> None:
    assert JobSpec.parse(job(layers=[layer(range="-2-1")])).layers[0].frames.numbers == (-2, -1, 0, 1)


def test_one_number_is_a_range() -> None:
    assert JobSpec.parse(job(layers=[layer(range=7)])).layers[0].range.text == "7"


@pytest.mark.parametrize("tags", ["general|gpu", "general | gpu", "general, gpu", [" general", "gpu", "general"]])
def test_tags_in_every_spelling(tags: object) -> None:
    assert JobSpec.parse(job(layers=[layer(tags=tags)])).layers[0].tags == ["general", "gpu"]


@pytest.mark.parametrize(
    ("text", "kb"),
    [
        (" 1024K ", 1024),
        ("512MiB", 512 * 1024),
        ("512 mb", 512 * 1024),
        ("2G", 2 * 1024**2),
        ("1.5GiB", 3 * 1024**2 // 2),
        ("1TB", 1024**3),
        (2048, 2048),
        ("2", None),
        ("G", None),
        ("2PB", None),
        ("1e3M", None),
        ("9" * 400 + "G", None),
        (True, None),
    ],
)
def test_sizes(text: object, kb: int | None) -> None:
    data = job(layers=[layer(gpu_memory=text)])
    if kb is None:
        assert_told([("layers[0].gpu_memory", repr(text) if isinstance(text, str) else "512MiB")], problems(data))
    else:
        assert JobSpec.parse(data).layers[0].gpu_memory == kb


anything = st.recursive(
    st.one_of(
        st.none(),
        st.booleans(),
        st.integers(-(10**12), 10**12),
        st.floats(),
        st.text(max_size=12),
        st.sampled_from(["1-10", "a|b", "render", "2GiB", "#X#", "frame_by_frame"]),
    ),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.dictionaries(
            st.sampled_from(["name", "command", "range", "layers", "depends", "layer", "job", "frame", "type", "env"]),
            inner,
            max_size=5,
        ),
    ),
    max_leaves=12,
)
JOB_KEYS = [*job(), "priority", "max_cores", "max_gpus", "env", "depends", "log_dir", "paused", "typo"]
LAYER_KEYS = [*layer(), "chunk", "cores", "max_cores", "memory", "tags", "services", "limits", "depends", "env", "type"]


@given(
    st.dictionaries(st.sampled_from(JOB_KEYS), anything, max_size=4),
    st.dictionaries(st.sampled_from(LAYER_KEYS), anything, max_size=4),
)
def test_nothing_a_file_says_raises_anything_but_its_problems(
    job_changes: dict[str, Any], layer_changes: dict[str, Any]
) -> None:
    try:
        spec = JobSpec.parse({**job(), "layers": [{**layer(), **layer_changes}], **job_changes})
    except InvalidFile as error:
        assert error.problems
        assert all(": " in line for line in error.problems)
    else:
        assert spec.layers
        assert spec.frame_count >= 1
