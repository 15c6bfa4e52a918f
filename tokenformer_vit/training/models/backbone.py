"""A timm model as an mmpretrain backbone."""

from pathlib import Path
from typing import Any

import timm
import torch
from timm.models import group_parameters
from timm.models.deit import VisionTransformerDistilled
from torch import Tensor, nn

from tokenformer_vit.errors import InputError
from tokenformer_vit.growth import grow
from tokenformer_vit.models.checkpoints import load_model

from ..engine import MODELS, BaseModule, is_model_wrapper


@MODELS.register_module()
class TimmClassificationBackbone(BaseModule):
    """A TokenFormer or timm ViT with pooling, for mmpretrain's ``LinearClsHead``.

    It gives a tuple of the pooled features, (B, C); with a distillation token, of the two tokens.

    Args:
        model_name: A timm model whose classifier is a linear ``head``; other arguments are its own.
        pretrained: Start from timm's pretrained weights.
        checkpoint_path: Start from this checkpoint of the same model, but for its head.
        growth: Arguments of :func:`tokenformer_vit.growth.grow`, which then appends pairs.
        frozen: Train only the head; the model stays in evaluation mode, as validation sees it.
    """

    def __init__(
        self,
        model_name: str,
        pretrained: bool = False,
        checkpoint_path: str = "",
        growth: dict[str, Any] | None = None,
        frozen: bool = False,
        **kwargs: Any,
    ) -> None:
        super().__init__()
        self.model: Any
        if frozen and growth:
            raise InputError(
                "frozen=True would also freeze the pairs that growth appends: set one of the two"
            )
        if checkpoint_path:
            self.model = load_model(model_name, Path(checkpoint_path), new_norm=True, **kwargs)
            self.model.train().reset_classifier(0)
        else:
            kwargs["num_classes"] = 0
            self.model = timm.create_model(model_name, pretrained=pretrained, **kwargs)
        self.has_distillation_token = isinstance(self.model, VisionTransformerDistilled)
        check_classifier(self.model, model_name)
        if growth:
            grow(self.model, **{"seed": torch.initial_seed(), **growth})
        self.frozen = frozen
        if frozen:
            self.model.requires_grad_(False)

    def init_weights(self) -> None:
        """Leave the weights as timm initialised or loaded them."""

    def train(self, mode: bool = True) -> "TimmClassificationBackbone":
        """Set the mode; what is frozen stays in evaluation mode, without drop path or dropout."""
        super().train(mode)
        if self.frozen:
            self.model.eval()
        return self

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        """Map images to pooled features."""
        if self.has_distillation_token:
            tokens = self.model.forward_features(x)
            return tuple(self.model.head_drop(tokens[:, index]) for index in range(2))
        return (self.model(x),)

    def get_layer_depth(self, param_name: str, prefix: str = "") -> tuple[int, int]:
        """Return the number of a parameter's layer, and of all layers including the head."""
        layers: Any = group_parameters(
            self.model, self.model.group_matcher(coarse=False), reverse=True
        )
        # A norm after the pooling belongs to the head, as in timm's own layer decay.
        last = layers.get("fc_norm.weight", max(layers.values()) + 1)
        return layers.get(param_name.removeprefix(f"{prefix}model."), last), last + 1


def check_classifier(model: Any, name: str) -> None:
    """Check that a timm model has a linear head."""
    heads = model.pretrained_cfg.get("classifier")
    if heads != "head" and list(heads or ()) != ["head", "head_dist"]:
        raise InputError(
            f"{name} has no linear classifier called 'head': choose a TokenFormer or ViT"
        )


def num_classes(classifier: Any) -> int:
    """Return the number of classes of a head; 0 without such a head, as of an autoencoder."""
    return getattr(getattr(classifier, "head", None), "num_classes", 0)


def unwrap(model: nn.Module) -> Any:
    """Return the model inside a data-parallel wrapper, or the model itself."""
    return model.module if is_model_wrapper(model) else model
