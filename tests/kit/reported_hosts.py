"""What a host says of itself in a report."""

from __future__ import annotations

from opencue_proto import report_pb2

GB = 1024 * 1024


def render_host(**fields: object) -> report_pb2.RenderHost:
    """A sensible host of 8 cores and 16 GB, but for the fields given."""
    values: dict[str, object] = {
        "name": "node1.studio.example",
        "num_procs": 1,
        "cores_per_proc": 800,
        "total_mem": 16 * GB,
        "free_mem": 12 * GB,
        "total_mcp": 100 * GB,
        "free_mcp": 50 * GB,
        "boot_time": 1_700_000_000,
        "tags": ["linux"],
        **fields,
    }
    return report_pb2.RenderHost(**values)  # type: ignore[arg-type]
