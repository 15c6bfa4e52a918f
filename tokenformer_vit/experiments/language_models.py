"""The language models of a sweep: what they are built of, and how large they are."""

from collections.abc import Mapping
from typing import Any

import torch
from mmengine.registry import DefaultScope
from mmpretrain.registry import MODELS

from tokenformer_vit.errors import InputError
from tokenformer_vit.language import TokenFormerForCausalLM
from tokenformer_vit.training.language import TokenDataset  # which registers CausalLM, too

from .questions import PAIRS, TextShape


def check_data(cfg: Mapping[str, Any]) -> None:
    """Check that the texts of a config can be read; see :class:`TokenDataset`."""
    for name in ("train_dataloader", "val_dataloader"):
        dataset = cfg[name]["dataset"]
        TokenDataset(dataset["data_root"], dataset["split"])


def build(cfg: Mapping[str, Any], loaded: bool = False) -> Any:
    """Build the language model of a config with no memory behind its weights.

    Args:
        cfg: The config, which starts from no checkpoint.
        loaded: Of models that load weights, which is none of these.
    """
    del loaded
    sizes = {key: cfg["model"][key] for key in ("type", "architecture", "config")}
    with torch.device("meta"), DefaultScope.overwrite_default_scope("mmpretrain"):
        return MODELS.build(sizes)


def shape_of(cfg: Mapping[str, Any], pretraining: str | None = None) -> tuple[TextShape, int]:
    """Return the sizes of a config's TokenFormer, and the number of its parameters.

    Args:
        cfg: The config.
        pretraining: Of a question about trained weights, which none is about language.

    Raises:
        InputError: If the config starts from a checkpoint, or from no TokenFormer.
    """
    del pretraining
    if cfg["model"].get("checkpoint"):
        raise InputError(
            f"model.checkpoint is {cfg['model']['checkpoint']}, but an ablation trains from scratch"
        )
    model = build(cfg)
    if not isinstance(model.model, TokenFormerForCausalLM):
        raise InputError(
            f"the model of the config is a {cfg['model']['architecture']}; an ablation starts from "
            "a TokenFormer"
        )
    lm: Any = model.model.model
    block: Any = lm.blocks[0]
    shape = TextShape(
        embed_dim=lm.config.embed_dim,
        depth=lm.config.depth,
        num_heads=lm.config.num_heads,
        vocab_size=lm.config.vocab_size,
        context_length=lm.config.context_length,
        tie_embeddings=lm.config.tie_embeddings,
        num_qkv_param_tokens=block.attn.query.num_param_tokens,
        num_proj_param_tokens=block.attn.proj.num_param_tokens,
        num_ffn_param_tokens=block.mlp.num_param_tokens,
    )
    return shape, sum(parameter.numel() for parameter in model.parameters())


def end_of(part: Mapping[str, Any]) -> dict[str, Any]:
    """Return the model that a stage ends with, as one of that size from scratch."""
    grown = {key: size for key, size in (part.get("growth") or {}).items() if key in PAIRS}
    config = {**part["config"], **grown}
    return {**part, "config": config, "growth": None, "masks": None, "frozen_stem": False}


def started(part: Mapping[str, Any]) -> dict[str, Any]:
    """Return a model that has its sizes from the checkpoint that it starts from."""
    return {**part, "config": {}}
