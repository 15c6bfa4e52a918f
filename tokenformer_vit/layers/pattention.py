"""Pattention as a module: the layer that replaces the linear projections of a transformer."""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from timm.layers import register_notrace_module
from torch import Tensor, nn

from tokenformer_vit.errors import InputError
from tokenformer_vit.ops import THETAS, default_tau, find_theta, pattention
from tokenformer_vit.ops.pattention import product_is_cheaper

from .arguments import EPS

# pattention() branches on its inputs and may run custom kernels, so fx must not trace into it.
torch.fx.wrap("pattention")

TOKENS = ("key_param_tokens", "value_param_tokens")
PER_PAIR = (*TOKENS, "score_bias")  # parameters with a row for each pair


class Pattention(nn.Module):
    """Token-parameter attention, Θ(X K_Pᵀ) V_P, in place of a linear projection.

    With Θ ``linear``, ``gelu`` and biases it holds a linear layer or an MLP as they are: see
    :meth:`from_linear` and :meth:`from_mlp`.

    Args:
        in_features: C_in, width of the input tokens.
        out_features: C_out, width of the output tokens.
        num_param_tokens: P, number of key-value pairs of parameter tokens.
        theta: Name of the Θ variant, a key of ``tokenformer_vit.ops.THETAS``.
        tau: Initial scale of Θ; ``None`` for :func:`~tokenformer_vit.ops.default_tau`. It is stored
            in the state dict and never follows P, so growth does not change the function.
        eps: Number added to the divisor of Θ, relative to ``tau``. 0 gives the released formulas,
            which return NaN for a row of zeros.
        init_gain: Standard deviation of the initial outputs, for inputs of unit RMS. It has no
            effect if ``value_init_std`` is given.
        learn_tau: Make ``tau`` a parameter of the same name, instead of a buffer.
        key_init_std: Standard deviation of the initial keys; ``None`` for 1/√C_in. If Θ normalises
            the scores, it changes only how far a training step turns the keys.
        value_init_std: Standard deviation of the initial values; ``None`` to follow ``init_gain``.
        bias: Add a bias to the scores and one to the outputs, both 0 at first; only for Θ without a
            norm. Θ ``linear`` has the output's alone.
        kind: Name by which growth, pruning and sizes choose the layer: ``qkv``, ``proj`` or ``ffn``
            in a TokenFormer. ``None`` for the name that the layer has in its module.
        device, dtype: Place and type of the parameters. ``tau`` is always float32.

    Attributes:
        tau: The scale, (); of a nested layer (n + 1,), with that of all pairs at the end.
        nested: Shares of the pairs that were trained as well, smallest first.
        size: Share of the pairs in use, the first ones. Not in the state dict, not thread-safe.
        sized: Whether the sizes of a model concern this layer.
        active: (S,) indices of the pairs to use, or ``None`` for all. The layer computes as if the
            other pairs did not exist, but ``tau`` stays. Not in the state dict.
        score_bias, bias: The biases, (P,) and (C_out,), or ``None``.
        new_key_param_tokens, new_value_param_tokens, new_score_bias: The pairs of the last growth,
            if they are trained apart from those before them; otherwise ``None``.

    Raises:
        InputError: If ``theta`` is unknown, or a number is out of range.

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
    new_key_param_tokens: Tensor | None
    new_value_param_tokens: Tensor | None
    new_score_bias: Tensor | None
    score_bias: Tensor | None
    bias: Tensor | None
    active: Tensor | None
    # What `size` sets. TorchScript compiles attributes, but no property with a setter.
    _used: int | None
    _place: int
    _ratio: float
    __jit_unused_properties__ = ("size", "num_param_tokens", "num_used")

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
        key_init_std: float | None = None,
        value_init_std: float | None = None,
        bias: bool = False,
        kind: str | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        variant = find_theta(theta)
        self.in_features, self.out_features = in_features, out_features
        self.theta, self.eps, self.kind, self.init_gain = theta, eps, kind, init_gain
        # TorchScript cannot look functions up by name, but it compiles those that a module holds.
        self._theta_weights = variant.weights
        self.key_init_std, self.value_init_std = key_init_std, value_init_std
        self.init_tau = default_tau(theta, num_param_tokens) if tau is None else float(tau)
        if not variant.norm_order and (learn_tau or self.init_tau != 1):
            raise InputError(f"theta {theta!r} has no norm: leave out tau and learn_tau")
        if variant.norm_order and bias:  # a new pair with a zero bias would change the others
            raise InputError(f"theta {theta!r} has a norm over the pairs: leave out bias")
        if eps < 0 or self.init_tau <= 0:  # outputs would be NaN, 0 or of the other sign
            raise InputError(f"eps must be at least 0 and tau positive, but got {eps} and {tau}")
        place: Any = {"device": device, "dtype": dtype}

        def parameter(*shape: int) -> nn.Parameter:
            return nn.Parameter(torch.empty(shape, **place))

        self.key_param_tokens = parameter(num_param_tokens, in_features)
        self.value_param_tokens = parameter(num_param_tokens, out_features)
        score_bias = parameter(num_param_tokens) if bias and theta != "linear" else None
        self.register_parameter("score_bias", score_bias)
        self.register_parameter("bias", parameter(out_features) if bias else None)
        for name in PER_PAIR:
            self.register_parameter(f"new_{name}", None)
        start = torch.empty((), device=device, dtype=torch.float32)
        self.tau = nn.Parameter(start) if learn_tau else nn.Buffer(start)
        self.nested, self.sized, self.active = tuple[float, ...](), True, None
        self.size = 1.0
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Draw new parameter tokens, as the class describes, and reset τ to its initial value."""
        key_std = self.in_features**-0.5 if self.key_init_std is None else self.key_init_std
        value_std = self.value_init_std
        if value_std is None:
            square = self.num_param_tokens * find_theta(self.theta).second_moment
            value_std = self.init_gain / math.sqrt(square)
        for name, std in zip(PER_PAIR, (key_std, value_std, 0.0), strict=True):
            for part in self.parts(name):
                nn.init.normal_(part, std=std)
        if self.bias is not None:
            nn.init.zeros_(self.bias)  # transformers protects loaded tensors from torch.nn.init
        self.tau.copy_(self._taus(self.init_tau))

    @property
    def num_param_tokens(self) -> int:
        """Number of pairs P."""
        return sum(len(part) for part in self.parts("key_param_tokens"))

    @torch.jit.unused
    def parts(self, name: str) -> list[nn.Parameter]:
        """Return the parameters of a name of ``PER_PAIR``: none, one, or those of old and new."""
        parts = getattr(self, name), getattr(self, f"new_{name}")
        return [part for part in parts if part is not None]

    @torch.jit.unused
    def set_nested(self, sizes: Sequence[float], tau: Sequence[Tensor] | None = None) -> None:
        """Give rising shares a τ () of their own, by default the present ones; use all pairs."""
        whole = self.tau_at(1.0).detach()
        taus = [self.tau_at(size).detach() for size in sizes] if tau is None else list(tau)
        data = torch.stack([*taus, whole]).to(whole.dtype) if sizes else whole.clone()
        learned = isinstance(self.tau, nn.Parameter)
        self.tau = nn.Parameter(data, self.tau.requires_grad) if learned else data
        self.nested, self.size = tuple(sizes), 1.0

    @property
    def size(self) -> float:
        """Share of the pairs in use."""
        return self._size

    @size.setter
    def size(self, size: float) -> None:
        if not 0 < size <= 1:
            raise InputError(f"size must be a share above 0 and at most 1, but got {size!r}")
        self._size = float(size)
        self._used = None if size == 1 else self.count_at(size)
        # Counted from the end: torch.compile would compile again for the places 0 and 1.
        self._place = self.nested.index(size) - len(self.nested) - 1 if size in self.nested else -1
        self._ratio = 1.0 if size in self.nested else self._tau_ratio(size)  # 1 for all pairs

    def count_at(self, size: float) -> int:
        """Return the number of pairs of a size."""
        return max(1, round(size * self.num_param_tokens))

    def tau_at(self, size: float) -> Tensor:
        """Return the τ () of a size; of one that was not trained, as :func:`default_tau` scales."""
        if size in self.nested:
            return self.tau[self.nested.index(size)]
        return (self.tau[-1] if self.nested else self.tau) * self._tau_ratio(size)

    def _tau_ratio(self, size: float) -> float:
        whole = default_tau(self.theta, self.num_param_tokens)
        return default_tau(self.theta, self.count_at(size)) / whole

    def _taus(self, whole: float) -> Tensor:
        taus = [whole * self._tau_ratio(size) for size in (*self.nested, 1.0)]
        return torch.tensor(taus, dtype=torch.float32, device="cpu").view(self.tau.shape)

    @property
    def num_used(self) -> int:
        """Number of pairs in use: those of the mask or of the size, or all."""
        return self.count_at(self.size) if self.active is None else len(self.active)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "Pattention":
        taus = [self.tau] if self.tau.grad is None else [self.tau, self.tau.grad]

        def guarded(tensor: Tensor) -> Tensor:
            moved = fn(tensor)
            if all(tensor is not tau for tau in taus):
                return moved
            # √768 has no close neighbour in bfloat16: a cast of the model must not change τ. After
            # to_empty() it has memory, but no value yet.
            return moved.to(tensor.dtype) if tensor.is_meta else tensor.detach().to(moved.device)

        return super()._apply(guarded, recurse)

    def _load_from_state_dict(
        self, state_dict: dict[str, Tensor], prefix: str, *args: Any, **kwargs: Any
    ) -> None:
        state_dict = join_state_dict(state_dict)  # a copy, because it may be the caller's
        for name in PER_PAIR if self.new_key_param_tokens is not None else ():
            if (tokens := state_dict.get(prefix + name)) is not None:
                num_old = len(self.get_parameter(name))
                state_dict[prefix + name] = tokens[:num_old]
                state_dict[f"{prefix}new_{name}"] = tokens[num_old:]
        tau = state_dict.get(f"{prefix}tau")
        # Other tools cast whole files.
        if tau is not None and tau.dtype.itemsize < 4 and tau.shape == self.tau.shape:
            default = self._taus(default_tau(self.theta, self.num_param_tokens)).to(tau.device)
            is_default = tau == default.to(tau.dtype)
            state_dict[f"{prefix}tau"] = torch.where(is_default, default, tau.float())
        super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)

    def used_tokens(self) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        """Return keys (S, C_in), values (S, C_out), τ () and score biases (S,) in use."""
        keys = self._used_rows(self.key_param_tokens, self.new_key_param_tokens)
        values = self._used_rows(self.value_param_tokens, self.new_value_param_tokens)
        tau, bias = self.tau, self.score_bias
        if bias is not None:
            bias = self._used_rows(bias, self.new_score_bias)
        if tau.dim() > 0:
            tau = tau[self._place]
        return keys, values, tau if self._ratio == 1.0 else tau * self._ratio, bias

    def _used_rows(self, rows: Tensor, new: Tensor | None) -> Tensor:
        active, used = self.active, self._used
        if new is not None:
            rows = torch.cat((rows, new))
        if active is not None:
            return rows[active]
        return rows if used is None else rows[:used]

    def forward(self, x: Tensor) -> Tensor:
        """Map (..., C_in) tokens to (..., C_out)."""
        if torch.jit.is_scripting():
            keys, values, tau, score_bias = self.used_tokens()
            weights = self._theta_weights(F.linear(x, keys, score_bias), tau, self.eps)
            return F.linear(weights, values.t(), self.bias)
        else:  # TorchScript must not compile this branch
            keys, values, tau = self.key_param_tokens, self.value_param_tokens, self.tau
            score_bias, split = self.score_bias, self.new_key_param_tokens is not None
            chosen = self._used is not None or self.active is not None or tau.dim() > 0
            # Frozen pairs need no gradients, if they are apart from those that are trained.
            apart = split and not (chosen or keys.requires_grad) and torch.is_grad_enabled()
            apart = apart and not find_theta(self.theta).norm_order
            if chosen or split != apart:
                keys, values, tau, score_bias = self.used_tokens()
            own = self.theta, tau, self.eps
            output = pattention(x, keys, values, *own, score_bias, self.bias)
            if apart:
                keys, values = (self.parts(name)[1] for name in TOKENS)
                output = output + pattention(x, keys, values, *own, self.new_score_bias)
            return output

    @torch.jit.unused
    def weights(self, x: Tensor) -> Tensor:
        """Return the (..., P) weights Θ(X K_Pᵀ) of the pairs in use, in float32 or float64."""
        return self.scores_and_weights(x)[1]

    @torch.jit.unused
    def scores_and_weights(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return the (..., P) scores of the pairs in use, with their biases, and their weights."""
        keys, _, tau, bias = self.used_tokens()
        dtype = torch.promote_types(x.dtype, torch.float32)
        with torch.autocast(x.device.type, enabled=False):
            bias = None if bias is None else bias.to(dtype)
            scores = F.linear(x.to(dtype), keys.to(dtype), bias)  # (..., P)
            return scores, find_theta(self.theta).weights(scores, tau, self.eps)

    def extra_repr(self) -> str:
        """Describe the layer in ``repr``."""
        shape = f"{self.in_features}, {self.out_features}, {self.num_param_tokens}"
        return f"{shape}, theta={self.theta!r}, bias={self.bias is not None}"

    @classmethod
    @torch.no_grad()
    def from_linear(
        cls,
        linear: nn.Linear,
        covariance: Tensor | None = None,
        rows: slice = slice(None),
        **kwargs: Any,
    ) -> "Pattention":
        """Write a linear layer as min(C_in, C_out) linear tokens, most important first.

        Args:
            linear: Layer whose weight (C_out, C_in) and bias are taken, computed in float64.
            covariance: (C_in, C_in) sum or mean of z zᵀ over its inputs z. The first pairs are then
                the best map of their rank for them (SVD-LLM, arXiv:2403.07378), or else for inputs
                of any direction. All pairs together compute the same.
            rows: Rows of the weight and bias to take, as of q in a projection to q, k and v.
            **kwargs: Other arguments of the layer, such as ``kind``.
        """
        weight, bias = linear.weight[rows].double(), linear.bias
        if covariance is None:
            left, sizes, keys = torch.linalg.svd(weight, full_matrices=False)
        else:
            squares, axes = torch.linalg.eigh(covariance.to(weight))
            # Exact whatever they are, also for inputs that are all 0.
            scales = squares.clamp(min=1e-8 * squares.max() + 1e-300).sqrt()
            left, sizes, right = torch.linalg.svd(weight @ (axes * scales), full_matrices=False)
            keys = right / scales @ axes.t()
        lengths = keys.norm(dim=1)
        keys, values = (keys / lengths[:, None]), (left * (sizes * lengths)).t()
        biases = None, None if bias is None else bias[rows]
        return cls._of(linear.weight, keys, values, *biases, theta="linear", **kwargs)

    @classmethod
    @torch.no_grad()
    def from_mlp(
        cls, fc1: nn.Linear, fc2: nn.Linear, act: Callable[[Tensor], Tensor], **kwargs: Any
    ) -> "Pattention":
        """Hold an MLP as it stands: a pair for each hidden neuron.

        Args:
            fc1: First linear layer: its rows are the keys, its bias that of the scores.
            fc2: Second linear layer: its columns are the values, its bias that of the outputs.
            act: GELU, exact or by tanh; InputError for another function.
            **kwargs: Other arguments of the layer, such as ``kind``.
        """
        device = "cpu" if fc1.weight.is_meta else fc1.weight.device
        grid = torch.linspace(-6, 6, 97, device=device)
        for theta in ("gelu", "gelu_tanh"):
            if (THETAS[theta].weights(grid, grid, 0.0) - act(grid.clone())).abs().max() < 1e-5:
                tensors = fc1.weight, fc2.weight.t(), fc1.bias, fc2.bias
                return cls._of(fc1.weight, *tensors, theta=theta, **kwargs)
        raise InputError(f"{act} is not GELU, exact or by tanh: no Θ computes it")

    @classmethod
    def _of(
        cls, like: Tensor, keys: Tensor, values: Tensor, *biases: Tensor | None, **kwargs: Any
    ) -> "Pattention":
        """Build a layer of these tensors; the biases are those of the scores and the outputs."""
        kwargs |= {"bias": any(each is not None for each in biases)}
        kwargs |= {"device": like.device, "dtype": like.dtype}
        layer = cls(keys.shape[1], values.shape[1], len(keys), **kwargs)
        tensors = zip((*PER_PAIR, "bias"), (keys, values, *biases), strict=True)
        found = {name: tensor for name, tensor in tensors if tensor is not None}
        layer.load_state_dict({**layer.state_dict(), **found})
        return layer

    @torch.no_grad()
    def as_linear(self) -> nn.Linear:
        """Return the linear layer that computes what the linear tokens in use do."""
        if self.theta != "linear":
            raise InputError(f"theta is {self.theta!r}, not 'linear': give a converted model")
        keys, values, *_ = self.used_tokens()
        place: Any = {"device": keys.device, "dtype": keys.dtype}
        linear = nn.Linear(self.in_features, self.out_features, self.bias is not None, **place)
        linear.weight.copy_(values.double().t() @ keys.double())
        if self.bias is not None:
            linear.bias.copy_(self.bias)
        return linear.train(self.training)

    def fuse(self) -> nn.Module:
        """Return the linear layer that computes the same if it is cheaper, else the layer itself.

        ``timm.utils.reparameterize_model`` and ``--reparam`` of timm's scripts call it. Cheaper are
        more than C_in C_out / (C_in + C_out) linear tokens. For inference: it cannot grow.
        """
        keys, values, *_ = self.used_tokens()
        cheaper = self.theta == "linear" and product_is_cheaper(keys, values)
        return self.as_linear() if cheaper else self


def join_state_dict(state_dict: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Join the old and new pairs of layers that hold them apart, as an ordinary model has them."""
    joined = dict(state_dict)
    for name in PER_PAIR:
        for new in [key for key in joined if key.endswith(f"new_{name}")]:
            old = new.removesuffix(f"new_{name}") + name
            if old in joined:  # else it is the file of new pairs alone
                joined[old] = torch.cat((joined[old], joined.pop(new)))
    return joined


# timm's feature extractor keeps it as a module, which TorchScript compiles; not so pattention().
register_notrace_module(Pattention)
