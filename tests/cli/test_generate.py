"""`tokenformer-vit generate` as a user starts it."""

import io
import sys

import pytest
import torch

pytest.importorskip("transformers", reason="pip install '.[language]'")

from tokenformer_vit.cli import generate
from tokenformer_vit.errors import InputError
from tokenformer_vit.language import (
    TokenFormerConfig,
    TokenFormerForCausalLM,
    byte_tokenizer,
    save_language_model,
)


@pytest.fixture
def write(capsys):
    """Run the command and return what it prints."""

    def run(*arguments):
        generate.main([str(argument) for argument in arguments])
        return capsys.readouterr().out

    return run


@pytest.fixture
def folder(tmp_path):
    config = TokenFormerConfig(
        vocab_size=258, context_length=20, embed_dim=32, depth=1, num_heads=2, rotary_share=0.5
    )
    model = TokenFormerForCausalLM(config)
    with torch.no_grad():  # writes letters only
        model.model.norm.bias.copy_(model.lm_head.weight[ord("a")] * 1000)
    save_language_model(model, tmp_path / "run", byte_tokenizer())
    return tmp_path / "run"


def test_prompts_are_continued(folder, write, tmp_path, monkeypatch):
    greedy = write(folder, "one", "two", "--greedy", "--max-new-tokens", 6)
    assert greedy == "oneaaaaaa\n\ntwoaaaaaa\n"
    how = ("--temperature", 50, "--top-k", 20, "--top-p", 0.99, "--max-new-tokens", 9, "--seed")
    drawn = {write(folder, "one", *how, seed) for seed in (1, 2, 3)}
    assert len(drawn) > 1
    assert write(folder, "one", *how, 2) in drawn
    tokenizer = (folder / "tokenizer.json").rename(tmp_path / "tokenizer.json")
    (folder / "tokenizer_config.json").unlink()
    monkeypatch.setattr(sys, "stdin", io.StringIO("one\n\ntwo\n"))
    assert write(folder, "--greedy", "--max-new-tokens", 6, "--tokenizer", tokenizer) == greedy
    # The context ends after 20 tokens.
    assert write(folder, "x" * 17, "--greedy", "--tokenizer", tokenizer) == "x" * 17 + "aaa\n"


def test_what_cannot_be_continued_is_refused(folder, write, tmp_path, monkeypatch):
    def refused(message, *words):
        with pytest.raises(InputError, match=message):
            write(*words)

    refused(r"there is no .*config\.json; give a folder", tmp_path, "one")
    refused("a prompt is empty", folder, "one", "")
    refused("prompt has 20 tokens.*shorten it", folder, "x" * 20)
    monkeypatch.setattr(sys, "stdin", io.StringIO("\n"))
    refused("one a line on stdin", folder)
