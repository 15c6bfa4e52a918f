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

    Θ normalises over all P scores, so that the weights which are kept are those of the dense layer,
    and the output differs from its by what is left out. All keys are read, k values a token: of
    the 2·P·(C_in + C_out) FLOPs a token, 2·P·C_in + 2·k·C_out are left.

    Args:
        x: (..., C_in) input tokens.
        key_param_tokens: (P, C_in).
        value_param_tokens: (P, C_out).
        theta: Name of the variant, a key of ``THETAS``.
        tau: 0-dim tensor, the stored scale of the layer.
        eps: See :mod:`tokenformer_vit.ops.theta`.
        k: Pairs that are kept, those whose weights are of largest magnitude; 1 to P.
        gate: (P,), for ``softmax`` alone.

    Returns:
        (..., C_out) output tokens, of the dtype that PyTorch's ``linear`` gives for ``x``.

    Raises:
        ValueError: If the variant is unknown.
        RuntimeError: If ``k`` is larger than P.
    """
    scores = F.linear(x, key_param_tokens)  # (..., P)
    weights = theta_weights(scores, theta, tau, eps, gate)  # (..., P)
    chosen = weights.abs().topk(k, dim=-1).indices  # (..., k)
    kept = weights.gather(-1, chosen)  # (..., k)
    output = F.embedding_bag(
        chosen.reshape(-1, k),
        value_param_tokens.to(kept.dtype),
        per_sample_weights=kept.reshape(-1, k),
        mode="sum",
    )  # (R, C_out)
    return output.reshape(x.shape[:-1] + output.shape[-1:])
