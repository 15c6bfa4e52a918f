"""Training of nested models: several sizes of one model in each step, by the sandwich rule."""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from tokenformer_vit.errors import InputError
from tokenformer_vit.models.sizes import at_size

from ..engine import MODELS, ImageClassifier, MessageHub

ALONE = 0.1  # share of a run with ``distill`` in which the largest size is trained alone


class NestedTraining:
    """What a classifier and a language model share if one ``loss()`` computes several sizes.

    A step computes the largest size, the smallest and a random one between them, in one loss (the
    sandwich rule, arXiv:1903.05134). With ``distill`` (Scala, arXiv:2412.04786) a smaller size
    learns the labels and, with the same weight, the predictions of the next larger size of the
    step; the largest size is trained alone in the first tenth of the run.
    """

    sandwich: bool = False
    distill: bool = False
    sized: Any  # the TokenFormer

    @property
    def smaller_sizes(self) -> tuple[float, ...]:
        """Shares of the pairs that are trained besides all pairs; a validation measures them."""
        return self.sized.sizes[:-1] if self.sandwich else ()

    def train_sizes(self, distill: bool) -> None:
        """Train all sizes of the model, which are shares of the pairs of all layers."""
        sizes = getattr(self.sized, "sizes", ())
        if len(sizes) < 2:
            raise InputError(
                f"the model is to be trained at several sizes, but its sizes are {sizes or 'one'}: "
                "give shares in the arguments of a TokenFormer, as in nested=(0.25, 0.5, 0.75)"
            )
        self.sandwich, self.distill = True, distill

    def drawn_sizes(self) -> tuple[float | None, ...]:
        """Return the sizes of this iteration, from the largest on; a resumed run draws the same."""
        if not self.sandwich:
            return (None,)
        info = MessageHub.get_current_instance().runtime_info
        iteration = info.get("iter", 0)
        smallest, *inner, largest = self.sized.sizes
        if self.distill and iteration < ALONE * info.get("max_iters", 0):
            return (largest,)
        random = np.random.default_rng((info.get("seed") or 0, iteration))
        between = [float(random.choice(inner))] if inner else []
        return (largest, *between, smallest)

    def loss_of_sizes(
        self,
        forward: Callable[[], Any],
        loss: Callable[[Any], Tensor],
        logits: Callable[[Any], Tensor],
    ) -> dict[str, Tensor]:
        """Return the mean loss of a step's sizes, by ``loss`` and ``logits`` of a ``forward``."""
        losses, teacher = [], None
        for size in self.drawn_sizes():
            with at_size(self.sized, size):
                result = forward()
            own = loss(result)
            if self.distill:
                scores = logits(result).float().flatten(0, -2).log_softmax(dim=-1)
                if teacher is not None:
                    taught = F.kl_div(scores, teacher, reduction="batchmean", log_target=True)
                    own = (own + taught) / 2
                teacher = scores.detach()
            losses.append(own)
        return {"loss": torch.stack(losses).mean()}


@MODELS.register_module()
class NestedClassifier(NestedTraining, ImageClassifier):
    """mmpretrain's ``ImageClassifier``, trained at several sizes at once.

    Its backbone has ``nested``, such as (0.25, 0.5, 0.75). A validation measures every size:
    ``accuracy/top1`` is that of all pairs, and ``accuracy/top1_at_0.25`` that of a quarter of them.
    """

    backbone: Any
    head: Any

    def __init__(self, distill: bool = False, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.train_sizes(distill)

    @property
    def sized(self) -> Any:
        """The TokenFormer."""
        return self.backbone.model

    def loss(self, inputs: Tensor, data_samples: Any) -> dict[str, Tensor]:
        """Compute the mean loss of the sizes of a step; images are already mixed."""
        return self.loss_of_sizes(
            lambda: self.extract_feat(inputs),
            lambda features: self.head.loss(features, data_samples)["loss"],
            self.head,
        )

    def predict(self, inputs: Tensor, data_samples: Any = None, **kwargs: Any) -> list[Any]:
        """Predict at every size: ``pred_score`` of the full one, ``pred_score_at_0.25``."""
        samples = super().predict(inputs, data_samples, **kwargs)
        for size in self.smaller_sizes:
            with at_size(self.sized, size):
                scores = self.head(self.extract_feat(inputs)).softmax(dim=1)  # (B, K)
            for sample, own in zip(samples, scores, strict=True):
                sample.set_field(own, f"pred_score_at_{size:g}")
        return samples
