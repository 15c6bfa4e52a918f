"""Pattention as a module: the layer that stands where a transformer has a linear projection."""

import math
import re
from collections.abc import Callable, Mapping
from numbers import Integral
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
    second_moment,
    theta_weights,
)

from .arguments import check_argument

# A path of pattention() may branch on its inputs or run custom kernels, so fx keeps it whole.
torch.fx.wrap("pattention")

TOKENS = ("key_param_tokens", "value_param_tokens")
# How earlier versions named the two parts of a split layer; see segments.py.
SEGMENT = re.compile(rf"(.*\.|)parametrizations\.({'|'.join(TOKENS)})\.original([01])")


def fuse_state_dict(state_dict: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Join the two parts of split layers that earlier versions saved apart.

    Args:
        state_dict: Of a model; one without such parts is returned as it is.

    Returns:
        The same tensors in the same order, joined ones at the place of their first part. Parts
        that do not fit each other stay as they are, as tensors that no model has.
    """
    fused = {}
    for key, tensor in state_dict.items():
        part = SEGMENT.fullmatch(key)
        old, new = (state_dict.get(f"{key[:-1]}{index}") for index in (0, 1))
        if part is None or old is None or new is None or old.shape[1:] != new.shape[1:]:
            fused[key] = tensor
        elif part[3] == "0":
            fused[part[1] + part[2]] = torch.cat((old, new))
    return fused


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
        init_gain: Standard deviation of the outputs at initialisation, for inputs of unit RMS. It
            has no effect where ``value_init_std`` is given.
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
        key_init_std: Standard deviation of the keys at initialisation; ``None`` for 1/√C_in.
        value_init_std: Standard deviation of the values at initialisation; ``None`` follows
            ``init_gain``.
        device: Where parameters and buffers are made.
        dtype: Type of the parameters. ``tau`` is float32 in any case.

    Attributes:
        active: (S,) indices of the pairs that take part, or ``None`` for all. Others are left out
            as if they did not exist, but for τ, which stays. Not in the state dict.
        top_k: Number of pairs that each input token reads the values of, its strongest, or
            ``None`` for all. Not in the state dict.
        of_model: Whether the layer belongs to a model that is rebuilt by one number of pairs for
            all layers of a kind, so that it cannot grow alone.

    Raises:
        InputError: If ``theta``, ``gate`` or ``backend`` is unknown, ``theta`` has no gate, a
            size is not a positive whole number, or another number is not finite or out of range
            (1e-18 to 1e18; ``eps`` and ``init_gain`` may be 0).

    Shape:
        (..., C_in) -> (..., C_out), of the input's dtype.

    Note:
        Initialisation: keys N(0, 1/C_in), so that inputs of unit RMS (what LayerNorm hands over)
        meet scores of unit variance; values N(0, init_gain² / (P · E[Θ²])), with E[Θ²] of
        standard normal scores, so that outputs have the standard deviation ``init_gain``. The
        released language code takes N(0, 0.02²) and N(0, (2 / (depth · √width))²) instead; a model
        with ``pattention_args={"init": "released"}`` does so, too. Under ``gelu_l2``, which ignores
        the scale of the keys, the released keys compute the same. The values do not: in a model of
        12 blocks of width 768 with 768 pairs, ours of query, key and value are 9.2 times the
        released ones, those of the output projection 1.9 times, and those of the feed-forward layer
        (3072 pairs) 0.94 times. Under the other variants scores of standard deviation 0.02·√width
        depend on the width and leave Θ nearly linear (or, for ``softmax``, nearly constant), and
        the released rule of the values knows neither P nor Θ: the variants would start from outputs
        of unlike size.

        Range: a row of scores must have an L2 norm below 1.8e19 (√ of the largest float32) under
        the L2 variants, and float16 scores must be below 65504 each; see README.md of
        ``tokenformer_vit.ops``.

    Source:
        TokenFormer, arXiv:2410.23168, Eq. 4 to 6.
    """

    tau: Tensor
    gate: Tensor | None
    active: Tensor | None
    top_k: int | None
    of_model: bool = False

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
        key_init_std: float | None = None,
        value_init_std: float | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        for name, size in (
            ("in_features", in_features),
            ("out_features", out_features),
            ("num_param_tokens", num_param_tokens),
        ):
            if not isinstance(size, Integral) or size < 1:
                raise InputError(f"{name} must be at least 1, but it is {size!r}; give an integer")
        for name, value in (
            ("tau", tau),
            ("eps", eps),
            ("init_gain", init_gain),
            ("learn_tau", learn_tau),
            ("key_init_scale", key_init_scale),
            ("gate", gate),
            ("key_init_std", key_init_std),
            ("value_init_std", value_init_std),
        ):
            check_argument(name, value)
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
        self.key_init_std = key_init_std
        self.value_init_std = value_init_std
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
        if self.key_init_std is None:
            key_std = self.key_init_scale / math.sqrt(self.in_features)
        else:
            key_std = self.key_init_scale * self.key_init_std
        value_std = self.value_init_std
        if value_std is None:
            square = self.num_param_tokens * second_moment(self.theta)
            value_std = self.init_gain / math.sqrt(square)
        nn.init.normal_(self.whole_tokens("key_param_tokens"), std=key_std)
        nn.init.normal_(self.whole_tokens("value_param_tokens"), std=value_std)
        nn.init.constant_(self.tau, self.init_tau)
        if self.gate is not None:
            nn.init.ones_(self.gate)

    @torch.jit.unused
    def whole_tokens(self, name: str) -> Tensor:
        """Return the keys or values of all pairs as one tensor that may be written to.

        Args:
            name: ``key_param_tokens`` or ``value_param_tokens``.
        """
        return getattr(self, name)

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
        self._join_loaded(state_dict, prefix)
        super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)

    def _join_loaded(self, state_dict: dict[str, Tensor], prefix: str) -> None:
        """Join tokens that an earlier version saved in two pieces, in place."""
        for name in TOKENS:
            keys = [f"{prefix}parametrizations.{name}.original{index}" for index in (0, 1)]
            if all(key in state_dict for key in keys):
                state_dict[prefix + name] = torch.cat([state_dict.pop(key) for key in keys])

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
        return self.scores_and_weights(x)[1]

    @torch.jit.unused
    @torch.no_grad()
    def scores_and_weights(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return the scores X K_Pᵀ of the pairs that take part, and Θ of them.

        Args:
            x: (..., C_in) input tokens.

        Returns:
            (..., P) scores and (..., P) weights in float32 (float64 for float64), without history.
        """
        keys, _, gate = self._tokens()
        dtype = torch.promote_types(x.dtype, torch.float32)
        with torch.autocast(x.device.type, enabled=False):
            scores = x.to(dtype) @ keys.to(dtype).t()  # (..., P)
            return scores, theta_weights(scores, self.theta, self.tau, self.eps, gate)

    def extra_repr(self) -> str:
        """Describe the layer in ``repr``."""
        return (
            f"{self.in_features}, {self.out_features}, num_param_tokens={self.num_param_tokens}, "
            f"theta={self.theta!r}" + (", learn_tau=True" if self.tau.requires_grad else "")
        )
