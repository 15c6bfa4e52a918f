"""`tokenformer-vit prepare-text` as a user starts it."""

import json

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
    assert f"train: {train['tokens']:,} tokens, {train['documents']:,} documents" in printed
    parts = {split: reader.decode(open_tokens(out, split)) for split in ("train", "val")}
    parts = {split: text.split("<|endoftext|>") for split, text in parts.items()}
    # The end of each file is held out.
    found = {text for one in parts["train"] for text in (one + two for two in parts["val"])}
    assert {(texts / f"{name}.txt").read_text() for name in "ab"} <= found
    with pytest.raises(InputError, match="already exists; choose another OUT"):
        run(texts, out)


def test_held_out_files_columns_and_lines(texts, tmp_path):
    length = ("--context-length", 9)
    words = (texts / "c.jsonl", texts / "a.txt", tmp_path / "out", *length)
    run(*words, "--val", texts / "b.txt")
    meta = read_text_meta(tmp_path / "out")
    assert meta["splits"]["train"]["documents"] == 401
    assert meta["splits"]["val"]["bytes"] == (texts / "b.txt").stat().st_size
    lines = ("--documents", "line", "--limit-tokens", 900, "--val-share", 0.3)
    run(texts / "a.txt", tmp_path / "lines", *lines, *length)
    train = read_text_meta(tmp_path / "lines")["splits"]["train"]
    assert 900 <= train["tokens"] < 1000
    assert train["documents"] > 50


def test_digits_for_the_smallest_check_of_training(tmp_path):
    run("--reversal", 1000, tmp_path / "out", "--val-share", 0.05)
    meta = read_text_meta(tmp_path / "out")
    assert meta["context_length"] == 34  # a row is a line
    lines = {}
    for split in ("train", "val"):
        text = bytes(open_tokens(tmp_path / "out", split)[:-1].astype("uint8")).decode()
        lines[split] = text.splitlines()
        assert all(line[:16] == line[:16:-1] for line in lines[split])
    assert len(lines["val"]) == 50
    assert len(set(lines["train"] + lines["val"])) == 1000


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("{}", "out", "--val", "{}/b.txt"), r"b\.txt is both a source and in --val"),
        (("{}/c.jsonl", "out", "--column", "x"), "no column 'x'; choose one with --column: text, "),
        (("absent", "out"), "absent is no file, and no folder with files that end in"),
        (("{}", "out", "--val-share", 2), "--val-share must be at least 0 and below 1, but got 2"),
        (("x", "out", "--hub", "y"), "give SOURCE... OUT, or --hub NAME OUT"),
        (("out", "--reversal", 9, "--context-length", 33), "needs .* --context-length 34"),
        (("out", "--reversal", 9, "--tokenizer", "bpe:300"), "needs --tokenizer bytes"),
    ],
)
def test_what_cannot_be_prepared_is_refused(words, message, texts, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(InputError, match=message):
        run(*(str(word).format(texts) for word in words))
    assert not (tmp_path / "out").exists()
