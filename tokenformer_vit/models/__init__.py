"""TokenFormer models; importing this package registers the vision models with timm."""

from . import presets  # noqa: F401, registers the models
from .causal_lm import LM_PRESETS, LMConfig, lm_config
from .compilation import compile_blocks
from .from_vit import from_vit, to_vit
from .vit import TokenFormerViT, TokenFormerViTDistilled

__all__ = ["LM_PRESETS", "LMConfig", "TokenFormerViT", "TokenFormerViTDistilled"]
__all__ += ["compile_blocks", "from_vit", "lm_config", "to_vit"]
