"""Images of Hugging Face data sets: those of the files, in a fixed order, or one clear line."""

import json
import os
import pickle
from glob import glob
from multiprocessing import get_context
from pathlib import Path
from shutil import rmtree

import numpy as np
import pytest

from tokenformer_vit.errors import InputError
from tokenformer_vit.vision.folders import folder_names, unpack
from tokenformer_vit.vision.image_rows import open_images
from tokenformer_vit.vision.images import read_image
from tokenformer_vit.vision.sources import parquet_splits

datasets = pytest.importorskip("datasets")
pa = pytest.importorskip("pyarrow")
pq = pytest.importorskip("pyarrow.parquet")
pytestmark = pytest.mark.usefixtures("arrow_cache")

NAMES = ("ant", "bee", "cat")
IMAGE = pa.struct([("bytes", pa.binary()), ("path", pa.string())])


def write(path, labels, names=NAMES, images=None, **columns):
    """Write a parquet file as the library datasets does, and return the content of its images."""
    if images is None:
        sizes = np.random.default_rng(len(labels)).integers(1, 50, len(labels))
        images = [os.urandom(size) for size in sizes]
    rows = [{"bytes": image, "path": f"{row}.JPEG"} for row, image in enumerate(images)]
    rows = pa.array(rows, IMAGE)
    features = {"image": {"_type": "Image"}}
    if names:
        features["label"] = {"names": list(names), "_type": "ClassLabel"}
    table = pa.table({"image": rows, "label": pa.array(labels, pa.int64()), **columns})
    metadata = {"huggingface": json.dumps({"info": {"features": features}})}
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(table.replace_schema_metadata(metadata), path, row_group_size=4)
    return images


@pytest.fixture
def source(tmp_path, generator):
    """Two shards of training and one of validation, in the layout of the hub."""
    for shard, number in enumerate((11, 6)):
        labels = generator.integers(0, 3, number)
        write(tmp_path / f"source/data/train-{shard:05d}-of-00002.parquet", labels)
    write(tmp_path / "source/data/validation-00000-of-00001.parquet", [2, 0, 1, 0])
    write(tmp_path / "source/data/test-00000-of-00001.parquet", [-1, -1])
    return tmp_path / "source"


def contents(rows):
    return [(row["img_bytes"], row["gt_label"]) for row in rows]


def refused(*arguments, **options):
    """Return the one line of the refusal."""
    with pytest.raises(InputError) as error:
        open_images(*arguments, **options)
    message = str(error.value)
    assert len(message.splitlines()) == 1
    return message


def test_images_and_their_order_are_those_of_the_unpacked_folders(tmp_path, generator):
    pixels = generator.integers(0, 256, (17, 5, 4, 3), dtype=np.uint8)
    encoded = [b"P6 4 5 255\n" + image.tobytes() for image in pixels]
    labels = generator.permutation(np.arange(17) % 3)
    for shard, rows in enumerate((slice(0, 11), slice(11, 17))):
        path = tmp_path / f"source/train-{shard:05d}-of-00002.parquet"
        write(path, labels[rows], images=encoded[rows])
    splits, names = parquet_splits(tmp_path / "source", {}, None, "label")
    unpack(splits, folder_names(names), tmp_path / "folders")
    files = sorted((tmp_path / "folders/train").rglob("*.ppm"))
    rows = open_images(tmp_path / "source", "train")
    assert rows.classes == NAMES
    assert len(rows) == len(files) == 17
    for row, file in zip(rows, files, strict=True):
        assert NAMES[row["gt_label"]] == file.parent.name
        assert row["img_bytes"] == file.read_bytes()
        assert read_image(row["img_path"], row["img_bytes"]) == read_image(file)
        # The name of an unpacked file has the shard and the row.
        shard, number = row["img_path"].split(", row ")
        assert file.stem == f"{Path(shard).stem}_{int(number):07d}"
    assert rows.labels.tolist() == sorted(labels)


@pytest.mark.parametrize(
    ("name", "split", "number"),
    [("cifar10/plain_text", "test", 10_000), ("imagenette_128", "validation", 3925)],
)
def test_real_data_are_read_as_they_are_stored(name, split, number, shared_data):
    (path,) = shared_data(name).rglob(f"{split}-*.parquet")
    stored = pq.read_table(path, columns=["image", "label"])
    labels = stored.column("label").to_numpy()
    order = np.argsort(labels, kind="stable")
    rows = open_images(shared_data(name), split)
    assert len(rows) == number
    assert np.array_equal(rows.labels.numpy(), labels[order])
    assert len(rows.classes) == 10
    images = stored.column("image").combine_chunks().field("bytes")
    for index in range(0, number, number // 500):
        assert rows[index]["img_bytes"] == images[int(order[index])].as_py()
        assert rows[index]["img_path"] == f"{path}, row {order[index]}"
    assert read_image("x", rows[-1]["img_bytes"]).mode == "RGB"


def save_all(source, target):
    files = {name: [str(f) for f in source.rglob(f"{name}-*")] for name in ("train", "validation")}
    datasets.DatasetDict(
        {name: datasets.Dataset.from_parquet(sorted(found)) for name, found in files.items()}
    ).save_to_disk(str(target))


def save_one(source, target):
    files = sorted(str(file) for file in source.rglob("train-*"))
    datasets.Dataset.from_parquet(files, split="train").with_format("torch").save_to_disk(
        str(target)
    )


@pytest.mark.parametrize("save", [save_all, save_one])
def test_a_saved_data_set_has_the_same_images(save, source, tmp_path):
    save(source, tmp_path / "saved")
    expected = open_images(source, "train")
    rows = open_images(str(tmp_path / "saved"), "train")
    assert contents(rows) == contents(expected)
    assert str(tmp_path / "saved") in rows[0]["img_path"]
    missing = refused(tmp_path / "saved", "test")
    assert "no split 'test'" in missing
    assert "train" in missing


@pytest.mark.parametrize("revision", ["", "@main", "@v1.0", "@refs/convert/parquet"])
def test_a_data_set_of_the_hub_is_read_from_its_cache(revision, hub):
    images = write(hub / "data/train-00000-of-00001.parquet", [0, 1, 2])
    write(hub / "data/validation-00000-of-00001.parquet", [2])
    rows = open_images(f"hf://datasets/owner/pictures{revision}", "train")
    assert contents(rows) == list(zip(images, range(3), strict=True))
    inside = open_images(f"hf://datasets/owner/pictures{revision}/data", "validation")
    assert inside.labels.tolist() == [2]


def test_what_the_hub_does_not_have_is_named(hub):
    write(hub / "data/train-00000-of-00001.parquet", [0, 1, 2])
    assert "no split 'dev'" in refused("hf://datasets/owner/pictures", "dev")
    message = refused("hf://datasets/owner/other", "train")
    assert "owner/other cannot be downloaded" in message
    assert "hf auth login" in message
    for name in ("hf://owner/pictures", "hf:owner/pictures", "hf://datasets/pictures"):
        assert "write hf://datasets/OWNER/NAME" in refused(name, "train")
    (hub / "data/train-00000-of-00001.parquet").unlink()
    message = refused("hf://datasets/owner/pictures@v1.0", "train")
    assert "pictures/tree/v1.0" in message
    assert "pictures@refs/convert/parquet" in message


def state(folder):
    return {path: path.stat().st_mtime_ns for path in folder.rglob("*")}


def test_nothing_is_written_beside_the_data(source, arrow_cache):
    before = state(source)
    for path in (source / "data", source):
        path.chmod(0o555)
    rows = open_images(source, "train")
    list(rows)
    assert state(source) == before
    assert any(arrow_cache.rglob("parquet-train*.arrow"))


def test_a_file_that_changed_is_read_again(source):
    path = source / "data/validation-00000-of-00001.parquet"
    open_images(source, "validation")
    images = write(path, [0, 0, 1, 2], images=[b"new"] * 4)
    os.utime(path, ns=(1, 1))
    after = open_images(source, "validation")
    assert contents(after) == list(zip(images, [0, 0, 1, 2], strict=True))


@pytest.mark.parametrize("labels", [[0, 0, 1, 2], [0, 1, 1, 2, 2]])
def test_a_file_that_changed_but_kept_its_time_is_read_again(labels, source):
    path = source / "data/validation-00000-of-00001.parquet"
    time = path.stat().st_mtime_ns
    open_images(source, "validation")
    images = write(path, labels, images=[b"new"] * len(labels))
    os.utime(path, ns=(time, time))
    assert contents(open_images(source, "validation")) == list(zip(images, labels, strict=True))


@pytest.mark.parametrize("number", [3, 0])
def test_a_copy_with_other_rows_is_refused(number, source, arrow_cache):
    earlier = set(arrow_cache.rglob("*.arrow"))  # of other tests
    open_images(source, "validation")
    (file,) = set(arrow_cache.rglob("*.arrow")) - earlier
    with pa.ipc.open_stream(file) as stream:
        rows = stream.read_all()
    with pa.ipc.new_stream(file, rows.schema) as stream:
        stream.write_table(rows[:number])
    message = refused(source, "validation")
    assert f" has {number} rows of validation" in message
    assert f"{source} have 4; delete this copy" in message
    (copy,) = glob(message.split(" has ")[0])
    rmtree(copy)
    assert len(open_images(source, "validation")) == 4


def test_a_folder_whose_name_is_a_pattern(tmp_path):
    images = write(tmp_path / "a[bc]*{d}/train-00000-of-00001.parquet", [0, 1, 2])
    write(tmp_path / "ab/train-00000-of-00001.parquet", [0])
    rows = open_images(tmp_path / "a[bc]*{d}", "train")
    assert contents(rows) == list(zip(images, range(3), strict=True))


def read_in_turn(source, queue):
    rows = open_images(source, "train")
    queue.put(contents(rows))


def test_processes_that_open_the_data_at_once_read_the_same(source):
    context = get_context("fork")
    queue = context.Queue()
    processes = [
        context.Process(target=read_in_turn, args=(source, queue), daemon=True) for _ in range(3)
    ]
    for process in processes:
        process.start()
    found = [queue.get(timeout=60) for _ in processes]
    for process in processes:
        process.join()
    rows = open_images(source, "train")
    assert found == [contents(rows)] * 3


def test_a_copy_for_another_process_does_not_hold_the_images(tmp_path):
    number = 3000
    images = [os.urandom(1000) for _ in range(number)]
    write(tmp_path / "train-0.parquet", np.zeros(number, int), images=images)
    rows = open_images(tmp_path, "train")
    copy = pickle.dumps(rows)
    assert len(copy) < 16 * number + 20_000  # a label and a place for each image
    assert contents(pickle.loads(copy)) == contents(rows)


@pytest.mark.parametrize(
    ("indices", "kept"), [(4, range(4)), (-3, range(14, 17)), ([5, 2], [5, 2]), (99, range(17))]
)
def test_some_of_the_images(indices, kept, source):
    rows, whole = open_images(source, "train"), open_images(source, "train")
    rows.keep(indices)
    assert contents(rows) == [contents(whole)[index] for index in kept]
    assert rows.labels.tolist() == whole.labels[list(kept)].tolist()


@pytest.mark.parametrize("image", [None, {"bytes": None, "path": "a.png"}])
def test_a_row_without_an_image_is_named(image, tmp_path):
    rows = [{"bytes": b"a", "path": "x"}, image]
    for number, images in enumerate((rows[:1], rows)):
        table = pa.table({"image": pa.array(images, IMAGE), "label": [0] * len(images)})
        pq.write_table(table, tmp_path / f"train-{number}.parquet")
    message = refused(tmp_path, "train")
    assert f"{tmp_path / 'train-1.parquet'}, row 1: there is no image" in message


def test_without_names_classes_are_numbered(tmp_path):
    write(tmp_path / "train-0.parquet", [10, 0, 3], names=None)
    assert open_images(tmp_path, "train").classes == tuple(f"{i:02d}" for i in range(11))
    assert open_images(tmp_path, "train", classes=NAMES * 4).classes == NAMES * 4
    assert "row 0: the label is 10, but must be 0 to 2" in refused(tmp_path, "train", classes=NAMES)


IMAGES = [{"bytes": b"a", "path": "a"}]


@pytest.mark.parametrize(
    ("columns", "chosen"),
    [
        ({"img": "Image", "fine_label": "ClassLabel", "coarse_label": "ClassLabel"}, "fine_label"),
        ({"jpg": "Image", "labels": "int"}, "labels"),
        ({"image": "Image", "jpg": "Image", "breed": "ClassLabel", "age": "int"}, "breed"),
        ({"img": None, "label": "int"}, "label"),
    ],
)
def test_columns_are_found_by_name_and_type(columns, chosen, tmp_path):
    table, features, images = {}, {}, iter("abc")
    for number, (name, kind) in enumerate(columns.items()):
        is_image = kind in ("Image", None)
        table[name] = [{"bytes": next(images).encode(), "path": "x"}] if is_image else [number]
        if kind == "ClassLabel":
            features[name] = {"names": list("pqrs"), "_type": kind}
        elif kind == "Image":
            features[name] = {"_type": kind}
    metadata = {"huggingface": json.dumps({"info": {"features": features}})}
    pq.write_table(pa.table(table).replace_schema_metadata(metadata), tmp_path / "train.parquet")
    rows = open_images(tmp_path, "train")
    assert contents(rows) == [(b"a", list(columns).index(chosen))]
    other = list(columns)[-1]
    if other != chosen and columns[other] == "int":
        given = open_images(tmp_path, "train", label_column=other)
        assert contents(given) == [(b"a", len(columns) - 1)]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"image_column": "label"}, ["'label' has no images", "set image_column to one of image"]),
        ({"image_column": "imag"}, ["'imag' has no images", "image, thumbnail"]),
        ({"label_column": "image"}, ["'image' has no labels", "set label_column", "label, age"]),
        ({"split": "val"}, ["no split 'val'", "train"]),
    ],
)
def test_a_wrong_column_or_split_lists_the_right_ones(options, said, tmp_path):
    write(tmp_path / "train-0.parquet", [0], age=[3], thumbnail=IMAGES)
    message = refused(tmp_path, **{"split": "train", **options})
    assert str(tmp_path) in message
    for part in said:
        assert part in message


@pytest.mark.parametrize(
    ("columns", "said"),
    [
        ({"image": IMAGES, "a": [1], "b": [2]}, "several may have labels; set label_column.* a, b"),
        ({"x": IMAGES, "y": IMAGES, "label": [0]}, "several may have images; set image_.* x, y"),
        ({"image": IMAGES, "label": ["cat"]}, "no column of labels, only image, label"),
        ({"text": ["a"], "label": [0]}, "no column of images, only text, label"),
    ],
)
def test_columns_that_cannot_be_found(columns, said, tmp_path):
    pq.write_table(pa.table(columns), tmp_path / "train.parquet")
    with pytest.raises(InputError, match=said):
        open_images(tmp_path, "train")


def test_missing_folders_files_and_rows(tmp_path):
    assert f"no folder {tmp_path / 'none'}" in refused(tmp_path / "none", "train")
    assert "no *.parquet file" in refused(tmp_path, "train")
    write(tmp_path / "train-0.parquet", [])
    assert "no data of train: its files have no rows; use another" in refused(tmp_path, "train")
    empty = pa.table({"image": pa.array([], IMAGE), "label": pa.array([], pa.int64())})
    datasets.Dataset(empty).save_to_disk(str(tmp_path / "saved"), num_shards=1)
    assert "no data of train: its files have no rows" in refused(tmp_path / "saved", "train")
    images = write(tmp_path / "train-1.parquet", [2, 2])
    assert contents(open_images(tmp_path, "train")) == [(image, 2) for image in images]
    write(tmp_path / "b/train-0.parquet", [0])
    assert "several folders" in refused(tmp_path, "train")


@pytest.mark.parametrize("label", [-1, 3, None])
def test_a_label_out_of_range_names_its_file_and_row(label, tmp_path):
    write(tmp_path / "train-0.parquet", [0, 1])
    write(tmp_path / "train-1.parquet", [1, 2, label])
    message = refused(tmp_path, "train")
    assert f"{tmp_path / 'train-1.parquet'}, row 2: the label is {label}, but must be 0 to 2" in (
        message
    )


@pytest.mark.parametrize("kind", [pa.uint8(), pa.uint64(), pa.int8()], ids=str)
def test_labels_of_other_integers(kind, tmp_path):
    table = {"image": IMAGES * 3, "label": pa.array([2, 0, 1], kind)}
    pq.write_table(pa.table(table), tmp_path / "train.parquet")
    assert open_images(tmp_path, "train").labels.tolist() == [0, 1, 2]
    table["label"] = pa.array([2, None, 1], kind)
    pq.write_table(pa.table(table), tmp_path / "train.parquet")
    assert "row 1: the label is None" in refused(tmp_path, "train")


def test_a_label_beyond_int64_is_out_of_range(tmp_path):
    table = {"image": IMAGES * 2, "label": pa.array([0, 2**64 - 5], pa.uint64())}
    pq.write_table(pa.table(table), tmp_path / "train.parquet")
    assert f"row 1: the label is {2**64 - 5}, but must be 0 to" in refused(tmp_path, "train")


def test_files_that_name_classes_differently_are_refused(tmp_path):
    write(tmp_path / "train-0.parquet", [0])
    write(tmp_path / "train-1.parquet", [0], names=("bee", "ant", "cat"))
    message = refused(tmp_path, "train")
    assert "train-1.parquet has other columns or class names than" in message


@pytest.mark.parametrize("metadata", ["{broken", "[" * 100_000, '{"info": {"features": 3}}'])
def test_metadata_that_are_broken_name_the_file(metadata, tmp_path):
    path = tmp_path / "train-0.parquet"
    write(path, [0])
    pq.write_table(pq.read_table(path).replace_schema_metadata({"huggingface": metadata}), path)
    assert refused(tmp_path, "train").startswith(f"{path} is not a readable parquet file")


def test_damaged_pages_and_a_missing_file_are_said(tmp_path, capsys):
    path = tmp_path / "train-00000-of-00002.parquet"
    write(path, [0] * 8)
    open_images(tmp_path, "train")
    assert f"{tmp_path} has 1 of 00002 files of train" in capsys.readouterr().err
    data = bytearray(path.read_bytes())
    data[4:300] = b"\xff" * 296  # the first pages; the footer with the schema stays
    path.write_bytes(data)
    message = refused(tmp_path, "train")
    assert "cannot be copied" in message
    assert "download damaged files again" in message


def test_a_damaged_saved_data_set_is_named(source, tmp_path):
    save_one(source, tmp_path / "saved")
    (tmp_path / "saved/state.json").write_text("{")
    assert refused(tmp_path / "saved", "train").startswith(f"{tmp_path / 'saved'} is damaged")


def test_a_saved_image_that_ends_outside_its_file_is_damage(source, tmp_path):
    save_one(source, tmp_path / "saved")
    (file,) = (tmp_path / "saved").glob("*.arrow")
    images = datasets.Dataset.from_file(str(file)).data.column("image").chunk(0).field("bytes")
    ends = np.frombuffer(images.buffers()[1], np.int32)[: len(images) + 1].copy()
    before, after = ends.tobytes(), (ends << 20).tobytes()
    data = file.read_bytes()
    assert data.count(before) == 1
    file.write_bytes(data.replace(before, after))
    message = refused(tmp_path / "saved", "train")
    assert message.startswith(f"{tmp_path / 'saved'} is damaged")
    assert "save it again" in message


def test_a_cache_that_cannot_be_written_is_named(source, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "file/cache")
    message = refused(source, "train")
    assert f"cannot be copied to {tmp_path / 'file/cache'}" in message
    assert "set HF_DATASETS_CACHE" in message


def test_a_missing_library_is_named(source, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "datasets", None)
    assert "in the clone, run pip install '.[train]'" in refused(source, "train")
