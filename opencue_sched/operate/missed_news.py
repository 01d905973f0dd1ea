"""Makes up for what PostgreSQL told while nobody heard it, or when it could not be followed.

After a restart of PostgreSQL every listener has missed the same. A look at everything serves all whose listener was
back before it began, so one process of a facility scope looks and the others wait for it. Should it fail or die,
another one does. Nothing depends on the election: two that look at once read the same twice.
"""

from __future__ import annotations

import threading
import uuid
from collections.abc import Callable, Collection

import redis

from opencue_sched.accounting.scripts import token_drop_call
from opencue_sched.coordination.names import LookKeys
from opencue_sched.coordination.rounds import Rounds
from opencue_sched.lua_scripts import call_scripts

SETTLE_SECONDS = 0.25
"""The other listeners come back about now; a look that begins after that serves them too."""
LOOK_LIFE_SECONDS = 30.0
"""After which a look counts as given up. One that takes longer is only joined by another."""
ASK_AGAIN_SECONDS = 0.25
FIRST_RETRY_SECONDS, LONGEST_RETRY_SECONDS = 0.5, 10.0

_BEGUN, _ENDED = "begun", "ended"
"""Of the looks so far: the number of the one that began last, and that of one that ended well."""

FollowCaps = Callable[[frozenset[str]], object]


class MissedNews(Rounds):
    """One thread. ``everything`` and ``caps`` may be called from any.

    ``look_at_all()`` reads everything again, ``follow_caps(vertex names)`` the caps of these; both may raise.
    """

    def __init__(
        self, client: redis.Redis, keys: LookKeys, *, look_at_all: Callable[[], object], follow_caps: FollowCaps
    ) -> None:
        super().__init__(
            "missed-news",
            self._make_up_for,
            failed="missed_news_left_for_later",
            retry_seconds=FIRST_RETRY_SECONDS,
            longest_retry_seconds=LONGEST_RETRY_SECONDS,
        )
        self._client = client
        self._keys = keys
        self._look_at_all = look_at_all
        self._follow_caps = follow_caps
        self._lock = threading.Lock()
        self._all = False
        self._vertices: set[str] = set()
        self.busy = False
        """Whether anything is left to be made up for."""

    def everything(self) -> None:
        """Any notification may have been missed until now."""
        with self._lock:
            self.busy = self._all = True
        self.want()

    def caps(self, vertices: Collection[str]) -> None:
        """These caps changed, and could not be followed."""
        with self._lock:
            self.busy = True
            self._vertices.update(vertices)
        self.want()

    def _make_up_for(self) -> None:
        """All that was missed by now; what could not be made up for is kept."""
        with self._lock:
            look, vertices = self._all, frozenset(self._vertices)
            self._all = False
            self._vertices.clear()
        try:
            if look:
                self._have_looked()
                look = False
            if vertices:
                self._follow_caps(vertices)
        except Exception:
            with self._lock:
                self._all |= look
                self._vertices |= vertices
            raise
        with self._lock:
            self.busy = self._all or bool(self._vertices)

    def _have_looked(self) -> None:
        """Return when a look that began after this call has ended well: another process's, or this one's."""
        begun = int(self._client.hget(self._keys.counts, _BEGUN) or 0)
        token = uuid.uuid4().hex
        pause = SETTLE_SECONDS
        while not self.pause(pause):
            pause = ASK_AGAIN_SECONDS
            mine = self._client.set(self._keys.lock, token, nx=True, px=round(1000 * LOOK_LIFE_SECONDS))
            try:
                if int(self._client.hget(self._keys.counts, _ENDED) or 0) > begun:
                    return
                if mine:
                    number = self._client.hincrby(self._keys.counts, _BEGUN, 1)
                    self._look_at_all()
                    self._client.hset(self._keys.counts, _ENDED, number)
                    return
            finally:
                if mine:
                    call_scripts(self._client, [token_drop_call((self._keys.lock,), token)])
