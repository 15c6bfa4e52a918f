"""Pattention that reads only the values of the strongest pairs of each input token."""

import torch.nn.functional as F
from torch import Tensor

from .theta import theta_weights


def pattention_top_k(
    x: Tensor,
    key_param_tokens: Tensor,
    value_param_tokens: Tensor,
    theta: str,
    tau: Tensor,
    eps: float,
    k: int,
    gate: Tensor | None = None,
) -> Tensor:
    """Let each input token attend to its k strongest parameter tokens, a mixture of P experts.

    Θ still normalises over all P scores, so the k weights do not change, and the output differs
    only by the values that are not read. A token reads all keys and k values: this takes
    2·P·C_in + 2·k·C_out FLOPs instead of 2·P·(C_in + C_out).

    Args:
        x: (..., C_in) input tokens.
        key_param_tokens: (P, C_in) keys.
        value_param_tokens: (P, C_out) values.
        theta: Name of the variant, a key of ``THETAS``.
        tau: 0-dim tensor, the stored scale of the layer.
        eps: Number added to the divisor of a row, relative to ``tau``.
        k: Number of pairs to read, from 1 to P: the pairs with the largest absolute weights.
        gate: (P,) factors on exp(A), only for a variant with gates.

    Returns:
        (..., C_out) output tokens, of the dtype that PyTorch's ``linear`` gives for ``x``.

    Raises:
        ValueError: If the variant is unknown, or ``gate`` is given and the variant has no gate.
        RuntimeError: If ``k`` is larger than P.
    """
    scores = F.linear(x, key_param_tokens)  # (..., P)
    weights = theta_weights(scores, theta, tau, eps, gate)  # (..., P)
    return strongest_values(weights, value_param_tokens, k)


def strongest_values(weights: Tensor, values: Tensor, k: int) -> Tensor:
    """Multiply (..., P) weights by (P, C_out) values, using the k largest weights of each row."""
    chosen = weights.abs().topk(k, dim=-1).indices  # (..., k)
    kept = weights.gather(-1, chosen)  # (..., k)
    output = F.embedding_bag(
        chosen.reshape(-1, k),
        values.to(kept.dtype),
        per_sample_weights=kept.reshape(-1, k),
        mode="sum",
    )  # (R, C_out)
    return output.reshape(weights.shape[:-1] + output.shape[-1:])
