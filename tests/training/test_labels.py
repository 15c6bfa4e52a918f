"""Labels as one tensor, and images mixed on their device: the numbers are mmpretrain's."""

import copy

import numpy as np
import pytest
import torch
from mmpretrain.models import ClsDataPreprocessor, LabelSmoothLoss
from mmpretrain.models.utils.batch_augments import RandomBatchAugment
from mmpretrain.structures import DataSample
from torch.nn.functional import binary_cross_entropy_with_logits, one_hot

from tokenformer_vit.errors import InputError
from tokenformer_vit.training import LabelHead, LabelPreprocessor
from tokenformer_vit.training.labels import BinaryCrossEntropy

CLASSES = 5
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
MIXUP, CUTMIX = {"type": "Mixup", "alpha": 0.8}, {"type": "CutMix", "alpha": 1.0}
AUGMENTS = {
    "mixup": {"augments": MIXUP},
    "cutmix": {"augments": CUTMIX},
    "minmax": {"augments": {**CUTMIX, "cutmix_minmax": [0.2, 0.8]}},
    "uncorrected": {"augments": {**CUTMIX, "correct_lam": False}},
    "stock": {"augments": [{"type": "ResizeMix", "alpha": 1.0}, MIXUP], "probs": [0.5, 0.3]},
    "either": {"augments": [MIXUP, CUTMIX], "probs": [0.4, 0.4]},
}


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("augments", AUGMENTS.values(), ids=AUGMENTS)
def test_mixing_draws_what_mmpretrain_draws(augments, device, seed):
    def mixed(mix):
        torch.manual_seed(seed)
        np.random.seed(seed % 2**32)  # noqa: NPY002  # mmpretrain draws from it
        found = []
        for images, labels in batches:
            found += mix(images.clone().to(device), labels.to(device))
        return [*found, torch.rand(1)]  # and leaves the generators where mmpretrain does

    batches = [(torch.randn(6, 3, 9, 8), torch.randint(0, CLASSES, (6,))) for _ in range(4)]
    stock = RandomBatchAugment(**copy.deepcopy(augments))
    ours = LabelPreprocessor(num_classes=CLASSES, batch_augments=copy.deepcopy(augments)).to(device)
    expected = mixed(lambda x, y: stock(x, one_hot(y, CLASSES)))
    got = mixed(lambda x, y: ours({"inputs": x, "data_samples": y}, training=True).values())
    listed = mixed(lambda x, y: _in_samples(ours, x, y))
    for one, other, third in zip(got, expected, listed, strict=True):
        assert torch.equal(one, other)
        assert torch.equal(third, other)


def test_a_run_may_switch_what_mixes_its_images(seed):
    ours, images = LabelPreprocessor(num_classes=CLASSES, batch_augments={"augments": MIXUP}), []
    batch = {"inputs": torch.randn(6, 3, 9, 8), "data_samples": torch.randint(0, CLASSES, (6,))}
    other = RandomBatchAugment(CUTMIX)
    for augments in (ours.batch_augments, None, other):
        ours.batch_augments = augments  # as mmpretrain's SwitchRecipeHook does
        np.random.seed(seed % 2**32)  # noqa: NPY002
        torch.manual_seed(seed)
        given = {name: tensor.clone() for name, tensor in batch.items()}
        images.append(ours(given, training=True)["inputs"])
    assert not torch.equal(images[0], batch["inputs"])
    assert torch.equal(images[1], batch["inputs"])
    np.random.seed(seed % 2**32)  # noqa: NPY002
    torch.manual_seed(seed)
    cut, _ = other(batch["inputs"].clone(), one_hot(batch["data_samples"], CLASSES))
    assert torch.equal(images[2], cut)


def _in_samples(preprocessor, images, labels):
    samples = [DataSample().set_gt_label(label) for label in labels]
    batch = preprocessor({"inputs": images, "data_samples": samples}, training=True)
    return batch["inputs"], torch.stack([each.gt_score for each in batch["data_samples"]]).float()


@pytest.mark.parametrize("options", [{}, {"to_rgb": True}, {"pad_size_divisor": 8}])
@pytest.mark.parametrize("dtype", [torch.uint8, torch.float])
def test_images_are_normalised_as_by_mmpretrain(options, dtype):
    options = {"mean": [3.0, 50.0, 99.0], "std": [57.0, 58.0, 59.0], "num_classes": 5, **options}
    images, labels = torch.randint(256, (4, 3, 7, 9)).to(dtype), torch.randint(CLASSES, (4,))
    given = images.clone()
    got = LabelPreprocessor(**options)({"inputs": images, "data_samples": labels})
    expected = ClsDataPreprocessor(**options)({"inputs": given.clone()})
    assert torch.equal(got["inputs"], expected["inputs"])
    assert torch.equal(images, given)


def test_every_class_of_a_mixed_image_is_a_target_of_binary_cross_entropy():
    head = LabelHead(num_classes=5, in_channels=7, loss={"type": "BinaryCrossEntropy"})
    features = (torch.randn(4, 7),)
    mixed = torch.zeros(4, 5).scatter_(1, torch.tensor([[0, 3], [1, 2], [4, 0], [2, 3]]), 0.3)
    mixed[0, 0] = 0.7
    expected = binary_cross_entropy_with_logits(head(features), mixed.gt(0).float())
    assert torch.equal(head.loss(features, mixed)["loss"], expected)  # the mean over classes
    labels = torch.tensor([3, 0, 0, 4])
    expected = binary_cross_entropy_with_logits(head(features), one_hot(labels, 5).float())
    assert torch.equal(head.loss(features, labels)["loss"], expected)
    samples = [DataSample().set_gt_label(label) for label in labels]
    assert torch.equal(head.loss(features, samples)["loss"], expected)


def test_smoothing_needs_scores_that_are_kept():
    with pytest.raises(InputError, match=r"smoothing 0\.1 .* target_threshold 0\.0 .* smoothing=0"):
        BinaryCrossEntropy(smoothing=0.1)
    assert BinaryCrossEntropy(0.1, None)(torch.randn(3, 5), torch.tensor([0, 1, 4])) > 0


def test_smoothed_labels_give_the_loss_of_mmpretrain():
    features, labels = (torch.randn(7, 4),), torch.randint(0, CLASSES, (7,))
    head = LabelHead(CLASSES, 4, loss={"type": "LabelSmoothLoss", "label_smooth_val": 0.1})
    stock = LabelSmoothLoss(0.1, CLASSES)
    expected = stock(head(features), labels, avg_factor=7)
    assert torch.equal(head.loss(features, labels)["loss"], expected)


def test_the_accuracy_of_a_batch_is_that_of_mmpretrain():
    head = LabelHead(CLASSES, 4, cal_acc=True, topk=(1, 3))
    features, labels = (torch.randn(7, 4),), torch.randint(0, CLASSES, (7,))
    got = head.loss(features, labels)
    expected = head.loss(features, [DataSample().set_gt_label(label) for label in labels])
    assert got.keys() == expected.keys() == {"loss", "accuracy_top-1", "accuracy_top-3"}
    assert got == expected
    with pytest.raises(InputError, match=r"cal_acc is True, but mixed images.*cal_acc=False"):
        head.loss(features, one_hot(labels, CLASSES).float())
