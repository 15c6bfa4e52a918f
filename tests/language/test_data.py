"""From text to rows of tokens: nothing is lost, held-out text stays apart, damage is found."""

import codecs
import gzip
import itertools
import json
import os
import random
import re
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("transformers", reason="pip install '.[language]'")
pytest.importorskip("datasets", reason="pip install '.[language]'")

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from tokenformer_vit.errors import InputError
from tokenformer_vit.language import (
    byte_tokenizer,
    file_source,
    find_files,
    hub_source,
    load_tokenizer,
    open_rows,
    preparation,
    prepare_text,
    read_text_meta,
    reversal_source,
    train_tokenizer,
)
from tokenformer_vit.language.corpora import Piece, TextReader
from tokenformer_vit.language.data import PROGRESS, SplitWriter, partial_folder

CONTEXT = 8
META = (
    '{"context_length": 8, "vocab_size": 9, "splits": {"train": '
    '{"rows": 1, "tokens": 9, "documents": 1, "bytes": 9}}}'
)


@pytest.fixture(autouse=True)
def offline(monkeypatch):
    """Without this, datasets reports each opened file to the hub."""
    monkeypatch.setattr(datasets.config, "HF_UPDATE_DOWNLOAD_COUNTS", False)


def write(folder, sizes, vocab_size=1000, split="train", shard_rows=3):
    """Cut the tokens 0, 1, 2, ... (modulo the vocabulary), which come in portions, into rows."""
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
    rows = open_rows(tmp_path, "train")
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
        open_rows(tmp_path, "train")


def drop_meta(folder):
    (folder / "meta.json").unlink()


def interrupted(folder):
    folder.rename(partial_folder(folder))
    (partial_folder(folder) / "meta.json").rename(partial_folder(folder) / PROGRESS)


def meta_is(text):
    return lambda folder: (folder / "meta.json").write_text(text)


def other_length(folder):
    meta = json.loads((folder / "meta.json").read_text())
    (folder / "meta.json").write_text(json.dumps({**meta, "context_length": 7}))


def floats(folder):
    column = pa.array([[0.5] * 9], pa.list_(pa.float32(), 9))
    schema = pa.schema([("input_ids", column.type)])
    with (
        pa.OSFile(f"{folder}/train-00000.arrow", "wb") as file,
        pa.ipc.new_stream(file, schema) as to,
    ):
        to.write_batch(pa.record_batch([column], names=["input_ids"]))


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
        (meta_is(META.replace("train", "val")), "no split 'train'.*val"),
        (other_length, r"train-00000\.arrow does not hold rows of 8 tokens"),
        (
            lambda folder: (folder / "train-00001.arrow").unlink(),
            "hold 9 rows, but .* says 12: .* again",
        ),
        (meta_is(META.replace('h": 8', 'h": 0')), "context_length is 0"),
        (meta_is(META.replace('h": 8', 'h": 1e999')), "context_length is inf"),
        (meta_is(META.replace('h": 8', f'h": {2**31}')), "context_length is 2147483648"),
        (meta_is(META.replace('"rows": 1', '"rows": -1')), r"splits\.train\.rows is -1"),
        (meta_is(META.replace('"rows": 1', '"rows": "x"')), r"splits\.train\.rows is 'x'"),
        (meta_is(META.replace('"tokens": 9', '"tokens": 0')), "0 tokens cannot fill 1 rows"),
        (meta_is(META.replace('"train"', '"../x"')), "is not a description of tokens"),
        (meta_is("[" * 30_000), "is not a description of tokens"),
        (floats, r"train-00000\.arrow does not hold rows of 9 tokens"),
        (cut("train-00000.arrow", 0), r"train-00000\.arrow is damaged"),
        (cut("train-00000.arrow", 100), r"train-00000\.arrow is damaged"),
        (cut("train-00002.arrow", -40), "train-00002.arrow is damaged|rows, but .* says 12"),
        (cut("train-00002.arrow", -150), "train-00002.arrow is damaged|rows, but .* says 12"),
    ],
)
def test_what_is_not_whole_is_said_in_one_line(tmp_path, change, message):
    folder = tmp_path / "tokens"
    write(folder, (1,) * 100)
    assert len(open_rows(folder, "train")) == 12
    change(folder)
    with pytest.raises(InputError) as caught:
        open_rows(folder, "train")
    assert re.search(message, str(caught.value))
    assert "\n" not in str(caught.value)


def test_meta_is_read_as_it_stands(tmp_path):
    write(tmp_path, (100,))
    assert read_text_meta(tmp_path)["splits"]["train"]["rows"] == 12


def test_a_link_in_the_place_of_a_file_is_not_followed(tmp_path):
    theirs = tmp_path / "thesis.txt"
    theirs.write_text("mine")
    folder = tmp_path / "tokens"
    folder.mkdir()
    (folder / "train-00000.arrow").symlink_to(theirs)
    write(folder, (100,))
    assert theirs.read_text() == "mine"
    assert len(open_rows(folder, "train")) == 12


def test_a_full_disk_names_its_file(tmp_path, monkeypatch):
    path = tmp_path / "train-00000.arrow"
    writer = SplitWriter(tmp_path, "train", CONTEXT, 1000)
    full = os.open("/dev/full", os.O_WRONLY)
    monkeypatch.setattr(Path, "open", lambda path, mode: os.fdopen(full, "wb"))
    with pytest.raises(OSError, match="No space left") as caught:
        writer.add([np.zeros(100_000)])
    assert caught.value.filename == str(path)


ODD = "é<|endoftext|>\u2028x 😀\t\r\n\n  a\x00b"


def test_byte_tokens_are_the_bytes(tmp_path):
    byte_tokenizer().save_pretrained(tmp_path)
    tokenizer = load_tokenizer(tmp_path)
    how = {"add_special_tokens": False, "split_special_tokens": True}
    text = ODD + "".join(map(chr, [*range(0x300), *range(0x4E00, 0x4E80)]))
    assert tokenizer(text, **how)["input_ids"] == list(text.encode())
    assert tokenizer.decode(list(text.encode())) == text
    assert len(tokenizer) == 257
    assert tokenizer.eos_token_id == 256


def test_a_trained_tokenizer_loses_nothing():
    tokenizer = train_tokenizer(["to be or not to be"] * 5, 270)
    found = tokenizer(ODD + "to be", split_special_tokens=True)["input_ids"]
    assert tokenizer.decode(found) == ODD + "to be"
    assert len(tokenizer) <= 270
    assert len(tokenizer("to be or not to be")["input_ids"]) < 10
    with pytest.raises(InputError, match="bpe:256 is too small"):
        train_tokenizer([], 256)


def pieces(source):
    return list(TextReader([source]))


def test_a_long_file_in_pieces_has_the_tokens_of_the_whole(tmp_path, seed):
    tokenizer = train_tokenizer(["the cat  sat\n\non the mat\n  and more"] * 9, 280)
    rng = random.Random(seed)
    parts = [
        "the",
        "cat",
        " ",
        "  ",
        "\n",
        "\n\n",
        "\r\n",
        "\t",
        "é",
        "😀",
        "。",
        "1",
        "-",
        "\u3000",
    ]
    text = "".join(rng.choices(parts, k=30_000))
    file = tmp_path / "a.txt"
    file.write_bytes(text.encode())
    got = pieces(file_source(file, "file", "text", 0))
    assert len(got) > 3
    assert [piece.ends for piece in got] == [False] * (len(got) - 1) + [True]
    assert "".join(piece.text for piece in got) == text
    in_pieces = [token for piece in got for token in tokenizer(piece.text)["input_ids"]]
    assert in_pieces == tokenizer(text)["input_ids"]


def spaced(kind):
    """Return a tokenizer that puts a space before each text."""
    if kind == "byte-level":
        core = byte_tokenizer().backend_tokenizer
        core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
        return PreTrainedTokenizerFast(tokenizer_object=core, eos_token="<|endoftext|>")
    signs = {sign: number for number, sign in enumerate(["▁", *map(chr, range(10, 127)), "<end>"])}
    core = Tokenizer(models.BPE(signs, []))
    if kind == "metaspace":
        core.pre_tokenizer = pre_tokenizers.Metaspace()
    else:  # as in Llama 2
        core.normalizer = normalizers.Sequence(
            [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
        )
    return PreTrainedTokenizerFast(tokenizer_object=core, eos_token="<end>")


@pytest.mark.parametrize("kind", ["byte-level", "metaspace", "prepend"])
def test_a_tokenizer_that_puts_spaces_before_texts_reads_whole_files(tmp_path, kind, monkeypatch):
    tokenizer = spaced(kind)
    file = tmp_path / "a.txt"
    file.write_text("".join(f"line {number}\nand more " for number in range(2000)))
    sources = [file_source(file, "file", "text", 0.3)]
    assert len(pieces(sources[0])) > 4
    how = (lambda: tokenizer, 1, {"tokenizer": kind, "sources": []})
    prepare_text(sources, tmp_path / "out", *how)
    for split in ("train", "val"):
        rows = open_rows(tmp_path / "out", split)[:]["input_ids"]
        found = [rows[0, 0], *rows[:, 1:].ravel()]
        part = "".join(piece.text for piece in pieces(sources[0]) if piece.split == split)
        assert found == [*tokenizer(part)["input_ids"], tokenizer.eos_token_id]
    monkeypatch.setattr(preparation, "_LONGEST", 9000)
    with pytest.raises(InputError, match=r"a\.txt is too long .*9,000 characters.*JSON lines"):
        prepare_text(sources, tmp_path / "other", *how)


def test_text_without_a_space_is_cut_anywhere(tmp_path):
    text = "文" * 20_000
    (tmp_path / "a.txt").write_bytes(text.encode())
    got = pieces(file_source(tmp_path / "a.txt", "file", "text", 0))
    assert "".join(piece.text for piece in got) == text
    assert max(len(piece.text) for piece in got) <= 2**13


@pytest.mark.parametrize("share", [0.01, 0.3])
def test_the_end_of_a_file_is_held_out(tmp_path, share):
    text = "".join(f"line {number} é\n" for number in range(20_000))
    (tmp_path / "a.txt").write_bytes(text.encode())
    got = pieces(file_source(tmp_path / "a.txt", "file", "text", share))
    parts = {
        split: "".join(piece.text for piece in got if piece.split == split)
        for split in ("train", "val")
    }
    assert parts["train"] + parts["val"] == text
    assert parts["val"].startswith("line")
    assert 0 <= share * len(text.encode()) - len(parts["val"].encode()) < 20
    assert [piece.split for piece in got if piece.ends] == ["val", "train"]


@pytest.mark.parametrize("end", ["", "\n"])
def test_a_file_of_one_line_is_cut_between_words(tmp_path, end):
    text = "ein Wort für sich " * 2000 + end
    (tmp_path / "text8").write_text(text)
    got = pieces(file_source(tmp_path / "text8", "file", "text", 0.1))
    train, val = (
        "".join(piece.text for piece in got if piece.split == split) for split in ("train", "val")
    )
    assert train + val == text
    assert train.endswith(" ")
    assert 0 <= 0.1 * len(text.encode()) - len(val.encode()) < 20


def test_equal_documents_are_on_one_side(tmp_path):
    lines = [f"line {number % 500}" for number in range(2000)]
    (tmp_path / "a.txt").write_text("\n".join(lines))
    (tmp_path / "b.json").write_text(json.dumps([{"text": line} for line in lines]))
    small = [tmp_path / f"{number}.txt" for number in range(100)]
    for number, file in enumerate(small):
        file.write_text(lines[number])
    got = [
        (piece.text, piece.split)
        for file in (tmp_path / "a.txt", tmp_path / "b.json", *small)
        for piece in pieces(file_source(file, "line" if file.stem == "a" else "file", "text", 0.2))
    ]
    assert len(got) == 4100
    held_out = {text for text, split in got if split == "val"}
    assert not held_out & {text for text, split in got if split == "train"}
    assert 60 < len(held_out) < 140  # 100 of 500 expected


@pytest.mark.parametrize("documents", ["file", "line"])
@pytest.mark.parametrize("good", [0, 8190, 8191, 8192, 50_001])
def test_the_byte_that_is_not_utf8_is_named(tmp_path, documents, good):
    line = "é" * 40 + "\n"
    content = (line * 1000).encode()[: good // 81 * 81] + b"a" * (good % 81) + b"\xe9b\n"
    (tmp_path / "a.txt").write_bytes(content)
    assert content.index(b"\xe9b") == good
    with pytest.raises(InputError, match=rf"a\.txt is not UTF-8 text: byte {good} "):
        pieces(file_source(tmp_path / "a.txt", documents, "text", 0))


def test_a_character_that_is_cut_off_is_named(tmp_path):
    (tmp_path / "a.txt").write_bytes(b"ab\n" + "😀".encode()[:3])
    with pytest.raises(InputError, match="byte 3 "):
        pieces(file_source(tmp_path / "a.txt", "file", "text", 0))


@pytest.mark.parametrize(
    ("name", "documents"),
    [
        ("a.txt", "file"),
        ("a.txt", "line"),
        ("a.jsonl", "file"),
        ("a.jsonl.gz", "file"),
        ("a.parquet", "file"),
        ("[1] *.json", "file"),
    ],
)
def test_a_reader_goes_on_where_another_stopped(tmp_path, name, documents):
    lines = [f"document {number} " + "x" * 90 for number in range(300)]
    file = tmp_path / name
    if name == "a.txt":
        file.write_text("\n".join(lines))
    elif name == "a.parquet":
        pq.write_table(pa.table({"text": lines}), file, row_group_size=70)
    else:
        content = "".join(json.dumps({"text": line}) + "\n" for line in lines).encode()
        file.write_bytes(gzip.compress(content) if name.endswith("gz") else content)
    sources = [file_source(file, documents, "text", share) for share in (0, 0.1)]
    whole = list(TextReader(sources))
    assert len(whole) >= 8
    for stop in range(0, len(whole) + 1, 1 if len(whole) < 20 else 71):
        reader = TextReader(sources)
        before = list(itertools.islice(reader, stop))
        position = json.loads(json.dumps(reader.position()))
        assert before + list(TextReader(sources, position)) == whole


def test_a_row_without_text_is_passed_over(tmp_path):
    (tmp_path / "a.json").write_text(json.dumps([{"text": "a"}, {"text": ""}, {"text": None}]))
    assert pieces(file_source(tmp_path / "a.json", "file", "text", 0)) == [Piece("a", "train")]


@pytest.mark.parametrize("name", ["a.JSONL", "b.ndjson", "c.Ndjson.GZ", "d.PARQUET"])
def test_a_suffix_says_what_a_file_holds(tmp_path, name):
    file, row = tmp_path / name, b'{"text": "a"}\n'
    if name == "d.PARQUET":
        pq.write_table(pa.table({"text": ["a"]}), file)
    else:
        file.write_bytes(gzip.compress(row) if name.endswith("GZ") else row)
    assert find_files(tmp_path) == [file]
    assert pieces(file_source(file, "file", "text", 0)) == [Piece("a", "train")]


@pytest.mark.parametrize("name", ["a.csv", "b.TSV", "c.csv.gz"])
def test_a_table_is_not_read_as_text(tmp_path, name):
    (tmp_path / name).write_text("text,id\na,1\n")
    with pytest.raises(InputError, match=rf"{name} is a table, .* JSON lines or parquet"):
        file_source(tmp_path / name, "file", "text", 0)


@pytest.mark.parametrize("documents", ["file", "line"])
@pytest.mark.parametrize("share", [0, 0.2])
@pytest.mark.parametrize("lines", [3, 2000])
def test_a_byte_order_mark_is_no_text(tmp_path, documents, share, lines):
    plain, marked = tmp_path / "plain.txt", tmp_path / "marked.txt"
    plain.write_bytes("é text\n".encode() * lines)
    marked.write_bytes(codecs.BOM_UTF8 + plain.read_bytes())
    found = [pieces(file_source(file, documents, "text", share)) for file in (plain, marked)]
    texts = []
    for part in found:
        part.sort(key=lambda piece: piece.split)  # the held-out end comes first
        texts.append("".join(piece.text for piece in part))
    assert texts[0] == texts[1]
    if lines == 3:
        assert found[0] == found[1]
    marked.write_bytes(codecs.BOM_UTF8 + b"ab\nc\xff")
    with pytest.raises(InputError, match="byte 7 "):
        pieces(file_source(marked, documents, "text", share))


DEEP = "[" * 20_000 + "]" * 20_000


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        pytest.param(
            "a.jsonl",
            f'{{"text": "a"}}\n{{"text": "b", "x": {DEEP}}}\n',
            "line 2 is not JSON .recursion",
            id="deep line",
        ),
        pytest.param("a.json", DEEP, "line 1 is not JSON .recursion", id="deep file"),
        ("a.jsonl", '{"text": "a"}\n{"text": "b"', "line 2 is not JSON .EOF while"),
        ("a.jsonl", '{\n"text": "a"\n}', "line 1 is not JSON .* one object a line"),
        ("a.jsonl", '{"text": "\\ud800"}', "line 1 is not JSON"),
        ("a.jsonl", b'{"text": "caf\xe9"}', "line 1 is not JSON .invalid unicode"),
        ("a.jsonl", "5\n", "row 0, .*, is int; it must be an object whose 'text' is a text"),
        ("a.jsonl", '{"x": 1, "y": 2}\n', "no column 'text'; .*: x, y"),
        pytest.param("a.jsonl", '{"x": 1}\n' * 10_002, "no column 'text'", id="long file"),
        ("a.jsonl", "\n \n", "has no rows"),
        ("a.json", "[]", "has no rows"),
        pytest.param(
            "a.jsonl.gz",
            gzip.compress(b'{"text": "a"}\n' * 99, mtime=0)[:-9],
            "cannot be read: Compressed file",
            id="cut gzip",
        ),
        ("a.jsonl.gz", b'{"text": "a"}', "cannot be read: Not a gzipped file"),
    ],
)
def test_json_that_cannot_be_read_is_said_in_one_line(tmp_path, name, content, message):
    file = tmp_path / name
    file.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(InputError, match=rf"{name}.*{message}") as caught:
        pieces(file_source(file, "file", "text", 0))
    assert "\n" not in str(caught.value)


def test_json_is_one_object_a_line_or_a_list(tmp_path):
    for content in (
        b'\xef\xbb\xbf{"text": "a", "x": 1}\r\n\n{"x": [{}]}\n{"text": "b", "x": "2"}',
        b'\n [{"text": "a", "x": 1},\n {"x": 2}, {"text": "b"}]\n',
        b'["a",\n"b"]',
    ):
        (tmp_path / "a.json").write_bytes(content)
        got = pieces(file_source(tmp_path / "a.json", "file", "text", 0))
        assert [piece.text for piece in got] == ["a", "b"]


@pytest.mark.parametrize("features", ["{broken", '{"info": {"features": 5}}'])
def test_foreign_parquet_metadata_is_said_in_one_line(tmp_path, features):
    table = pa.table({"text": ["a", "b"]}).replace_schema_metadata({"huggingface": features})
    pq.write_table(table, tmp_path / "a.parquet")
    with pytest.raises(InputError, match=r"a\.parquet cannot be read: ") as caught:
        pieces(file_source(tmp_path / "a.parquet", "file", "text", 0))
    assert "\n" not in str(caught.value)


def test_the_hub_is_streamed(monkeypatch):
    asked = {}

    def load_dataset(**options):
        asked.update(options)
        return datasets.Dataset.from_dict({"words": ["a", "b"]}).to_iterable_dataset()

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    assert pieces(hub_source("me/data", "fr", "test", "words", 0)) == [
        Piece("a", "train"),
        Piece("b", "train"),
    ]
    how = {"path": "me/data", "name": "fr", "split": "test", "streaming": True}
    how["trust_remote_code"] = False
    assert asked == {**how, "revision": None}
    pieces(hub_source("me/data", "fr", "test", "words", 0, "refs/convert/parquet"))
    assert asked == {**how, "revision": "refs/convert/parquet"}


@pytest.mark.parametrize(
    ("reason", "told"),
    [
        ("Couldn't reach the hub\nat all", r"Couldn't reach the hub at all$"),
        ("Dataset scripts are no longer supported, but found d.py", r"--hub-revision refs/"),
        ("Compression type zstd not supported", r"supported; `pip install zstandard`$"),
    ],
)
def test_what_the_hub_does_not_give_is_said_with_the_way_out(monkeypatch, reason, told):
    def fail(**options):
        raise RuntimeError(reason)

    monkeypatch.setattr(datasets, "load_dataset", fail)
    where = r"me/data of the Hugging Face hub cannot be read: "
    with pytest.raises(InputError, match=f"{where}.*{told}"):
        pieces(hub_source("me/data", "fr", "test", "words", 0))


def test_no_line_of_digits_occurs_twice():
    got = pieces(reversal_source(1000, 3, 0.3, seed=1))
    lines = {
        split: "".join(piece.text for piece in got if piece.split == split).splitlines()
        for split in ("train", "val")
    }
    assert (len(lines["train"]), len(lines["val"])) == (700, 300)
    assert sorted(lines["train"] + lines["val"]) == [
        f"{number:03d}>{f'{number:03d}'[::-1]}" for number in range(1000)
    ]
    assert pieces(reversal_source(1000, 3, 0.3, seed=1)) == got
    assert pieces(reversal_source(1000, 3, 0.3, seed=2)) != got
    with pytest.raises(InputError, match="10 sequences of 1 digits, too few for 11"):
        reversal_source(11, 1, 0.3, seed=0)
