"""What a database's catalogue says about its own objects, as plain text to compare."""

from __future__ import annotations

from sqlalchemy import Connection, text

Catalog = dict[str, dict[str, str]]
"""Kind of object -> name -> definition."""

_QUERIES = {
    "table": """
        SELECT relname, coalesce(array_to_string(reloptions, ' '), '') FROM pg_class
        WHERE relnamespace = current_schema()::regnamespace AND relkind = 'r'
    """,
    "column": """
        SELECT c.relname || '.' || a.attname,
               format_type(a.atttypid, a.atttypmod) || CASE WHEN a.attnotnull THEN ' NOT NULL' ELSE '' END
               || CASE WHEN pg_get_expr(d.adbin, d.adrelid) !~ '^NULL(::|$)'
                       THEN ' DEFAULT ' || pg_get_expr(d.adbin, d.adrelid) ELSE '' END
        FROM pg_class c
        JOIN pg_attribute a ON a.attrelid = c.oid AND a.attnum > 0 AND NOT a.attisdropped
        LEFT JOIN pg_attrdef d ON d.adrelid = c.oid AND d.adnum = a.attnum
        WHERE c.relnamespace = current_schema()::regnamespace AND c.relkind IN ('r', 'v')
    """,
    "constraint": """
        SELECT conrelid::regclass || '.' || conname, pg_get_constraintdef(oid) FROM pg_constraint
        WHERE connamespace = current_schema()::regnamespace AND contype <> 'n'
    """,
    "index": """
        SELECT indexname, replace(indexdef, schemaname || '.', '') FROM pg_indexes
        WHERE schemaname = current_schema()
    """,
    "sequence": """
        SELECT sequencename, data_type::text FROM pg_sequences WHERE schemaname = current_schema()
    """,
    "view": """
        SELECT viewname, definition FROM pg_views WHERE schemaname = current_schema()
    """,
    "function": """
        SELECT p.proname || '(' || pg_get_function_identity_arguments(p.oid) || ')', pg_get_functiondef(p.oid)
        FROM pg_proc p
        WHERE p.pronamespace = current_schema()::regnamespace AND p.prokind = 'f' AND p.probin IS NULL
    """,
    "trigger": """
        SELECT tgrelid::regclass || '.' || tgname, pg_get_triggerdef(t.oid) FROM pg_trigger t
        JOIN pg_class c ON c.oid = t.tgrelid
        WHERE NOT tgisinternal AND c.relnamespace = current_schema()::regnamespace
    """,
}


def read_catalog(connection: Connection) -> Catalog:
    """Everything in the current schema but what bears our prefix."""
    return {
        kind: {row[0]: row[1] for row in connection.execute(text(query)) if "opencue_sched_" not in row[0]}
        for kind, query in _QUERIES.items()
    }
