"""Weight averaging in one operation for all parameters, instead of one for each."""

from typing import Any

import torch
from mmengine.model import ExponentialMovingAverage
from mmengine.registry import MODELS
from torch import nn
from torch.optim.swa_utils import get_ema_multi_avg_fn


@MODELS.register_module()
class ForeachMovingAverage(ExponentialMovingAverage):
    """mmengine's ``ExponentialMovingAverage``, with PyTorch's update of many tensors at a time.

    On a CPU the averages are the same to the last bit. The state dict is the same.

    Args:
        model: The model to average.
        momentum: Share of the new weights in each update, above 0 and below 1.
        **kwargs: As for ``ExponentialMovingAverage``.
    """

    def __init__(self, model: nn.Module, momentum: float = 0.0002, **kwargs: Any) -> None:
        super().__init__(model, momentum, **kwargs)
        self._average = get_ema_multi_avg_fn(1 - momentum)

    @torch.no_grad()
    def update_parameters(self, model: nn.Module) -> None:
        """Update the average with the weights of a model; the first call copies the weights."""
        if self.steps == 0 or self.steps % self.interval:
            super().update_parameters(model)
            return
        source = model.state_dict() if self.update_buffers else dict(model.named_parameters())
        names = [name for name, x in self.avg_parameters.items() if x.is_floating_point()]
        averages: Any = [self.avg_parameters[name] for name in names]
        sources: Any = [source[name].to(x.device) for name, x in zip(names, averages, strict=True)]
        self._average(averages, sources, self.steps)
        if not self.update_buffers and (buffers := list(self.module.buffers())):
            torch._foreach_copy_(buffers, list(model.buffers()))
        self.steps += 1
