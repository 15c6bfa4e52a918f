"""Pattention as a module: the layer that stands where a transformer has a linear projection."""

import math
import re
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from tokenformer_vit.errors import InputError
from tokenformer_vit.ops import (
    check_backend,
    check_theta,
    default_tau,
    pattention,
    pattention_top_k,
    theta_weights,
)

# A path of pattention() may branch on its inputs or run custom kernels, so fx keeps it whole.
torch.fx.wrap("pattention")

GATES = ("none", "learned", "fixed")
TOKENS = ("key_param_tokens", "value_param_tokens")
# How the two parts of tokens that are held apart are named; see segments.py.
_SEGMENT = re.compile(rf"(.*\.|)parametrizations\.({'|'.join(TOKENS)})\.original([01])")

# E[Θ(A)²] of a weight when the scores are standard normal: what makes the variance of an output
# P · E[Θ²] · Var[V].
_SECOND_MOMENT = {
    "softmax": math.e,
    "gelu_l1": 2.67175,
    "gelu_l2": 0.42522,
    "gelu_l2_post": 1.0,
    "gelu_tanh_l2": 0.42519,
}

# What a model hands on to all of its layers alike.
_SHARED_ARGS = ("tau", "learn_tau", "eps", "key_init_scale", "gate")


def fuse_state_dict(state_dict: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Join the two parts of split layers under the names that they have otherwise.

    Args:
        state_dict: Of a model; one without split layers is returned as it is.

    Returns:
        The same tensors in the same order, joined ones at the place of their first part.
    """
    fused = {}
    for key, tensor in state_dict.items():
        part = _SEGMENT.fullmatch(key)
        if part is None:
            fused[key] = tensor
        elif part[3] == "0":
            fused[part[1] + part[2]] = torch.cat((tensor, state_dict[f"{key[:-1]}1"]))
    return fused


def check_pattention_args(arguments: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return the arguments that all Pattention layers of a model share, as a plain dict.

    Args:
        arguments: ``tau``, ``learn_tau``, ``eps``, ``key_init_scale`` and ``gate`` of
            :class:`Pattention`, any of them; ``None`` for none.

    Raises:
        InputError: If there is another among them, or no mapping was given.
    """
    if not isinstance(arguments, Mapping | None):
        raise InputError(
            f"pattention_args must be a dict with keys of {', '.join(_SHARED_ARGS)}, but it is "
            f"{arguments!r}"
        )
    for name in arguments or {}:
        if name not in _SHARED_ARGS:
            raise InputError(
                f"unknown key {name!r} in pattention_args; choose among {', '.join(_SHARED_ARGS)}"
            )
    return dict(arguments or {})


class Pattention(nn.Module):
    """Token-parameter attention, Θ(X K_Pᵀ) V_P, in place of a linear projection.

    Args:
        in_features: C_in, width of the input tokens.
        out_features: C_out, width of the output tokens.
        num_param_tokens: P, number of key-value pairs of parameter tokens.
        theta: Name of the Θ variant, a key of ``tokenformer_vit.ops.THETAS``.
        tau: Scale of Θ; ``None`` takes P under an L1 norm and √P under an L2 norm. It is kept in
            the state dict and never follows P, so that a grown layer reloads to what it computed.
        eps: Added where Θ divides, relative to ``tau``; 0 reproduces the released formulas, which
            give NaN for a row of zeros.
        init_gain: Standard deviation of the outputs at initialisation, for inputs of unit RMS.
        learn_tau: Make ``tau`` a parameter that starts at the value said above, rather than a
            buffer. Its name in the state dict is the same.
        key_init_scale: Multiplies the standard deviation of the keys at initialisation, and that
            alone. Under ``gelu_l2`` and ``gelu_tanh_l2`` it does not change what a fresh layer
            computes, but how far a step of training turns its keys; under the other variants
            outputs no longer start at ``init_gain``.
        gate: Give each pair a factor on exp(A), ``learned`` (a parameter) or ``fixed`` (a buffer),
            that starts at 1; for ``softmax`` alone. A model of softmax grows exactly through
            it. ``none`` leaves it out.
        backend: Implementation, as for :func:`tokenformer_vit.ops.pattention`; it may be changed
            at any time.
        device: Where parameters and buffers are made.
        dtype: Type of the parameters. ``tau`` is float32 in any case.

    Attributes:
        active: (S,) indices of the pairs that take part, or ``None`` for all. Others are left out
            as if they did not exist, but for τ, which stays. Not in the state dict.
        top_k: Number of pairs that each input token reads the values of, its strongest, or
            ``None`` for all. Not in the state dict.

    Raises:
        InputError: If ``theta``, ``gate`` or ``backend`` is unknown, ``theta`` has no gate, or a
            size, ``tau`` or ``key_init_scale`` is not positive.

    Shape:
        (..., C_in) -> (..., C_out), of the input's dtype.

    Note:
        Initialisation: keys N(0, 1/C_in), so that inputs of unit RMS (what LayerNorm hands over)
        meet scores of unit variance; values N(0, init_gain² / (P · E[Θ²])), with E[Θ²] of
        standard normal scores, so that outputs have the standard deviation ``init_gain``. The
        released language code takes N(0, 0.02²) and N(0, (2 / (depth · √width))²) instead. Under
        ``gelu_l2``, which ignores the scale of the keys, that amounts to much the same; under the
        other variants scores of standard deviation 0.02·√width depend on the width and leave Θ
        nearly linear (or, for ``softmax``, nearly constant), and the value rule knows neither P
        nor Θ, so that the four variants would start from outputs of unlike size.

    Source:
        TokenFormer, arXiv:2410.23168, Eq. 4 to 6.
    """

    tau: Tensor
    gate: Tensor | None
    active: Tensor | None
    top_k: int | None

    def __init__(
        self,
        in_features: int,
        out_features: int,
        num_param_tokens: int,
        theta: str = "gelu_l2",
        tau: float | None = None,
        eps: float = 1e-6,
        init_gain: float = 1.0,
        learn_tau: bool = False,
        key_init_scale: float = 1.0,
        gate: str = "none",
        backend: str = "auto",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        for name, size in (
            ("in_features", in_features),
            ("out_features", out_features),
            ("num_param_tokens", num_param_tokens),
        ):
            if size < 1:
                raise InputError(f"{name} must be at least 1, but it is {size}")
        if tau is not None and not tau > 0:
            raise InputError(f"tau must be positive, but it is {tau}")
        if not key_init_scale > 0:
            raise InputError(f"key_init_scale must be positive, but it is {key_init_scale}")
        if gate not in GATES:
            raise InputError(f"unknown gate {gate!r}; choose one of {', '.join(GATES)}")
        if gate != "none" and theta != "softmax":
            raise InputError(
                f"gate is {gate!r}, but Θ is {theta!r}: only softmax has a gate, under GELU a zero "
                "key closes a pair"
            )
        self.in_features = in_features
        self.out_features = out_features
        self.num_param_tokens = num_param_tokens
        self.theta = check_theta(theta)
        self.eps = eps
        self.init_gain = init_gain
        self.key_init_scale = key_init_scale
        self.backend = check_backend(backend)
        self.init_tau = default_tau(theta, num_param_tokens) if tau is None else float(tau)
        self.key_param_tokens = nn.Parameter(
            torch.empty(num_param_tokens, in_features, device=device, dtype=dtype)
        )
        self.value_param_tokens = nn.Parameter(
            torch.empty(num_param_tokens, out_features, device=device, dtype=dtype)
        )
        start = torch.empty((), device=device, dtype=torch.float32)
        if learn_tau:
            self.tau = nn.Parameter(start)
        else:
            self.register_buffer("tau", start)
        opened = torch.empty(num_param_tokens, device=device, dtype=dtype)
        if gate == "learned":
            self.gate = nn.Parameter(opened)
        else:
            self.register_buffer("gate", opened if gate == "fixed" else None)
        self.register_buffer("active", None, persistent=False)
        self.top_k = None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw the parameter tokens anew, as the class describes, and set τ to its start value."""
        value_std = self.init_gain / math.sqrt(self.num_param_tokens * _SECOND_MOMENT[self.theta])
        key_std = self.key_init_scale / math.sqrt(self.in_features)
        nn.init.normal_(self.key_param_tokens, std=key_std)
        nn.init.normal_(self.value_param_tokens, std=value_std)
        nn.init.constant_(self.tau, self.init_tau)
        if self.gate is not None:
            nn.init.ones_(self.gate)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "Pattention":
        # √768 has no close neighbour in bfloat16: a cast of the model must not move τ.
        tau, grad = self.tau, self.tau.grad

        def guarded(tensor: Tensor) -> Tensor:
            moved = fn(tensor)
            if tensor is not tau and tensor is not grad:
                return moved
            if tensor.is_meta:  # to_empty(): there is a place for τ now, but no value yet
                return moved.to(tensor.dtype)
            return tensor.detach().to(moved.device)

        super()._apply(guarded, recurse)
        return self

    def _load_from_state_dict(
        self, state_dict: dict[str, Tensor], prefix: str, *args: Any, **kwargs: Any
    ) -> None:
        # Tokens may have been saved in one piece or in two, and so may this layer hold them.
        for name in TOKENS:
            keys = [f"{prefix}parametrizations.{name}.original{index}" for index in (0, 1)]
            if all(key in state_dict for key in keys):
                state_dict[prefix + name] = torch.cat([state_dict.pop(key) for key in keys])
            if hasattr(self, "parametrizations") and prefix + name in state_dict:
                tokens = state_dict.pop(prefix + name)
                own: Any = self.parametrizations
                num_old = len(own[name].original0)
                for key, part in zip(keys, (tokens[:num_old], tokens[num_old:]), strict=True):
                    state_dict[key] = part
        super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)

    def _tokens(self) -> tuple[Tensor, Tensor, Tensor | None]:
        """Return keys, values and gate of the pairs that take part."""
        keys, values, gate = self.key_param_tokens, self.value_param_tokens, self.gate
        active = self.active
        if active is not None:
            keys, values = keys[active], values[active]
            if gate is not None:
                gate = gate[active]
        return keys, values, gate

    def forward(self, x: Tensor) -> Tensor:
        """Map (..., C_in) tokens to (..., C_out)."""
        keys, values, gate = self._tokens()
        top_k = self.top_k
        if top_k is not None:
            return pattention_top_k(x, keys, values, self.theta, self.tau, self.eps, top_k, gate)
        return pattention(x, keys, values, self.theta, self.tau, self.eps, self.backend, gate)

    @torch.jit.unused
    @torch.no_grad()
    def weights(self, x: Tensor) -> Tensor:
        """Return how strongly each input token reads each pair that takes part, Θ(X K_Pᵀ).

        Args:
            x: (..., C_in) input tokens.

        Returns:
            (..., P) weights in float32 (float64 for float64), without history.
        """
        keys, _, gate = self._tokens()
        dtype = torch.promote_types(x.dtype, torch.float32)
        with torch.autocast(x.device.type, enabled=False):
            scores = x.to(dtype) @ keys.to(dtype).t()  # (..., P)
            return theta_weights(scores, self.theta, self.tau, self.eps, gate)

    def extra_repr(self) -> str:
        """Describe the layer in ``repr``."""
        return (
            f"{self.in_features}, {self.out_features}, num_param_tokens={self.num_param_tokens}, "
            f"theta={self.theta!r}" + (", learn_tau=True" if self.tau.requires_grad else "")
        )
