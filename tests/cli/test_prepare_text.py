"""`tokenformer-vit prepare-text` as a user starts it."""

import json
import re

import pytest

pytest.importorskip("transformers", reason="pip install '.[language]'")
pytest.importorskip("datasets", reason="pip install '.[language]'")

from tokenformer_vit.cli import prepare_text
from tokenformer_vit.errors import InputError
from tokenformer_vit.language import load_tokenizer
from tokenformer_vit.language.data import open_tokens, read_text_meta

pytestmark = pytest.mark.usefixtures("arrow_cache")


def run(*arguments):
    prepare_text.main([str(argument) for argument in arguments])


@pytest.fixture
def texts(tmp_path):
    """Two files of text and one of rows."""
    folder = tmp_path / "texts"
    folder.mkdir()
    for name in ("a", "b"):
        lines = "".join(f"{name} says {number * number} é\n" for number in range(1200))
        (folder / f"{name}.txt").write_text(lines)
    rows = (json.dumps({"text": f"row {number} " * 4, "id": number}) for number in range(400))
    (folder / "c.jsonl").write_text("\n".join(rows))
    return folder


@pytest.mark.parametrize("tokenizer", ["bytes", "bpe:300"])
def test_what_is_written_is_the_text(texts, tmp_path, capsys, tokenizer):
    out = tmp_path / "new" / "out"
    run(texts, out, "--tokenizer", tokenizer, "--val-share", 0.1, "--context-length", 16)
    meta, reader = read_text_meta(out), load_tokenizer(out)
    assert meta["vocab_size"] == len(reader) <= 300
    assert (meta["tokenizer"], meta["context_length"]) == (tokenizer, 16)
    train, val = meta["splits"]["train"], meta["splits"]["val"]
    size = sum((texts / f"{name}.txt").stat().st_size for name in "ab")
    assert train["bytes"] + val["bytes"] == size + sum(
        len(f"row {number} " * 4) for number in range(400)
    )
    printed = capsys.readouterr().out
    assert f"train: {train['tokens']:,} tokens of {train['documents']:,} documents" in printed
    parts = {split: reader.decode(open_tokens(out, split)) for split in ("train", "val")}
    parts = {split: text.split("<|endoftext|>") for split, text in parts.items()}
    # The end of each file is held out.
    found = {text for one in parts["train"] for text in (one + two for two in parts["val"])}
    assert {(texts / f"{name}.txt").read_text() for name in "ab"} <= found
    with pytest.raises(InputError, match="already exists; choose another OUT"):
        run(texts, out)


def test_held_out_files_columns_and_lines(texts, tmp_path):
    run(
        texts / "c.jsonl",
        texts / "a.txt",
        tmp_path / "out",
        "--val",
        texts / "b.txt",
        "--context-length",
        9,
    )
    meta = read_text_meta(tmp_path / "out")
    assert meta["splits"]["train"]["documents"] == 401
    assert meta["splits"]["val"]["bytes"] == (texts / "b.txt").stat().st_size
    run(
        texts / "a.txt",
        tmp_path / "lines",
        "--documents",
        "line",
        "--limit-tokens",
        900,
        "--val-share",
        0.3,
        "--context-length",
        9,
    )
    train = read_text_meta(tmp_path / "lines")["splits"]["train"]
    assert 900 <= train["tokens"] < 1000
    assert train["documents"] > 50
    with pytest.raises(InputError, match=r"b\.txt is both a source and in --val"):
        run(texts, tmp_path / "new", "--val", texts / "b.txt")
    with pytest.raises(InputError, match=r"no column 'x'; choose one with --column: text, id"):
        run(texts / "c.jsonl", tmp_path / "new", "--column", "x")
    with pytest.raises(InputError, match="absent is no file, and no folder with files that end in"):
        run(tmp_path / "absent", tmp_path / "new")
    assert not (tmp_path / "new").exists()


def test_digits_for_the_smallest_check_of_training(tmp_path):
    run("--reversal", 200, tmp_path / "out", "--val-share", 0.05, "--digits", 9)
    meta = read_text_meta(tmp_path / "out")
    assert meta["context_length"] == 20  # a row is a line
    assert meta["splits"]["val"]["tokens"] == 10 * 20 + 1
    text = bytes(open_tokens(tmp_path / "out", "train")[:-1].astype("uint8")).decode()
    assert all(line[:9] == line[:9:-1] for line in text.splitlines())


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("x", "out", "--hub", "y"), "give SOURCE... OUT, or --hub NAME OUT"),
        (("out", "--reversal", 9, "--context-length", 33), "multiple of 34"),
        (("out", "--reversal", 9, "--tokenizer", "bpe:300"), "needs --tokenizer bytes"),
    ],
)
def test_what_does_not_go_together(words, message):
    with pytest.raises(InputError, match=re.escape(message)):
        run(*words)
