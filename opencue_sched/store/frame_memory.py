"""The memory that frames ask for by themselves, and layers once several of their frames did.

A frame that needed more memory than its layer asks for has a row in our table ``opencue_sched_frame_memory``: what it
asks for when it starts again. A layer asks for the memory of the third of its frames, counted from the one that asks
for the most, so a single frame that needs much more than the others does not raise these. Nothing asks for more than
the largest host has that the show may use.

Rows of a frame are written by transactions that have locked the frame; then layers are locked, in id order. All memory
is in KB.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence

from sqlalchemy import Connection, TextClause, text

from opencue_sched.store.procs import Run
from opencue_sched.store.tags import compared_tag, compared_tags

MEMORY_INCREASE_KB = 2_097_152
"""How much more memory is asked for after a memory failure when the service does not say."""

# The memory of the largest host that could ever run a frame of the layer: of any state, with one of the layer's tags,
# in the job's facility and in an allocation to which the show has a subscription. Read only for frames that need more
# memory, which are few.
_LARGEST_HOST = f"""(
    SELECT max(host.int_mem)
      FROM subscription
      JOIN alloc ON alloc.pk_alloc = subscription.pk_alloc AND alloc.pk_facility = job.pk_facility
      JOIN host ON host.pk_alloc = alloc.pk_alloc
     WHERE subscription.pk_show = job.pk_show AND EXISTS (
         SELECT 1 FROM host_tag
          WHERE host_tag.pk_host = host.pk_host
            AND {compared_tag("host_tag.str_tag")} = ANY({compared_tags("layer.str_tags")})
     )
)"""  # noqa: S608 - only our own constants

# For each of these layers, the memory of the largest host that could ever run a frame of it.
_LARGEST_HOSTS = text(
    f"""
    SELECT layer.pk_layer AS id, {_LARGEST_HOST} AS memory
      FROM layer JOIN job ON job.pk_job = layer.pk_job
     WHERE layer.pk_layer = ANY(CAST(:layers AS varchar[]))
    """  # noqa: S608 - only our own constant
)
# Have frames that failed for want of memory ask for more. The increase is the show's override for the layer's first
# service, else the service's, else :increase.
_AFTER_FAILURES = text(
    f"""
    INSERT INTO opencue_sched_frame_memory AS asked (pk_frame, pk_layer, memory_kb)
    SELECT failed.frame, layer.pk_layer, least({_LARGEST_HOST}, failed.reserved + coalesce(
               (SELECT show_service.int_min_memory_increase FROM show_service
                 WHERE show_service.pk_show = job.pk_show AND show_service.str_name = service.name),
               (SELECT int_min_memory_increase FROM service known WHERE known.str_name = service.name LIMIT 1),
               :increase))
      FROM json_to_recordset(CAST(:rows AS json)) AS failed(frame varchar, layer varchar, reserved bigint)
      JOIN layer ON layer.pk_layer = failed.layer JOIN job USING (pk_job)
     CROSS JOIN LATERAL (SELECT trim(split_part(layer.str_services, ',', 1)) AS name) service
     ORDER BY failed.frame
    ON CONFLICT (pk_frame) DO UPDATE SET memory_kb = greatest(asked.memory_kb, excluded.memory_kb)
    RETURNING pk_frame, memory_kb
    """  # noqa: S608 - only our own constant
)
# Frames that used more memory than their layer has and than they have asked for yet.
_ASKING = text(
    """
    SELECT used.frame, layer.pk_layer AS layer, used.peak
      FROM json_to_recordset(CAST(:rows AS json)) AS used(frame varchar, peak bigint)
      JOIN frame ON frame.pk_frame = used.frame
      JOIN layer ON layer.pk_layer = frame.pk_layer
      LEFT JOIN opencue_sched_frame_memory asked ON asked.pk_frame = used.frame
     WHERE layer.int_mem_min < used.peak AND (asked.memory_kb IS NULL OR asked.memory_kb < used.peak)
    """
)
# Have running frames ask for the memory that they use. A frame that another transaction has locked is left to the next
# report.
_AS_REPORTED = text(
    """
    WITH needed AS (
        SELECT frame.pk_frame, frame.pk_layer, wanted.memory
          FROM json_to_recordset(CAST(:rows AS json)) AS wanted(frame varchar, memory bigint)
          JOIN frame ON frame.pk_frame = wanted.frame
         ORDER BY frame.pk_frame FOR NO KEY UPDATE OF frame SKIP LOCKED)
    INSERT INTO opencue_sched_frame_memory AS asked (pk_frame, pk_layer, memory_kb)
    SELECT pk_frame, pk_layer, memory FROM needed
    ON CONFLICT (pk_frame) DO UPDATE SET memory_kb = excluded.memory_kb WHERE asked.memory_kb < excluded.memory_kb
    """
)


def _raise_layers(columns: str, lock: str, which: str) -> TextClause:
    """The statement that raises layers to the memory that enough of their frames ask for. ``columns`` are set as well,
    ``lock`` says what to do about locked layers, ``which`` is a further condition."""
    return text(
        f"""
        WITH locked AS (
            SELECT layer.pk_layer, show.b_scheduler_managed AS managed
              FROM layer JOIN job ON job.pk_job = layer.pk_job JOIN show ON show.pk_show = job.pk_show
             WHERE layer.pk_layer = ANY(CAST(:layers AS varchar[]))
             ORDER BY layer.pk_layer FOR NO KEY UPDATE OF layer {lock}),
        ranked AS (
            SELECT pk_layer, memory_kb AS memory,
                   row_number() OVER (PARTITION BY pk_layer ORDER BY memory_kb DESC, pk_frame) AS place
              FROM opencue_sched_frame_memory WHERE pk_layer = ANY(CAST(:layers AS varchar[])))
        UPDATE layer SET {columns}int_mem_min = greatest(layer.int_mem_min, ranked.memory)
          FROM locked JOIN ranked ON ranked.pk_layer = locked.pk_layer
         WHERE layer.pk_layer = locked.pk_layer {which}
           AND ranked.place = CASE WHEN locked.managed THEN :frames ELSE 1 END
        RETURNING layer.pk_layer, layer.int_mem_min
        """  # noqa: S608 - only our own words
    )


_RAISE_AFTER_FAILURES = _raise_layers("b_optimize = false, ", "", "")
_RAISE_AS_REPORTED = _raise_layers("", "SKIP LOCKED", "AND layer.int_mem_min < ranked.memory")
# Forget what frames of these jobs ask for.
_FORGET = text(
    """
    DELETE FROM opencue_sched_frame_memory asked USING layer
     WHERE layer.pk_layer = asked.pk_layer AND layer.pk_job = ANY(CAST(:jobs AS varchar[]))
    """
)


def largest_hosts(connection: Connection, layer_ids: Collection[str]) -> dict[str, int]:
    """The memory of the largest host that each layer's frames could ever run on; no entry where there is none."""
    rows = connection.execute(_LARGEST_HOSTS, {"layers": list(layer_ids)})
    return {row.id: row.memory for row in rows if row.memory is not None}


def ask_for_more(
    connection: Connection, failed: Sequence[Run], *, frames_to_raise: int
) -> tuple[dict[str, int], dict[str, int]]:
    """Have frames that failed for want of memory ask for what they had and the service's increase (2 GB where the
    service has none).

    A layer of which ``frames_to_raise`` frames needed more asks for what so many of them need, and is no longer
    optimized. In a show that is not managed by us one frame is enough, because a Cuebot does not read what frames ask
    for. Returns what each frame, and each layer with so many frames, asks for now.
    """
    rows = [{"frame": run.frame_id, "layer": run.layer_id, "reserved": run.memory_reserved_kb} for run in failed]
    parameters = {"rows": json.dumps(rows), "increase": MEMORY_INCREASE_KB}
    frames = {row.pk_frame: row.memory_kb for row in connection.execute(_AFTER_FAILURES, parameters)}
    raising = {"layers": list({run.layer_id for run in failed}), "frames": frames_to_raise}
    layers = {row.pk_layer: row.int_mem_min for row in connection.execute(_RAISE_AFTER_FAILURES, raising)}
    return frames, layers


def note_peaks(
    connection: Connection, peaks_kb: Mapping[str, int], layer_ids: Collection[str], *, frames_to_raise: int
) -> None:
    """Have running frames (id -> peak memory) that need more than their layer asks for ask for their peak, and raise
    layers as `ask_for_more` does, without waiting for a lock."""
    rows = [{"frame": frame, "peak": peak} for frame, peak in peaks_kb.items()]
    asking = connection.execute(_ASKING, {"rows": json.dumps(rows)}).all()
    if asking:
        largest = largest_hosts(connection, {row.layer for row in asking})
        wanted = [{"frame": row.frame, "memory": min(row.peak, largest.get(row.layer, row.peak))} for row in asking]
        connection.execute(_AS_REPORTED, {"rows": json.dumps(wanted)})
    connection.execute(_RAISE_AS_REPORTED, {"layers": list(layer_ids), "frames": frames_to_raise})


def forget_jobs(connection: Connection, job_ids: Collection[str]) -> None:
    """Drop what the frames of these jobs asked for."""
    connection.execute(_FORGET, {"jobs": list(job_ids)})
