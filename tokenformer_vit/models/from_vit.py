"""Convert a Vision Transformer to a TokenFormer that computes the same; derived in README.md.

With Θ ``gelu`` every layer of a Transformer is a Pattention layer. The weight and bias of a norm go
into the next layer, whose rows are then centred, as channels after the norm sum to 0. A norm bias
of 1 gives each key an offset: w + b/d scores w · x̂ + b. As gelu(a) - gelu(-a) = a, a linear layer
U Σ Vᵀ is pairs of keys ±v and values ±σu. All is computed in float64 and rounded once.
"""

import math
import re
from collections.abc import Iterable
from typing import Any

import timm
import torch
from timm import layers
from timm.models.deit import VisionTransformerDistilled
from timm.models.vision_transformer import Block, VisionTransformer
from torch import Tensor, nn
from tqdm import tqdm

from tokenformer_vit.errors import InputError
from tokenformer_vit.layers.arguments import COUNTS
from tokenformer_vit.ops.theta import theta_weights

from .vit import TokenFormerViT

Affine = tuple[Tensor, Tensor]  # weight (C_out, C_in) and bias (C_out,); (C,) and (C,) of a norm
# GELUs of a channel near 1 times these factors add up to a constant, if it is at most 1/2 from 1.
_FLAT, _RANGE = torch.linspace(-0.2, -6, 12, dtype=torch.float64), 1 / 2
# The modules that have a counterpart, with a pattern of their names.
_OUTER = VisionTransformer, VisionTransformerDistilled, layers.PatchEmbed, nn.Conv2d, nn.Sequential
_INNER = Block, layers.Attention, layers.Mlp, layers.LayerScale, nn.GELU, layers.GELU
_IDLE = nn.Identity, nn.Dropout, layers.PatchDropout, layers.DropPath  # when it is evaluated
_PARTS = {
    **dict.fromkeys((*_OUTER, *_INNER, layers.GELUTanh, *_IDLE), ".*"),
    nn.Linear: r"head|head_dist|blocks.*\.(qkv|proj|fc1|fc2)",
    nn.LayerNorm: r"norm|norm_pre|fc_norm|blocks.*\.(norm1|norm2|q_norm|k_norm)",
}
_SAME = ("num_classes", "embed_dim", "global_pool", "no_embed_class", "dynamic_img_size")


@torch.no_grad()
def from_vit(vit: VisionTransformer) -> TokenFormerViT:
    """Build a TokenFormer with the outputs of an ordinary ViT in evaluation mode.

    Args:
        vit: timm's ``VisionTransformer`` or ``VisionTransformerDistilled``, with plain blocks: an
            MLP with GELU (exact or tanh), LayerNorms of one eps, a linear head or none.

    Returns:
        A ``tokenformer_vit`` with Θ ``gelu`` or ``gelu_tanh``, in evaluation mode, on the device
        and in the dtype of ``vit``, with its preprocessing and class names. All that is outside the
        projections is copied, except dropout and stochastic depth.

    Raises:
        InputError: If a part of ``vit`` has no exact counterpart; the message names it.

    Note:
        The relative error of logits is near 1e-6 in float32. A block has 24d² weights in place of
        12d². Keep weight decay off the bias of the norms, on which all offsets rest.
    """
    if obstacle := _obstacle(vit):
        raise InputError(
            f"this model has no exact TokenFormer: {obstacle}; give timm's VisionTransformer with "
            "plain blocks"
        )
    blocks: Any = vit.blocks
    config: Any = getattr(vit, "pretrained_cfg", None) or {}
    overlay = timm.data.resolve_model_data_config(vit)  # type: ignore[attr-defined]
    overlay |= {key: config[key] for key in ("label_names", "license") if config.get(key)}
    name = "tokenformer_vit" + "_distilled" * isinstance(vit, VisionTransformerDistilled)
    with torch.device("meta"):
        model: Any = timm.create_model(name, pretrained_cfg_overlay=overlay, **_arguments(vit))
    stem: Any = vit.patch_embed.proj
    model = model.to(stem.weight.dtype).to_empty(device=stem.weight.device)
    copied = {n: t for n, t in vit.state_dict().items() if not n.startswith("blocks") or ".ls" in n}
    model.load_state_dict(copied, strict=False)
    for block, target in zip(tqdm(blocks, "converting", disable=None), model.blocks, strict=True):
        qkv = zip(*(part.chunk(3) for part in affine(block.attn.qkv)), strict=True)
        others = (block.attn.proj, block.norm2, block.mlp.fc1, block.mlp.fc2)
        write_block(target, affine(block.norm1), qkv, *map(affine, others))
    return model.eval()


def _obstacle(vit: Any) -> str:
    """Name the first part that has no counterpart; "" without any."""
    norms = [module for module in vit.modules() if isinstance(module, nn.LayerNorm)]
    for name, module in vit.named_modules():
        kind = nn.LayerNorm if module in norms else type(module)
        if kind not in _PARTS or not re.fullmatch(_PARTS[kind], name):
            return f"{name or 'it'} is a {type(module).__name__}"
        if module in norms and name.endswith(("q_norm", "k_norm")):
            weight, bias = affine(module)
            if (weight != 1).any() or bias.any():
                return f"{name} has parameters"
    blocks = {(b.attn.num_heads, _theta(b), type(b.ls1), type(b.ls2)) for b in vit.blocks}
    if len(blocks) != 1 or len({norm.eps for norm in norms}) != 1:
        return "it has no blocks, or they differ in heads, GELU, LayerScale or eps"
    return ""


def _theta(block: Any) -> str:
    act = block.mlp.act
    is_tanh = isinstance(act, layers.GELUTanh) or getattr(act, "approximate", "none") == "tanh"
    return "gelu_tanh" if is_tanh else "gelu"


def _arguments(vit: Any) -> dict[str, Any]:
    embed, block = vit.patch_embed, vit.blocks[0]
    counts = [num_pairs(vit.embed_dim, each.mlp.fc1.out_features) for each in vit.blocks]
    has = {name: not isinstance(each, nn.Identity) for name, each in vit.named_children()}
    return {
        **{name: getattr(vit, name) for name in (*_SAME, "pool_include_prefix")},
        **{name: getattr(embed, name) for name in ("img_size", "patch_size", "dynamic_img_pad")},
        **{name: [count[name] for count in counts] for name in counts[0]},
        **{"theta": _theta(block), "norm": "bias", "norm_eps": block.norm1.eps},
        **{"depth": len(counts), "num_heads": block.attn.num_heads},
        "in_chans": embed.proj.in_channels,
        "qk_norm": not isinstance(block.attn.q_norm, nn.Identity),
        "init_values": None if isinstance(block.ls1, nn.Identity) else 1.0,
        **{"class_token": vit.cls_token is not None, "reg_tokens": vit.num_reg_tokens},
        "pos_embed": "none" if vit.pos_embed is None else "learn",
        **{"pre_norm": has["norm_pre"], "fc_norm": has["fc_norm"]},
        "final_norm": has["norm"] or has["fc_norm"],
    }


def num_pairs(width: int, hidden: int) -> dict[str, int]:
    """Count the pairs of a block; multiples of 64, for which GPUs have fast products."""
    counts = 2 * width, 2 * width + len(_FLAT), hidden + 1
    return {n: -(-count // 64) * 64 for n, count in zip(COUNTS.values(), counts, strict=True)}


def affine(layer: Any) -> Affine:
    """Read weight and bias in float64; 1 and 0 where there is none."""
    weight = torch.ones(layer.normalized_shape) if layer.weight is None else layer.weight.double()
    return weight, weight.new_zeros(len(weight)) if layer.bias is None else layer.bias.double()


@torch.no_grad()
def write_block(
    target: Any, norm1: Affine, qkv: Iterable[Affine], proj: Affine, norm2: Affine, *mlp: Affine
) -> None:
    """Write the pairs of a Transformer's block into a TokenFormer's, whose norms have a bias."""
    theta, heads = target.mlp.theta, target.attn.num_heads
    query, key, value = (_after_norm(linear, norm1) for linear in qkv)
    flat, mix = (proj[0][:0], proj[0][:0]), proj[0]
    if proj[1].any():
        value, mix, flat = _with_constant(value, proj, heads, theta)
    (first, first_bias), (second, second_bias) = _after_norm(mlp[0], norm2), mlp[1]
    one = torch.ones_like(first[:1])
    second_bias = second_bias / theta_weights(one[:, :1], theta, target.mlp.tau, 0.0)  # (1, C_out)
    pairs = {
        "attn.query": _linear_pairs(_on_shifted(*query)),
        "attn.key": _linear_pairs(_on_shifted(*key)),
        "attn.value": _linear_pairs(_on_shifted(*value)),
        "attn.proj": map(torch.cat, zip(_linear_pairs(mix), flat, strict=True)),
        "mlp": (
            torch.cat((_on_shifted(first, first_bias), one / first.shape[1])),
            torch.cat((second.t(), second_bias)),
        ),
    }
    random = torch.Generator().manual_seed(0)
    for name, (keys, values) in pairs.items():
        layer = target.get_submodule(name)
        # The pairs that fill up have zero keys, and values with which they can learn.
        drawn = torch.randn(layer.value_param_tokens.shape, generator=random).to(values)
        drawn *= values.square().mean().sqrt()
        layer.value_param_tokens.copy_(torch.cat((values, drawn[len(values) :])))
        layer.key_param_tokens.zero_()[: len(keys)] = keys
        layer.tau.fill_(1.0)
    for norm in (target.norm1, target.norm2):
        nn.init.ones_(norm.bias)


def _with_constant(
    value: Affine, proj: Affine, heads: int, theta: str
) -> tuple[Affine, Tensor, tuple[Tensor, Tensor]]:
    """Return a value layer with a nearly constant channel, the matrix after it, and pairs for c."""
    # Attention weights add up to 1, so what is constant in the values is constant in the output.
    offset = proj[1] + proj[0] @ value[1]
    # The values of a head may be transformed if the output takes it back: to the singular vectors
    # of both matrices, of which the last one matters least.
    left, of_mix = torch.linalg.qr(proj[0].unflatten(1, (heads, -1)).transpose(0, 1))
    right, of_weight = torch.linalg.qr(value[0].unflatten(0, (heads, -1)).mT)
    u, sizes, v = torch.linalg.svd(of_mix @ of_weight.mT)
    mix = (left @ (u * sizes.sqrt()[:, None])).transpose(0, 1).flatten(1)
    weight = (right @ (v.mT * sizes.sqrt()[:, None])).mT.flatten(0, 1)
    reach = weight.norm(dim=1) * math.sqrt(weight.shape[1])  # |w · x̂| is at most this
    channel = int(sizes.argmin())
    height = max(reach[channel] / _RANGE, reach.mean()) or torch.ones_like(reach[0])
    bias = torch.zeros_like(reach)
    bias[channel] = height
    keys = mix.new_zeros(len(_FLAT), len(bias))
    keys[:, channel] = _FLAT.to(mix) / height
    return (weight, bias), mix, (keys, _flat_weights(theta).to(mix) * (offset - mix @ bias))


def _after_norm(linear: Affine, norm: Affine) -> Affine:
    """Take the parameters of a norm into the layer after it, and centre the rows of its weight."""
    weight = linear[0] * norm[0]
    return weight - weight.mean(dim=1, keepdim=True), linear[1] + linear[0] @ norm[1]


def _on_shifted(weight: Tensor, bias: Tensor) -> Tensor:
    """Return the matrix that computes on x̂ + 1 what ``weight`` and ``bias`` compute on x̂."""
    return weight + bias[:, None] / weight.shape[1]


def _linear_pairs(matrix: Tensor) -> tuple[Tensor, Tensor]:
    left, sizes, keys = torch.linalg.svd(matrix, full_matrices=False)
    values = (left * sizes).t()
    keys, values = (torch.stack((rows, -rows), dim=1).flatten(0, 1) for rows in (keys, values))
    return keys, values


def _flat_weights(theta: str) -> Tensor:
    """Fit (12, 1) weights with which the GELUs of a nearly constant channel add up to 1."""
    channel = torch.linspace(1 - _RANGE, 1 + _RANGE, 201, dtype=torch.float64)[:, None]
    one = torch.ones_like(channel)
    weights = theta_weights(channel * _FLAT, theta, one[0, 0], 0.0)  # (201, 12)
    return torch.linalg.lstsq(weights, one).solution
