"""A timm model as an mmpretrain backbone."""

from pathlib import Path
from typing import Any

import timm
import torch
from mmengine.model import BaseModule
from mmpretrain.registry import MODELS
from timm.models import group_parameters
from timm.models.deit import VisionTransformerDistilled
from torch import Tensor

from tokenformer_vit.errors import InputError
from tokenformer_vit.growth import grow
from tokenformer_vit.models import TokenFormerViT, compile_blocks
from tokenformer_vit.models.checkpoints import load_model


@MODELS.register_module()
class TimmClassificationBackbone(BaseModule):
    """A TokenFormer or timm ViT with pooling, for mmpretrain's ``LinearClsHead``.

    mmpretrain's own ``TIMMBackbone`` gives the head tokens without pooling, and its
    ``TimmClassifier`` renames parameters, so averaged weights cannot be saved.

    Args:
        model_name: Name of a registered timm model whose classifier is a linear ``head``.
        pretrained: Start from timm's pretrained weights.
        checkpoint_path: Start from this checkpoint of the same model. The head of the checkpoint is
            not used, and positions are resampled for another ``img_size``.
        compile: Compile each block, for training and evaluation; checkpoints stay the same. A text
            is a mode of ``torch.compile``, a dict has its arguments.
        backend: How a TokenFormer computes Pattention: one of ``tokenformer_vit.ops.BACKENDS``.
        growth: Arguments of :func:`tokenformer_vit.growth.grow`, which then appends pairs to the
            model. ``freeze="old"`` trains only the new pairs and the head. Default ``seed``: the
            seed of the run.
        frozen: Train only the head: a linear probe. The model stays in evaluation mode, so
            training sees the features that validation sees.
        **kwargs: Arguments of the timm model.

    Raises:
        InputError: If the model has no linear head, the checkpoint cannot be read or does not fit,
            ``frozen`` is given together with ``growth``, or ``backend`` for a ViT.

    Shape:
        (B, in_chans, H, W) -> a tuple of one (B, C), the pooled and normalised features; of a model
        with a distillation token, a tuple of the class token and that token, (B, C) each.
    """

    def __init__(
        self,
        model_name: str,
        pretrained: bool = False,
        checkpoint_path: str = "",
        compile: bool | str | dict[str, Any] = False,
        backend: str = "auto",
        growth: dict[str, Any] | None = None,
        frozen: bool = False,
        **kwargs: Any,
    ) -> None:
        super().__init__()
        self.model: Any
        if frozen and growth:
            raise InputError(
                "frozen=True would also freeze the pairs that growth appends: set one of the two, "
                "or train only the new pairs with growth=dict(..., freeze='old')"
            )
        if checkpoint_path:
            self.model = load_model(model_name, Path(checkpoint_path), for_images=False, **kwargs)
            self.model.train().reset_classifier(0)
        else:
            self.model = timm.create_model(
                model_name, pretrained=pretrained, num_classes=0, **kwargs
            )
        self.has_distillation_token = isinstance(self.model, VisionTransformerDistilled)
        check_classifier(self.model, model_name)
        if growth:
            grow(self.model, **{"seed": torch.initial_seed(), **growth})
        self.frozen = frozen
        if frozen:
            self.model.requires_grad_(False)
        if backend != "auto":
            if not isinstance(self.model, TokenFormerViT):
                raise InputError(
                    f"backend is {backend!r}, but {model_name} is not a TokenFormer: set "
                    "backend='auto'"
                )
            self.model.set_backend(backend)
        compile_blocks(self.model, compile)

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
        """Return the depth of a parameter, for mmpretrain's layer-wise learning rate decay.

        Args:
            param_name: Full name of the parameter.
            prefix: Part of the name before this backbone's own names.

        Returns:
            The number of the parameter's layer, and the number of layers including the head.
        """
        layers: Any = group_parameters(
            self.model, self.model.group_matcher(coarse=False), reverse=True
        )
        # A norm after the pooling belongs to the head, as in timm's own layer decay.
        last = layers.get("fc_norm.weight", max(layers.values()) + 1)
        return layers.get(param_name.removeprefix(f"{prefix}model."), last), last + 1


def check_classifier(model: Any, name: str) -> None:
    """Check that a timm model has a linear head, so that it can be a backbone."""
    heads = model.pretrained_cfg.get("classifier")
    if heads != "head" and list(heads or ()) != ["head", "head_dist"]:
        raise InputError(
            f"{name} has no linear classifier called 'head': choose a TokenFormer or one of timm's "
            "ViTs"
        )


def num_classes(classifier: Any) -> int:
    """Return the number of classes of a head; 0 without such a head, as of an autoencoder."""
    return getattr(getattr(classifier, "head", None), "num_classes", 0)
