"""What the parameter tokens of a trained model respond to: which patches, in which images."""

from .drawing import draw_exemplars, draw_maps
from .tokens import MOST, find_exemplars, map_tokens, token_weights

__all__ = [
    "MOST",
    "draw_exemplars",
    "draw_maps",
    "find_exemplars",
    "map_tokens",
    "token_weights",
]
