"""The result of a shift test: `ShiftReport`.

`shift.joint` makes it. `commands.shift` writes `to_dict` to result.json (of windows, that of the
window with the least p-value over its level) and prints the `sentences` of one test. `report.shift`
draws it, `commands.results` logs it, and `integrations.detector` returns it. Keys of `to_dict` must
stay, because users' pipelines read them.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from torch import Tensor

from otdd_flash.shift.effect import ShiftEffect
from otdd_flash.shift.parts import ShiftParts
from otdd_flash.shift.pooled import rejects
from otdd_flash.shown import display

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# Classes that a sentence names.
NAMED = 5
# Fields that result.json holds as they are.
WRITTEN = (
    *("p_value", "shifted", "alpha", "statistic", "bounds", "hits", "permutations", "requested"),
    *("min_effect", "exceeds", "epsilon", "mean_cost", "labels", "sizes", "groups", "seconds"),
)


@dataclass(frozen=True, eq=False)
class ShiftReport:
    """The result of a shift test: whether data have shifted, how far and where.

    Attributes:
        p_value: of the joint test of features and labels; valid at any number of rows.
        statistic: T, the debiased distance of reference and sample, in units of the cost.
        bounds: solver bounds of the statistic.
        null: (l,) float64, T of the permutations that were counted, in the order drawn.
        hits: permutations whose T may be as large as the statistic, by their solver bounds.
        requested: B, the number of permutations asked for, with or without an early end.
        alpha: the level that `shifted` compares the p-value with.
        effect: how much more transport between the sides costs than within them, divided by the
            mean cost.
        parts: where the shift is; None if it was not asked for.
        min_effect: the least effect that counts as large; None if none was given.
        epsilon: regularisation, in units of the cost.
        mean_cost: mean cost of all rows, the unit of effects.
        labels: how classes were compared.
        sizes: rows of reference and sample that have weight.
        groups: numbers of groups of reference and sample; None if rows were exchanged one by one.
        names: of reference and sample.
        seconds: wall time.
    """

    p_value: float
    statistic: float
    bounds: tuple[float, float]
    null: Tensor = field(repr=False)
    hits: int
    requested: int
    alpha: float
    effect: ShiftEffect
    parts: ShiftParts | None
    min_effect: float | None
    epsilon: float
    mean_cost: float
    labels: str
    sizes: tuple[int, int]
    groups: tuple[int, int] | None
    names: tuple[str, str]
    seconds: float

    @property
    def permutations(self) -> int:
        """How many permutations were counted."""
        return len(self.null)

    @property
    def shifted(self) -> bool:
        """Whether the p-value is at most `alpha`."""
        return rejects(self.p_value, self.alpha)

    @property
    def exceeds(self) -> bool | None:
        """Whether the effect exceeds `min_effect`, by its lower limit; None if that was not given.

        An effect without an interval exceeds none. The limit is asymptotic, and no p-value is
        claimed.
        """
        return None if self.min_effect is None else (self.effect.lower or 0.0) > self.min_effect

    def sentences(self) -> list[str]:
        """Say in words what was found: significance and size, then where."""
        found = "differ" if self.shifted else "show no shift"
        over = self.effect.value
        size = (
            f"{abs(over):.2%} of the mean cost {'more' if over >= 0 else 'less'} than within them"
        )
        if self.effect.lower is not None and self.effect.upper is not None:
            size += f" (95%: {self.effect.lower:.2%} to {self.effect.upper:.2%})"
        words = [
            f"{display(self.names[0])} and {display(self.names[1])} {found} at level "
            f"{self.alpha:g}: p = {self.p_value:.2g} by {self.permutations} permutations. "
            f"Transport between them costs {size}; "
            + (
                "with enough rows any shift is significant, so judge by the size."
                if self.shifted
                else f"with {sum(self.sizes)} rows a shift that is small may go unseen."
            )
        ]
        if self.min_effect is not None:
            verb = "exceeds" if self.exceeds else "is not shown to exceed"
            words.append(
                f"By an asymptotic limit the effect {verb} min_effect={self.min_effect:g}; that is "
                "no permutation test and has no p-value."
            )
        return words + self._where()

    def _where(self) -> list[str]:
        parts = self.parts
        if parts is None or self.labels == "none":
            return []
        if parts.label_p_value is None:
            return ["Classes are not tested by themselves, as that takes one label a row."]
        words = [f"Class proportions: p = {parts.label_p_value:.2g}."]
        found = sorted(
            (c.adjusted, display(c.name)) for c in parts.classes if c.adjusted is not None
        )
        low = [f"{name} (p = {p:.2g})" for p, name in found if p <= self.alpha]
        if found:
            words.append(f"Features differ within {_named(low) or 'no class'}; p-values by Holm.")
        if few := _named(list(map(display, parts.untestable))):
            words.append(f"Too few rows on a side to test by themselves: {few}.")
        return words

    def __str__(self) -> str:
        return " ".join(self.sentences())

    def to_dict(self) -> dict[str, Any]:
        """Return the content of result.json; null and rows are left out."""
        first, second = self.names
        found: dict[str, Any] = {"reference": first, "sample": second}
        found |= {key: getattr(self, key) for key in WRITTEN}
        return found | {
            "null_mean": float(self.null.mean()),
            "null_deviation": float(self.null.std(correction=0)),
            "effect": asdict(self.effect),
            "parts": None if self.parts is None else self.parts.to_dict(),
            "sentences": self.sentences(),
        }

    def plot(self) -> Figure:
        """Draw the null distribution with the statistic, and classes as bars.

        Returns:
            A figure of matplotlib.
        """
        from otdd_flash.report.shift import plot_shift

        return plot_shift(self)


def _named(names: list[str]) -> str:
    more = f" and {len(names) - NAMED} more" if len(names) > NAMED else ""
    return ", ".join(names[:NAMED]) + more
