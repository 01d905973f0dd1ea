"""Check this scheduler against a schema made by Cuebot's own migrations.

    python -m tests.compat DIRECTORY [--compare-only] [pytest arguments]

1. Apply the migration files of DIRECTORY to a new database, and give it the rows a first show needs. 2. Compare it with
the schema we make. 3. Upgrade a copy with ours, see that no object of Cuebot's changed, and downgrade it again; the
same with set-based frames, which change two functions. 4. Book small farms on it (``benchmarks stress``), unless pytest
is given arguments, and run the integration tests, once as it is and once with set-based frames.
"""

from __future__ import annotations

import argparse
import os
import secrets
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from sqlalchemy import create_engine, make_url, text
from sqlalchemy.pool import NullPool

from opencue_sched.errors import SchedulerError
from opencue_sched.store import schema
from opencue_sched.store.set_based_frames import COUNTS, HISTORY
from tests.compat.cuebot import BadMigrations, Migration, add_first_rows, apply_migrations, find_migrations
from tests.compat.differences import MADE_FOR_VERSION, Difference, compare
from tests.compat.server import compat_server
from tests.kit.catalog import Catalog, read_catalog

_ROOT = Path(__file__).resolve().parents[2]
_INTEGRATION = "tests/integration"


class Scratch:
    """Databases of this run on the server at ``url``."""

    def __init__(self, url: str) -> None:
        self._url = make_url(url).set(drivername="postgresql+psycopg2")
        self._run = secrets.token_hex(4)
        self._made: list[str] = []

    def create(self, name: str, template: str = "template0") -> tuple[str, str]:
        """A database named after ``name``; returns its real name and its URL."""
        full = f"compat_{name}_{self._run}"
        self._execute(f'CREATE DATABASE "{full}" TEMPLATE "{template}"')
        self._made.append(full)
        return full, self._url.set(database=full).render_as_string(hide_password=False)

    def drop_all(self) -> None:
        for name in self._made:
            self._execute(f'DROP DATABASE IF EXISTS "{name}" WITH (FORCE)')

    def _execute(self, statement: str) -> None:
        engine = create_engine(self._url, isolation_level="AUTOCOMMIT", poolclass=NullPool)
        with engine.connect() as connection:
            connection.execute(text(statement))


@contextmanager
def _scratch(url: str) -> Iterator[Scratch]:
    scratch = Scratch(url)
    try:
        yield scratch
    finally:
        scratch.drop_all()


def _catalog(url: str) -> Catalog:
    with create_engine(url, poolclass=NullPool).connect() as connection:
        return read_catalog(connection)


def _report(differences: list[Difference], *, strict: bool) -> bool:
    """Print how the schemas differ; False when a difference was not meant."""
    by_reason = Counter(difference.reason for difference in differences if difference.reason)
    for reason, count in by_reason.most_common():
        print(f"  {count:3d} on purpose: {reason}")
    unmeant = [difference for difference in differences if not difference.reason]
    label = "NOT MEANT" if strict else "another version"
    for difference in unmeant:
        print(f"  {label}: {difference.kind} {difference.name}")
        print(f"      Cuebot: {difference.cuebot if difference.cuebot is not None else '-'}")
        print(f"      ours:   {difference.ours if difference.ours is not None else '-'}")
    return not (unmeant and strict)


def _compare(scratch: Scratch, cuebot_url: str, newest: Migration) -> bool:
    _, own_url = scratch.create("own")
    schema.upgrade(own_url)
    print(f"Our schema beside Cuebot's at V{'.'.join(map(str, newest.version))}:")
    return _report(list(compare(_catalog(cuebot_url), _catalog(own_url))), strict=newest.version == MADE_FOR_VERSION)


def _leaves_cuebots_alone(scratch: Scratch, cuebot_name: str) -> bool:
    _, url = scratch.create("upgraded", cuebot_name)
    before = _catalog(url)
    schema.upgrade(url)
    with create_engine(url, poolclass=NullPool).connect() as connection:
        print(f"Upgraded: {schema.check_schema(connection)}")
    upgraded = _catalog(url)
    schema.downgrade(url)
    alike = before == upgraded == _catalog(url)
    print(f"Cuebot's own objects after upgrade and downgrade: {'unchanged' if alike else 'CHANGED'}")
    return alike


def _set_based_frames_go_back(scratch: Scratch, cuebot_name: str) -> bool:
    """Whether the opt-in changes the two functions alone, and each way back leaves them as Cuebot wrote them."""
    _, url = scratch.create("set_based", cuebot_name)
    before = _catalog(url)
    changed = []
    for way_back in (partial(schema.set_frames_way, set_based=False), schema.downgrade):
        schema.upgrade(url)
        schema.set_frames_way(url, set_based=True)
        after = _catalog(url)
        changed.append(
            {name for kind in before for name in before[kind] if before[kind][name] != after[kind].get(name)}
        )
        way_back(url)
        if _catalog(url) != before:
            changed.append({"something stayed"})
    good = changed == [{f"trigger__{trigger}()" for trigger in (COUNTS, HISTORY)}] * 2
    print(f"Set-based frames and back: {'two functions changed, and none' if good else f'CHANGED {changed}'}")
    return good


def _books(scratch: Scratch, template: str) -> bool:
    """Whether workers book small farms on a copy of a database, and the audit finds nothing."""
    _, url = scratch.create(f"stress_{template}", template)
    sys.stdout.flush()
    stress = [sys.executable, "-m", "benchmarks", "stress", "--scale", "0.1", "--database-url", url]
    return subprocess.run(stress, cwd=_ROOT, check=False).returncode == 0


def _run_tests(server_url: str, template: str, arguments: list[str]) -> int:
    where = [] if any(Path(argument.split("::")[0]).exists() for argument in arguments) else [_INTEGRATION]
    sys.stdout.flush()
    environment = {
        **os.environ,
        "OPENCUE_SCHED_TEST_DATABASE_URL": server_url,
        "OPENCUE_SCHED_TEST_TEMPLATE": template,
    }
    return subprocess.run(
        [sys.executable, "-m", "pytest", *where, *arguments], cwd=_ROOT, env=environment, check=False
    ).returncode


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.compat", description=__doc__)
    parser.add_argument("directory", type=Path, help="Cuebot's migration files (V1__...sql and on)")
    parser.add_argument("--compare-only", action="store_true", help="do not run the integration tests")
    options, pytest_arguments = parser.parse_known_args()
    try:
        migrations = find_migrations(options.directory)
        with compat_server() as server_url, _scratch(server_url) as scratch:
            cuebot_name, cuebot_url = scratch.create("cuebot")
            apply_migrations(cuebot_url, migrations)
            add_first_rows(cuebot_url)
            print(f"{len(migrations)} migrations applied")
            good = _compare(scratch, cuebot_url, migrations[-1])
            good = _leaves_cuebots_alone(scratch, cuebot_name) and good
            good = _set_based_frames_go_back(scratch, cuebot_name) and good
            if not options.compare_only:
                set_based_name, set_based_url = scratch.create("all_at_once", cuebot_name)
                schema.set_frames_way(set_based_url, set_based=True)
                for name in (cuebot_name, set_based_name):
                    if name is set_based_name:
                        print("The same with set-based frames:")
                    good = (bool(pytest_arguments) or _books(scratch, name)) and good
                    good = _run_tests(server_url, name, pytest_arguments) == 0 and good
    except (BadMigrations, SchedulerError) as error:
        print(f"compat: {error}", file=sys.stderr)
        return 2
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
