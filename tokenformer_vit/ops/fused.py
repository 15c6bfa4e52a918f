"""Pattention with a hand-written backward: the fast path.

A layer keeps its input, its scores in the precision they were computed in, and one or two float32
numbers for each row. README.md in this folder has the derivation and counts what that saves.

Layers with the same input can share products: query, key and value do. S is the number of layers,
and each has a segment of the scores (..., S, P). A single layer has scores (..., P), because views
take a good part of the time of a small layer.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .differentiation import is_batched, is_transformed, needs_gradient
from .kernels import Kernels
from .precision import to_product_dtype
from .products import linear, matmul, transposed_matmul
from .reference import pattention_reference
from .theta import find_theta


def flat(tensor: Tensor) -> Tensor:
    """View (..., C) as (R, C), or copy it where no view exists."""
    return tensor.reshape(-1, tensor.shape[-1])


def _scores(x: Tensor, keys: Sequence[Tensor]) -> Tensor:
    if len(keys) == 1:
        return linear(x, keys[0])  # (..., P)
    whole = torch.cat(to_product_dtype(*keys))  # (S · P, C_in)
    return linear(x, whole).view(*x.shape[:-1], len(keys), len(keys[0]))  # (..., S, P)


def _segments(weights: Tensor, count: int) -> tuple[Tensor, ...]:
    """View the weights of each layer, (..., P)."""
    return (weights,) if count == 1 else weights.unbind(-2)


def _joined_again(keys: Sequence[Tensor]) -> Tensor:
    """Return the (S · P, C_in) keys for the backward.

    If this were written as in the forward, torch.compile would join them once and keep the copy.
    """
    if len(keys) == 1:
        return keys[0]
    return torch.cat([own.flatten() for own in keys]).view(-1, keys[0].shape[-1])


def _outputs(weights: Tensor, values: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Multiply the weights of each layer by its values, without a copy."""
    segments = _segments(weights, len(values))
    return tuple([matmul(own, value) for own, value in zip(segments, values, strict=True)])


def _grad_weights(grads: Sequence[Tensor], values: Sequence[Tensor]) -> Tensor:
    """Return the gradients of the weights, given those of the outputs."""
    if len(grads) == 1:
        return linear(grads[0], values[0])  # (..., P)
    pairs = [(flat(grad), value.t()) for grad, value in zip(grads, values, strict=True)]
    shape = (*grads[0].shape[:-1], len(values), len(values[0]))
    if (
        torch.is_grad_enabled()
        or torch.compiler.is_compiling()
        # Autograd gives plain zeros for an output that a batch of gradients does not use.
        or any(type(grad) is not Tensor or is_batched(grad) for grad in grads)
    ):
        # torch.compile lets products write into the result of cat, if nothing is in between.
        return torch.cat([grad @ value for grad, value in pairs], dim=1).view(shape)
    whole = grads[0].new_empty(shape)
    for (grad, value), own in zip(pairs, whole.view(-1, *shape[-2:]).unbind(1), strict=True):
        torch.mm(grad, value, out=own)  # cat would copy it
    return whole


class _Pattention(torch.autograd.Function):
    """Θ(X Kᵢᵀ) Vᵢ and its gradients, by ``kernels``; ``plain`` can be differentiated again."""

    # With setup_context, torch.func would accept this function, but PyTorch would inspect the
    # signature of forward at each call, which would slow down small layers.
    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any,
        x: Tensor,
        tau: Tensor,
        eps: float,
        plain: Kernels,
        kernels: Kernels,
        *tokens: Tensor,
    ) -> tuple[Tensor, ...]:
        S = len(tokens) // 2
        weights, kept = kernels.forward(_scores(x, tokens[:S]), tau, eps)  # (..., S, P)
        ctx.eps, ctx.plain, ctx.kernels = eps, plain, kernels
        ctx.save_for_backward(x, tau, *tokens, *kept)
        return _outputs(weights, tokens[S:])

    @staticmethod
    def backward(  # type: ignore[override]
        ctx: Any, *grads: Tensor
    ) -> tuple[Tensor | None, ...]:
        S = len(grads)
        x, tau, *saved = ctx.saved_tensors
        keys, values, kept = saved[:S], saved[S : 2 * S], tuple(saved[2 * S :])
        # All kernels keep the same tensors, but only plain PyTorch takes batched gradients.
        kernels = ctx.plain if any(map(is_batched, grads)) else ctx.kernels
        if torch.is_grad_enabled():
            # This gradient will itself be differentiated. The kept tensors have no history, so
            # they are computed again with one, and plain autograd does the rest.
            kernels = ctx.plain
            kept = kernels.forward(_scores(x, keys), tau, ctx.eps)[1]
        x_needed, tau_needed, _, _, _, *tokens_needed = ctx.needs_input_grad
        keys_needed, values_needed = any(tokens_needed[:S]), tokens_needed[S:]

        grad_x = grad_tau = None
        grad_keys: Sequence[Tensor | None] = [None] * S
        if not (x_needed or keys_needed or tau_needed):
            weights, _ = kernels.forward(kept[0], tau, ctx.eps)
        else:
            weights, grad_scores, dot = kernels.backward(kept, tau, _grad_weights(grads, values))
            if S > 1:
                grad_scores = grad_scores.reshape(*x.shape[:-1], S * len(keys[0]))  # (..., S · P)
            if x_needed:
                grad_x = matmul(grad_scores, _joined_again(keys))  # (..., C_in)
            if keys_needed:
                together = transposed_matmul(flat(grad_scores), flat(x))  # (S · P, C_in)
                grad_keys = together.split(len(keys[0]))
            if tau_needed:
                change = dot * kernels.elasticity(kept, ctx.eps)  # (..., S, 1)
                grad_tau = (change.sum_to_size(tau.shape) / tau).to(tau.dtype)
        grad_values = [
            transposed_matmul(flat(own), flat(grad)) if needed else None  # (P, C_out)
            for own, grad, needed in zip(_segments(weights, S), grads, values_needed, strict=True)
        ]
        return grad_x, grad_tau, None, None, None, *grad_keys, *grad_values


def pattention_fused(
    x: Tensor,
    key_param_tokens: Tensor,
    value_param_tokens: Tensor,
    theta: str,
    tau: Tensor,
    eps: float,
    kernels: Kernels | None = None,
) -> Tensor:
    """Compute a Pattention layer, keeping little for the backward.

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
        (..., C_out) output tokens, of the dtype that PyTorch's ``linear`` gives.

    Raises:
        InputError: If the variant is unknown.

    Note:
        The precision is the same as in :func:`pattention_reference`. Operands are cast before the
        autograd function: torch.compile sees the casts, and the input that is kept is the one that
        the product used. No product is computed for an operand that needs no
        gradient, and no autograd function is called if none needs one. Gradients of gradients and
        transforms of ``torch.func`` use plain autograd. Forward-mode differentiation outside
        ``torch.func`` is not supported.

    Source:
        TokenFormer, arXiv:2410.23168, Eq. 4; README.md in this folder derives the gradients.
    """
    plain = find_theta(theta).kernels
    if plain is None or is_transformed():
        return pattention_reference(x, key_param_tokens, value_param_tokens, theta, tau, eps)
    if kernels is None:
        kernels = plain
    if torch.is_grad_enabled() and needs_gradient(x, key_param_tokens, value_param_tokens, tau):
        x, *tokens = to_product_dtype(x, key_param_tokens, value_param_tokens)
        return _Pattention.apply(x, tau, eps, plain, kernels, *tokens)[0]
    # Without a gradient autocast casts the tokens itself, and only once for many calls.
    weights, _ = kernels.forward(linear(x, key_param_tokens), tau, eps)  # (..., P)
    return matmul(weights, value_param_tokens)


def pattention_fused_joint(
    x: Tensor,
    key_param_tokens: Sequence[Tensor],
    value_param_tokens: Sequence[Tensor],
    theta: str,
    tau: Sequence[Tensor],
    eps: float,
    kernels: Kernels | None = None,
    few: bool = False,
) -> tuple[Tensor, ...]:
    """Compute Pattention layers of the same input and the same number of pairs, at least two.

    Args:
        x: (..., C_in) input tokens.
        key_param_tokens: (P, C_in) keys of each layer. Either all need a gradient or none does.
        value_param_tokens: (P, C_out) values of each layer.
        theta: Name of the variant, as for :func:`pattention_fused`.
        tau: 0-dim tensor of each layer, its stored scale.
        eps: Number added to the divisor of a row, relative to ``tau``.
        kernels: Kernels to use in place of the variant's own.
        few: Whether each layer has its own product for the scores; without a gradient.

    Returns:
        (..., C_out) output tokens of each layer, of the dtype that PyTorch's ``linear`` gives.

    Raises:
        InputError: If the variant is unknown.

    Note:
        The precision and the gradients are as in :func:`pattention_fused`.
    """
    plain = find_theta(theta).kernels
    if plain is None or is_transformed():
        return tuple(
            pattention_reference(x, keys, values, theta, own_tau, eps)
            for keys, values, own_tau in zip(key_param_tokens, value_param_tokens, tau, strict=True)
        )
    # PyTorch takes a CPU's number for any device only if it is 0-dim.
    taus = torch.stack(tuple(tau)).unsqueeze(-1)  # (S, 1)
    if taus.device != x.device:
        taus = taus.to(x.device)
    if kernels is None:
        kernels = plain
    if torch.is_grad_enabled() and needs_gradient(x, *key_param_tokens, *value_param_tokens, *tau):
        x, *tokens = to_product_dtype(x, *key_param_tokens, *value_param_tokens)
        return _Pattention.apply(x, taus, eps, plain, kernels, *tokens)
    if few:  # the scores are smaller than the keys, which one product would have to copy
        scores = torch.stack([linear(x, keys) for keys in key_param_tokens], dim=-2)
        weights, _ = kernels.forward(scores, taus, eps)
        pairs = zip(weights.unbind(-2), value_param_tokens, strict=True)
        return tuple([matmul(own, values) for own, values in pairs])
    weights, _ = kernels.forward(_scores(x, key_param_tokens), taus, eps)
    return _outputs(weights, value_param_tokens)
