"""Convert a Vision Transformer to a TokenFormer that computes the same, and back; see README.md.

Norms and MLPs are copied; q, k, v and the output projection become linear tokens.
"""

import re
from collections.abc import Iterable, Iterator
from functools import partial
from typing import Any

import timm
import torch
from timm import layers
from timm.models.deit import VisionTransformerDistilled
from timm.models.vision_transformer import Block, VisionTransformer
from torch import Tensor, nn

from tokenformer_vit.errors import InputError
from tokenformer_vit.layers import BlockRMSNorm
from tokenformer_vit.layers.arguments import COUNTS

from .conversion import check_equal, noise_images, readable, unseen, write_blocks
from .sizes import find_layers
from .vit import ChannelsLast, ConvStem, TokenFormerViT

# The modules that have a counterpart, with a pattern of their names.
_ANY = VisionTransformer, VisionTransformerDistilled, layers.PatchEmbed, nn.Conv2d, nn.Sequential
_ANY += Block, layers.Attention, layers.Mlp, layers.LayerScale, nn.Dropout, layers.PatchDropout
_RMS = nn.RMSNorm, layers.RmsNorm
_NORMS = nn.LayerNorm, layers.LayerNorm, layers.LayerNormFp32, *_RMS
_PARTS = {
    **dict.fromkeys((*_ANY, layers.DropPath), ".*"),
    **dict.fromkeys((ConvStem, ChannelsLast, nn.ReLU, nn.MaxPool2d), r"patch_embed.*"),
    nn.Identity: r".*(drop|norm|head|ls|path)\w*",
    nn.Linear: r"head|head_dist|blocks.*\.(qkv|proj|fc1|fc2)",
    **dict.fromkeys(_NORMS, r"norm|norm_pre|fc_norm|blocks.*\.(norm1|norm2|q_norm|k_norm)"),
}
_ACTIVATION = r"blocks\.\d+\.mlp\.act"  # of any type: from_mlp looks at what it computes
_PROJECTION = re.compile(r"blocks\.\d+\.(attn\.(qkv|query|key|value|proj)|mlp)\.")
_SAME = ("num_classes", "in_chans", "embed_dim", "global_pool", "no_embed_class")
_SAME += ("dynamic_img_size", "pool_include_prefix")


@torch.no_grad()
def from_vit(vit: VisionTransformer, images: Tensor | Iterable[Tensor] = ()) -> TokenFormerViT:
    """Build a TokenFormer with the outputs of an ordinary ViT in evaluation mode.

    Args:
        vit: ``VisionTransformer`` or ``VisionTransformerDistilled`` of timm, with plain blocks.
        images: A few hundred images (N, C, H, W) without labels, as ``vit`` takes them, or batches.
            The first pairs of q, k, v, o are then the best map of their rank for them.

    Returns:
        A ``tokenformer_vit`` with Θ ``linear`` in q, k, v, o and ``gelu`` or ``gelu_tanh`` in the
        feed-forward part, in evaluation mode, on the device and in the dtype of ``vit``, with its
        preprocessing and class names; without dropout and stochastic depth. A block has 16d²
        weights, and after ``timm.utils.reparameterize_model`` the ViT's 12d².

    Raises:
        InputError: If a part of ``vit`` has no exact counterpart, or the outputs differ.
    """
    for obstacle in _obstacles(vit):
        raise InputError(f"no exact TokenFormer: {obstacle}; give timm's plain VisionTransformer")
    source: Any = readable(vit)
    blocks, norm1 = source.blocks, source.blocks[0].norm1
    norms = ("rms", "rms+weight") if isinstance(norm1, _RMS) else ("none", "weight+bias")
    model: Any = _build(
        "tokenformer_vit" + "_distilled" * isinstance(vit, VisionTransformerDistilled),
        source,
        norm=norms[norm1.weight is not None],
        norm_eps=norm1.eps or torch.finfo(torch.float32).eps,  # PyTorch's for None
        stem="conv" if isinstance(source.patch_embed, ConvStem) else "patch",
        **dict.fromkeys(COUNTS.values(), 1),  # these layers are replaced
    )
    parts = [(b.attn.qkv, b.attn.proj, b.mlp.fc1, b.mlp.fc2, b.mlp.act) for b in blocks]
    write_blocks(source, model.blocks, parts, images)
    check_equal(model.eval(), source, noise_images(source, 1))
    return model.to(next(vit.parameters()).dtype)


@torch.no_grad()
def to_vit(model: TokenFormerViT) -> VisionTransformer:
    """Build timm's plain ViT with the outputs of a TokenFormer at its present size.

    Args:
        model: TokenFormer with Θ ``linear`` in q, k, v, o and ``gelu`` or ``gelu_tanh`` in feed-
            forward layers, which use equally many pairs. It may be tuned, grown, cut or fused.

    Returns:
        A ``VisionTransformer`` or ``VisionTransformerDistilled`` in evaluation mode, on the device
        and in the dtype of ``model``, with its preprocessing and class names.

    Raises:
        InputError: If a layer has no counterpart in a plain ViT.
    """
    for obstacle in (*unseen(model), *["it has rotary positions"] * (model.rope is not None)):
        raise InputError(f"no plain ViT computes this: {obstacle}")
    source: Any = readable(model)
    blocks, like = source.blocks, source.blocks[0]
    for name, layer in find_layers(source).items():
        if layer.kind != "ffn":
            source.set_submodule(name, layer.as_linear())
    (theta, hidden), *others = {(b.mlp.theta, b.mlp.num_used) for b in blocks}
    if others or theta not in ("gelu", "gelu_tanh"):
        raise InputError(
            f"feed-forward layers have Θ {theta} or differ: give a converted ViT, cut equally"
        )
    width, eps = source.embed_dim, like.norm1.eps
    norm = layers.RmsNorm if isinstance(like.norm1, BlockRMSNorm) else layers.LayerNorm
    how: dict[str, Any] = {
        "qkv_bias": like.attn.query.bias is not None,
        "proj_bias": like.attn.proj.bias is not None or like.mlp.bias is not None,
        "act_layer": theta,
        "mlp_ratio": (hidden + 0.5 * (hidden % width > 0)) / width,  # timm rounds the width down
        "norm_layer": norm.__name__.lower() if eps == 1e-6 else partial(norm, eps=eps),
    }
    how |= {"embed_layer": ConvStem} if isinstance(source.patch_embed, ConvStem) else {}
    name = "vit_base_patch16_224"
    if isinstance(source, VisionTransformerDistilled):
        name = "deit_base_distilled_patch16_224"
    elif eps == 1e-5 and norm is layers.LayerNorm:  # as by default in a name that can be saved
        name = "vit_base_patch16_clip_224"
        del how["norm_layer"]
    vit: Any = _build(name, source, **how)
    for block, target in zip(blocks, vit.blocks, strict=True):
        attn, (keys, values, _, score_bias) = block.attn, block.mlp.used_tokens()
        rows = [(each.weight, each.bias) for each in (attn.query, attn.key, attn.value)]
        weight, qkv_bias = (None if t[0] is None else torch.cat(t) for t in zip(*rows, strict=True))
        tensors = {
            **{"attn.qkv.weight": weight, "attn.qkv.bias": qkv_bias},
            **{"attn.proj.weight": attn.proj.weight, "attn.proj.bias": attn.proj.bias},
            **{"mlp.fc1.weight": keys, "mlp.fc1.bias": score_bias},
            **{"mlp.fc2.weight": values.t(), "mlp.fc2.bias": block.mlp.bias},
        }
        target.load_state_dict({n: t for n, t in tensors.items() if t is not None}, strict=False)
    check_equal(vit.eval(), source, noise_images(source, 1))
    return vit.to(next(model.parameters()).dtype)


def _obstacles(vit: Any) -> Iterator[str]:
    for name, module in vit.named_modules():
        if not re.fullmatch(_PARTS.get(type(module), _ACTIVATION), name):
            yield f"{name or 'it'} is a {type(module).__name__}"
    yield from unseen(vit)
    attns = {(b.attn.num_heads, b.attn.proj.in_features == vit.embed_dim) for b in vit.blocks}
    facts = {repr((b.norm1, b.attn, b.ls1, b.mlp.act)) for b in vit.blocks}
    norms = {(m.eps, isinstance(m, _RMS)) for m in vit.modules() if isinstance(m, _NORMS)}
    if not (len(attns) == len(facts) == len(norms) == 1 and attns.pop()[1]):
        yield "it has no blocks, or they differ in GELU, heads, norms, biases or LayerScale"


def _build(name: str, source: Any, **arguments: Any) -> nn.Module:
    """Build a model with the preprocessing of another, and all that is outside of projections."""
    config: Any = getattr(source, "pretrained_cfg", None) or {}
    overlay = {"num_classes": source.num_classes}  # otherwise timm drops the names
    overlay |= timm.data.resolve_model_data_config(source)  # type: ignore[attr-defined]
    facts = ("license", "fixed_input_size", "test_crop_pct", "tag")
    overlay |= {"url": None, "hf_hub_id": None, **{key: config.get(key) for key in facts}}
    if len(config.get("label_names") or ()) == source.num_classes:
        overlay["label_names"] = config.get("label_names")
    embed, block = source.patch_embed, source.blocks[0]
    has = {name: not isinstance(each, nn.Identity) for name, each in source.named_children()}
    model: Any = timm.create_model(
        name,
        pretrained_cfg_overlay=overlay,
        **{n: getattr(source, n) for n in _SAME},
        **{n: getattr(embed, n) for n in ("img_size", "patch_size", "dynamic_img_pad")},
        depth=len(source.blocks),
        num_heads=block.attn.num_heads,
        qk_norm=not isinstance(block.attn.q_norm, nn.Identity),
        init_values=None if isinstance(block.ls1, nn.Identity) else 1.0,
        **{"class_token": source.cls_token is not None, "reg_tokens": source.num_reg_tokens},
        pos_embed="none" if source.pos_embed is None else "learn",
        **{"pre_norm": has["norm_pre"], "fc_norm": has["fc_norm"]},
        final_norm=has["norm"] or has["fc_norm"],
        **arguments,
    ).to(next(source.parameters()))
    outer = {n: t for n, t in source.state_dict().items() if not _PROJECTION.match(n)}
    model.load_state_dict({**model.state_dict(), **outer})
    return model
