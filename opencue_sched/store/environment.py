"""What users put into a frame's environment: job_env, overridden by layer_env (facts E)."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from sqlalchemy import Connection, text

# The key decides between two rows of one variable, so that the same rows always give the same environment.
_JOB_ENV = text(
    """
    SELECT pk_job AS owner, str_key, str_value FROM job_env
    WHERE pk_job = ANY(CAST(:ids AS varchar[])) AND str_key <> '' ORDER BY pk_job_env
    """
)
_LAYER_ENV = text(
    """
    SELECT pk_layer AS owner, str_key, str_value FROM layer_env
    WHERE pk_layer = ANY(CAST(:ids AS varchar[])) AND str_key <> '' ORDER BY pk_layer_env
    """
)


@dataclass(frozen=True, slots=True)
class Environments:
    """The variables of jobs and of layers, by id."""

    jobs: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    layers: Mapping[str, Mapping[str, str]] = field(default_factory=dict)

    def of(self, job_id: str, layer_id: str) -> dict[str, str]:
        """The environment of a layer's frames, without the CUE_ variables."""
        return {**self.jobs.get(job_id, {}), **self.layers.get(layer_id, {})}


def fetch_environments(connection: Connection, job_ids: Collection[str], layer_ids: Collection[str]) -> Environments:
    """The environments of these jobs and layers, in two statements. A dry run has no use for them."""
    environments: list[dict[str, dict[str, str]]] = []
    for statement, ids in ((_JOB_ENV, job_ids), (_LAYER_ENV, layer_ids)):
        found: dict[str, dict[str, str]] = defaultdict(dict)
        for row in connection.execute(statement, {"ids": sorted(ids)}):
            found[row.owner][row.str_key] = row.str_value or ""
        environments.append(dict(found))
    return Environments(jobs=environments[0], layers=environments[1])
