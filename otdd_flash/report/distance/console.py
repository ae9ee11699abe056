"""The short table that a command prints for one result."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from otdd_flash.shown import bounded, display, epsilon_shown, interval

if TYPE_CHECKING:
    from rich.table import Table


def summary_table(summary: Mapping[str, Any]) -> Table:
    """The essentials of a result.json in two columns; a red row near the top if not converged.

    Args:
        summary: the content of result.json. Dataset names are taken from `source` and `target` if
            they are there; `tolerance` is what the marginal error is compared with, None where the
            width of the solver bounds was the goal.
    """
    from rich.table import Table
    from rich.text import Text

    title = Text(_title(summary), style="table.title")
    table = Table(show_header=False, title=title, title_justify="left")
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    table.add_row("distance", bounded(summary["value"], *summary["bounds"]))
    if not summary["converged"]:
        reason = (
            f"stopped by {summary['stopped_by']}" if summary.get("stopped_by") else "stopped early"
        )
        trust = "only solver bounds can be trusted"
        if summary.get("schedule") == "geomloss":
            trust = "the value is geomloss's, the solver bounds hold the converged one"
        table.add_row("NOT CONVERGED", Text(f"{reason}; {trust}"), style="bold red")
    for name, text in _details(summary):
        table.add_row(name, Text(text))
    return table


def _title(summary: Mapping[str, Any]) -> str:
    names = (summary.get("source"), summary.get("target"))
    if all(isinstance(name, str) for name in names):
        return f"{display(names[0])} → {display(names[1])}"
    return "dataset distance"


def _details(summary: Mapping[str, Any]) -> list[tuple[str, str]]:
    classes = summary["classes"]
    error = f"{summary['marginal_error']:.2g}"
    tolerance = summary.get("tolerance")
    converged, stopped_by = summary["converged"], summary.get("stopped_by", "tolerance")
    reached = "" if stopped_by == "tolerance" else f", stopped by {stopped_by}"
    if tolerance is not None:
        error += f" {'≤' if summary['marginal_error'] <= tolerance else '>'} {tolerance:.2g}"
    ground = summary.get("ground", "sqeuclidean")
    seconds = {phase: float(spent) for phase, spent in summary["seconds"].items()}
    spent = ", ".join(f"{phase.replace('_', ' ')} {_time(took)}" for phase, took in seconds.items())
    return [
        *_sampling(summary),
        ("epsilon", epsilon_shown(summary["epsilon"], summary.get("mean_cost"))),
        ("samples", f"{summary['n']} × {summary['m']}, {summary['d']} features"),
        ("classes", f"{_count(classes['source'])} × {_count(classes['target'])}"),
        *([] if ground == "sqeuclidean" else [("ground cost", ground)]),
        ("class distances", str(summary["labels"]) + _own_epsilon(summary)),
        ("converged", f"yes{reached}" if converged else "no"),
        ("marginal error", error),
        ("iterations", str(summary["iterations"])),
        ("seconds", f"{_time(sum(seconds.values()))} ({spent})"),
        ("computed on", ", ".join(str(summary[k]) for k in ("device", "backend", "precision"))),
    ]


def _own_epsilon(summary: Mapping[str, Any]) -> str:
    """Return ", epsilon ..." of class distances by `sinkhorn`, "" for others."""
    epsilon = summary.get("labels_epsilon")
    return "" if epsilon is None else f", epsilon {epsilon:.6g}"


def _sampling(summary: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Rows on what the distance owes to the samples, or that this was not measured."""
    rows = []
    if (found := summary.get("subsample")) is not None:
        shown = interval(summary["value"], found["lower"], found["upper"])
        drawn = "{} subsamples of {} × {}".format(found["count"], *found["size"])
        drawn = "none drawn: both datasets are one" if found["identical"] else drawn
        rows.append((f"sampling interval ({found['level']:.0%})", f"{shown} ({drawn})"))
    elif any((summary["value"], *summary["bounds"])):
        way_out = "subsample=50 gives an interval"
        if not _subsamples_fit(summary):
            way_out = "subsamples need more rows, over two of each class"
        rows.append(("sampling error", f"not measured; {way_out}"))
    if (floor := summary.get("noise_floor")) is not None:
        size = floor["size"]
        source, target, between = (
            bounded(*(floor[key][part] for part in ("value", "lower", "upper")))
            for key in ("source", "target", "between")
        )
        rows.append((f"noise floor at {size} × {size}", f"{source}, {target}"))
        rows.append((f"distance at {size} × {size}", between))
    return rows


def _subsamples_fit(summary: Mapping[str, Any]) -> bool:
    """Whether an equal part of both sides, not all, holds two rows of every class."""
    labelled = summary["labels"] != "none"
    rows = summary["n"], summary["m"]
    classes = (_count(summary["classes"][side]) * labelled for side in ("source", "target"))
    part = max(2 * max(count, 1) / total for count, total in zip(classes, rows, strict=True))
    return all(round(part * total) < total for total in rows)


def _count(classes: Any) -> int:
    """The number of classes, from a count or from their names."""
    return classes if isinstance(classes, int) else len(classes or ())


def _time(seconds: float) -> str:
    return f"{seconds:.2f}" if seconds < 10 else f"{seconds:.0f}"
