"""A run on parquet files equals a run on the folders that they unpack to."""

import shutil

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

from tokenformer_vit.training.data.images import HuggingFaceImages
from tokenformer_vit.vision.datasets import open_images, unpack

from ...samples import CLASSES, write_parquet
from ..conftest import scalars

pytest.importorskip("pyarrow")
pytest.importorskip("datasets")
pytestmark = pytest.mark.usefixtures("arrow_cache", "scope")

PIPELINE = [{"type": "LoadImage"}, {"type": "PackLabels"}]
CONFIG = """
_base_ = "{config}"
own = dict(_delete_=True, type="HuggingFaceImages", data_root="")
train_dataloader = dict(dataset=dict(own, split="train", pipeline={{{{_base_.train_pipeline}}}}))
val_dataloader = dict(dataset=dict(own, split="validation", pipeline={{{{_base_.test_pipeline}}}}))
test_dataloader = val_dataloader
"""
OPTIONS = ("--cfg-options", "train_cfg.max_epochs=2", "train_dataloader.num_workers=2")


@pytest.fixture(scope="module")
def source(data_root, tmp_path_factory, session_seed, arrow_cache):
    """The images of ``data_root`` in a random order: two shards of training, one of validation."""
    root = tmp_path_factory.mktemp("parquet") / "source"
    (root / "data").mkdir(parents=True)
    for split, folder, shards in (("train", "train", 2), ("validation", "val", 1)):
        files = sorted((data_root / folder).rglob("*.png"))
        files = np.random.default_rng(session_seed).permutation(files)
        for shard, part in enumerate(np.array_split(files, shards)):
            path = root / f"data/{split}-{shard:05d}-of-{shards:05d}.parquet"
            images = [file.read_bytes() for file in part]
            labels = [CLASSES.index(file.parent.name) for file in part]
            write_parquet(path, images, labels, CLASSES)
    return root


@pytest.fixture(scope="module")
def train_parquet(train, config, source, tmp_path_factory):
    path = tmp_path_factory.mktemp("configs") / "small.py"
    path.write_text(CONFIG.format(config=config))
    runs = train.of(path)
    runs.arguments[-1] = str(source)
    return runs


@pytest.fixture(scope="module")
def finished(train_parquet, tmp_path_factory):
    folder = tmp_path_factory.mktemp("finished") / "run"
    train_parquet(folder, *OPTIONS)
    return folder


@pytest.mark.slow
def test_a_run_equals_a_run_on_the_unpacked_folders(train, finished, source, tmp_path):
    unpacked = tmp_path / "unpacked"  # as prepare-data makes it
    for split in ("train", "val"):
        unpack(open_images(source, split), unpacked / split, split)
    tmp_path /= "run"
    without_workers = "train_dataloader.num_workers=0"
    train(tmp_path, "--data-root", str(unpacked), *OPTIONS, without_workers)
    found, expected = (
        [record["accuracy/top1"] for record in scalars(each)[1].values()]
        for each in (finished, tmp_path)
    )
    assert found == expected
    for name in ("model.safetensors", "config.json"):
        assert (finished / name).read_bytes() == (tmp_path / name).read_bytes()


def make(source, split="train", pipeline=PIPELINE, **options):
    return HuggingFaceImages(str(source), split, pipeline=pipeline, **options)


def test_subsets(source):
    few = make(source, indices=[40, 3], pipeline=PIPELINE[:1])
    whole = make(source, pipeline=PIPELINE[:1])
    assert [sample["img_path"] for sample in few] == [whole[i]["img_path"] for i in (40, 3)]
    assert few[1]["sample_idx"] == 1
    last = make(source, indices=-20).get_gt_labels().tolist()
    assert last == whole.get_gt_labels().tolist()[-20:]


@pytest.mark.slow
def test_spawned_workers_read_the_same(source):
    spawned = {"num_workers": 2, "multiprocessing_context": "spawn"}
    loaders = [DataLoader(make(source), 8, **options) for options in ({}, spawned)]
    for one, other in zip(*loaders, strict=True):
        assert torch.equal(one["inputs"], other["inputs"])
        assert torch.equal(one["data_samples"], other["data_samples"])


def test_a_run_resumes_on_a_copy_from_the_hub(train_parquet, finished, source, hub, tmp_path):
    work_dir = shutil.copytree(finished, tmp_path / "run")
    shutil.copytree(source, hub)
    resume = ("--resume", "--data-root", "hf://datasets/owner/pictures@v1.0", *OPTIONS)
    assert "resumed epoch: 2, iter: 12" in train_parquet(work_dir, *resume)
    card = (work_dir / "README.md").read_text()
    assert "datasets:\n- owner/pictures" in card
    assert "pictures@v1.0" in card


def test_a_corrupt_image_names_its_file_and_row(train_parquet, source, data_root, tmp_path):
    other = shutil.copytree(source, tmp_path / "source")
    path = other / "data/train-00001-of-00002.parquet"
    images = [file.read_bytes() for file in sorted((data_root / "train").rglob("*.png"))[:24]]
    images[17] = images[17][:60]
    write_parquet(path, images, [0] * 24, CLASSES)
    workers = ("--cfg-options", "train_dataloader.num_workers=2")
    line = train_parquet.fails(tmp_path / "run", "--data-root", str(other), *workers)
    assert f"cannot read image {other}, train, row {24 + 17}: " in line
