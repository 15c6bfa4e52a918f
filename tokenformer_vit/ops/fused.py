"""Pattention with a hand-written backward: the fast path.

Plain autograd keeps the scores in float32 several times over, once for each step of Θ. Here the
backward is derived for Θ as a whole, so that a layer keeps its input, its scores in the precision
they were computed in, and a float32 number or two a row. README.md beside this file has the
derivation and what it saves.
"""

from functools import partial
from typing import Any, NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from .precision import accumulation_dtype, product_dtype


class _Forward(Protocol):
    """(scores, tau, eps) -> (..., P) weights, and what to keep for the backward, scores first."""

    def __call__(
        self, scores: Tensor, tau: Tensor, eps: float
    ) -> tuple[Tensor, tuple[Tensor, ...]]: ...


class _Backward(Protocol):
    """(kept tensors, tau, (..., P) gradient of the weights) -> weights, gradient of the scores.

    Those of :data:`PLAIN` also return the (..., 1) dot products that the second is made with, from
    which the gradient of τ follows.
    """

    def __call__(
        self, kept: tuple[Tensor, ...], tau: Tensor, grad_weights: Tensor
    ) -> tuple[Tensor, ...]: ...


class _Elasticity(Protocol):
    """(kept tensors, eps) -> by how many per cent a row's factor grows when τ grows by one."""

    def __call__(self, kept: tuple[Tensor, ...], eps: float) -> Tensor | float: ...


def _one(kept: tuple[Tensor, ...], eps: float) -> float:
    return 1.0


class Theta(NamedTuple):
    """The two directions of a Θ variant, for scores and gradients of any floating dtype.

    Both compute in float32 (float64 for float64) and round their results once. Neither is
    differentiated, unless a gradient is itself differentiated.
    """

    forward: _Forward
    backward: _Backward
    elasticity: _Elasticity = _one


def _gelu_backward(grad: Tensor, z: Tensor, approximate: str = "none") -> Tensor:
    """Multiply a gradient by gelu'(z), in one kernel."""
    return torch.ops.aten.gelu_backward(grad.to(z.dtype), z, approximate=approximate)


def _softmax_forward(scores: Tensor, tau: Tensor, eps: float) -> tuple[Tensor, tuple[Tensor, ...]]:
    a = scores.to(accumulation_dtype(scores))
    peak = a.amax(dim=-1, keepdim=True)
    exponential = (a - peak).exp()
    share = exponential.sum(dim=-1, keepdim=True).reciprocal()
    # Two numbers, not ln ‖exp(a)‖₁ alone: of large scores float32 would round away its last digits,
    # and with them the share of every pair.
    return (exponential * (tau * share)).to(scores.dtype), (
        scores,
        torch.cat((peak, share), dim=-1),
    )


def _softmax_backward(
    kept: tuple[Tensor, ...], tau: Tensor, grad_weights: Tensor
) -> tuple[Tensor, ...]:
    scores, row = kept
    peak, share = row.split(1, dim=-1)
    # Multiplied the other way round than in the forward, as in gelu_l2 and for the same reason.
    p = share * (scores - peak).exp()
    dot = (grad_weights * p).sum(dim=-1, keepdim=True)
    grad_scores = tau * p * (grad_weights - dot)
    return (tau * p).to(scores.dtype), grad_scores.to(scores.dtype), tau * dot


def _gelu_l1_forward(scores: Tensor, tau: Tensor, eps: float) -> tuple[Tensor, tuple[Tensor, ...]]:
    activation = F.gelu(scores.to(accumulation_dtype(scores)))
    factor = (activation.abs().sum(dim=-1, keepdim=True) / tau + eps).reciprocal()
    return (activation * factor).to(scores.dtype), (scores, factor)


def _gelu_l1_backward(
    kept: tuple[Tensor, ...], tau: Tensor, grad_weights: Tensor
) -> tuple[Tensor, ...]:
    scores, factor = kept
    a = scores.to(factor.dtype)
    activation = F.gelu(a)
    weights = factor * activation
    dot = (grad_weights * weights).sum(dim=-1, keepdim=True)
    grad_activation = factor * (grad_weights - activation.sign() * (dot / tau))
    return weights.to(scores.dtype), _gelu_backward(grad_activation, a).to(scores.dtype), dot


def _l1_elasticity(kept: tuple[Tensor, ...], eps: float) -> Tensor:
    _, factor = kept
    return 1 - eps * factor


def _gelu_l2_forward(
    scores: Tensor, tau: Tensor, eps: float, approximate: str = "none"
) -> tuple[Tensor, tuple[Tensor, ...]]:
    norm = torch.linalg.vector_norm(scores, dim=-1, keepdim=True, dtype=accumulation_dtype(scores))
    factor = torch.rsqrt((norm / tau).square() + eps)
    weights = F.gelu(scores * factor, approximate=approximate)
    return weights.to(scores.dtype), (scores, factor)


def _gelu_l2_backward(
    kept: tuple[Tensor, ...], tau: Tensor, grad_weights: Tensor, approximate: str = "none"
) -> tuple[Tensor, ...]:
    scores, factor = kept
    # The forward has scores * factor. Were the two products written alike, torch.compile would
    # take them for one and keep the weights from forward to backward rather than compute them anew.
    z = factor * scores
    weights = F.gelu(z, approximate=approximate).to(scores.dtype)
    g = _gelu_backward(grad_weights, z, approximate)
    dot = (g * z).sum(dim=-1, keepdim=True)
    grad_scores = factor * torch.addcmul(g, z, dot / tau.square(), value=-1)
    return weights, grad_scores.to(scores.dtype), dot


def _l2_elasticity(kept: tuple[Tensor, ...], eps: float) -> Tensor:
    _, factor = kept
    return 1 - eps * factor.square()


def _gelu_l2_post_forward(
    scores: Tensor, tau: Tensor, eps: float
) -> tuple[Tensor, tuple[Tensor, ...]]:
    activation = F.gelu(scores.to(accumulation_dtype(scores)))
    mean_square = activation.square().sum(dim=-1, keepdim=True) / tau.square()
    factor = torch.rsqrt(mean_square + eps)
    return (activation * factor).to(scores.dtype), (scores, factor)


def _gelu_l2_post_backward(
    kept: tuple[Tensor, ...], tau: Tensor, grad_weights: Tensor
) -> tuple[Tensor, ...]:
    scores, factor = kept
    a = scores.to(factor.dtype)
    weights = factor * F.gelu(a)
    dot = (grad_weights * weights).sum(dim=-1, keepdim=True)
    grad_activation = factor * (grad_weights - weights * (dot / tau.square()))
    return weights.to(scores.dtype), _gelu_backward(grad_activation, a).to(scores.dtype), dot


PLAIN = {
    "softmax": Theta(_softmax_forward, _softmax_backward),
    "gelu_l1": Theta(_gelu_l1_forward, _gelu_l1_backward, _l1_elasticity),
    "gelu_l2": Theta(_gelu_l2_forward, _gelu_l2_backward, _l2_elasticity),
    "gelu_l2_post": Theta(_gelu_l2_post_forward, _gelu_l2_post_backward, _l2_elasticity),
    "gelu_tanh_l2": Theta(
        partial(_gelu_l2_forward, approximate="tanh"),
        partial(_gelu_l2_backward, approximate="tanh"),
        _l2_elasticity,
    ),
}
"""Every variant in plain PyTorch, which torch.compile fuses."""


def flat(tensor: Tensor) -> Tensor:
    """View (..., C) as (R, C), or copy where that takes it."""
    return tensor.reshape(-1, tensor.shape[-1])


class _Pattention(torch.autograd.Function):
    """Θ(X K_Pᵀ) V_P and its gradients; ``theta`` has the kernels of the variant ``name``."""

    generate_vmap_rule = True

    @staticmethod
    def forward(  # type: ignore[override]
        x: Tensor, keys: Tensor, values: Tensor, tau: Tensor, eps: float, name: str, theta: Theta
    ) -> tuple[Tensor, ...]:
        weights, kept = theta.forward(F.linear(x, keys), tau, eps)  # (..., P)
        # What the backward needs has to be returned: torch.func knows of no other way.
        return F.linear(weights, values.t()), *kept

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        x, keys, values, tau, ctx.eps, ctx.name, ctx.theta = inputs
        _, *kept = output
        ctx.mark_non_differentiable(*kept)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(x, keys, values, tau, *kept)

    @staticmethod
    def backward(  # type: ignore[override]
        ctx: Any, grad: Tensor | None, *of_kept: None
    ) -> tuple[Tensor | None, ...]:
        if grad is None:
            return (None,) * 7
        x, keys, values, tau, *saved = ctx.saved_tensors
        kept = tuple(saved)
        theta = ctx.theta
        if torch.is_grad_enabled():
            # This gradient will itself be differentiated, so what was kept without a history is
            # computed again with one, and from here on plain autograd takes over.
            theta = PLAIN[ctx.name]
            kept = theta.forward(F.linear(x, keys), tau, ctx.eps)[1]
        x_needed, keys_needed, values_needed, tau_needed = ctx.needs_input_grad[:4]
        if not (x_needed or keys_needed or tau_needed):
            weights, _ = theta.forward(kept[0], tau, ctx.eps)
            return None, None, flat(weights).t() @ flat(grad), None, None, None, None

        grad_x = grad_keys = grad_values = grad_tau = None
        weights, grad_scores, *dot = theta.backward(kept, tau, F.linear(grad, values))
        if x_needed:
            grad_x = grad_scores @ keys  # (..., C_in)
        if keys_needed:
            grad_keys = flat(grad_scores).t() @ flat(x)  # (P, C_in)
        if values_needed:
            grad_values = flat(weights).t() @ flat(grad)  # (P, C_out)
        if tau_needed:
            grad_tau = ((dot[0] * theta.elasticity(kept, ctx.eps)).sum() / tau).to(tau.dtype)
        return grad_x, grad_keys, grad_values, grad_tau, None, None, None


def pattention_fused(
    x: Tensor,
    key_param_tokens: Tensor,
    value_param_tokens: Tensor,
    theta: str,
    tau: Tensor,
    eps: float,
    kernels: dict[str, Theta] = PLAIN,
) -> Tensor:
    """Let input tokens attend to parameter tokens, keeping little for the backward.

    Args:
        x: (..., C_in) input tokens.
        key_param_tokens: (P, C_in).
        value_param_tokens: (P, C_out).
        theta: Name of the variant, a key of ``kernels``.
        tau: 0-dim tensor, the stored scale of the layer.
        eps: See :mod:`tokenformer_vit.ops.theta`.
        kernels: The variants' implementations. Where ``tau`` needs a gradient it is those of
            :data:`PLAIN` whatever stands here: others need not provide for it.

    Returns:
        (..., C_out) output tokens, of the dtype that PyTorch's ``linear`` gives for ``x``.

    Note:
        Precision as in :func:`pattention_reference`. Operands are cast before the autograd
        function, so that autocast and torch.compile see the casts and a kept input is the one the
        product used. No product is computed for an operand that needs no gradient. A gradient of a
        gradient comes from plain autograd. Forward-mode differentiation is not provided.

    Source:
        TokenFormer, arXiv:2410.23168, Eq. 4; the gradients are derived in README.md beside this
        file.
    """
    if tau.requires_grad:
        kernels = PLAIN
    operands = (x, key_param_tokens, value_param_tokens)
    x, keys, values = (operand.to(product_dtype(operand)) for operand in operands)
    return _Pattention.apply(x, keys, values, tau, eps, theta, kernels[theta])[0]
