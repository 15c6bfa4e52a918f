"""Damaged or unusual Parquet files end in one line that names the fault."""

import json
import os

import pytest
import torch

from tokenformer_vit.errors import InputError
from tokenformer_vit.vision.sources import parquet_splits

pa = pytest.importorskip("pyarrow")
pq = pytest.importorskip("pyarrow.parquet")


def write_shard(path, labels, names=("ant", "bee", "cat")):
    contents = torch.randint(256, (len(labels), 40), dtype=torch.uint8).numpy()
    images = [{"bytes": content.tobytes(), "path": "x.JPEG"} for content in contents]
    table = pa.table({"image": images, "label": pa.array(labels, pa.int64())})
    if names:
        features = {"label": {"names": list(names), "_type": "ClassLabel"}}
        table = table.replace_schema_metadata(
            {"huggingface": json.dumps({"info": {"features": features}})}
        )
    pq.write_table(table, path, row_group_size=4)


def read_all(folder):
    splits, _ = parquet_splits(folder, {}, None, "label")
    for split in splits.values():
        list(split.read(range(len(split.labels))))


def refused(folder):
    """Read everything, and return the one line that it must end with."""
    with pytest.raises(InputError) as error:
        read_all(folder)
    message = str(error.value)
    assert len(message.splitlines()) == 1
    return message


@pytest.mark.parametrize(
    ("metadata", "said"),
    [
        ("{broken", "metadata cannot be read"),
        ("[" * 100_000, "metadata cannot be read"),
        ("[1]", "metadata cannot be read"),
        ('{"info": null}', "metadata cannot be read"),
        ('{"info": {"features": {"label": "int64"}}}', "metadata cannot be read"),
        ('{"info": {"features": {"label": {"names": 3}}}}', "but are 3; write the file again"),
        ('{"info": {"features": {"label": {"names": ["a", 1]}}}}', "but are ['a', 1]"),
    ],
    ids=range(7),
)
def test_metadata_that_is_broken_is_named(metadata, said, tmp_path):
    path = tmp_path / "train-0.parquet"
    write_shard(path, [0, 1])
    pq.write_table(pq.read_table(path).replace_schema_metadata({"huggingface": metadata}), path)
    message = refused(tmp_path)
    assert message.startswith(f"{path}: ")
    assert said in message


def test_metadata_without_names_is_as_none(tmp_path):
    path = tmp_path / "train-0.parquet"
    write_shard(path, [0, 1])
    metadata = {"huggingface": json.dumps({"info": {"features": {"image": {}}}})}
    pq.write_table(pq.read_table(path).replace_schema_metadata(metadata), path)
    _, names = parquet_splits(tmp_path, {}, None, "label")
    assert names == ["0", "1"]


def test_files_that_name_classes_differently_are_refused(tmp_path):
    write_shard(tmp_path / "train-0.parquet", [0, 1], names=("ant", "bee"))
    write_shard(tmp_path / "val-0.parquet", [0, 1], names=("bee", "ant"))
    message = refused(tmp_path)
    assert "val-0.parquet has the classes bee, ant, but other files have ant, bee" in message


def test_labels_of_a_split_before_the_one_that_names_them(tmp_path):
    write_shard(tmp_path / "train-0.parquet", [0, 5], names=None)
    write_shard(tmp_path / "val-0.parquet", [0, 1], names=("ant", "bee"))
    message = refused(tmp_path)
    assert "train-0.parquet, row 1: label is 5, but must be 0 to 1" in message


def test_a_label_that_would_make_endless_folders(tmp_path):
    write_shard(tmp_path / "train-0.parquet", [0, 10**8], names=None)
    message = refused(tmp_path)
    assert "row 1: label is 100000000, but must be 0 to 99999" in message


@pytest.mark.parametrize(
    ("column", "values", "said"),
    [
        ("label", pa.array([[0], [1]]), "holds list<"),
        ("label", pa.array([{"a": 0}, {"a": 1}]), "holds struct<"),
        ("label", pa.array(["0", "1"]), "holds string"),
        ("label", pa.array([0.0, 1.0]), "holds double"),
        ("image", pa.array([[{"bytes": b"x"}]] * 2), "not an image of {bytes, path}"),
        ("image", pa.array([{"bytes": [1]}] * 2), "not an image of {bytes, path}"),
        ("image", pa.array([{"path": "x"}] * 2), "not an image of {bytes, path}"),
    ],
)
def test_columns_of_other_types(column, values, said, tmp_path):
    path = tmp_path / "train-0.parquet"
    write_shard(path, [0, 1])
    table = pq.read_table(path)
    pq.write_table(table.set_column(table.schema.get_field_index(column), column, values), path)
    message = refused(tmp_path)
    assert message.startswith(str(path))
    assert said in message


def test_pages_that_are_damaged_are_named(tmp_path):
    path = tmp_path / "train-0.parquet"
    write_shard(path, [0] * 8)
    data = bytearray(path.read_bytes())
    data[4:400] = b"\xff" * 396  # the first pages; the footer with the schema stays
    path.write_bytes(data)
    assert str(path) in refused(tmp_path)


def test_a_shard_that_is_a_named_pipe_is_refused(tmp_path):
    write_shard(tmp_path / "train-0.parquet", [0, 1])
    os.mkfifo(tmp_path / "train-1.parquet")
    message = refused(tmp_path)
    assert f"{tmp_path / 'train-1.parquet'} is not a readable parquet file" in message


def test_a_row_group_that_lacks_images_is_named(tmp_path, monkeypatch):
    write_shard(tmp_path / "train-0.parquet", [0] * 8)
    monkeypatch.setattr("tokenformer_vit.vision.sources._BATCH_ROWS", 3)
    iter_batches = pq.ParquetFile.iter_batches
    monkeypatch.setattr(
        pq.ParquetFile, "iter_batches", lambda *args, **more: [next(iter_batches(*args, **more))]
    )
    message = refused(tmp_path)
    assert str(tmp_path / "train-0.parquet") in message
    assert "row group 0 lacks 1 images" in message
