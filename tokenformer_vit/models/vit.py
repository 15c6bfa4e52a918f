"""TokenFormer vision models: timm's VisionTransformer with TokenFormer blocks."""

import copy
import math
from collections.abc import Sequence
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any, cast

import torch
from timm.layers import LayerNorm, PatchEmbed, RmsNorm, RotaryEmbeddingCat
from timm.models.deit import VisionTransformerDistilled
from timm.models.vision_transformer import VisionTransformer
from timm.models.vision_transformer import checkpoint_filter_fn as vit_checkpoint_filter_fn
from torch import Tensor, nn

from tokenformer_vit.errors import InputError
from tokenformer_vit.layers import BlockLayerNorm, Pattention, TokenFormerBlock
from tokenformer_vit.layers.arguments import COUNTS, Counts, counts_by_block, model_pattention_args
from tokenformer_vit.layers.block import TIMM_ONLY, token_arguments
from tokenformer_vit.mmpretrain_names import timm_state_dict
from tokenformer_vit.ops import check_backend

from . import checkpoints
from .sizes import model_sizes, nest_layers, nested_arguments, set_size


class ChannelsLast(nn.Module):
    """A memory format in which pooling is faster; convolutions pass it on."""

    def forward(self, x: Tensor) -> Tensor:
        """Return the same images, (N, C, H, W)."""
        return x.contiguous(memory_format=torch.channels_last)


class ConvStem(PatchEmbed):
    """Patch embedding by 3 × 3 convolutions, each with max-pooling of stride 2 and ReLU.

    ``patch_size`` is the stride of all together: a power of two. All but the last convolution have
    3/8 of ``embed_dim`` channels. Source: CCT, arXiv:2104.05704, Section 3.3.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        height, width = map(int, self.patch_size)
        steps = height.bit_length() - 1
        if steps < 1 or not height == width == 2**steps:
            raise InputError(
                f"stem='conv' needs a patch_size of 2, 4, 8, ..., not {height} × {width}"
            )
        patches = cast(nn.Conv2d, self.proj)
        place: Any = {"device": patches.weight.device, "dtype": patches.weight.dtype}
        inner = [patches.out_channels * 3 // 8] * (steps - 1)
        layers: list[nn.Module] = []
        for width, wider in pairwise([patches.in_channels, *inner, patches.out_channels]):
            conv = nn.Conv2d(width, wider, 3, padding=1, bias=False, **place)
            # ReLU before pooling would give the same, at four times the work of ReLU.
            layers += [conv, nn.MaxPool2d(3, stride=2, padding=1), nn.ReLU()]
        self.proj: Any = nn.Sequential(ChannelsLast(), *layers)


class TokenFormerViT(VisionTransformer):
    """Vision transformer in which every projection of a block is a Pattention layer.

    Args:
        theta: Name of the Θ variant, a key of ``tokenformer_vit.ops.THETAS``.
        norm: Parameters of the LayerNorms inside blocks: ``none``, ``bias`` or ``weight+bias``; or
            ``rms`` for RMSNorms without a weight. The final norm always has its parameters.
        norm_eps: Number that all norms add to the variance or mean square.
        num_qkv_param_tokens: Number of pairs in each query, key and value projection; default
            ``embed_dim``. A list has a number for each block.
        num_proj_param_tokens: Number of pairs in each output projection; default ``embed_dim``.
        num_ffn_param_tokens: Number of pairs in each feed-forward layer; default
            ``mlp_ratio * embed_dim``.
        pattention_args: Arguments of all :class:`~tokenformer_vit.layers.Pattention` layers, such
            as ``learn_tau``; and ``init`` (``released``: as in the authors' code).
        nested: Smaller sizes that are trained as well, as shares of the pairs such as
            ``(0.25, 0.5)``; see :meth:`set_size`.
        nested_kinds: Kinds of layers that have sizes: ``qkv``, ``proj``, ``ffn``; ``None`` for all.
        use_rot_pos_emb: Also rotate queries and keys of patches by row and column. With
            ``dynamic_img_size``, TorchScript cannot compile the model; ``torch.export`` can.
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

    __jit_unused_properties__ = ("sizes",)

    def __init__(
        self,
        theta: str = "gelu_l2",
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
        for name in sorted(kwargs.keys() & {*TIMM_ONLY, "block_fn", "fix_init"}):
            raise TypeError(f"TokenFormer has no linear layers in its blocks: leave out {name!r}")
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
        shared = model_pattention_args(pattention_args, embed_dim, max(depth, 1))
        gain = 1 / math.sqrt(2 * max(depth, 1))

        def block_fn(depth: int, **own: Any) -> TokenFormerBlock:  # timm gives the block's index
            if drop_path_uniform:
                own["drop_path"] = kwargs.get("drop_path_rate", 0.0)
            own |= {"theta": theta, "norm": norm, "norm_eps": norm_eps, **counts[depth]}
            return TokenFormerBlock(**own, pattention_args=shared, residual_init_gain=gain)

        shape: Any = {"embed_dim": embed_dim, "depth": depth, "num_heads": num_heads}
        norm_layer: Any = partial(RmsNorm if norm == "rms" else LayerNorm, eps=norm_eps)
        super().__init__(**shape, block_fn=block_fn, norm_layer=norm_layer, **kwargs)  # type: ignore
        # timm adds the arguments that it is given, once it has loaded the weights.
        self._model_args: dict[str, Any] = {
            "theta": theta,
            "norm": norm,
            "norm_eps": norm_eps,
            "qk_norm": kwargs.get("qk_norm", False),
            "num_heads": num_heads,
            "use_rot_pos_emb": use_rot_pos_emb,
            "pattention_args": dict(pattention_args) if pattention_args else None,
        }
        self.rope: RotaryEmbeddingCat | None = None
        if use_rot_pos_emb:
            place = {name: kwargs.get(name) for name in ("device", "dtype")}
            self._rotate(embed_dim // num_heads, rope_temperature, **place)
        nest_layers(self, nested, nested_kinds)

    def _rotate(self, width: int, temperature: float, **place: Any) -> None:
        self.rope = RotaryEmbeddingCat(
            width,
            temperature=temperature,
            in_pixels=False,
            feat_shape=self.patch_embed.grid_size,
            rotate_half=True,  # compiled for a CPU twice as fast as rotated neighbours
            **place,
        )
        for block in self.blocks:
            attn: Any = block.attn
            # Not one for all: torch.func.functional_call restores the wrong shared buffers.
            attn.rope = copy.deepcopy(self.rope)
            attn.num_prefix_tokens = self.num_prefix_tokens
        if self.dynamic_img_size:  # TorchScript has no super(), which an override would call
            self.patch_embed.register_forward_hook(self._follow_grid)

    def init_weights(self, mode: str = "", needs_reset: bool = True) -> None:
        """Initialise the weights as timm does; see also :func:`draw_prefix_tokens`."""
        super().init_weights(mode, needs_reset)  # type: ignore[arg-type]
        draw_prefix_tokens(self)

    @torch.jit.ignore()
    def no_weight_decay(self) -> set[str]:
        """Name the parameters that exist, of those that timm's ViTs may have."""
        return {name for name in super().no_weight_decay() if getattr(self, name, None) is not None}

    def set_backend(self, backend: str) -> None:
        """Choose one of ``tokenformer_vit.ops.BACKENDS`` for all blocks; it is not saved."""
        check_backend(backend)
        for module in self.blocks.modules():
            if isinstance(module, BlockLayerNorm | Pattention):
                module.backend = backend

    @property
    def sizes(self) -> tuple[float, ...]:
        """The trained sizes, smallest first, then 1.0 for the whole model."""
        return model_sizes(self)

    def set_size(self, size: float | None) -> None:
        """Use only the first pairs of every sized layer; it is not saved with the model.

        With gradient checkpointing, the backward pass needs the same size. The layers hold the
        size, so it is not thread-safe: give each thread a model of its own, by ``extract``.

        Args:
            size: Share of the pairs of a layer, above 0 and at most 1; ``None`` for all pairs. It
                need not be one of ``sizes``.
        """
        set_size(self, size)

    def computation(self) -> dict[str, Any]:
        """Return the arguments that the tensors do not show."""
        return checkpoints.computation_of(self._model_args)

    def record_param_tokens(self) -> None:
        """Update the arguments from which timm rebuilds this model, after its pairs changed."""
        if not len(self.blocks):
            return
        args: dict[str, Any] = self._model_args  # what timm's get_model_args() returns
        args |= token_arguments(self.blocks, args.get("pattention_args"))  # type: ignore[arg-type]
        for name in ("nested", "nested_kinds"):
            args.pop(name, None)
        args |= nested_arguments(self)

    def prune_intermediate_layers(self, *args: Any, **kwargs: Any) -> list[int]:
        """Remove the last blocks as timm does; the model is then saved with those that are left."""
        taken = super().prune_intermediate_layers(*args, **kwargs)
        self._model_args["depth"] = len(self.blocks)
        if isinstance(self.norm, nn.Identity) and isinstance(self.fc_norm, nn.Identity):
            self._model_args["final_norm"] = False
        self.record_param_tokens()
        return taken

    def set_input_size(self, img_size: Any = None, patch_size: Any = None) -> None:
        """Change the size of images and patches; learned and rotary positions follow."""
        super().set_input_size(img_size, patch_size)
        if self.rope is not None:
            self._rotate_over(self.patch_embed.grid_size)  # type: ignore[arg-type]

    def _follow_grid(self, _module: nn.Module, _images: tuple[Tensor], patches: Tensor) -> None:
        with torch.inference_mode(False):  # a later training also reads the new positions
            self._rotate_over(tuple(patches.shape[1:3]))

    def _rotate_over(self, grid: tuple[int, ...]) -> None:
        for rope in (self.rope, *(block.attn.rope for block in self.blocks)):  # type: ignore
            rope.update_feat_shape(grid)  # type: ignore


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


def draw_prefix_tokens(vit: Any, generator: torch.Generator | None = None) -> None:
    """Draw class and register tokens that have no position, with a standard deviation of 0.02.

    With timm's 1e-6 they would stay below the root of the norm's eps, with gradients hundreds of
    times as large as all others. As in DeiT III, arXiv:2204.07118, and ViT-5, arXiv:2602.08071.
    """
    if vit.no_embed_class or vit.pos_embed is None:
        for token in (vit.cls_token, vit.reg_token):
            if token is not None:
                nn.init.trunc_normal_(token, std=0.02, generator=generator)


def checkpoint_filter_fn(state_dict: dict[str, Any], model: Any) -> dict[str, Tensor]:
    """Check a checkpoint that timm has read, and adapt names and sizes to ``model``."""
    state_dict = timm_state_dict(state_dict.get("state_dict", state_dict))
    source = model.pretrained_cfg
    where = source.get("file") or source.get("hf_hub_id") or "the checkpoint"
    if source.get("state_dict") is None:  # timm prefers these tensors to a file
        local = source.get("source") == "local-dir"
        file = Path(where, checkpoints.WEIGHTS) if local else Path(where)
        checkpoints.check_digest(file)
        # timm knows the arguments of a model on the hub, but not those of a file.
        known = checkpoints.description_of(file).get("model_args") or model.pretrained_model_args
        checkpoints.check_computation(model, known, where)
    # timm draws what is missing if the number of classes differs, and says so at level INFO.
    pairs = (name for name in model.state_dict() if name.endswith(".key_param_tokens"))
    missing = [name for name in pairs if name not in state_dict]
    if missing:
        raise InputError(
            f"{where} has no {missing[0]} and {len(missing) - 1} more: give the weights of a "
            "TokenFormer, and create the model with their depth"
        )
    return vit_checkpoint_filter_fn(state_dict, model)
