"""The vision models that ``import tokenformer_vit`` registers with timm."""

from pathlib import Path
from typing import Any

from timm.data import IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD
from timm.models import build_model_with_cfg, generate_default_cfgs, register_model

from .vit import TokenFormerViT, TokenFormerViTDistilled, checkpoint_filter_fn

# Exported folders, one a model.
_PRETRAINED = Path(__file__).with_name("pretrained")


def _cfg(**kwargs: Any) -> dict[str, Any]:
    return {
        "url": "",
        "num_classes": 1000,
        "input_size": (3, 224, 224),
        "pool_size": None,
        "crop_pct": 224 / 256,
        "interpolation": "bicubic",
        "fixed_input_size": True,
        "mean": IMAGENET_DEFAULT_MEAN,
        "std": IMAGENET_DEFAULT_STD,
        "first_conv": "patch_embed.proj",
        "classifier": "head",
        "license": "apache-2.0",
        "paper_ids": "arXiv:2410.23168",
        "paper_name": "TokenFormer: Rethinking Transformer Scaling with Tokenized Model Parameters",
        **kwargs,
    }


_CIFAR10 = _cfg(
    file=str(_PRETRAINED / "tokenformer_cifar10_micro" / "model.safetensors"),
    num_classes=10,
    label_names=(
        *("airplane", "automobile", "bird", "cat", "deer"),
        *("dog", "frog", "horse", "ship", "truck"),
    ),
    input_size=(3, 32, 32),
    crop_pct=1.0,
    mean=(125.3 / 255, 123.0 / 255, 113.9 / 255),
    std=(63.0 / 255, 62.1 / 255, 66.7 / 255),
)
_DISTILLED = _cfg(classifier=("head", "head_dist"))
default_cfgs = generate_default_cfgs(
    {
        "tokenformer_tiny.untrained": _cfg(),
        "tokenformer_small.untrained": _cfg(),
        "tokenformer_base.untrained": _cfg(),
        "tokenformer_large.untrained": _cfg(),
        "tokenformer_base_matched.untrained": _cfg(),
        "tokenformer_large_matched.untrained": _cfg(),
        "tokenformer_small_distilled.untrained": _DISTILLED,
        "tokenformer_base_distilled.untrained": _DISTILLED,
        "tokenformer_small_rope_reg4.untrained": _cfg(crop_pct=1.0),
        "tokenformer_base_rope_reg4.untrained": _cfg(crop_pct=1.0),
        "tokenformer_large_rope_reg4.untrained": _cfg(crop_pct=1.0),
        "tokenformer_cifar10_micro.cifar10": _CIFAR10,
    }
)

_SMALL = {"patch_size": 16, "embed_dim": 384, "depth": 12, "num_heads": 6}
_BASE = {"patch_size": 16, "embed_dim": 768, "depth": 12, "num_heads": 12}
_LARGE = {"patch_size": 16, "embed_dim": 1024, "depth": 24, "num_heads": 16}
# The parts of ViT-5, arXiv:2602.08071. Its norms also have weights, and it also rotates registers.
_VIT5 = {
    **{"norm": "rms", "qk_norm": True, "use_rot_pos_emb": True},
    **{"reg_tokens": 4, "no_embed_class": True, "init_values": 1e-4},
}


def _create(
    variant: str, pretrained: bool, kwargs: dict[str, Any], kind: Any = TokenFormerViT, **own: Any
) -> TokenFormerViT:
    """Build a model; the user's ``kwargs`` replace the arguments of the preset."""
    own |= kwargs
    return build_model_with_cfg(
        kind,
        variant,
        pretrained,
        pretrained_filter_fn=checkpoint_filter_fn,
        feature_cfg={"out_indices": own.pop("out_indices", 3), "feature_cls": "getter"},
        **own,
    )


@register_model
def tokenformer_tiny(pretrained: bool = False, **kwargs: Any) -> TokenFormerViT:
    """Build TokenFormer-Ti/16: width 192, 12 blocks, 3 heads, pairs 192 and 768."""
    own = {**_SMALL, "embed_dim": 192, "num_heads": 3}
    return _create("tokenformer_tiny", pretrained, kwargs, **own)


@register_model
def tokenformer_small(pretrained: bool = False, **kwargs: Any) -> TokenFormerViT:
    """Build TokenFormer-S/16: width 384, 12 blocks, 6 heads, pairs 384 and 1536."""
    return _create("tokenformer_small", pretrained, kwargs, **_SMALL)


@register_model
def tokenformer_base(pretrained: bool = False, **kwargs: Any) -> TokenFormerViT:
    """Build TokenFormer-B/16: width 768, 12 blocks, 12 heads, pairs 768 and 3072 (Table 4)."""
    return _create("tokenformer_base", pretrained, kwargs, **_BASE)


@register_model
def tokenformer_large(pretrained: bool = False, **kwargs: Any) -> TokenFormerViT:
    """Build TokenFormer-L/16: width 1024, 24 blocks, 16 heads, pairs 1024 and 4096."""
    return _create("tokenformer_large", pretrained, kwargs, **_LARGE)


def _pairs(attention: int, ffn: int) -> dict[str, int]:
    names = ("num_qkv_param_tokens", "num_proj_param_tokens", "num_ffn_param_tokens")
    return dict(zip(names, (attention, attention, ffn), strict=True))


@register_model
def tokenformer_base_matched(pretrained: bool = False, **kwargs: Any) -> TokenFormerViT:
    """Build TokenFormer-B†/16, with as many parameters as ViT-B/16: pairs 576 and 2304."""
    own = {**_BASE, **_pairs(576, 2304)}
    return _create("tokenformer_base_matched", pretrained, kwargs, **own)


@register_model
def tokenformer_large_matched(pretrained: bool = False, **kwargs: Any) -> TokenFormerViT:
    """Build TokenFormer-L†/16, with as many parameters as ViT-L/16: pairs 768 and 3072."""
    own = {**_LARGE, **_pairs(768, 3072)}
    return _create("tokenformer_large_matched", pretrained, kwargs, **own)


@register_model
def tokenformer_small_distilled(pretrained: bool = False, **kwargs: Any) -> TokenFormerViT:
    """Build TokenFormer-S/16 with a distillation token and a second head, as DeiT has them."""
    name = "tokenformer_small_distilled"
    return _create(name, pretrained, kwargs, TokenFormerViTDistilled, **_SMALL)


@register_model
def tokenformer_base_distilled(pretrained: bool = False, **kwargs: Any) -> TokenFormerViT:
    """Build TokenFormer-B/16 with a distillation token and a second head, as DeiT has them."""
    name = "tokenformer_base_distilled"
    return _create(name, pretrained, kwargs, TokenFormerViTDistilled, **_BASE)


@register_model
def tokenformer_small_rope_reg4(pretrained: bool = False, **kwargs: Any) -> TokenFormerViT:
    """Build TokenFormer-S/16 with the parts of ViT-5, such as rotary positions and registers."""
    return _create("tokenformer_small_rope_reg4", pretrained, kwargs, **_VIT5, **_SMALL)


@register_model
def tokenformer_base_rope_reg4(pretrained: bool = False, **kwargs: Any) -> TokenFormerViT:
    """Build TokenFormer-B/16 with the parts of ViT-5, such as rotary positions and registers."""
    return _create("tokenformer_base_rope_reg4", pretrained, kwargs, **_VIT5, **_BASE)


@register_model
def tokenformer_large_rope_reg4(pretrained: bool = False, **kwargs: Any) -> TokenFormerViT:
    """Build TokenFormer-L/16 with the parts of ViT-5, such as rotary positions and registers."""
    return _create("tokenformer_large_rope_reg4", pretrained, kwargs, **_VIT5, **_LARGE)


@register_model
def tokenformer_cifar10_micro(pretrained: bool = False, **kwargs: Any) -> TokenFormerViT:
    """Build a model for 32 px: patches of 8 px, width 96, 4 blocks, 3 heads, pairs 96 and 384.

    Its pretrained weights are in the package; configs/cifar10_micro_pretrained.py trained them.
    """
    own = {"img_size": 32, "patch_size": 8, "embed_dim": 96, "depth": 4, "num_heads": 3}
    return _create("tokenformer_cifar10_micro", pretrained, kwargs, **own)
