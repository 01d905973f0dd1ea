"""The documents say what the code says."""

from __future__ import annotations

import ast
import inspect
import re
import shlex
import subprocess
from functools import cache
from operator import attrgetter
from pathlib import Path

import click
import pytest

from opencue_sched.accounting import keys as counter_keys
from opencue_sched.cli import cli
from opencue_sched.coordination import keys as coordination_keys
from opencue_sched.domain.invariants import Invariant
from opencue_sched.domain.verdicts import Verdict
from opencue_sched.settings import Settings
from tests.kit import metrics_table
from tests.kit.setting_fields import setting_fields

ROOT = Path(__file__).resolve().parents[2]
TASKS = sorted((ROOT / "docs" / "tasks").glob("*.md"))
TASKS += [ROOT / "docs" / name for name in ("logs.md", "who-may-do-what.md")]
DOCUMENTS = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md", ROOT / "deploy" / "README.md"]
DOCUMENTS += sorted((ROOT / "docs").rglob("*.md"))


def settings_table() -> list[tuple[str, str, str, str]]:
    """Key, variable, default and meaning of each setting, as their document has them."""
    guide = (ROOT / "docs" / "settings.md").read_text()
    return re.findall(r"^\| `([\w.]+)` \| `(OPENCUE_SCHED_\w+)` \| (.*?) \| (.*) \|$", guide, re.M)


def test_the_settings_table_is_the_codes():
    assert [(key, variable, meaning) for key, variable, _, meaning in settings_table()] == [
        (".".join(path), f"OPENCUE_SCHED_{'__'.join(path).upper()}", field.description)
        for path, field in setting_fields()
    ]


def test_the_defaults_that_the_settings_table_tells_are_the_codes(monkeypatch):
    """As values of their variables they change nothing."""
    in_words = {"host name and process id", "not set (the reference: 3)"}
    assert {default for _, _, default, _ in settings_table() if " " in default} == in_words
    for key, variable, default, _ in settings_table():
        unset = attrgetter(key)(Settings())
        if default == "-":
            assert not unset, key
        elif default not in in_words:
            with monkeypatch.context() as patch:
                patch.setenv(variable, default)
                assert attrgetter(key)(Settings()) == unset, key


def test_the_metrics_tables_are_the_codes():
    document = metrics_table.PATH.read_text()
    assert all(table in document for table in metrics_table.tables()), "run: python -m tests.kit.metrics_table"
    assert metrics_table.with_tables(document) == document


def test_every_metric_that_a_document_names_exists():
    declared = set(re.findall(r"`(\w+)[`{]", "".join(metrics_table.tables())))
    declared |= {name + suffix for name in declared for suffix in ("_bucket", "_sum", "_count")}
    documents = [path for path in DOCUMENTS if path.parent.name != "adr"]
    named = {
        path: set(re.findall(r"`((?:scheduler|cuebot_redis)_[a-z_]+)[`{]", path.read_text())) for path in documents
    }
    assert any(named.values())
    assert {path.name: names - declared for path, names in named.items() if names - declared} == {}


def test_every_setting_that_policies_name_exists():
    keys = [key for key, *_ in settings_table()]
    named = re.findall(r"`((?:queue|release)\.\w+)", (ROOT / "docs" / "policies.md").read_text())
    assert {"queue.shares", "release.frame_memory"} <= set(named)
    assert [name for name in named if not any(key == name or key.startswith(f"{name}.") for key in keys)] == []


def keys_named(document: str) -> set[str]:
    """What stands in the first column of the table of keys of a document."""
    section = (ROOT / "docs" / document).read_text().partition("## Keys\n")[2].partition("\n## ")[0]
    return {key for row in re.findall(r"^\| (`.*?) \|", section, re.M) for key in re.findall(r"`([^`]+)`", row)}


def test_the_table_of_keys_has_every_key_of_the_counters():
    patterns = ("EVERYTHING", "LIMIT_PREFIX")
    constants = {name: text for name, text in vars(counter_keys).items() if name.isupper() and name not in patterns}
    spelt = {text for text in constants.values() if isinstance(text, str) and ":" in text and "," not in text}
    spelt |= {counter_keys.vertex(kind, "") for kind in counter_keys.VertexKind}
    named = keys_named("accounting.md")
    assert {key.partition("{")[0] for key in named} == spelt
    of_machines = (counter_keys.other_machines, counter_keys.past_machines, counter_keys.started)
    assert {build("{limit}") for build in of_machines} - named == set()


def keys_built_by(owner):
    """What the methods and properties of a class of keys build, from parameters called as they are there."""
    for name, member in vars(type(owner)).items():
        if isinstance(member, property):
            yield getattr(owner, name)
        elif inspect.isfunction(member) and not name.startswith("_"):
            yield getattr(owner, name)(
                *(f"{{{parameter}}}" for parameter in [*inspect.signature(member).parameters][1:])
            )


def test_the_table_of_keys_has_every_key_of_the_namespace():
    """Every key that the module builds, from parameters called as they are there."""
    board, leader = coordination_keys.BoardKeys("{ns}", "{board}"), coordination_keys.LeaderKeys("{ns}", "{role}")
    found = [*keys_built_by(board), *keys_built_by(leader)]
    built = {key for key in found if isinstance(key, str)} - {board.prefix, leader.name}
    for function in filter(inspect.isfunction, vars(coordination_keys).values()):
        names = list(inspect.signature(function).parameters)
        if names[0] == "ns":
            called = {name: f"{{{name.removesuffix('_id').rstrip('_')}}}" for name in names}
            key = function(**called | ({"facility": None} if "facility" in called else {}))
            built |= {key} if isinstance(key, str) and key.startswith("{ns}:") and "*" not in key else set()
    named = keys_named("coordination.md")
    assert built - named == set()
    assert named - built == {"{ns}:q:work:..."}


def test_the_table_of_invariants_is_the_codes():
    section = (ROOT / "docs" / "architecture.md").read_text().partition("## Invariants\n")[2]
    table = re.findall(r"^\| `([a-z-]+)` \| (.*?) \| .+ \|$", section, re.M)
    assert table == [(invariant.value, invariant.sentence) for invariant in Invariant]


def test_the_verdicts_table_is_the_codes():
    section = (ROOT / "docs" / "look.md").read_text().partition("## Verdicts\n")[2].partition("\n## ")[0]
    named = [name for row in re.findall(r"^\| (`.*?) \|", section, re.M) for name in re.findall(r"`(\w+)`", row)]
    assert named == [verdict.value for verdict in Verdict]


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_every_link_leads_somewhere(document):
    for target in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", document.read_text()):
        if not target.startswith("http"):
            assert (document.parent / target).exists(), f"{document.name}: {target}"


def anchors_of(document: Path) -> set[str]:
    """The names by which the headings of a document are linked to, as GitHub makes them."""
    headings = re.findall(r"^#+ (.*)$", re.sub(r"```.*?```", "", document.read_text(), flags=re.S), re.M)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_every_link_to_a_heading_leads_to_one(document):
    for target, anchor in re.findall(r"\]\(((?!http)[^)#]*)#([^)]+)\)", document.read_text()):
        linked = document.parent / target if target else document
        assert anchor in anchors_of(linked), f"{document.name}: {target}#{anchor}"


def test_the_index_by_reader_and_that_by_symptom_lead_to_every_document():
    indices = [ROOT / "docs" / "README.md", ROOT / "docs" / "tasks" / "README.md"]
    linked = {
        (index.parent / target).resolve()
        for index in indices
        for target in re.findall(r"\]\(([^)#]+)", index.read_text())
    }
    pages = {path for path in (ROOT / "docs").rglob("*.md") if path.parent.name != "adr"}
    assert pages - linked - {indices[0]} == set()


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_every_command_named_exists(document):
    text = document.read_text()
    code = "\n".join([*re.findall(r"```.*?```", text, re.S), *re.findall(r"`[^`\n]+`", text)])
    for name in re.findall(r"(?:^|`|\s)opencue-sched ([a-z][a-z-]+)", code):
        assert name in cli.list_commands(None), f"{document.name}: opencue-sched {name}"


def commands_in(text: str) -> list[list[str]]:
    """The words of every opencue-sched command in code, in a block or in a line, without what only a shell reads."""
    blocks = re.findall(r"```[a-z]*\n(.*?)```", text, re.S)
    lines = [line.removeprefix("$ ") for block in blocks for line in block.splitlines()]
    lines += re.findall(r"`([^`\n]+)`", re.sub(r"```.*?```", "", text, flags=re.S))
    written = [line for line in lines if line.startswith("opencue-sched ")]
    return [shlex.split(re.split(r" (?:\||&&|<|>) |;", line)[0], comments=True)[1:] for line in written]


@pytest.mark.parametrize("document", [*TASKS, ROOT / "docs" / "cueadmin.md"], ids=lambda path: path.name)
def test_every_command_of_a_task_is_taken_as_it_is_written(document):
    found = commands_in(document.read_text())
    assert found
    for words in found:
        command, rest = cli, words
        while isinstance(command, click.Group) and rest and not rest[0].startswith("-"):
            _, command, rest = command.resolve_command(click.Context(command), rest)
        given, left, _ = command.make_parser(click.Context(command, resilient_parsing=True)).parse_args(list(rest))
        assert not left, f"{document.name}: {words}"
        if rest and document in TASKS:
            missing = [part.name for part in command.params if part.required and not given.get(part.name)]
            assert not missing, f"{document.name}: {words}"


def test_workers_are_started_by_names_that_differ_on_one_host():
    for name in ("README.md", "docs/run.md"):
        starts = re.findall(r"celery -A opencue_sched worker\b(.*)", (ROOT / name).read_text())
        assert starts, name
        assert all(re.match(r" -n w1@%h\b", start) for start in starts), name


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_every_make_target_named_exists(document):
    makefile = (ROOT / "Makefile").read_text()
    for name in re.findall(r"`make ([a-z0-9-]+)", document.read_text()):
        assert re.search(rf"^{name}:", makefile, re.M), f"{document.name}: make {name}"


def test_pip_is_not_replaced_while_another_pip_installs(tmp_path):
    # given what `make install` runs
    words = ["make", "--dry-run", "--always-make", f"VENV={tmp_path}", "install"]
    said = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert said.index("parttools.lock\n") < said.index("xargs -P")

    # when the lock file is divided
    divide = said[said.index("awk ") : said.index("requirements.lock\n", said.index("awk ")) + len("requirements.lock")]
    subprocess.run(["sh", "-c", divide], cwd=ROOT, check=True)

    # then pip and what builds packages are in the part that comes first, and everything is in one part
    pins = re.compile(r"^([a-z0-9._-]+)==", re.M)
    parts = {path.name: pins.findall(path.read_text()) for path in tmp_path.glob("part*.lock")}
    assert sorted(parts["parttools.lock"]) == ["pip", "setuptools", "wheel"]
    assert sorted(name for names in parts.values() for name in names) == sorted(
        pins.findall((ROOT / "requirements.lock").read_text())
    )


def test_a_first_make_says_what_it_does_before_it_installs():
    words = ["make", "--dry-run", "--always-make", "demo"]
    lines = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=True).stdout.splitlines()
    installs = next(number for number, line in enumerate(lines) if " install " in line)
    assert any(line.startswith('echo "installing ') for line in lines[:installs])


@cache
def names_of(path: Path) -> set[str]:
    """Classes and functions of a test file, methods as Class::method."""
    names = set()
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.ClassDef | ast.FunctionDef):
            names.add(node.name)
            names |= {f"{node.name}::{each.name}" for each in ast.walk(node) if isinstance(each, ast.FunctionDef)}
    return names


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_every_test_named_exists(document):
    """As `test_x.py`, `test_x.py::test_name` or `test_x.py::TestClass::test_name`, with or without its folder."""
    for file, name in re.findall(r"`((?:tests/[\w/]*)?test_[\w*]+\.py)(?:::([\w:]+))?`", document.read_text()):
        found = [*ROOT.glob(file)] if "/" in file else [*(ROOT / "tests").rglob(file)]
        assert found, f"{document.name}: {file}"
        if name:
            assert any(name in names_of(path) for path in found), f"{document.name}: {file}::{name}"


@pytest.mark.parametrize("heading", ["What can interleave", "Failure modes"])
def test_each_row_about_accounting_names_its_tests(heading):
    section = (ROOT / "docs" / "accounting.md").read_text().partition(f"## {heading}\n")[2].partition("\n## ")[0]
    rows = [line for line in section.splitlines() if line.startswith("| ")][1:]
    assert len(rows) > 10
    for row in rows:
        assert re.search(r"`test_\w+\.py", row), row


TERMS = [
    "backlog", "blocked", "board", "census", "claim", "cluster", "completion", "cooldown", "drain", "epoch",
    "fence", "foreign", "headroom", "imported", "lease", "ledger", "managed", "mark", "outcome", "permit", "plan",
    "posting", "quarantine", "reservation", "resources", "resync", "shard", "sleep", "sweep", "tick", "ticket",
    "tombstone", "verdict", "vertex", "wake", "in flight", "set aside",
]  # fmt: skip
"""Words that a reader of the code meets before anything explains them."""


def glossary() -> dict[str, tuple[str, list[str]]]:
    """What each term means, and the modules that have it."""
    document = ROOT / "docs" / "glossary.md"
    rows = re.findall(r"^\| ([a-z ]+) \| (.+) \| (\[.+) \|$", document.read_text(), re.M)
    return {term: (meaning, re.findall(r"\]\(\.\./([\w/.]+)\)", modules)) for term, meaning, modules in rows}


def test_the_glossary_explains_the_words_of_the_code():
    explained = glossary()
    assert [term for term in TERMS if term not in explained] == []
    assert list(explained) == sorted(explained)


@pytest.mark.parametrize("term", sorted(glossary()))
def test_a_term_of_the_glossary_stands_in_the_code_that_is_named_for_it(term):
    _, modules = glossary()[term]
    texts = [(ROOT / module).read_text() for module in modules]
    assert any(re.search(rf"(\b|_){term}", text, re.I) for text in texts), modules
