"""The closed-form costs of image models equal PyTorch's counts, part by part."""

from typing import Any

import pytest
import timm
import torch
from timm.layers import SwiGLU
from timm.models.vision_transformer import ParallelScalingBlock

import tokenformer_vit  # noqa: F401
from tokenformer_vit.benchmarking.costs import PARTS, model_costs, total, training_flops
from tokenformer_vit.benchmarking.measures import counted_flops
from tokenformer_vit.errors import InputError
from tokenformer_vit.layers import Pattention
from tokenformer_vit.layers.split import split_tokens

pytestmark = pytest.mark.usefixtures("plain_attention")
SMALL = {"depth": 2, "embed_dim": 24, "num_heads": 3, "img_size": 32, "patch_size": 8}
PAIRS = {"num_qkv_param_tokens": 20, "num_proj_param_tokens": 28, "num_ffn_param_tokens": 50}
# Every shape of model that timm's options lead to: norms, scales, registers, pooling, feed-forward.
MODELS = {
    "tokenformer": ("tokenformer_tiny", {**PAIRS}),
    "learnt": ("tokenformer_tiny", {"norm": "bias", "pattention_args": {"learn_tau": True}}),
    "pooled": ("tokenformer_tiny", {"global_pool": "avg", "init_values": 0.1, "reg_tokens": 3}),
    "vit5": ("tokenformer_small_rope_reg4", {}),
    "no head": ("tokenformer_tiny", {"num_classes": 0}),
    "no class token": ("tokenformer_tiny", {"class_token": False, "global_pool": ""}),
    "vit": ("vit_tiny_patch16_224", {"qk_norm": True, "mlp_ratio": 3.0}),
    "vit, no head": ("vit_tiny_patch16_224", {"num_classes": 0, "pos_embed": "none"}),
    "two class tokens": ("deit_tiny_distilled_patch16_224", {}),
    "gated feed-forward": ("vit_tiny_patch16_224", {"mlp_layer": SwiGLU}),
}


def build(name, fused=False, **kwargs):
    model: Any = timm.create_model(name, **{"num_classes": 7, **SMALL, **kwargs})
    if name.startswith("tokenformer"):
        model.set_backend("reference")
    for block in model.blocks:
        block.attn.fused_attn = fused
    return model


def count(model, backward=False):
    """Count the FLOPs of an image with PyTorch, by module."""
    image = torch.randn(1, 3, *model.patch_embed.img_size)

    def run():
        out = model(image)
        for output in out if isinstance(out, tuple) else [out]:
            if backward:
                output.sum().backward(retain_graph=True)

    return counted_flops(run)


@pytest.mark.parametrize("fused", [False, True], ids=["products", "sdpa"])
@pytest.mark.parametrize("case", MODELS)
def test_forward_flops_of_every_part_are_what_pytorch_counts(case, fused):
    name, kwargs = MODELS[case]
    model = build(name, fused, **kwargs)
    costs, counted = model_costs(model), count(model)
    assert list(costs) == list(PARTS)
    assert total(costs).forward_flops == counted["Global"]
    assert total(costs).parameters == sum(p.numel() for p in model.parameters())
    own = sum(p.numel() for p in model.parameters(recurse=False))
    patches = sum(p.numel() for p in model.patch_embed.parameters())
    assert costs["embedding"].parameters == own + patches

    def of(*modules):
        """Sum the counts of modules, by the end of their names."""
        ends = tuple(f".{module}" for module in modules)
        return sum(flops for name, flops in counted.items() if name.endswith(ends))

    assert costs["head"].forward_flops == of("head", "head_dist")
    assert costs["embedding"].forward_flops == of("patch_embed")
    projections = ("query", "key", "value") if name.startswith("tokenformer") else ("qkv",)
    assert costs["qkv"].forward_flops == of(*(f"attn.{name}" for name in projections))
    assert costs["output"].forward_flops == of("attn.proj")
    assert costs["feed_forward"].forward_flops == of("mlp")
    rest = of("attn") - costs["qkv"].forward_flops - costs["output"].forward_flops
    assert costs["token_token"].forward_flops == rest


@pytest.mark.parametrize("case", [case for case in MODELS if case != "two class tokens"])
def test_training_flops_are_what_pytorch_counts(case):
    name, kwargs = MODELS[case]
    model = build(name, **kwargs)
    # An image needs no gradient: of the patch embedding's three passes one is not made.
    missing = model_costs(model)["embedding"].forward_flops
    assert training_flops(model) - count(model, backward=True)["Global"] == missing


@pytest.mark.parametrize(
    ("name", "parameters", "gmacs"),
    [
        ("vit_base_patch16_224", 86_567_656, 17.56),
        ("tokenformer_base_matched", 86_447_848, 17.56),
        ("tokenformer_large", 404_670_440, 81.39),
    ],
)
def test_published_sizes(name, parameters, gmacs):
    with torch.device("meta"):
        cost = total(model_costs(timm.create_model(name)))
    assert cost.parameters == parameters
    assert round(cost.forward_flops / 2e9, 2) == gmacs
    assert cost.training_flops == 3 * cost.forward_flops


def test_blocks_that_grew_apart():
    model = build("tokenformer_tiny")
    model.blocks[1].mlp = Pattention(24, 24, 75, backend="reference")
    model.blocks[0].attn.key = Pattention(24, 24, 9, backend="reference")
    split_tokens(model.blocks[1].mlp, 60)  # old pairs and new ones in parameters of their own
    costs = model_costs(model)
    assert total(costs).forward_flops == count(model)["Global"]


def test_pairs_that_are_not_read():
    model = build("tokenformer_tiny", **PAIRS)
    whole = total(model_costs(model))
    model.blocks[0].attn.query.active = torch.arange(0, 20, 3)
    model.blocks[1].mlp.active = torch.arange(30)
    assert total(model_costs(model)).forward_flops == count(model)["Global"] < whole.forward_flops
    assert total(model_costs(model)).parameters == whole.parameters


@pytest.mark.parametrize("name", ["tokenformer_tiny", "vit_tiny_patch16_224"])
def test_other_lengths_are_those_of_other_images(name):
    costs, others = model_costs(build(name), 50), model_costs(build(name, img_size=56))
    for part, cost in costs.items():  # 7 × 7 patches and a class token
        assert cost.forward_flops == others[part].forward_flops
    assert total(costs).parameters == total(model_costs(build(name))).parameters


def test_too_few_tokens():
    with pytest.raises(InputError, match=r"num_tokens is 1: no token is left"):
        model_costs(build("tokenformer_tiny"), 1)


@pytest.mark.parametrize(
    ("name", "kwargs", "said"),
    [
        ("resnet18", {}, "ResNet are unknown: give a TokenFormer"),
        ("vit_tiny_patch16_224", {"global_pool": "map"}, "AttentionPoolLatent"),
        ("vit_tiny_patch16_224", {"attn_layer": "diff"}, "DiffAttention"),
        ("vit_tiny_r_s16_p8_224", {}, "HybridEmbed"),
        ("vit_medium_patch16_rope_reg1_gap_256", {}, "Eva"),
        ("vit_tiny_patch16_224", {"block_fn": ParallelScalingBlock}, "ParallelScalingBlock"),
    ],
)
def test_models_of_other_kinds(name, kwargs, said):
    with torch.device("meta"):
        model = timm.create_model(name, **kwargs)
    with pytest.raises(InputError, match=said):
        training_flops(model)
