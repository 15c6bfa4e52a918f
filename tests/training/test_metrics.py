"""Sums on the device give the figures of mmpretrain's metric, with any number of processes."""

import pytest
import torch
import torch.nn.functional as F
from mmpretrain.evaluation import Accuracy

from tokenformer_vit.errors import InputError
from tokenformer_vit.training.metrics import AccuracyAndLoss, ReconstructionError

IMAGES, CLASSES = 43, 7


@pytest.fixture
def samples():
    scores = torch.softmax(4 * torch.randn(IMAGES, CLASSES), dim=1)
    labels = torch.randint(0, CLASSES, (IMAGES, 1))
    scores[3, labels[3]] = 0  # its logarithm is infinite
    return [{"pred_score": s, "gt_label": y} for s, y in zip(scores, labels, strict=True)]


def measured(metric, samples, batch=8, size=IMAGES):
    for start in range(0, len(samples), batch):
        metric.process(None, samples[start : start + batch])
    return metric.evaluate(size)


@pytest.mark.parametrize("topk", [(1, 5), (2,), (3, 1)])
def test_figures_are_those_of_mmpretrain(samples, topk):
    scores = torch.stack([sample["pred_score"] for sample in samples]).double()
    logs = scores.clamp_min(torch.finfo(torch.float32).tiny).log()
    loss = F.nll_loss(logs, torch.cat([sample["gt_label"] for sample in samples])).item()
    expected = {**measured(Accuracy(topk=topk), samples), "cross_entropy": loss}
    metric = AccuracyAndLoss(topk=topk)
    for _ in range(2):  # the second validation counts anew
        assert measured(metric, samples) == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("images", [IMAGES, 1])
def test_two_processes_find_what_one_finds(samples, images, in_two_processes):
    """They take the images in turn; the second one may have none."""
    used = [{**each, "pred_score_at_0.5": each["pred_score"].flip(0)} for each in samples[:images]]
    expected = measured(AccuracyAndLoss(), used)
    assert "accuracy/top5_at_0.5" in expected
    found = in_two_processes(lambda rank: measured(AccuracyAndLoss(), used[rank::2]))
    assert found == [pytest.approx(expected, rel=1e-12)] * 2


def test_images_that_a_sampler_repeats_do_not_count_twice(samples):
    with pytest.raises(InputError, match="round_up=False"):
        measured(AccuracyAndLoss(), [*samples, samples[0]])


def test_the_error_of_reconstructions_is_their_mean():
    errors = torch.rand(10)
    found = measured(ReconstructionError(), [{"error": error} for error in errors], batch=4)
    assert found == {"reconstruction/error": pytest.approx(errors.mean().item())}
