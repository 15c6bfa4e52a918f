"""The models of ablations: sizes of a base's TokenFormer, and changes of its config."""

import copy
import functools
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import probes  # noqa: F401  registers its backbones
import torch
from mmengine.logging import MMLogger
from mmengine.registry import DefaultScope
from mmpretrain.registry import MODELS
from timm.models import VisionTransformer

from tokenformer_vit.benchmarking.costs import training_flops
from tokenformer_vit.benchmarking.matched import matched_hidden, mlp_ratio
from tokenformer_vit.errors import InputError
from tokenformer_vit.layers.arguments import COUNTS
from tokenformer_vit.layers.block import layer_arguments
from tokenformer_vit.models import TokenFormerViT
from tokenformer_vit.models.sizes import find_layers

Config = dict[str, Any]
PAIRS = tuple(COUNTS.values())  # names of the numbers of pairs
ROTATION = ("rotary_share", "rotary_base")
TRANSFORMERS = (  # start of other names, name, positions and label
    ("", "transformer", "learned", "Transformer (GPT-2)"),
    ("rotary_", "rotary", "rotary", "Transformer (GPT-NeoX, rotary)"),
)


@dataclass(frozen=True)
class Sizes:
    """The sizes of the TokenFormer of a base config."""

    blocks: Mapping[str, int]  # embed_dim, depth and num_heads
    counts: Mapping[str, int]  # pairs of each kind of layer, by name of the argument
    outside: Mapping[str, Any]  # sizes outside the blocks, such as patch_size or vocab_size
    parameters: int

    @property
    def embed_dim(self) -> int:
        """Width."""
        return self.blocks["embed_dim"]

    @property
    def pairs_of_block(self) -> int:
        """Number of pairs of a block."""
        qkv, proj, ffn = self.counts.values()
        return 3 * qkv + proj + ffn

    def pairs(self, share: float = 1) -> dict[str, int]:
        """Return a share of all pairs, at least one per layer."""
        return {name: max(1, round(share * count)) for name, count in self.counts.items()}

    def hidden(self, share: float = 1, pairs: float = 1) -> dict[str, int]:
        """Return a share of the neurons of the Transformer that has the weights of some pairs."""
        whole = matched_hidden(self.embed_dim, round(pairs * self.pairs_of_block))
        return {"hidden_features": max(1, round(share * whole))}

    def depth(self, share: float) -> dict[str, int]:
        """Return a share of the blocks."""
        return {"depth": max(1, round(share * self.blocks["depth"]))}


Change = Callable[[Config, Sizes], None]  # edits a config; the sizes are the base's
Size = Callable[[Sizes], Mapping[str, int]]  # returns numbers of pairs, blocks or hidden neurons


def is_language(cfg: Config) -> bool:
    """Tell whether a config trains a language model; the others classify images."""
    return cfg["model"]["type"].rpartition(".")[2] in ("CausalLM", "MaskedLM")


def length_key(cfg: Config) -> str:
    """Return the key of the length of a training in ``train_cfg``."""
    return "max_iters" if "max_iters" in cfg["train_cfg"] else "max_epochs"


def build(cfg: Config) -> Any:
    """Build the model of a config without weights, to count parameters and FLOPs."""
    model = copy.deepcopy(cfg["model"])
    if is_language(cfg):
        import tokenformer_vit.training.language  # noqa: F401  registers CausalLM

        keys = ("architecture", "config", "sandwich", "distill")
        model = {"type": "CausalLM", **{key: model[key] for key in keys if key in model}}
    else:
        model |= {"train_cfg": None, "data_preprocessor": {**cfg["data_preprocessor"]}}
        backbone = timm_part(model["backbone"])
        backbone |= {"type": "ProbeBackbone", "checkpoint_path": ""}
    MMLogger.get_instance("models").setLevel("WARNING")  # LoRA logs a line for each layer
    with torch.device("meta"), DefaultScope.overwrite_default_scope("mmpretrain"):
        return MODELS.build(model)


def sizes_of(cfg: Config) -> Sizes:
    """Return the sizes of a config's TokenFormer, before pairs are appended."""
    cfg, language = copy.deepcopy(cfg), is_language(cfg)
    cfg["model"].get("backbone", {}).pop("growth", None)
    model = build(cfg)
    inner = model.model.base_model if language else model.backbone.model
    if not find_layers(inner):
        raise InputError(f"the model is a {type(inner).__name__}: give a config of a TokenFormer")
    counts = {name: layer_arguments(inner.blocks, None)[name] for name in PAIRS}
    if lists := [name for name, number in counts.items() if isinstance(number, list)]:
        raise InputError(f"{lists[0]} differs between blocks: give one number for all of them")
    if language:
        names = ("vocab_size", "context_length", "tie_embeddings", *ROTATION)
        outside, width = (
            {name: getattr(inner.config, name) for name in names},
            inner.config.embed_dim,
        )
    else:
        image, patch = inner.patch_embed.img_size[0], inner.patch_embed.patch_size[0]
        outside, width = {"img_size": image, "patch_size": patch}, inner.embed_dim
    heads = inner.blocks[0].attn.num_heads
    blocks = {"embed_dim": width, "depth": len(inner.blocks), "num_heads": heads}
    return Sizes(blocks, counts, outside, sum(each.numel() for each in model.parameters()))


def flops(cfg: Config) -> int:
    """Count the FLOPs of training a config's model on one image or context, at its full size."""
    model = build(cfg)
    if is_language(cfg):
        return training_flops(model.model, model.context_length)
    return training_flops(model.backbone.model)


def timm_part(backbone: Config) -> Config:
    """Return the config of the timm model, which LoRA wraps in its own."""
    return backbone["module"] if backbone["type"] == "LoRABackbone" else backbone


def factory(function: Callable[..., None]) -> Callable[..., Change]:
    """Let a function be called with its settings alone, for a change by these."""

    @functools.wraps(function)
    def make(*args: Any, **settings: Any) -> Change:
        return lambda cfg, sizes: function(cfg, sizes, *args, **settings)

    return make


@factory
def several(cfg: Config, sizes: Sizes, *changes: Change) -> None:
    """Apply changes one after the other."""
    for change in changes:
        change(cfg, sizes)


base_model = several()  # the config's, or that of the variant that training goes on from


@factory
def arguments(cfg: Config, sizes: Sizes, **new: Any) -> None:
    """Set arguments of the model; those in a dict are set within it."""
    own = cfg["model"]["config" if is_language(cfg) else "backbone"]
    for name, value in new.items():
        own[name] = {**(own.get(name) or {}), **value} if isinstance(value, dict) else value
    if "hidden_features" in new and not is_language(cfg):
        own["mlp_ratio"] = mlp_ratio(own.pop("hidden_features"), own["embed_dim"])


@factory
def lasting(cfg: Config, sizes: Sizes, share: float) -> None:
    """Multiply the length of the training; a decay that begins in its second half moves with it."""
    key = length_key(cfg)
    length = cfg["train_cfg"][key]
    new = cfg["train_cfg"][key] = max(1, round(share * length))
    for part in cfg.get("param_scheduler") or []:
        same_unit = part.get("by_epoch", True) == (key == "max_epochs")
        if same_unit and part.get("begin", 0) > length / 2:
            moved = part["begin"] * new / length
            part["begin"] = moved if part.get("convert_to_iter_based") else int(moved)


@factory
def hook(cfg: Config, sizes: Sizes, type: str, **settings: Any) -> None:
    """Add a hook to the training."""
    cfg.setdefault("custom_hooks", []).append({"type": type, **settings})


@factory
def resized(cfg: Config, sizes: Sizes, size: Size) -> None:
    """Set numbers of pairs, blocks or hidden neurons."""
    arguments(**size(sizes))(cfg, sizes)


@factory
def fewer_pairs(cfg: Config, sizes: Sizes, share: float) -> None:
    """Keep a share of all pairs."""
    arguments(**sizes.pairs(share))(cfg, sizes)


@factory
def pairs_by_width(cfg: Config, sizes: Sizes, attention: float, ffn: float) -> None:
    """Set the pairs of each of q, k, v and o, and of feed-forward, as multiples of the width."""
    new = (round(times * sizes.embed_dim) for times in (attention, attention, ffn))
    arguments(**dict(zip(PAIRS, new, strict=True)))(cfg, sizes)


def matched_vit(cfg: Config, sizes: Sizes) -> None:
    """Use timm's ViT of the TokenFormer's width and depth with as many weights."""
    ours = inspect.signature(TokenFormerViT).parameters
    timms = inspect.signature(VisionTransformer).parameters
    backbone = cfg["model"]["backbone"]
    name = "vit_conv_stem" if backbone.get("stem") == "conv" else "vit_base_patch16_224"
    if backbone["model_name"].endswith("_distilled"):
        assert name == "vit_base_patch16_224", "there is no distilled ViT with such a stem"
        name = "deit_base_distilled_patch16_224"
    cfg["model"]["backbone"] = {
        **{key: backbone[key] for key in backbone if key in timms or key not in ours},
        "model_name": name,
        **sizes.outside,
        **sizes.blocks,
    }
    arguments(**sizes.hidden())(cfg, sizes)


@factory
def transformer(cfg: Config, sizes: Sizes, positions: str) -> None:
    """Use a Transformer of the TokenFormer's width, depth, weights and rotation for language."""
    rotary = positions == "rotary"
    cfg["model"]["architecture"] = "transformer"
    cfg["model"]["config"] = {
        **{key: v for key, v in sizes.outside.items() if rotary or key not in ROTATION},
        **({"positions": positions} if rotary else {}),
        **sizes.blocks,
        **sizes.hidden(),
    }
