"""Images, labels and class names are found alike in folders, parquet files and saved data sets."""

import os
import pickle
import unicodedata
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from timm.data import ImageNetInfo
from timm.data.readers.reader_image_folder import find_images_and_targets

from tokenformer_vit.errors import InputError
from tokenformer_vit.vision.datasets import (
    class_images,
    find_splits,
    folder_names,
    labels_for,
    open_images,
)

from ..samples import rows_of, write_parquet

datasets = pytest.importorskip("datasets")
pa, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
pytestmark = pytest.mark.usefixtures("arrow_cache")
NAMES = ["ant", "bee", "cat"]


def write(path, labels, *names, **columns):
    """Write a parquet file of random images, and return their bytes."""
    images = [os.urandom(20) for _ in labels]
    write_parquet(path, images, labels, *names, **columns)
    return images


def contents(images):
    return [(each["img_bytes"], each["gt_label"]) for each in images]


def in_order(images, labels):
    return [(images[row], labels[row]) for row in np.argsort(labels, kind="stable")]


LABELS = [0, 1, 2, 0, 1, 2, 0, 2]


@pytest.fixture
def source(tmp_path):
    """A validation set in a folder whose name is a pattern."""
    write(tmp_path / "a[bc]*{d}/data/validation-00000-of-00001.parquet", [2, 1, 0, 0])
    return tmp_path / "a[bc]*{d}"


def test_parquet_files(source):
    images = write(source / "data/train-00000-of-00002.parquet", LABELS[:5])
    images += write(source / "data/train-00001-of-00002.parquet", LABELS[5:])
    found = open_images(source, "train")
    assert contents(found) == in_order(images, LABELS)
    assert found.classes == tuple(NAMES)
    assert found.labels.tolist() == sorted(LABELS)
    assert found[0]["img_path"] == f"{source}, train, row 0"
    assert found[2]["img_path"] == f"{source}, train, row 6"
    assert len(open_images(source, "val")) == 4
    copy = pickle.loads(pickle.dumps(found))  # for another process
    assert contents(copy) == contents(found)
    found.keep(slice(-3, None))
    found.keep([2, 0])
    assert contents(found) == [in_order(images, LABELS)[index] for index in (7, 5)]
    with pytest.raises(InputError, match="has no split 'dev', but train, validation"):
        open_images(source, "dev")


@pytest.mark.parametrize("together", [True, False])
def test_saved_data_sets(together, tmp_path):
    images = [os.urandom(20) for _ in LABELS]
    rows = rows_of(images, LABELS).cast_column("image", datasets.Image(decode=False))
    shuffled = rows.shuffle(seed=0)
    order = [images.index(row["image"]["bytes"]) for row in shuffled]
    saved = datasets.DatasetDict(train=shuffled, test=rows) if together else shuffled
    saved.save_to_disk(str(tmp_path / "saved"))
    found = open_images(tmp_path / "saved", "train")
    assert contents(found) == in_order([images[i] for i in order], [LABELS[i] for i in order])
    if together:
        assert contents(open_images(tmp_path / "saved", "val")) == in_order(images, LABELS)


@pytest.mark.parametrize("revision", ["", "@main", "@v1.0", "@refs/convert/parquet"])
def test_a_data_set_of_the_hub_is_read_from_its_cache(revision, hub):
    images = write(hub / "data/train-00000-of-00001.parquet", [0, 1, 2])
    write(hub / "data/validation-00000-of-00001.parquet", [2])
    name = f"hf://datasets/owner/pictures{revision}"
    assert contents(open_images(name, "train")) == in_order(images, [0, 1, 2])
    assert open_images(f"{name}/data", "val").labels.tolist() == [2]


@pytest.mark.parametrize(
    "columns",
    [
        {"image": "img", "label": "fine_label", "coarse_label": [0, 1, 2]},
        {"image": "jpg", "label": "breed", "age": [7, 8, 9]},
        {"image": "image", "thumbnail": [{"bytes": b"a", "path": None}] * 3},
    ],
)
def test_columns_are_found_by_name_and_type(columns, tmp_path):
    images = write(tmp_path / "train.parquet", [2, 1, 0], **columns)
    assert contents(open_images(tmp_path, "train")) == in_order(images, [2, 1, 0])
    with pytest.raises(InputError, match="no column imag: set image_column to one of "):
        open_images(tmp_path, "train", image_column="imag")
    images = write(tmp_path / "train.parquet", [2, 1, 0], None, label="age")
    with pytest.raises(InputError, match="no column label: set label_column to one of image, age"):
        open_images(tmp_path, "train")
    named = open_images(tmp_path, "train", label_column="age")
    assert contents(named) == in_order(images, [2, 1, 0])


def test_labels_without_names_are_those_of_training(tmp_path):
    texts = ["cat", "ant", "eel"]
    for kind, labels in (("text", texts), ("number", [10, 0, 3])):
        write(tmp_path / kind / "train.parquet", labels, None)
        write(tmp_path / kind / "test.parquet", labels[::2], None)
    found = [open_images(tmp_path / "text", split) for split in ("train", "val")]
    assert [each.classes for each in found] == [("ant", "cat", "eel")] * 2
    assert [each.labels.tolist() for each in found] == [[0, 1, 2], [1, 2]]
    numbered = open_images(tmp_path / "number", "val")
    assert (numbered.classes, numbered.labels.tolist()) == (("0", "3", "10"), [1, 2])
    named = open_images(tmp_path / "text", "train", classes=["eel", "cat", "ant"])
    assert named.labels.tolist() == [0, 1, 2]
    with pytest.raises(InputError, match="row 1 has the label ant, which is no class"):
        open_images(tmp_path / "text", "train", classes=["eel", "cat"])


@pytest.mark.parametrize("label", [-1, 3, None])
def test_a_label_that_is_no_class_is_named(label, tmp_path):
    write(tmp_path / "train.parquet", [0, 1, label], None)
    with pytest.raises(InputError, match=f"row 2 has the label {label}, which is no class: use a"):
        open_images(tmp_path, "train", classes=NAMES)


def test_a_row_may_name_a_file_in_its_folder_alone(tmp_path):
    inside, outside = tmp_path / "in/a.png", tmp_path / "secret.png"
    for path in (inside, outside):
        draw(path)
    os.mkfifo(tmp_path / "in/pipe.png")  # would be waited for
    (tmp_path / "in/link.png").symlink_to(outside)
    named = ["a.png", str(inside)]
    refused = ["link.png", "../secret.png", str(outside), "/dev/zero", "pipe.png", "no.png", None]
    images = [{"path": path, "bytes": None} for path in [*named, *refused]]
    image = pa.array(images, pa.struct({"path": pa.string(), "bytes": pa.binary()}))
    table = pa.table({"image": image, "label": [0] * len(images)})
    parquet.write_table(table, tmp_path / "in/train.parquet")
    found = open_images(tmp_path / "in", "train", classes=["ant"])
    assert [found[row]["img_path"] for row in range(2)] == [str(inside)] * 2
    for row, path in enumerate(refused, 2):
        with pytest.raises(InputError, match=f"row {row}: {path or ''!r} is no file in that fol"):
            found[row]


def test_files_of_different_data_sets_are_refused(source, capsys):
    write(source / "data/train-00000-of-00003.parquet", [0])
    open_images(source, "train")
    assert "has 1 of 3 files" in capsys.readouterr().err
    write(source / "data/train-00001-of-00003.parquet", [0], NAMES[::-1])
    with pytest.raises(InputError, match="are of different data sets: give one of them"):
        open_images(source, "train")
    write(source / "other/validation-0.parquet", [0])
    with pytest.raises(InputError, match="are of different data sets"):
        open_images(source, "val")


def test_nothing_there(tmp_path):
    with pytest.raises(InputError, match=r"no folder .*/none: give one, or hf://datasets/OWNER"):
        open_images(tmp_path / "none", "train")
    with pytest.raises(InputError, match="no split 'val', but no class folders and no parquet"):
        open_images(tmp_path, "val")


def draw(*paths):
    for path in paths:
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.new("L", (2, 2)).save(path)


@pytest.mark.parametrize("name", ["val", "valid", "validation", "test"])
def test_folders_of_classes(name, tmp_path, capsys):
    forms = [unicodedata.normalize(form, "café") for form in ("NFC", "NFD")]
    draw(tmp_path / "train" / forms[0] / "1.png", tmp_path / "train/tea/2.png")
    draw(tmp_path / name / forms[1] / "3.png", tmp_path / "train/@eaDir/tea/4.png")
    draw(tmp_path / "train/.cache/5.png", tmp_path / "train/stray.png")
    (tmp_path / name / "lost+found").mkdir()
    (tmp_path / name / "tea").mkdir()
    (tmp_path / "labels.parquet").touch()  # hides no folders
    found = [open_images(tmp_path, split) for split in ("train", "val")]
    assert [each.classes for each in found] == [(forms[0], "tea")] * 2
    assert [Path(each["img_path"]).name for each in found[0]] == ["1.png", "2.png"]
    assert found[1][0] == {
        "img_path": str(tmp_path / name / forms[1] / "3.png"),
        "img_bytes": None,
        "gt_label": 0,
    }
    said = capsys.readouterr().err
    assert f"left out: 2 hidden or system folders in {tmp_path}/train" in said
    assert f"left out: 1 images in no class folder of {tmp_path}/train" in said
    draw(tmp_path / "val/tea/6.png", tmp_path / "val/café/6.png")  # val is first
    assert "/val/" in open_images(tmp_path, "val")[0]["img_path"]


def test_folders_without_splits(tmp_path):
    draw(tmp_path / "cat/1.png", tmp_path / "test/2.png")  # a class
    assert find_splits(tmp_path) == {"train": tmp_path}
    (tmp_path / "test/loop").symlink_to(tmp_path)
    assert list(class_images(tmp_path)) == ["cat", "test"]
    assert class_images(tmp_path / "cat") == {}


def test_labels_are_compared_by_name():
    assert labels_for(NAMES, NAMES) == [0, 1, 2]
    assert labels_for(NAMES, ["ant", "cat"]) == [0, 2]
    assert labels_for(["cat", "ant"], ["ant", "cat"]) == [1, 0]
    assert labels_for(["cat", "ant"], ["0_cat", "1_ant"]) == [0, 1]
    assert labels_for(["0_cat", "1_ant"], ["cat", "ant"]) == [0, 1]
    assert labels_for(["class 0", "class 1"], ["ant", "cat"]) == [0, 1]
    imagenet = ImageNetInfo()
    assert labels_for(imagenet.label_descriptions(), imagenet.label_names()[5:7]) == [5, 6]
    for others in (["ant", "bee", "dog"], [*NAMES, "dog"], ["x", "y", "z"]):
        with pytest.raises(InputError, match=r"a class '(dog|x)', but the model has ant, bee, cat"):
            labels_for(NAMES, others)


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        (["ant", "bee", "cat"], ["ant", "bee", "cat"]),
        # Sorted as text, but timm sorts numbers as numbers and without regard to case.
        (["a10", "a9"], ["0_a10", "1_a9"]),
        (["a/b", "a_b"], ["0_a_b", "1_a_b"]),
        (["Ant", "ant"], ["0_Ant", "1_ant"]),
        (["..", "x"], ["0_", "1_x"]),
        ([f"c{i}" for i in range(12)], [f"{i:02d}_c{i}" for i in range(12)]),
    ],
)
def test_all_libraries_keep_the_order_of_classes(names, expected, tmp_path):
    folders = folder_names(names)
    assert folders == expected
    draw(*(tmp_path / folder / "x.png" for folder in folders))
    _, timms = find_images_and_targets(str(tmp_path))
    assert timms == {folder: index for index, folder in enumerate(folders)}
    assert sorted(folders) == folders  # torchvision, mmpretrain
    assert list(class_images(tmp_path)) == folders
