"""Questions about pre-training without labels: variants that start from it, or from scratch."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from matplotlib.figure import Figure

from .fields import Config
from .questions import Question
from .rows import FAILED, MINUTES, Column, Record, Row, at_best_lr, result_column


@dataclass(frozen=True, kw_only=True)
class Pretraining(Question):
    """Classifiers that start from a pre-trained encoder, and others from scratch.

    The variants with ``prepares`` train the encoders. They have no result and no row.
    """

    same_size: ClassVar[bool] = False  # a decoder has parameters, too
    papers_run: ClassVar[str] = ""

    @property
    def note(self) -> str:
        """How to read the table."""
        return (
            "Every variant is at its best learning rate, which the first seeds tried; pre-training "
            "has the config's. A Δ is the mean of the differences, seed by seed, ± its standard "
            "error. Minutes do not include pre-training."
        )

    @property
    def common(self) -> tuple[str, ...]:
        """Keys of a record whose values all runs of a table must share."""
        examples = self.field.examples
        varying = (self.field.length, f"train_{examples}")
        return tuple(key for key in super().common if key not in varying)

    def start(self, cfg: Config) -> Config:
        """Return the config without the weights that it starts from."""
        return super().start({**cfg, "model": {**cfg["model"], "backbone": _fresh(cfg)}})

    def start_from(self, cfg: Config, folder: str) -> None:
        """Load an encoder, without a head."""
        new = {"checkpoint_path": f"{folder}/model.safetensors", self.field.seed_key: None}
        self.field.part(cfg).update(new)

    def columns(self) -> Sequence[Column]:
        """Return the columns of the table."""
        return (
            Column("parameters", Row.parameters),
            Column("images with labels", lambda row: row.counts(f"train_{self.field.examples}")),
            Column(self.field.length, lambda row: row.counts(self.field.length)),
            Column("best lr", Row.lr),
            result_column(self.field.measure),
            *self.comparisons(),
            MINUTES,
            FAILED,
        )

    def rows(self, records: Sequence[Record]) -> Iterator[Row | str]:
        """Make a row for each classifier, at its best learning rate."""
        group = at_best_lr(self.field.measure, self.variants, records)
        for variant in self.variants:
            if not variant.prepares:
                yield Row(variant, group, self.field.measure)

    def draw(self, records: Sequence[Record]) -> Figure:
        """Draw the classifiers."""
        shown = tuple(variant for variant in self.variants if not variant.prepares)
        names = {variant.name for variant in shown}
        return super(Pretraining, replace(self, variants=shown)).draw(
            [record for record in records if record["variant"] in names]
        )


def _fresh(cfg: Mapping[str, Any]) -> dict[str, Any]:
    return {**cfg["model"]["backbone"], "checkpoint_path": ""}
