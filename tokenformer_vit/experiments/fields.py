"""The two fields of ablations, images and language, and the names in their configs and logs.

Tables need only these names. Methods that build models import OpenMMLab or Hugging Face themselves.
"""

import math
import re
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from functools import reduce
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from tokenformer_vit.benchmarking.costs import training_flops
from tokenformer_vit.errors import InputError
from tokenformer_vit.models.sizes import at_size

from .variants import Shape

Config = dict[str, Any]


@dataclass(frozen=True)
class Measure:
    """A result of validation, such as top-1 or perplexity."""

    name: str  # in records
    label: str  # in tables, charts and messages
    unit: str  # "%" or empty
    keys: str  # regular expression for keys of a log; its first group is the name in records
    logarithmic: bool = False  # perplexity: lower is better, and its logarithm is averaged

    @property
    def heading(self) -> str:
        """Heading of a column."""
        return f"{self.label} {self.unit}".rstrip()

    @property
    def axis(self) -> str:
        """Label of an axis."""
        return f"{self.label} ({self.unit})" if self.unit else self.label

    def read(self, line: Mapping[str, Any]) -> dict[str, float]:
        """Read the results in a log line, by their names in records."""
        matches = ((re.fullmatch(self.keys, key), value) for key, value in line.items())
        return {match[1]: round(float(value), 3) for match, value in matches if match}

    def score(self, value: float) -> float:
        """Turn a result into a score, where higher is better: perplexity p becomes −ln p."""
        return -math.log(value) if self.logarithmic else value

    def value(self, score: float) -> float:
        """Turn a score back into a result."""
        return math.exp(-score) if self.logarithmic else score


class Field(ABC):
    """A field of ablations: the common parts of all its runs."""

    measure: ClassVar[Measure]
    path: ClassVar[tuple[str, ...]]  # keys of the part of a config that variants change
    weights_key: ClassVar[str]  # key in this part that names the weights to start from
    seed_key: ClassVar[str] = ""  # key in this part that seeds the weights outside the blocks
    unit: ClassVar[str]  # in which a run and its validations are counted
    limit: ClassVar[str]  # key of ``train_cfg`` that sets the length of a run
    begun: ClassVar[bytes]  # regular expression for the present epoch or iteration in a log line
    examples: ClassVar[str]  # what a training set consists of
    counts_flops: ClassVar[bool]  # whether every run counts its training FLOPs
    transformer: ClassVar[str]  # what a TokenFormer is compared with

    @property
    def length(self) -> str:
        """Key of the length of a run in a record."""
        return f"{self.unit}s"

    def part(self, cfg: Mapping[str, Any]) -> Any:
        """Return the part of a config that variants change."""
        return reduce(lambda node, key: node.get(key, {}), self.path, cfg)

    def within(self, part: Config) -> Config:
        """Return a config that has only this part."""
        return reduce(lambda node, key: {key: node}, reversed(self.path), part)

    def replace(self, cfg: Config, part: Config) -> None:
        """Replace the part of a config."""
        *above, last = self.path
        reduce(lambda node, key: node[key], above, cfg)[last] = part

    def from_scratch(self, cfg: Config) -> Config:
        """Check that a config starts from no trained weights.

        Raises:
            InputError: If it does.
        """
        if cfg.get("load_from"):
            raise InputError(
                f"load_from is {cfg['load_from']}, but an ablation trains from scratch; set it to "
                "None"
            )
        if weights := self.part(cfg).get(self.weights_key):
            raise InputError(
                f"{'.'.join((*self.path, self.weights_key))} is {weights}, but an ablation trains "
                "from scratch; set it to an empty string"
            )
        return cfg

    @abstractmethod
    def continued(self, part: Config) -> Config:
        """Return the part of a config for a run that continues an earlier run."""

    @abstractmethod
    def start_from(self, cfg: Config, folder: str) -> None:
        """Let a run start from the end of the run in a folder."""

    @abstractmethod
    def sized(self, part: Config, sizes: Mapping[str, int]) -> Config:
        """Set sizes, named as in the schedule of GrowthHook, in the part that variants change."""

    @abstractmethod
    def flops(self, cfg: Mapping[str, Any]) -> int:
        """Count the FLOPs of training a config's model on one image or sequence.

        Raises:
            InputError: If they cannot be counted.
        """

    @abstractmethod
    def num_examples(self, cfg: Mapping[str, Any]) -> int:
        """Count the images or sequences of a config's training set."""

    @abstractmethod
    def random_loss(self, model: nn.Module, batch_size: int, device: torch.device) -> Tensor:
        """Return a loss of a built model on a random batch, to time its backward pass."""

    @abstractmethod
    def check_data(self, cfg: Mapping[str, Any]) -> None:
        """Check that the data of a config can be read.

        Raises:
            InputError: If not.
        """

    @abstractmethod
    def build(self, cfg: Mapping[str, Any]) -> nn.Module:
        """Build the model of a config; on the meta device, unless the config loads weights."""

    @abstractmethod
    def shape_of(self, cfg: Mapping[str, Any]) -> tuple[Shape, int]:
        """Return the sizes of a config's TokenFormer and the number of its parameters.

        Raises:
            InputError: If the model is not a TokenFormer.
        """


def mean_flops(model: Any, num_tokens: int | None = None) -> int:
    """Count the FLOPs of training on one image, or row of tokens; of a nested model, the mean."""
    if not model.sandwich:
        return training_flops(model.sized, num_tokens)
    from tokenformer_vit.training.models.nested import ALONE

    flops = []
    for size in model.sized.sizes:
        with at_size(model.sized, size):
            flops.append(training_flops(model.sized, num_tokens))
    smallest, *inner, largest = flops
    smaller = smallest + sum(inner) / max(1, len(inner))
    return round(largest + smaller * (1 - ALONE if model.distill else 1))
