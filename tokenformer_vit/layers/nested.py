"""A layer of pairs that can use only its first pairs, with a τ for each trained size."""

from bisect import bisect_right
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from tokenformer_vit.errors import InputError
from tokenformer_vit.ops import default_tau


class NestedLayer(nn.Module):
    """The part of :class:`~tokenformer_vit.layers.Pattention` that concerns sizes."""

    theta: str
    num_param_tokens: int
    init_tau: float
    tau: Tensor
    active: Tensor | None
    nested: tuple[int, ...]  # the trained sizes below P, each at least as large as the one before
    nested_sizes: Tensor | None  # (n,) int64, the same for the state dict
    nested_tau: Tensor | None  # (n,) float32, τ of these sizes
    # What `size` sets. TorchScript compiles attributes, but no property with a setter.
    _size: int | None
    _place: int
    _ratio: float
    __jit_unused_properties__ = ("size", "num_used")

    @property
    def size(self) -> int | None:
        """Number of pairs in use, the first ones; ``None`` for all. Not in the state dict."""
        return self._size

    @size.setter
    def size(self, size: int | None) -> None:
        if size is not None and not 1 <= size <= self.num_param_tokens:
            raise InputError(
                f"size must be from 1 to {self.num_param_tokens} pairs, but got {size!r}"
            )
        if size not in (None, self.num_param_tokens) and self.active is not None:
            raise InputError("a mask is active: call TokenMasks.activate() before you set a size")
        self._size = None if size == self.num_param_tokens else size
        self._place, self._ratio = self._find(self._size)

    def _find(self, size: int | None) -> tuple[int, float]:
        """Return the place of a size in ``nested``, 0 if there is none, and then its share of τ.

        A size that was not trained has the ratio of :func:`~tokenformer_vit.ops.default_tau`.
        """
        if size is None:
            return 0, 1.0
        if size in self.nested:  # the last one, if a small layer has equal sizes
            # Counted from the end: torch.compile would compile again for the places 0 and 1.
            return bisect_right(self.nested, size) - 1 - len(self.nested), 1.0
        return 0, default_tau(self.theta, size) / default_tau(self.theta, self.num_param_tokens)

    def tau_of(self, size: int) -> Tensor:
        """Return τ of the first ``size`` pairs; see :attr:`size`."""
        return self._tau_at(*self._find(None if size == self.num_param_tokens else size))

    def _tau_at(self, place: int, ratio: float) -> Tensor:
        nested_tau = self.nested_tau
        if nested_tau is not None and place != 0:
            return nested_tau[place]
        return self.tau * ratio

    def set_nested(self, sizes: Sequence[int], tau: Tensor | None = None) -> None:
        """Give smaller sizes a τ of their own, (n,), by default the initial one; use all pairs."""
        self.check_order(sizes)
        self.nested, self.size = tuple(sizes), None
        start = torch.empty(len(sizes), dtype=torch.float32, device=self.tau.device)
        numbers = torch.empty_like(start, dtype=torch.int64)
        self.register_buffer("nested_sizes", numbers if sizes else None)
        for tensors in (self._parameters, self._buffers):
            tensors.pop("nested_tau", None)
        self._register("nested_tau", start if sizes else None, isinstance(self.tau, nn.Parameter))
        if isinstance(self.nested_tau, nn.Parameter):
            self.nested_tau.requires_grad_(self.tau.requires_grad)
        self._fill_nested(tau)

    def _register(self, name: str, tensor: Tensor | None, learned: bool) -> None:
        if learned and tensor is not None:
            self.register_parameter(name, nn.Parameter(tensor))
        else:
            self.register_buffer(name, tensor)

    def check_order(self, sizes: Sequence[int]) -> None:
        """Check sizes for :meth:`set_nested`, which raises the same error."""
        for before, size in zip((1, *sizes), sizes, strict=False):
            if not before <= size <= self.num_param_tokens:
                raise InputError(
                    f"nested must be from 1 to {self.num_param_tokens} pairs and not decrease, but "
                    f"got {tuple(sizes)}; give sizes that contain one another"
                )

    @torch.no_grad()
    def _fill_nested(self, tau: Tensor | None) -> None:
        if self.nested_tau is not None and self.nested_sizes is not None:
            whole = default_tau(self.theta, self.num_param_tokens)
            start = [self.init_tau * default_tau(self.theta, size) / whole for size in self.nested]
            # A model may be built with bfloat16 as PyTorch's default type.
            default = self.nested_tau.new_tensor(start, dtype=torch.float32)
            self.nested_tau.copy_(default if tau is None else tau)
            self.nested_sizes.copy_(self.nested_sizes.new_tensor(self.nested))

    @property
    def num_used(self) -> int:
        """Number of pairs in use: those of the mask or of the size, or all."""
        if self.active is not None:
            return len(self.active)
        return self.num_param_tokens if self._size is None else self._size

    def check_nested(self, state_dict: Mapping[str, Tensor], prefix: str) -> None:
        """Raise InputError if a state dict has other nested sizes for the layer at ``prefix``."""
        theirs = state_dict.get(f"{prefix}nested_sizes")
        if theirs is None or theirs.is_meta:  # of a model that is built without memory
            return
        if theirs.tolist() != [*self.nested]:
            raise InputError(
                f"{prefix.rstrip('.') or 'the layer'} has the nested sizes {theirs.tolist()} in "
                f"the checkpoint and {[*self.nested] or 'none'} in the model: build the model with "
                "the `nested` of the checkpoint's config.json"
            )
