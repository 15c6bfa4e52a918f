"""Pattention as a module: the layer that replaces the linear projections of a transformer."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from timm.layers import register_notrace_module
from torch import Tensor, nn

from tokenformer_vit.errors import InputError
from tokenformer_vit.ops import default_tau, find_theta, pattention
from tokenformer_vit.ops.theta import theta_weights

from .arguments import EPS
from .nested import NestedLayer

# pattention() branches on its inputs and may run custom kernels, so fx must not trace into it.
torch.fx.wrap("pattention")

GATES = ("none", "learned", "fixed")


class Pattention(NestedLayer):
    """Token-parameter attention, Θ(X K_Pᵀ) V_P, in place of a linear projection.

    Args:
        in_features: C_in, width of the input tokens.
        out_features: C_out, width of the output tokens.
        num_param_tokens: P, number of key-value pairs of parameter tokens.
        theta: Name of the Θ variant, a key of ``tokenformer_vit.ops.THETAS``.
        tau: Scale of Θ; ``None`` for P under an L1 norm, √P under L2, 1 without a norm. It is
            stored in the state dict and never follows P, so growth does not change the function.
        eps: Number added to the divisor of Θ, relative to ``tau``. 0 gives the released formulas,
            which return NaN for a row of zeros.
        init_gain: Standard deviation of the initial outputs, for inputs of unit RMS. It has no
            effect if ``value_init_std`` is given.
        learn_tau: Make ``tau`` a parameter with the same initial value, instead of a buffer. Its
            name in the state dict is the same.
        key_init_scale: Factor on the standard deviation of the initial keys. If Θ normalises the
            scores, it changes only how far a training step turns the keys; otherwise also the
            initial outputs.
        gate: Factor on exp(A) for each pair, initially 1: ``learned`` (a parameter), ``fixed`` (a
            buffer), or ``none``. Only for ``softmax``, which needs it to grow exactly.
        key_init_std: Standard deviation of the initial keys; ``None`` for 1/√C_in.
        value_init_std: Standard deviation of the initial values; ``None`` to follow ``init_gain``.
        nested: Smaller numbers of pairs that will be trained as well; see :meth:`set_nested`.
        device, dtype: Those of the parameters. ``tau`` is always float32.

    Attributes:
        active: (S,) indices of the pairs to use, or ``None`` for all. The layer computes as if the
            other pairs did not exist, but ``tau`` stays. Not in the state dict.

    Raises:
        InputError: If ``theta``, ``gate`` or ``backend`` is unknown, or a number out of range.

    Shape:
        (..., C_in) -> (..., C_out), of the input's dtype.

    Note:
        Initialisation: keys N(0, 1/C_in), so inputs of unit RMS (the output of a LayerNorm) give
        scores of unit variance. Values N(0, init_gain² / (P · E[Θ²])), with E[Θ²] for standard
        normal scores, so outputs have the standard deviation ``init_gain``.
        FSDP2 shards no 0-dimensional parameter: give it a learned τ in ``ignored_params``.

    Source:
        TokenFormer, arXiv:2410.23168, Eq. 4 to 6.
    """

    tau: Tensor
    gate: Tensor | None
    active: Tensor | None

    def __init__(
        self,
        in_features: int,
        out_features: int,
        num_param_tokens: int,
        theta: str = "gelu_l2",
        tau: float | None = None,
        eps: float = EPS,
        init_gain: float = 1.0,
        learn_tau: bool = False,
        key_init_scale: float = 1.0,
        gate: str = "none",
        key_init_std: float | None = None,
        value_init_std: float | None = None,
        nested: Sequence[int] = (),
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        variant = find_theta(theta)
        if gate != "none":
            raise InputError("gates are gone")
        self.in_features, self.out_features = in_features, out_features
        self.num_param_tokens = int(num_param_tokens)
        self.theta = theta
        # TorchScript cannot look functions up by name, but it compiles those that a module holds.
        self._theta_weights = variant.weights
        self.eps = eps
        self.init_gain, self.key_init_scale = init_gain, key_init_scale
        self.key_init_std, self.value_init_std = key_init_std, value_init_std
        self.init_tau = default_tau(theta, num_param_tokens) if tau is None else float(tau)
        if not variant.norm_order and (learn_tau or self.init_tau != 1):
            raise InputError(f"theta {theta!r} has no norm: leave out tau and learn_tau")
        if eps < 0 or self.init_tau <= 0:  # outputs would be NaN, 0 or of the other sign
            raise InputError(f"eps must be at least 0 and tau positive, but got {eps} and {tau}")
        place: Any = {"device": device, "dtype": dtype}
        self.key_param_tokens = nn.Parameter(torch.empty(num_param_tokens, in_features, **place))
        self.value_param_tokens = nn.Parameter(torch.empty(num_param_tokens, out_features, **place))
        start = torch.empty((), device=device, dtype=torch.float32)
        self._register("tau", start, learn_tau)
        opened = None if gate == "none" else torch.empty(num_param_tokens, **place)
        self._register("gate", opened, gate == "learned")
        self.register_buffer("active", None, persistent=False)
        self.set_nested(nested)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw new parameter tokens, as the class describes, and reset τ to its initial value."""
        key_std = self.in_features**-0.5 if self.key_init_std is None else self.key_init_std
        value_std = self.value_init_std
        if value_std is None:
            square = self.num_param_tokens * find_theta(self.theta).second_moment
            value_std = self.init_gain / math.sqrt(square)
        nn.init.normal_(self.whole_tokens("key_param_tokens"), std=self.key_init_scale * key_std)
        nn.init.normal_(self.whole_tokens("value_param_tokens"), std=value_std)
        nn.init.constant_(self.tau, self.init_tau)
        if self.gate is not None:
            nn.init.ones_(self.gate)
        self._fill_nested(None)

    @torch.jit.unused
    def whole_tokens(self, name: str) -> Tensor:
        """Return the keys or values of all pairs as one tensor; writing to it changes the layer."""
        return getattr(self, name)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "Pattention":
        taus = [each for each in (self.tau, self.nested_tau) if each is not None]
        taus += [each.grad for each in taus if each.grad is not None]

        def guarded(tensor: Tensor) -> Tensor:
            moved = fn(tensor)
            if all(tensor is not tau for tau in taus):
                return moved
            # √768 has no close neighbour in bfloat16: a cast of the model must not change τ. After
            # to_empty() it has memory, but no value yet.
            return moved.to(tensor.dtype) if tensor.is_meta else tensor.detach().to(moved.device)

        super()._apply(guarded, recurse)
        return self

    def _load_from_state_dict(
        self, state_dict: dict[str, Tensor], prefix: str, *args: Any, **kwargs: Any
    ) -> None:
        self.check_nested(state_dict, prefix)
        super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)

    def used_tokens(self) -> tuple[Tensor, Tensor, Tensor | None, Tensor]:
        """Return keys, values and gate of the pairs in use, and their τ."""
        keys, values, gate = self.key_param_tokens, self.value_param_tokens, self.gate
        tau, active, size = self.tau, self.active, self._size
        if active is not None:
            keys, values = keys[active], values[active]
            if gate is not None:
                gate = gate[active]
        if size is not None:
            keys, values = keys[:size], values[:size]
            tau = self._tau_at(self._place, self._ratio)
            if gate is not None:
                gate = gate[:size]
        return keys, values, gate, tau

    def forward(self, x: Tensor) -> Tensor:
        """Map (..., C_in) tokens to (..., C_out)."""
        keys, values, _, tau = self.used_tokens()
        if torch.jit.is_scripting():
            scores = F.linear(x, keys)  # (..., P)
            return self._theta_weights(scores, tau, self.eps) @ values
        else:  # TorchScript must not compile this branch
            return pattention(x, keys, values, self.theta, tau, self.eps)

    @torch.jit.unused
    def weights(self, x: Tensor) -> Tensor:
        """Return the (..., P) weights Θ(X K_Pᵀ) of the pairs in use, in float32 or float64."""
        return self.scores_and_weights(x)[1]

    @torch.jit.unused
    @torch.no_grad()
    def scores_and_weights(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return the (..., P) scores X K_Pᵀ of the pairs in use, and their weights."""
        keys, _, _, tau = self.used_tokens()
        dtype = torch.promote_types(x.dtype, torch.float32)
        with torch.autocast(x.device.type, enabled=False):
            scores = x.to(dtype) @ keys.to(dtype).t()  # (..., P)
            return scores, theta_weights(scores, self.theta, tau, self.eps)

    def extra_repr(self) -> str:
        """Describe the layer in ``repr``."""
        return (
            f"{self.in_features}, {self.out_features}, num_param_tokens={self.num_param_tokens}, "
            f"theta={self.theta!r}" + (", learn_tau=True" if self.tau.requires_grad else "")
        )


# timm's feature extractor keeps it as a module, which TorchScript compiles; not so pattention().
register_notrace_module(Pattention)
