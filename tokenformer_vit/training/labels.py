"""The labels of a batch as one tensor, from the pipeline to the loss.

mmpretrain makes a ``DataSample`` for each image. In training that costs pickling in the workers,
and a small kernel for each image on the GPU, although only the label is used.
"""

from collections.abc import Mapping
from copy import copy
from typing import Any, cast

import cv2
import numpy as np
import timm.loss
import torch
from mmpretrain.datasets import PackInputs
from mmpretrain.evaluation import Accuracy
from mmpretrain.models import ClsDataPreprocessor, LabelSmoothLoss, LinearClsHead
from mmpretrain.models.utils.batch_augments import CutMix, Mixup
from mmpretrain.registry import MODELS, TRANSFORMS
from torch import Tensor, nn
from torch.nn.functional import one_hot

from tokenformer_vit.errors import InputError

from .batch_crops import without_waiting


def check_labels(cfg: Mapping[str, Any], path: str) -> None:
    """Check that the model of a config takes labels in the form in which they are packed.

    mmpretrain's own preprocessor would not mix images whose labels are a tensor.

    Args:
        cfg: The config; its values have the right types.
        path: File of the config, for messages.

    Raises:
        InputError: If labels come as one tensor, but the model does not take one.
    """
    dataset, model = cfg["train_dataloader"]["dataset"], cfg["model"]
    steps = [step.get("type") for step in dataset.get("pipeline", ())]
    head = model.get("head")
    if head is None or head.get("type") == "MAEPretrainHead" or steps[-1:] != ["PackLabels"]:
        return  # a masked autoencoder ignores the labels
    preprocessor = model.get("data_preprocessor") or cfg.get("data_preprocessor") or {}
    fits = head.get("type") in ("LabelHead", "DistilledHead")
    if preprocessor.get("type") != "LabelPreprocessor" or not fits:
        raise InputError(
            f"{path}: data_preprocessor.type is {preprocessor.get('type')} and model.head.type "
            f"{head.get('type')}, but PackLabels in the training pipeline needs LabelPreprocessor "
            "and LabelHead (or DistilledHead): set these, or end the pipeline with PackInputs"
        )


@TRANSFORMS.register_module()
class PackLabels(PackInputs):
    """mmpretrain's ``PackInputs`` for training, with the label instead of a ``DataSample``.

    A model needs :class:`LabelPreprocessor`, and :class:`LabelHead` or :class:`DistilledHead`.
    """

    def transform(self, results: dict) -> dict:
        """Return the image as a (3, H, W) tensor, and its label as a number."""
        image = results["img"]
        if image.ndim == 3 and image.shape[2] == 3 and image.flags.c_contiguous:
            planes: Any = np.empty((3, *image.shape[:2]), image.dtype)
            cv2.split(image, list(planes))  # four times as fast as a copy of the transpose
            image = planes.transpose(1, 2, 0)
        return {"inputs": self.format_input(image), "data_samples": results["gt_label"]}


class _OneHot:
    """One-hot scores of labels.

    They become a tensor after they are mixed: then two of the scores of an image are not zero, and
    only these are computed.
    """

    def __init__(self, labels: Tensor, num_classes: int) -> None:
        self._labels, self._shape = labels, (len(labels), num_classes)

    def float(self) -> Tensor:
        """Return the scores, (N, K) float32."""
        return self._scores(1.0)

    def mix(self, order: Tensor, lam: Any) -> Tensor:
        """Return the mean of the scores, weighted by ``lam``, and the scores in another order."""
        others = self._labels[order][:, None]
        shares = torch.full_like(others, 1 - lam, dtype=torch.float)
        return self._scores(lam).scatter_add_(1, others, shares)

    def _scores(self, value: Any) -> Tensor:
        zeros = self._labels.new_zeros(self._shape, dtype=torch.float)
        return zeros.scatter_(1, self._labels[:, None], value)


def _draw_order(images: Tensor) -> Tensor:
    """Draw the partner of each image, on the processor, and copy it without waiting."""
    return without_waiting(torch.randperm(len(images)), images.device)


class DeviceMixup(Mixup):
    """mmpretrain's ``Mixup``, whose indices are on the device of the images."""

    def mix(self, batch_inputs: Tensor, batch_scores: Any) -> tuple[Tensor, Tensor]:
        """Mix each image, (N, C, H, W), and its :class:`_OneHot` scores with those of another."""
        lam = np.random.beta(self.alpha, self.alpha)  # noqa: NPY002  # checkpoints keep its state
        order = _draw_order(batch_inputs)
        others = batch_inputs[order].mul_(1 - lam)
        return batch_inputs.mul_(lam).add_(others), batch_scores.mix(order, lam)


class DeviceCutMix(CutMix):
    """mmpretrain's ``CutMix``, whose indices are on the device of the images."""

    def mix(self, batch_inputs: Tensor, batch_scores: Any) -> tuple[Tensor, Tensor]:
        """Paste into each image, (N, C, H, W), a box of another; mix :class:`_OneHot` scores."""
        lam = np.random.beta(self.alpha, self.alpha)  # noqa: NPY002  # checkpoints keep its state
        order = _draw_order(batch_inputs)
        height, width = batch_inputs.shape[-2:]
        (y1, y2, x1, x2), lam = self.cutmix_bbox_and_lam((height, width), lam)
        boxes = batch_inputs[:, :, y1:y2, x1:x2]
        boxes.copy_(boxes[order])
        return batch_inputs, batch_scores.mix(order, lam)


def _on_device(augment: Any) -> Any:
    """Turn an augmentation of mmpretrain, or None, into a function that takes :class:`_OneHot`."""
    own = {Mixup: DeviceMixup, CutMix: DeviceCutMix}.get(type(augment))
    if own is not None:
        return own(**vars(augment)).mix
    return augment and (lambda images, scores: augment(images, scores.float()))


@MODELS.register_module()
class LabelPreprocessor(ClsDataPreprocessor):
    """mmpretrain's ``ClsDataPreprocessor``, which also takes labels as one tensor.

    With these, nothing waits for the GPU. Mixup and CutMix draw the same numbers as mmpretrain's.
    """

    _mixing: tuple[Any, Any] = (None, None)  # the augmentations, and our form of them

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._non_blocking = torch.cuda.is_available()

    @property
    def _mix(self) -> Any:
        """What mixes images; mmpretrain's ``SwitchRecipeHook`` replaces it during a run."""
        stock = self.batch_augments
        if self._mixing[0] is not stock:
            mix: Any = copy(stock)
            if mix is not None:
                mix.augments = list(map(_on_device, mix.augments))
            self._mixing = stock, mix
        return self._mixing[1]

    def forward(self, data: dict, training: bool = False) -> dict:
        """Normalise the images of a batch, and mix them in training.

        Args:
            data: ``inputs``, and as ``data_samples`` a list of ``DataSample`` or the labels, (N,)
                int64.
            training: Whether to mix images.

        Returns:
            The same entries. Labels become (N, K) scores if images are mixed.
        """
        labels = data.get("data_samples")
        if not isinstance(labels, Tensor):
            return super().forward(data, training)
        batch = {"inputs": self._normalized(data["inputs"])}
        targets: Any = self.cast_data(labels)
        if self.to_onehot:  # always, where images are mixed
            scores: Any = _OneHot(targets, cast(int, self.num_classes))
            if training and self._mix is not None:
                batch["inputs"], targets = self._mix(batch["inputs"], scores)
            else:
                targets = scores.float()
        return {**batch, "data_samples": targets}

    def _normalized(self, images: Any) -> Tensor:
        """Normalise images as mmpretrain does; where it is possible, in the memory of one copy."""
        usual = hasattr(self, "mean") and self.pad_size_divisor <= 1
        if not usual or not isinstance(images, Tensor) or images.dtype != torch.uint8:
            return super().forward({"inputs": images})["inputs"]
        images = self.cast_data(images)
        if self.to_rgb and images.shape[1] == 3:
            images = images.flip(1)
        return images.float().sub_(self.mean).div_(self.std)


@MODELS.register_module()
class BinaryCrossEntropy(timm.loss.BinaryCrossEntropy):
    """timm's binary cross-entropy, in which each class of a mixed image has the target 1.

    Args:
        smoothing: Smoothing of labels, (N,), of images that are not mixed.
        target_threshold: Scores above it become 1, others 0; ``None`` keeps the scores.
        **kwargs: As for timm's loss. ``sum_classes=True`` adds the classes, instead of their mean.

    Raises:
        InputError: If both ``smoothing`` and a ``target_threshold`` are given.

    Shape:
        (N, K) scores of the model and (N, K) scores of the labels, or (N,) int64 labels -> ().

    Source:
        DeiT III, arXiv:2204.07118. Its code has the mean over images and classes.
    """

    def __init__(
        self, smoothing: float = 0.0, target_threshold: float | None = 0.0, **kwargs: Any
    ) -> None:
        if smoothing and target_threshold is not None:
            raise InputError(
                f"smoothing {smoothing} gives every class a score above 0, and target_threshold "
                f"{target_threshold} would make each of them a target of 1: set smoothing=0, or "
                "target_threshold=None"
            )
        super().__init__(smoothing, target_threshold, **kwargs)

    def forward(self, x: Tensor, target: Tensor, avg_factor: int | None = None) -> Tensor:
        """Compute the loss; ``avg_factor``, which mmpretrain's heads give, changes nothing."""
        return super().forward(x, target)


@MODELS.register_module()
class LabelHead(LinearClsHead):
    """mmpretrain's ``LinearClsHead``, which also takes labels, or scores, as one tensor."""

    def _get_loss(self, cls_score: Tensor, data_samples: Any, **kwargs: Any) -> dict:
        """Compute the loss of a batch.

        Args:
            cls_score: (N, K) scores of the classes.
            data_samples: List of ``DataSample``, or (N,) int64 labels, or (N, K) scores.
            **kwargs: Passed to the loss.

        Returns:
            The mean ``loss`` of the batch and, with ``cal_acc``, its accuracy; for a list of
            ``DataSample``, the result of mmpretrain's head.

        Raises:
            InputError: If ``cal_acc`` is given, and images are mixed.
        """
        if not isinstance(data_samples, Tensor):
            return super()._get_loss(cls_score, data_samples, **kwargs)
        loss, found = cast(nn.Module, self.loss_module), {}
        if self.cal_acc:
            if data_samples.ndim > 1:
                raise InputError(
                    "model.head.cal_acc is True, but mixed images have no single label: set "
                    "cal_acc=False, or model.train_cfg.augments=None"
                )
            topk: Any = self.topk  # a tuple; mmpretrain also declares a number
            right: Any = Accuracy.calculate(cls_score, data_samples, topk=topk)
            found = {f"accuracy_top-{k}": own for k, own in zip(topk, right, strict=True)}
        if isinstance(loss, LabelSmoothLoss) and data_samples.ndim == 1:
            # The loss would make the same, but read the labels from the GPU to check them.
            data_samples = one_hot(data_samples, cls_score.shape[1])
        return {"loss": loss(cls_score, data_samples, avg_factor=len(cls_score), **kwargs), **found}


@MODELS.register_module()
class DistilledHead(LabelHead):
    """The two heads of a model with a distillation token, such as ``tokenformer_small_distilled``.

    Scores are the mean of both. Under a
    :class:`~tokenformer_vit.training.distillation.DistilledClassifier` labels train the first head,
    and the teacher the second; otherwise labels train the mean.

    Args:
        num_classes: Number of classes K.
        in_channels: Width C of the tokens.
        **kwargs: As for ``LinearClsHead``.

    Shape:
        A tuple of the class token and the distillation token, (N, C) each -> (N, K).

    Source:
        DeiT, arXiv:2012.12877, Section 4.
    """

    def __init__(self, num_classes: int, in_channels: int, **kwargs: Any) -> None:
        super().__init__(num_classes, in_channels, **kwargs)
        self.fc_dist = nn.Linear(in_channels, num_classes)

    def forward(self, feats: tuple[Tensor, ...]) -> Tensor:
        """Return the mean of the scores of both heads."""
        of_labels, of_teacher = self.both(feats)
        return (of_labels + of_teacher) / 2

    def both(self, feats: tuple[Tensor, ...]) -> tuple[Tensor, Tensor]:
        """Return the scores of each head: that of the labels, and that of the teacher."""
        class_token, distillation_token = feats
        return self.fc(class_token), self.fc_dist(distillation_token)
