"""Change the parameter tokens of a trained model: grow, freeze, merge, prune, nest, mask."""

from .grow import INITS, freeze_old, grow, grow_state_dict, join_tokens, open_gates
from .masks import TokenMasks, count_pairs
from .merge import merge
from .nested import extract, nest, reorder
from .prune import Usage, measure_usage, prune
from .resize import MOMENTS, pattention_layers

__all__ = [
    "INITS",
    "MOMENTS",
    "TokenMasks",
    "Usage",
    "count_pairs",
    "extract",
    "freeze_old",
    "grow",
    "grow_state_dict",
    "join_tokens",
    "measure_usage",
    "merge",
    "nest",
    "open_gates",
    "pattention_layers",
    "prune",
    "reorder",
]
