"""bfloat16 autocast on any device, and weight averaging with gradient accumulation."""

import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from mmengine.device import get_device
from mmengine.hooks import EMAHook
from mmengine.logging import print_log
from mmengine.optim import OptimWrapper
from mmengine.registry import HOOKS, OPTIM_WRAPPERS
from mmpretrain.models.utils.attention import scaled_dot_product_attention_pyimpl
from torch import Tensor, nn

SLOW = 0.8  # ratio of bfloat16_speed(), which varies by a few percent, from which on it is slow


def bfloat16_speed() -> float:
    """Time products on this CPU: by how much bfloat16 is faster than float32, in about 10 ms.

    Returns:
        The ratio of the times. On a CPU without instructions for bfloat16 (AMX, AVX512_BF16), where
        PyTorch converts each number, it is far below :data:`SLOW`.
    """
    shortest = {}
    for dtype in (torch.float32, torch.bfloat16):
        matrix = torch.ones(256, 256, dtype=dtype, device="cpu")
        times = []
        for _ in range(6):  # the first ones prepare the product
            begin = time.perf_counter()
            torch.mm(matrix, matrix)
            times.append(time.perf_counter() - begin)
        shortest[dtype] = min(times)
    return shortest[torch.float32] / shortest[torch.bfloat16]


@OPTIM_WRAPPERS.register_module()
class AutocastOptimWrapper(OptimWrapper):
    """Forward passes under bfloat16 autocast, on any device.

    bfloat16 needs no loss scaling; mmengine's ``AmpOptimWrapper`` has a scaler and needs a GPU. On
    a CPU, attention is computed by matrix products, because the backward pass of PyTorch's fused
    attention is slow there in bfloat16. Where bfloat16 itself is slow, the log says so.
    """

    _model: nn.Module | None = None  # of the last forward pass

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if torch.device(get_device()).type == "cpu" and (speed := bfloat16_speed()) < SLOW:
            print_log(
                f"This CPU multiplies {1 / speed:.1f} times as fast in float32 as in bfloat16. To "
                "train in float32, leave out --amp, or give "
                "--cfg-options optim_wrapper.type=OptimWrapper",
                logger="current",
                level=logging.WARNING,
            )

    @contextmanager
    def optim_context(self, model: nn.Module) -> Iterator[None]:
        """Enter autocast, and skip gradient synchronisation while gradients accumulate."""
        self._model = model
        device = torch.device(get_device()).type
        products = _attention_by_products(model) if device == "cpu" else nullcontext()
        with products, super().optim_context(model), torch.autocast(device, torch.bfloat16):
            yield

    def backward(self, loss: Tensor, **kwargs: Any) -> None:
        """Compute gradients; blocks that are computed again use the same attention as before."""
        on_cpu = self._model is not None and torch.device(get_device()).type == "cpu"
        with _attention_by_products(self._model) if on_cpu else nullcontext():
            super().backward(loss, **kwargs)


@contextmanager
def _attention_by_products(model: Any) -> Iterator[None]:
    """Switch fused attention off; without gradients, as in validation, it is faster."""
    before = []
    for module in model.modules():
        if getattr(module, "fused_attn", False):
            before.append((module, "fused_attn", True))
            module.fused_attn = False  # type: ignore[assignment]
        elif hasattr(module, "scaled_dot_product_attention"):  # mmpretrain's name
            name = "scaled_dot_product_attention"
            before.append((module, name, getattr(module, name)))
            setattr(module, name, scaled_dot_product_attention_pyimpl)
    try:
        yield
    finally:
        for module, name, value in before:
            setattr(module, name, value)


@HOOKS.register_module()
class AccumulationEMAHook(EMAHook):
    """mmengine's ``EMAHook``, but it averages once for each optimiser step.

    The stock hook averages after every iteration. With gradient accumulation its average would
    forget ``accumulative_counts`` times as fast as the recipe says.

    Args:
        ema_type: Name of the averaged model.
        validated: Validate and export the averaged model. If False, these take the model itself,
            and checkpoints have the average as ``ema_state_dict``.
        **kwargs: As for ``EMAHook``.
    """

    def __init__(
        self, ema_type: str = "ForeachMovingAverage", validated: bool = True, **kwargs: Any
    ) -> None:
        super().__init__(ema_type=ema_type, **kwargs)
        self.validated = validated

    def before_save_checkpoint(self, runner, checkpoint: dict) -> None:
        """Add both models, and say which one ``state_dict`` is."""
        checkpoint["meta"]["averaged"] = self.validated
        super().before_save_checkpoint(runner, checkpoint)

    def _swap_ema_parameters(self) -> None:
        if self.validated:
            super()._swap_ema_parameters()

    def _swap_ema_state_dict(self, checkpoint: dict) -> None:
        # A run may be resumed with another ``validated`` than that of its checkpoint.
        if checkpoint["meta"].get("averaged", True):
            super()._swap_ema_state_dict(checkpoint)

    def after_train_iter(self, runner, *args: Any, **kwargs: Any) -> None:
        """Average, if this iteration ended with an optimiser step."""
        if runner.optim_wrapper.should_update():
            super().after_train_iter(runner, *args, **kwargs)
