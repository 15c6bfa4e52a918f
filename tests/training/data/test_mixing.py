"""Labels as one tensor, mixed images and their losses, against mmpretrain, timm and formulas."""

import copy

import pytest
import torch
from mmpretrain.registry import MODELS
from mmpretrain.structures import DataSample
from torch import nn

from tokenformer_vit.training.config import load_config
from tokenformer_vit.training.data.mixing import (
    BinaryCrossEntropy,
    LabelHead,
    LabelPreprocessor,
)

CLASSES = 5
MIXUP, CUTMIX = {"type": "Mixup", "alpha": 0.8}, {"type": "CutMix", "alpha": 1.0}


def numbered(count, side=8):
    """Images whose every value is the number of the image."""
    return torch.arange(count).float().view(-1, 1, 1, 1).expand(-1, 3, side, side).contiguous()


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("augments", [MIXUP, CUTMIX, [MIXUP, CUTMIX]])
def test_labels_are_mixed_as_the_pixels_are(augments, device):
    """The label of image i is i: the mean of an image tells the shares of the two labels."""
    preprocessor = LabelPreprocessor(num_classes=16, batch_augments={"augments": augments})
    for _ in range(5):
        batch = {"inputs": numbered(16).to(device), "data_samples": torch.arange(16, device=device)}
        images, scores = preprocessor.to(device)(batch, training=True).values()
        assert images.device == scores.device == batch["inputs"].device
        torch.testing.assert_close(scores.sum(1), torch.ones_like(scores[:, 0]))
        assert (scores > 0).sum(1).max() <= 2
        means = scores @ torch.arange(16.0, device=device)
        torch.testing.assert_close(images.mean((1, 2, 3)), means, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(scores.sum(0), torch.ones_like(scores[0]))  # each image twice


def test_repeated_augmentation_does_not_mix_an_image_with_its_copies():
    """Three copies of each of 32 images follow one another, as ResumableSampler takes them."""
    labels = torch.arange(32).repeat_interleave(3)
    preprocessor = LabelPreprocessor(num_classes=32, batch_augments={"augments": MIXUP})
    alone = 0
    for _ in range(40):
        scores = preprocessor({"inputs": numbered(96, 1), "data_samples": labels}, True)
        alone += int((scores["data_samples"] > 0).sum(1).eq(1).sum())
    # A partner is a copy in 2 of 95 cases; among neighbours it would be in 64 of 96.
    assert alone / (40 * 96) < 0.05


def test_smoothed_labels_give_the_loss_of_mmpretrain_and_pytorch():
    features, labels = (torch.randn(7, 4),), torch.randint(0, CLASSES, (7,))
    smoothing = {"type": "LabelSmoothLoss", "label_smooth_val": 0.1}
    head = LabelHead(CLASSES, 4, loss=smoothing)
    own = head.loss(features, labels)
    assert own == head.loss(features, [DataSample().set_gt_label(label) for label in labels])
    smoothed = nn.CrossEntropyLoss(label_smoothing=0.1)
    torch.testing.assert_close(own["loss"], smoothed(head(features), labels))
    scores = torch.rand(7, CLASSES).softmax(1)
    own = head.loss(features, scores)["loss"]
    torch.testing.assert_close(own, smoothed(head(features), scores))


def test_binary_cross_entropy_smooths_mixed_labels_as_it_does_others():
    loss = BinaryCrossEntropy(smoothing=0.1, target_threshold=None)
    logits, labels = torch.randn(7, CLASSES), torch.randint(0, CLASSES, (7,))
    scores = nn.functional.one_hot(labels, CLASSES).float()
    torch.testing.assert_close(loss(logits, labels), loss(logits, scores))
    assert loss(logits, scores) != BinaryCrossEntropy(target_threshold=None)(logits, scores)
    mixed = (scores + scores.roll(1, 0)) / 2
    halves = (loss(logits, labels) + loss(logits, labels.roll(1))) / 2
    torch.testing.assert_close(loss(logits, mixed), halves)  # it is linear in the target
    thresholded = BinaryCrossEntropy(smoothing=0.0, target_threshold=0.0)  # of DeiT III
    expected = nn.BCEWithLogitsLoss()(logits, mixed.gt(0).float())
    torch.testing.assert_close(thresholded(logits, mixed), expected)


@pytest.mark.parametrize("augments", [None, [MIXUP]])
def test_labels_as_one_tensor_give_the_gradients_of_data_samples(config, augments, seed):
    cfg = load_config(config)
    cfg.model.train_cfg = {"augments": augments} if augments else None
    model = MODELS.build({**cfg.model, "data_preprocessor": cfg.data_preprocessor})
    nn.init.normal_(model.head.fc.weight)
    images, labels = torch.randint(256, (10, 3, 8, 8), dtype=torch.uint8), torch.arange(10) % 3
    found = []
    for given in (labels, [DataSample().set_gt_label(label) for label in labels]):
        twin = copy.deepcopy(model).train()
        twin.backbone.eval()  # no drop path
        torch.manual_seed(seed)
        batch = twin.data_preprocessor({"inputs": images, "data_samples": given}, True)
        twin(**batch, mode="loss")["loss"].backward()
        found.append([parameter.grad for parameter in twin.parameters()])
    for one, other in zip(*found, strict=True):
        assert torch.equal(one, other)
