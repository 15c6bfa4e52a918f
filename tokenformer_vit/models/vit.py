"""TokenFormer vision models: timm's VisionTransformer with TokenFormer blocks.

Patch embedding, positions, pooling, the head and all methods for users are timm's. This file adds
the block, its norm, the numbers of parameter tokens, and rotary positions.
"""

import copy
import math
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from timm.layers import LayerNorm, RmsNorm, RotaryEmbeddingCat
from timm.models.deit import VisionTransformerDistilled
from timm.models.vision_transformer import VisionTransformer
from timm.models.vision_transformer import checkpoint_filter_fn as vit_checkpoint_filter_fn
from torch import Tensor, nn

from tokenformer_vit.errors import InputError
from tokenformer_vit.layers import BlockNorm, Pattention, TokenFormerBlock
from tokenformer_vit.layers.arguments import (
    Counts,
    check_argument,
    counts_by_block,
    model_pattention_args,
)
from tokenformer_vit.layers.block import TIMM_ONLY, token_arguments
from tokenformer_vit.layers.segments import fuse_state_dict
from tokenformer_vit.ops import check_backend

from .computation import check_computation, computation_of
from .description import WEIGHT_FILES, trained_arguments
from .sizes import Size, nest_layers, nested_sizes, set_size
from .weights import check_digest, check_tensors

__all__ = [
    "TokenFormerViT",
    "TokenFormerViTDistilled",
    "checkpoint_filter_fn",
    "classifier_state_dict",
    "draw_prefix_tokens",
    "fit_state_dict",
    "timm_state_dict",
]

# Arguments and pools of timm's ViT that need linear layers.
_NOT_OURS = TIMM_ONLY | {"block_fn", "fix_init"}
_ATTENTION_POOLS = ("map", "prr")
# Names of the heads in timm and in an mmpretrain classifier.
_HEADS = {"head": "head.fc", "head_dist": "head.fc_dist"}


class TokenFormerViT(VisionTransformer):
    """Vision transformer in which every projection of a block is a Pattention layer.

    Args:
        theta: Name of the Θ variant, a key of ``tokenformer_vit.ops.THETAS``.
        norm: Parameters of the LayerNorms inside blocks: ``none``, ``bias`` or ``weight+bias``
            (Table 5). The final norm always has both. ``rms`` for RMSNorms without parameters
            inside blocks, and a final RMSNorm with a weight.
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
        use_rot_pos_emb: Also give patches rotary positions by row and column, in each head. Class
            and register tokens are not rotated. ``pos_embed="none"`` removes the learned positions.
            With ``dynamic_img_size``, TorchScript cannot compile the model; ``torch.export`` can.
        rope_temperature: Base of the rotary frequencies.
        embed_dim: Width C.
        depth: Number of blocks.
        num_heads: Number of heads.
        weight_init: timm's initialisation of the stem and the head. Parameter tokens are always
            drawn as :class:`~tokenformer_vit.layers.Pattention` describes.
        drop_path_uniform: Give all blocks ``drop_path_rate``; by default it rises from 0 in the
            first block to that rate in the last.
        **kwargs: Other arguments of timm's ``VisionTransformer``, except those of linear layers
            (``qkv_bias``, ``mlp_layer``, ...).

    Attributes:
        sizes: The nested sizes, smallest first, then 1.0 for the whole model.

    Raises:
        TypeError: If an argument is unknown or belongs to linear layers.
        InputError: If ``theta``, ``norm``, ``global_pool`` or a key of ``pattention_args`` is
            unknown, a value of ``pattention_args`` or ``nested`` is out of range, a list of
            numbers of pairs has another length than ``depth``, ``rope_temperature`` is not
            positive, or rotary positions do not fit the width of a head or ``patch_drop_rate``.

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
        use_rot_pos_emb: bool = False,
        rope_temperature: float = 10000.0,
        embed_dim: int = 768,
        depth: int = 12,
        num_heads: int = 12,
        weight_init: str = "",
        drop_path_uniform: bool = False,
        **kwargs: Any,
    ) -> None:
        for name in sorted(_NOT_OURS & kwargs.keys()):
            raise TypeError(
                f"TokenFormer has no {name!r}: its blocks hold no linear layers; leave it out"
            )
        _check_pool(kwargs.get("global_pool"))
        if use_rot_pos_emb:
            check_argument("rope_temperature", rope_temperature)
            _check_rotation(embed_dim, num_heads, kwargs.get("patch_drop_rate"))
        counts = counts_by_block(
            depth,
            num_qkv_param_tokens=num_qkv_param_tokens,
            num_proj_param_tokens=num_proj_param_tokens,
            num_ffn_param_tokens=num_ffn_param_tokens,
        )
        shared = model_pattention_args(pattention_args, embed_dim, max(depth, 1))
        gain = 1 / math.sqrt(2 * max(depth, 1))

        def block_fn(depth: int, **own: Any) -> TokenFormerBlock:  # timm gives the block's index
            if drop_path_uniform:
                own["drop_path"] = kwargs.get("drop_path_rate", 0.0)
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
            num_heads=num_heads,
            weight_init=weight_init,  # type: ignore[arg-type]
            block_fn=block_fn,  # type: ignore[arg-type]
            norm_layer=partial(RmsNorm if norm == "rms" else LayerNorm, eps=1e-6),  # type: ignore[arg-type]
            **kwargs,
        )
        # timm adds the arguments that it is given, once it has loaded the weights.
        self._model_args: dict[str, Any] = {
            "theta": theta,
            "norm": norm,
            "qk_norm": kwargs.get("qk_norm", False),
            "num_heads": num_heads,
            "use_rot_pos_emb": use_rot_pos_emb,
            "pattention_args": dict(pattention_args) if pattention_args else None,
        }
        self.rope: RotaryEmbeddingCat | None = None
        if use_rot_pos_emb:
            self.rope = RotaryEmbeddingCat(
                embed_dim // num_heads,
                temperature=rope_temperature,
                in_pixels=False,
                feat_shape=self.patch_embed.grid_size,
                rotate_half=True,  # compiled for a CPU twice as fast as rotated neighbours
                device=kwargs.get("device"),
                dtype=kwargs.get("dtype"),
            )
            for block in self.blocks:
                attn: Any = block.attn
                # Not one for all: torch.func.functional_call restores the wrong shared buffers.
                attn.rope = copy.deepcopy(self.rope)
                attn.num_prefix_tokens = self.num_prefix_tokens
            if self.dynamic_img_size:  # TorchScript has no super(), which an override would call
                self.patch_embed.register_forward_hook(self._follow_grid)
        for layer in self.modules():
            if isinstance(layer, Pattention):
                layer.of_model = True
        self.sizes = nest_layers(self, nested)

    def init_weights(self, mode: str = "", needs_reset: bool = True) -> None:
        """Initialise the weights as timm does; see also :func:`draw_prefix_tokens`."""
        super().init_weights(mode, needs_reset)  # type: ignore[arg-type]
        draw_prefix_tokens(self)

    @torch.jit.ignore()
    def no_weight_decay(self) -> set[str]:
        """Return the names of parameters without weight decay that have more than one dimension."""
        return {name for name in super().no_weight_decay() if getattr(self, name, None) is not None}

    @torch.jit.ignore()
    def set_backend(self, backend: str) -> None:
        """Choose the implementation of Pattention and norms in all blocks.

        Like ``set_grad_checkpointing``, it is not saved with the model.

        Args:
            backend: One of ``tokenformer_vit.ops.BACKENDS``.

        Raises:
            InputError: If the backend is unknown.
        """
        check_backend(backend)
        for module in self.blocks.modules():
            if isinstance(module, BlockNorm | Pattention):
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
            InputError: If the size is out of range, or a mask is active. Then nothing is changed.
        """
        set_size(self, size)

    @torch.jit.ignore()
    def computation(self) -> dict[str, Any]:
        """Return the arguments that the tensors do not show; see :func:`computation_of`."""
        return computation_of(self._model_args)

    @torch.jit.ignore()
    def record_param_tokens(self) -> None:
        """Update the pairs and the sizes in the arguments from which timm rebuilds this model.

        Call it after pairs were added or removed; then the model is saved and exported with its
        new size.
        """
        self.sizes = nested_sizes(self, self.sizes)
        if not len(self.blocks):
            return
        args: dict[str, Any] = self._model_args  # what timm's get_model_args() returns
        args |= token_arguments(self.blocks, args.get("pattention_args"))  # type: ignore[arg-type]
        args.pop("nested", None)
        if nested := self.sizes[:-1]:
            args["nested"] = nested

    def prune_intermediate_layers(self, *args: Any, **kwargs: Any) -> list[int]:
        """Remove the last blocks as timm does; the model is then saved with those that are left."""
        taken = super().prune_intermediate_layers(*args, **kwargs)
        self._model_args["depth"] = len(self.blocks)
        if isinstance(self.norm, nn.Identity) and isinstance(self.fc_norm, nn.Identity):
            self._model_args["final_norm"] = False
        self.record_param_tokens()
        return taken

    def set_input_size(
        self,
        img_size: tuple[int, int] | None = None,
        patch_size: tuple[int, int] | None = None,
    ) -> None:
        """Change the size of images and patches; learned and rotary positions follow."""
        super().set_input_size(img_size, patch_size)
        if self.rope is not None:
            self._rotate_over(self.patch_embed.grid_size)  # type: ignore[arg-type]

    @torch.jit.ignore()
    def _follow_grid(self, _module: nn.Module, _images: tuple[Tensor], patches: Tensor) -> None:
        """Fit the rotary positions to (B, H, W, C) patches."""
        with torch.inference_mode(False):  # a later training also reads the new positions
            self._rotate_over(tuple(patches.shape[1:3]))

    @torch.jit.ignore()
    def _rotate_over(self, grid: tuple[int, ...]) -> None:
        for rope in (self.rope, *(block.attn.rope for block in self.blocks)):  # type: ignore
            rope.update_feat_shape(grid)  # type: ignore

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


class TokenFormerViTDistilled(TokenFormerViT, VisionTransformerDistilled):
    """TokenFormer with a distillation token and a second head, as timm has it for DeiT.

    A teacher trains the second head (``head_dist``), which reads the distillation token. Outputs
    are the mean of both heads; in training, after ``set_distilled_training()``, the outputs of
    each.

    Args:
        **kwargs: As for :class:`TokenFormerViT`. The model has learned positions, pools by
            ``token``, and has no registers.

    Raises:
        InputError: As TokenFormerViT, and for another pooling, registers or ``pos_embed``.

    Source:
        DeiT, arXiv:2012.12877, Section 4.
    """

    def __init__(self, **kwargs: Any) -> None:
        _check_tokens(kwargs)
        super().__init__(**kwargs)

    def reset_classifier(self, num_classes: int, global_pool: str | None = None) -> None:
        """Replace both heads by new ones."""
        _check_tokens({"global_pool": global_pool or "token"})
        super().reset_classifier(num_classes, global_pool)


def _check_tokens(kwargs: Mapping[str, Any]) -> None:
    """Check that exactly a class and a distillation token come before the patches."""
    only = {
        "global_pool": "token",
        "class_token": True,
        "reg_tokens": 0,
        "pos_embed": "learn",
        "no_embed_class": False,
        "fc_norm": None,
        "patch_drop_rate": 0.0,  # timm would drop the distillation token as well
    }
    for name, value in only.items():
        if (given := kwargs.get(name, value)) != value:
            raise InputError(
                f"{name} is {given!r}, but the heads of a distilled model read its class and "
                f"distillation tokens: leave it at {value!r}, or choose a model without "
                "'_distilled' in its name"
            )


def draw_prefix_tokens(vit: Any, generator: torch.Generator | None = None) -> None:
    """Draw class and register tokens that have no position, with a standard deviation of 0.02.

    timm draws them with 1e-6. Without a position they remain as small, below the root of the norm's
    eps, and their gradients are hundreds of times as large as all others together: gradient
    clipping would leave next to nothing of these.

    Args:
        vit: ViT of timm, or TokenFormer.
        generator: Source of random numbers.

    Source:
        Initialisation of DeiT III, arXiv:2204.07118, and of ViT-5, arXiv:2602.08071.
    """
    if vit.no_embed_class or vit.pos_embed is None:
        for token in (vit.cls_token, vit.reg_token):
            if token is not None:
                nn.init.trunc_normal_(token, std=0.02, generator=generator)


def _check_rotation(width: int, num_heads: int, patch_drop_rate: float | None) -> None:
    if width // num_heads % 4:
        raise InputError(
            f"use_rot_pos_emb needs heads of a width that 4 divides, but embed_dim {width} and "
            f"num_heads {num_heads} give {width // num_heads}: choose another num_heads"
        )
    if patch_drop_rate:
        raise InputError(
            f"patch_drop_rate {patch_drop_rate} drops patches, and use_rot_pos_emb=True needs all "
            "of them in order: set patch_drop_rate=0"
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

    Raises:
        InputError: If the neck has weights.
    """
    if "neck.bn.weight" in state_dict:
        raise InputError(
            "the checkpoint has neck.bn.weight, which timm cannot load: train the linear probe "
            "with a ClsBatchNormNeck without affine=True"
        )
    heads = {f"{new}.": f"{old}." for old, new in _HEADS.items()}
    renamed = {
        new + name.removeprefix(old): tensor
        for name, tensor in state_dict.items()
        for old, new in {"backbone.model.": "", **heads}.items()
        if name.startswith(old)
    }
    if "neck.bn.running_var" in state_dict:
        mean, var = (state_dict[f"neck.bn.running_{name}"] for name in ("mean", "var"))
        weight = renamed["head.weight"] / (var + 1e-6).sqrt()  # the neck's own eps
        renamed |= {"head.weight": weight, "head.bias": renamed["head.bias"] - weight @ mean}
    return renamed


def classifier_state_dict(state_dict: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Rename the tensors of a timm model to the names in an mmpretrain classifier around it."""
    renamed = {}
    for name, tensor in state_dict.items():
        part, _, rest = name.partition(".")
        renamed[f"{_HEADS[part]}.{rest}" if part in _HEADS else f"backbone.model.{name}"] = tensor
    return renamed


def checkpoint_filter_fn(state_dict: dict[str, Tensor], model: TokenFormerViT) -> dict[str, Tensor]:
    """Check a checkpoint that timm has read, and adapt it to ``model``.

    Args:
        state_dict: State dict of a timm model, or of an mmpretrain classifier of this package,
            with the backbone under ``backbone.model.`` and the head under ``head.fc.``.
        model: Model that will load it.

    Returns:
        The result of :func:`fit_state_dict`.

    Raises:
        InputError: If a model cannot use one of the tensors, a local file is damaged, or the
            weights were trained with another Θ or number of heads, or belong to another depth.
    """
    content = state_dict
    state_dict = content.get("state_dict", content)  # type: ignore[assignment]
    source: Any = model.pretrained_cfg
    where: Any = source.get("file") or source.get("hf_hub_id") or "the checkpoint"
    check_tensors(state_dict, where)
    file = Path(where)
    if source.get("source") == "local-dir":
        file /= WEIGHT_FILES[0]
    given = source.get("state_dict") is not None  # timm prefers it to a file
    if not given and file.suffix == ".safetensors" and file.is_file():
        check_digest(state_dict, file)
    if not given:
        # timm knows the arguments of a model on the hub, but not those of a file.
        own: Any = model
        arguments = trained_arguments(file, content) or own.pretrained_model_args
        check_computation(model, arguments, where)
    fitted = fit_state_dict(state_dict, model)
    # timm draws what is missing if the number of classes differs, and says so at level INFO.
    missing = [
        name
        for name in model.state_dict()
        if name.endswith(".key_param_tokens") and name not in fitted
    ]
    if missing:
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        raise InputError(
            f"{where} has no {missing[0]}{more}: give the weights of a TokenFormer, and create the "
            "model with their depth"
        )
    return fitted


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
