"""TokenFormer models; importing this package registers the vision models with timm."""

from . import presets  # noqa: F401, registers the models
from .causal_block import KVCache
from .causal_lm import TokenFormerDecoder, TokenFormerLM
from .checkpoints import classifier_state_dict, timm_state_dict
from .compilation import BLOCKS, blocks_of, compile_blocks
from .lm_config import LM_PRESETS, LMConfig, lm_config
from .vit import TokenFormerViT, TokenFormerViTDistilled, checkpoint_filter_fn

__all__ = [
    "BLOCKS",
    "LM_PRESETS",
    "KVCache",
    "LMConfig",
    "TokenFormerDecoder",
    "TokenFormerLM",
    "TokenFormerViT",
    "TokenFormerViTDistilled",
    "blocks_of",
    "checkpoint_filter_fn",
    "classifier_state_dict",
    "compile_blocks",
    "lm_config",
    "timm_state_dict",
]
