"""Validation metrics of image classifiers."""

from typing import Any

import torch
import torch.nn.functional as F
from mmpretrain.evaluation import Accuracy
from mmpretrain.registry import METRICS

# Not "loss" or "val_loss": mmengine logs the mean of the last ten of such a name.
VAL_LOSS = "cross_entropy"


@METRICS.register_module()
class AccuracyAndLoss(Accuracy):
    """mmpretrain's accuracy, and the mean cross-entropy of the validation images.

    The loss is ``cross_entropy``, in nats, of only the true labels. A recipe that smooths labels
    or mixes images has a higher training loss for the same model.
    """

    def compute_metrics(self, results: list[Any]) -> dict[str, float]:
        """Compute accuracy and loss from the collected results of all processes."""
        scores = torch.stack([result["pred_score"] for result in results]).double()  # (images, K)
        labels = torch.cat([result["gt_label"] for result in results])  # (images,)
        # A probability may have been rounded to zero.
        logs = scores.clamp_min(torch.finfo(torch.float32).tiny).log()
        return {**super().compute_metrics(results), "loss": F.nll_loss(logs, labels).item()}

    def evaluate(self, size: int) -> dict[str, float]:
        """Return ``accuracy/top1`` and so on, and ``cross_entropy``."""
        metrics = super().evaluate(size)
        prefix = f"{self.prefix}/" if self.prefix else ""
        metrics[VAL_LOSS] = metrics.pop(f"{prefix}loss")
        return metrics
