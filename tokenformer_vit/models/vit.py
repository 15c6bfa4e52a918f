"""TokenFormer vision models: timm's VisionTransformer with TokenFormer blocks."""

from collections.abc import Mapping, Sequence
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any, cast

import torch
from timm.layers import LayerNorm, PatchDropoutWithIndices, PatchEmbed, RmsNorm, RotaryEmbeddingCat
from timm.models import checkpoint
from timm.models.deit import VisionTransformerDistilled
from timm.models.vision_transformer import VisionTransformer, feature_take_indices
from timm.models.vision_transformer import checkpoint_filter_fn as vit_checkpoint_filter_fn
from torch import Tensor, nn

from tokenformer_vit.errors import InputError
from tokenformer_vit.layers import TokenFormerBlock
from tokenformer_vit.layers.arguments import COUNTS, Counts, counts_by_block, model_pattention_args
from tokenformer_vit.layers.block import IGNORED_TIMM_ARGUMENTS
from tokenformer_vit.mmpretrain_names import timm_state_dict

from . import checkpoints
from .sizes import common, layer_arguments, model_sizes, nest_layers, set_size


class ChannelsLast(nn.Module):
    """A memory format in which pooling is faster; convolutions pass it on."""

    def forward(self, x: Tensor) -> Tensor:
        """Return the same images, (N, C, H, W)."""
        if torch.jit.is_scripting():
            return x
        elif not torch.compiler.is_exporting():  # which cannot guess a format for any batch size
            x = x.permute(0, 2, 3, 1).contiguous()  # functorch knows no memory formats
            x = x.permute(0, 3, 1, 2)
        return x


class ConvStem(PatchEmbed):
    """Patch embedding by 3 × 3 convolutions, each with max-pooling and ReLU, arXiv:2104.05704."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        height, width = map(int, self.patch_size)
        steps = height.bit_length() - 1
        if steps < 1 or not height == width == 2**steps:  # the stride of all together
            raise InputError(f"a stem needs a patch_size of 2, 4, 8, ..., not {height} × {width}")
        patches = cast(nn.Conv2d, self.proj)
        inner = [patches.out_channels * 3 // 8] * (steps - 1)
        layers: list[nn.Module] = []
        for width, wider in pairwise([patches.in_channels, *inner, patches.out_channels]):
            conv = nn.Conv2d(width, wider, 3, padding=1, bias=False)
            # ReLU before pooling would give the same, at four times the work of ReLU.
            layers += [conv, nn.MaxPool2d(3, stride=2, padding=1), nn.ReLU()]
        self.proj: Any = nn.Sequential(ChannelsLast(), *layers).to(patches.weight)


class TokenFormerViT(VisionTransformer):
    """Vision transformer in which every projection of a block is a Pattention layer.

    Args:
        theta: Name of the Θ variant, a key of ``tokenformer_vit.ops.THETAS``; or a dict of names
            for ``qkv``, ``proj`` and ``ffn``.
        norm: Parameters of the LayerNorms inside blocks: ``none``, ``bias`` or ``weight+bias``; or
            of RMSNorms, ``rms`` (none) or ``rms+weight``. The final norm always has its parameters.
        norm_eps: Number that all norms add to the variance or mean square.
        num_qkv_param_tokens: Number of pairs in each query, key and value projection; default
            ``embed_dim``. A list has a number for each block.
        num_proj_param_tokens: Number of pairs in each output projection; default ``embed_dim``.
        num_ffn_param_tokens: Number of pairs in each feed-forward layer; default
            ``mlp_ratio * embed_dim``.
        pattention_args: Arguments of all :class:`~tokenformer_vit.layers.Pattention` layers, such
            as ``learn_tau`` or ``bias``, each one value or a dict as for ``theta``; and ``init``
            (``released``: as in the authors' code).
        nested: Smaller sizes that are trained as well, as shares of the pairs such as
            ``(0.25, 0.5)``; see :meth:`set_size`.
        nested_kinds: Kinds of layers that have sizes: ``qkv``, ``proj``, ``ffn``; ``None`` for all.
        use_rot_pos_emb: Also rotate queries and keys of patches by row and column.
        rope_temperature: Base of the rotary frequencies.
        stem: ``patch``: one projection of each patch; or ``conv``: :class:`ConvStem`.
        drop_path_uniform: Give all blocks ``drop_path_rate``; by default it rises from 0.
        embed_dim, depth, num_heads, **kwargs: Arguments of timm's ``VisionTransformer``, except
            those of linear layers (``qkv_bias``, ``mlp_layer``, ...).

    Raises:
        TypeError: If an argument is unknown or belongs to linear layers.
        InputError: If a value is unknown or out of range, or a list has not ``depth`` entries.

    Shape:
        (B, in_chans, H, W) -> (B, num_classes).

    Source:
        TokenFormer, arXiv:2410.23168, Section 3 and Table 4. Its vision models are trained as in
        MAE, arXiv:2111.06377, Table 11, which also gives the LayerNorm eps of 1e-6.
    """

    __jit_unused_properties__ = ("sizes", "_model_args")
    sizes, set_size = property(model_sizes), set_size

    def __init__(
        self,
        theta: str | Mapping[str, str] = "gelu_l2",
        norm: str = "none",
        norm_eps: float = 1e-6,
        num_qkv_param_tokens: Counts = None,
        num_proj_param_tokens: Counts = None,
        num_ffn_param_tokens: Counts = None,
        pattention_args: dict[str, Any] | None = None,
        nested: Sequence[float] = (),
        nested_kinds: Sequence[str] | None = None,
        use_rot_pos_emb: bool = False,
        rope_temperature: float = 10000.0,
        embed_dim: int = 768,
        depth: int = 12,
        num_heads: int = 12,
        stem: str = "patch",
        drop_path_uniform: bool = False,
        **kwargs: Any,
    ) -> None:
        for name in sorted(kwargs.keys() & {*IGNORED_TIMM_ARGUMENTS, "block_fn", "fix_init"}):
            raise TypeError(
                f"blocks have no linear layers and choose norms by `norm`: leave out {name!r}"
            )
        if kwargs.get("global_pool") in ("map", "prr"):
            raise TypeError("attention pools have linear layers: choose another global_pool")
        if rope_temperature <= 0:  # else every output is NaN
            raise InputError(f"rope_temperature must be positive, but got {rope_temperature!r}")
        if stem not in ("patch", "conv"):
            raise InputError(f"stem must be patch or conv, but got {stem!r}")
        if stem == "conv":
            kwargs["embed_layer"] = ConvStem
        given = (num_qkv_param_tokens, num_proj_param_tokens, num_ffn_param_tokens)
        counts = counts_by_block(depth, **dict(zip(COUNTS.values(), given, strict=True)))
        shared = model_pattention_args(pattention_args, embed_dim, depth)
        gain = (2 * depth) ** -0.5

        def block_fn(depth: int, **own: Any) -> TokenFormerBlock:  # timm gives the block's index
            if drop_path_uniform:
                own["drop_path"] = kwargs.get("drop_path_rate", 0.0)
            own |= {"theta": theta, "norm": norm, "norm_eps": norm_eps, **counts[depth]}
            return TokenFormerBlock(**own, pattention_args=shared, residual_init_gain=gain)

        shape: Any = {"embed_dim": embed_dim, "depth": depth, "num_heads": num_heads}
        norm_layer: Any = partial(RmsNorm if norm.startswith("rms") else LayerNorm, eps=norm_eps)
        super().__init__(**shape, block_fn=block_fn, norm_layer=norm_layer, **kwargs)  # type: ignore
        self._model_args = {"pattention_args": dict(pattention_args) if pattention_args else None}
        self.rope: RotaryEmbeddingCat | None = None
        if use_rot_pos_emb:
            self.rope = RotaryEmbeddingCat(
                embed_dim // num_heads,
                temperature=rope_temperature,
                in_pixels=False,
                feat_shape=None if self.dynamic_img_size else self.patch_embed.grid_size,  # type: ignore
                rotate_half=True,  # compiled for a CPU twice as fast as rotated neighbours
                device=kwargs.get("device"),
                dtype=kwargs.get("dtype"),
            )
            rate = kwargs.get("patch_drop_rate", 0.0)
            self.patch_drop = PatchDropoutWithIndices(rate, self.num_prefix_tokens)
        nest_layers(self, nested, nested_kinds)
        self.register_load_state_dict_pre_hook(checkpoints.check_tensors)

    def embed(self, images: Tensor) -> tuple[Tensor, Tensor | None]:
        """Return the (B, N, C) tokens of images, and the rotary positions of their patches."""
        x = self.patch_embed(images)
        if self.rope is None:
            return self.norm_pre(self.patch_drop(self._pos_embed(x))), None
        # Without a shape, it returns what it has kept for a fixed size.
        rope = self.rope.get_embed([x.shape[1], x.shape[2]] if self.dynamic_img_size else None)
        x, kept = self.patch_drop(self._pos_embed(x))
        if kept is not None:
            rope = rope[kept][:, None]  # (B, 1, kept patches, 2 head_dim)
        return self.norm_pre(x), rope

    def forward_features(
        self, x: Tensor, attn_mask: Tensor | None = None, is_causal: bool = False
    ) -> Tensor:
        """Map (B, in_chans, H, W) images to the (B, N, C) tokens that a head reads."""
        x, rope = self.embed(x)
        for block in self.blocks:
            if self.grad_checkpointing and not torch.jit.is_scripting():
                x = checkpoint(block, x, attn_mask, is_causal, rope)
            else:
                x = block(x, attn_mask, is_causal, rope)
        return self.norm(x)

    def forward_intermediates(
        self,
        x: Tensor,
        indices: int | list[int] | None = None,
        return_prefix_tokens: bool = False,
        norm: bool = False,
        stop_early: bool = False,
        output_fmt: str = "NCHW",
        intermediates_only: bool = False,
        output_dict: bool = False,
        attn_mask: Tensor | None = None,
        is_causal: bool = False,
    ) -> Any:
        """Return the outputs of blocks; arguments and results are those of timm's method."""
        if output_fmt not in ("NCHW", "NLC"):
            raise InputError(f"output_fmt must be NCHW or NLC, but got {output_fmt!r}")
        taken, last = feature_take_indices(len(self.blocks), indices)
        grid = self.patch_embed.dynamic_feat_size(x.shape[-2:])  # type: ignore[arg-type]
        x, rope = self.embed(x)
        outputs = []
        for index, block in enumerate(self.blocks[: last + 1] if stop_early else self.blocks):
            run = partial(checkpoint, block) if self.grad_checkpointing else block
            x = run(x, attn_mask, is_causal, rope)
            if index in taken:
                outputs.append(self.norm(x) if norm else x)
        prefix = [y[:, : self.num_prefix_tokens] for y in outputs]
        patches = [y[:, self.num_prefix_tokens :] for y in outputs]
        if output_fmt == "NCHW":
            patches = [y.transpose(1, 2).unflatten(2, grid).contiguous() for y in patches]
        with_prefix = return_prefix_tokens and self.num_prefix_tokens > 0
        if output_dict:
            last_one = {} if intermediates_only else {"image_features": self.norm(x)}
            before = {"image_intermediates_prefix": prefix} if with_prefix else {}
            return {"image_intermediates": patches, **before, **last_one}
        found: list[Any] = list(zip(patches, prefix, strict=True)) if with_prefix else patches
        return found if intermediates_only else (self.norm(x), found)

    def init_weights(self, mode: str = "", needs_reset: bool = True) -> None:
        """Initialise the weights as timm does, except class and register tokens."""
        super().init_weights(mode, needs_reset)  # type: ignore[arg-type]
        # As DeiT III, arXiv:2204.07118. Without a position, tokens of timm's 1e-6 would stay below
        # the root of the norm's eps, with gradients hundreds of times as large as all others.
        if self.no_embed_class or self.pos_embed is None:
            for token in (self.cls_token, self.reg_token):
                if token is not None:
                    nn.init.trunc_normal_(token, std=0.02)

    @property
    def _model_args(self) -> dict[str, Any]:
        """The arguments that rebuild the model: what timm recorded, and what the layers say now."""
        blocks: Any = self.blocks
        args = {**self._recorded_args, "depth": len(blocks)}
        args["use_rot_pos_emb"] = self.rope is not None
        if isinstance(self.norm, nn.Identity) and isinstance(self.fc_norm, nn.Identity):
            args["final_norm"] = False
        norms = [norm for block in blocks for norm in (block.norm1, block.norm2)]
        return {
            **args,
            **layer_arguments(self, args["pattention_args"]),
            "norm": common(norm.affine for norm in norms),
            "norm_eps": common(norm.eps for norm in norms),
            "qk_norm": common(not isinstance(b.attn.q_norm, nn.Identity) for b in blocks),
            "num_heads": common(block.attn.num_heads for block in blocks),
        }

    @_model_args.setter
    def _model_args(self, args: dict[str, Any]) -> None:
        self._recorded_args = args

    def computation(self) -> dict[str, Any]:
        """Return the arguments that the tensors do not show."""
        return checkpoints.computation_of(self._model_args)

    def set_input_size(self, img_size: Any = None, patch_size: Any = None) -> None:
        """Change the size of images and patches; learned and rotary positions follow."""
        super().set_input_size(img_size, patch_size)
        if self.rope is not None:
            self.rope.update_feat_shape(self.patch_embed.grid_size)  # type: ignore[arg-type]


class TokenFormerViTDistilled(TokenFormerViT, VisionTransformerDistilled):
    """TokenFormer with a distillation token and a second head, as timm has it for DeiT.

    A teacher trains the second head (``head_dist``), which reads the distillation token. Outputs
    are the mean of both heads; in training, after ``set_distilled_training()``, the outputs of
    both. Source: DeiT, arXiv:2012.12877, Section 4. The arguments are those of TokenFormerViT.
    """

    def __init__(self, **kwargs: Any) -> None:
        # timm would ignore some of these, and drop the distillation token with the patches.
        usual = {"reg_tokens": 0, "pos_embed": "learn", "no_embed_class": False}
        usual |= {"fc_norm": None, "patch_drop_rate": 0.0}
        for name, value in usual.items():
            if kwargs.get(name, value) not in (value, False):  # timm takes False for None
                raise InputError(
                    f"{name} is {kwargs[name]!r}, but distilled heads read exactly a class and a "
                    f"distillation token: leave it at {value!r}"
                )
        super().__init__(**kwargs)


def checkpoint_filter_fn(state_dict: dict[str, Any], model: Any) -> dict[str, Tensor]:
    """Check a checkpoint that timm has read, and adapt names and sizes to ``model``."""
    state_dict = timm_state_dict(state_dict.get("state_dict", state_dict))
    source = model.pretrained_cfg
    where = source.get("file") or source.get("hf_hub_id") or "the checkpoint"
    if source.get("state_dict") is None:  # timm prefers these tensors to a file
        file = checkpoints.find_weights(Path(where))
        checkpoints.check_digest(file)
        # timm knows the arguments of a model on the hub, but not those of a file.
        known = checkpoints.description_of(file).get("model_args") or model.pretrained_model_args
        checkpoints.check_computation(model, known, where)
    # timm draws what is missing if the number of classes differs, and says so at level INFO.
    needed = {name for name in model.state_dict() if name.endswith(".key_param_tokens")}
    if missing := sorted(needed - state_dict.keys()):
        raise InputError(
            f"{where} has no {missing[0]} and {len(missing) - 1} more: give the weights of a "
            "TokenFormer, and create the model with their depth"
        )
    return vit_checkpoint_filter_fn(state_dict, model)
