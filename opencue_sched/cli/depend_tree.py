"""``opencue-sched job depends tree``: what a job waits for and what waits for it, over all jobs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from io import StringIO
from typing import TYPE_CHECKING, Any

from opencue_sched.cli.output import Done
from opencue_sched.store.jobs import Depend
from opencue_sched.store.named_rows import NamedRow

if TYPE_CHECKING:
    from rich.tree import Tree

_ANY_WIDTH = 1_000
"""The width, in characters, at which a tree is laid out: wide enough that no line is folded."""
_DEEPEST = 100
"""How many jobs behind one another a tree shows at most."""


@dataclass(frozen=True, slots=True)
class _Way:
    """One of the two ways from a job: to what it waits for, or to what waits for it."""

    title: str
    """The name of this way in JSON, and in the first line of the tree with spaces for underscores."""
    nothing: str
    """What is said of a job without any dependency this way."""
    near: str
    """The side of a dependency on which the job is, as the names of its columns begin: er or on."""
    far: str
    """The other side."""


_WAYS = (
    _Way("waits_for", "waits for nothing", "er", "on"),
    _Way("waited_for_by", "nothing waits for it", "on", "er"),
)


def depend_trees(job: NamedRow, waits_for: Sequence[Depend], waited_for_by: Sequence[Depend]) -> Done:
    """The tree of what a job waits for, and the tree of what waits for it.

    A job that is met twice has its branches the first time only. What is behind more than a hundred other jobs is left
    out: it can be asked for by itself.
    """
    from rich.console import Console
    from rich.tree import Tree

    written = StringIO()
    console = Console(file=written, width=_ANY_WIDTH, highlight=False, markup=False)
    document: dict[str, Any] = {"job": job.name, "id": job.id}
    for way, found in zip(_WAYS, (waits_for, waited_for_by), strict=True):
        of_job: dict[str, list[Depend]] = {}
        for depend in found:
            of_job.setdefault(getattr(depend, f"{way.near}_job_id"), []).append(depend)
        root = Tree(f"{job.name} {way.title.replace('_', ' ')}" if found else f"{job.name}: {way.nothing}")
        document[way.title] = _branches(way, of_job, job.id, root, {job.id})
        console.print(root)
    return Done(written.getvalue().rstrip().splitlines(), document)


def _branches(
    way: _Way, of_job: Mapping[str, Sequence[Depend]], job_id: str, tree: Tree, seen: set[str], depth: int = 1
) -> list[dict[str, Any]]:
    """Add the dependencies of one job, and of the jobs behind it, to the branch ``tree``. Returns the same for JSON.
    Jobs that are met are added to ``seen``."""
    from opencue_sched.insight.explain import describe_depend

    documents = []
    for depend in of_job.get(job_id, ()):
        far_id, far = getattr(depend, f"{way.far}_job_id"), getattr(depend, f"{way.far}_job")
        waits = depend.er_frame or (f"layer {depend.er_layer}" if depend.er_layer else "")
        needed = describe_depend(depend, depend.er_job)
        again = far_id in seen and far_id in of_job
        text = f"{waits} for {needed}" if waits else needed
        if way.far == "er":
            text = f"{far}: {waits or 'all of it'} for {needed}"
        more = depth == _DEEPEST and not again and far_id in of_job
        text += f" (and more: `job depends tree {far}`)" if more else ""
        branch = tree.add(f"{text} (see above)" if again and far_id != job_id else text)
        document = {"id": depend.id, "job": far, "type": depend.type, "waits": waits or "the job", "on": needed}
        if more:
            document["more"] = True
        elif far_id not in seen:
            seen.add(far_id)
            document["depends"] = _branches(way, of_job, far_id, branch, seen, depth + 1)
        documents.append(document)
    return documents
