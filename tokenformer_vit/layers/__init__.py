"""The modules of a TokenFormer."""

from .attention import Attention
from .block import TokenFormerBlock
from .norm import BlockLayerNorm, BlockNorm, BlockRMSNorm
from .pattention import Pattention

__all__ = [
    "Attention",
    "BlockLayerNorm",
    "BlockNorm",
    "BlockRMSNorm",
    "Pattention",
    "TokenFormerBlock",
]
