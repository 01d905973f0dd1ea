"""Small layers that a pass has to itself, which only a pass whose shard has idle cores for a whole plan asks for.

Several planners serve one layer side by side, because permits are of frames. But a plan asks for the permits of its
frames when it is made: where each of N planners has hosts for a thousand frames, all come to the same first layers,
read them, plan all of their frames, and are refused most. So there a pass asks for a small layer as a whole before it
reads any frame of it, and leaves the layer to a pass that was faster (docs/adr/0006-permits-are-of-frames.md).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from itertools import islice

from opencue_sched.coordination.permits import FramePermits, Permitted
from opencue_sched.domain.plans import Waiting
from opencue_sched.placement.backlog import BacklogWork

FEWEST_LAYERS = 50
"""A pass asks for small layers as a whole where at least so many come next (`WholeLayers.look`). Where they are fewer,
all planners have read them before one hears of the others' permits."""
LAYERS_LOOKED_AT = 1_000
"""The most layers, over all shows, that `WholeLayers.look` goes through, by rank, to find small ones."""


class WholeLayers:
    """The layers of one pass that no other pass plans, and those that it leaves to others. Used by the thread of the
    pass alone."""

    def __init__(
        self,
        permits: FramePermits,
        works: Sequence[BacklogWork],
        left_alone: set[str],
        owner: str,
        *,
        most_frames: int,
        seconds: float,
    ) -> None:
        """``left_alone``: the pass's own set of ids of layers that it does not plan, to which this object adds layers
        of other passes. ``most_frames``: how many frames of a small layer wait at most. ``seconds``: the life of a
        permit."""
        self._permits = permits
        self._works = works
        self._left_alone = left_alone
        self._owner = owner
        self._most_frames = most_frames
        self._seconds = seconds
        self._had: dict[str, tuple[Waiting, Permitted]] = {}
        """The layers that this pass has to itself, by id, each with its permit. The permit is kept as it was asked for,
        because another read may change the layer's ``count_version``."""
        self.leaves_some = False
        """Whether other passes have layers that this one came to."""

    def look(self) -> int:
        """Leave the small layers alone that come next and that other passes have. Returns how many small layers come
        next. One round trip, none where these are fewer than FEWEST_LAYERS. Takes nothing from ``works``."""
        of_each = LAYERS_LOOKED_AT // max(1, len(self._works))
        small = [waiting for work in self._works for waiting in islice(work, of_each) if self._is_asked_for(waiting)]
        if len(small) >= FEWEST_LAYERS:
            self._leave(self._permits.held(list(map(_permit, small)), but_of=self._owner))
        return len(small)

    def ask(self, wanted: Iterable[Waiting]) -> list[Waiting]:
        """The layers among ``wanted`` whose frames this pass may read and plan: all but small ones that another pass
        has."""
        wanted = list(wanted)
        small = {waiting.layer.id: (waiting, _permit(waiting)) for waiting in wanted if self._is_asked_for(waiting)}
        asked = [permit for _, permit in small.values()]
        granted = self._permits.take(asked, self._owner, seconds=self._seconds)
        self._had |= {layer_id: small[layer_id] for layer_id in granted}
        refused = small.keys() - granted
        if refused:
            self._leave(refused)
            # The pass that was faster is mostly ahead by more layers than these.
            self.look()
        return [waiting for waiting in wanted if waiting.layer.id not in refused]

    def give_up_unfinished(self, planned: Collection[str]) -> list[Permitted]:
        """Give up every layer of which the pass leaves frames unplanned. Returns the permits, which the caller gives
        back. ``planned``: the ids of the layers of which it planned any frame."""
        had = ((layer_id, self._had[layer_id][0]) for layer_id in set(planned).intersection(self._had))
        return self.give_up_all_but([layer_id for layer_id, waiting in had if waiting.unplanned <= 0])

    def give_up_all_but(self, layer_ids: Collection[str]) -> list[Permitted]:
        """Give up all layers but these. Returns the permits, which the caller gives back."""
        kept = set(layer_ids)
        given_up = [permit for layer_id, (_, permit) in self._had.items() if layer_id not in kept]
        self._had = {layer_id: had for layer_id, had in self._had.items() if layer_id in kept}
        return given_up

    def _is_asked_for(self, waiting: Waiting) -> bool:
        """Whether the layer is small, and this pass does not have it to itself yet."""
        return waiting.frames <= self._most_frames and waiting.layer.id not in self._had

    def _leave(self, layer_ids: Collection[str]) -> None:
        """Have this pass plan no frame of these layers: other passes have them."""
        self._left_alone.update(layer_ids)
        self.leaves_some |= bool(layer_ids)


def _permit(waiting: Waiting) -> Permitted:
    """What the permit of a whole layer is for: its id, and a version that changes when frames of it come to wait."""
    # So for frames that are tried again, or are new, any pass may have a permit again.
    return waiting.layer.id, waiting.layer.count_version
