"""TokenFormer models; importing this package registers the vision models with timm."""

from . import presets  # noqa: F401, registers the models
from .causal_lm import LM_PRESETS, KVCache, LMConfig, TokenFormerDecoder, TokenFormerLM, lm_config
from .compilation import compile_blocks
from .from_vit import from_vit, to_vit
from .vit import TokenFormerViT, TokenFormerViTDistilled

__all__ = ["LM_PRESETS", "KVCache", "LMConfig", "TokenFormerDecoder", "TokenFormerLM"]
__all__ += ["TokenFormerViT", "TokenFormerViTDistilled", "compile_blocks", "from_vit", "lm_config"]
__all__ += ["to_vit"]
