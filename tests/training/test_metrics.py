"""Metrics that stay on the device give the figures of mmpretrain's, to the last digit."""

import pytest
import torch
import torch.nn.functional as F
from mmpretrain.evaluation import Accuracy

from tokenformer_vit.training import AccuracyAndLoss, metrics

IMAGES, CLASSES = 43, 7


@pytest.fixture
def samples():
    scores = torch.softmax(4 * torch.randn(IMAGES, CLASSES), dim=1)
    scores[3] = F.one_hot(torch.tensor(2), CLASSES)  # zeros, whose logarithm is infinite
    labels = torch.randint(0, CLASSES, (IMAGES, 1))
    return [{"pred_score": s, "gt_label": y} for s, y in zip(scores, labels, strict=True)]


def measured(metric, samples, batch=8):
    for start in range(0, len(samples), batch):
        metric.process(None, samples[start : start + batch])
    return metric.evaluate(IMAGES)


@pytest.mark.parametrize(
    "options",
    [{"topk": (1, 5)}, {"topk": 2, "thrs": (0.0, 0.3, None)}, {"topk": (1, 3), "thrs": None}],
)
def test_figures_are_those_of_mmpretrain(samples, options):
    scores = torch.stack([sample["pred_score"] for sample in samples]).double()
    logs = scores.clamp_min(torch.finfo(torch.float32).tiny).log()
    loss = F.nll_loss(logs, torch.cat([sample["gt_label"] for sample in samples])).item()
    expected = {**measured(Accuracy(**options), samples), "cross_entropy": loss}
    assert measured(AccuracyAndLoss(**options), samples) == expected


@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize("left_out", [0, 6])
def test_processes_find_what_one_finds(samples, monkeypatch, world, left_out):
    """Each takes every second or third image; some are repeated, or left out."""
    used = samples[: IMAGES - left_out]
    expected = measured(AccuracyAndLoss(topk=(1, 5)), used)
    even = -len(used) % world if not left_out else 0
    dealt = [[*used, *used[:even]][rank::world] for rank in range(world)]
    given = []

    def keep(tensor):
        given.append(tensor.clone())

    def add(tensor):
        tensor.copy_(sum(given))

    for exchange in (keep, add):  # as if all processes called it at once
        monkeypatch.setattr(metrics, "all_reduce", exchange)
        for rank in range(world):
            monkeypatch.setattr(metrics, "get_dist_info", lambda rank=rank: (rank, world))
            found = measured(AccuracyAndLoss(topk=(1, 5)), dealt[rank])
            assert exchange is keep or found == expected
