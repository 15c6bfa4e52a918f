"""Training of nested models: several sizes of one model in each step."""

from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any, Literal

import numpy as np
import torch
import torch.nn.functional as F
from mmpretrain.models import ImageClassifier
from mmpretrain.registry import MODELS
from pydantic import BaseModel, ConfigDict, Field, model_validator
from torch import Tensor

from tokenformer_vit.benchmarking.costs import training_flops
from tokenformer_vit.errors import InputError
from tokenformer_vit.models import TokenFormerViT
from tokenformer_vit.models.sizes import at_size

Part = tuple[float | None, slice]  # a size, and the examples of a batch that train it
_STEPS = 200  # over which the cost of a training is averaged


class SizeRule(BaseModel):
    """Which sizes of a nested model a training step computes.

    Args:
        rule: ``one`` random size; ``sandwich``: the largest size, the smallest, and random ones
            between them; ``all`` sizes; or ``parts``: all sizes, each on its own part of the batch.
        distill: Whether the smaller sizes learn the predictions of the largest size instead of the
            labels. Only for ``sandwich`` and ``all``.
        between: Whether to draw any share between the smallest and the largest size, instead of the
            sizes of the model.
        inner: Number of random sizes of ``sandwich``.
        full_share: Share of the batch that trains the largest size in ``parts``. The smaller sizes
            divide the rest evenly.

    Source:
        ``sandwich`` and ``distill``: arXiv:1903.05134. ``parts``: this project.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    rule: Literal["one", "sandwich", "all", "parts"] = "sandwich"
    distill: bool = False
    between: bool = False
    inner: Annotated[int, Field(ge=1)] = 1
    full_share: Annotated[float, Field(gt=0, lt=1)] = 0.5

    @model_validator(mode="after")
    def _check_distill(self) -> "SizeRule":
        if self.distill and self.rule in ("one", "parts"):
            raise ValueError(
                f"distill is True, but with the rule {self.rule!r} no image has predictions of two "
                "sizes: use 'sandwich' or 'all', or set distill=False"
            )
        return self

    def draw(self, sizes: Sequence[float], seed: int, iteration: int) -> tuple[float, ...]:
        """Draw the sizes of an iteration: the same ones after a resume, and on all processes.

        Args:
            sizes: Shares that the model is nested at, from the smallest on.
            seed: Seed of the run.
            iteration: Number of the iteration.

        Returns:
            The shares, from the largest on.
        """
        random = np.random.default_rng((seed, iteration))
        smallest, *inner, largest = sizes
        if self.rule == "one" and not self.between:
            return (float(random.choice(sizes)),)
        count = {"one": 1, "sandwich": self.inner}.get(self.rule, len(inner))
        drawn: Any = inner
        if self.between:
            # Rounded: the cost of each size is counted once.
            drawn = random.uniform(smallest, largest, count).round(3)
        elif self.rule == "sandwich":
            drawn = random.choice(inner, min(count, len(inner)), replace=False)
        between = sorted(map(float, drawn), reverse=True)
        return tuple(between) if self.rule == "one" else (largest, *between, smallest)

    def divide(self, drawn: Sequence[float], count: int) -> list[Part]:
        """Return the examples of a batch of ``count`` that each drawn size learns from."""
        if self.rule != "parts":
            return [(size, slice(0, count)) for size in drawn]
        shares = [self.full_share, *[(1 - self.full_share) / (len(drawn) - 1)] * (len(drawn) - 1)]
        ends = np.rint(np.cumsum(shares) * count).astype(int).tolist()
        parts = zip(drawn, [0, *ends], ends, strict=False)
        return [(size, slice(start, end)) for size, start, end in parts if start < end]


class NestedTraining:
    """What a classifier and a language model share if one ``loss()`` computes several sizes.

    All sizes of a step are in one loss, so gradients are exchanged, accumulated and clipped once.

    Attributes:
        size_rule: The rule; None for a model that is trained at its full size only.
    """

    size_rule: SizeRule | None = None
    _drawn: tuple[float, ...] = ()

    @property
    def sized(self) -> Any:
        """The TokenFormer."""
        raise NotImplementedError

    @property
    def smaller_sizes(self) -> tuple[float, ...]:
        """Shares of the pairs that are trained besides all pairs; a validation measures them."""
        return self.sized.sizes[:-1] if self.size_rule else ()

    def set_rule(self, rule: dict[str, Any]) -> None:
        """Set how sizes are trained.

        Raises:
            InputError: If the model has only one size, or a size that is not a share of all layers.
        """
        sizes = getattr(self.sized, "sizes", ())
        if len(sizes) < 2 or any(isinstance(size, Mapping) for size in sizes):
            raise InputError(
                f"size_rule is {rule}, but the sizes of the model are {sizes or 'one'}: give "
                "shares in the arguments of a TokenFormer, as in nested=(0.25, 0.5, 0.75), or "
                "remove size_rule"
            )
        self.size_rule = SizeRule(**rule)
        self.draw_sizes(0, 0)

    def draw_sizes(self, seed: int, iteration: int) -> None:
        """Draw the sizes of the next iteration; see :meth:`SizeRule.draw`."""
        if self.size_rule is not None:
            self._drawn = self.size_rule.draw(self.sized.sizes, seed, iteration)

    def parts(self, count: int) -> list[Part]:
        """Return what a step computes with a batch of ``count`` examples."""
        if self.size_rule is None:
            return [(None, slice(0, count))]
        return self.size_rule.divide(self._drawn, count)

    def check_batch(self, count: int) -> None:
        """Check that a batch of ``count`` examples has some for every size of a step.

        Raises:
            InputError: If not: a size would never be trained.
        """
        if self.size_rule is not None and len(self.parts(count)) < len(self._drawn):
            raise InputError(
                f"train_dataloader.batch_size is {count}, which leaves no example for one of the "
                f"{len(self._drawn)} sizes: increase it, or choose another size_rule than 'parts'"
            )

    def mean_flops(self, count: int, num_tokens: int | None = None) -> int:
        """Count the FLOPs of training on one example: the mean over many steps.

        Args:
            count: Number of examples in a batch.
            num_tokens: Length of the sequences; see
                :func:`tokenformer_vit.benchmarking.costs.training_flops`.
        """
        if self.size_rule is None:
            return training_flops(self.sized, num_tokens)
        rule, sizes = self.size_rule, self.sized.sizes
        total, known = 0, dict[float | None, int]()
        for iteration in range(_STEPS):
            for size, part in rule.divide(rule.draw(sizes, 0, iteration), count):
                if size not in known:
                    with at_size(self.sized, size):
                        known[size] = training_flops(self.sized, num_tokens)
                total += known[size] * (part.stop - part.start)
        return round(total / (_STEPS * count))

    def loss_of_sizes(
        self,
        count: int,
        forward: Callable[[slice], Any],
        loss: Callable[[Any, slice], Tensor],
        logits: Callable[[Any], Tensor],
    ) -> dict[str, Tensor]:
        """Compute the mean loss of all sizes of a step, each weighted by its examples.

        Args:
            count: Number of examples in the batch.
            forward: Function that computes a part of the batch, at the size that is set.
            loss: Function from the result of ``forward`` to the loss of a part, by its labels.
            logits: Function from the result of ``forward`` to the logits, (..., K).

        Raises:
            InputError: If the model uses gradient checkpointing.
        """
        sized, parts = self.sized, self.parts(count)
        losses, teacher = [], None
        distill = self.size_rule is not None and self.size_rule.distill
        for size, part in parts:
            with at_size(sized, size):
                result = forward(part)
            if teacher is not None:
                own = logits(result).float().flatten(0, -2)
                losses.append(F.cross_entropy(own, teacher))
                continue
            losses.append(loss(result, part))
            if distill:
                teacher = logits(result).detach().float().flatten(0, -2).softmax(dim=-1)
        numbers = [part.stop - part.start for _, part in parts]
        weighted = [own * number for own, number in zip(losses, numbers, strict=True)]
        return {"loss": torch.stack(weighted).sum() / sum(numbers)}


@MODELS.register_module()
class NestedClassifier(NestedTraining, ImageClassifier):
    """mmpretrain's ``ImageClassifier``, trained at several sizes at once.

    ::

        model = dict(
            type="NestedClassifier",
            size_rule=dict(rule="sandwich"),
            backbone=dict(nested=(0.25, 0.5, 0.75)),
        )

    A validation measures every size of the model: ``accuracy/top1`` is that of the full size, and
    ``accuracy/top1_at_0.25`` is that of a quarter of the pairs.

    Args:
        size_rule: Arguments of :class:`SizeRule`.
        **kwargs: Arguments of ``ImageClassifier``. The backbone is a
            :class:`~tokenformer_vit.training.TimmClassificationBackbone` with a nested TokenFormer.

    Raises:
        InputError: If the backbone is not a nested TokenFormer.

    Note:
        A layer with a learned τ has others for the smaller sizes. A step of the rule ``one`` does
        not use all of them: with several processes, set
        ``model_wrapper_cfg.find_unused_parameters=True``.
    """

    def __init__(self, size_rule: dict[str, Any], **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.set_rule(size_rule)

    @property
    def sized(self) -> Any:
        """The TokenFormer; None if the backbone has none."""
        model = getattr(self.backbone, "model", None)
        return model if isinstance(model, TokenFormerViT) else None

    def loss(self, inputs: Tensor, data_samples: Any) -> dict[str, Tensor]:
        """Compute the mean loss of the sizes of a step.

        Args:
            inputs: (B, C, H, W) images, already mixed.
            data_samples: Labels or scores of the images, as a tensor or a list.
        """
        head: Any = self.head
        return self.loss_of_sizes(
            len(inputs),
            lambda part: self.extract_feat(inputs[part]),
            lambda features, part: head.loss(features, data_samples[part])["loss"],
            head,
        )

    def predict(
        self, inputs: Tensor, data_samples: list[Any] | None = None, **kwargs: Any
    ) -> list[Any]:
        """Predict at every size.

        Args:
            inputs: (B, C, H, W) images.
            data_samples: Samples that get the predictions; default: new ones.
            **kwargs: Passed to the head.

        Returns:
            The samples. ``pred_score`` is of the full size, ``pred_score_at_0.25`` of a smaller.
        """
        samples = super().predict(inputs, data_samples, **kwargs)
        head: Any = self.head
        for size in self.smaller_sizes:
            with at_size(self.sized, size):
                scores = head(self.extract_feat(inputs)).softmax(dim=1)  # (B, K)
            for sample, own in zip(samples, scores, strict=True):
                sample.set_field(own, f"pred_score_at_{size:g}")
        return samples
