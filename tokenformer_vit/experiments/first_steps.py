"""Questions about the first steps of a stage: results a few steps later, and at the end."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

from matplotlib.figure import Figure

from .questions import Question
from .rows import FAILED, MINUTES, Column, Record, Row, result_column


@dataclass(frozen=True, kw_only=True)
class FirstSteps(Question):
    """Stages that start from one trained model, compared a few steps later and at their end.

    Args:
        after: Iterations after which the table has the results.
    """

    after: tuple[int, ...]
    same_size: ClassVar[bool] = False
    starts_at_best: ClassVar[bool] = True
    papers_run: ClassVar[str] = ""
    chart: ClassVar[str] = "{} and curves of the stages"

    @property
    def note(self) -> str:
        """How to read the table."""
        return (
            f"The columns *after* give the {self.field.measure.label} after so many iterations of "
            "a stage. A Δ is of the results at the end of the stages, seed by seed. FLOPs and "
            "minutes are for the stage only."
        )

    def columns(self) -> Sequence[Column]:
        """Return the columns of the table."""
        return (
            Column("lr", Row.lr),
            Column("parameters, start → end", Row.parameters),
            Column("training FLOPs", Row.flops),
            *(self._after(time) for time in self.after),
            result_column(self.field.measure),
            *self.comparisons(),
            MINUTES,
            FAILED,
        )

    def _after(self, time: int) -> Column:
        def cell(row: Row) -> str:
            results = row.results_at(time, self.field.unit)
            return row.mean(results) if row.variant.start else ""

        return Column(f"after {time}", cell)

    def draw(self, records: Sequence[Record]) -> Figure:
        """Draw the stages, without the longer run that they start from."""
        stages = replace(self, variants=tuple(each for each in self.variants if each.start))
        names = {variant.name for variant in stages.variants}
        return super(FirstSteps, stages).draw(
            [record for record in records if record["variant"] in names]
        )
