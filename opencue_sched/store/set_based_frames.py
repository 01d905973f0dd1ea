"""Counters and history of a Cuebot's database, written once for all frames that a booking starts.

Two AFTER triggers of Cuebot's on ``frame`` count frames by state and write their history, row by row. Where an operator
asks for it (``opencue-sched migrate --set-based-frames``), their functions return early for a frame that a booking
starts, and count the frames they left out; the booking looks at that count, and writes for all at once what was left
out of both (`store.booking`). For everybody else, and for every other change, they do as Cuebot wrote them.

Nothing here is remembered outside the two functions: what they say now is what is in force. A function whose text is
not known is left as it is, because what a booking writes in its place would be a guess.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass

from sqlalchemy import Connection, text

from opencue_sched.errors import SchedulerError

COUNTS = "update_frame_status_counts"
"""The trigger that counts frames by state, in layer_stat and job_stat."""

HISTORY = "frame_history_open"
"""The trigger that writes frame_history."""

MARKER = "opencue_sched.starting_frames"
"""The setting that a transaction marks with its own id while it starts frames. Local to the transaction."""

UNCOUNTED = "opencue_sched.uncounted_frames"
"""How many frames the function of COUNTS has left out. Local to the transaction."""

UNRECORDED = "opencue_sched.unrecorded_frames"
"""How many frames the function of HISTORY has left out. Local to the transaction."""

_TALLIES = {COUNTS: UNCOUNTED, HISTORY: UNRECORDED}

KNOWN_TEXTS: Mapping[str, frozenset[str]] = {
    COUNTS: frozenset({"1596f57f12879fa3a43e92898add1bc5e78a8f6fdd509ed54b36d80f9f4be9a8"}),
    HISTORY: frozenset({"c04901fd3722ea8f8049e799280d486239ff619390522a0d287709e02c942db6"}),
}
"""SHA-256 of each text whose effect on a starting frame is the one that a booking writes: Cuebot's from V43 to V47."""

_AFTER_UPDATE_FOR_EACH_ROW = 1 | 16
"""pg_trigger.tgtype of both triggers: TRIGGER_TYPE_ROW and TRIGGER_TYPE_UPDATE, without TRIGGER_TYPE_BEFORE."""

# Added to the functions. Changes that a trigger makes in turn (depth 2) are not left out: only the booking's own rows
# may be counted.
_EARLY_RETURN = """
    -- opencue-sched: left to the booking that starts the frame (opencue-sched migrate --set-based-frames)
    IF current_setting('{marker}', true) = CAST(pg_current_xact_id() AS text)
        AND pg_trigger_depth() = 1 AND OLD.str_state = 'WAITING' AND NEW.str_state = 'RUNNING' THEN
        PERFORM set_config('{tally}', CAST(CAST(current_setting('{tally}') AS integer) + 1 AS text), true);
        RETURN NULL;
    END IF;
    -- opencue-sched: end"""
_ADDED = re.compile(r"\n *-- opencue-sched: left to the booking.*?-- opencue-sched: end", re.DOTALL)
_BODY_BEGINS = re.compile(r"^BEGIN[ \t]*$", re.MULTILINE | re.IGNORECASE)

# The named triggers on frame, with the functions that they call.
_FUNCTIONS = text(
    """
    SELECT t.tgname AS trigger, CAST(CAST(p.oid AS regproc) AS text) AS function, p.prosrc AS body,
           pg_get_functiondef(p.oid) AS definition, t.tgenabled IN ('O', 'A') AS enabled, t.tgtype AS type
    FROM pg_trigger t JOIN pg_proc p ON p.oid = t.tgfoid
    WHERE t.tgrelid = to_regclass('frame') AND t.tgname = ANY(CAST(:triggers AS name[]))
    ORDER BY t.tgname
    """
)
# Whether the schema queues the history of frames.
_QUEUES_HISTORY = text("SELECT to_regclass('frame_history_queue') IS NOT NULL")


@dataclass(frozen=True)
class _Function:
    """One of Cuebot's two trigger functions, as the database has it."""

    trigger: str
    name: str
    body: str
    definition: str
    fires: bool
    """Whether the function's trigger is enabled, and runs after each row that an UPDATE changes."""

    @property
    def leaves_out(self) -> bool:
        """Whether the function has our addition, and so leaves out frames that bookings start."""
        return self.body != self.of_cuebot

    @property
    def of_cuebot(self) -> str:
        """The function's body without what we added."""
        return _ADDED.sub("", self.body)

    @property
    def with_early_return(self) -> str:
        """Cuebot's body with our addition at its beginning."""
        added = _EARLY_RETURN.format(marker=MARKER, tally=_TALLIES[self.trigger])
        return _BODY_BEGINS.sub(lambda begin: begin.group() + added, self.of_cuebot, count=1)

    def is_known(self, known: Mapping[str, frozenset[str]]) -> bool:
        """Whether Cuebot's body is one of ``known``, by trigger, that a booking can stand in for."""
        return hashlib.sha256(self.of_cuebot.encode()).hexdigest() in known[self.trigger]

    def replace(self, connection: Connection, body: str) -> None:
        """Give the function another body; its owner, privileges and options stay."""
        if body != self.body:
            # Past SQLAlchemy: a body may have percent and colon signs of its own.
            connection.connection.cursor().execute(self.definition.replace(self.body, body))


@dataclass(frozen=True)
class FramesWay:
    """How the frames that bookings start get into counters and history."""

    on: bool
    """Whether bookings write both: both functions leave them out, and have a known text otherwise."""
    changed: tuple[str, ...]
    """The names of the functions that have our early return."""
    obstacles: tuple[str, ...]
    """Why bookings cannot write them in this database, each a clause; empty where they can."""


def _functions(connection: Connection) -> list[_Function]:
    """The functions of both triggers, as they are in the database now."""
    return [
        _Function(
            row.trigger, row.function, row.body, row.definition, row.enabled and row.type == _AFTER_UPDATE_FOR_EACH_ROW
        )
        for row in connection.execute(_FUNCTIONS, {"triggers": [COUNTS, HISTORY]})
    ]


def read_frames_way(connection: Connection, known: Mapping[str, frozenset[str]] = KNOWN_TEXTS) -> FramesWay:
    """The way of frames that bookings start in this database. ``known`` has the texts of functions, by trigger, that a
    booking can stand in for."""
    functions = _functions(connection)
    there = {function.trigger for function in functions}
    obstacles = [f"frame has no trigger {name}" for name in (COUNTS, HISTORY) if name not in there]
    for function in functions:
        if not function.fires:
            obstacles.append(f"the trigger {function.trigger} is disabled, or does not run after each row")
        elif not function.is_known(known):
            obstacles.append(f"the text of {function.name} is none that this program knows (Cuebot's V43 to V47)")
    if connection.scalar(_QUEUES_HISTORY):
        obstacles.append("this Cuebot queues its history")
    changed = tuple(function.name for function in functions if function.leaves_out)
    return FramesWay(not obstacles and len(changed) == len(_TALLIES), changed, tuple(obstacles))


def switch_on(connection: Connection, known: Mapping[str, frozenset[str]] = KNOWN_TEXTS) -> None:
    """Have both functions leave to bookings what they start. Raises SchedulerError, with nothing changed, where one of
    them is not known."""
    way = read_frames_way(connection, known)
    if way.obstacles:
        raise SchedulerError(
            f"counters and history cannot be written once a plan here: {'; '.join(way.obstacles)}. Cuebot's functions "
            "were left as they are"
        )
    for function in _functions(connection):
        function.replace(connection, function.with_early_return)


def switch_off(connection: Connection) -> tuple[str, ...]:
    """Take our early return out of both functions, whatever else they say; the names of those that had it."""
    changed = tuple(function for function in _functions(connection) if function.leaves_out)
    for function in changed:
        function.replace(connection, function.of_cuebot)
    return tuple(function.name for function in changed)
