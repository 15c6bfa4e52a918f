"""The Transformers in the forms of GPT-2 and GPT-NeoX: their configurations, starts and sizes."""

import pytest
import torch

from tokenformer_vit.language import (
    TokenFormerConfig,
    TokenFormerModel,
    matched_transformer,
    transformer_lm,
)
from tokenformer_vit.models import lm_config
from tokenformer_vit.models.compilation import blocks_of

SHAPE = {"vocab_size": 61, "context_length": 40, "embed_dim": 32, "depth": 2, "num_heads": 2}
KEPT = {  # what both configurations must say, apart from the shape
    "learned": {"resid_pdrop": 0, "attn_pdrop": 0, "activation_function": "gelu_pytorch_tanh"},
    "rotary": {"use_parallel_residual": False, "intermediate_size": 128, "hidden_act": "gelu"},
}
POSITIONS = pytest.mark.parametrize("positions", KEPT)
PAIRS = {"num_qkv_param_tokens": 20, "num_proj_param_tokens": 28, "num_ffn_param_tokens": 50}
BY_BLOCK = {**PAIRS, "num_ffn_param_tokens": [40, 60]}


def test_the_smallest_gpt2_has_its_parameters():
    with torch.device("meta"):
        model = transformer_lm(50_257, 1024, 768, 12, 12)
        # The smallest of the paper's growth series is matched by it.
        assert matched_transformer(lm_config("grown_124m")).config.n_inner == 4 * 768
    assert model.num_parameters() == 124_439_808


@POSITIONS
def test_residual_parts_start_smaller_and_nothing_is_dropped(positions):
    model = transformer_lm(**SHAPE, positions=positions)
    assert model.config.to_dict().items() >= KEPT[positions].items()
    large = {**SHAPE, "embed_dim": 256, "depth": 8, "positions": positions}
    block = blocks_of(transformer_lm(**large).base_model)[3]
    names, last = ("attn.c_proj", "mlp.c_proj", "mlp.c_fc"), 0.02 / 16**0.5
    if positions == "rotary":  # 2 / (8 · √256)
        names, last = ("attention.dense", "mlp.dense_4h_to_h", "mlp.dense_h_to_4h"), 1 / 64
    for name, std in zip(names, (last, last, 0.02), strict=True):
        layer = block.get_submodule(name)
        assert layer.weight.std().item() == pytest.approx(std, rel=0.05)
        assert layer.bias.abs().max() == 0


@POSITIONS
@pytest.mark.parametrize("changes", [{}, PAIRS, BY_BLOCK, {"tie_embeddings": False}])
def test_the_matched_transformer_has_as_many_weights_in_blocks(changes, positions):
    config = TokenFormerConfig(**SHAPE, **changes, rotary_share=0.5, rotary_base=50.0)
    model, ours = matched_transformer(config, positions), TokenFormerModel(config)
    counts = [
        sum(p.numel() for p in blocks.parameters() if p.dim() > 1)
        for blocks in (blocks_of(model.base_model), ours.blocks)
    ]
    assert counts[0] == counts[1]
    for name, theirs in {**TokenFormerConfig.attribute_map, "vocab_size": "vocab_size"}.items():
        assert getattr(model.config, theirs) == getattr(config, name)
    if positions == "rotary":
        turns = [50.0 ** (-r / 8) for r in range(0, 8, 2)]  # 8 of the 16 dimensions of a head
        assert model.gpt_neox.rotary_emb.inv_freq.tolist() == pytest.approx(turns)
