"""The costs of a model equal PyTorch's counts, part by part."""

from typing import Any

import pytest
import timm
import torch
from timm.layers import SwiGLU
from timm.models.vision_transformer import ParallelScalingBlock
from timm.utils import reparameterize_model
from torch.utils.flop_counter import FlopCounterMode

from tokenformer_vit.benchmarking.costs import PARTS, model_costs, total, training_flops
from tokenformer_vit.errors import InputError
from tokenformer_vit.growth import extract, grow
from tokenformer_vit.layers import Pattention
from tokenformer_vit.models import from_vit

pytestmark = pytest.mark.usefixtures("plain_attention")
SMALL = {"depth": 2, "embed_dim": 24, "num_heads": 3, "img_size": 32, "patch_size": 8}
SHAPE = {"vocab_size": 61, "context_length": 17, "embed_dim": 24, "depth": 2, "num_heads": 3}
PAIRS = {"num_qkv_param_tokens": 20, "num_proj_param_tokens": 28, "num_ffn_param_tokens": 50}
VISION = {
    "tokenformer_tiny": PAIRS,
    "tokenformer_tiny ": {"global_pool": "avg", "init_values": 0.1, "reg_tokens": 3},
    "tokenformer_small_rope_reg4": {"pattention_args": {"learn_tau": True}},
    "tokenformer_cifar10_stem": {"class_token": False, "global_pool": ""},
    "vit_tiny_patch16_224": {"qk_norm": True, "mlp_layer": SwiGLU},
    "vit_tiny_patch16_224 ": {"num_classes": 0, "pos_embed": "none"},
    "vit_tiny_r_s16_p8_224": {"patch_size": 1},
    "deit_tiny_distilled_patch16_224": {},
}
# Names in TokenFormers, timm's ViT, GPT-2 and GPT-NeoX.
_QKV = ("query", "key", "value", "qkv", "c_attn")
MODULES = {
    "embedding": ("patch_embed",),
    "qkv": (*(f"attn.{name}" for name in _QKV), "attention.query_key_value"),
    "output": ("attn.proj", "attn.c_proj", "attention.dense"),
    "feed_forward": ("mlp",),
}


def vision(name, **kwargs):
    model: Any = timm.create_model(name, **{"num_classes": 7, **SMALL, **kwargs})
    for block in model.blocks:
        block.attn.fused_attn = False
    return model


def language(**changes):
    lm = pytest.importorskip("tokenformer_vit.language", exc_type=ImportError)
    config = lm.TokenFormerConfig(**{**SHAPE, "rotary_share": 0.5, **changes})
    return lm.TokenFormerForCausalLM(config)


def transformer(**options):
    lm = pytest.importorskip("tokenformer_vit.language", exc_type=ImportError)
    return lm.transformer_lm(**SHAPE, hidden_features=50, **options)


def count(model, num_tokens=None, backward=False):
    """Count the FLOPs of an image or a sequence with PyTorch, by module."""
    given = torch.randint(61, (1, num_tokens or 17))
    if hasattr(model, "patch_embed"):
        given = torch.randn(1, 3, *model.patch_embed.img_size, requires_grad=True)
    with FlopCounterMode(display=False) as counter:
        out = model(given)
        if backward:
            (out if torch.is_tensor(out) else out.logits).sum().backward()
    counted = {name: sum(each.values()) for name, each in counter.get_flop_counts().items()}
    # Some versions of transformers compute the angles of the rotation by a matrix product.
    angles = sum(flops for name, flops in counted.items() if name.endswith(".rotary_emb"))
    return {**counted, "Global": counted["Global"] - angles}


def check(model, num_tokens=None):
    """Compare the costs of a model with PyTorch's counts, and return them."""
    costs, counted = model_costs(model, num_tokens), count(model, num_tokens)

    def of(*modules):
        ends = tuple(f".{module}" for module in modules)
        return sum(flops for name, flops in counted.items() if name.endswith(ends))

    flops = {part: cost.forward_flops for part, cost in costs.items()}
    assert tuple(flops) == PARTS
    for part, modules in MODULES.items():
        assert flops[part] == of(*modules)
    assert flops["token_token"] == of("attn", "attention") - flops["qkv"] - flops["output"] > 0
    assert flops["other"] == 0
    assert sum(flops.values()) == counted["Global"]  # and so the head has the rest
    assert total(costs).parameters == sum(p.numel() for p in model.parameters())
    assert training_flops(model, num_tokens) == count(model, num_tokens, backward=True)["Global"]
    return costs


@pytest.mark.parametrize("name", VISION)
def test_an_image_model(name):
    check(vision(name.strip(), **VISION[name]))


@pytest.mark.parametrize(("tied", "num_tokens"), [(True, None), (False, 9)])
@pytest.mark.parametrize("positions", ["rotary", "learned"])
@pytest.mark.parametrize("make", [language, transformer])
def test_a_language_model(make, positions, tied, num_tokens):
    costs = check(make(positions=positions, tie_embeddings=tied), num_tokens)
    assert costs["head"].parameters == (0 if tied else 61 * 24)


@pytest.mark.parametrize("make", [lambda: vision("tokenformer_tiny", **PAIRS), language])
def test_growth_and_pairs_that_are_not_read(make):
    model = make()
    # Old pairs and new ones in parameters of their own.
    grow(model, num_ffn_param_tokens=120, num_qkv_param_tokens=90, split=True)
    attention = getattr(model, "model", model).blocks[0].attn
    attention.key = Pattention(24, 24, 9)
    whole = total(check(model))
    attention.query.active = torch.arange(0, 90, 3)
    costs = total(check(model))
    assert whole.forward_flops - costs.forward_flops == 2 * 17 * 60 * 2 * 24


def test_linear_tokens_cost_a_projection_or_less():
    vit = vision("vit_tiny_patch16_224")
    model, expected = from_vit(vit), model_costs(vit)
    for part, cost in model_costs(model).items():
        assert cost.forward_flops == expected[part].forward_flops
    assert check(reparameterize_model(model)) == expected
    less = total(expected).forward_flops - total(check(extract(model, None, 10, 8))).forward_flops
    assert less == 2 * 17 * 2 * (3 * (24**2 - 10 * 48) + 24**2 - 8 * 48)


def test_other_lengths_are_those_of_other_images():
    costs = model_costs(vision("tokenformer_tiny"), 50)
    others = model_costs(vision("tokenformer_tiny", img_size=56))
    for part, cost in costs.items():  # 7 × 7 patches and a class token
        assert cost.forward_flops == others[part].forward_flops


@pytest.mark.parametrize("kwargs", [{"global_pool": "map"}, {"block_fn": ParallelScalingBlock}])
def test_models_of_other_kinds(kwargs):
    with torch.device("meta"), pytest.raises(InputError, match="are unknown: give a"):
        training_flops(timm.create_model("vit_tiny_patch16_224", **kwargs))
