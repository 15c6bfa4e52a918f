"""A timm model as an mmpretrain backbone."""

from pathlib import Path
from typing import Any

import timm
from mmengine.model import BaseModule
from mmpretrain.registry import MODELS
from timm.models import get_model_args, group_parameters
from torch import Tensor, nn

from tokenformer_vit.errors import InputError
from tokenformer_vit.models import compile_blocks, timm_state_dict
from tokenformer_vit.prediction import load_model


@MODELS.register_module()
class TimmClassificationBackbone(BaseModule):
    """A TokenFormer or timm ViT, pooled, in front of mmpretrain's ``LinearClsHead``.

    mmpretrain's own ``TIMMBackbone`` hands unpooled tokens to the head, and its ``TimmClassifier``
    renames parameters in a way that averaged weights cannot be saved.

    Args:
        model_name: Name of a registered timm model whose classifier is a linear ``head``.
        pretrained: Start from timm's pretrained weights.
        checkpoint_path: Start from this file, a checkpoint of the same model; its head is left out,
            and positions are resampled if ``img_size`` is another.
        compile: Compile each block, for training and evaluation alike; checkpoints stay the same.
        **kwargs: Arguments of the timm model.

    Raises:
        InputError: If the model has no such head, or the checkpoint cannot be read or does not fit.

    Shape:
        (B, in_chans, H, W) -> a tuple of one (B, C), the pooled and normalised features.
    """

    def __init__(
        self,
        model_name: str,
        pretrained: bool = False,
        checkpoint_path: str = "",
        compile: bool = False,
        **kwargs: Any,
    ) -> None:
        super().__init__()
        self.model: Any
        if checkpoint_path:
            self.model = load_model(model_name, Path(checkpoint_path), **kwargs).train()
            self.model.reset_classifier(0)
        else:
            self.model = timm.create_model(
                model_name, pretrained=pretrained, num_classes=0, **kwargs
            )
        if self.model.pretrained_cfg.get("classifier") != "head":
            raise InputError(
                f"{model_name} has no linear classifier called 'head'; choose a TokenFormer or "
                "one of timm's ViTs"
            )
        if compile:
            compile_blocks(self.model)

    def init_weights(self) -> None:
        """Leave the weights as timm initialised or loaded them."""

    def forward(self, x: Tensor) -> tuple[Tensor]:
        """Map images to pooled features."""
        return (self.model(x),)

    def get_layer_depth(self, param_name: str, prefix: str = "") -> tuple[int, int]:
        """Tell mmpretrain's layer-wise learning rate decay where a parameter stands.

        Args:
            param_name: Full name of the parameter.
            prefix: What precedes this backbone's own names in it.

        Returns:
            The layer of the parameter, and the number of layers with the head's.
        """
        layers: Any = group_parameters(
            self.model, self.model.group_matcher(coarse=False), reverse=True
        )
        # A norm behind the pooling belongs to the head, as timm's own layer decay has it.
        last = layers.get("fc_norm.weight", max(layers.values()) + 1)
        return layers.get(param_name.removeprefix(f"{prefix}model."), last), last + 1


def as_timm_model(classifier: Any) -> nn.Module:
    """Build the timm model, head included, that computes what an mmpretrain classifier computes.

    Args:
        classifier: ``ImageClassifier`` of this backbone and a ``LinearClsHead``.

    Returns:
        A copy on the CPU; ``classifier`` is left as it is.
    """
    model = classifier.backbone.model
    # Rebuilt from its recorded arguments, so that timm writes down what it needs to do so again.
    args = {name: value for name, value in get_model_args(model).items() if name != "num_classes"}
    rebuilt = timm.create_model(
        model.pretrained_cfg["architecture"], num_classes=classifier.head.num_classes, **args
    )
    rebuilt.load_state_dict(timm_state_dict(classifier.state_dict()))
    return rebuilt
