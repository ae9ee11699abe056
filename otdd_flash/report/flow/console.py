"""The short table that the flow command prints."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from otdd_flash.shown import bounded, display, epsilon_shown

if TYPE_CHECKING:
    from rich.table import Table


def flow_table(summary: Mapping[str, Any]) -> Table:
    """The essentials of a flow's result.json in two columns.

    Args:
        summary: the content of result.json.
    """
    from rich.table import Table
    from rich.text import Text

    title = f"{display(summary['source'])} → {display(summary['target'])}"
    table = Table(show_header=False, title=Text(title, style="table.title"), title_justify="left")
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    start = summary["start"]
    table.add_row("distance before", bounded(start["value"], *start["bounds"]))
    table.add_row("distance after", bounded(summary["value"], *summary["bounds"]))
    if not summary["converged"]:
        table.add_row(
            "NOT CONVERGED",
            "in every step; only solver bounds can be trusted",
            style="bold red",
        )
    for name, text in _details(summary):
        table.add_row(name, Text(text))
    return table


def _details(summary: Mapping[str, Any]) -> list[tuple[str, str]]:
    settings, seconds = summary["settings"], summary["seconds"]
    spent = ", ".join(f"{phase} {took:.2f}" for phase, took in seconds.items())
    details = [
        (
            "sampling error",
            "not measured; of the distance before, otdd_flash.distance with subsample=50 gives an "
            "interval",
        ),
        ("mode", str(settings["flow.mode"])),
        ("steps", f"{summary['steps']}, stopped by {summary['stopped_by']}"),
        ("step", f"{settings['flow.optimizer']}, {settings['flow.step_size']:g}"),
    ]
    if seen := _seen_by_steps(summary):
        details.append(("steps saw", seen))
    if settings["flow.functionals"]:
        objective = summary["objective"]
        details.append(("objective", f"{objective['start']:.5g} → {objective['end']:.5g}"))
    return [
        *details,
        ("epsilon", epsilon_shown(summary["epsilon"], summary.get("mean_cost"))),
        ("samples", f"{summary['n']} × {summary['m']}, {summary['d']} coordinates"),
        ("class distances", _class_distances(settings)),
        ("marginal error", f"{summary['marginal_error']:.2g}"),
        ("seconds", f"{sum(seconds.values()):.2f} ({spent})"),
        ("computed on", f"{summary['ran_on']}, {summary['compute']['precision']}"),
    ]


def _seen_by_steps(summary: Mapping[str, Any]) -> str:
    """What steps saw instead of all points in their places; "" where that is what they saw."""
    sizes = [record["estimated_on"] for record in summary["history"] if record.get("estimated_on")]
    if not sizes:
        return ""
    noise = summary["settings"]["flow.noise"]
    moved = f", moved by noise of {noise:g}" if noise else ""
    return f"{sizes[0]:,} points{moved}: their distances are estimates on {sizes[0]:,} points"


def _class_distances(settings: Mapping[str, Any]) -> str:
    method = str(settings["labels.method"])
    if (epsilon := settings.get("labels.epsilon")) is not None:
        method += f", epsilon {epsilon:.6g}"
    if settings["flow.mode"] not in ("joint", "augmented"):
        return method
    return f"{method}, of classes that moved beside the points"
