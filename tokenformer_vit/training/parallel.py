"""Data-parallel training whose gradients may travel in half precision."""

from typing import Any

from mmengine.model import MMDistributedDataParallel
from mmengine.registry import MODEL_WRAPPERS
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import (
    bf16_compress_hook,
    fp16_compress_hook,
)

_HOOKS = {"bf16": bf16_compress_hook, "fp16": fp16_compress_hook}


@MODEL_WRAPPERS.register_module()
class CompressingDataParallel(MMDistributedDataParallel):
    """mmengine's ``MMDistributedDataParallel``, with compression of the gradients.

    Args:
        module: The model, on the device of its process.
        compression: Type in which the processes exchange gradients, ``bf16`` or ``fp16``; None for
            the type of the gradients. Half the bytes are sent, and the mean is rounded.
        broadcast_buffers: Whether the buffers of the first process replace the others before each
            forward pass.
        **kwargs: As for PyTorch's ``DistributedDataParallel``.
    """

    def __init__(
        self,
        module: nn.Module,
        compression: str | None = None,
        broadcast_buffers: bool = False,
        **kwargs: Any,
    ) -> None:
        super().__init__(module, broadcast_buffers=broadcast_buffers, **kwargs)
        if compression is not None:
            self.register_comm_hook(None, _HOOKS[compression])
