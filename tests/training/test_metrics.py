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


def measured(metric, samples, batch=8, size=IMAGES):
    for start in range(0, len(samples), batch):
        metric.process(None, samples[start : start + batch])
    return metric.evaluate(size)


@pytest.mark.parametrize(
    "options",
    [{"topk": (1, 5)}, {"topk": 2, "thrs": (0.0, 0.3, None)}, {"topk": (1, 3), "thrs": None}],
)
def test_figures_are_those_of_mmpretrain(samples, options):
    scores = torch.stack([sample["pred_score"] for sample in samples]).double()
    logs = scores.clamp_min(torch.finfo(torch.float32).tiny).log()
    loss = F.nll_loss(logs, torch.cat([sample["gt_label"] for sample in samples])).item()
    expected = {**measured(Accuracy(**options), samples), "cross_entropy": loss}
    metric = AccuracyAndLoss(**options)
    assert metric.figures() == list(expected)
    assert measured(metric, samples) == expected


def of_each_process(monkeypatch, dealt, size=IMAGES):
    """Return what each process measures, as if all processes exchanged their rows at once."""
    given, sizes, found = [], [], []

    def keep(tensor):
        given.append(tensor.clone())
        tensor[:, 0] = 1  # as if no row were left out: some processes have none yet

    def add(tensor):
        tensor.copy_(sum(given))

    def broadcast(objects):
        sizes.append(objects[0])
        objects[0] = sizes[0]

    monkeypatch.setattr(metrics, "broadcast_object_list", broadcast)
    for exchange in (keep, add):
        monkeypatch.setattr(metrics, "all_reduce", exchange)
        for rank, own in enumerate(dealt):
            monkeypatch.setattr(metrics, "get_dist_info", lambda rank=rank: (rank, len(dealt)))
            found.append(measured(AccuracyAndLoss(topk=(1, 5)), own, size=size))
    return found[len(dealt) :]


@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize("left_out", [0, 6])
def test_processes_find_what_one_finds(samples, monkeypatch, world, left_out):
    """Each takes every second or third image; some are repeated, or left out."""
    used = samples[: IMAGES - left_out]
    expected = measured(AccuracyAndLoss(topk=(1, 5)), used)
    even = -len(used) % world if not left_out else 0
    dealt = [[*used, *used[:even]][rank::world] for rank in range(world)]
    assert of_each_process(monkeypatch, dealt) == [expected] * world


def test_a_process_without_images_has_the_sizes_of_a_nested_model(samples, monkeypatch):
    used = [{**each, "pred_score_at_0.5": each["pred_score"].flip(0)} for each in samples[:2]]
    expected = measured(AccuracyAndLoss(topk=(1, 5)), used, size=2)
    assert "accuracy/top1_at_0.5" in expected
    assert of_each_process(monkeypatch, [used[:1], used[1:], []], size=2) == [expected] * 3
