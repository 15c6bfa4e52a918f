"""From text to tokens: nothing is lost, held-out text stays apart, tokenizers encode any text."""

import gzip
import json
import random

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard
from datasets import Dataset
from transformers import AutoTokenizer, DataCollatorForLanguageModeling

from tokenformer_vit.errors import InputError
from tokenformer_vit.language import byte_tokenizer, data, load_tokenizer
from tokenformer_vit.language.tokenizers import encode, train_tokenizer

pytestmark = pytest.mark.usefixtures("arrow_cache")
WORDS = ("the", "model", "é", "writes\n", "<|endoftext|>", "8307", "\t", "文字", "🙂")


@pytest.fixture
def documents(seed):
    draw = random.Random(seed)
    return [f"{number} {' '.join(draw.choices(WORDS, k=30))}" for number in range(200)]


def prepare(texts, folder, tokenizer=None, **how):
    texts = [Dataset.from_dict({"text": texts})] if isinstance(texts[0], str) else texts
    return data.prepare_text(texts, folder, tokenizer or byte_tokenizer(), 8, **how)


def read(folder, split):
    """Return the documents of a split, as texts."""
    tokens, tokenizer = data.open_tokens(folder, split), load_tokenizer(folder)
    ends = np.flatnonzero(tokens == data.read_text_meta(folder)["end"])
    assert ends[-1] == len(tokens) - 1
    return [tokenizer.decode(part[:-1]) for part in np.split(tokens, ends + 1)[:-1]]


@pytest.mark.parametrize("size", [258, 400])
def test_all_text_becomes_tokens_once(documents, tmp_path, size):
    tokenizer = byte_tokenizer() if size == 258 else train_tokenizer(documents, size)
    meta = prepare([*documents, "", documents[0]], tmp_path / "out", tokenizer, val_share=0.2)
    assert meta == data.read_text_meta(tmp_path / "out")
    assert meta["vocab_size"] == len(tokenizer) == size
    train, val = (read(tmp_path / "out", split) for split in ("train", "val"))
    assert sorted(train + val) == sorted([*documents, documents[0]])
    assert not set(train) & set(val)  # equal documents stay on one side
    assert 10 < len(val) < 80
    for split, found in (("train", train), ("val", val)):
        tokens = data.open_tokens(tmp_path / "out", split)
        count = sum(len(text.encode()) for text in found)
        assert tokens.dtype == np.uint16
        assert size > 258 or len(tokens) == count + len(found)
        counts = {"tokens": len(tokens), "documents": len(found), "bytes": count}
        assert meta["splits"][split] == counts


@pytest.mark.parametrize("end", ["\n", " "])
def test_the_end_of_a_long_document_is_held_out(end):
    text = end.join(str(number) for number in range(10_000)) + "\n"
    (val, held), (train, kept) = data.divide(text, 0.1)
    assert (held, kept) == (True, False)
    assert train + val == text
    assert train.endswith(end)
    assert 0 < 0.1 - len(val) / len(text) < 0.001
    assert data.divide("short", 0.0) == [("short", False)]


@pytest.mark.parametrize("streaming", [False, True])
def test_files_of_all_kinds_are_read(tmp_path, streaming):
    folder, rows = tmp_path / "texts", [{"id": 1, "body": "one"}, {"id": 2, "body": "two"}]
    lines = "\n".join(map(json.dumps, rows)).encode()
    folder.mkdir()
    (folder / "a.txt").write_bytes("\ufeffé\nnext".encode())
    (folder / "b.jsonl").write_bytes(lines)
    (folder / "c.jsonl.zst").write_bytes(zstandard.compress(lines))
    (folder / "d.json.gz").write_bytes(gzip.compress(json.dumps(rows).encode()))
    pq.write_table(pa.table({"body": ["three", None], "id": [1, 2]}), folder / "e.parquet")
    (folder / "f.csv").write_text("id,body\n1,NA\n2,null\n3,007\n4,\n")
    (folder / "notes").write_text("of no known kind")
    files = data.find_files([folder])
    assert [file.name[0] for file in files] == list("abcdef")
    texts = data.load_files(files, "body", streaming=streaming)
    prepare(texts, tmp_path / "out")
    found = ["é\nnext", *["one", "two"] * 3, "three", "NA", "null", "007"]
    assert read(tmp_path / "out", "train") == found


@pytest.mark.parametrize("column", [[1, 2], [["a"], ["b"]], [None, 0.5]])
@pytest.mark.parametrize("workers", [1, 2])
def test_a_column_that_is_no_text_is_refused(column, workers, tmp_path):
    texts = [Dataset.from_dict({"text": column})]
    with pytest.raises(InputError, match="in a row is no text: choose a column of texts"):
        prepare(texts, tmp_path / "out", workers=workers)


@pytest.mark.parametrize("cut", [0, 1, -1])
def test_a_damaged_folder_is_told(documents, tmp_path, cut):
    prepare(documents, tmp_path / "out")
    with pytest.raises(InputError, match="has no split 'dev'; it has: train"):
        data.open_tokens(tmp_path / "out", "dev")
    for name, fault in (("train.bin", "prepare it again"), ("meta.json", "no whole meta.json")):
        file = tmp_path / "out" / name
        file.write_bytes(file.read_bytes()[:cut])
        with pytest.raises(InputError, match=fault):
            data.open_tokens(tmp_path / "out", "train")


def test_tokenizers_encode_any_text_and_end_it(documents, tmp_path):
    text = "".join(map(chr, range(256))) + "".join(documents)
    for tokenizer in (byte_tokenizer(), train_tokenizer(documents, 300)):
        tokenizer.save_pretrained(tmp_path)
        for each in (tokenizer, load_tokenizer(tmp_path), AutoTokenizer.from_pretrained(tmp_path)):
            assert each.decode(encode(each, [text])[0]) == text
    assert byte_tokenizer()("é")["input_ids"] == list("é".encode())
    assert (byte_tokenizer().eos_token_id, byte_tokenizer().pad_token_id) == (256, 257)
    # The end of a text is a target, and padding is none.
    rows = [byte_tokenizer()(text + "<|endoftext|>") for text in ("ab", "abcd")]
    labels = DataCollatorForLanguageModeling(byte_tokenizer(), mlm=False)(rows)["labels"]
    assert labels[0].tolist() == [97, 98, 256, -100, -100]


def test_tokenizers_that_do_not_fit_are_refused(documents, tmp_path):
    train_tokenizer(documents, 300).save_pretrained(tmp_path / "one")
    with pytest.raises(InputError, match=r"has 300 entries.* vocab_size is 299: give"):
        load_tokenizer(tmp_path / "one", 299)
    with pytest.raises(InputError, match=r"no readable tokenizer in .*absent"):
        load_tokenizer(tmp_path / "absent")


def test_the_published_tokenizers_serve(shared_data):
    sentence = "Parameter tokens, não só input tokens:\n  grow!"
    for path, size in (("gpt_neox_20b/tokenizer.json", 50_277), ("gpt2", 50_257)):
        tokenizer = load_tokenizer(shared_data(f"tokenizers/{path}"), size)
        [numbers] = encode(tokenizer, [sentence])
        assert 5 < len(numbers) < 25
        assert tokenizer.decode(numbers) == sentence
        pad = None if path == "gpt2" else "<|padding|>"
        assert (tokenizer.eos_token, tokenizer.pad_token) == ("<|endoftext|>", pad)
