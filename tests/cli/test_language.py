"""prepare-text, generate and evaluate-lm as a user starts them."""

import io
import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch

pytest.importorskip("transformers", reason="pip install '.[language]'")

from transformers import GPT2Config, GPT2LMHeadModel

from tokenformer_vit.cli import evaluate_lm, generate, prepare_text
from tokenformer_vit.errors import InputError
from tokenformer_vit.language import TokenFormerConfig, TokenFormerForCausalLM
from tokenformer_vit.language.data import open_tokens, read_text_meta
from tokenformer_vit.language.evaluation import measure_text
from tokenformer_vit.language.generation import save_language_model
from tokenformer_vit.language.tokenizers import byte_tokenizer, load_tokenizer

pytestmark = pytest.mark.usefixtures("arrow_cache")
TEXT = "Ein Text für das Modell,<|endoftext|> etwas länger als sein Kontext.\n" * 2


def run(command, *words):
    command.main([str(word) for word in words])


@pytest.fixture
def texts(tmp_path):
    """Two files of text and one of rows."""
    folder = tmp_path / "texts"
    folder.mkdir()
    for name in ("a", "b"):
        lines = (f"{name} says {number * number} é\n" for number in range(1200))
        (folder / f"{name}.txt").write_text("".join(lines))
    rows = (json.dumps({"text": f"row {number} " * 4, "id": number}) for number in range(400))
    (folder / "c.jsonl").write_text("\n".join(rows))
    return folder


@pytest.fixture
def model(tmp_path):
    """A folder with a model that writes the letter a, and its tokenizer."""
    sizes = {"vocab_size": 258, "context_length": 20, "embed_dim": 32, "depth": 1}
    model = TokenFormerForCausalLM(TokenFormerConfig(**sizes, num_heads=2, rotary_share=0.5))
    with torch.no_grad():
        model.model.norm.bias.copy_(model.lm_head.weight[ord("a")] * 1000)
    save_language_model(model, tmp_path / "model", byte_tokenizer())
    return tmp_path / "model"


def test_what_is_prepared_is_the_text(texts, tmp_path, capsys):
    out = tmp_path / "new" / "out"
    words = ("--tokenizer", "bpe:300", "--val-share", 0.1, "--context-length", 16)
    run(prepare_text, texts, out, *words)
    meta, reader = read_text_meta(out), load_tokenizer(out)
    assert (meta["tokenizer"], meta["vocab_size"], len(reader)) == ("bpe:300", 300, 300)
    tokens = f"train: {meta['splits']['train']['tokens']:,} tokens, "
    assert tokens in capsys.readouterr().out
    val = reader.decode(open_tokens(out, "val"))
    assert val.startswith("a says 1")  # the end of the first file
    with pytest.raises(InputError, match="already exists; choose another OUT"):
        run(prepare_text, texts, out)


def test_held_out_files_columns_and_lines(texts, tmp_path):
    length, sources = ("--context-length", 9), (texts / "c.jsonl", texts / "a.txt")
    run(prepare_text, *sources, tmp_path / "out", *length, "--val", texts / "b.txt")
    meta = read_text_meta(tmp_path / "out")
    assert meta["splits"]["train"]["documents"] == 401
    assert meta["splits"]["val"]["bytes"] == (texts / "b.txt").stat().st_size
    lines = ("--documents", "line", "--limit-tokens", 900, "--val-share", 0.3)
    run(prepare_text, texts / "a.txt", tmp_path / "lines", *lines, *length, "--workers", 2)
    train = read_text_meta(tmp_path / "lines")["splits"]["train"]
    assert 900 <= train["tokens"] < 1000
    assert train["documents"] > 50


def test_a_data_set_of_the_hub(texts, tmp_path):
    """A folder stands for its name: load_dataset reads both alike."""
    files = {"split": "test", "path": "c.jsonl"}
    card = {"configs": [{"config_name": "rows", "data_files": [files]}]}
    (texts / "README.md").write_text(f"---\n{json.dumps(card)}\n---\n")
    places = ("--hub-config", "rows", "--hub-revision", "main", "--split", "test[:7]")
    how = ("--column", "text", "--workers", 2, "--val-share", 0, "--context-length", 9)
    run(prepare_text, "--hub", texts, tmp_path / "out", *places, *how)
    found = load_tokenizer(tmp_path / "out").decode(open_tokens(tmp_path / "out", "train"))
    assert found == "".join(f"row {number} " * 4 + "<|endoftext|>" for number in range(7))


def test_digits_for_the_smallest_check_of_training(tmp_path):
    run(prepare_text, "--reversal", 1000, tmp_path / "out", "--val-share", 0.05)
    assert read_text_meta(tmp_path / "out")["context_length"] == 34  # a row is a line
    parts = [open_tokens(tmp_path / "out", split)[:-1] for split in ("train", "val")]
    train, val = (bytes(part.astype("uint8")).decode().splitlines() for part in parts)
    assert all(line[:16] == line[:16:-1] for line in train + val)
    assert (len(val), len(set(train + val))) == (50, 1000)


def test_prompts_are_continued(model, capsys, tmp_path, monkeypatch):
    def write(*words):
        run(generate, model, *words)
        return capsys.readouterr().out

    greedy = write("one", "two", "--greedy", "--max-new-tokens", 6)
    assert greedy == "oneaaaaaa\n\ntwoaaaaaa\n"
    assert write("one", "two", "--temperature", 0, "--max-new-tokens", 6) == greedy
    how = ("--temperature", 50, "--top-k", 20, "--top-p", 0.99, "--max-new-tokens", 9, "--seed")
    drawn = {write("one", *how, seed) for seed in (1, 2, 3)}
    assert len(drawn) > 1
    assert write("one", *how, 2) in drawn
    tokenizer = (model / "tokenizer.json").rename(tmp_path / "tokenizer.json")
    (model / "tokenizer_config.json").unlink()
    monkeypatch.setattr("sys.stdin", io.StringIO("one\n\ntwo\n"))
    assert write("--greedy", "--max-new-tokens", 6, "--tokenizer", tokenizer) == greedy
    # The context ends after 20 tokens.
    words = ("--greedy", "--tokenizer", tokenizer, "--device", "cpu")
    assert write("x" * 17, *words) == "x" * 17 + "aaa\n"


def test_a_text_and_its_tokens_are_measured(model, tmp_path, capsys):
    text, data = tmp_path / "text.txt", tmp_path / "data"
    text.write_text(TEXT)
    run(prepare_text, text, data, "--val-share", 0, "--context-length", 10)
    run(evaluate_lm, model, "--data", data, "--split", "train", "--text", text, "--stride", 8)
    found = json.loads((model / "evaluation.json").read_text())
    assert {"context": 20, "stride": 8, "amp": False}.items() <= found.items()
    assert {"command", "commit", "date", "hardware", "versions", "parameters"} <= found.keys()
    values, tokens = found["texts"][str(text)], np.array([*TEXT.encode(), 256])
    loaded = TokenFormerForCausalLM.from_pretrained(model).eval()
    predicted, nats = measure_text(loaded, tokens[:-1], 20, 8)
    assert (values["tokens"], values["bytes"], values["words"]) == (predicted, len(tokens) - 1, 20)
    assert values["loss"] == pytest.approx(nats / predicted)
    assert values["bits_per_byte"] == pytest.approx(nats / math.log(2) / len(TEXT.encode()))
    assert values["word_perplexity"] == pytest.approx(math.exp(nats / 20))
    assert f"{values['perplexity']:.5g}" in capsys.readouterr().out
    split = found["texts"][f"{data} train"]
    assert split["tokens"] == predicted + 1  # and the end of the text
    assert split["loss"] * split["tokens"] == pytest.approx(measure_text(loaded, tokens, 20, 8)[1])
    # Another model of transformers, and the other options.
    sizes = GPT2Config(vocab_size=258, n_positions=16, n_embd=32, n_layer=1, n_head=2)
    save_language_model(GPT2LMHeadModel(sizes).bfloat16(), tmp_path / "gpt")
    how = ("--amp", "--batch-size", 3, "--context", 12, "--device", "cpu", "--tokenizer", model)
    run(evaluate_lm, tmp_path / "gpt", "--text", text, *how, "--out", tmp_path / "found.json")
    found = json.loads((tmp_path / "found.json").read_text())
    assert (found["context"], found["texts"][str(text)]["tokens"]) == (12, predicted)


@pytest.mark.parametrize(
    ("command", "words", "message"),
    [
        (prepare_text, "texts out --val texts/b.txt", r"b\.txt is both a source and in --val"),
        (prepare_text, "d.csv out --limit-tokens 9", r"d\.csv.* \['text'\]; .*the right --column"),
        (prepare_text, "absent out", "absent is no file, and no folder with files that end in"),
        (prepare_text, "texts out --val short.csv", "val part has 4 tokens, too few for one row"),
        (prepare_text, "out --reversal 9 --context-length 33", "needs .* --context-length 34"),
        (prepare_text, "latin.txt out", r"latin\.txt.* can't decode byte 0xff .*; give UTF-8"),
        (generate, "absent one", r"there is no .*config\.json; give a folder"),
        (evaluate_lm, "model", "nothing to evaluate: give --text or --data"),
        (evaluate_lm, "model --text texts/a.txt latin.txt", r"latin\.txt .* 0xff .*; give UTF-8"),
        (evaluate_lm, "model --data x --context 21", "--context 21 <= 20, the model's .* smaller"),
    ],
)
def test_what_does_not_fit_is_refused(
    command, words, message, texts, model, tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    files = {"d.csv": b"id,body\n1,one\n", "short.csv": b"text\nabc", "latin.txt": b"abc\xff"}
    for name, content in files.items():
        Path(name).write_bytes(content)
    with pytest.raises(InputError, match=message):
        run(command, *words.split())
    assert not Path("out").exists()
    assert "perplexity" not in capsys.readouterr().out
