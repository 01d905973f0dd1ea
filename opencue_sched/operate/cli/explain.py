"""``opencue-sched explain``."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import click

from opencue_sched.domain.spec_fields import near
from opencue_sched.operate.cli.connect import farm
from opencue_sched.operate.cli.output import json_option, show_json
from opencue_sched.operate.cli.values import UnknownName, choose
from opencue_sched.operate.cli.verdict_lines import held_clusters, recorded_verdicts
from opencue_sched.operate.explain import Explanation, LayerExplanation, explain_job
from opencue_sched.settings import get_settings
from opencue_sched.store.naming import Kind


@click.command("explain")
@click.argument("name", metavar="JOB")
@click.option("--layer", metavar="NAME", help="Only this layer, with every reason found.")
@json_option
def command(name: str, layer: str | None, as_json: bool) -> None:
    """Say why a job's frames are waiting.

    One line for each layer with something left to do: what the database says holds it back, else the verdict of the
    last pass that looked at it. With --layer, or as JSON, every reason, the one that explains most first.

    Example: opencue-sched explain demo-sh010-alice_comp_v001 --layer render
    """
    with farm() as (engine, facts), engine.connect() as connection:
        job = choose(connection, Kind.JOB, name)
        explanation = explain_job(connection, job.id, get_settings(), facts, recorded_verdicts(job.id), held_clusters())
    chosen = [one for one in explanation.layers if layer is None or one.name == layer]
    if layer is not None and not chosen:
        names = [one.name for one in explanation.layers]
        raise UnknownName(f"job {job.name} has no layer {layer!r}{near(layer, names)}")
    if as_json:
        show_json(_as_dict(explanation, chosen))
    else:
        click.echo("\n".join(_lines(explanation, chosen, every_reason=layer is not None)))


def _lines(explanation: Explanation, layers: list[LayerExplanation], *, every_reason: bool) -> list[str]:
    unfinished = layers if every_reason else [one for one in layers if one.open or one.running]
    if not unfinished:
        return [f"nothing of {explanation.job} waits: it is {explanation.state}"]
    lines = []
    for one in unfinished:
        reasons = one.reasons if every_reason else one.reasons[:1]
        lines.append(f"{one.name} ({_counts(one)}): {reasons[0].text}")
        lines += [f"  also: {reason.text}" for reason in reasons[1:]]
    return lines


def _counts(layer: LayerExplanation) -> str:
    counts = {
        "waiting": layer.waiting,
        "running": layer.running,
        "depend": layer.depend,
        "dead": layer.dead,
        "done": layer.done,
    }
    return ", ".join(f"{number} {word}" for word, number in counts.items() if number) or "no frames"


def _as_dict(explanation: Explanation, layers: list[LayerExplanation]) -> dict[str, Any]:
    return {
        "job": explanation.job,
        "id": explanation.job_id,
        "state": explanation.state,
        "reasons": [asdict(reason) for reason in explanation.reasons],
        "layers": [
            {
                "layer": one.name,
                "id": one.id,
                "frames": one.total,
                "waiting": one.waiting,
                "running": one.running,
                "depend": one.depend,
                "dead": one.dead,
                "done": one.done,
                "reasons": [asdict(reason) for reason in one.reasons],
                "verdict": None
                if one.verdict is None
                else {
                    "verdict": one.verdict.verdict.verdict.value,
                    "detail": one.verdict.verdict.detail,
                    "placed": one.verdict.verdict.frames,
                    "waiting": one.verdict.verdict.waiting,
                    "cluster": one.verdict.cluster,
                    "at": one.verdict.at,
                },
            }
            for one in layers
        ],
    }
