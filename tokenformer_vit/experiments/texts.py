"""Questions about several texts: how well a model knows each text after every stage of training."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from .fields import Config, Measure
from .plots import band, curves_of, name_of, scale
from .questions import Question
from .rows import FAILED, MINUTES, Column, Record, Row, at_best_lr, finished, minus, result_column
from .variants import PAIRS, Shape, Variant

_DATA = "data"  # folder of the texts, unless the command line names another


@dataclass(frozen=True, kw_only=True)
class Texts(Question):
    """Language models train on one text after another, and are measured on all texts.

    Each variant is a stage. It starts from scratch, or from the end of another stage.

    Args:
        texts: Folders of the texts.
    """

    texts: tuple[str, ...]
    same_size: ClassVar[bool] = False
    chart: ClassVar[str] = "{} of each text"

    @property
    def note(self) -> str:
        """How to read the table."""
        return (
            "Each row is a stage of training. A stage with an arrow starts from the end of the "
            "stage before its last arrow, with the same seed. FLOPs and minutes are for this "
            "stage only. The column of a text is the perplexity of its held-out "
            "part. In parentheses is the change since the end of the last earlier stage that "
            "trained on this text: above zero is forgetting."
        )

    @property
    def common(self) -> tuple[str, ...]:
        """Keys of a record whose values all runs must share; the size of the text may differ."""
        return tuple(key for key in super().common if key != f"train_{self.field.examples}")

    def put_data_root(self, cfg: Config, data_root: str | None) -> None:
        """Measure on all texts."""
        for name in ("val_dataloader", "test_dataloader"):
            folders = [str(Path(data_root or _DATA, text)) for text in self.texts]
            cfg[name]["dataset"]["data_root"] = folders

    def outside(
        self, variant: Variant, shape: Shape, length: int, data_root: str | None
    ) -> dict[str, Any]:
        """Return what a variant changes outside the model, with the text that it trains on."""
        folder = str(Path(data_root or _DATA, variant.text or ""))
        changes = super().outside(variant, shape, length, data_root)
        return {**changes, "train_dataloader": {"dataset": {"data_root": folder}}}

    def end_of(self, part: Mapping[str, Any]) -> dict[str, Any]:
        """Return the config that builds the final model of a stage from scratch."""
        grown = {key: size for key, size in (part.get("growth") or {}).items() if key in PAIRS}
        config = {**part["config"], **grown}
        rest = {key: value for key, value in part.items() if key not in ("masks", "frozen_stem")}
        return {**rest, "config": config, "growth": None}

    def columns(self) -> Sequence[Column]:
        """Return the columns of the table."""

        def trained_on(row: Row) -> str:
            return f"`{row.variant.text}`"

        first, *others = (
            Column(f"`{text}`", lambda row, text=text: self._cell(row, text)) for text in self.texts
        )
        return (
            Column("trained on", trained_on, trained_on),
            Column("parameters", Row.parameters),
            Column("training FLOPs", Row.flops),
            result_column(self.field.measure, first.cell)._replace(heading=first.heading),
            *others,
            Column("n", lambda row: str(len(row.results()))),
            MINUTES,
            FAILED,
        )

    def measure_of(self, text: str) -> Measure:
        """Return the measure of one text."""
        measure = self.field.measure
        return replace(measure, name=f"{measure.name}/{text}")

    def stages(self, variant: Variant) -> list[Variant]:
        """List the stages that lead to a variant, the first one first."""
        if variant.start is None:
            return [variant]
        return [*self.stages(self.named(variant.start)), variant]

    def _cell(self, row: Row, text: str) -> str:
        """Return the perplexity of a text, and its change since a stage that trained on it."""
        mine = replace(row, measure=self.measure_of(text))
        cell = mine.mean()
        earlier = [stage for stage in self.stages(row.variant)[:-1] if stage.text == text]
        if earlier and row.variant.text != text and len(mine.results()):
            cell += f" ({minus(mine.difference(mine.other(earlier[-1])))})"
        return f"**{cell}**" if row.best else cell

    def draw(self, records: Sequence[Record]) -> Figure:
        """Draw the perplexity of each text over the iterations of all stages.

        There is a panel for each text and a line for each last stage. Earlier stages that lines
        share are drawn once. A vertical line marks the start of a stage. Lines are means over
        seeds, with a band of one standard deviation.
        """
        measure = self.field.measure
        figure = Figure(figsize=(2 + 4 * len(self.texts), 4.4), layout="constrained")
        panels = figure.subplots(1, len(self.texts), squeeze=False)[0]
        rows = at_best_lr(measure, self.variants, records)
        starts = {variant.start for variant in self.variants}
        last = [variant for variant in self.variants if variant.name not in starts]
        shared = [
            stage
            for stage in self.variants
            if sum(stage in self.stages(variant) for variant in last) > 1
        ]
        colours = {
            stage: f"C{index}"
            for index, variant in enumerate(last)
            for stage in self.stages(variant)
        } | {stage: str(0.25 + 0.45 * index / len(shared)) for index, stage in enumerate(shared)}
        handles, drawn = [], set()
        spans: dict[int, tuple[int, str]] = {}  # start of each stage: its end and text
        for variant in last:
            after = 0
            for stage in self.stages(variant):
                if not (runs := finished(rows[stage])):
                    break
                style: dict[str, Any] = {
                    "color": colours[stage],
                    "linestyle": "--" if stage.reference else "-",
                }
                style["label"] = name_of(stage, runs, records)
                if stage not in drawn:
                    drawn.add(stage)
                    for axes, text in zip(panels, self.texts, strict=True):
                        name = self.measure_of(text).name
                        curves = curves_of(runs, "validation", "iteration", name)
                        band(axes, curves.set_index(curves.index + after), **style)
                    if stage in (variant, *shared):
                        handles.append(Line2D([], [], **style))
                end = after + runs[0]["iterations"]
                spans.setdefault(after, (end, f"on {stage.text}"))
                after = end
        middles = [(begin + end) / 2 for begin, (end, _) in spans.items()]
        for axes, text in zip(panels, self.texts, strict=True):
            axes.set(title=f"perplexity of {text} during training", xlabel="iteration")
            scale(axes, measure)
            for begin in list(spans)[1:]:
                axes.axvline(begin, color="0.6", linestyle=":", linewidth=1)
            above = axes.secondary_xaxis("top")
            above.set_xticks(middles, [name for _, name in spans.values()], fontsize="small")
            above.tick_params(length=0)
        figure.legend(handles=handles, loc="outside lower center", ncols=3, fontsize="small")
        return figure
