"""What planning and executing the statements of the workers takes, where PostgreSQL counts that: the wheel's cannot."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from sqlalchemy import Engine, event, text

from opencue_sched.embedded.servers.services import named_programs

_READ = text(
    """
    SELECT coalesce(sum(total_plan_time), 0) AS planning, coalesce(sum(total_exec_time), 0) AS executing
      FROM pg_stat_statements JOIN pg_database database ON database.oid = dbid
     WHERE datname = current_database()
    """
)


def configuration() -> dict[str, str]:
    """What PostgreSQL needs to count statements and to time planning, where it can."""
    programs = named_programs()
    if programs is None or not (programs.parent / "lib" / "pg_stat_statements.so").exists():
        return {}
    return {"shared_preload_libraries": "pg_stat_statements", "pg_stat_statements.track_planning": "on"}


def leave_out(engine: Engine) -> None:
    """Count nothing of the sessions of this engine, and have the module for those of others."""
    if not configuration():
        return

    @event.listens_for(engine, "connect")
    def count_nothing(connection: Any, _record: object) -> None:
        with connection.cursor() as cursor:
            cursor.execute("SET pg_stat_statements.track = 'none'")
        connection.commit()

    with engine.begin() as connection:
        connection.execute(text("CREATE EXTENSION pg_stat_statements"))
    engine.dispose()


@dataclass(frozen=True, slots=True)
class StatementTimes:
    """Milliseconds of planning and of executing since `forget`; None where they are not counted."""

    planning: float | None = None
    executing: float | None = None

    @classmethod
    def read(cls, engine: Engine) -> StatementTimes:
        """What was counted by now."""
        if not configuration():
            return cls()
        with engine.connect() as connection:
            return cls(*map(float, connection.execute(_READ).one()))

    @staticmethod
    def forget(engine: Engine) -> None:
        """Begin to count anew."""
        if configuration():
            with engine.begin() as connection:
                connection.execute(text("SELECT pg_stat_statements_reset()"))

    def of_each(self, frames: int) -> str:
        """Microseconds of planning and of executing for each of so many frames."""
        if self.planning is None or self.executing is None:
            return "-"
        each, percent = 1000 / max(1, frames), 100 * self.planning / max(self.planning + self.executing, 0.001)
        return f"planning {each * self.planning:.0f}, executing {each * self.executing:.0f}: planning {percent:.0f} %"
