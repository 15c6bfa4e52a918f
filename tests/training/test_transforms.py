"""Augmentation depends on the seed, the epoch and the image, and on nothing else."""

import random
from itertools import islice
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from mmengine.dataset import (
    ClassBalancedDataset,
    ConcatDataset,
    DefaultSampler,
    RepeatDataset,
)
from mmengine.runner import set_random_seed
from mmpretrain.datasets import CustomDataset
from torch.utils.data import DataLoader

from tokenformer_vit.errors import InputError
from tokenformer_vit.training import (
    EndlessSampler,
    ExactCheckpointHook,
    ResumableSampler,
    SeededTransforms,
)
from tokenformer_vit.training.loop import Copy
from tokenformer_vit.training.transforms import check_copies

TRANSFORMS = [
    {"type": "RandomCrop", "crop_size": 8, "padding": 2},
    {
        "type": "RandAugment",
        "policies": "timm_increasing",
        "num_policies": 2,
        "total_level": 10,
        "magnitude_level": 9,
        "magnitude_std": 0.5,
    },
    {"type": "RandomErasing", "erase_prob": 0.5, "mode": "rand"},
]
PIPELINE = [
    {"type": "LoadImage"},
    {"type": "SeededTransforms", "transforms": TRANSFORMS},
    {"type": "PackInputs"},
]


@pytest.fixture
def dataset(data_root, config):
    return CustomDataset(str(data_root), "train", pipeline=PIPELINE)


def epoch(loader, seed, number):
    """All images of an epoch, in the order of the data set."""
    seeded = loader.dataset.pipeline.transforms[1]
    assert isinstance(seeded, SeededTransforms)
    seeded.set_epoch(seed, number)
    loader.sampler.set_epoch(number)
    images = {
        sample["data_samples"].img_path: sample["inputs"] for batch in loader for sample in batch
    }
    return torch.stack([images[path].float() for path in sorted(images)])


def make_loader(dataset, workers, shuffle=True):
    return DataLoader(
        dataset,
        batch_size=5,
        sampler=DefaultSampler(dataset, shuffle=shuffle, seed=0),
        num_workers=workers,
        persistent_workers=workers > 0,
        collate_fn=list,
    )


def test_two_epochs_differ_and_each_repeats_with_any_number_of_workers(dataset):
    loader = make_loader(dataset, 2)
    first, second = epoch(loader, 0, 0), epoch(loader, 0, 1)
    differing = (first != second).flatten(1).any(1)
    assert differing.float().mean() > 0.9
    assert torch.equal(epoch(loader, 0, 0), first)
    assert torch.equal(epoch(make_loader(dataset, 0, shuffle=False), 0, 1), second)
    assert not torch.equal(epoch(loader, 1, 0), first)


def test_training_moves_to_the_next_augmentations_at_each_epoch(dataset):
    wrapped = RepeatDataset(dataset, 2)
    loader = DataLoader(wrapped, sampler=ResumableSampler(wrapped, seed=5))
    hook = ExactCheckpointHook()
    for number in (0, 1):
        hook.before_train_epoch(SimpleNamespace(train_dataloader=loader, epoch=number))
        assert dataset.pipeline.transforms[1].key.tolist() == [5, number]


def test_images_of_an_epoch_are_augmented_unlike_each_other(dataset):
    seeded = dataset.pipeline.transforms[1]
    same = {"img": np.full((8, 8, 3), 100, np.uint8), "img_shape": (8, 8)}
    images = [seeded({**same, "sample_idx": index})["img"] for index in range(20)]
    assert len({image.tobytes() for image in images}) > 10


def test_copies_of_an_image_are_augmented_unlike_each_other(dataset):
    copies = [7, *(Copy(7, 7 + number * len(dataset)) for number in range(3))]
    first, same, *others = (dataset[copy]["inputs"] for copy in copies)
    assert torch.equal(first, same)
    assert not any(torch.equal(first, other) for other in others)
    loader = DataLoader(dataset, sampler=copies, num_workers=1, collate_fn=list)
    for (sample,), image in zip(loader, (first, same, *others), strict=True):
        assert torch.equal(sample["inputs"], image)


def test_each_pass_of_a_run_by_iterations_has_augmentations_of_its_own(dataset):
    sampler = EndlessSampler(dataset, seed=0)
    loader = DataLoader(dataset, 48, sampler=sampler, num_workers=1, collate_fn=list)
    passes = []
    for batch in islice(loader, 2):
        images = {sample["data_samples"].img_path: sample["inputs"] for sample in batch}
        passes.append(torch.stack([images[path].float() for path in sorted(images)]))
    assert (passes[0] != passes[1]).flatten(1).any(1).float().mean() > 0.9


@pytest.mark.parametrize(
    ("wrap", "endless", "refused"),
    [
        (lambda data: data, True, None),
        (lambda data: ConcatDataset([data, data]), False, None),
        (lambda data: ConcatDataset([data, data]), True, "ConcatDataset"),
        (lambda data: RepeatDataset(data, 2), False, "RepeatDataset"),
        (lambda data: ClassBalancedDataset(data, 0.5), False, "ClassBalancedDataset"),
        (lambda data: SimpleNamespace(dataset=RepeatDataset(data, 2)), False, "RepeatDataset"),
    ],
)
def test_data_sets_that_hide_copies_are_refused(dataset, wrap, endless, refused):
    wrapped = wrap(dataset)
    if refused is None:
        check_copies(wrapped, endless)
        return
    with pytest.raises(InputError, match=f"has a {refused}.*without SeededTransforms"):
        check_copies(wrapped, endless)
    dataset.pipeline.transforms = dataset.pipeline.transforms[::2]
    check_copies(wrapped, endless)


def test_the_random_state_of_the_process_is_left_alone(dataset):
    def draw(action):
        set_random_seed(1)
        np.random.standard_normal()  # noqa: NPY002  # makes two numbers, and keeps one
        action()
        normal, uniform = np.random.standard_normal(), np.random.random_sample()  # noqa: NPY002
        return random.random(), normal, uniform, torch.rand(1).item()

    assert draw(lambda: dataset[3]) == draw(lambda: None)


def test_a_sampler_leaves_out_what_was_used_once(dataset):
    sampler = ResumableSampler(dataset, seed=3)
    sampler.set_epoch(4)
    whole = list(sampler)
    sampler.start = 7
    assert list(sampler) == whole[7:]
    assert list(sampler) == whole
    assert len(sampler) == 48
