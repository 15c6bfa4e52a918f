"""Convert a Vision Transformer to a TokenFormer that computes the same; derived in README.md.

With Θ ``gelu``, each layer of a Transformer is a Pattention layer. A norm's weight and bias go into
the next layer, whose rows may be centred; with a norm bias of 1, the key w + b/d scores w · x̂ + b.
As gelu(a) - gelu(-a) = a, a linear layer U Σ Vᵀ has keys ±v and values ±σu. All is in float64.
"""

import math
import re
from collections.abc import Iterable, Iterator
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

from .vit import ChannelsLast, ConvStem, TokenFormerViT

Affine = tuple[Tensor, Tensor]  # weight (C_out, C_in) and bias (C_out,); (C,) and (C,) of a norm
# GELUs of a channel near 1 times these factors add up to a constant, if it is at most 1/2 from 1.
_FLAT, _RANGE = torch.linspace(-0.2, -6, 12, dtype=torch.float64), 1 / 2
# The modules that have a counterpart, with a pattern of their names.
_OUTER = VisionTransformer, VisionTransformerDistilled, layers.PatchEmbed, nn.Conv2d, nn.Sequential
_INNER = Block, layers.Attention, layers.Mlp, layers.LayerScale, nn.GELU, layers.GELU
_NORM = r"norm|norm_pre|fc_norm|blocks.*\.(norm1|norm2|q_norm|k_norm)"
_PARTS = {
    **dict.fromkeys((*_OUTER, *_INNER, layers.GELUTanh, nn.Dropout), ".*"),
    **dict.fromkeys((ConvStem, ChannelsLast, nn.ReLU, nn.MaxPool2d), r"patch_embed.*"),
    **dict.fromkeys((layers.PatchDropout, layers.DropPath), ".*"),  # idle in evaluation
    nn.Identity: r".*(drop|norm|head|ls|path)\w*",
    nn.Linear: r"head|head_dist|blocks.*\.(qkv|proj|fc1|fc2)",
    **dict.fromkeys((nn.LayerNorm, layers.LayerNorm, layers.LayerNormFp32), _NORM),
}
_SAME = ("num_classes", "in_chans", "embed_dim", "global_pool", "no_embed_class")


@torch.no_grad()
def from_vit(vit: VisionTransformer) -> TokenFormerViT:
    """Build a TokenFormer with the outputs of an ordinary ViT in evaluation mode.

    Args:
        vit: ``VisionTransformer`` or ``VisionTransformerDistilled`` of timm, with plain blocks.

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
    for obstacle in _obstacles(vit):
        raise InputError(f"no exact TokenFormer: {obstacle}; give timm's plain VisionTransformer")
    blocks: Any = vit.blocks
    config: Any = getattr(vit, "pretrained_cfg", None) or {}
    overlay = {"num_classes": vit.num_classes}  # otherwise timm drops the names
    overlay |= timm.data.resolve_model_data_config(vit)  # type: ignore[attr-defined]
    overlay |= {key: config.get(key) for key in ("license", "fixed_input_size", "test_crop_pct")}
    if len(config.get("label_names") or ()) == vit.num_classes:
        overlay["label_names"] = config.get("label_names")
    name = "tokenformer_vit" + "_distilled" * isinstance(vit, VisionTransformerDistilled)
    with torch.random.fork_rng([]):
        torch.manual_seed(0)  # for the values of pairs that are left over
        model: Any = timm.create_model(name, pretrained_cfg_overlay=overlay, **_arguments(vit))
    model.to(blocks[0].mlp.fc1.weight)
    inner = {n: t for n, t in model.state_dict().items() if n.startswith("blocks")}
    outer = {n: t for n, t in vit.state_dict().items() if n[:6] != "blocks" or ".ls" in n}
    model.load_state_dict(inner | outer)
    for block, target in zip(tqdm(blocks, "converting", disable=None), model.blocks, strict=True):
        qkv = zip(*(part.chunk(3) for part in affine(block.attn.qkv)), strict=True)
        others = (block.attn.proj, block.norm2, block.mlp.fc1, block.mlp.fc2)
        write_block(target, affine(block.norm1), qkv, *map(affine, others))
    return model.eval()


def noise_images(vit: Any, number: int) -> Tensor:
    """Draw images of noise, always the same, of the size and on the device of a model's."""
    size = (number, vit.in_chans, *vit.patch_embed.img_size)
    images = torch.randn(size, generator=torch.Generator().manual_seed(0))
    return images.to(vit.patch_embed.proj.weight.device)


@torch.inference_mode()
def compare_outputs(model: Any, source: Any, batches: Iterable[Tensor], what: str) -> str:
    """Compare the outputs of two models; print what was found, and return it for a card."""
    errors, same = [], []
    for batch in batches:
        outputs = [getattr(out := each(batch), "logits", out).double() for each in (model, source)]
        same.append((outputs[0].argmax(dim=-1) == outputs[1].argmax(dim=-1)).flatten())
        if outputs[0].shape[-1] > 1:  # what is common to a row of logits changes nothing
            outputs = [each - each.mean(dim=-1, keepdim=True) for each in outputs]
        size = outputs[1].norm(dim=-1).clamp_min(torch.finfo(torch.float64).tiny)  # of a new head
        errors.append(((outputs[0] - outputs[1]).norm(dim=-1) / size).flatten())
    error, top1 = torch.cat(errors), torch.cat(same).double().mean()
    if not error.isfinite().all():
        raise InputError("the outputs are not finite: give weights of a training that converged")
    found = f"relative error {error.max():.1e} at most, {error.mean():.1e} on average, in float32, "
    found += f"and {top1:.2%} with the same top-1 class, of {len(error)} {what}"
    old, new = (sum(p.numel() for p in each.parameters()) for each in (source, model))
    print(f"Parameters: {old:,} -> {new:,}\nOutputs: {found}")
    return found


def _obstacles(vit: Any) -> Iterator[str]:
    for name, module in vit.named_modules():
        if not re.fullmatch(_PARTS.get(type(module), "-"), name):
            yield f"{name or 'it'} is a {type(module).__name__}"
        of_norm = module.named_parameters() if name.endswith(("q_norm", "k_norm")) else ()
        if any((t != float(n == "weight")).any() for n, t in of_norm):
            yield f"{name} has parameters"  # other than a weight of 1 and a bias of 0
    blocks = [(b, norm) for b in vit.blocks for norm in (b.attn.q_norm, b.attn.k_norm)]
    kinds = {repr((b.attn.num_heads, b.mlp.act, norm, b.ls1)) for b, norm in blocks}
    eps = {norm.eps for norm in vit.modules() if isinstance(norm, nn.LayerNorm)}
    if len(kinds) != 1 or len(eps) != 1:
        yield "it has no blocks, or they differ in GELU, heads, norms or LayerScale"


def _arguments(vit: Any) -> dict[str, Any]:
    embed, block = vit.patch_embed, vit.blocks[0]
    counts = [num_pairs(vit.embed_dim, each.mlp.fc1.out_features) for each in vit.blocks]
    has = {name: not isinstance(each, nn.Identity) for name, each in vit.named_children()}
    return {
        **{n: getattr(vit, n) for n in (*_SAME, "dynamic_img_size", "pool_include_prefix")},
        **{name: getattr(embed, name) for name in ("img_size", "patch_size", "dynamic_img_pad")},
        **{name: [count[name] for count in counts] for name in counts[0]},
        "stem": "conv" if isinstance(embed, ConvStem) else "patch",
        "theta": "gelu_tanh" if "tanh" in repr(block.mlp.act).lower() else "gelu",
        **{"norm": "bias", "norm_eps": block.norm1.eps, "num_heads": block.attn.num_heads},
        **{"depth": len(counts), "qk_norm": not isinstance(block.attn.q_norm, nn.Identity)},
        "init_values": None if isinstance(block.ls1, nn.Identity) else 1.0,
        **{"class_token": vit.cls_token is not None, "reg_tokens": vit.num_reg_tokens},
        **{"pos_embed": "none" if vit.pos_embed is None else "learn", "pre_norm": has["norm_pre"]},
        **{"fc_norm": has["fc_norm"], "final_norm": has["norm"] or has["fc_norm"]},
    }


def num_pairs(width: int, hidden: int) -> dict[str, int]:
    """Count the pairs of a block; multiples of 64, for which GPUs have fast products."""
    counts = 2 * width, 2 * width + len(_FLAT), hidden + 1
    return {n: -(-count // 64) * 64 for n, count in zip(COUNTS.values(), counts, strict=True)}


def affine(layer: Any) -> Affine:
    """Read weight and bias in float64; 1 and 0 where there is none."""
    weight = torch.ones(layer.normalized_shape) if layer.weight is None else layer.weight
    bias = weight.new_zeros(len(weight)) if layer.bias is None else layer.bias
    return weight.double(), bias.double()


@torch.no_grad()
def write_block(
    target: Any, norm1: Affine, qkv: Iterable[Affine], proj: Affine, norm2: Affine, *mlp: Affine
) -> None:
    """Write the pairs of a Transformer's block into a TokenFormer's, whose norms have a bias."""
    query, key, value = (_on_shifted(linear, norm1) for linear in qkv)
    mix, *constant = proj[0], proj[0][:0], proj[0][:0]
    if proj[1].any():
        value, mix, *constant = _with_constant(value, proj, target)
    hidden, (second, second_bias) = _on_shifted(mlp[0], norm2), mlp[1]
    one = torch.ones_like(hidden[:1])
    second_bias = second_bias / theta_weights(one[:, :1], target.mlp.theta, target.mlp.tau, 0.0)
    pairs = {
        "attn.query": _linear_pairs(query),
        "attn.key": _linear_pairs(key),
        "attn.value": _linear_pairs(value),
        "attn.proj": map(torch.cat, zip(_linear_pairs(mix), constant, strict=True)),
        "mlp": (torch.cat((hidden, one / len(one[0]))), torch.cat((second.t(), second_bias))),
    }
    for name, (keys, values) in pairs.items():
        layer = target.get_submodule(name)
        # Pairs that are left over have zero keys, and keep their values, with which they can learn.
        layer.key_param_tokens.zero_()[: len(keys)] = keys
        layer.value_param_tokens[: len(values)] = values
    for norm in (target.norm1, target.norm2):
        nn.init.ones_(norm.bias)


def _on_shifted(linear: Affine, norm: Affine) -> Tensor:
    """Return the matrix that computes on x̂ + 1 what a linear layer computes after a norm."""
    weight, bias = linear[0] * norm[0], linear[1] + linear[0] @ norm[1]
    return weight - weight.mean(dim=1, keepdim=True) + bias[:, None] / weight.shape[1]


def _with_constant(value: Tensor, proj: Affine, target: Any) -> tuple[Tensor, ...]:
    """Make a channel of the values nearly constant; return both matrices, and keys and values."""
    # Attention weights add up to 1, so what is constant in the values is constant in the output.
    bias = value.sum(dim=1)
    offset, value = proj[1] + proj[0] @ bias, value - bias[:, None] / value.shape[1]
    # The values of a head may be transformed if the output takes it back: to the singular vectors
    # of both matrices, of which the last one matters least.
    heads = target.attn.num_heads
    left, of_mix = torch.linalg.qr(proj[0].unflatten(1, (heads, -1)).transpose(0, 1))
    right, of_value = torch.linalg.qr(value.unflatten(0, (heads, -1)).mT)
    u, sizes, v = torch.linalg.svd(of_mix @ of_value.mT)
    mix = (left @ (u * sizes.sqrt()[:, None])).transpose(0, 1).flatten(1)
    value = (right @ (v.mT * sizes.sqrt()[:, None])).mT.flatten(0, 1)
    reach = value.norm(dim=1) * math.sqrt(value.shape[1])  # |w · x̂| is at most this
    channel = int(sizes.argmin())
    height = max(reach[channel] / _RANGE, reach.mean()) or torch.ones_like(reach[0])
    value[channel] += height / value.shape[1]
    keys = mix.new_zeros(len(_FLAT), len(mix))
    keys[:, channel] = _FLAT.to(mix) / height
    flat = _flat_weights(target.mlp.theta).to(mix)
    return value, mix, keys, flat * (offset - mix[:, channel] * height)


def _linear_pairs(matrix: Tensor) -> tuple[Tensor, Tensor]:
    left, sizes, keys = torch.linalg.svd(matrix, full_matrices=False)
    both = keys, (left * sizes).t()
    keys, values = (torch.stack((rows, -rows), dim=1).flatten(0, 1) for rows in both)
    return keys, values


def _flat_weights(theta: str) -> Tensor:
    """Fit (12, 1) weights with which the GELUs of a nearly constant channel add up to 1."""
    channel = torch.linspace(1 - _RANGE, 1 + _RANGE, 201, dtype=torch.float64)[:, None]
    weights = theta_weights(channel * _FLAT, theta, torch.ones(()), 0.0)  # (201, 12)
    return torch.linalg.lstsq(weights, torch.ones_like(channel)).solution
