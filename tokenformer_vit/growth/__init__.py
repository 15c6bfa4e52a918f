"""Change the parameter tokens of a trained model: grow, freeze, merge, prune, nest, mask."""

from .grow import grow, grow_state_dict
from .initial_pairs import INITS
from .masks import TokenMasks, count_pairs
from .merge import merge
from .nested import extract, nest, reorder
from .new_pairs import freeze_old, join_tokens, open_gates
from .optimizer import MOMENTS, carry_over
from .prune import Usage, measure_usage, prune
from .tokens import Change, pattention_layers
from .transformer import stack_blocks, widen_mlp

__all__ = [
    "INITS",
    "MOMENTS",
    "Change",
    "TokenMasks",
    "Usage",
    "carry_over",
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
    "stack_blocks",
    "widen_mlp",
]
