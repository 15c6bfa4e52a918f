"""The order of the samples, and the random numbers of each: both resume anywhere.

The random numbers depend on a seed and the place of the sample among all of a run alone.
"""

import random
from collections.abc import Iterator, Sequence, Sized
from contextlib import contextmanager
from itertools import count
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset, get_worker_info

from ..config import name_of
from ..engine import DATA_SAMPLERS, DATASETS, DefaultSampler


@DATA_SAMPLERS.register_module()
class ResumableSampler(DefaultSampler):
    """mmengine's sampler; it can skip the samples that an interrupted run has already used.

    It yields ``(place, index)`` where the data set is a :class:`Seeded` one, and otherwise indices.

    Args:
        num_samples: Number of samples of each process in a shortened epoch: with ``shuffle`` a new
            random subset in each epoch, without it evenly spaced ones, the same each time.
        repeats: Copies of a sample, one after another (arXiv:1901.09335). An epoch stays as long,
            so it has a random part of the samples; its length is a multiple of 256, as in timm.
        endless: Whether one epoch follows another without an end, for a run by iterations.
    """

    start = 0  # samples of this process that the next pass skips; if endless, over all epochs

    def __init__(
        self,
        dataset: Sized,
        num_samples: int | None = None,
        repeats: int = 1,
        endless: bool = False,
        **kwargs: Any,
    ) -> None:
        super().__init__(dataset, **kwargs)
        self.endless, self._repeats, self._spread = endless, repeats, False
        samples, whole = len(dataset), len(dataset) // 256 * 256
        if repeats > 1 and whole:
            self.num_samples = whole // self.world_size
            self.total_size = self.num_samples * self.world_size
        if num_samples is not None and num_samples * self.world_size < samples:
            self.num_samples, self.total_size = num_samples, num_samples * self.world_size
            self._spread = not self.shuffle

    def __iter__(self) -> Iterator[Any]:
        """Iterate over the samples of this process, from ``start`` on."""
        start, self.start = self.start, 0
        first, start = divmod(start, self.num_samples) if self.endless else (self.epoch, start)
        for epoch in count(first):
            yield from self._one_epoch(epoch, start)
            start = 0
            if not self.endless:
                return

    def _one_epoch(self, epoch: int, start: int) -> Iterator[Any]:
        """Iterate over this process's samples of an epoch, from number ``start`` on."""
        # In mmengine's order, in a fifth of the memory: a corpus has many rows.
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
        places, indices = map(int, own + epoch * self.total_size), map(int, indices)
        seeded = isinstance(self.dataset, Seeded)
        return zip(places, indices, strict=True) if seeded else indices


@DATASETS.register_module()
class Seeded(Dataset):
    """A data set whose samples are drawn with random numbers of their own, by any pipeline.

    The global generators are seeded for each sample, or for each batch if the data set inside
    fetches batches. All other attributes are those of that data set. A run sets its own ``seed``.
    """

    def __init__(self, dataset: Any, seed: int = 0) -> None:
        self.dataset = DATASETS.build(dataset) if isinstance(dataset, dict) else dataset
        self.seed = seed

    def __len__(self) -> int:
        """Return the number of samples."""
        return len(self.dataset)

    def __getitem__(self, key: tuple[int, int]) -> Any:
        """Return the sample of a place in the run, and an index in the data set."""
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
def seeded(*key: int) -> Iterator[None]:
    """Seed all global generators, which transforms draw from, and restore them afterwards."""
    states: Any = None
    if get_worker_info() is None:  # in a worker nothing else draws, and NumPy's takes 70 µs
        states = random.getstate(), np.random.get_state(), torch.get_rng_state()  # noqa: NPY002
    words = np.random.SeedSequence(key).generate_state(4)
    random.seed(int(words[0]))
    np.random.seed(words[1:3])  # noqa: NPY002
    torch.default_generator.manual_seed(int(words[3]))  # torch.manual_seed takes CUDA's too
    try:
        yield
    finally:
        if states:
            random.setstate(states[0])
            np.random.set_state(states[1])  # noqa: NPY002
            torch.set_rng_state(states[2])


def seeded_loader(loader: Any) -> Any:
    """Put the data set of a loader's config inside :class:`Seeded` if it has our sampler."""
    kind = (loader.get("sampler") or {}).get("type") if isinstance(loader, dict) else None
    if name_of(kind) != ResumableSampler.__name__:
        return loader
    return {**loader, "dataset": {"type": Seeded, "dataset": loader["dataset"]}}
