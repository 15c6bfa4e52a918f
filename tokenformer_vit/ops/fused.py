"""Pattention with a hand-written backward: the fast path.

A layer keeps its input, its scores in the precision they were computed in, and one or two float32
numbers for each row. README.md in this folder has the derivation and counts what that saves.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .differentiation import is_transformed, needs_gradient
from .kernels import Kernels
from .precision import to_product_dtype
from .reference import pattention_reference
from .theta import find_theta


def flat(tensor: Tensor) -> Tensor:
    """View (..., C) as (R, C), or copy it where no view exists."""
    return tensor.reshape(-1, tensor.shape[-1])


class _Pattention(torch.autograd.Function):
    """Θ(X K_Pᵀ) V_P and its gradients, by ``kernels``; ``plain`` can be differentiated again."""

    # With setup_context, torch.func would accept this function, but PyTorch would inspect the
    # signature of forward at each call: about 25 µs, as long as a small layer takes.
    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any,
        x: Tensor,
        keys: Tensor,
        values: Tensor,
        tau: Tensor,
        eps: float,
        plain: Kernels,
        kernels: Kernels,
    ) -> Tensor:
        weights, kept = kernels.forward(F.linear(x, keys), tau, eps)  # (..., P)
        ctx.eps, ctx.plain, ctx.kernels = eps, plain, kernels
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(x, keys, values, tau, *kept)
        return F.linear(weights, values.t())

    @staticmethod
    def backward(  # type: ignore[override]
        ctx: Any, grad: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        if grad is None:
            return (None,) * 7
        x, keys, values, tau, *saved = ctx.saved_tensors
        kept = tuple(saved)
        kernels = ctx.kernels
        if torch.is_grad_enabled():
            # This gradient will itself be differentiated. The kept tensors have no history, so
            # they are computed again with one, and plain autograd does the rest.
            kernels = ctx.plain
            kept = kernels.forward(F.linear(x, keys), tau, ctx.eps)[1]
        x_needed, keys_needed, values_needed, tau_needed = ctx.needs_input_grad[:4]
        if not (x_needed or keys_needed or tau_needed):
            weights, _ = kernels.forward(kept[0], tau, ctx.eps)
            return None, None, flat(weights).t() @ flat(grad), None, None, None, None

        grad_x = grad_keys = grad_values = grad_tau = None
        weights, grad_scores, dot = kernels.backward(kept, tau, F.linear(grad, values))
        if x_needed:
            grad_x = grad_scores @ keys  # (..., C_in)
        if keys_needed:
            grad_keys = flat(grad_scores).t() @ flat(x)  # (P, C_in)
        if values_needed:
            grad_values = flat(weights).t() @ flat(grad)  # (P, C_out)
        if tau_needed:
            grad_tau = ((dot * kernels.elasticity(kept, ctx.eps)).sum() / tau).to(tau.dtype)
        return grad_x, grad_keys, grad_values, grad_tau, None, None, None


def pattention_fused(
    x: Tensor,
    key_param_tokens: Tensor,
    value_param_tokens: Tensor,
    theta: str,
    tau: Tensor,
    eps: float,
    kernels: Kernels | None = None,
) -> Tensor:
    """Let input tokens attend to parameter tokens, keeping little for the backward.

    Args:
        x: (..., C_in) input tokens.
        key_param_tokens: (P, C_in) keys.
        value_param_tokens: (P, C_out) values.
        theta: Name of the variant, a key of ``THETAS``. A variant without hand-written gradients
            is computed by :func:`pattention_reference`.
        tau: 0-dim tensor, the stored scale of the layer.
        eps: Number added to the divisor of a row, relative to ``tau``.
        kernels: Kernels to use in place of the variant's own.

    Returns:
        (..., C_out) output tokens, of the dtype that PyTorch's ``linear`` gives for ``x``.

    Raises:
        InputError: If the variant is unknown.

    Note:
        The precision is the same as in :func:`pattention_reference`. Operands are cast before the
        autograd function: autocast and torch.compile see the casts, and the input that is kept is
        the one that the product used. No product is computed for an operand that needs no
        gradient, and no autograd function is called if none needs one. Gradients of gradients and
        transforms of ``torch.func`` use plain autograd. Forward-mode differentiation outside
        ``torch.func`` is not supported.

    Source:
        TokenFormer, arXiv:2410.23168, Eq. 4; README.md in this folder derives the gradients.
    """
    operands = (x, key_param_tokens, value_param_tokens)
    plain = find_theta(theta).kernels
    if plain is None or is_transformed():
        return pattention_reference(*operands, theta, tau, eps)
    if kernels is None:
        kernels = plain
    x, keys, values = to_product_dtype(*operands)
    if needs_gradient(x, keys, values, tau):
        return _Pattention.apply(x, keys, values, tau, eps, plain, kernels)
    weights, _ = kernels.forward(F.linear(x, keys), tau, eps)
    return F.linear(weights, values.t())
