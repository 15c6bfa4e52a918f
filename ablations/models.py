"""The models of ablations: sizes of a base's TokenFormer, and changes of its config."""

import copy
import inspect
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from timm.models import VisionTransformer

from tokenformer_vit.benchmarking.costs import training_flops
from tokenformer_vit.benchmarking.matched import matched_hidden, mlp_ratio
from tokenformer_vit.errors import InputError
from tokenformer_vit.layers.arguments import COUNTS
from tokenformer_vit.layers.block import token_arguments
from tokenformer_vit.models import TokenFormerViT

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
        remedy = "give --variants without the matched Transformers"
        whole = matched_hidden(self.embed_dim, round(pairs * self.pairs_of_block), remedy)
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
    from mmengine.registry import DefaultScope
    from mmpretrain.registry import MODELS

    model = copy.deepcopy(cfg["model"])
    if is_language(cfg):
        import tokenformer_vit.training.language  # noqa: F401  registers CausalLM

        keys = ("architecture", "config", "sandwich", "distill")
        model = {"type": "CausalLM", **{key: model[key] for key in keys if key in model}}
    else:
        import probes  # noqa: F401  registers its backbones

        model |= {"train_cfg": None, "data_preprocessor": {**cfg["data_preprocessor"]}}
        backbone = timm_part(model["backbone"])
        backbone |= {"type": "ProbeBackbone", "compile": False, "checkpoint_path": ""}
    logging.disable(logging.INFO)  # LoRA logs a line for each layer
    try:
        with torch.device("meta"), DefaultScope.overwrite_default_scope("mmpretrain"):
            return MODELS.build(model)
    finally:
        logging.disable(logging.NOTSET)


def sizes_of(cfg: Config) -> Sizes:
    """Return the sizes of a config's TokenFormer, before pairs are appended."""
    cfg, language = copy.deepcopy(cfg), is_language(cfg)
    if not language:
        cfg["model"]["backbone"]["growth"] = None
    model = build(cfg)
    inner = model.model.base_model if language else model.backbone.model
    blocks = getattr(inner, "blocks", None)
    if blocks is None or not hasattr(blocks[0].mlp, "num_param_tokens"):
        raise InputError(f"the model is a {type(inner).__name__}: give a config of a TokenFormer")
    counts = {name: token_arguments(blocks)[name] for name in PAIRS}
    if lists := [name for name, number in counts.items() if isinstance(number, list)]:
        raise InputError(f"{lists[0]} differs between blocks: give one number for all of them")
    if language:
        names = ("vocab_size", "context_length", "tie_embeddings", *ROTATION)
        outside = {name: getattr(inner.config, name) for name in names}
    else:
        patches = inner.patch_embed
        outside = {"img_size": patches.img_size[0], "patch_size": patches.patch_size[0]}
    width = inner.config.embed_dim if language else inner.embed_dim
    shape = {"embed_dim": width, "depth": len(blocks), "num_heads": blocks[0].attn.num_heads}
    return Sizes(shape, counts, outside, sum(each.numel() for each in model.parameters()))


def flops(cfg: Config) -> int:
    """Count the FLOPs of training a config's model on one image or context, at its full size."""
    model = build(cfg)
    if is_language(cfg):
        return training_flops(model.model, model.context_length)
    return training_flops(model.backbone.model)


def timm_part(backbone: Config) -> Config:
    """Return the config of the timm model, which LoRA wraps in its own."""
    return backbone["module"] if backbone["type"] == "LoRABackbone" else backbone


def several(*changes: Change) -> Change:
    """Apply changes one after the other."""

    def change(cfg: Config, sizes: Sizes) -> None:
        for each in changes:
            each(cfg, sizes)

    return change


base_model = several()  # the config's, or that of the variant that training goes on from


def arguments(**new: Any) -> Change:
    """Set arguments of the model; those in a dict are set within it."""

    def change(cfg: Config, sizes: Sizes) -> None:
        own = cfg["model"]["config" if is_language(cfg) else "backbone"]
        for name, value in new.items():
            own[name] = {**(own.get(name) or {}), **value} if isinstance(value, dict) else value
        if "hidden_features" in new and not is_language(cfg):
            own["mlp_ratio"] = mlp_ratio(own.pop("hidden_features"), own["embed_dim"])

    return change


def lasting(share: float) -> Change:
    """Multiply the length of the training; the learning rate schedule is stretched with it."""

    def change(cfg: Config, sizes: Sizes) -> None:
        key = length_key(cfg)
        cfg["train_cfg"][key] = max(1, round(share * cfg["train_cfg"][key]))

    return change


def hook(type: str, **settings: Any) -> Change:
    """Add a hook to the training."""
    return lambda cfg, sizes: cfg.setdefault("custom_hooks", []).append({"type": type, **settings})


def resized(size: Size) -> Change:
    """Set numbers of pairs, blocks or hidden neurons."""
    return lambda cfg, sizes: arguments(**size(sizes))(cfg, sizes)


def share_of_pairs(share: float) -> Change:
    """Keep a share of all pairs."""
    return resized(lambda sizes: sizes.pairs(share))


def pairs_by_width(attention: float, ffn: float | None = None) -> Change:
    """Set the pairs of each of q, k, v and o, and of feed-forward, as multiples of the width.

    Without ``ffn``, feed-forward has what is left, for as many parameters and FLOPs as the base.
    """

    def pairs(sizes: Sizes) -> dict[str, int]:
        each = round(attention * sizes.embed_dim)
        left = sizes.pairs_of_block - 4 * each if ffn is None else round(ffn * sizes.embed_dim)
        if left < 1:
            raise InputError(f"{attention:g} C each are all pairs: leave this out of --variants")
        return dict(zip(PAIRS, (each, each, left), strict=True))

    return resized(pairs)


def matched_vit(cfg: Config, sizes: Sizes) -> None:
    """Use timm's ViT of the TokenFormer's width and depth with as many weights."""
    ours, timms = map(inspect.signature, (TokenFormerViT, VisionTransformer))
    only_ours = ours.parameters.keys() - timms.parameters.keys()
    backbone = cfg["model"]["backbone"]
    name = "vit_conv_stem" if backbone.get("stem") == "conv" else "vit_base_patch16_224"
    if backbone["model_name"].endswith("_distilled"):
        name = "deit_base_distilled_patch16_224"
    cfg["model"]["backbone"] = {
        **{key: value for key, value in backbone.items() if key not in only_ours},
        "model_name": name,
        **sizes.outside,
        **sizes.blocks,
    }
    resized(Sizes.hidden)(cfg, sizes)


def transformer(positions: str, hidden: Size = Sizes.hidden) -> Change:
    """Use a Transformer of the TokenFormer's width, depth and rotation for language."""

    def change(cfg: Config, sizes: Sizes) -> None:
        rotary = positions == "rotary"
        cfg["model"]["architecture"] = "transformer"
        cfg["model"]["config"] = {
            **{key: v for key, v in sizes.outside.items() if rotary or key not in ROTATION},
            **({"positions": positions} if rotary else {}),
            **sizes.blocks,
            **hidden(sizes),
        }

    return change
