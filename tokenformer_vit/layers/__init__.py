"""The modules of a TokenFormer."""

from .attention import Attention
from .block import TokenFormerBlock
from .norm import BlockLayerNorm, BlockRMSNorm
from .pattention import Pattention

__all__ = ["Attention", "BlockLayerNorm", "BlockRMSNorm", "Pattention", "TokenFormerBlock"]
