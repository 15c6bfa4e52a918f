"""What may be done to a trained model's parameter tokens."""

from .grow import INITS, freeze_old, grow, grow_state_dict, open_gates
from .optimizer import MOMENTS, carry_over
from .tokens import Change, pattention_layers
from .vit import stack_blocks, widen_mlp

__all__ = [
    "INITS",
    "MOMENTS",
    "Change",
    "carry_over",
    "freeze_old",
    "grow",
    "grow_state_dict",
    "open_gates",
    "pattention_layers",
    "stack_blocks",
    "widen_mlp",
]
