"""The labels of a batch as one tensor, from the pipeline to the loss.

mmpretrain makes a ``DataSample`` for each image. In training that costs pickling in the workers,
and a small kernel for each image on the GPU, and nothing of it but the label is used.
"""

from collections.abc import Mapping
from typing import Any, cast

import cv2
import numpy as np
from mmpretrain.datasets import PackInputs
from mmpretrain.models import ClsDataPreprocessor, LinearClsHead
from mmpretrain.registry import MODELS, TRANSFORMS
from torch import Tensor, nn
from torch.nn.functional import one_hot

from tokenformer_vit.errors import InputError


def check_labels(cfg: Mapping[str, Any], path: str) -> None:
    """Check that the model of a config takes labels in the form in which they are packed.

    mmpretrain's own preprocessor would not mix images whose labels are a tensor.

    Args:
        cfg: The config; its values have the right types.
        path: File of the config, for messages.

    Raises:
        InputError: If they come as one tensor, and the model does not take one.
    """
    dataset, model = cfg["train_dataloader"]["dataset"], cfg["model"]
    steps = [step.get("type") for step in dataset.get("pipeline", ())]
    head = model.get("head")
    if head is None or steps[-1:] != ["PackLabels"]:
        return
    preprocessor = model.get("data_preprocessor") or cfg.get("data_preprocessor") or {}
    if (preprocessor.get("type"), head.get("type")) != ("LabelPreprocessor", "LabelHead"):
        raise InputError(
            f"{path}: data_preprocessor.type is {preprocessor.get('type')} and model.head.type "
            f"{head.get('type')}, but PackLabels in the training pipeline needs LabelPreprocessor "
            "and LabelHead: set these, or end the pipeline with PackInputs"
        )


@TRANSFORMS.register_module()
class PackLabels(PackInputs):
    """mmpretrain's ``PackInputs`` for training, with the label instead of a ``DataSample``.

    A model needs :class:`LabelPreprocessor` and :class:`LabelHead`.
    """

    def transform(self, results: dict) -> dict:
        """Return the image as a (3, H, W) tensor, and its label as a number."""
        image = results["img"]
        if image.ndim == 3 and image.shape[2] == 3 and image.flags.c_contiguous:
            planes: Any = np.empty((3, *image.shape[:2]), image.dtype)
            cv2.split(image, list(planes))  # four times as fast as a copy of the transpose
            image = planes.transpose(1, 2, 0)
        return {"inputs": self.format_input(image), "data_samples": results["gt_label"]}


@MODELS.register_module()
class LabelPreprocessor(ClsDataPreprocessor):
    """mmpretrain's ``ClsDataPreprocessor``, which also takes labels as one tensor."""

    def forward(self, data: dict, training: bool = False) -> dict:
        """Normalise the images of a batch, and mix them in training.

        Args:
            data: ``inputs``, and as ``data_samples`` a list of ``DataSample`` or the labels, (N,)
                int64.
            training: Whether to mix images.

        Returns:
            The same two. Labels become (N, K) scores where images are mixed.
        """
        labels = data.get("data_samples")
        if not isinstance(labels, Tensor):
            return super().forward(data, training)
        batch = super().forward({"inputs": data["inputs"]}, training)
        targets: Any = self.cast_data(labels)
        if self.to_onehot:
            targets = one_hot(targets, cast(int, self.num_classes))
        if training and self.batch_augments is not None:
            batch["inputs"], targets = self.batch_augments(batch["inputs"], targets)
        return {**batch, "data_samples": targets}


@MODELS.register_module()
class LabelHead(LinearClsHead):
    """mmpretrain's ``LinearClsHead``, which also takes labels, or scores, as one tensor."""

    def loss(self, feats: tuple[Tensor], data_samples: Any, **kwargs: Any) -> dict:
        """Compute the loss of a batch.

        Args:
            feats: The features, (N, C).
            data_samples: List of ``DataSample``, or (N,) int64 labels, or (N, K) scores.
            **kwargs: Passed to the loss.

        Returns:
            The mean ``loss`` of the batch, and what a list of ``DataSample`` gives besides.
        """
        if not isinstance(data_samples, Tensor):
            return super().loss(feats, data_samples, **kwargs)
        scores, loss = self(feats), cast(nn.Module, self.loss_module)
        return {"loss": loss(scores, data_samples, avg_factor=len(scores), **kwargs)}
