"""A converted ViT has the outputs of the ViT, and is a TokenFormer in everything else."""

import copy
import re
from collections import Counter
from functools import partial
from typing import Any

import pytest
import timm
import torch
import torch.nn.functional as F
from timm.layers import LayerNorm, QuickGELU
from timm.models.deit import VisionTransformerDistilled
from timm.models.vision_transformer import ParallelScalingBlock, VisionTransformer
from torch import nn

from tokenformer_vit import growth
from tokenformer_vit.errors import InputError
from tokenformer_vit.models import from_vit
from tokenformer_vit.models.checkpoints import load_model, save_model
from tokenformer_vit.models.vit import ConvStem

SHAPE = {"img_size": 32, "patch_size": 8, "embed_dim": 48, "depth": 3, "num_heads": 3}
NO_TOKEN = {"global_pool": "avg", "class_token": False}
VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "layer scale and registers": {"init_values": 1e-5, "reg_tokens": 4},
    "no qkv bias, no class token": {"qkv_bias": False, **NO_TOKEN},
    "norm after the pool": {"fc_norm": True, "global_pool": "avg"},
    "no norm after the pool": {"fc_norm": False, "global_pool": "avg"},
    "pre-norm": {"pre_norm": True},
    "tanh": {"act_layer": "gelu_tanh"},
    "odd MLP": {"mlp_ratio": 2.7},
    "no output bias": {"proj_bias": False},
    "normed queries and keys": {"qk_norm": True},
    "distilled": {"distilled": True},
    "no head": {"num_classes": 0},
    "no pool, other eps": {"global_pool": "", "norm_layer": partial(LayerNorm, eps=1e-5)},
    "any image size": {"dynamic_img_size": True},
    "stem of convolutions": {"embed_layer": ConvStem},
}


def build(distilled=False, **kwargs) -> Any:
    """Build a ViT none of whose norms, biases and scales is at its start."""
    kind = VisionTransformerDistilled if distilled else VisionTransformer
    vit = kind(**{**SHAPE, "num_classes": 10, **kwargs}).eval()
    for name, parameter in vit.named_parameters():
        if parameter.ndim == 1 and not re.search("[qk]_norm", name):
            spread = 0.3 * torch.randn_like(parameter)
            parameter.data += 0.5 + 0.5 * spread if "gamma" in name else spread
    return vit


def images(batch=8, size=32):
    return torch.randn(batch, 3, size, size)


def error(outputs, exact):
    """Return the relative error, without what is common to a row of outputs."""
    exact = exact.double() - exact.double().mean(-1, keepdim=True)
    outputs = outputs.double() - outputs.double().mean(-1, keepdim=True)
    return ((outputs - exact).norm() / exact.norm()).item()


@torch.no_grad()
@pytest.mark.parametrize("name", VARIANTS)
def test_outputs_are_those_of_the_vit(name):
    for _ in range(3):
        vit = build(**VARIANTS[name])
        x = images(size=40 if name == "any image size" else 32)
        model = from_vit(vit)
        exact = copy.deepcopy(vit).double()(x.double())
        assert error(model(x), exact) <= 2e-5
        with torch.autocast("cpu", torch.bfloat16):
            assert error(model(x), exact) <= 2.5 * error(vit(x), exact)
        low = [model.bfloat16(), from_vit(copy.deepcopy(vit).bfloat16()), vit.bfloat16()]
        *ours, limit = (error(each(x.bfloat16()), exact) for each in low)
        assert max(ours) <= 2.5 * limit


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"act_layer": QuickGELU}, r"blocks\.0\.mlp\.act is a QuickGELU"),
        ({"embed_norm_layer": LayerNorm}, r"patch_embed\.norm is a LayerNorm"),
        ({"global_pool": "map"}, "attn_pool is a AttentionPoolLatent"),
        ({"block_fn": ParallelScalingBlock}, r"blocks\.0 is a ParallelScalingBlock"),
        ({"attn_layer": "diff"}, r"blocks\.0\.attn is a DiffAttention"),
        ({"norm_layer": type("OwnNorm", (nn.LayerNorm,), {})}, "is a OwnNorm"),
    ],
)
def test_a_part_without_a_counterpart_is_named(arguments, said):
    refused(VisionTransformer(**SHAPE, **arguments), said)


def refused(model, said):
    with pytest.raises(InputError, match=rf"no exact TokenFormer: [^\n]*{said}.*; give"):
        from_vit(model)


def test_unequal_blocks_learned_norms_of_heads_and_other_models_are_refused():
    vit, normed = build(), build(qk_norm=True)
    vit.blocks[1].mlp.act = nn.GELU("tanh")
    refused(vit, "differ in GELU, heads")
    nn.init.zeros_(normed.blocks[1].attn.k_norm.weight)
    refused(normed, "k_norm has parameters")
    refused(from_vit(build()), "it is a TokenFormerViT")


# Why timm's other names are refused, with their numbers.
REFUSED = {
    "attn_pool is a AttentionPool": 18,
    "patch_embed is a HybridEmbed": 14,
    "is a RmsNorm": 16,
    "is a QuickGELU": 7,
    "norm is a LayerNorm": 4,
    "mlp is a GluMlp": 3,
    "attn is a DiffAttention": 2,
    "blocks.0 is a ": 5,
}


@pytest.mark.slow
def test_names_of_timm():
    modules = ("vision_transformer", "vision_transformer_hybrid", "deit")
    found = Counter[str]()
    for name in (name for module in modules for name in timm.list_models(module=module)):
        width = {} if "mci" in name else {"embed_dim": 48, "num_heads": 3}
        vit: Any = timm.create_model(name, depth=2, num_classes=5, **width).eval()
        try:
            model = from_vit(vit)
        except InputError as refusal:
            found[next(reason for reason in REFUSED if reason in str(refusal))] += 1
            continue
        found["fits"] += 1
        if model.patch_embed.num_patches < 300:  # the others take long
            x = torch.randn(1, 3, *vit.patch_embed.img_size)
            with torch.no_grad():
                assert error(model(x), copy.deepcopy(vit).double()(x.double())) <= 2e-5, name
    assert found == {"fits": 124, **REFUSED}


@torch.no_grad()
@pytest.mark.parametrize("name", ["plain", "stem of convolutions"])
def test_a_saved_model_is_the_same(name, tmp_path):
    model, x = from_vit(build(**VARIANTS[name])), images()
    save_model(model, tmp_path / "out")
    again = timm.create_model(f"local-dir:{tmp_path / 'out'}", pretrained=True).eval()
    for each in (again, load_model(None, tmp_path / "out/model.safetensors")):
        assert torch.equal(each(x), model(x))


@torch.no_grad()
def test_sizes_are_ranks_of_the_projections():
    vit = build()
    model, x = from_vit(vit), torch.randn(64, 48)
    block = vit.blocks[1]
    weight, bias = (each.double()[:48] for each in (block.attn.qkv.weight, block.attn.qkv.bias))
    bias = bias + weight @ block.norm1.bias.double()
    weight = weight * block.norm1.weight.double()
    weight = weight - weight.mean(dim=1, keepdim=True) + bias[:, None] / 48
    left, sizes, right = torch.linalg.svd(weight)
    shifted = F.layer_norm(x, (48,), eps=1e-6) + 1
    for rank in (48, 24, 5):
        exact = shifted.double() @ (left[:, :rank] * sizes[:rank] @ right[:rank]).T
        cut = growth.extract(model, num_qkv_param_tokens=2 * rank)
        found = cut.blocks[1].attn.query(shifted)
        assert (found - exact).norm() <= 1e-5 * exact.norm()


@torch.no_grad()
def test_pruning_takes_pairs_that_only_fill_counts_up():
    model, x = from_vit(build()), images()
    before = model(x)
    growth.prune(model, growth.measure_usage(model, [x]), 96, 108, 193)
    assert error(model(x), before) <= 1e-5
