"""Iteration over a board, in pages."""

from __future__ import annotations

from typing import TYPE_CHECKING

from opencue_sched.coordination.board import Listing, Pages
from opencue_sched.coordination.job import Job, UnreadableJob

if TYPE_CHECKING:
    from opencue_sched.coordination.jobboard import JobBoard


class JobIterator:
    """Jobs of a board, read in pages as it goes on. Jobs that nobody can read are put aside and passed over."""

    def __init__(self, board: JobBoard, *, only_unclaimed: bool, ensure_fresh: bool) -> None:
        self.board = board
        self.only_unclaimed = only_unclaimed
        self.ensure_fresh = ensure_fresh
        self._which: Pages = "ready" if only_unclaimed else "listed"
        self._after = "-inf"
        self._page: list[Listing] = []
        self._ended = False

    def __iter__(self) -> JobIterator:
        return self

    def __next__(self) -> Job:
        while True:
            if not self._page and not self._ended:
                self._page = self.board.page(self._which, self._after)
                self._ended = not self._page
                self._after = self._page[-1].score if self._page else self._after
                self._page.reverse()
            if not self._page:
                raise StopIteration
            job = self._job(self._page.pop())
            if job is not None:
                return job

    def _job(self, listing: Listing) -> Job | None:
        now: Listing | None = listing
        if self.only_unclaimed or self.ensure_fresh:
            now = self.board.listing(listing.uuid)
        if now is None or (self.only_unclaimed and now.fields["state"] != "ready"):
            return None
        try:
            return Job(self.board, now)
        except UnreadableJob as error:
            self.board.quarantine(listing, error)
            return None
