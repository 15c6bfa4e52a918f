"""LoRA for ordinary ViTs, as a baseline for tuning with appended parameter tokens."""

from collections.abc import Mapping
from typing import Any

from mmpretrain.models.peft import LoRAModel
from mmpretrain.models.peft.lora import LoRALinear
from mmpretrain.registry import MODELS
from torch import Tensor, nn

_WRAPPER = "backbone.module."


@MODELS.register_module()
class LoRABackbone(LoRAModel):
    """mmpretrain's ``LoRAModel`` with checkpoints of the whole model.

    ``LoRAModel`` removes everything but LoRA's weights from a state dict. That includes the step
    count of an averaged model, so a resumed run would start a new average. Here nothing is removed.
    The model that is exported at the end is an ordinary one: the low-rank products are added to the
    weights.

    Args:
        module: Config of a ``TimmClassificationBackbone``; all its weights are frozen.
        alpha: Scale of the products: they are multiplied by alpha / rank.
        rank: Inner size of the products.
        drop_rate: Dropout before the products.
        targets: Linear layers to tune, each as ``dict(type=SUFFIX_OR_PATTERN)`` with an optional
            ``alpha``, ``rank`` and ``drop_rate``.

    Shape:
        As ``module``.

    Source:
        LoRA, arXiv:2106.09685.
    """

    @property
    def model(self) -> nn.Module:
        """Return the timm model."""
        module: Any = self.module  # mmpretrain's type says config, but it is built by now
        return module.model

    def _register_state_dict_hooks(self) -> None:
        """Keep state dicts complete."""

    def exported(self, state_dict: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Add LoRA's products to the weights of their layers, in the state dict of a classifier."""
        merged = dict(state_dict)
        for own, layer in self.named_modules(prefix="backbone"):
            if not isinstance(layer, LoRALinear):
                continue
            down, up = (merged.pop(f"{own}.lora_{part}.weight") for part in ("down", "up"))
            weight = merged.pop(f"{own}.original_layer.weight")  # (C_out, C_in)
            merged[f"{own}.weight"] = weight + layer.scaling * (up @ down)
            if (bias := merged.pop(f"{own}.original_layer.bias", None)) is not None:
                merged[f"{own}.bias"] = bias
        return {name.replace(_WRAPPER, "backbone.", 1): part for name, part in merged.items()}
