"""tools/generate.py as a user starts it."""

import importlib.util
import io
import json
import runpy
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("transformers", reason="pip install tokenformer-vit[language]")

from tokenizers import Tokenizer, models, pre_tokenizers

from tokenformer_vit.errors import InputError
from tokenformer_vit.growth import TokenMasks
from tokenformer_vit.language import (
    TokenFormerConfig,
    TokenFormerForCausalLM,
    generate_text,
    load_language_model,
    load_tokenizer,
    save_language_model,
    transformer_lm,
)

ROOT = Path(__file__).resolve().parents[2]
WORDS = ["<|endoftext|>", "?", *(f"w{number}" for number in range(31))]


def run(*arguments):
    spec = importlib.util.spec_from_file_location("generate", ROOT / "tools" / "generate.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.main([str(argument) for argument in arguments])


def words(count):
    tokenizer = Tokenizer(
        models.WordLevel({w: i for i, w in enumerate(WORDS[:count])}, unk_token="?")
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    return tokenizer


@pytest.fixture
def folder(tmp_path):
    torch.manual_seed(0)
    config = TokenFormerConfig(
        vocab_size=32, context_length=20, embed_dim=32, depth=1, num_heads=2, rotary_share=0.5
    )
    folder = tmp_path / "run"
    TokenFormerForCausalLM(config).save_pretrained(folder)
    words(32).save(str(tmp_path / "tokenizer.json"))
    load_tokenizer(tmp_path / "tokenizer.json").save_pretrained(folder)
    return folder


def test_prompts_are_continued(folder, tmp_path, capsys, monkeypatch):
    def written(*arguments):
        run(*arguments)
        return capsys.readouterr().out

    greedy = written(folder, "w1 w2", "w3", "--greedy", "--max-new-tokens", 6)
    first, second = greedy.strip().split("\n\n")
    assert first.startswith("w1 w2 w")
    assert second.startswith("w3 w")
    assert len(first.split()) <= 8
    assert greedy == written(folder, "w1 w2", "w3", "--greedy", "--max-new-tokens", 6)

    how = ("--temperature", 2, "--top-k", 20, "--top-p", 0.95, "--seed")
    drawn = {written(folder, "w1 w2", *how, seed) for seed in (1, 2, 3)}
    assert len(drawn) > 1
    assert written(folder, "w1 w2", *how, 2) in drawn

    (folder / "tokenizer.json").unlink()
    (folder / "tokenizer_config.json").unlink()
    monkeypatch.setattr(sys, "stdin", io.StringIO("w1 w2\n\nw3\n"))
    arguments = ("--greedy", "--max-new-tokens", 6, "--tokenizer", tmp_path / "tokenizer.json")
    assert written(folder, *arguments) == greedy


def test_it_stops_where_the_context_ends(folder, capsys):
    run(folder, "w1 " * 17, "--max-new-tokens", 50, "--seed", 4)
    assert 17 <= len(capsys.readouterr().out.split()) <= 20


def break_file(name, content):
    def change(folder):
        (folder / name).write_bytes(content)

    return change


def drop(*names):
    def change(folder):
        for name in names:
            (folder / name).unlink()

    return change


def truncate(folder):
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])


def other_shape(folder):
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "num_ffn_param_tokens": 100}))


def deeper(folder):
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "depth": 2}))


@pytest.mark.parametrize(
    ("change", "arguments", "message"),
    [
        (None, ("w1 " * 20,), "has 20 tokens, which leaves no room in the model's context of 20"),
        (None, ("",), "a prompt is empty"),
        (None, ("w1", "--temperature", 0), "temperature must be positive"),
        (None, ("w1", "--top-p", 1.5), "top_p must be above 0"),
        (None, ("w1", "--tokenizer", "nowhere"), "there is no tokenizer in nowhere"),
        (drop("tokenizer.json", "tokenizer_config.json"), ("w1",), "there is no tokenizer in"),
        (break_file("tokenizer.json", b"{}"), ("w1",), "holds no readable tokenizer"),
        (drop("model.safetensors"), ("w1",), "holds no readable model: .*model.safetensors"),
        (drop("config.json"), ("w1",), "there is no .*config.json"),
        (break_file("config.json", b'{"a"'), ("w1",), "is not a readable configuration"),
        (break_file("config.json", b'{"model_type": "bert"}'), ("w1",), "of type 'bert'"),
        (truncate, ("w1",), "holds no readable model"),
        (other_shape, ("w1",), "holds no readable model"),
        (
            deeper,
            ("w1",),
            "do not fit its config.json: .* is not there.* and 12 more",
        ),
    ],
)
def test_what_cannot_be_is_said_in_one_line(folder, monkeypatch, change, arguments, message):
    monkeypatch.chdir(folder.parent)
    if change:
        change(folder)
    with pytest.raises(InputError, match=message) as caught:
        run(folder, *arguments)
    assert "\n" not in str(caught.value)


def test_a_mask_is_chosen_by_its_name(folder, capsys):
    model = load_language_model(folder)
    masks = TokenMasks(model)
    masks.add("half", lambda _, layer: slice(layer.num_param_tokens // 2))
    masks.save(folder / "masks.safetensors")
    run(folder, "w1 w2", "--greedy", "--max-new-tokens", 6)
    assert "all its pairs are read; --mask chooses" in capsys.readouterr().err
    run(folder, "w1 w2", "--greedy", "--max-new-tokens", 6, "--mask", "half")
    printed = capsys.readouterr()
    assert not printed.err
    masks.activate("half")
    words = generate_text(model, load_tokenizer(folder), "w1 w2", 6, greedy=True)
    assert printed.out.split() == ["w1", "w2", *words.split()]
    (folder / "masks.safetensors").unlink()
    with pytest.raises(InputError, match=r"there is no file .*masks\.safetensors"):
        run(folder, "w1", "--mask", "half")


def test_the_plain_transformer_continues_prompts_too(folder, capsys):
    model = transformer_lm(32, 20, 16, 1, 2)
    save_language_model(model, folder)
    run(folder, "w1 w2", "--greedy", "--max-new-tokens", 3)
    assert capsys.readouterr().out.startswith("w1 w2 ")


def test_a_tokenizer_of_another_model_is_refused(folder, tmp_path):
    words(33).save(str(tmp_path / "other.json"))
    with pytest.raises(InputError, match=r"has 33 entries, and the model's embedding has 32"):
        run(folder, "w1", "--tokenizer", tmp_path / "other.json")


def test_the_command_ends_in_one_line(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["generate.py", str(tmp_path), "Hello"])
    with pytest.raises(SystemExit, match="1"):
        runpy.run_path(str(ROOT / "tools" / "generate.py"), run_name="__main__")
    assert capsys.readouterr().err == (
        f"error: there is no {tmp_path}/config.json; give a folder that save_pretrained wrote\n"
    )
