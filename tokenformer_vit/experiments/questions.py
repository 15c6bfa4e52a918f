"""What an ablation asks, and what is common to the kinds of questions."""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from matplotlib.figure import Figure
from torch import nn

from .fields import Config, Field
from .image_models import IMAGES
from .rows import Column, Record, Row, at_best_lr, best_lr, by_variant, head, line
from .variants import Shape, Variant


@dataclass(frozen=True, kw_only=True)
class Question(ABC):
    """One question, with a table and a chart of its own. Subclasses are the kinds of questions.

    Args:
        name: Name of the file that asks it.
        title: Heading.
        text: What is asked, and what the paper says, in Markdown: the docstring of the file.
        variants: Rows of the table, in order.
        field: Images or language.
    """

    name: str
    title: str
    text: str | None
    variants: tuple[Variant, ...]
    field: Field = IMAGES

    same_size: ClassVar[bool] = True  # all variants have as many parameters, within 1 %
    loads_weights: ClassVar[bool] = False  # the config starts from trained weights
    counts_flops: ClassVar[bool] = False  # every run counts its training FLOPs
    papers_run: ClassVar[str] = "the paper's setting"  # in the table of images; empty for none
    chart: ClassVar[str] = "{} and curves"  # what the chart shows of the measure

    # The runs.

    def start(self, cfg: Config) -> Config:
        """Return the config whose model variants are changes of.

        Raises:
            InputError: If it starts from weights and should not, or the reverse.
        """
        return self.field.from_scratch(cfg)

    def start_of(self, part: Mapping[str, Any]) -> dict[str, Any]:
        """Say for the record what weights a variant starts from."""
        return {}

    def end_of(self, part: Mapping[str, Any]) -> dict[str, Any]:
        """Return the model that a run ends with, as a model from scratch."""
        return dict(part)

    def counts(self, model: nn.Module) -> dict[str, int]:
        """Count parameters for the record."""
        return {"parameters": sum(parameter.numel() for parameter in model.parameters())}

    def put_data_root(self, cfg: Config, data_root: str | None) -> None:
        """Put ``--data-root`` into a config."""
        for name in ("train_dataloader", "val_dataloader", "test_dataloader"):
            if data_root is not None:
                cfg[name]["dataset"]["data_root"] = data_root

    def outside(
        self, variant: Variant, shape: Shape, length: int, data_root: str | None
    ) -> dict[str, Any]:
        """Return what a variant changes outside the model."""
        return variant.outside(shape, length) if variant.outside is not None else {}

    # The table.

    @property
    def common(self) -> tuple[str, ...]:
        """Keys of a record whose values all runs of a table must share."""
        examples = self.field.examples
        return "config", self.field.length, f"train_{examples}", f"{examples}_per_step", "dtype"

    @property
    def note(self) -> str:
        """How to read the table."""
        return ""

    @abstractmethod
    def columns(self) -> Sequence[Column]:
        """Return the columns of the table."""

    def rows(self, records: Sequence[Record]) -> Iterator[Row | str]:
        """Sort the runs into rows, and headings of groups where there are several learning rates.

        Args:
            records: The runs of a table; without any, every variant has an empty row.
        """
        measure = self.field.measure
        rates = sorted({record["lr"] for record in records})
        of_variants = by_variant(self.variants, records)
        best = {variant: best_lr(measure, runs) for variant, runs in of_variants.items()}
        for lr in rates if len(rates) > 1 else ():
            group = by_variant(self.variants, [run for run in records if run["lr"] == lr])
            yield f"lr {lr:g}"
            yield from (Row(each, group, measure, best[each] == lr) for each in self.variants)
        if len(rates) > 1:
            yield "each at its best lr"
        group = at_best_lr(measure, self.variants, records)
        yield from (Row(variant, group, measure) for variant in self.variants)

    def table(self, records: Sequence[Record]) -> str:
        """Render the table of some runs."""
        columns = self.columns()
        rows = (
            f"| **{row}** |{' |' * len(columns)}\n" if isinstance(row, str) else line(row, columns)
            for row in self.rows(records)
        )
        return head(columns) + "".join(rows)

    @abstractmethod
    def draw(self, records: Sequence[Record]) -> Figure:
        """Draw the chart of some runs, each variant at its best learning rate."""
