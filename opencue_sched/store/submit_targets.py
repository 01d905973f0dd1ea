"""What a job that is put in refers to: its show and folder, facilities, departments, limits, and jobs it waits for."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from sqlalchemy import Connection, text

from opencue_sched.domain.states import FrameState

_SHOW = text(
    """
    SELECT pk_show, str_name, b_active, b_paused, b_scheduler_managed, int_default_min_cores, int_default_max_cores,
           int_default_max_gpus
      FROM show
     WHERE str_name = :name
        OR pk_show IN (SELECT pk_show FROM show_alias WHERE show_alias.str_name = :name)
     ORDER BY (str_name = :name) DESC, pk_show LIMIT 1
    """
)
_FOLDERS = text(
    """
    SELECT pk_folder, str_name, pk_dept, pk_parent_folder IS NULL AS root, int_job_min_cores, int_job_max_cores,
           int_job_min_gpus, int_job_max_gpus
      FROM folder WHERE pk_show = :show ORDER BY pk_parent_folder IS NULL DESC, b_default DESC, pk_folder
    """
)
_NAMES = text(
    """
    SELECT 'facility' AS kind, pk_facility AS id, str_name AS name, b_default AS is_default FROM facility
    UNION ALL SELECT 'dept', pk_dept, str_name, b_default FROM dept
    UNION ALL SELECT 'limit', pk_limit_record, str_name, false FROM limit_record
    """
)
_JOBS = text(
    """
    SELECT DISTINCT ON (str_name) pk_job, str_name, str_state
      FROM job WHERE str_name = ANY(CAST(:names AS varchar[]))
     ORDER BY str_name, (str_visible_name IS NOT NULL) DESC, ts_started DESC
    """
)
_LAYERS = text(
    """
    SELECT pk_layer, pk_job, str_name, str_range, int_chunk_size FROM layer
     WHERE pk_job = ANY(CAST(:jobs AS varchar[])) ORDER BY pk_job, int_dispatch_order
    """
)
# Whoever ends a frame holds its job_stat row, so after this lock no frame of the jobs ends until we commit.
_LOCK_JOBS = text("SELECT pk_job FROM job_stat WHERE pk_job = ANY(CAST(:jobs AS varchar[])) ORDER BY pk_job FOR SHARE")
_JOB_STATES = text("SELECT pk_job, str_state FROM job WHERE pk_job = ANY(CAST(:jobs AS varchar[]))")
_LAYER_PROGRESS = text(
    """
    SELECT pk_layer, bool_and(str_state = ANY(CAST(:done AS varchar[]))) AS every_frame,
           bool_or(str_state = ANY(CAST(:done AS varchar[]))) AS any_frame
      FROM frame WHERE pk_layer = ANY(CAST(:layers AS varchar[])) GROUP BY pk_layer
    """
)
_FRAMES = text(
    """
    SELECT pk_frame, pk_layer, int_number, str_state FROM frame WHERE pk_layer = ANY(CAST(:layers AS varchar[]))
     ORDER BY pk_layer, int_dispatch_order
    """
)


@dataclass(frozen=True, slots=True)
class ShowRow:
    """The show a job goes to. Cores in centicores."""

    id: str
    name: str
    active: bool
    paused: bool
    managed: bool
    default_min_cores: int
    default_max_cores: int
    default_max_gpus: int


@dataclass(frozen=True, slots=True)
class FolderRow:
    """A folder of a show, the root first. What it says about its jobs is -1 where it says nothing; centicores."""

    id: str
    name: str
    dept_id: str
    root: bool
    job_min_cores: int
    job_max_cores: int
    job_min_gpus: int
    job_max_gpus: int


@dataclass(frozen=True, slots=True)
class Named:
    """A facility, department or limit."""

    id: str
    name: str
    default: bool


@dataclass(frozen=True, slots=True)
class OtherJob:
    """A job that another one is to wait for: the live one of that name, else the last."""

    id: str
    name: str
    state: str


@dataclass(frozen=True, slots=True)
class OtherLayer:
    """A layer of such a job."""

    id: str
    job_id: str
    name: str
    frame_range: str
    chunk_size: int


@dataclass(frozen=True, slots=True)
class OtherFrame:
    """A frame of such a layer."""

    id: str
    layer_id: str
    number: int
    state: str


@dataclass(frozen=True, slots=True)
class LayerProgress:
    """Whether all, or any, of a layer's frames are over."""

    every_frame: bool
    any_frame: bool


def find_show(connection: Connection, name: str) -> ShowRow | None:
    """The show of this name, or with this alias."""
    row = connection.execute(_SHOW, {"name": name}).one_or_none()
    return None if row is None else ShowRow(*row)


def folders_of(connection: Connection, show_id: str) -> list[FolderRow]:
    """The show's folders, the root first."""
    return [FolderRow(*row) for row in connection.execute(_FOLDERS, {"show": show_id})]


def names(connection: Connection) -> Mapping[str, list[Named]]:
    """All facilities, departments and limits, by kind: ``facility``, ``dept``, ``limit``."""
    found: dict[str, list[Named]] = {"facility": [], "dept": [], "limit": []}
    for row in connection.execute(_NAMES):
        found[row.kind].append(Named(row.id, row.name, row.is_default))
    return found


def find_jobs(connection: Connection, job_names: Collection[str]) -> dict[str, OtherJob]:
    """Jobs by name."""
    rows = connection.execute(_JOBS, {"names": list(job_names)})
    return {row.str_name: OtherJob(row.pk_job, row.str_name, row.str_state) for row in rows}


def layers_of(connection: Connection, job_ids: Collection[str]) -> list[OtherLayer]:
    """All layers of these jobs."""
    return [OtherLayer(*row) for row in connection.execute(_LAYERS, {"jobs": list(job_ids)})]


def frames_of(connection: Connection, layer_ids: Collection[str]) -> list[OtherFrame]:
    """All frames of these layers, in dispatch order."""
    return [OtherFrame(*row) for row in connection.execute(_FRAMES, {"layers": list(layer_ids)})]


def hold_jobs(connection: Connection, job_ids: Collection[str]) -> dict[str, str]:
    """Keep the frames of these jobs from ending until this transaction ends; the jobs' states.

    Without it a frame could end between our look at its state and our commit, and nobody would satisfy the dependency.
    """
    connection.execute(_LOCK_JOBS, {"jobs": list(job_ids)})
    return {row.pk_job: row.str_state for row in connection.execute(_JOB_STATES, {"jobs": list(job_ids)})}


def layer_progress(
    connection: Connection, layer_ids: Collection[str], done: Collection[FrameState]
) -> dict[str, LayerProgress]:
    """How far these layers are; ``done`` are the states that satisfy a dependency."""
    rows = connection.execute(_LAYER_PROGRESS, {"layers": list(layer_ids), "done": [state.value for state in done]})
    return {row.pk_layer: LayerProgress(row.every_frame, row.any_frame) for row in rows}
