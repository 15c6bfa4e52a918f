"""Validation metrics as sums on the device: one wait for the GPU, at the end of a validation."""

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from tokenformer_vit.errors import InputError

from .engine import METRICS, BaseMetric, all_reduce, broadcast_object_list, get_device

# Not "loss" or "val_loss": mmengine logs the mean of the last ten of such a name.
VAL_LOSS = "cross_entropy"
RECONSTRUCTION = "reconstruction/error"  # the loss of a masked autoencoder


class SumMetric(BaseMetric):
    """Means over all samples, each of which must count once: the sampler has ``round_up=False``."""

    default_prefix = ""  # the figures have their full names

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self._sums: dict[str, Tensor] = {}

    @abstractmethod
    def sums(self, data_samples: Sequence[dict]) -> dict[str, Tensor]:
        """Return the sums over a batch, by name."""

    def compute_metrics(self, results: dict[str, float]) -> dict[str, float]:  # type: ignore[override]
        """Return the means, from the sums over all samples and their number."""
        number = results["samples"]
        return {name: value / number for name, value in results.items() if name != "samples"}

    def process(self, data_batch: Any, data_samples: Sequence[dict]) -> None:
        """Add a batch."""
        batch = {"samples": torch.tensor(len(data_samples)), **self.sums(data_samples)}
        for name, value in batch.items():
            value = value.to(get_device(), sum_dtype(), non_blocking=True)
            self._sums[name] = self._sums[name] + value if name in self._sums else value

    def evaluate(self, size: int) -> dict[str, float]:
        """Return the figures of all processes; ``size`` is the number of samples."""
        names = [list(self._sums)]
        broadcast_object_list(names)  # a process may have no sample; the first one has some
        zero = torch.zeros((), dtype=sum_dtype(), device=get_device())
        sums = torch.stack([self._sums.get(name, zero) for name in names[0]])
        all_reduce(sums)
        self._sums = {}
        found = dict(zip(names[0], sums.tolist(), strict=True))
        if found["samples"] > size:
            raise InputError(
                "the validation sampler repeats samples, which would count twice: set "
                "round_up=False in its config"
            )
        return self.compute_metrics(found)


def sum_dtype() -> torch.dtype:
    """Return float64, or float32 on Apple's GPUs, which have no float64."""
    return torch.float32 if get_device() == "mps" else torch.float64


def endings(sample: Mapping[str, Any], name: str) -> list[str]:
    """Return the ends of the keys of a sample that begin with ``name``: "" first, then sizes."""
    return sorted(key.removeprefix(name) for key in sample if key.startswith(name))


@METRICS.register_module()
class AccuracyAndLoss(SumMetric):
    """Accuracy in percent, whether the label is among the best ``topk`` classes, and mean loss.

    Ranks above the number of classes are left out. The loss is the cross-entropy of the true labels
    in nats, also if training smooths labels or mixes images. A smaller size of a nested model has
    figures such as ``accuracy/top1_at_0.25``.
    """

    def __init__(self, topk: Sequence[int] = (1, 5), **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.topk = sorted(topk)

    def sums(self, data_samples: Sequence[dict]) -> dict[str, Tensor]:
        """Count images whose label is among the best, and add up their losses."""
        if any(len(sample["gt_label"]) != 1 for sample in data_samples):
            raise InputError(
                "AccuracyAndLoss is for one label an image: set "
                "val_evaluator=dict(_delete_=True, type='AveragePrecision')"
            )
        labels = torch.cat([sample["gt_label"] for sample in data_samples])[:, None]  # (B, 1)
        found = {}
        for size in endings(data_samples[0], "pred_score"):
            scores = torch.stack([sample[f"pred_score{size}"] for sample in data_samples]).float()
            ranks = [k for k in self.topk if k <= scores.shape[1]] or [1]
            right = scores.topk(ranks[-1], dim=1).indices == labels  # (B, the largest k)
            found |= {f"accuracy/top{k}{size}": 100 * right[:, :k].sum() for k in ranks}
            if not size:  # a probability may have been rounded to zero
                logs = scores.gather(1, labels).clamp_min(torch.finfo(torch.float32).tiny).log()
                found[VAL_LOSS] = -logs.sum(dtype=sum_dtype())
        return found


@METRICS.register_module()
class ReconstructionError(SumMetric):
    """Mean reconstruction loss of the masked patches of the validation images."""

    def sums(self, data_samples: Sequence[dict]) -> dict[str, Tensor]:
        """Add up the errors of the images."""
        errors = torch.stack([sample["error"] for sample in data_samples])
        return {RECONSTRUCTION: errors.sum(dtype=sum_dtype())}
