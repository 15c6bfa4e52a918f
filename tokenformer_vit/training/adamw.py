"""AdamW that takes less time on the processor."""

from collections.abc import Callable
from operator import is_
from typing import Any

import torch
from torch import Tensor, optim


class AdamW(optim.AdamW):
    """PyTorch's fused ``AdamW``, which lists its tensors once and not in each step.

    The arguments, the numbers and the state dict are the same. ``fused`` must be true, and the
    parameters of a group must be on one device and of one type.
    """

    # For each group: the parameters with a gradient, their states, and the tensors of these.
    _lists: dict[int, tuple[list[Tensor], list[dict[str, Tensor]], list[list[Tensor]]]] | None = (
        None
    )

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Set the state; loading a state dict does this."""
        super().__setstate__(state)
        self._lists = None

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Make a step, and return what ``closure`` returns."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        overflow: Tensor | None = getattr(self, "found_inf", None)  # from a gradient scaler
        for index, group in enumerate(self.param_groups):
            every = [each.grad for each in group["params"]]
            grads = [grad for grad in every if grad is not None]
            trained = [
                p for p, grad in zip(group["params"], every, strict=True) if grad is not None
            ]
            if not trained:
                continue
            averages, squares, largest, steps, ones = self._state_of(index, group, trained)
            torch._foreach_add_(steps, ones)  # 1 would become a tensor for each parameter
            beta1, beta2 = group["betas"]
            torch._fused_adamw_(
                trained,
                grads,
                averages,
                squares,
                largest,
                steps,
                lr=group["lr"],
                beta1=beta1,
                beta2=beta2,
                weight_decay=group["weight_decay"],
                eps=group["eps"],
                amsgrad=group["amsgrad"],
                maximize=group["maximize"],
                grad_scale=getattr(self, "grad_scale", None),
                found_inf=overflow,
            )
            if overflow is not None:
                torch._foreach_sub_(steps, [overflow] * len(steps))  # there was no step
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Delete the gradients, or set them to zero."""
        if not set_to_none:
            super().zero_grad(set_to_none)
            return
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.grad = None

    def _state_of(
        self, index: int, group: dict[str, Any], trained: list[Tensor]
    ) -> list[list[Tensor]]:
        """List the state of the parameters that have a gradient; growth replaces states."""
        parameters, states, lists = (self._lists or {}).get(index, ([], [], []))
        alike = len(parameters) == len(trained) and all(map(is_, parameters, trained))
        if not (alike and all(map(is_, states, map(self.state.get, trained)))):
            _, _, *lists = every = [[] for _ in range(6)]
            self._init_group(group, *every)  # makes the state of new parameters
            lists.append([torch.ones_like(lists[-1][0])] * len(trained))
            states = [self.state[parameter] for parameter in trained]
            self._lists = {**(self._lists or {}), index: (trained, states, lists)}
        return lists
