"""Runs on parquet files; tests/vision/test_datasets.py has what is read of them."""

import shutil

import numpy as np
import pytest

from tokenformer_vit.training.data.images import HuggingFaceImages

from ...samples import CLASSES, write_parquet

pytestmark = pytest.mark.usefixtures("arrow_cache", "scope")

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


def test_subsets(source):
    whole, few, last = (
        HuggingFaceImages(str(source), "train", indices=indices, pipeline=[{"type": "LoadImage"}])
        for indices in (None, [40, 3], -20)
    )
    assert [sample["img_path"] for sample in few] == [whole[i]["img_path"] for i in (40, 3)]
    assert few[1]["sample_idx"] == 1
    assert last.get_gt_labels().tolist() == whole.get_gt_labels().tolist()[-20:]


def test_a_run_resumes_on_a_copy_from_the_hub(train_parquet, source, hub, tmp_path):
    work_dir = tmp_path / "run"
    train_parquet(work_dir, *OPTIONS)
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
