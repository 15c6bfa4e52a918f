"""Change the parameter tokens of a trained model: grow, freeze, merge, prune, nest, mask, top-k."""

from .budgets import choose_counts, usage_loss
from .grow import grow, grow_state_dict
from .initial_pairs import INITS
from .masks import TokenMasks, count_pairs
from .merge import merge
from .nested import extract, nest, reorder
from .new_pairs import freeze_old, join_tokens, open_gates
from .optimizer import MOMENTS, carry_over
from .prune import Usage, measure_usage, prune
from .sparse import set_top_k, top_k
from .tokens import Change, pattention_layers
from .transformer import stack_blocks, widen_mlp

__all__ = [
    "INITS",
    "MOMENTS",
    "Change",
    "TokenMasks",
    "Usage",
    "carry_over",
    "choose_counts",
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
    "set_top_k",
    "stack_blocks",
    "top_k",
    "usage_loss",
    "widen_mlp",
]
