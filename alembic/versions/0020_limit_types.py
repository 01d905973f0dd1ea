"""Limits that count machines, and what a licence server reports of them, as Cuebot's migration V49 has them.

In the schema that we make: the columns, tables, constraints and indexes, so that a Cuebot of that version finds what it
needs. On a database made by Cuebot none of these: its own migration adds them, and until then `b_host_limit` says which
limits count machines. On both, a change of what a limit counts, and a report, is announced and waits for the commits
under way, as a change of its maximum does (0006); and a layer that gets or loses a limit while its frames run is
announced.
"""

from __future__ import annotations

from pathlib import Path

from alembic import op

from opencue_sched.store.schema import TABLE_LOCK_SECONDS, read_origin, refuse_limits_of_one_name

# ruff: noqa: S608 - the statements are put together from constants of this module only

revision = "0020"
down_revision = "0019"
branch_labels = None
depends_on = None

_SQL = Path(__file__).resolve().parent.parent / "sql" / "own"
_OF_MAXIMA = (
    "SELECT pk_limit_record, int_max_value FROM after\n"
    "                  EXCEPT SELECT pk_limit_record, int_max_value FROM before"
)
# Columns are found, not named: a Cuebot before V49 has not all of them, and may get them any day.
_UNREAD = "{str_name, str_report_source, int_exit_status, int_delay_minutes, b_auto_tag}"
# A limit of frames is its maximum, whatever is reported of it: a report of it is nothing to wait for.
_UNREAD_OF_FRAMES = "{ts_reported, int_report_ttl, int_soft_value, str_enforcement}"


def _read(row: str) -> str:
    """What decides of a limit's row how it counts."""
    return (
        f"SELECT pk_limit_record, to_jsonb({row}) - CAST('{_UNREAD}' AS text[]) - CASE\n"
        f"                  WHEN to_jsonb({row}) ->> 'str_type' = 'FRAME'\n"
        f"                  THEN CAST('{_UNREAD_OF_FRAMES}' AS text[]) ELSE CAST('{{}}' AS text[]) END FROM {row}"
    )


_OF_ALL = f"{_read('after')}\n                  EXCEPT {_read('before')}"

_LIKE_V49 = """
ALTER TABLE limit_record
    ADD str_type varchar(16) NOT NULL DEFAULT 'FRAME',
    ADD str_enforcement varchar(16) NOT NULL DEFAULT 'ENFORCED',
    ADD int_soft_value integer NOT NULL DEFAULT -1,
    ADD ts_reported timestamp(6) with time zone,
    ADD str_report_source varchar(255),
    ADD int_report_ttl integer NOT NULL DEFAULT 900,
    ADD int_exit_status integer,
    ADD int_delay_minutes integer NOT NULL DEFAULT 0,
    ADD b_auto_tag boolean NOT NULL DEFAULT true;
UPDATE limit_record SET str_type = 'HOST' WHERE b_host_limit;
ALTER TABLE limit_record
    ADD CONSTRAINT c_limit_record_pk PRIMARY KEY (pk_limit_record),
    ADD CONSTRAINT c_limit_record_uk_name UNIQUE (str_name),
    ADD CONSTRAINT c_limit_record_ck_type CHECK (str_type IN ('FRAME', 'HOST')),
    ADD CONSTRAINT c_limit_record_ck_enforcement CHECK (str_enforcement IN ('ENFORCED', 'ADVISORY', 'DISABLED')),
    ADD CONSTRAINT c_limit_record_ck_exit_status CHECK (int_exit_status IS NULL OR int_exit_status > 1),
    ADD CONSTRAINT c_limit_record_ck_delay CHECK (int_delay_minutes >= 0);
CREATE UNIQUE INDEX i_limit_record_uk_exit_status ON limit_record (int_exit_status) WHERE int_exit_status IS NOT NULL;
DROP INDEX IF EXISTS i_limit_record_pk_limit_record;

-- A layer that had a limit twice keeps one of the two rows.
DELETE FROM layer_limit twice
 USING layer_limit once
 WHERE (once.pk_layer, once.pk_limit_record) = (twice.pk_layer, twice.pk_limit_record)
   AND once.pk_layer_limit < twice.pk_layer_limit;
ALTER TABLE layer_limit
    ADD str_source varchar(16) NOT NULL DEFAULT 'SPEC',
    ADD ts_created timestamp(6) with time zone NOT NULL DEFAULT current_timestamp,
    ADD CONSTRAINT c_layer_limit_pk PRIMARY KEY (pk_layer_limit),
    ADD CONSTRAINT c_layer_limit_uk UNIQUE (pk_layer, pk_limit_record),
    ADD CONSTRAINT c_layer_limit_ck_source CHECK (str_source IN ('SPEC', 'AUTO', 'MANUAL'));
CREATE INDEX i_layer_limit_str_source ON layer_limit (pk_limit_record, str_source);

-- Who holds licences, as the licence server said. Of a name the part before the first dot, in small letters: an
-- artist's machine need not be a host.
CREATE TABLE limit_host (
    pk_limit_host varchar(36) NOT NULL CONSTRAINT c_limit_host_pk PRIMARY KEY,
    pk_limit_record varchar(36) NOT NULL CONSTRAINT c_limit_host_fk_limit
        REFERENCES limit_record (pk_limit_record) ON DELETE CASCADE,
    str_host_name varchar(256) NOT NULL,
    str_reported_name varchar(256) NOT NULL,
    int_tokens integer NOT NULL DEFAULT 1 CONSTRAINT c_limit_host_ck_tokens CHECK (int_tokens > 0),
    str_user varchar(64),
    ts_reported timestamp(6) with time zone NOT NULL DEFAULT current_timestamp,
    CONSTRAINT c_limit_host_uk UNIQUE (pk_limit_record, str_host_name)
) WITH (fillfactor = 70, autovacuum_vacuum_scale_factor = 0.0, autovacuum_vacuum_threshold = 500);
CREATE INDEX i_limit_host_str_host_name ON limit_host (str_host_name);

-- A Cuebot's sums of that table. We neither read nor write them.
CREATE TABLE limit_usage (
    pk_limit_record varchar(36) NOT NULL CONSTRAINT c_limit_usage_pk PRIMARY KEY CONSTRAINT c_limit_usage_fk
        REFERENCES limit_record (pk_limit_record) ON DELETE CASCADE,
    int_settled_usage integer NOT NULL DEFAULT 0,
    int_settled_hosts integer NOT NULL DEFAULT 0,
    ts_watermark timestamp(6) with time zone,
    ts_updated timestamp(6) with time zone NOT NULL DEFAULT current_timestamp
) WITH (fillfactor = 70);
INSERT INTO limit_usage (pk_limit_record) SELECT pk_limit_record FROM limit_record;

CREATE INDEX i_proc_ts_dispatched ON proc (ts_dispatched);
INSERT INTO task_lock (pk_task_lock, str_name, int_lock, int_timeout)
VALUES ('00000000-0000-0000-0000-000000000009', 'LOCK_LIMIT_USAGE_RECALCULATION', 0, 60000);
"""

_BEFORE_V49 = """
DELETE FROM task_lock WHERE str_name = 'LOCK_LIMIT_USAGE_RECALCULATION';
DROP INDEX i_proc_ts_dispatched;
DROP TABLE limit_usage, limit_host;
ALTER TABLE layer_limit DROP CONSTRAINT c_layer_limit_pk, DROP CONSTRAINT c_layer_limit_uk, DROP str_source,
    DROP ts_created;
ALTER TABLE layer_limit ALTER pk_layer_limit SET NOT NULL;
ALTER TABLE limit_record DROP CONSTRAINT c_limit_record_pk, DROP CONSTRAINT c_limit_record_uk_name, DROP str_type,
    DROP str_enforcement, DROP int_soft_value, DROP ts_reported, DROP str_report_source, DROP int_report_ttl,
    DROP int_exit_status, DROP int_delay_minutes, DROP b_auto_tag;
CREATE INDEX i_limit_record_pk_limit_record ON limit_record (pk_limit_record);
"""


def _run(sql: str) -> None:
    with op.get_bind().connection.cursor() as cursor:
        cursor.execute(sql)


def _caps_changed() -> str:
    """The function of 0006."""
    whole = (_SQL / "caps_settle.sql").read_text(encoding="utf-8")
    return whole[whole.index("CREATE OR REPLACE FUNCTION opencue_sched_caps_changed") :]


def upgrade() -> None:
    refuse_limits_of_one_name(op.get_bind())
    # While we wait for a table, everybody behind us waits too.
    op.execute(f"SELECT set_config('lock_timeout', '{TABLE_LOCK_SECONDS * 1000:.0f}ms', true)")
    if read_origin(op.get_bind()) != "cuebot":
        _run(_LIKE_V49)
    _run(_caps_changed().replace(_OF_MAXIMA, _OF_ALL))
    _run((_SQL / "limits_bound.sql").read_text(encoding="utf-8"))


def downgrade() -> None:
    op.execute(f"SELECT set_config('lock_timeout', '{TABLE_LOCK_SECONDS * 1000:.0f}ms', true)")
    for moment in ("insert", "delete"):
        _run(f"DROP TRIGGER opencue_sched_bound_{moment} ON layer_limit")
    _run("DROP FUNCTION opencue_sched_bound()")
    _run(_caps_changed())
    if read_origin(op.get_bind()) != "cuebot":
        _run(_BEFORE_V49)
