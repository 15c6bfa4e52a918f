"""TokenFormer vision models: timm's VisionTransformer with TokenFormer blocks.

Patch embedding, positions, pooling, the head and all methods for users are timm's. This file adds
the block, its norm, and the numbers of parameter tokens.
"""

import math
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from timm.data import IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD
from timm.layers import LayerNorm
from timm.models import build_model_with_cfg, generate_default_cfgs, register_model
from timm.models.vision_transformer import VisionTransformer
from timm.models.vision_transformer import checkpoint_filter_fn as vit_checkpoint_filter_fn
from torch import Tensor

from tokenformer_vit.errors import InputError
from tokenformer_vit.layers import BlockLayerNorm, Pattention, TokenFormerBlock
from tokenformer_vit.layers.arguments import Counts, counts_by_block, model_pattention_args
from tokenformer_vit.layers.block import TIMM_ONLY, token_arguments
from tokenformer_vit.layers.segments import fuse_state_dict
from tokenformer_vit.ops import check_backend

from .sizes import Size, nest_layers, nested_sizes, set_size
from .weights import check_digest, check_tensors

__all__ = [
    "TokenFormerViT",
    "checkpoint_filter_fn",
    "classifier_state_dict",
    "fit_state_dict",
    "timm_state_dict",
]

# Arguments and pools of timm's ViT that need linear layers.
_NOT_OURS = TIMM_ONLY | {"block_fn", "fix_init"}
_ATTENTION_POOLS = ("map", "prr")


class TokenFormerViT(VisionTransformer):
    """Vision transformer in which every projection of a block is a Pattention layer.

    Args:
        theta: Name of the Θ variant, a key of ``tokenformer_vit.ops.THETAS``.
        norm: Parameters of the LayerNorms inside blocks: ``none``, ``bias`` or ``weight+bias``
            (Table 5). The final norm always has both.
        num_qkv_param_tokens: Number of pairs in each query, key and value projection; default
            ``embed_dim``. A list has a number for each block.
        num_proj_param_tokens: Number of pairs in each output projection; default ``embed_dim``.
        num_ffn_param_tokens: Number of pairs in each feed-forward layer; default
            ``mlp_ratio * embed_dim``.
        pattention_args: Arguments of all Pattention layers, any of ``tau``, ``learn_tau``, ``eps``,
            ``key_init_scale``, ``gate`` and ``init`` (``released``: initial parameter tokens as in
            the authors' code); see :class:`~tokenformer_vit.layers.Pattention` and
            :func:`~tokenformer_vit.layers.arguments.model_pattention_args`.
        nested: Smaller sizes that are trained as well, such as ``(0.25, 0.5)`` for the first
            quarter and the first half of the pairs of every layer; see :meth:`set_size`. Each has
            its own τ.
        embed_dim: Width C.
        depth: Number of blocks.
        weight_init: timm's initialisation of the stem and the head. Parameter tokens are always
            drawn as :class:`~tokenformer_vit.layers.Pattention` describes.
        **kwargs: Other arguments of timm's ``VisionTransformer``, except those of linear layers
            (``qkv_bias``, ``mlp_layer``, ...).

    Attributes:
        sizes: The nested sizes, smallest first, then 1.0 for the whole model.

    Raises:
        TypeError: If an argument is unknown or belongs to linear layers.
        InputError: If ``theta``, ``norm``, ``global_pool`` or a key of ``pattention_args`` is
            unknown, a value of ``pattention_args`` or ``nested`` is out of range, or a list of
            numbers of pairs has another length than ``depth``.

    Shape:
        (B, in_chans, H, W) -> (B, num_classes).

    Source:
        TokenFormer, arXiv:2410.23168, Section 3 and Table 4. Its vision models are trained as in
        MAE, arXiv:2111.06377, Table 11, which also gives the LayerNorm eps of 1e-6.
    """

    def __init__(
        self,
        theta: str = "gelu_l2",
        norm: str = "none",
        num_qkv_param_tokens: Counts = None,
        num_proj_param_tokens: Counts = None,
        num_ffn_param_tokens: Counts = None,
        pattention_args: dict[str, Any] | None = None,
        nested: Sequence[Size] = (),
        embed_dim: int = 768,
        depth: int = 12,
        weight_init: str = "",
        **kwargs: Any,
    ) -> None:
        for name in sorted(_NOT_OURS & kwargs.keys()):
            raise TypeError(
                f"TokenFormer has no {name!r}: its blocks hold no linear layers; leave it out"
            )
        _check_pool(kwargs.get("global_pool"))
        counts = counts_by_block(
            depth,
            num_qkv_param_tokens=num_qkv_param_tokens,
            num_proj_param_tokens=num_proj_param_tokens,
            num_ffn_param_tokens=num_ffn_param_tokens,
        )
        shared = model_pattention_args(pattention_args, embed_dim, max(depth, 1))
        gain = 1 / math.sqrt(2 * max(depth, 1))

        def block_fn(depth: int, **own: Any) -> TokenFormerBlock:  # timm gives the block's index
            return TokenFormerBlock(
                **own,
                **counts[depth],
                theta=theta,
                norm=norm,
                pattention_args=shared,
                residual_init_gain=gain,
            )

        super().__init__(
            embed_dim=embed_dim,
            depth=depth,
            weight_init=weight_init,  # type: ignore[arg-type]
            block_fn=block_fn,  # type: ignore[arg-type]
            norm_layer=partial(LayerNorm, eps=1e-6),  # type: ignore[arg-type]
            **kwargs,
        )
        for layer in self.modules():
            if isinstance(layer, Pattention):
                layer.of_model = True
        self.sizes = nest_layers(self, nested)

    @torch.jit.ignore()
    def no_weight_decay(self) -> set[str]:
        """Return the names of parameters without weight decay that have more than one dimension."""
        return {name for name in super().no_weight_decay() if getattr(self, name, None) is not None}

    @torch.jit.ignore()
    def set_backend(self, backend: str) -> None:
        """Choose the implementation of Pattention and LayerNorm in all blocks.

        Like ``set_grad_checkpointing``, it is not saved with the model.

        Args:
            backend: One of ``tokenformer_vit.ops.BACKENDS``.

        Raises:
            InputError: If the backend is unknown.
        """
        check_backend(backend)
        for module in self.blocks.modules():
            if isinstance(module, BlockLayerNorm | Pattention):
                module.backend = backend

    @torch.jit.ignore()
    def set_size(self, size: Size | None) -> None:
        """Use only the first pairs of every layer.

        Like ``set_backend``, it is not saved with the model.
        :func:`~tokenformer_vit.growth.extract` makes a smaller model. With gradient checkpointing,
        do not change the size before the backward pass, which computes the blocks again.

        Args:
            size: Share of the pairs of every layer, above 0 and at most 1; or a dict of shares
                (floats) and numbers of pairs (ints), by kind (``qkv``, ``proj``, ``ffn``) or by
                layer name. ``None`` for all pairs. It need not be one of ``sizes``.

        Raises:
            InputError: If the size is out of range, a mask is active, or a ``top_k`` is larger than
                the size. Then nothing is changed.
        """
        set_size(self, size)

    @torch.jit.ignore()
    def record_param_tokens(self) -> None:
        """Update the pairs and the sizes in the arguments from which timm rebuilds this model.

        Call it after pairs were added or removed; then the model is saved and exported with its
        new size. It does nothing for a model that timm did not build.
        """
        self.sizes = nested_sizes(self, self.sizes)
        args = getattr(self, "_model_args", None)  # what timm's get_model_args() returns
        if args is None or not len(self.blocks):
            return
        args |= token_arguments(self.blocks, args.get("pattention_args"))  # type: ignore[arg-type]
        args.pop("nested", None)
        if nested := self.sizes[:-1]:
            args["nested"] = nested

    def reset_classifier(self, num_classes: int, global_pool: str | None = None) -> None:
        """Replace the head by a new one; also the pooling, if it is given."""
        _check_pool(global_pool)
        super().reset_classifier(num_classes, global_pool)

    @torch.jit.ignore()
    def load_pretrained(self, checkpoint_path: str, prefix: str = "") -> None:
        """Refuse the ``.npz`` files of ViTs, which hold linear layers.

        Raises:
            InputError: Always.
        """
        raise InputError(
            f"{checkpoint_path} is a NumPy checkpoint of an ordinary ViT: give the .safetensors or "
            ".pth file of a TokenFormer"
        )


def _check_pool(global_pool: str | None) -> None:
    if global_pool in _ATTENTION_POOLS:
        raise InputError(
            f"global_pool {global_pool!r} needs linear layers, which a TokenFormer does not have: "
            "choose 'token', 'avg', 'avgmax', 'max' or ''"
        )


def timm_state_dict(state_dict: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Rename the tensors of an mmpretrain classifier (backbone and linear head) to timm's names.

    The ``ClsBatchNormNeck`` of a linear probe, which has no weights, becomes a part of the head.
    The decoder of a masked autoencoder is left out.
    """
    names = {"backbone.model.": "", "head.fc.": "head."}
    renamed = {
        new + name.removeprefix(old): tensor
        for name, tensor in state_dict.items()
        for old, new in names.items()
        if name.startswith(old)
    }
    if "neck.bn.running_var" in state_dict:
        mean, var = (state_dict[f"neck.bn.running_{name}"] for name in ("mean", "var"))
        weight = renamed["head.weight"] / (var + 1e-6).sqrt()  # the neck's own eps
        renamed |= {"head.weight": weight, "head.bias": renamed["head.bias"] - weight @ mean}
    return renamed


def classifier_state_dict(state_dict: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Rename the tensors of a timm model to the names in an mmpretrain classifier around it."""
    return {
        f"head.fc.{name.removeprefix('head.')}"
        if name.startswith("head.")
        else f"backbone.model.{name}": tensor
        for name, tensor in state_dict.items()
    }


def checkpoint_filter_fn(state_dict: dict[str, Tensor], model: TokenFormerViT) -> dict[str, Tensor]:
    """Check a checkpoint that timm has read, and adapt it to ``model``.

    Args:
        state_dict: State dict of a timm model, or of an mmpretrain classifier of this package,
            with the backbone under ``backbone.model.`` and the head under ``head.fc.``.
        model: Model that will load it.

    Returns:
        The result of :func:`fit_state_dict`.

    Raises:
        InputError: If a model cannot use one of the tensors, or a local file is damaged.
    """
    state_dict = state_dict.get("state_dict", state_dict)  # type: ignore[assignment]
    source: Any = model.pretrained_cfg
    where: Any = source.get("file") or source.get("hf_hub_id") or "the checkpoint"
    check_tensors(state_dict, where)
    file = Path(where)
    if source.get("source") == "local-dir":
        file /= "model.safetensors"
    if file.suffix == ".safetensors" and file.is_file():
        check_digest(state_dict, file)
    return fit_state_dict(state_dict, model)


def fit_state_dict(state_dict: Mapping[str, Tensor], model: TokenFormerViT) -> dict[str, Tensor]:
    """Convert a state dict to timm's names and to the image and patch size of a model.

    Args:
        state_dict: State dict as in :func:`checkpoint_filter_fn`.
        model: Model that will load it.

    Returns:
        A state dict with timm's names, position embeddings and patch embedding of the model's
        size, and the old and new pairs of split layers joined.
    """
    fused = fuse_state_dict(timm_state_dict(state_dict) or state_dict)
    return vit_checkpoint_filter_fn(fused, model)


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


# Exported folders, one a model, with the model's card.
_PRETRAINED = Path(__file__).with_name("pretrained")

default_cfgs = generate_default_cfgs(
    {
        **{
            f"tokenformer_{name}.untrained": _cfg()
            for name in ("tiny", "small", "base", "large", "base_matched", "large_matched")
        },
        "tokenformer_cifar10_micro.cifar10": _cfg(
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
        ),
    }
)


def _create(variant: str, pretrained: bool, **kwargs: Any) -> TokenFormerViT:
    out_indices = kwargs.pop("out_indices", 3)
    return build_model_with_cfg(
        TokenFormerViT,
        variant,
        pretrained,
        pretrained_filter_fn=checkpoint_filter_fn,
        feature_cfg={"out_indices": out_indices, "feature_cls": "getter"},
        **kwargs,
    )


@register_model
def tokenformer_tiny(pretrained: bool = False, **kwargs: Any) -> TokenFormerViT:
    """Build TokenFormer-Ti/16: width 192, 12 blocks, 3 heads, pairs 192 and 768."""
    args = {"patch_size": 16, "embed_dim": 192, "depth": 12, "num_heads": 3}
    return _create("tokenformer_tiny", pretrained, **{**args, **kwargs})


@register_model
def tokenformer_small(pretrained: bool = False, **kwargs: Any) -> TokenFormerViT:
    """Build TokenFormer-S/16: width 384, 12 blocks, 6 heads, pairs 384 and 1536."""
    args = {"patch_size": 16, "embed_dim": 384, "depth": 12, "num_heads": 6}
    return _create("tokenformer_small", pretrained, **{**args, **kwargs})


@register_model
def tokenformer_base(pretrained: bool = False, **kwargs: Any) -> TokenFormerViT:
    """Build TokenFormer-B/16: width 768, 12 blocks, 12 heads, pairs 768 and 3072 (Table 4)."""
    args = {"patch_size": 16, "embed_dim": 768, "depth": 12, "num_heads": 12}
    return _create("tokenformer_base", pretrained, **{**args, **kwargs})


@register_model
def tokenformer_large(pretrained: bool = False, **kwargs: Any) -> TokenFormerViT:
    """Build TokenFormer-L/16: width 1024, 24 blocks, 16 heads, pairs 1024 and 4096."""
    args = {"patch_size": 16, "embed_dim": 1024, "depth": 24, "num_heads": 16}
    return _create("tokenformer_large", pretrained, **{**args, **kwargs})


@register_model
def tokenformer_base_matched(pretrained: bool = False, **kwargs: Any) -> TokenFormerViT:
    """Build TokenFormer-B†/16, with as many parameters as ViT-B/16: pairs 576 and 2304."""
    args = {
        "patch_size": 16,
        "embed_dim": 768,
        "depth": 12,
        "num_heads": 12,
        "num_qkv_param_tokens": 576,
        "num_proj_param_tokens": 576,
        "num_ffn_param_tokens": 2304,
    }
    return _create("tokenformer_base_matched", pretrained, **{**args, **kwargs})


@register_model
def tokenformer_large_matched(pretrained: bool = False, **kwargs: Any) -> TokenFormerViT:
    """Build TokenFormer-L†/16, with as many parameters as ViT-L/16: pairs 768 and 3072."""
    args = {
        "patch_size": 16,
        "embed_dim": 1024,
        "depth": 24,
        "num_heads": 16,
        "num_qkv_param_tokens": 768,
        "num_proj_param_tokens": 768,
        "num_ffn_param_tokens": 3072,
    }
    return _create("tokenformer_large_matched", pretrained, **{**args, **kwargs})


@register_model
def tokenformer_cifar10_micro(pretrained: bool = False, **kwargs: Any) -> TokenFormerViT:
    """Build a model for 32 px: patches of 8 px, width 96, 4 blocks, 3 heads, pairs 96 and 384.

    Its pretrained weights are in the package; configs/cifar10_micro_pretrained.py trained them.
    """
    args = {"img_size": 32, "patch_size": 8, "embed_dim": 96, "depth": 4, "num_heads": 3}
    return _create("tokenformer_cifar10_micro", pretrained, **{**args, **kwargs})
