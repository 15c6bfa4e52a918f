"""Change the parameter tokens of a trained model: grow, freeze, prune, nest, use some pairs."""

from .grow import INITS, grow, join_tokens
from .prune import Usage, extract, measure_usage, nest, prune, reorder, use_pairs
from .refit import refit, removal_costs
from .resize import MOMENTS, count_pairs, freeze_old, pattention_layers

__all__ = [
    "INITS",
    "MOMENTS",
    "Usage",
    "count_pairs",
    "extract",
    "freeze_old",
    "grow",
    "join_tokens",
    "measure_usage",
    "nest",
    "pattention_layers",
    "prune",
    "refit",
    "removal_costs",
    "reorder",
    "use_pairs",
]
