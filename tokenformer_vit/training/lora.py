"""LoRA for ordinary ViTs: the tuning that appended parameter tokens are compared with."""

from collections.abc import Mapping
from typing import Any

from mmpretrain.models.peft import LoRAModel
from mmpretrain.models.peft.lora import LoRALinear
from mmpretrain.registry import MODELS
from torch import Tensor, nn

_WRAPPER = "backbone.module."


@MODELS.register_module()
class LoRABackbone(LoRAModel):
    """mmpretrain's ``LoRAModel``, whose checkpoints hold all of the model.

    ``LoRAModel`` strikes from a state dict what is not LoRA's, and with it what others have written
    there before: of an averaged model the number of its steps, so that a resumed run would begin
    another average. Here nothing is struck. Checkpoints are then those of a whole model, and what
    is exported at the end is an ordinary one, with the products added to the weights.

    Args:
        module: Config of a ``TimmClassificationBackbone``; every weight of it is frozen.
        alpha: The products are scaled by alpha / rank.
        rank: Inner size of the products.
        drop_rate: Dropout in front of them.
        targets: Linear layers that get one, each as ``dict(type=SUFFIX_OR_PATTERN)``, which may
            have its own ``alpha``, ``rank`` and ``drop_rate``.

    Shape:
        Those of ``module``.

    Source:
        LoRA, arXiv:2106.09685.
    """

    @property
    def model(self) -> nn.Module:
        """Return the timm model within."""
        module: Any = self.module  # its config, says mmpretrain's type, but it is built by then
        return module.model

    def _register_state_dict_hooks(self) -> None:
        """Leave state dicts whole."""


def merge_lora(state_dict: Mapping[str, Tensor], classifier: nn.Module) -> dict[str, Tensor]:
    """Add the products of LoRA to the weights beside which they stand.

    Args:
        state_dict: Of an mmpretrain classifier.
        classifier: The classifier, which says how the products are scaled.

    Returns:
        The tensors of the same classifier without LoRA; where there is none, the same tensors.
    """
    merged = dict(state_dict)
    for name, layer in classifier.named_modules():
        if not isinstance(layer, LoRALinear):
            continue
        down, up = (merged.pop(f"{name}.lora_{part}.weight") for part in ("down", "up"))
        weight = merged.pop(f"{name}.original_layer.weight")  # (C_out, C_in)
        merged[f"{name}.weight"] = weight + layer.scaling * (up @ down)
        if (bias := merged.pop(f"{name}.original_layer.bias", None)) is not None:
            merged[f"{name}.bias"] = bias
    return {name.replace(_WRAPPER, "backbone.", 1): tensor for name, tensor in merged.items()}
