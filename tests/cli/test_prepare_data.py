"""Unpacking data sets into class folders: the same tree every time, with the same bytes."""

import io
import os
from pathlib import Path

import numpy as np
import pytest
from filelock import FileLock
from PIL import Image

from tokenformer_vit.cli import prepare_data
from tokenformer_vit.errors import InputError

from ..samples import write_parquet

pytestmark = pytest.mark.usefixtures("arrow_cache")
NAMES = ["ant", "bee", "cat"]


def encoded(value, kind):
    buffer = io.BytesIO()
    Image.new("RGB", (4, 4), (value % 256, value // 256, 7)).save(buffer, format=kind)
    return buffer.getvalue()


def write_shard(path, labels, images=None, **how):
    images = images or [encoded(row, ("JPEG", "PNG")[row % 2]) for row in range(len(labels))]
    write_parquet(path, images, labels, NAMES, **how)


@pytest.fixture
def source(tmp_path):
    """Two train shards of several row groups, a validation and an unlabelled test split."""
    folder = tmp_path / "source" / "data"
    write_shard(folder / "train-00000-of-00002.parquet", [0, 1, 2, 0, 1, 2, 0])
    write_shard(folder / "train-00001-of-00002.parquet", [2, 2, 1, 0, 0])
    write_shard(folder / "validation-00000-of-00001.parquet", [2, 1, 0])
    write_shard(folder / "test-00000-of-00001.parquet", [-1, -1])
    return tmp_path / "source"


def run(*words):
    prepare_data.main([str(word) for word in words])


def refused(said, *words):
    with pytest.raises(InputError, match=said):
        run(*words)


def tree(folder):
    files = (path for path in folder.rglob("[!.]*") if path.is_file())
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


def test_bytes_classes_and_suffixes_are_kept(source, tmp_path, capsys):
    run(source, tmp_path / "out")
    assert f"{tmp_path}/out/train: 12 images of 3 of 3 classes" in capsys.readouterr().out
    files = tree(tmp_path / "out")
    assert len(files) == 15
    for split, labels in (("train", [0, 1, 2, 0, 1, 2, 0]), ("val", [2, 1, 0])):
        for row, label in enumerate(labels):
            suffix, kind = (("jpg", "JPEG"), ("png", "PNG"))[row % 2]
            name = f"{split}/{NAMES[label]}/{split}_{row:07d}.{suffix}"
            assert files[name] == encoded(row, kind)


def test_an_interrupted_run_is_continued(source, tmp_path, monkeypatch):
    run(source, tmp_path / "whole")
    replace, left = os.replace, iter(range(4))

    def die(partial, path):
        if next(left, None) is None:
            raise KeyboardInterrupt
        return replace(partial, path)

    monkeypatch.setattr(os, "replace", die)
    with pytest.raises(KeyboardInterrupt):
        run(source, tmp_path / "killed")
    monkeypatch.undo()
    run(source, tmp_path / "killed")
    assert tree(tmp_path / "killed") == tree(tmp_path / "whole")
    monkeypatch.setattr(os, "replace", lambda *_: pytest.fail("wrote what was there"))
    run(source, tmp_path / "whole")


def test_two_do_not_write_into_one_folder(source, tmp_path):
    (tmp_path / "out").mkdir()
    with FileLock(tmp_path / "out/.lock"):  # as of another process
        refused("out is in use: wait, or choose another folder", source, tmp_path / "out")
    assert tree(tmp_path / "out") == {}


def test_limits_take_the_first_rows_and_keep_every_class(source, tmp_path, capsys):
    run(source, tmp_path / "out", "--limit", 8, "--limit-val", 1)
    assert len(tree(tmp_path / "out")) == 9
    assert "train/cat/train_0000007.jpg" in tree(tmp_path / "out")
    assert sorted(os.listdir(tmp_path / "out/val")) == NAMES
    assert "out/val: 1 images of 1 of 3 classes" in capsys.readouterr().out
    # A larger limit continues; a smaller one would leave images that it does not count.
    run(source, tmp_path / "out", "--limit", 9)
    assert len(tree(tmp_path / "out")) == 12
    refused("out/train holds others, such as ", source, tmp_path / "out", "--limit", 2)


def test_splits_and_columns_are_found_or_named(source, tmp_path):
    run(source, tmp_path / "out", "--splits", "train=validation", "val=train")
    assert [len(tree(tmp_path / "out" / name)) for name in ("train", "val")] == [3, 12]
    write_shard(tmp_path / "in/plain/train/0000.parquet", [0, 1], image="img")
    write_shard(tmp_path / "in/plain/test/0000.parquet", [1], image="img")
    run(tmp_path / "in", tmp_path / "from_test", "--image-column", "img")
    assert sorted(tree(tmp_path / "from_test")) == [
        "train/ant/train_0000000.jpg",
        "train/bee/train_0000001.png",
        "val/bee/val_0000000.jpg",
    ]
    write_shard(tmp_path / "odd/other.parquet", [0])
    refused("name --splits .* of one data set: other", tmp_path / "odd", tmp_path / "c")


def test_nothing_is_written_for_a_wrong_label_or_among_other_images(source, tmp_path):
    refused("row 0 has the label -1", source, tmp_path / "out", "--splits", "val=test")
    assert not (tmp_path / "out").exists()
    (tmp_path / "out/train/zebra").mkdir(parents=True)
    refused("out/train holds others, such as zebra", source, tmp_path / "out")
    assert tree(tmp_path / "out") == {}


def test_a_bad_image_is_named(tmp_path):
    images = [encoded(0, "PNG"), b"", encoded(2, "PNG")]
    write_shard(tmp_path / "in/train.parquet", [0] * 3, images=images)
    refused(f"^{tmp_path}/in, train, row 1: ", tmp_path / "in", tmp_path / "out")


def test_what_to_do_must_be_clear():
    refused("give SOURCE and TARGET, or --digits TARGET, or --check TARGET", "target")
    refused("give SOURCE and TARGET, or --digits TARGET", "--digits", "--check", "target")
    refused("--splits names train and val, not test", "in", "out", "--splits", "test=test")


def test_digits(tmp_path):
    digits = pytest.importorskip("sklearn.datasets").load_digits()
    run("--digits", tmp_path / "out")
    files = tree(tmp_path / "out")
    assert len({name[-11:] for name in files}) == len(digits.target) == len(files)
    for name, data in files.items():
        index = int(name[-11:].removesuffix(".png"))
        assert Path(name).parent.name == str(digits.target[index])
        pixels = np.asarray(Image.open(io.BytesIO(data)))
        np.testing.assert_allclose(pixels, digits.images[index] * 255 / 16, atol=0.5)
    for label, count in enumerate(np.bincount(digits.target)):
        assert abs(len(os.listdir(tmp_path / f"out/val/{label}")) - count / 5) < 1


def test_check_lists_what_cannot_be_decoded(source, tmp_path, capsys):
    run(source, tmp_path / "out")
    with pytest.raises(SystemExit, match="False"):
        run("--check", tmp_path / "out")
    cut, empty = tmp_path / "out/train/ant/cut.JPEG", tmp_path / "out/val/ant/empty.png"
    Image.effect_noise((64, 64), 99).save(cut)
    cut.write_bytes(cut.read_bytes()[:1500])  # the header is whole, the picture is not
    empty.touch()
    stack = tmp_path / "out/train/bee/stack.tif"
    Image.new("L", (4, 4)).save(stack, save_all=True, append_images=[Image.new("L", (4, 4))])
    capsys.readouterr()
    with pytest.raises(SystemExit, match="True"):
        run("--check", tmp_path / "out")
    *lines, last = capsys.readouterr().out.splitlines()
    assert [line.split(": ")[1] for line in lines] == [str(cut), str(stack), str(empty)]
    assert lines[1] == f"of several pages, the first is used: {stack}"
    assert last == "2 are unreadable"
