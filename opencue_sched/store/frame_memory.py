"""The memory that single frames ask for, and how it raises what their layers ask for.

A frame that needed more memory than its layer asks for has a row in our table ``opencue_sched_frame_memory``: the
memory that it asks for when it starts again. Once several frames of a layer have a row (``frames_to_raise``, three by
default), the layer asks for the memory of the third of them, counted from the one that asks for the most. So a single
frame that needs much more than the others does not raise the layer. No frame asks for more memory than the largest
host has that could ever run it.

The row of a frame is written only by a transaction that has locked the frame. Layers are locked after frames, in id
order. All memory is in KB.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence

from sqlalchemy import Connection, TextClause, text

from opencue_sched.store.lookups import row_of, same_key
from opencue_sched.store.procs import Run
from opencue_sched.store.tags import compared_tag, compared_tags

MEMORY_INCREASE_KB = 2_097_152
"""How much more memory a frame asks for after a memory failure when its service does not say: 2 GB, as in OpenCue's
schema."""

# The memory of the largest host that could ever run a frame of the layer: of any state, with one of the layer's tags,
# in the job's facility and in an allocation to which the show has a subscription. Read only for frames that need more
# memory, which are few. OFFSET 0 has the tags of each host looked up: a transaction that ends runs joins row by row,
# and would compare each host with every host that has one of the tags.
_LARGEST_HOST = f"""(
    SELECT max(host.int_mem)
      FROM subscription
      JOIN alloc ON alloc.pk_alloc = subscription.pk_alloc AND alloc.pk_facility = job.pk_facility
      JOIN host ON host.pk_alloc = alloc.pk_alloc
     WHERE subscription.pk_show = job.pk_show AND EXISTS (
         SELECT 1 FROM host_tag
          WHERE host_tag.pk_host = host.pk_host
            AND {compared_tag("host_tag.str_tag")} = ANY({compared_tags("layer.str_tags")})
         OFFSET 0
     )
)"""  # noqa: S608 - only our own constants

# For each of these layers, the memory of the largest host that could ever run one of the layer's frames.
_LARGEST_HOSTS = text(
    f"""
    SELECT layer.pk_layer AS id, {_LARGEST_HOST} AS memory
      FROM layer JOIN job ON job.pk_job = layer.pk_job
     WHERE layer.pk_layer = ANY(CAST(:layers AS varchar[]))
    """  # noqa: S608 - only our own constant
)
# Have frames that failed for want of memory ask for more. The increase is the show's override for the layer's first
# service, else the service's, else :increase; LIMIT, because two services of one name must not fail the statement.
# Where no host could run the frame any more, least() passes over the NULL, and nothing bounds the increase.
_ASK_AFTER_FAILURES = text(
    f"""
    INSERT INTO opencue_sched_frame_memory AS asked (pk_frame, pk_layer, memory_kb)
    SELECT failed.frame, layer.pk_layer, least({_LARGEST_HOST}, failed.reserved + coalesce(
               (SELECT show_service.int_min_memory_increase FROM show_service
                 WHERE show_service.pk_show = job.pk_show AND show_service.str_name = service.name),
               (SELECT int_min_memory_increase FROM service of_all WHERE of_all.str_name = service.name LIMIT 1),
               :increase))
      FROM json_to_recordset(CAST(:rows AS json)) AS failed(frame varchar, layer varchar, reserved bigint)
      JOIN {row_of("layer", "layer", "pk_layer = failed.layer")} ON true
      JOIN {row_of("job", "job", "pk_job = layer.pk_job")} ON true
     CROSS JOIN LATERAL (SELECT trim(split_part(layer.str_services, ',', 1)) AS name) service
     ORDER BY failed.frame
    ON CONFLICT (pk_frame) DO UPDATE SET memory_kb = greatest(asked.memory_kb, excluded.memory_kb)
    RETURNING pk_frame, memory_kb
    """  # noqa: S608 - only our own constants
)
# The frames among these that used more memory than their layer asks for, and than they ask for themselves.
_ABOVE_THEIR_MEMORY = text(
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
_ASK_FOR_PEAKS = text(
    """
    WITH locked AS (
        SELECT frame.pk_frame, frame.pk_layer, wanted.memory
          FROM json_to_recordset(CAST(:rows AS json)) AS wanted(frame varchar, memory bigint)
          JOIN frame ON frame.pk_frame = wanted.frame
         ORDER BY frame.pk_frame FOR NO KEY UPDATE OF frame SKIP LOCKED)
    INSERT INTO opencue_sched_frame_memory AS asked (pk_frame, pk_layer, memory_kb)
    SELECT pk_frame, pk_layer, memory FROM locked
    ON CONFLICT (pk_frame) DO UPDATE SET memory_kb = excluded.memory_kb WHERE asked.memory_kb < excluded.memory_kb
    """
)


def _raise_layers(*, also_set: str = "", locked_layers: str = "", condition: str = "") -> TextClause:
    """The statement that raises layers to the memory that enough of their frames ask for; it answers with the memory of
    each layer that has enough of them.

    ``also_set`` are further columns to set, ``locked_layers`` says what to do about layers that another transaction has
    locked (they are waited for otherwise), and ``condition`` is a further condition on ``layer`` and ``ranked``.
    """
    return text(
        f"""
        WITH locked AS (
            SELECT layer.pk_layer, show.b_scheduler_managed AS managed
              FROM layer JOIN job ON job.pk_job = layer.pk_job JOIN show ON show.pk_show = job.pk_show
             WHERE layer.pk_layer = ANY(CAST(:layers AS varchar[]))
             ORDER BY layer.pk_layer FOR NO KEY UPDATE OF layer {locked_layers})
        UPDATE layer SET {also_set}int_mem_min = greatest(layer.int_mem_min, ranked.memory)
          FROM locked CROSS JOIN LATERAL (
               SELECT memory_kb AS memory FROM opencue_sched_frame_memory asked
                WHERE asked.pk_layer = locked.pk_layer
                ORDER BY memory_kb DESC OFFSET CASE WHEN locked.managed THEN :frames - 1 ELSE 0 END LIMIT 1) ranked
         WHERE {same_key("layer.pk_layer", "locked.pk_layer")} {condition}
        RETURNING layer.pk_layer, layer.int_mem_min
        """  # noqa: S608 - only our own words
    )


# After failures a layer is no longer optimized either: nothing lowers its memory again.
_RAISE_AFTER_FAILURES = _raise_layers(also_set="b_optimize = false, ")
_RAISE_FOR_PEAKS = _raise_layers(locked_layers="SKIP LOCKED", condition="AND layer.int_mem_min < ranked.memory")
# Delete what frames of these jobs ask for.
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
    """Have frames that failed for want of memory ask for what they had reserved plus the increase of their service
    (MEMORY_INCREASE_KB where the service has none). The caller has locked the frames.

    Once ``frames_to_raise`` frames of a layer ask for memory of their own, the layer asks for that of the last of them,
    counted from the one that asks for the most, and is no longer optimized. In a show that is not managed one frame is
    enough, because a Cuebot does not read what frames ask for.

    Returns the KB that each of the frames asks for now, by frame id, and the KB that each layer with enough such frames
    asks for now, by layer id.
    """
    rows = [{"frame": run.frame_id, "layer": run.layer_id, "reserved": run.memory_reserved_kb} for run in failed]
    parameters = {"rows": json.dumps(rows), "increase": MEMORY_INCREASE_KB}
    frames = {row.pk_frame: row.memory_kb for row in connection.execute(_ASK_AFTER_FAILURES, parameters)}
    raising = {"layers": list({run.layer_id for run in failed}), "frames": frames_to_raise}
    layers = {row.pk_layer: row.int_mem_min for row in connection.execute(_RAISE_AFTER_FAILURES, raising)}
    return frames, layers


def note_peaks(
    connection: Connection, peaks_kb: Mapping[str, int], layer_ids: Collection[str], *, frames_to_raise: int
) -> None:
    """Have running frames ask for the peak of their memory where their layer asks for less. ``peaks_kb`` has the peaks
    by frame id, ``layer_ids`` the layers of these frames, which are raised as in `ask_for_more`.

    No statement waits for a lock: a frame or layer that another transaction has locked is left to the next report.
    """
    rows = [{"frame": frame, "peak": peak} for frame, peak in peaks_kb.items()]
    above = connection.execute(_ABOVE_THEIR_MEMORY, {"rows": json.dumps(rows)}).all()
    if above:
        largest = largest_hosts(connection, {row.layer for row in above})
        wanted = [{"frame": row.frame, "memory": min(row.peak, largest.get(row.layer, row.peak))} for row in above]
        connection.execute(_ASK_FOR_PEAKS, {"rows": json.dumps(wanted)})
    connection.execute(_RAISE_FOR_PEAKS, {"layers": list(layer_ids), "frames": frames_to_raise})


def forget_jobs(connection: Connection, job_ids: Collection[str]) -> None:
    """Delete what the frames of these jobs ask for."""
    connection.execute(_FORGET, {"jobs": list(job_ids)})
