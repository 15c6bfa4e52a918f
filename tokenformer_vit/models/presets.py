"""The vision models that ``import tokenformer_vit`` registers with timm."""

import json
from pathlib import Path
from typing import Any

from timm.models import build_model_with_cfg, generate_default_cfgs, register_model

from .checkpoints import CONFIG, WEIGHTS
from .vit import TokenFormerViT, TokenFormerViTDistilled, checkpoint_filter_fn

_SMALL = {"patch_size": 16, "embed_dim": 384, "depth": 12, "num_heads": 6}
_BASE = {"patch_size": 16, "embed_dim": 768, "depth": 12, "num_heads": 12}
_LARGE = {"patch_size": 16, "embed_dim": 1024, "depth": 24, "num_heads": 16}
_MICRO = {"img_size": 32, "patch_size": 8, "embed_dim": 96, "depth": 4, "num_heads": 3}
_STEM = {"img_size": 32, "patch_size": 4, "embed_dim": 128, "depth": 4, "num_heads": 4}
_STEM |= {"stem": "conv", "class_token": False, "global_pool": "avg"}
_QKVO, _FFN = ("num_qkv_param_tokens", "num_proj_param_tokens"), "num_ffn_param_tokens"
# The parts of ViT-5, arXiv:2602.08071. Its norms also have weights, and it also rotates registers.
_VIT5 = {
    **{"norm": "rms", "qk_norm": True, "use_rot_pos_emb": True},
    **{"reg_tokens": 4, "no_embed_class": True, "init_values": 1e-4},
}
_MODELS: dict[str, dict[str, Any]] = {
    "tokenformer_vit": {},  # for models that their arguments describe, such as a converted ViT
    "tokenformer_vit_distilled": {},
    "tokenformer_tiny": {**_SMALL, "embed_dim": 192, "num_heads": 3},
    "tokenformer_small": _SMALL,
    "tokenformer_base": _BASE,  # Table 4
    "tokenformer_large": _LARGE,
    # As many parameters as ViT-B/16 and ViT-L/16.
    "tokenformer_base_matched": _BASE | dict.fromkeys(_QKVO, 576) | {_FFN: 2304},
    "tokenformer_large_matched": _LARGE | dict.fromkeys(_QKVO, 768) | {_FFN: 3072},
    # A distillation token and a second head, as DeiT has them.
    "tokenformer_small_distilled": _SMALL,
    "tokenformer_base_distilled": _BASE,
    "tokenformer_small_rope_reg4": {**_VIT5, **_SMALL},
    "tokenformer_base_rope_reg4": {**_VIT5, **_BASE},
    "tokenformer_large_rope_reg4": {**_VIT5, **_LARGE},
    # Trained; their weights are in the package.
    "tokenformer_cifar10_micro": _MICRO,
    "tokenformer_cifar10_stem": _STEM | dict.fromkeys(_QKVO, 64) | {_FFN: 256},
}


def _cfg(name: str) -> dict[str, Any]:
    """Describe a model where it differs from timm's defaults, such as 224 of 256 pixels."""
    folder = Path(__file__).parent / "pretrained" / name
    if folder.is_dir():
        description = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
        return {**description["pretrained_cfg"], "file": str(folder / WEIGHTS)}
    return {
        "fixed_input_size": True,
        "first_conv": "patch_embed.proj",
        "classifier": ("head", "head_dist") if name.endswith("_distilled") else "head",
        "crop_pct": 1.0 if name.endswith("_rope_reg4") else 224 / 256,
        "license": "apache-2.0",
        "paper_ids": "arXiv:2410.23168",
        "paper_name": "TokenFormer: Rethinking Transformer Scaling with Tokenized Model Parameters",
    }


default_cfgs = generate_default_cfgs(
    {f"{name}.{'cifar10' if 'cifar10' in name else 'untrained'}": _cfg(name) for name in _MODELS}
)


def _register(name: str, own: dict[str, Any]) -> Any:
    """Register a function that builds a model; the user's arguments replace those of the table."""
    kind = TokenFormerViTDistilled if name.endswith("_distilled") else TokenFormerViT

    def create(pretrained: bool = False, **kwargs: Any) -> TokenFormerViT:
        given = {"out_indices": 3, **own, **kwargs, "pretrained_filter_fn": checkpoint_filter_fn}
        given["feature_cfg"] = {"out_indices": given.pop("out_indices"), "feature_cls": "getter"}
        return build_model_with_cfg(kind, name, pretrained, **given)

    create.__name__ = create.__qualname__ = name
    return register_model(create)


# timm lists its entry points in ``__all__``, so they are names of this module.
globals().update({name: _register(name, own) for name, own in _MODELS.items()})
