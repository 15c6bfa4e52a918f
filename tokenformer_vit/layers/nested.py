"""A layer of pairs that can use only its first pairs, with a τ for each trained size."""

import math
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from numbers import Integral

import torch
from torch import Tensor, nn

from tokenformer_vit.errors import InputError
from tokenformer_vit.ops import default_tau


class NestedLayer(nn.Module):
    """The part of :class:`~tokenformer_vit.layers.Pattention` that concerns sizes.

    Attributes:
        nested: The trained sizes below P, each at least as large as the one before.
        nested_tau: (n,) float32 τ of these sizes; ``None`` in an ordinary layer.
        nested_sizes: (n,) int64, ``nested`` for the state dict.
    """

    theta: str
    num_param_tokens: int
    init_tau: float
    tau: Tensor
    active: Tensor | None
    nested: tuple[int, ...]
    nested_sizes: Tensor | None
    nested_tau: Tensor | None
    # What `size` sets. TorchScript compiles attributes, but no property with a setter.
    _size: int | None
    _place: int
    _blend: Tensor | None
    __jit_unused_properties__ = ("size", "num_used")

    @property
    def size(self) -> int | None:
        """Number of pairs in use, the first ones; ``None`` for all. Not in the state dict.

        The layer then computes with views of these pairs as an ordinary layer with as many pairs.
        τ of the size is in ``nested_tau``, if the size is one of ``nested``; it is the last one, if
        a small layer has equal sizes, and ``tau``, if the size is P. Between two sizes
        log τ is linear in the log of the size. Below the smallest size τ has the ratio of
        :func:`~tokenformer_vit.ops.default_tau`.
        """
        return self._size

    @size.setter
    def size(self, size: int | None) -> None:
        self.check_size(size)
        self._size = None if size == self.num_param_tokens else size
        self._place, self._blend = self._find_tau(self._size)

    def _find_tau(self, size: int | None) -> tuple[int, Tensor | None]:
        if size is None:
            return 0, None
        if size in self.nested:
            # Counted from the end: torch.compile would compile again for the places 0 and 1.
            return bisect_right(self.nested, size) - 1 - len(self.nested), None
        with torch.inference_mode(False):  # a size that is set there is also trained later
            blend = torch.tensor(self._blended(size), dtype=torch.float32, device=self.tau.device)
        return 0, blend

    def check_size(self, size: int | None) -> None:
        """Check that the layer can use only its first pairs.

        Args:
            size: Number of pairs; ``None`` or P for all.

        Raises:
            InputError: If ``size`` is not a whole number from 1 to P, or a mask is active.
        """
        if size in (None, self.num_param_tokens):
            return
        most = self.num_param_tokens
        if not isinstance(size, Integral) or not 1 <= size <= most:
            raise InputError(f"size must be from 1 to {most} pairs, but got {size!r}")
        if self.active is not None:
            raise InputError(
                "a size cannot be set while a mask is active; call TokenMasks.activate() to use "
                "all pairs"
            )

    def _blended(self, size: int) -> list[float]:
        """Return log τ of a size that is not nested: a constant, and the share of each log τ."""
        sizes = (*self.nested, self.num_param_tokens)
        shares, above = [0.0] * len(sizes), bisect_right(sizes, size)
        upper, lower = bisect_right(sizes, sizes[above]) - 1, above - 1  # the last of equal sizes
        if above == 0:
            shares[upper] = 1.0
            return [math.log(self._ratio(size, sizes[0])), *shares]
        span = sizes[upper] / sizes[lower]
        shares[upper] = math.log(size / sizes[lower]) / math.log(span)
        shares[lower] = 1 - shares[upper]
        return [0.0, *shares]

    def _ratio(self, size: int, of: int) -> float:
        return default_tau(self.theta, size) / default_tau(self.theta, of)

    def set_nested(self, sizes: Sequence[int], tau: Tensor | None = None) -> None:
        """Give smaller sizes of this layer a τ of their own, in the state dict; use all pairs.

        Args:
            sizes: Numbers of pairs, each at least as large as the one before and at most P. Empty
                for an ordinary layer.
            tau: (n,) τ of the sizes; ``None`` for the initial τ of the layer times the ratio of
                :func:`~tokenformer_vit.ops.default_tau`. They are learned if ``tau`` of the layer
                is learned.

        Raises:
            InputError: If a size is out of range or smaller than the one before.
        """
        self.check_order(sizes)
        self.register_buffer("_blend", None, persistent=False)
        self.nested, self.size = tuple(sizes), None
        start = torch.empty(len(sizes), dtype=torch.float32, device=self.tau.device)
        numbers = torch.empty_like(start, dtype=torch.int64)
        self.register_buffer("nested_sizes", numbers if sizes else None)
        for tensors in (self._parameters, self._buffers):
            tensors.pop("nested_tau", None)
        if sizes and isinstance(self.tau, nn.Parameter):
            self.nested_tau = nn.Parameter(start, self.tau.requires_grad)
        else:
            self.register_buffer("nested_tau", start if sizes else None)
        self._fill_nested(tau)

    def check_order(self, sizes: Sequence[int]) -> None:
        """Check sizes for :meth:`set_nested`, which raises the same errors."""
        for before, size in zip((1, *sizes), sizes, strict=False):
            if not isinstance(size, Integral) or not before <= size <= self.num_param_tokens:
                raise InputError(
                    f"nested must be from 1 to {self.num_param_tokens} pairs and not decrease, but "
                    f"got {tuple(sizes)}; give sizes that contain one another"
                )

    @torch.no_grad()
    def _fill_nested(self, tau: Tensor | None) -> None:
        if self.nested_tau is not None and self.nested_sizes is not None:
            all_pairs = self.num_param_tokens
            start = [self.init_tau * self._ratio(size, all_pairs) for size in self.nested]
            # A model may be built with bfloat16 as PyTorch's default type.
            default = self.nested_tau.new_tensor(start, dtype=torch.float32)
            self.nested_tau.copy_(default if tau is None else tau)
            self.nested_sizes.copy_(self.nested_sizes.new_tensor(self.nested))

    def tau_of(self, size: int) -> Tensor:
        """Return τ of the first ``size`` pairs; see :attr:`size`."""
        if size == self.num_param_tokens:
            return self.tau
        return self._read_tau(*self._find_tau(size))

    def _read_tau(self, place: int, blend: Tensor | None) -> Tensor:
        nested_tau = self.nested_tau
        if blend is None:
            assert nested_tau is not None
            return nested_tau[place]
        taus = self.tau.reshape(1)
        if nested_tau is not None:
            taus = torch.cat([nested_tau, taus])
        return (blend[0] + (blend[1:] * taus.log()).sum()).exp()

    @property
    def num_used(self) -> int:
        """Number of pairs in use: those of the mask or of the size, or all."""
        if self.active is not None:
            return len(self.active)
        return self.num_param_tokens if self._size is None else self._size

    def check_nested(self, state_dict: Mapping[str, Tensor], prefix: str) -> None:
        """Refuse a state dict with other nested sizes; those on the meta device are unknown.

        Args:
            state_dict: State dict of a model that holds this layer.
            prefix: Name of the layer in it, with a dot at the end.

        Raises:
            InputError: If it has nested sizes, and they are not those of this layer.
        """
        theirs = state_dict.get(f"{prefix}nested_sizes")
        if theirs is None or theirs.is_meta:  # of a model that is built without memory
            return
        numbers = theirs.tolist()
        if numbers != [*self.nested]:
            raise InputError(
                f"{prefix.rstrip('.') or 'the layer'} has the nested sizes {numbers} in the "
                f"checkpoint and {[*self.nested] or 'none'} in the model: build the model with the "
                "`nested` of the checkpoint's config.json"
            )
