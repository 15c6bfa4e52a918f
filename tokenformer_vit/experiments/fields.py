"""The two fields that ablations are of, images and language, and all that differs between them.

Plain values alone, so that the tables are rendered without OpenMMLab and without transformers.
"""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import reduce
from importlib import import_module
from typing import Any

Config = dict[str, Any]


@dataclass(frozen=True)
class Measure:
    """What a validation measures.

    Args:
        name: In records.
        keys: What it is called in the log of a run, with others that are recorded beside it: a
            regular expression, whose first group is the name in records.
        title: At the beginning of a sentence.
        heading: For tables.
        axis: For charts.
        form: Says one figure of it, in a line.
        higher_is_better: Which way it goes.
        logarithmic: Whether its logarithm is what can be averaged and drawn straight lines through.
    """

    name: str
    keys: str
    title: str
    heading: str
    axis: str
    form: str
    higher_is_better: bool
    logarithmic: bool

    def read(self, line: Mapping[str, Any]) -> dict[str, float]:
        """Return what a line of a log says of it, under the names of records."""
        matches = ((re.fullmatch(self.keys, key), value) for key, value in line.items())
        return {match[1]: round(float(value), 3) for match, value in matches if match}

    def score(self, value: float) -> float:
        """Return what is the higher, the better; of perplexity −ln, the loss with its sign turned.

        Args:
            value: As records have it.
        """
        scale = math.log(value) if self.logarithmic else value
        return scale if self.higher_is_better else -scale

    def value(self, score: float) -> float:
        """Return what has a score."""
        scale = score if self.higher_is_better else -score
        return math.exp(scale) if self.logarithmic else scale


@dataclass(frozen=True)
class Field:
    """What the runs of a field have in common, and those of the other have otherwise.

    Args:
        measure: How good a model is.
        path: Where in a config the part is that variants change.
        own: Keys of that part which belong to a run and not to a variant.
        seed_key: The one of them that draws alike what variants have in common; empty for none.
        unit: In which the length of a run is counted, as validations are in records.
        length: That length, in records.
        limit: The key of ``train_cfg`` that sets it.
        begun: How the log of a run says which unit it has begun; its first group is the number.
        examples: How many a training set has, in records and in words.
        per_step: How many a step of the optimiser takes, in records.
        costs: Whether what a training costs is recorded of every run.
        transformer: What a TokenFormer is compared with.
        models: Module that builds the models: ``shape_of`` and ``build``.
    """

    measure: Measure
    path: tuple[str, ...]
    own: frozenset[str]
    seed_key: str
    unit: str
    length: str
    limit: str
    begun: bytes
    examples: tuple[str, str]
    per_step: str
    costs: bool
    transformer: str
    models: str

    def part(self, cfg: Mapping[str, Any]) -> Any:
        """Return the part of a config, or of what is said of one, that variants change."""
        return reduce(lambda node, key: node.get(key, {}), self.path, cfg)

    def within(self, part: Config) -> Config:
        """Say of a part where in a config it is."""
        return reduce(lambda node, key: {key: node}, reversed(self.path), part)

    def replace(self, cfg: Config, part: Config) -> None:
        """Put a part into a config."""
        *above, last = self.path
        reduce(lambda node, key: node[key], above, cfg)[last] = part

    def builder(self) -> Any:
        """Import the module that builds the models, which needs more than tables do."""
        return import_module(f".{self.models}", __package__)


VISION = Field(
    measure=Measure(
        name="top1",
        keys=r"accuracy/(\w+)",
        title="Top-1",
        heading="top-1 %",
        axis="top-1 (%)",
        form="top-1 {:.2f} %",
        higher_is_better=True,
        logarithmic=False,
    ),
    path=("model", "backbone"),
    own=frozenset({"stem_seed", "checkpoint_path"}),  # the weights that are tuned are checked apart
    seed_key="stem_seed",
    unit="epoch",
    length="epochs",
    limit="max_epochs",
    begun=rb'"epoch": (\d+)',
    examples=("train_images", "training images"),
    per_step="images_per_step",
    costs=False,
    transformer="ViT",
    models="image_models",
)

LANGUAGE = Field(
    measure=Measure(
        name="perplexity",
        keys=r"(perplexity(?:/.+)?)",
        title="Perplexity",
        heading="perplexity",
        axis="perplexity",
        form="perplexity {:.2f}",
        higher_is_better=False,
        logarithmic=True,
    ),
    path=("model",),
    own=frozenset({"checkpoint"}),  # the end of another run, which has a digest of its own
    seed_key="",
    unit="iteration",
    length="iterations",
    limit="max_iters",
    begun=rb'"step": (\d+)',
    examples=("train_sequences", "training sequences"),
    per_step="sequences_per_step",
    costs=True,
    transformer="Transformer",
    models="language_models",
)
