"""The config that a question changes, and sizes of its TokenFormer, as config options."""

import copy
import inspect
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from mmengine.registry import DefaultScope
from timm.models import VisionTransformer

from tokenformer_vit.benchmarking.costs import training_flops
from tokenformer_vit.benchmarking.matched import matched_hidden, mlp_ratio
from tokenformer_vit.errors import InputError
from tokenformer_vit.layers.arguments import COUNTS
from tokenformer_vit.models import TokenFormerViT
from tokenformer_vit.models.sizes import find_layers, layer_arguments
from tokenformer_vit.training.config import load_recipe, read_config, set_autocast
from tokenformer_vit.training.engine import MODELS, Config

Options = dict[str, Any]  # by dotted key, as --cfg-options


@dataclass(frozen=True)
class Variant:
    """One row of a table: a training of the base config with some options."""

    label: str  # in tables and charts
    options: Mapping[str, Any] = field(default_factory=dict)
    # An option may have "{start}", the folder of the trained model that it goes on from.
    start: str = ""  # the variant of this model
    compare: tuple[str, ...] = ()  # variants beside which a table shows it
    length: float | None = None  # epochs or iterations; None: the config's
    family: str = ""  # names the variants that have a part of their training in common
    paper: float | None = None  # what the paper reports for it
    config: str = ""  # another shipped config, with its own rate; such a run has no result


class Base:
    """A config with a TokenFormer, for images or language."""

    def __init__(
        self, config: Any, given: Mapping[str, Any], data_root: str | None = None, amp: bool = False
    ) -> None:
        self.source, self.given = read_config(config), given
        self.data_root, self.amp = data_root, amp
        self.cfg = self.with_options({})
        self.language = "backbone" not in self.cfg["model"]
        self.prefix = "model.config." if self.language else "model.backbone."
        whole = self.build(self.cfg)
        self.inner: Any = whole.model.base_model if self.language else whole.backbone.model
        if not find_layers(self.inner):
            kind = type(self.inner).__name__
            raise InputError(f"the model is a {kind}: give a config of a TokenFormer")
        self.counts = {n: layer_arguments(self.inner, None)[n] for n in COUNTS.values()}
        if lists := [name for name, number in self.counts.items() if isinstance(number, list)]:
            raise InputError(f"{lists[0]} differs between blocks: give one number for all of them")
        self.unit = "max_iters" if "max_iters" in self.cfg["train_cfg"] else "max_epochs"
        self.length = self.cfg["train_cfg"][self.unit]
        qkv, proj, ffn = self.counts.values()
        self.pairs_of_block = 3 * qkv + proj + ffn
        self.width = self.inner.config.embed_dim if self.language else self.inner.embed_dim

    def with_options(
        self, options: Mapping[str, Any], length: float | None = None, config: str = ""
    ) -> Config:
        """Return the config with the command line's options, then with these."""
        options, epochs = {**self.given, **options}, None
        if length and self.unit == "max_iters":
            options["train_cfg.max_iters"] = round(length)
        elif length:
            epochs = max(1, round(length))
            options.pop("train_cfg.max_epochs", None)
        how: Any = {"data_root": self.data_root, "epochs": epochs}
        cfg = load_recipe(config or copy.deepcopy(self.source), options, **how)
        if self.amp:
            set_autocast(cfg)
        return cfg

    def build(self, cfg: Config) -> Any:
        """Build the model of a config without weights, to count parameters and FLOPs."""
        model = cfg.model.to_dict()
        if self.language:
            import tokenformer_vit.training.language  # noqa: F401  registers CausalLM

            keys = ("architecture", "config", "sandwich", "distill")
            model = {"type": "CausalLM", **{key: model[key] for key in keys if key in model}}
        else:
            model |= {"train_cfg": None, "data_preprocessor": cfg.data_preprocessor.to_dict()}
            model["backbone"] = {**model["backbone"], "checkpoint_path": "", "growth": None}
        with torch.device("meta"), DefaultScope.overwrite_default_scope("mmpretrain"):
            return MODELS.build(model)

    def flops(self, options: Mapping[str, Any]) -> int:
        """Count the FLOPs of a training on one image or context."""
        model = self.build(self.with_options(options))
        if self.language:
            return training_flops(model.model, model.context_length)
        return training_flops(model.backbone.model)

    def pairs(self, share: float) -> Options:
        """Return a share of all pairs, at least one per layer."""
        counts = self.shares(share).items()
        return {f"{self.prefix}{name}": count for name, count in counts}

    def shares(self, share: float) -> dict[str, int]:
        """Return numbers of pairs, as growth takes them."""
        return {name: max(1, round(share * count)) for name, count in self.counts.items()}

    def sizes(self) -> dict[str, Any]:
        """Return the sizes of the blocks."""
        heads = self.inner.blocks[0].attn.num_heads
        return {"embed_dim": self.width, "depth": len(self.inner.blocks), "num_heads": heads}

    def vit(self, **sizes: Any) -> Options:
        """Return timm's ViT with as many weights in its blocks, and perhaps other sizes."""
        ours = inspect.signature(TokenFormerViT).parameters
        timms = inspect.signature(VisionTransformer).parameters
        backbone = self.cfg["model"]["backbone"]
        kept = {key: backbone[key] for key in backbone if key in timms or key not in ours}
        own = {"model_name": "vit_base_patch16_224", **self.sizes()}
        if backbone.get("stem") == "conv":
            own["model_name"] = "vit_conv_stem"
        embed = self.inner.patch_embed
        own |= {"img_size": embed.img_size[0], "patch_size": embed.patch_size[0]}
        hidden = matched_hidden(self.width, self.pairs_of_block)
        own |= {"mlp_ratio": mlp_ratio(hidden, self.width), **sizes}
        return {"model.backbone": {**kept, **own, "_delete_": True}}
