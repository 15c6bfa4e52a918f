"""What a cluster needs, against a simulation and the records."""

import json
from itertools import pairwise
from pathlib import Path
from statistics import median

import numpy as np
import pytest

from tokenformer_vit.benchmarking import cluster
from tokenformer_vit.benchmarking.cluster import Needs

RECORDS = Path(cluster.__file__).with_name("results")


@pytest.mark.parametrize(("gpus", "machine"), [(2, 1), (4, 2), (12, 4)])
def test_bytes_of_a_ring_all_reduce(generator, gpus, machine):
    """Reduce by the ring algorithm, and count what GPUs and machines send."""
    parameters = 5 * gpus
    gradients = generator.standard_normal((gpus, gpus, 5), dtype=np.float32)
    expected, sent, left = gradients.sum(0), np.zeros(gpus), np.zeros(gpus // machine)
    for step in range(2 * (gpus - 1)):
        sending = [(rank, (rank - step) % gpus) for rank in range(gpus)]
        parts = [gradients[rank, part].copy() for rank, part in sending]
        for (rank, part), values in zip(sending, parts, strict=True):
            to = (rank + 1) % gpus
            if step < gpus - 1:
                gradients[to, part] += values
            else:
                gradients[to, part] = values
            sent[rank] += values.nbytes
            left[rank // machine] += values.nbytes if to // machine != rank // machine else 0
    for own in gradients:
        np.testing.assert_allclose(own, expected, rtol=1e-4, atol=1e-5)
    assert {*sent} | {*left} == {Needs(gpus, parameters).sent}


def test_more_gpus_need_a_faster_network(seed):
    speed, batch_size = 100 + seed % 900, 4096
    rows = [Needs(gpus, 10**8, speed, batch_size) for gpus in (8, 16, 32, 64, 128)]
    for row in rows:
        assert row.gpus * row.images == batch_size
        assert row.images <= row.passes * 128
        # A backward pass takes twice as long as a forward pass.
        assert row.window == pytest.approx(row.images / row.passes / speed * 2 / 3)
        assert row.network * row.window == pytest.approx(row.sent)
        assert row.reading == row.gpus * speed * cluster.IMAGE_BYTES
    assert [row.passes for row in rows] == [4, 2, 1, 1, 1]
    assert all(less.network < more.network for less, more in pairwise(rows))
    assert Needs(512, 10**8, speed, 512 * 64).window == pytest.approx(rows[3].window)


def test_images_of_a_core_are_those_of_the_record():
    record = json.loads((RECORDS / "loading_imagenet_quality_98_cpu.json").read_text())
    (rates,) = (
        each["images_per_s"]
        for each in record["configs"]
        if each["config"] == "imagenet_base.py, training"
    )
    assert median(rates) == cluster.IMAGES_PER_CORE
    assert record["threads"] == 1
