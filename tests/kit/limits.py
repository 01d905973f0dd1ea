"""Limits as tests want them, in our schema, which has what Cuebot's V49 has, and in an older Cuebot's."""

from __future__ import annotations

from sqlalchemy import Connection, text

_HAS_TYPES = text(
    "SELECT EXISTS (SELECT FROM pg_attribute WHERE attrelid = to_regclass('limit_record') AND attname = 'str_type')"
)


def has_types(connection: Connection) -> bool:
    """Whether limits have types (V49)."""
    return bool(connection.scalar(_HAS_TYPES))


def set_type(connection: Connection, limit_id: str, limit_type: str) -> None:
    """Make a limit count machines (HOST) or frames (FRAME)."""
    if has_types(connection):
        statement = text("UPDATE limit_record SET str_type = :type WHERE pk_limit_record = :limit")
    else:
        statement = text("UPDATE limit_record SET b_host_limit = (:type = 'HOST') WHERE pk_limit_record = :limit")
    connection.execute(statement, {"type": limit_type, "limit": limit_id})


def list_twice(connection: Connection, layer_id: str) -> None:
    """Have a layer list each of its limits twice, which only a Cuebot before V49 lets it."""
    connection.execute(
        text(
            "INSERT INTO layer_limit (pk_layer_limit, pk_layer, pk_limit_record)"
            " SELECT gen_random_uuid()::text, pk_layer, pk_limit_record FROM layer_limit WHERE pk_layer = :layer"
            " ON CONFLICT DO NOTHING"
        ),
        {"layer": layer_id},
    )


def report(connection: Connection, limit_id: str, *names: str, tokens: int = 1, seconds_ago: float = 0.0) -> None:
    """As if a licence server had been asked so long ago and had said that these machines hold a limit, and no others
    (since V49)."""
    asked = "UPDATE limit_record SET ts_reported = now() - make_interval(secs => :ago) WHERE pk_limit_record = :limit"
    connection.execute(text("DELETE FROM limit_host WHERE pk_limit_record = :limit"), {"limit": limit_id})
    report_held(connection, limit_id, *names, tokens=tokens)
    connection.execute(text(asked), {"ago": seconds_ago, "limit": limit_id})


def report_held(connection: Connection, limit_id: str, *names: str, tokens: int = 1) -> None:
    """As if a licence server had said that these machines hold a limit (since V49)."""
    connection.execute(
        text(
            "INSERT INTO limit_host (pk_limit_host, pk_limit_record, str_host_name, str_reported_name, int_tokens)"
            " SELECT gen_random_uuid()::text, :limit, name, name, :tokens"
            " FROM unnest(CAST(:names AS varchar[])) AS name"
        ),
        {"limit": limit_id, "names": list(names), "tokens": tokens},
    )


def before_v49(connection: Connection) -> None:
    """Let limits be what they are in a Cuebot before V49."""
    terms = ("str_type", "str_enforcement", "int_soft_value", "ts_reported", "int_report_ttl", "int_exit_status")
    dropped = ", ".join(f"DROP COLUMN IF EXISTS {name} CASCADE" for name in terms)
    connection.execute(text(f"ALTER TABLE limit_record {dropped}"))
    connection.execute(text("DROP TABLE IF EXISTS limit_host"))


def as_v49(connection: Connection) -> None:
    """Add what Cuebot's V49 adds to limits, which decides how they count, to tables as before_v49 leaves them."""
    connection.execute(
        text(
            """
            ALTER TABLE limit_record
                ADD str_type varchar(16) NOT NULL DEFAULT 'FRAME', ADD str_enforcement varchar(16) NOT NULL DEFAULT
                'ENFORCED', ADD int_soft_value integer NOT NULL DEFAULT -1, ADD ts_reported timestamptz(6),
                ADD int_report_ttl integer NOT NULL DEFAULT 900, ADD int_exit_status integer,
                ADD COLUMN IF NOT EXISTS str_report_source varchar(255),
                ADD COLUMN IF NOT EXISTS int_delay_minutes integer NOT NULL DEFAULT 0,
                ADD COLUMN IF NOT EXISTS b_auto_tag boolean NOT NULL DEFAULT true
            """
        )
    )
    connection.execute(text("UPDATE limit_record SET str_type = 'HOST' WHERE b_host_limit"))
    connection.execute(
        text(
            """
            CREATE TABLE limit_host (
                pk_limit_host varchar(36) PRIMARY KEY, pk_limit_record varchar(36) NOT NULL,
                str_host_name varchar(256) NOT NULL, str_reported_name varchar(256) NOT NULL,
                int_tokens integer NOT NULL DEFAULT 1 CHECK (int_tokens > 0), str_user varchar(64),
                ts_reported timestamptz NOT NULL DEFAULT current_timestamp, UNIQUE (pk_limit_record, str_host_name)
            )
            """
        )
    )
