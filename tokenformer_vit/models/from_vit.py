"""Convert a Vision Transformer to a TokenFormer that computes the same, and back; see README.md.

What is outside of linear layers is copied. An MLP is a Pattention layer as it stands; q, k, v and
the output projection become linear tokens.
"""

import copy
import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any

import timm
import torch
from timm import layers
from timm.models.deit import VisionTransformerDistilled
from timm.models.vision_transformer import Block, VisionTransformer
from torch import Tensor, nn
from tqdm import tqdm

from tokenformer_vit.errors import InputError
from tokenformer_vit.layers import BlockRMSNorm, Pattention
from tokenformer_vit.layers.arguments import COUNTS
from tokenformer_vit.layers.pattention import unseen

from .comparison import check_equal, noise_images
from .vit import ChannelsLast, ConvStem, TokenFormerViT

# The modules that have a counterpart, with a pattern of their names.
_OUTER = VisionTransformer, VisionTransformerDistilled, layers.PatchEmbed, nn.Conv2d, nn.Sequential
_INNER = Block, layers.Attention, layers.Mlp, layers.LayerScale, nn.Dropout
_RMS = nn.RMSNorm, layers.RmsNorm
_NORMS = nn.LayerNorm, layers.LayerNorm, layers.LayerNormFp32, *_RMS
_PARTS = {
    **dict.fromkeys((*_OUTER, *_INNER), ".*"),
    **dict.fromkeys((ConvStem, ChannelsLast, nn.ReLU, nn.MaxPool2d), r"patch_embed.*"),
    **dict.fromkeys((layers.PatchDropout, layers.DropPath), ".*"),  # idle in evaluation
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
            The first pairs of q, k, v, o are then the best map of their rank for such images.

    Returns:
        A ``tokenformer_vit`` with Θ ``linear`` in q, k, v, o and ``gelu`` or ``gelu_tanh`` in the
        feed-forward part, in evaluation mode, on the device and in the dtype of ``vit``, with its
        preprocessing and class names; without dropout and stochastic depth.

    Raises:
        InputError: If a part of ``vit`` has no exact counterpart, or the outputs differ.

    Note:
        A block has 16d² weights in place of 12d², and 12d² again after
        ``timm.utils.reparameterize_model``, for inference.
    """
    for obstacle in _obstacles(vit):
        raise InputError(f"no exact TokenFormer: {obstacle}; give timm's plain VisionTransformer")
    source: Any = readable(vit)
    blocks, norm1 = source.blocks, source.blocks[0].norm1
    norms = ("none", "weight+bias") if isinstance(norm1, nn.LayerNorm) else ("rms", "rms+weight")
    model: Any = _build(
        "tokenformer_vit" + "_distilled" * isinstance(vit, VisionTransformerDistilled),
        source,
        norm=norms[norm1.weight is not None],
        norm_eps=norm1.eps,
        stem="conv" if isinstance(source.patch_embed, ConvStem) else "patch",
        **dict.fromkeys(COUNTS.values(), 1),  # these layers are replaced
    )
    of = covariances(source, [m for b in blocks for m in (b.attn.qkv, b.attn.proj)], images)
    for block, target in zip(tqdm(blocks, "converting", disable=None), model.blocks, strict=True):
        qkv, proj, mlp = block.attn.qkv, block.attn.proj, block.mlp
        linear = linear_layers(qkv.weight, qkv.bias, 3)
        write_block(target, linear, proj, (mlp.fc1, mlp.fc2, mlp.act), of.get(qkv), of.get(proj))
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
    source: Any = readable(model)
    blocks, like = source.blocks, source.blocks[0]
    layers_of = [(b.attn.query, b.attn.key, b.attn.value, b.attn.proj) for b in blocks]
    thetas = {getattr(each, "theta", "linear") for four in layers_of for each in four}
    facts = {(b.mlp.theta, b.mlp.num_used, b.mlp.bias is None) for b in blocks}
    if thetas != {"linear"} or like.mlp.theta not in ("gelu", "gelu_tanh") or len(facts) != 1:
        raise InputError(
            "no plain ViT computes this: it needs Θ linear in q, k, v, o and gelu in all feed-"
            "forward layers, each with as many pairs; give a converted ViT, cut equally"
        )
    width, hidden, eps = source.embed_dim, like.mlp.num_used, like.norm1.eps
    norm = layers.RmsNorm if isinstance(like.norm1, BlockRMSNorm) else layers.LayerNorm
    name = "vit_base_patch16_224"
    how: dict[str, Any] = {"norm_layer": norm.__name__.lower()}  # with an eps of 1e-6
    if eps == 1e-5 and norm is layers.LayerNorm:
        name, how = "vit_base_patch16_clip_224", {}
    elif eps != 1e-6:
        how = {"norm_layer": partial(norm, eps=eps)}  # has no name, so timm cannot save it
    if isinstance(source, VisionTransformerDistilled):
        name = "deit_base_distilled_patch16_224"
    how |= {"act_layer": "gelu_tanh"} if like.mlp.theta == "gelu_tanh" else {}
    how |= {"embed_layer": ConvStem} if isinstance(source.patch_embed, ConvStem) else {}
    # timm rounds down what it multiplies.
    how["mlp_ratio"] = (
        hidden / width if int(hidden / width * width) == hidden else (hidden + 0.5) / width
    )
    has = [each.bias is not None for each in (*layers_of[0], like.mlp)]
    vit: Any = _build(name, source, qkv_bias=has[0], proj_bias=has[3] or has[4], **how)
    for block, target, four in zip(blocks, vit.blocks, layers_of, strict=True):
        *qkv, proj = (p if isinstance(p, nn.Linear) else p.as_linear() for p in four)
        keys, values, _, score_bias = block.mlp.used_tokens()
        tensors = {
            "attn.qkv.weight": torch.cat([each.weight for each in qkv]),
            "attn.qkv.bias": torch.cat([each.bias for each in qkv]) if has[0] else None,
            **{"attn.proj.weight": proj.weight, "attn.proj.bias": proj.bias},
            **{"mlp.fc1.weight": keys, "mlp.fc1.bias": score_bias},
            **{"mlp.fc2.weight": values.t(), "mlp.fc2.bias": block.mlp.bias},
        }
        found = {name: tensor for name, tensor in tensors.items() if tensor is not None}
        target.load_state_dict({**target.state_dict(), **found})
    check_equal(vit.eval(), source, noise_images(source, 1))
    return vit.to(next(model.parameters()).dtype)


def readable(model: nn.Module) -> Any:
    """Return a copy to read, in evaluation mode, in float32 where precision would be lost."""
    copied = copy.deepcopy(model).eval()
    return copied.float() if next(model.parameters()).dtype.itemsize < 4 else copied


def linear_layers(weight: Tensor, bias: Tensor | None, number: int = 1) -> list[nn.Linear]:
    """Divide the rows of a weight (C_out, C_in) among linear layers."""
    made = []
    biases = [None] * number if bias is None else bias.chunk(number)
    for rows, own in zip(weight.chunk(number), biases, strict=True):
        place: Any = {"device": rows.device, "dtype": rows.dtype}
        made.append(nn.Linear(rows.shape[1], len(rows), own is not None, **place))
        made[-1].load_state_dict({"weight": rows} | ({} if own is None else {"bias": own}))
    return made


def covariances(
    model: nn.Module, linear: Sequence[nn.Module], batches: Iterable[Tensor]
) -> dict[nn.Module, Tensor]:
    """Sum z zᵀ (C_in, C_in) over the inputs z of layers, in float64; nothing without a batch."""
    sums: dict[nn.Module, Any] = {}

    def add(layer: nn.Module, inputs: tuple[Tensor]) -> None:
        rows = inputs[0].flatten(0, -2).double()
        sums[layer] = sums.get(layer, 0) + rows.t() @ rows

    if isinstance(batches, Tensor):
        batches = batches.split(32)
    with ExitStack() as stack:
        for layer in linear:
            stack.enter_context(layer.register_forward_pre_hook(add))
        for batch in batches:
            model(batch.to(next(model.parameters()).device))
    return sums


def write_block(
    target: Any, qkv: Iterable[nn.Linear], proj: nn.Linear, mlp: Any, of_qkv: Any, of_proj: Any
) -> None:
    """Give a TokenFormer block the layers of a Transformer's; with covariances or None."""
    for name, linear in zip(("query", "key", "value"), qkv, strict=True):
        setattr(target.attn, name, Pattention.from_linear(linear, of_qkv, kind="qkv"))
    target.attn.proj = Pattention.from_linear(proj, of_proj, kind="proj")
    target.mlp = Pattention.from_mlp(*mlp, kind="ffn")


def _obstacles(vit: Any) -> Iterator[str]:
    for name, module in vit.named_modules():
        if not re.fullmatch(_PARTS.get(type(module), _ACTIVATION), name):
            yield f"{name or 'it'} is a {type(module).__name__}"
        if deed := unseen(module):
            yield f"{name or 'it'} {deed}"
    facts = {
        repr(
            (
                b.norm1,
                b.attn,
                b.attn.num_heads,
                b.attn.head_dim,
                b.ls1,
                b.mlp.act,
                b.mlp.fc1.bias is None,
            )
        )
        for b in vit.blocks
    }
    norms = {(m.eps, isinstance(m, _RMS)) for m in vit.modules() if isinstance(m, _NORMS)}
    if len(facts) != 1 or len(norms) != 1:
        yield "it has no blocks, or they differ in GELU, heads, norms, biases or LayerScale"


def _build(name: str, source: Any, **arguments: Any) -> nn.Module:
    """Build a model with the preprocessing of another, and all that is outside of projections."""
    config: Any = getattr(source, "pretrained_cfg", None) or {}
    overlay = {"num_classes": source.num_classes}  # otherwise timm drops the names
    overlay |= timm.data.resolve_model_data_config(source)  # type: ignore[attr-defined]
    overlay |= {key: config.get(key) for key in ("license", "fixed_input_size", "test_crop_pct")}
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
        class_token=source.cls_token is not None,
        reg_tokens=source.num_reg_tokens,
        pos_embed="none" if source.pos_embed is None else "learn",
        pre_norm=has["norm_pre"],
        fc_norm=has["fc_norm"],
        final_norm=has["norm"] or has["fc_norm"],
        **arguments,
    ).to(next(source.parameters()))
    outer = {n: t for n, t in source.state_dict().items() if not _PROJECTION.match(n)}
    model.load_state_dict({**model.state_dict(), **outer})
    return model
