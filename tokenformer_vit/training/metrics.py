"""Validation metrics that wait for the GPU once, at the end of a validation."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from mmengine.device import get_device
from mmengine.dist import all_reduce, broadcast_object_list, get_dist_info
from mmengine.evaluator import BaseMetric
from mmpretrain.evaluation import Accuracy
from mmpretrain.registry import METRICS
from torch import Tensor

from tokenformer_vit.errors import InputError

# Not "loss" or "val_loss": mmengine logs the mean of the last ten of such a name.
VAL_LOSS = "cross_entropy"
RECONSTRUCTION = "reconstruction/error"  # the loss of a masked autoencoder


class RowMetric(BaseMetric):
    """A metric of a few numbers for each sample, which stay on the device until the end.

    Processes exchange them in one operation; mmengine does it through files. A subclass appends
    (B, C) numbers, as :func:`precise` returns them, to ``results``, and computes its figures from
    all rows in the order of the data set.
    """

    num_columns: int  # C
    _sizes: Sequence[str] = ("",)  # the ends of the names of the figures, such as "_at_0.25"

    def evaluate(self, size: int) -> dict[str, float]:
        """Return the figures of all processes.

        Args:
            size: Number of samples; a sampler may have repeated some to deal them evenly.
        """
        # A process may have no sample, but all take part in the exchange. The first one has some.
        sizes = [self._sizes]
        broadcast_object_list(sizes)
        (self._sizes,) = sizes
        empty = precise(torch.empty(0, self.num_columns, device=get_device()))
        rows = _of_all_processes(torch.cat([empty, *self.results]), size).double()
        self.results.clear()
        return self._figures(rows)

    def figures(self) -> list[str]:
        """Return the names of the figures, before anything was measured."""
        # A metric of several texts needs a row of each; the first column is the number of a text,
        # or that of answers, of which one is needed.
        texts = len((self.dataset_meta or {}).get("sources", ()))
        rows = torch.ones(2 + texts, self.num_columns, dtype=torch.float64)
        rows[:, 0] = torch.arange(len(rows))
        return list(self._figures(rows))

    def _figures(self, rows: Tensor) -> dict[str, float]:
        prefix = f"{self.prefix}/" if self.prefix else ""
        return {f"{prefix}{name}": value for name, value in self.compute_metrics(rows).items()}  # type: ignore[arg-type]


def precise(tensor: Tensor) -> Tensor:
    """Return a tensor in float64, or in float32 on a device that has no float64 (Apple's GPUs)."""
    return tensor.float() if tensor.device.type == "mps" else tensor.double()


def _of_all_processes(rows: Tensor, size: int) -> Tensor:
    """Merge the rows of the processes, (n, C), into at most (size, C) on the CPU."""
    rank, world = get_dist_info()
    if world == 1:
        return rows[:size].cpu()
    # Samplers deal the samples in turn. The first column stays 0 where a sampler left one out.
    merged = rows.new_zeros(size, 1 + rows.shape[1])
    own = merged[rank::world]
    own[: len(rows)] = F.pad(rows[: len(own)], (1, 0), value=1)
    all_reduce(merged)
    merged = merged.cpu()
    return merged[merged[:, 0] > 0, 1:]


def endings(sample: Mapping[str, Any], name: str) -> list[str]:
    """Return the ends of the keys of a sample that begin with ``name``: "" first, then sizes."""
    return sorted(key.removeprefix(name) for key in sample if key.startswith(name))


@METRICS.register_module()
class AccuracyAndLoss(RowMetric, Accuracy):
    """mmpretrain's accuracy, and the mean cross-entropy of the validation images.

    The loss is ``cross_entropy``, in nats, of only the true labels. A recipe that smooths labels
    or mixes images has a higher training loss for the same model. The accuracy of a smaller size
    of a nested model has the size in its name: ``top1_at_0.25``.
    """

    @property
    def num_columns(self) -> int:  # type: ignore[override]
        """Score of the true label, and its place among the best, at each size."""
        return (1 + max(self.topk)) * len(self._sizes)

    def process(self, data_batch: Any, data_samples: Sequence[dict]) -> None:
        """Note the score of each true label, and its place among the best.

        Raises:
            InputError: If an image has no label, or several.
        """
        if odd := [n for sample in data_samples if (n := len(sample["gt_label"])) != 1]:
            raise InputError(
                f"an image has {odd[0]} labels, but AccuracyAndLoss and `tokenformer-vit test` "
                "measure models for one label an image: give val_evaluator=dict(_delete_=True, "
                "type='AveragePrecision')"
            )
        labels = torch.cat([sample["gt_label"] for sample in data_samples])[:, None]  # (B, 1)
        self._sizes, columns = endings(data_samples[0], "pred_score"), []
        for size in self._sizes:
            scores = torch.stack([sample[f"pred_score{size}"] for sample in data_samples]).float()
            best = scores.topk(max(self.topk), dim=1).indices  # of (B, K)
            columns += [scores.gather(1, labels), best == labels]
        self.results.append(precise(torch.cat(columns, dim=1)))

    def compute_metrics(self, results: Tensor) -> dict[str, float]:  # type: ignore[override]
        """Compute accuracy and loss.

        Args:
            results: (N, 1 + k) scores of the true labels; 1 at their place among the best k. A
                nested model has as many columns for each smaller size.
        """
        found = {}
        for size, own in zip(self._sizes, results.split(1 + max(self.topk), dim=1), strict=True):
            found |= {f"{name}{size}": value for name, value in self._accuracy(own).items()}
        # A probability may have been rounded to zero.
        logs = results[:, 0].clamp_min(torch.finfo(torch.float32).tiny).log()[:, None]
        loss = F.nll_loss(logs, torch.zeros(len(logs), dtype=torch.long))
        return {**found, "loss": loss.item()}

    def _accuracy(self, results: Tensor) -> dict[str, float]:
        scores, places, found = results[:, 0], results[:, 1:], {}
        for k in self.topk:
            for thr in self.thrs:
                name = f"top{k}"
                if len(self.thrs) > 1:
                    name += "_no-thr" if thr is None else f"_thr-{thr:.2f}"
                right = places[:, :k].any(dim=1)
                if thr is not None:
                    right &= scores.float() > thr
                # In float32, as mmpretrain's.
                found[name] = right.sum().float().mul(100.0 / len(right)).item()
        return found

    def _figures(self, rows: Tensor) -> dict[str, float]:
        """Return ``accuracy/top1`` and so on, and ``cross_entropy``."""
        metrics = super()._figures(rows)
        prefix = f"{self.prefix}/" if self.prefix else ""
        metrics[VAL_LOSS] = metrics.pop(f"{prefix}loss")
        return metrics
