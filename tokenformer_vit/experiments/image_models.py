"""The image classifiers of a sweep: what they are built of, and how large they are."""

import copy
import hashlib
import inspect
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from mmengine.config import Config
from mmengine.registry import DefaultScope
from mmpretrain.registry import MODELS
from timm.models import VisionTransformer

from tokenformer_vit.errors import InputError
from tokenformer_vit.models import TokenFormerViT
from tokenformer_vit.training.config import check_data_folders

from .questions import ImageShape


def check_data(cfg: Mapping[str, Any]) -> None:
    """Check that the images of a config can be trained on; see :func:`check_data_folders`."""
    check_data_folders(Config(cfg), ("train_dataloader", "val_dataloader"))


def build(cfg: Mapping[str, Any], loaded: bool = False) -> Any:
    """Build the classifier of a config with no memory behind its weights, unless it loads some."""
    model = copy.deepcopy({**cfg["model"], "train_cfg": None})  # mixup logs a line
    timms(model["backbone"]).update(compile=False, stem_seed=None)
    preprocessor = copy.deepcopy(cfg["data_preprocessor"])
    logging.disable(logging.INFO)  # of LoRA, a line for each layer
    try:
        with (
            torch.device("cpu" if loaded else "meta"),
            DefaultScope.overwrite_default_scope("mmpretrain"),
        ):
            return MODELS.build({"data_preprocessor": preprocessor, **model})
    finally:
        logging.disable(logging.NOTSET)


def timms(backbone: Mapping[str, Any]) -> Any:
    """Return the config of the timm model, which LoRA has within its own."""
    return backbone["module"] if backbone["type"] == "LoRABackbone" else backbone


def shape_of(cfg: Mapping[str, Any], pretraining: str | None = None) -> tuple[ImageShape, int]:
    """Return the sizes of a config's TokenFormer, and the number of its parameters.

    Where it starts from trained weights they are those before any pair is appended.
    """
    weights = cfg["model"]["backbone"].get("checkpoint_path")
    if pretraining is None and weights:
        raise InputError(
            f"model.backbone.checkpoint_path is {weights}, but an ablation trains from scratch"
        )
    if pretraining is not None:
        if not weights:
            raise InputError(
                "the config starts from no trained weights, but they are what is tuned here: set "
                f"model.backbone.checkpoint_path to those that `{pretraining}` makes"
            )
        backbone = {**cfg["model"]["backbone"], "checkpoint_path": "", "growth": None}
        cfg = {**cfg, "model": {**cfg["model"], "backbone": backbone}}
    model = build(cfg)
    vit = getattr(model.backbone, "model", None)
    if not isinstance(vit, TokenFormerViT):
        raise InputError(
            f"the backbone of the config is {type(vit or model.backbone).__name__}; an ablation "
            "starts from a TokenFormer"
        )
    block = vit.blocks[0]
    own, plain = (
        set(inspect.signature(kind).parameters) for kind in (TokenFormerViT, VisionTransformer)
    )
    shape = ImageShape(
        embed_dim=vit.embed_dim,
        depth=len(vit.blocks),
        num_heads=block.attn.num_heads,
        img_size=vit.patch_embed.img_size[0],
        patch_size=vit.patch_embed.patch_size[0],
        num_qkv_param_tokens=block.attn.query.num_param_tokens,
        num_proj_param_tokens=block.attn.proj.num_param_tokens,
        num_ffn_param_tokens=block.mlp.num_param_tokens,
        own_arguments=frozenset(own - plain - {"kwargs"}),
    )
    return shape, sum(parameter.numel() for parameter in model.parameters())


def start_of(backbone: Mapping[str, Any], pretraining: str) -> dict[str, str] | None:
    """Name the weights from which a backbone starts, and what is in them, if it is from any."""
    path = timms(backbone)["checkpoint_path"]
    if not path:
        return None
    if not Path(path).is_file():
        raise InputError(
            f"there is no file {path} to start from: `{pretraining}` makes it, or give "
            "`--cfg-options model.backbone.checkpoint_path=...`"
        )
    return {"file": path, "sha256": hashlib.sha256(Path(path).read_bytes()).hexdigest()}
