"""Questions about tuning: which parts of a trained model to train."""

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from matplotlib.figure import Figure
from torch import nn

from tokenformer_vit.errors import InputError

from .fields import Config
from .image_models import timm_part
from .plots import points
from .questions import Question
from .rows import (
    FAILED,
    MINUTES,
    Column,
    Record,
    Row,
    at_best_lr,
    best_lr,
    by_variant,
    finished,
    result_column,
)


@dataclass(frozen=True, kw_only=True)
class Tuning(Question):
    """Variants train different parts of a trained image classifier.

    Args:
        pretraining: Command that makes the weights.
    """

    pretraining: str
    same_size: ClassVar[bool] = False
    loads_weights: ClassVar[bool] = True
    papers_run: ClassVar[str] = ""
    chart: ClassVar[str] = "{} against trained parameters"

    def start(self, cfg: Config) -> Config:
        """Return the config without the weights and without the pairs appended to them."""
        backbone = cfg["model"]["backbone"]
        if not backbone.get("checkpoint_path"):
            raise InputError(
                "the config starts from no trained weights, so there is nothing to tune: set "
                f"model.backbone.checkpoint_path to the weights that `{self.pretraining}` makes"
            )
        backbone = {**backbone, "checkpoint_path": "", "growth": None}
        return {**cfg, "model": {**cfg["model"], "backbone": backbone}}

    def start_of(self, part: Mapping[str, Any]) -> dict[str, Any]:
        """Return the file of the weights that a variant starts from, with its SHA-256."""
        if not (path := timm_part(part)["checkpoint_path"]):
            return {"start": None}
        if not Path(path).is_file():
            raise InputError(
                f"there is no file {path} to start from: `{self.pretraining}` makes it, or give "
                "`--cfg-options model.backbone.checkpoint_path=...`"
            )
        digest = hashlib.sha256(Path(path).read_bytes()).hexdigest()
        return {"start": {"file": path, "sha256": digest}}

    def counts(self, model: nn.Module) -> dict[str, int]:
        """Return the number of parameters, and the number of trained parameters."""
        trainable = sum(p.numel() for p in model.parameters() if p.requires_grad)
        return {**super().counts(model), "trainable": trainable}

    def columns(self) -> Sequence[Column]:
        """Return the columns of the table."""
        return (
            Column("trained parameters", lambda row: row.counts("trainable")),
            Column("all parameters", lambda row: row.counts("parameters")),
            Column("lr", Row.lr),
            result_column(self.field.measure),
            MINUTES,
            FAILED,
        )

    def rows(self, records: Sequence[Record]) -> Iterator[Row | str]:
        """Make a row for each variant and learning rate."""
        measure = self.field.measure
        for variant, runs in by_variant(self.variants, records).items():
            rates = sorted({run["lr"] for run in runs})
            for lr in rates:
                own = [run for run in runs if run["lr"] == lr]
                best = len(rates) > 1 and lr == best_lr(measure, runs)
                yield Row(variant, {variant: own}, measure, best)
            if not runs:
                yield Row(variant, {variant: []}, measure)

    def draw(self, records: Sequence[Record]) -> Figure:
        """Draw final top-1 over the number of trained parameters, each point with its label.

        A line joins the variants that start from the same weights.
        """
        measure = self.field.measure
        figure = Figure(figsize=(9, 4.6), layout="constrained")
        axes = figure.subplots()
        lines: dict[str, list[tuple[float, float]]] = {}
        group = at_best_lr(measure, self.variants, records)
        for variant in self.variants:
            if not (done := finished(group[variant])):
                continue
            # Move references aside, where they would lie on another point.
            count = done[0]["trainable"] * (1.06 if variant.reference else 1)
            results = Row(variant, group, measure).results()
            start = done[0]["start"]
            line = lines.setdefault(start["sha256"] if start else variant.name, [])
            line.append((count, results.mean()))
            colour = f"C{list(lines.values()).index(line)}"
            points(axes, count, results, fmt="s" if variant.reference else "o", color=colour)
            deviation = results.std() if len(results) > 1 else 0.0
            side, offset = (1, 3) if start else (-1, -11)
            where = (count, results.mean() + side * deviation)
            axes.annotate(
                variant.label,
                where,
                (0, offset),
                textcoords="offset points",
                ha="center",
                fontsize="small",
            )
        for index, line in enumerate(lines.values()):
            axes.plot(*zip(*sorted(line), strict=True), color=f"C{index}", alpha=0.4, zorder=1)
        axes.margins(x=0.3, y=0.1)
        axes.grid(alpha=0.3)
        axes.set(
            title=f"{self.title}: final {measure.axis}, mean ± standard deviation",
            xlabel="trained parameters",
            xscale="log",
        )
        return figure
