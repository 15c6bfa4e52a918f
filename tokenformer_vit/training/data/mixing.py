"""Mixing of images, and labels as one tensor from the pipeline to the loss.

mmpretrain's ``DataSample`` of each image costs time: pickling in workers, small kernels on the GPU.
"""

from collections.abc import Sequence
from typing import Any, cast

import timm.loss
import torch
from torch import Tensor, nn
from torch.nn.functional import one_hot
from torchvision.transforms import v2

from tokenformer_vit.errors import InputError

from ..engine import MODELS, ClsDataPreprocessor, LabelSmoothLoss, LinearClsHead
from .images import without_waiting


class _Mix:
    """One of torchvision's mixers for each batch, by mmpretrain's words ``augments`` and ``probs``.

    A batch is put into a random order first: torchvision pairs neighbours, and with repeated
    augmentation a neighbour is often a copy of the same image.
    """

    def __init__(self, augments: Any, probs: Sequence[float] | None = None) -> None:
        augments = [augments] if isinstance(augments, dict) else augments
        mixers = {"Mixup": v2.MixUp, "CutMix": v2.CutMix}
        with torch.device("cpu"):  # whatever the device on which a model is built
            choices = [mixers[each["type"]](alpha=each["alpha"]) for each in augments]
        if probs is not None:
            choices, probs = [*choices, v2.Identity()], [*probs, 1 - sum(probs)]
        self._choice = v2.RandomChoice(choices, p=probs)

    def __call__(self, images: Tensor, scores: Tensor) -> tuple[Tensor, Tensor]:
        """Mix images, (N, C, H, W), and the scores of their labels, (N, K)."""
        order = without_waiting(torch.randperm(len(images)), images.device)
        return self._choice(images[order], scores[order].float())


@MODELS.register_module()
class LabelPreprocessor(ClsDataPreprocessor):
    """mmpretrain's ``ClsDataPreprocessor``, which also takes labels as one tensor.

    With these, nothing waits for the GPU. ``batch_augments``, the ``train_cfg`` of an
    ``ImageClassifier``, has ``augments``, configs of ``Mixup`` and ``CutMix`` with their ``alpha``,
    of which a batch gets one, and perhaps ``probs``.
    """

    def __init__(self, *args: Any, batch_augments: dict | None = None, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if batch_augments:
            self.batch_augments, self.to_onehot = _Mix(**batch_augments), True

    def forward(self, data: dict, training: bool = False) -> dict:
        """Normalise the images of a batch, and mix them in training.

        ``data_samples`` is a list of ``DataSample`` or the labels, (N,) int64, which become (N, K)
        scores if images are mixed.
        """
        images, labels = data["inputs"], data.get("data_samples")
        if isinstance(images, Tensor):
            images = images.to(self.device, non_blocking=True)
        if not isinstance(labels, Tensor):
            return super().forward({**data, "inputs": images}, training)
        images = super().forward({"inputs": images})["inputs"]
        labels = labels.to(self.device, non_blocking=True)
        if self.to_onehot:  # always, where images are mixed
            labels = one_hot(labels, cast(int, self.num_classes)).float()
            if training and self.batch_augments is not None:
                images, labels = self.batch_augments(images, labels)
        return {"inputs": images, "data_samples": labels}


@MODELS.register_module()
class BinaryCrossEntropy(timm.loss.BinaryCrossEntropy):
    """timm's binary cross-entropy, in which each class of a mixed image has the target 1.

    Its mean is over images and classes, as in DeiT III's code (arXiv:2204.07118). With
    ``target_threshold=None`` the scores are kept.
    """

    def __init__(
        self, smoothing: float = 0.0, target_threshold: float | None = 0.0, **kwargs: Any
    ) -> None:
        if smoothing and target_threshold is not None:
            raise InputError(
                f"smoothing {smoothing} makes every class a target above target_threshold "
                f"{target_threshold}: set smoothing=0, or target_threshold=None"
            )
        super().__init__(smoothing, target_threshold, **kwargs)

    def forward(self, x: Tensor, target: Tensor, avg_factor: int | None = None) -> Tensor:
        """Compute the loss; ``avg_factor``, which mmpretrain's heads give, changes nothing."""
        mixed = target.ndim == x.ndim and not self.smooth_dense
        if mixed:  # scores, which timm's own mixing would smooth
            target = target * (1 - self.smoothing) + self.smoothing / x.shape[-1]
        return super().forward(x, target)


@MODELS.register_module()
class LabelHead(LinearClsHead):
    """mmpretrain's ``LinearClsHead``, which also takes labels, or scores, as one tensor."""

    def loss(self, feats: Any, data_samples: Any, **kwargs: Any) -> dict:
        """Return the mean ``loss`` of a list of samples, (N,) int64 labels, or (N, K) scores."""
        if not isinstance(data_samples, Tensor):
            return super().loss(feats, data_samples, **kwargs)
        loss, scores = cast(nn.Module, self.loss_module), self(feats)
        if isinstance(loss, LabelSmoothLoss) and data_samples.ndim == 1:
            # The loss would make the same, but read the labels from the GPU to check them.
            data_samples = one_hot(data_samples, scores.shape[1])
        return {"loss": loss(scores, data_samples, avg_factor=len(scores), **kwargs)}
