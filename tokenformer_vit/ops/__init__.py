"""Pattention, and the norm before it, as functions on tensors; needs only torch."""

from .norm import layer_norm
from .pattention import pattention
from .theta import THETAS, Theta, default_tau, find_theta, norm_shares

__all__ = ["THETAS", "Theta", "default_tau", "find_theta", "layer_norm", "norm_shares"]
__all__ += ["pattention"]
