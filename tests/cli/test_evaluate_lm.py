"""`tokenformer-vit evaluate-lm` as a user starts it."""

import json
import math

import numpy as np
import pytest
import torch

pytest.importorskip("transformers", reason="pip install '.[language]'")

from datasets import Dataset
from transformers import GPT2Config, GPT2LMHeadModel

from tokenformer_vit.cli import evaluate_lm
from tokenformer_vit.errors import InputError
from tokenformer_vit.growth import TokenMasks, count_pairs
from tokenformer_vit.language import (
    MASKS,
    TokenFormerConfig,
    TokenFormerForCausalLM,
    byte_tokenizer,
    save_language_model,
    train_tokenizer,
)
from tokenformer_vit.language.data import prepare_text
from tokenformer_vit.language.evaluation import measure_text

pytestmark = pytest.mark.usefixtures("arrow_cache")
TEXT = "Ein Text für das Modell, etwas länger als sein Kontext.\n" * 2


def run(*arguments):
    evaluate_lm.main([str(argument) for argument in arguments])


def build():
    config = TokenFormerConfig(
        vocab_size=258, context_length=32, embed_dim=32, depth=1, num_heads=2, rotary_share=0.5
    )
    return TokenFormerForCausalLM(config)


@pytest.fixture
def folder(tmp_path):
    save_language_model(build(), tmp_path / "run", byte_tokenizer())
    return tmp_path / "run"


@pytest.fixture
def text(tmp_path):
    path = tmp_path / "text.txt"
    path.write_text(TEXT)
    return path


def record(path):
    return json.loads(path.read_text())


def test_a_text_is_measured(folder, text, capsys):
    run(folder, "--text", text)
    found = record(folder / "evaluation.json")
    values, size = found["texts"][str(text)], len(TEXT.encode())
    assert (values["tokens"], values["bytes"], values["words"]) == (size - 1, size, 20)
    assert values["loss"] == pytest.approx(math.log(258), rel=0.1)
    assert values["perplexity"] == pytest.approx(math.exp(values["loss"]))
    printed = capsys.readouterr().out
    assert f"{values['perplexity']:.5g}" in printed
    assert printed.endswith(f"Done. In {folder / 'evaluation.json'}: a record\n")
    assert {"context": 32, "stride": 32, "amp": False}.items() <= found.items()
    assert {"command", "commit", "date", "hardware", "versions", "parameters"} <= found.keys()
    run(folder, "--text", text, "--stride", 4, "--amp", "--out", folder / "other.json")
    other = record(folder / "other.json")
    assert other["texts"][str(text)]["loss"] != values["loss"]


def test_prepared_tokens_give_what_the_text_gives(folder, text, tmp_path):
    texts = [Dataset.from_dict({"text": [TEXT]})]
    prepare_text(texts, tmp_path / "data", byte_tokenizer(), 10)  # another context than the model's
    run(folder, "--data", tmp_path / "data", "--split", "train", "--text", text, "--stride", 8)
    found = record(folder / "evaluation.json")["texts"]
    split, whole = found[f"{tmp_path / 'data'} train"], found[str(text)]
    assert split["tokens"] == whole["tokens"] + 1  # and the end of the text
    model = TokenFormerForCausalLM.from_pretrained(folder).eval()
    tokens = np.array([*TEXT.encode(), 256])
    nats = [measure_text(model, part, 32, 8)[1] for part in (tokens, tokens[:-1])]
    assert split["loss"] * split["tokens"] == pytest.approx(nats[0])
    assert whole["loss"] * whole["tokens"] == pytest.approx(nats[1])
    assert split["bits_per_byte"] == pytest.approx(nats[0] / math.log(2) / len(TEXT.encode()))
    prepare_text(texts, tmp_path / "other", train_tokenizer([TEXT], 270), 10)
    with pytest.raises(InputError, match=r"the tokenizers in .* differ: token 0 is"):
        run(folder, "--data", tmp_path / "other", "--split", "train")


def test_a_mask_is_chosen_by_its_name(folder, text):
    model = TokenFormerForCausalLM.from_pretrained(folder).eval()
    masks = TokenMasks(model)
    masks.add("half", {name: slice(count // 2) for name, count in count_pairs(model).items()})
    torch.save(masks.pairs, folder / MASKS)
    run(folder, "--text", text, "--mask", "half")
    masks.activate("half")
    predicted, nats = measure_text(model, np.array([*TEXT.encode()]), 32)
    loss = record(folder / "evaluation.json")["texts"][str(text)]["loss"]
    assert loss == pytest.approx(nats / predicted)
    with pytest.raises(InputError, match=r"there is no mask 'third'; choose from half"):
        run(folder, "--text", text, "--mask", "third")


def test_other_models_are_measured(text, tmp_path):
    sizes = GPT2Config(vocab_size=258, n_positions=16, n_embd=32, n_layer=1, n_head=2)
    model = GPT2LMHeadModel(sizes)
    save_language_model(model.bfloat16(), tmp_path / "gpt", byte_tokenizer())
    run(tmp_path / "gpt", "--text", text)
    found = record(tmp_path / "gpt" / "evaluation.json")
    assert (found["context"], found["parameters"]) == (16, model.num_parameters())


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ((), "nothing to evaluate: give --text or --data"),
        (("--text", "absent"), "there is no file absent; give existing files"),
        (("--data", "absent"), "there is no folder absent; make a folder"),
        (("--data", "absent", "--context", 33), "--context 33 <= 32, the model's .* smaller"),
        (("--data", "absent", "--stride", 33), "--stride 33 <= --context 32 .* smaller"),
    ],
)
def test_what_cannot_be_measured_is_refused(folder, words, message):
    with pytest.raises(InputError, match=message):
        run(folder, *words)
