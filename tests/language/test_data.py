"""Rows of tokens on the disk: each token is predicted once, and damage is found."""

import json
import re

import numpy as np
import pytest

pytest.importorskip("transformers", reason="pip install tokenformer-vit[language]")
pytest.importorskip("datasets", reason="pip install tokenformer-vit[language]")

from tokenformer_vit.errors import InputError
from tokenformer_vit.language import read_text_meta, read_tokens
from tokenformer_vit.language.data import PROGRESS, SplitWriter, partial_folder

CONTEXT = 8


def write(folder, sizes, vocab_size=1000, split="train", shard_rows=3):
    """Cut the tokens 0, 1, 2, ... (modulo the vocabulary), got in portions, into rows."""
    folder.mkdir(exist_ok=True)
    writer = SplitWriter(folder, split, CONTEXT, vocab_size)
    first = 0
    for size in sizes:
        writer.add([np.arange(first, first + size) % vocab_size])
        first += size
        if writer.shard_tokens >= shard_rows * CONTEXT:
            writer.close_shard()
            writer = SplitWriter(
                folder, split, CONTEXT, vocab_size, json.loads(json.dumps(writer.state()))
            )
    writer.close_shard()
    meta = {"context_length": CONTEXT, "vocab_size": vocab_size, "splits": {split: writer.counts}}
    (folder / "meta.json").write_text(json.dumps(meta))
    return writer


@pytest.mark.parametrize("sizes", [(100,), (1,) * 100, (7, 0, 50, 3, 40), (9,), (16,), (17,)])
@pytest.mark.parametrize(("vocab_size", "kind"), [(65536, "uint16"), (65537, "uint32")])
def test_each_token_but_the_first_is_predicted_once(tmp_path, sizes, vocab_size, kind):
    writer = write(tmp_path, sizes, vocab_size)
    rows = read_tokens(tmp_path, "train")
    got = rows[:]["input_ids"]
    assert got.shape == ((sum(sizes) - 1) // CONTEXT, CONTEXT + 1)
    np.testing.assert_array_equal(got[:, 1:].ravel(), np.arange(1, 1 + len(rows) * CONTEXT))
    np.testing.assert_array_equal(got[:, 0], np.arange(len(rows)) * CONTEXT)
    assert rows.features["input_ids"].feature.dtype == kind
    assert rows[0]["input_ids"].dtype == np.int64
    assert writer.counts["tokens"] == sum(sizes)
    assert writer.left_over == (sum(sizes) - 1) % CONTEXT


def test_too_few_tokens_for_a_row(tmp_path):
    writer = write(tmp_path, (CONTEXT,))
    assert writer.left_over == CONTEXT
    with pytest.raises(InputError, match=r"split 'train' in .* has no rows"):
        read_tokens(tmp_path, "train")


def drop_meta(folder):
    (folder / "meta.json").unlink()


def interrupted(folder):
    folder.rename(partial_folder(folder))
    (partial_folder(folder) / "meta.json").rename(partial_folder(folder) / PROGRESS)


def meta_is(text):
    return lambda folder: (folder / "meta.json").write_text(text)


def other_length(folder):
    meta = json.loads((folder / "meta.json").read_text())
    (folder / "meta.json").write_text(json.dumps({**meta, "context_length": 9}))


def cut(file, size):
    def change(folder):
        path = folder / file
        path.write_bytes(path.read_bytes()[:size])

    return change


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda folder: folder.rename(folder.with_name("x")), "there is no folder .*tokens; make"),
        (drop_meta, r"tokens has no meta\.json; make"),
        (interrupted, "tokens is not finished"),
        (meta_is("[1"), "is not a description of tokens"),
        (meta_is("[]"), "is not a description of tokens"),
        (meta_is('{"context_length": 8, "splits": {}}'), "is not a description of tokens"),
        (meta_is('{"context_length": 8, "splits": {"val": {"rows": 1}}}'), "no split 'train'.*val"),
        (other_length, r"train-00000\.arrow does not hold rows of 10 tokens"),
        (lambda folder: (folder / "train-00001.arrow").unlink(), "hold 9 rows, and .* says 12"),
        (cut("train-00000.arrow", 0), r"train-00000\.arrow is damaged"),
        (cut("train-00000.arrow", 100), r"train-00000\.arrow is damaged"),
        (cut("train-00002.arrow", -40), "train-00002.arrow is damaged|rows, and .* says 12"),
        (cut("train-00002.arrow", -150), "train-00002.arrow is damaged|rows, and .* says 12"),
    ],
)
def test_what_is_not_whole_is_said_in_one_line(tmp_path, change, message):
    folder = tmp_path / "tokens"
    write(folder, (1,) * 100)
    assert len(read_tokens(folder, "train")) == 12
    change(folder)
    with pytest.raises(InputError) as caught:
        read_tokens(folder, "train")
    assert re.search(message, str(caught.value))
    assert "\n" not in str(caught.value)


def test_meta_is_read_as_it_stands(tmp_path):
    write(tmp_path, (100,))
    assert read_text_meta(tmp_path)["splits"]["train"]["rows"] == 12


def test_a_full_disk_names_its_file(tmp_path):
    path = tmp_path / "train-00000.arrow"
    path.symlink_to("/dev/full")
    writer = SplitWriter(tmp_path, "train", CONTEXT, 1000)
    with pytest.raises(OSError, match="No space left") as caught:
        writer.add([np.zeros(100_000)])
    assert caught.value.filename == str(path)
