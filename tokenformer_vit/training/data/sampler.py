"""The order of the samples, and the random numbers of each: both resume anywhere.

The sampler numbers the samples of a run by their place, 0, 1, 2 and so on over all epochs and
processes. The random numbers of a sample depend on its place and the seed alone, not on workers,
processes or interruptions, and copies of an image are augmented on their own.
"""

import random
from collections.abc import Iterator, Sequence, Sized
from contextlib import contextmanager, nullcontext
from itertools import count
from typing import Any

import numpy as np
import torch
from mmengine.dataset import DefaultSampler
from mmengine.registry import DATA_SAMPLERS
from mmpretrain.registry import DATASETS
from torch.utils.data import Dataset, get_worker_info

__all__ = ["ResumableSampler", "Seeded", "seeded", "seeded_loader"]

_ROUND = 256  # of the samples of an epoch with copies, which all processes share


@DATA_SAMPLERS.register_module()
class ResumableSampler(DefaultSampler):
    """mmengine's sampler; it can skip the samples that an interrupted run has already used.

    It yields ``(place, index)`` where the data set is a :class:`Seeded` one, and otherwise indices.

    Args:
        dataset: The data set.
        shuffle: Whether to draw a new order in each epoch.
        seed: Seed of the orders, the same on all processes; None to let them agree on one.
        round_up: Whether to repeat samples until all processes have the same number.
        num_samples: Number of samples of each process in a shortened epoch; None for all. With
            ``shuffle``, all processes together take a random subset, a new one in each epoch.
            Without, they take evenly spaced samples, the same each time.
        repeats: Number of copies of a sample, one after another, in different processes if there
            are several; each is augmented on its own. An epoch stays as long, so it has a random
            part of the samples. Its length is rounded down to a multiple of 256, as by timm's
            ``RepeatAugSampler``.
        endless: Whether one epoch follows another without an end, for a run by iterations.

    Attributes:
        start: Number of this process's samples that the next pass skips; if endless, over all
            epochs.

    Source:
        Repeated augmentation: Augment your batch, arXiv:1901.09335.
    """

    start: int = 0

    def __init__(
        self,
        dataset: Sized,
        shuffle: bool = True,
        seed: int | None = None,
        round_up: bool = True,
        num_samples: int | None = None,
        repeats: int = 1,
        endless: bool = False,
    ) -> None:
        super().__init__(dataset, shuffle, seed, round_up)
        self._repeats, self._endless, self._spread = repeats, endless, False
        samples = len(dataset)
        if repeats > 1 and samples >= _ROUND:
            self.num_samples = samples // _ROUND * _ROUND // self.world_size
            self.total_size = self.num_samples * self.world_size
        if num_samples is not None and num_samples * self.world_size < samples:
            self.num_samples, self.total_size = num_samples, num_samples * self.world_size
            self._spread = not shuffle

    @property
    def endless(self) -> bool:
        """Whether one epoch follows another without an end."""
        return self._endless

    def __iter__(self) -> Iterator[Any]:
        """Iterate over the samples of this process, from ``start`` on."""
        start, self.start = self.start, 0
        if not self._endless:
            yield from self._one_epoch(self.epoch, start)
            return
        first, start = divmod(start, self.num_samples)
        for epoch in count(first):
            yield from self._one_epoch(epoch, start)
            start = 0

    def _one_epoch(self, epoch: int, start: int) -> Iterator[Any]:
        """Iterate over the samples of this process from the one with number ``start`` on.

        The order is that of mmengine's sampler, in a fifth of the memory. A corpus has too many
        rows to hold them as Python's numbers in each process.
        """
        samples = len(self.dataset)
        own = np.arange(self.rank, self.total_size, self.world_size)[start:]
        if self._spread:
            indices = own * samples // self.total_size
        else:
            order = torch.arange(samples)
            if self.shuffle:
                generator = torch.Generator().manual_seed(self.seed + epoch)
                order = torch.randperm(samples, generator=generator)
            # From the beginning again, after the last.
            indices = order.numpy()[own % (samples * self._repeats) // self._repeats]
        if not isinstance(self.dataset, Seeded):
            yield from map(int, indices)
            return
        places = map(int, own + epoch * self.total_size)
        yield from zip(places, map(int, indices), strict=True)


@DATASETS.register_module()
class Seeded(Dataset):
    """A data set whose samples are drawn with random numbers of their own.

    Any pipeline is reproducible with it, also one of mmpretrain's own transforms: ``random``,
    NumPy's and PyTorch's global generators are seeded for each sample. All other attributes are
    those of the inner data set.

    A data set that fetches a batch at once, by ``__getitems__``, draws with those of its first
    sample.

    Args:
        dataset: The data set, or its config.
        seed: Seed of the run, the same on all processes.
    """

    def __init__(self, dataset: Any, seed: int = 0) -> None:
        self.dataset = DATASETS.build(dataset) if isinstance(dataset, dict) else dataset
        self.seed = seed

    def __len__(self) -> int:
        """Return the number of samples."""
        return len(self.dataset)

    def __getitem__(self, key: tuple[int, int]) -> Any:
        """Return a sample.

        Args:
            key: Place of the sample in the run, and its index in the data set.
        """
        place, index = key
        with seeded(self.seed, place):
            return self.dataset[index]

    def __getitems__(self, keys: Sequence[tuple[int, int]]) -> Any:
        """Return the samples of a batch, or what the data set makes of a batch."""
        fetch = getattr(self.dataset, "__getitems__", None)
        if fetch is None:
            return [self[key] for key in keys]
        with seeded(self.seed, keys[0][0]):
            return fetch([index for _, index in keys])

    def __getattr__(self, name: str) -> Any:
        """Return an attribute of the inner data set, such as ``metainfo`` or ``full_init``."""
        if name == "dataset":  # not set yet, while it is unpickled
            raise AttributeError(name)
        return getattr(self.dataset, name)


@contextmanager
def _restored() -> Iterator[None]:
    """Restore all global generators afterwards."""
    states = random.getstate(), np.random.get_state(), torch.get_rng_state()  # noqa: NPY002
    try:
        yield
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])  # noqa: NPY002
        torch.set_rng_state(states[2])


@contextmanager
def seeded(*key: int) -> Iterator[None]:
    """Seed all global generators, which transforms draw from, and restore them afterwards.

    The states of a worker are not kept: nothing else draws there, and NumPy's takes 70 µs.

    Args:
        *key: Numbers that choose the random numbers, none negative.
    """
    with _restored() if get_worker_info() is None else nullcontext():
        words = np.random.SeedSequence(key).generate_state(4)
        random.seed(int(words[0]))
        np.random.seed(words[1:3])  # noqa: NPY002
        torch.default_generator.manual_seed(int(words[3]))  # torch.manual_seed takes CUDA's too
        yield


def seeded_loader(loader: Any, seed: int) -> Any:
    """Return the config of a data loader with its data set inside a :class:`Seeded` one.

    Args:
        loader: Config, or a loader, which stays as it is. So does one with another sampler.
        seed: Seed of the run.
    """
    kind = (loader.get("sampler") or {}).get("type") if isinstance(loader, dict) else None
    if kind not in (ResumableSampler, ResumableSampler.__name__):
        return loader
    dataset = {"type": Seeded, "dataset": loader["dataset"], "seed": seed}
    return {**loader, "dataset": dataset}
