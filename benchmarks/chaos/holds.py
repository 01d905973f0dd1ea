"""Hosts that are reserved for layers, as the reservation task reserves them, and a witness of bookings there.

The witness is in the database: a trigger that looks at each booking when its transaction is committed, while that still
has the lock on its host, so it sees the hold that was there. The hold of a layer whose frame it booked is gone by then.
"""

from __future__ import annotations

import random

from sqlalchemy import Connection, text

from opencue_sched.domain.hosts import Reservation
from opencue_sched.store.reservations import grant_reservations

# Longer than any frame of these runs; the reservation task ends most of them sooner, because their layers are not wide.
RESERVED_SECONDS = 600.0
FREE_IN_SECONDS = 8.0
MOST_AT_ONCE = 4

# By the backfill rule a frame may be there whose layer has a history, where as much was idle as is reserved: at the
# best, the largest of those that the transaction booked on the host came last.
_WITNESS = """
CREATE TABLE chaos_against_hold (pk_proc varchar(36), why text);
CREATE FUNCTION chaos_witness_hold() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    INSERT INTO chaos_against_hold
    SELECT NEW.pk_proc, 'proc ' || NEW.pk_proc || ' of layer ' || NEW.pk_layer || ' on ' || h.str_name
           || ', held for layer ' || hold.pk_layer
    FROM opencue_sched_hold hold
    JOIN host h ON h.pk_host = hold.pk_host
    JOIN layer ON layer.pk_layer = hold.pk_layer
    WHERE hold.pk_host = NEW.pk_host AND hold.pk_layer <> NEW.pk_layer AND hold.until > clock_timestamp()
      AND NOT (
          hold.free_at IS NOT NULL
          AND EXISTS (SELECT FROM layer_usage u WHERE u.pk_layer = NEW.pk_layer AND u.int_frame_success_count > 0)
          AND hold.cores * 100 <= h.int_cores_idle + (
              SELECT max(p.int_cores_reserved) FROM proc p
              WHERE p.pk_host = NEW.pk_host AND p.ts_booked = NEW.ts_booked)
      );
    RETURN NULL;
END
$$;
CREATE CONSTRAINT TRIGGER chaos_witness_hold AFTER INSERT ON proc DEFERRABLE INITIALLY DEFERRED
    FOR EACH ROW EXECUTE FUNCTION chaos_witness_hold();
"""

_WAITING = text(
    """
    SELECT l.pk_layer, l.pk_job, l.int_cores_min, h.pk_host, h.str_name, h.int_cores,
           CAST(extract(epoch FROM clock_timestamp()) AS double precision) AS now
    FROM layer_stat s
    JOIN layer l ON l.pk_layer = s.pk_layer
    JOIN host h ON string_to_array(replace(l.str_tags, ' ', ''), '|') && string_to_array(h.str_tags, ' ')
    WHERE s.int_waiting_count > 0
    ORDER BY l.pk_layer, h.pk_host
    """
)
_AGAINST = text("SELECT why FROM chaos_against_hold ORDER BY pk_proc")


def plant_witness(connection: Connection) -> None:
    """Watch the bookings of this database from now on."""
    connection.execute(text(_WITNESS))


def against_holds(connection: Connection) -> list[str]:
    """What was booked against a hold, other than by the backfill rule."""
    return list(connection.execute(_AGAINST).scalars())


def hold_hosts(connection: Connection, chance: random.Random) -> list[str]:
    """Hold some hosts for layers that wait and may use them, with room for a frame or for more; their names."""
    rows = connection.execute(_WAITING).all()
    holds = {}
    for row in chance.sample(rows, min(len(rows), MOST_AT_ONCE)):
        cores = chance.randint(max(1, row.int_cores_min // 100), row.int_cores // 100)
        free_at = row.now + FREE_IN_SECONDS if chance.random() < 0.5 else None
        holds[row.pk_host] = Reservation(row.pk_layer, row.pk_job, cores, 0, 0, row.now + RESERVED_SECONDS, free_at)
    names = {row.pk_host: row.str_name for row in rows}
    return sorted(names[host_id] for host_id in grant_reservations(connection, holds))
