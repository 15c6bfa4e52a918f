"""The Transformers in the forms of GPT-2 and GPT-NeoX: their parts, saving and loading."""

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel, GPTNeoXConfig, GPTNeoXForCausalLM

from tokenformer_vit.language import TokenFormerConfig, matched_transformer, transformer_lm
from tokenformer_vit.models import LMConfig, TokenFormerLM, lm_config
from tokenformer_vit.models.compilation import blocks_of

SHAPE = {"vocab_size": 61, "context_length": 40, "embed_dim": 32, "depth": 2, "num_heads": 2}

POSITIONS = pytest.mark.parametrize("positions", ["learned", "rotary"])


def build(positions, **changes):
    return transformer_lm(**{**SHAPE, **changes}, positions=positions)


def count(model):
    return sum(parameter.numel() for parameter in model.parameters())


def test_the_smallest_gpt2_has_its_parameters():
    with torch.device("meta"):
        model = transformer_lm(50_257, 1024, 768, 12, 12)
        # The smallest of the paper's growth series is matched by it.
        assert matched_transformer(lm_config("grown_124m")).config.n_inner == 4 * 768
    assert count(model) == 124_439_808


def test_it_computes_what_gpt2_does():
    model = transformer_lm(**SHAPE, hidden_features=48).eval()
    sizes = {"n_positions": 40, "n_embd": 32, "n_layer": 2, "n_head": 2, "n_inner": 48}
    gpt2 = GPT2LMHeadModel(GPT2Config(vocab_size=61, **sizes)).eval()
    gpt2.load_state_dict(model.state_dict())
    tokens = torch.randint(61, (2, 9))
    torch.testing.assert_close(model(tokens).logits, gpt2(tokens).logits, rtol=0, atol=1e-6)


def test_with_rotary_positions_it_computes_what_gpt_neox_does():
    rotation = {"rotary_share": 0.5, "rotary_base": 50.0}
    model = transformer_lm(**SHAPE, hidden_features=48, positions="rotary", **rotation).eval()
    sizes = {"max_position_embeddings": 40, "hidden_size": 32, "num_hidden_layers": 2}
    sizes |= {"num_attention_heads": 2, "intermediate_size": 48, "vocab_size": 61}
    how = {"rotary_pct": 0.5, "rotary_emb_base": 50, "use_parallel_residual": False}
    neox = GPTNeoXForCausalLM(GPTNeoXConfig(**sizes, **how, tie_word_embeddings=True)).eval()
    neox.load_state_dict(model.state_dict())
    tokens = torch.randint(61, (2, 9))
    torch.testing.assert_close(model(tokens).logits, neox(tokens).logits, rtol=0, atol=1e-6)
    block, x = model.gpt_neox.layers[0], torch.randn(1, 3, 32)
    turns = model.gpt_neox.rotary_emb(x, torch.arange(3)[None])
    after = x + block.attention(block.input_layernorm(x), None, position_embeddings=turns)[0]
    after = after + block.mlp(block.post_attention_layernorm(after))  # not of x: sequential
    torch.testing.assert_close(block(x, position_embeddings=turns), after)


@POSITIONS
def test_residual_parts_start_smaller(positions):
    block = blocks_of(build(positions, embed_dim=256, depth=8).base_model)[3]
    names, last = ("attn.c_proj", "mlp.c_proj", "mlp.c_fc"), 0.02 / 16**0.5
    if positions == "rotary":  # 2 / (8 · √256)
        names, last = ("attention.dense", "mlp.dense_4h_to_h", "mlp.dense_h_to_4h"), 1 / 64
    for name, std in zip(names, (last, last, 0.02), strict=True):
        layer = block.get_submodule(name)
        assert layer.weight.std().item() == pytest.approx(std, rel=0.05)
        assert layer.bias.abs().max() == 0


PAIRS = {"num_qkv_param_tokens": 20, "num_proj_param_tokens": 28, "num_ffn_param_tokens": 50}
BY_BLOCK = {**PAIRS, "num_ffn_param_tokens": [40, 60]}


@POSITIONS
@pytest.mark.parametrize("changes", [{}, PAIRS, BY_BLOCK, {"tie_embeddings": False}])
def test_the_matched_transformer_has_as_many_weights_in_blocks(changes, positions):
    config = LMConfig(**SHAPE, **changes, rotary_share=0.5, rotary_base=50.0)
    model, ours = matched_transformer(config, positions), TokenFormerLM(config)

    def weights(blocks):
        return sum(p.numel() for p in blocks.parameters() if p.dim() > 1)

    assert weights(blocks_of(model.base_model)) == weights(ours.blocks)
    for name, theirs in {**TokenFormerConfig.attribute_map, "vocab_size": "vocab_size"}.items():
        assert getattr(model.config, theirs) == getattr(config, name)
    if positions == "rotary":
        turns = [50.0 ** (-r / 8) for r in range(0, 8, 2)]  # 8 of the 16 dimensions of a head
        assert model.gpt_neox.rotary_emb.inv_freq.tolist() == pytest.approx(turns)
