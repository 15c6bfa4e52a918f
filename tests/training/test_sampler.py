"""The order of samples and the random numbers of each: the same with any workers and processes."""

import copy
import random
from itertools import islice

import numpy as np
import pytest
import torch
from mmengine.dataset import ClassBalancedDataset, ConcatDataset, DefaultSampler, RepeatDataset
from mmengine.runner import set_random_seed
from mmpretrain.datasets import CustomDataset
from timm.data.distributed_sampler import RepeatAugSampler
from torch.utils.data import DataLoader, Subset

from tokenformer_vit.training.data.sampler import ResumableSampler, Seeded

PER_CLASS, CLASSES = 16, 10
# mmpretrain's own transforms, which draw from NumPy's and Python's generators.
PIPELINE = [
    {"type": "LoadImageFromFile"},
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
    {"type": "PackInputs"},
]


@pytest.fixture(params=[False, True], ids=["epochs", "endless"])
def sampler(request, monkeypatch):
    """Make a sampler over data in the order of their classes, on one process of several."""

    def make(rank=0, world=1, samples=PER_CLASS * CLASSES, paired=False, **options):
        dist = "mmengine.dataset.sampler.get_dist_info"
        monkeypatch.setattr(dist, lambda: (rank, world))
        data = Seeded(range(samples)) if paired else range(samples)
        return ResumableSampler(data, endless=request.param, **{"seed": 3, **options})

    return make


def epochs(sampler, number):
    """List the samples of each epoch, as the loops and the seed hook of mmengine take them."""
    if sampler.endless:
        samples = iter(sampler)
        return [[next(samples) for _ in range(len(sampler))] for _ in range(number)]
    found = []
    for epoch in range(number):
        sampler.set_epoch(epoch)
        found.append(list(sampler))
    return found


@pytest.mark.parametrize("samples", [1000, 160])  # rounded down to 768; all
@pytest.mark.parametrize("world", [1, 2, 8])
def test_copies_are_those_of_timms_sampler(sampler, world, samples):
    for rank in range(world):
        mine = sampler(rank, world, samples, seed=0, repeats=3)
        stock = RepeatAugSampler(range(samples), world, rank)
        expected = []
        for number in (0, 1):
            stock.set_epoch(number)
            expected.append(list(stock))
        assert epochs(mine, 2) == expected
        assert len(mine) == len(stock)


@pytest.mark.parametrize("shuffle", [True, False])
@pytest.mark.parametrize("world", [1, 3])
def test_the_order_is_mmengines(sampler, world, shuffle):
    for rank in range(world):
        mine = sampler(rank, world, shuffle=shuffle)
        stock = DefaultSampler(range(PER_CLASS * CLASSES), shuffle, seed=3)
        for number, epoch in enumerate(epochs(mine, 2)):
            stock.set_epoch(number)
            assert epoch == list(stock)
            assert all(type(index) is int for index in epoch)  # not of NumPy


@pytest.mark.parametrize("options", [{}, {"repeats": 3}, {"num_samples": 20}, {"shuffle": False}])
@pytest.mark.parametrize("world", [1, 2])
def test_places_count_the_samples_of_a_run(sampler, world, options):
    ranks = [epochs(sampler(rank, world, paired=True, **options), 2) for rank in range(world)]
    plain = [epochs(sampler(rank, world, **options), 2) for rank in range(world)]
    indices = [[[index for _, index in each] for each in rank] for rank in ranks]
    assert indices == plain
    places = sorted(place for rank in ranks for epoch in rank for place, _ in epoch)
    assert places == list(range(2 * world * len(ranks[0][0])))


@pytest.mark.parametrize("options", [{}, {"repeats": 3}, {"num_samples": 40}])
def test_a_sampler_starts_anywhere_once(sampler, options):
    made = sampler(paired=True, **options)
    first, second = epochs(made, 2)
    made.set_epoch(1)
    made.start = 16 + (len(made) if made.endless else 0)
    assert list(islice(made, len(made) - 16)) == second[16:]
    made.set_epoch(0)
    assert list(islice(made, len(made))) == first


def test_a_shortened_epoch_is_a_random_subset_that_is_redrawn(sampler):
    made = sampler(num_samples=40)
    assert len(DataLoader(range(160), batch_size=8, sampler=made)) == 5
    first, second = epochs(made, 2)
    for epoch in (first, second):
        assert len(set(epoch)) == 40
        assert {index // PER_CLASS for index in epoch} == set(range(CLASSES))
    assert set(first) != set(second)
    whole, _ = epochs(sampler(), 2)
    assert first == whole[:40]  # of the order that the whole epoch has
    for number in (160, 1000):  # there are no more
        assert epochs(sampler(num_samples=number), 2) == epochs(sampler(), 2)


@pytest.mark.parametrize("shuffle", [True, False])
def test_processes_share_a_shortened_epoch(sampler, shuffle):
    shares = [epochs(sampler(rank, 2, shuffle=shuffle, num_samples=20), 2) for rank in range(2)]
    (one,) = [epochs(sampler(shuffle=shuffle, num_samples=40), 2)]
    for epoch, (mine, yours) in zip(one, zip(*shares, strict=True), strict=True):
        assert not set(mine) & set(yours)
        assert set(mine) | set(yours) == set(epoch)  # as one process takes them


def test_a_shortened_validation_takes_even_distances(sampler):
    first, second = epochs(sampler(shuffle=False, num_samples=40), 2)
    assert first == second == list(range(0, 160, 4))
    (uneven,) = epochs(sampler(shuffle=False, num_samples=67), 1)
    assert set(np.diff(uneven)) == {2, 3}
    assert {index // PER_CLASS for index in uneven} == set(range(CLASSES))


WRAPPERS = {
    "alone": lambda data: data,
    "two": lambda data: ConcatDataset([data, copy.deepcopy(data)]),
    "repeated": lambda data: RepeatDataset(data, 2),
    "balanced": lambda data: ClassBalancedDataset(data, 0.5),
    "fold": lambda data: Subset(data, range(0, 48, 2)),
}


@pytest.fixture(params=WRAPPERS)
def dataset(request, data_root):
    data = CustomDataset(str(data_root), "train", pipeline=PIPELINE)
    return Seeded(WRAPPERS[request.param](data), seed=5)


def load(dataset, workers, batch_size=5, **options):
    sampler = ResumableSampler(dataset, seed=0, endless=True, **options)
    loader = DataLoader(
        dataset, batch_size, sampler=sampler, num_workers=workers, collate_fn=lambda batch: batch
    )
    found = [sample for batch in islice(loader, 20) for sample in batch]
    return torch.stack([sample["inputs"] for sample in found]), found


def test_any_data_set_with_any_pipeline_repeats_with_any_number_of_workers(dataset):
    images, samples = load(dataset, 2)
    again, _ = load(dataset, 0)
    assert torch.equal(images, again)
    passes = {}  # of each image, in two epochs at least
    for image, sample in zip(images, samples, strict=True):
        passes.setdefault(sample["data_samples"].img_path, []).append(image)
    pairs = [(one, two) for one, two, *_ in (p for p in passes.values() if len(p) > 1)]
    assert sum(not torch.equal(*pair) for pair in pairs) > 0.9 * len(pairs) > 10


def test_copies_of_an_image_are_augmented_on_their_own(dataset):
    images, samples = load(dataset, 0, repeats=3)
    assert len({sample["data_samples"].img_path for sample in samples[:3]}) == 1
    assert not torch.equal(images[0], images[1])


def test_the_batch_size_changes_no_sample_unless_batches_are_fetched(data_root):
    data = Seeded(CustomDataset(str(data_root), "train", pipeline=PIPELINE))
    assert torch.equal(load(data, 0, 4)[0], load(data, 0, 8)[0][:80])


def test_the_random_state_of_the_process_is_left_alone(data_root):
    data = Seeded(CustomDataset(str(data_root), "train", pipeline=PIPELINE))

    def draw(action):
        set_random_seed(1)
        np.random.standard_normal()  # noqa: NPY002  # makes two numbers, and keeps one
        action()
        normal, uniform = np.random.standard_normal(), np.random.random_sample()  # noqa: NPY002
        return random.random(), normal, uniform, torch.rand(1).item()

    assert draw(lambda: data[3, 3]) == draw(lambda: None)
