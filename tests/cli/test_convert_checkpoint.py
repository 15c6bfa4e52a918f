"""`tokenformer-vit convert` as a user starts it."""

import pytest
import torch

pytest.importorskip("transformers", reason="pip install '.[language]'")

from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import AutoModelForCausalLM

from tokenformer_vit.cli import convert_checkpoint as command
from tokenformer_vit.errors import InputError
from tokenformer_vit.language import to_released
from tokenformer_vit.models import LMConfig, TokenFormerLM


def run(*arguments):
    command.main([str(argument) for argument in arguments])


@pytest.fixture
def source(tmp_path):
    config = LMConfig(vocab_size=61, embed_dim=16, depth=2, num_heads=2)
    path = tmp_path / "model.bin"
    torch.save(to_released(TokenFormerLM(config)), path)
    return path


def test_a_released_file_becomes_a_folder_and_the_same_file_again(source, tmp_path, capsys):
    folder, back = tmp_path / "deep" / "folder", tmp_path / "back.bin"
    run(source, folder, "--num-heads", 2, "--context-length", 64)
    assert "2 blocks, width 16, 2 heads, 16 / 64 pairs: 9,200 parameters of float32" in (
        capsys.readouterr().out
    )
    model = AutoModelForCausalLM.from_pretrained(folder)
    assert model.config.context_length == 64
    assert model.model.blocks[0].mlp.eps == 0
    assert model.generate(torch.ones(1, 3, dtype=torch.long), max_new_tokens=2).shape == (1, 5)

    run(folder, back, "--to-released")
    before, after = (torch.load(path, weights_only=True) for path in (source, back))
    torch.testing.assert_close(after, before, rtol=0, atol=0)
    assert [path.name for path in folder.parent.iterdir()] == ["folder"]
    with pytest.raises(InputError, match="already exists; choose another"):
        run(source, folder)


def test_a_head_that_was_untied_by_hand_is_not_dropped(source, tmp_path):
    run(source, tmp_path / "folder", "--num-heads", 2)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "folder")
    model.lm_head.weight = torch.nn.Parameter(2 * model.lm_head.weight)
    model.save_pretrained(tmp_path / "untied")
    with pytest.raises(InputError, match="the head has other weights than the embedding"):
        run(tmp_path / "untied", tmp_path / "back.bin", "--to-released")
    assert not (tmp_path / "back.bin").exists()


def test_a_converted_folder_says_where_texts_end(source, tmp_path):
    words = {"a": 0, "<|endoftext|>": 1}
    Tokenizer(WordLevel(words, "a")).save(str(tmp_path / "tokenizer.json"))
    run(source, tmp_path / "out", "--num-heads", 2, "--tokenizer", tmp_path / "tokenizer.json")
    generation = AutoModelForCausalLM.from_pretrained(tmp_path / "out").generation_config
    assert generation.eos_token_id == 1


def test_what_does_not_fit_leaves_nothing(source, tmp_path):
    with pytest.raises(InputError, match="give its number of heads"):
        run(source, tmp_path / "out")
    with pytest.raises(InputError, match=r"there is no .*config\.json"):
        run(tmp_path, tmp_path / "out", "--to-released")
    words = {str(number): number for number in range(70)}
    Tokenizer(WordLevel(words, "0")).save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(InputError, match="has 70 entries"):
        run(source, tmp_path / "out", "--num-heads", 2, "--tokenizer", tmp_path / "tokenizer.json")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model.bin", "tokenizer.json"]


@pytest.mark.parametrize(
    "ignored", [("--tokenizer", "x"), ("--num-heads", 2), ("--context-length", 2048), ("--eps", 0)]
)
def test_what_does_not_go_together(source, tmp_path, ignored):
    run(source, tmp_path / "folder", "--num-heads", 2)
    with pytest.raises(InputError, match="leave out --tokenizer, --num-heads, "):
        run(tmp_path / "folder", tmp_path / "back.bin", "--to-released", *ignored)
    assert not (tmp_path / "back.bin").exists()
