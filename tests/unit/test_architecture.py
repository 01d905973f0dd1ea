"""The packages of the house: who may import whom, where SQL lives, how large a module gets."""

from __future__ import annotations

import ast
import inspect
import re
import sys
import tomllib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest

from opencue_sched.clients.redis_client import make_redis

ROOT = Path(__file__).resolve().parents[2]

# What each package may import of ours, besides itself: all that stands below it. Nobody imports a package that is not
# listed for it.
_VALUES = {"errors", "domain", "text_file", "settings"}
_STORES = {*_VALUES, "clock", "background", "clients", "store"}
_SHARED = {*_STORES, "accounting", "coordination", "rqd"}
_PEOPLE = {*_SHARED, "placement", "dispatch", "reports", "jobs"}
ALLOWED: dict[str, set[str]] = {
    "errors": set(),
    "signals": set(),
    "domain": {"errors"},
    "standard_streams": set(),
    "text_file": {"errors", "domain"},
    "settings": {"errors", "domain", "text_file"},
    "clock": _VALUES,
    "background": _VALUES,
    "clients": {*_VALUES, "clock", "background"},
    "store": {*_VALUES, "clock", "background", "clients"},
    "accounting": _STORES,
    "coordination": _STORES,
    "placement": {"domain", "settings"},
    "rqd": {"errors", "domain", "settings"},
    "dispatch": {*_SHARED, "placement"},
    "reports": {*_SHARED, "signals"},
    "jobs": {*_SHARED, "reports"},
    "insight": _PEOPLE,
    "page": {*_PEOPLE, "signals", "insight"},
    "worker": {*_PEOPLE, "insight", "page"},
    "beat": {*_PEOPLE, "signals", "insight", "page", "worker"},
    "celery": {*_PEOPLE, "signals", "standard_streams", "insight", "page", "worker"},
    "tasks": {*_PEOPLE, "insight", "page", "worker", "beat", "celery"},
    "cli": {*_PEOPLE, "signals", "standard_streams", "insight", "page", "worker", "beat", "celery", "embedded"},
    "celeryconfig": {"settings", "coordination"},
    "embedded": {*_PEOPLE, "insight", "page", "worker"},
}
# Imported by us, and always installed with something we declare (celery, celery, flower, opencue-proto).
COME_WITH_A_DEPENDENCY = {"kombu", "billiard", "tornado", "protobuf"}
# rqd_launcher.py is a script run by the Python of opencue-rqd's own environment.
OF_ANOTHER_ENVIRONMENT = {"rqd"}
# One connects, the other listens: both need the driver's own connection, and read no table.
OF_THE_DRIVER = {"opencue_sched/clients/postgres.py", "opencue_sched/worker/events.py"}
VAGUE_NAMES = {"utils", "util", "helpers", "helper", "manager", "common", "misc"}
# Lines without docstrings: a sentence more makes nothing too long.
MOST_LINES_OF_A_MODULE = 720
MOST_LINES_OF_A_FUNCTION = 75


@dataclass(frozen=True)
class Module:
    path: Path

    @property
    def name(self) -> str:
        return str(self.path.relative_to(ROOT))

    @property
    def full_name(self) -> str:
        return ".".join(self.path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")

    @property
    def package(self) -> str:
        parts = self.path.relative_to(ROOT).with_suffix("").parts
        return parts[1] if parts[0] == "opencue_sched" else parts[0]

    @cached_property
    def source(self) -> str:
        return self.path.read_text(encoding="utf-8")

    @cached_property
    def tree(self) -> ast.Module:
        return ast.parse(self.source)


def _modules() -> list[Module]:
    paths = [*ROOT.glob("opencue_sched/**/*.py"), *ROOT.glob("tasks/**/*.py"), ROOT / "celeryconfig.py"]
    return [Module(path) for path in sorted(paths) if path != ROOT / "opencue_sched" / "__init__.py"]


MODULES = _modules()
NAMES = [module.name for module in MODULES]


def _imports(module: Module) -> Iterator[tuple[str, int]]:
    """Full names of everything imported, wherever in the module, with the line."""
    yield from _imports_of(module, ast.walk(module.tree))


def _imports_of(module: Module, nodes: Iterable[ast.AST]) -> Iterator[tuple[str, int]]:
    package = module.path.relative_to(ROOT).parent.parts
    for node in nodes:
        if isinstance(node, ast.Import):
            yield from ((alias.name, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = package[: len(package) - node.level + 1] if node.level else ()
            base = ".".join([*above, *([node.module] if node.module else [])])
            yield from ((f"{base}.{alias.name}", node.lineno) for alias in node.names)


def _package_of(imported: str) -> str | None:
    parts = imported.split(".")
    if parts[0] == "opencue_sched":
        return parts[1] if len(parts) > 1 and not parts[1].startswith("__") else None
    return parts[0] if parts[0] in {"tasks", "celeryconfig"} else None


def _at_its_import(module: Module, names: set[str]) -> set[str]:
    """The modules of ours that are imported when this one is: not what functions import, nor what only types need."""
    found = set()
    for node in module.tree.body:
        for imported, _ in _imports_of(module, [node]) if isinstance(node, ast.Import | ast.ImportFrom) else ():
            found |= {name for name in (imported, imported.rpartition(".")[0]) if name in names}
    return found - {module.full_name}


def test_every_package_has_its_rule() -> None:
    assert {module.package for module in MODULES} <= set(ALLOWED), "a new package needs a line in ALLOWED"


@pytest.mark.parametrize("module", MODULES, ids=NAMES)
def test_a_package_imports_only_what_is_below_it(module: Module) -> None:
    allowed = {module.package, *ALLOWED[module.package]}
    climbing = [
        f"line {line}: {imported}"
        for imported, line in _imports(module)
        if (package := _package_of(imported)) is not None and package not in allowed
    ]
    assert not climbing, f"{module.name} imports packages it may not see: {climbing}"


def test_the_rules_have_no_cycle() -> None:
    order: list[str] = []
    while remaining := set(ALLOWED) - set(order):
        ready = sorted(package for package in remaining if not (ALLOWED[package] & remaining - {package}))
        assert ready, f"packages that import each other: {sorted(remaining)}"
        order += ready


def test_modules_of_a_package_do_not_import_each_other_in_a_circle() -> None:
    names = {module.full_name for module in MODULES}
    imports = {module.full_name: _at_its_import(module, names) for module in MODULES}
    order: list[str] = []
    while remaining := names - set(order):
        ready = sorted(name for name in remaining if not (imports[name] & remaining - {name}))
        assert ready, f"modules that import each other: {sorted(remaining)}"
        order += ready


def test_one_command_is_all_that_imports_what_try_outs_share() -> None:
    """A scheduler runs without it: it comes with a dependency that production does not install."""
    users = {
        module.name
        for module in MODULES
        if module.package != "embedded"
        for imported, _ in _imports(module)
        if _package_of(imported) == "embedded"
    }
    assert users == {"opencue_sched/cli/services.py"}


def test_a_redis_client_is_made_in_one_place_with_its_guard() -> None:
    """A client without it could book on a Redis that failed over."""
    callers = {
        module.name
        for module in MODULES
        for node in ast.walk(module.tree)
        if isinstance(node, ast.Call) and ast.unparse(node.func).rpartition(".")[2] == "make_redis"
    }
    guard = inspect.signature(make_redis).parameters["guard"]
    assert callers == {"opencue_sched/accounting/epoch.py"}
    assert guard.default is inspect.Parameter.empty


def test_the_domain_is_pure() -> None:
    foreign = {
        f"{module.name}:{line} {imported}"
        for module in MODULES
        if module.package == "domain"
        for imported, line in _imports(module)
        if imported.split(".")[0] not in sys.stdlib_module_names | {"opencue_sched"}
    }
    assert not foreign, f"domain imports only the standard library: {sorted(foreign)}"


def test_sql_is_written_in_the_store_only() -> None:
    # embedded writes test farms; nothing of it runs in a scheduler.
    elsewhere = {
        f"{module.name}:{line}"
        for module in MODULES
        if module.package not in {"store", "embedded"} and module.name not in OF_THE_DRIVER
        for imported, line in _imports(module)
        if imported in {"sqlalchemy.text", "sqlalchemy.sql.text"} or imported.split(".")[0] == "psycopg2"
    }
    assert not elsewhere, f"SQL outside opencue_sched/store: {sorted(elsewhere)}"


def test_tasks_are_thin() -> None:
    thick = {
        f"{module.name}:{line} {imported}"
        for module in MODULES
        if module.package == "tasks"
        for imported, line in _imports(module)
        if imported.split(".")[0] in {"sqlalchemy", "redis", "psycopg2", "grpc"}
    }
    assert not thick, f"tasks parse arguments and call one function: {sorted(thick)}"


def test_modules_have_names_that_say_something() -> None:
    assert not [module.name for module in MODULES if module.path.stem in VAGUE_NAMES]


def _lines_of(node: ast.stmt | ast.expr) -> int:
    return (node.end_lineno or node.lineno) - node.lineno + 1


def _lines_of_docstrings(tree: ast.AST) -> int:
    """Lines of the strings that stand by themselves: docstrings, those of constants and fields too."""
    alone = (node.value for node in ast.walk(tree) if isinstance(node, ast.Expr))
    return sum(_lines_of(value) for value in alone if isinstance(value, ast.Constant) and isinstance(value.value, str))


def test_modules_and_functions_stay_readable() -> None:
    long = []
    for module in MODULES:
        length = module.source.count("\n") - _lines_of_docstrings(module.tree)
        if length > MOST_LINES_OF_A_MODULE:
            long.append(f"{module.name}: {length} lines")
        for node in ast.walk(module.tree):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                length = _lines_of(node) - _lines_of_docstrings(node)
                if length > MOST_LINES_OF_A_FUNCTION:
                    long.append(f"{module.name}:{node.lineno} {node.name}(): {length} lines")
    assert not long, long


def test_everything_imported_is_declared() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    requirements = project["dependencies"] + project["optional-dependencies"]["embedded"]
    declared = {re.split(r"[^a-z0-9-]", text.lower())[0] for text in requirements} | COME_WITH_A_DEPENDENCY
    distributions = packages_distributions()
    undeclared = {
        f"{module.name}:{line} {imported}"
        for module in MODULES
        for imported, line in _imports(module)
        if (top := imported.split(".")[0]) not in sys.stdlib_module_names
        and _package_of(imported) is None
        and top not in {"opencue_sched", *OF_ANOTHER_ENVIRONMENT}
        and not module.path.with_name(f"{top}.py").exists()  # a script's neighbour
        and not {name.lower().replace("_", "-") for name in distributions.get(top, [])} & declared
    }
    assert not undeclared, f"not in pyproject.toml: {sorted(undeclared)}"


def test_migrations_do_not_shadow_their_library() -> None:
    assert not (ROOT / "alembic" / "__init__.py").exists()
