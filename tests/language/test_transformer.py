"""The Transformer in GPT-2's form: its parts, saving and loading."""

from typing import Any

import pytest
import torch

pytest.importorskip("transformers", reason="pip install tokenformer-vit[language]")

from transformers import AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel

from tokenformer_vit.errors import InputError
from tokenformer_vit.language import matched_transformer, transformer_lm
from tokenformer_vit.models import LMConfig, TokenFormerLM, lm_config

SHAPE = {"vocab_size": 61, "context_length": 40, "embed_dim": 32, "depth": 2, "num_heads": 2}


def count(model):
    return sum(parameter.numel() for parameter in model.parameters())


def test_the_smallest_gpt2_has_its_parameters():
    with torch.device("meta"):
        model = transformer_lm(50_257, 1024, 768, 12, 12)
        untied = transformer_lm(50_257, 1024, 768, 12, 12, tie_embeddings=False)
    assert count(model) == 124_439_808
    assert count(untied) == 124_439_808 + 50_257 * 768


def test_it_computes_what_gpt2_does():
    model = transformer_lm(**SHAPE, hidden_features=48).eval()
    sizes = {"n_positions": 40, "n_embd": 32, "n_layer": 2, "n_head": 2, "n_inner": 48}
    gpt2 = GPT2LMHeadModel(GPT2Config(vocab_size=61, **sizes)).eval()
    gpt2.load_state_dict(model.state_dict())
    tokens = torch.randint(61, (2, 9))
    torch.testing.assert_close(model(tokens).logits, gpt2(tokens).logits, rtol=0, atol=1e-6)


def test_training_drops_nothing():
    model, tokens = transformer_lm(**SHAPE).train(), torch.randint(61, (2, 9))
    assert torch.equal(model(tokens).logits, model(tokens).logits)
    assert model.config._attn_implementation == "sdpa"


def test_residual_parts_start_smaller():
    block = transformer_lm(**{**SHAPE, "embed_dim": 64, "depth": 8}).transformer.h[3]
    for layer in (block.attn.c_proj, block.mlp.c_proj):
        assert layer.weight.std().item() == pytest.approx(0.02 / 16**0.5, rel=0.05)
        assert layer.bias.abs().max() == 0
    assert block.mlp.c_fc.weight.std().item() == pytest.approx(0.02, rel=0.05)


@pytest.mark.parametrize("tie", [True, False])
def test_a_saved_model_is_the_same_model(tie, tmp_path):
    model = transformer_lm(**SHAPE, hidden_features=48, tie_embeddings=tie).eval()
    model.save_pretrained(tmp_path)
    both: Any = AutoModelForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    loaded, found = both
    assert not any(found.values()), found
    tokens = torch.randint(61, (2, 9))
    assert torch.equal(loaded(tokens).logits, model(tokens).logits)
    assert loaded.generate(tokens, max_new_tokens=4, do_sample=False).shape == (2, 13)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_heads": 3}, "embed_dim 32 must be a multiple of num_heads 3"),
        ({"depth": 0}, "depth must be at least 1, but got 0"),
        ({"hidden_features": 0}, "hidden_features must be at least 1, but got 0"),
    ],
)
def test_sizes_that_do_not_fit(change, message):
    with pytest.raises(InputError, match=message):
        transformer_lm(**{**SHAPE, **change})


PAIRS = {"num_qkv_param_tokens": 20, "num_proj_param_tokens": 28, "num_ffn_param_tokens": 50}


BY_BLOCK = {**PAIRS, "num_ffn_param_tokens": [40, 60]}


@pytest.mark.parametrize("changes", [{}, PAIRS, BY_BLOCK, {"tie_embeddings": False}])
def test_the_matched_transformer_has_as_many_weights_in_blocks(changes):
    config = LMConfig(**SHAPE, **changes, rotary_share=0.5)
    model, ours = matched_transformer(config), TokenFormerLM(config)

    def weights(blocks):
        return sum(p.numel() for p in blocks.parameters() if p.dim() > 1)

    assert weights(model.transformer.h) == weights(ours.blocks)
    same = ("context_length", "depth", "embed_dim", "num_heads", "vocab_size")
    theirs = ("n_positions", "n_layer", "n_embd", "n_head", "vocab_size")
    assert [getattr(model.config, name) for name in theirs] == [SHAPE[name] for name in same]
    assert model.config.tie_word_embeddings == config.tie_embeddings


def test_the_papers_smallest_is_matched_by_the_usual_transformer():
    with torch.device("meta"):
        assert matched_transformer(lm_config("grown_124m")).config.n_inner == 4 * 768


def test_attention_that_takes_more_than_all_pairs():
    with pytest.raises(InputError, match="Transformer of width 32 cannot match 50"):
        matched_transformer(
            LMConfig(
                **SHAPE,
                num_qkv_param_tokens=10,
                num_proj_param_tokens=10,
                num_ffn_param_tokens=10,
                rotary_share=0.5,
            )
        )
