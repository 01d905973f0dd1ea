"""What the proc table says of limits that are more than a number of frames, and which bookings they forbade.

A limit of machines is used by the machines that are reported and by those with a frame that the last report need not
show; of one that was never reported by every machine with a frame. From its maximum on only machines that hold it may
start a frame, and above it only the first by id, as many as remain. A reported limit of frames is used by the tokens
that are reported and by the frames that the report need not show.

What is seen of a commit's moment is what is left of it in the sample: never more than there was. The bookings of one
commit were made one after another, and nothing tells their order: the one that forbids least is taken. So all that is
judged here was certainly forbidden.
"""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from benchmarks.chaos.licences import SETTLE_WINDOW_SECONDS

OPENING_SECONDS = 1.0
"""So long before its report grows too old nothing is said of a limit any more."""

UNHEARD_SECONDS = 8.0
"""So long at most the fleet does not hear that a frame has ended: two recomputes, and some more."""

SEATS = """
SELECT coalesce(json_agg(limits), '[]') FROM (
    SELECT l.pk_limit_record AS limit, l.str_type = 'HOST' AS machines, l.int_max_value AS most,
           extract(epoch FROM l.ts_reported)::float8 AS asked, l.int_report_ttl AS life,
           extract(epoch FROM pg_xact_commit_timestamp(l.xmin))::float8 AS at,
           coalesce((SELECT json_agg(json_build_array(coalesce(h.pk_host, held.str_reported_name),
                                                      h.pk_host IS NOT NULL, held.int_tokens)
                                     ORDER BY held.str_reported_name)
                     FROM limit_host held
                     LEFT JOIN host h ON lower(h.str_name) = split_part(lower(held.str_reported_name), '.', 1)
                     WHERE held.pk_limit_record = l.pk_limit_record), '[]') AS reported,
           (SELECT count(DISTINCT p.pk_host) FROM proc p JOIN layer_limit ll USING (pk_layer)
            WHERE ll.pk_limit_record = l.pk_limit_record) AS held
    FROM limit_record l WHERE l.str_type = 'HOST' OR l.ts_reported IS NOT NULL
) limits
"""


@dataclass(frozen=True, slots=True)
class Seated:
    """A proc under such limits. ``machine`` is the id of its host; ``started`` and ``committed`` are epoch seconds."""

    id: str
    machine: str
    limits: frozenset[str]
    started: float
    committed: float


@dataclass(frozen=True, slots=True)
class Terms:
    """How a limit counts. ``reported``: who holds it as a licence server said: the machine, whether it is a host, and
    its tokens. ``asked``: when the server was asked, None: never; ``life``: seconds for which that counts, 0: for ever.
    """

    machines: bool
    most: int
    asked: float | None = None
    life: float = 0.0
    reported: tuple[tuple[str, bool, int], ...] = ()

    @classmethod
    def read(cls, row: Mapping[str, Any]) -> Terms:
        said = tuple((str(machine), bool(is_host), int(tokens)) for machine, is_host, tokens in row["reported"])
        return cls(row["machines"], int(row["most"]), row["asked"], float(row["life"]), said)

    def counts(self, proc: Seated) -> bool:
        """Whether a proc counts beside the report."""
        return self.asked is None or proc.started > self.asked - SETTLE_WINDOW_SECONDS

    def is_open(self, moment: float) -> bool:
        """Whether the report may have been too old by then."""
        return bool(self.asked is not None and self.life and moment > self.asked + self.life - OPENING_SECONDS)

    def forbids(
        self, proc: Seated, others: Iterable[Seated], gone: Iterable[Seated], unheard: Collection[str]
    ) -> int | None:
        """The use that forbade a booking, given the ``others`` that were committed by then, and those of the last
        sample that are ``gone``; None where it was allowed. ``unheard``: machines of which the fleet may not have heard
        yet that their last frame has ended; above the maximum the first may still be one of these."""
        if self.is_open(proc.committed):
            return None
        others = list(others)
        before = [other for other in others if other.committed < proc.committed]
        reported = {machine for machine, _, _ in self.reported}
        counted = reported | {other.machine for other in before if self.counts(other)}
        earlier = {other.machine for other in (*before, *gone) if other.committed < proc.committed}

        def turn(booked: Seated) -> tuple[bool, bool, str]:
            # Of one commit: first the machines that count already, then those with a frame, and last the new ones.
            return booked.machine not in counted, booked.machine not in earlier, booked.id

        of_this_commit = [other for other in others if other.committed == proc.committed]
        others = before + [other for other in of_this_commit if turn(other) < turn(proc)]
        if not self.machines:
            use = sum(tokens for _, _, tokens in self.reported) + sum(map(self.counts, others))
            return use if use >= self.most else None
        ours = {other.machine for other in others if self.counts(other)}
        artists = sum(not is_host for _, is_host, _ in self.reported)
        first = sum(machine < proc.machine for machine in ours) < self.most - artists
        if proc.machine in earlier | reported:
            use = len(ours | reported)
            return use if use > self.most and not first else None
        use = len((ours | reported) - {proc.machine})
        return use if use >= self.most and not (first and proc.machine in unheard) else None


@dataclass(frozen=True, slots=True)
class Forbidden:
    """A booking that was committed although a limit forbade it; of no booking where more machines hold a limit in a
    sample than may."""

    limit: str
    proc_id: str
    use: int
    most: int
    at: float
    why: str


@dataclass(slots=True)
class _History:
    """The terms a limit had, each with the time of its commit; the first since ever."""

    changes: list[tuple[float, Terms]] = field(default_factory=list)

    def note(self, terms: Terms, at: float) -> bool:
        """Whether they are others than before."""
        if self.changes and self.changes[-1][1] == terms:
            return False
        self.changes.append((at if self.changes else float("-inf"), terms))
        del self.changes[:-100]
        return True

    def at(self, moment: float) -> Terms:
        return next((terms for since, terms in reversed(self.changes) if since <= moment), self.changes[0][1])


class SeatJudge:
    """Looks at one sample after the other. ``judged`` counts what it looked at."""

    def __init__(self) -> None:
        self.forbidden: list[Forbidden] = []
        self.judged: Counter[str] = Counter()
        self._terms: dict[str, _History] = defaultdict(_History)
        self._known: dict[str, Seated] = {}
        self._held: dict[str, tuple[int, int]] = {}
        self._ended: deque[tuple[float, Seated]] = deque()

    def look(self, procs: Iterable[Seated], limits: Iterable[Mapping[str, Any]], at: float) -> None:
        """Judge the bookings that are new in this sample, taken ``at``, and how many machines hold each limit."""
        changed = set()
        for row in limits:
            if self._terms[row["limit"]].note(Terms.read(row), float(row["at"] or 0)):
                changed.add(row["limit"])
            self._count(row, at)
        now = {proc.id: self._known.get(proc.id, proc) for proc in procs}
        gone = [proc for proc in self._known.values() if proc.id not in now]
        new = [proc for proc in now.values() if proc.id not in self._known]
        self._known = now
        self._ended += [(at, proc) for proc in gone]
        while self._ended and self._ended[0][0] < at - UNHEARD_SECONDS:
            self._ended.popleft()
        for proc in new:
            for limit in proc.limits & self._terms.keys():
                self._judge(proc, limit, gone, limit in changed)

    def _count(self, row: Mapping[str, Any], at: float) -> None:
        """As PostgreSQL counts: no more machines hold a limit that was never reported than may, or did already."""
        if not row["machines"] or row["asked"] is not None:
            return
        limit, held, most = row["limit"], int(row["held"]), int(row["most"])
        held_before, most_before = self._held.get(limit, (0, most))
        self._held[limit] = held, most
        self.judged["samples in which a limit of machines was full"] += held == most > 0
        if held > max(most, most_before, held_before):
            why = f"{held} machines hold it, {held_before} did before"
            self.forbidden.append(Forbidden(limit, "", held, most, at, why))

    def _judge(self, proc: Seated, limit: str, gone: list[Seated], changed: bool) -> None:
        """What is there now and was committed no later was there at the commit too. Where the terms have changed since
        the last sample, a row may have been written twice: then those of before or those of now must allow it."""
        history = self._terms[limit]
        others = [
            other
            for other in self._known.values()
            if limit in other.limits and other.id != proc.id and other.committed <= proc.committed
        ]
        ended = [other for other in gone if limit in other.limits]
        possible = [terms for _, terms in history.changes[-2:]] if changed else [history.at(proc.committed)]
        unheard = {other.machine for _, other in self._ended if limit in other.limits}
        uses = [terms.forbids(proc, others, ended, unheard) for terms in possible]
        terms = possible[-1]
        counted = "machines" if terms.machines else "frames"
        self.judged[f"bookings of {counted}{'' if terms.asked is None else ', reported'}"] += 1
        if None not in uses:
            beside = sorted((other.machine, other.committed) for other in others)
            why = f"on {proc.machine} under {terms}, beside {beside}"
            self.forbidden.append(Forbidden(limit, proc.id, uses[-1] or 0, terms.most, proc.committed, why))
