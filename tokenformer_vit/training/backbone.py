"""A timm model as an mmpretrain backbone."""

from pathlib import Path
from typing import Any

import timm
import torch
from mmengine.model import BaseModule
from mmpretrain.registry import MODELS
from timm.models import VisionTransformer, get_model_args, group_parameters
from torch import Tensor, nn

from tokenformer_vit.errors import InputError
from tokenformer_vit.growth import grow
from tokenformer_vit.layers.segments import fuse_state_dict
from tokenformer_vit.models import compile_blocks, timm_state_dict
from tokenformer_vit.models.checkpoints import load_model

from .lora import merge_lora
from .storage import secure_files


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
        growth: Arguments of :func:`tokenformer_vit.growth.grow`, to append pairs to what was built
            or loaded. With ``freeze="old"`` a head trains beside the new pairs, and nothing else.
            Without a ``seed`` of their own they are drawn from that of the run.
        frozen: Train none of these weights, so that the head alone learns: a linear probe.
        stem_seed: Draw what stands outside the blocks (patch embedding, class token, positions,
            final norm) from this seed alone. A ViT and TokenFormers of any Θ and number of pairs
            then start from the same weights there, if they are of one width and image size. The
            blocks, and the global random generators, are as they would be without it.
        **kwargs: Arguments of the timm model.

    Raises:
        InputError: If the model has no such head, the checkpoint cannot be read or does not fit,
            ``stem_seed`` is given for weights that are loaded or for a model that is no ViT, or
            pairs are appended that ``frozen`` would keep from learning.

    Shape:
        (B, in_chans, H, W) -> a tuple of one (B, C), the pooled and normalised features.
    """

    def __init__(
        self,
        model_name: str,
        pretrained: bool = False,
        checkpoint_path: str = "",
        compile: bool = False,
        growth: dict[str, Any] | None = None,
        frozen: bool = False,
        stem_seed: int | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__()
        secure_files()
        self.model: Any
        if stem_seed is not None and (checkpoint_path or pretrained):
            raise InputError(
                f"stem_seed is {stem_seed}, but the weights are loaded "
                f"({checkpoint_path or 'pretrained=True'}): set stem_seed=None, or start from "
                "fresh weights"
            )
        if frozen and growth:
            raise InputError(
                "frozen=True would keep the pairs that growth appends from learning: leave out "
                "either, or train them alone by growth=dict(..., freeze='old')"
            )
        if checkpoint_path:
            if not Path(checkpoint_path).is_file():
                raise InputError(
                    f"there is no file {checkpoint_path} to start from: set "
                    "model.backbone.checkpoint_path, or make it as the head of the config says"
                )
            self.model = load_model(
                model_name, Path(checkpoint_path), for_images=False, **kwargs
            ).train()
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
        if stem_seed is not None:
            self._draw_stem(stem_seed, model_name, kwargs)
        if growth:
            grow(self.model, **{"seed": torch.initial_seed(), **growth})
        if frozen:
            self.model.requires_grad_(False)
        if compile:
            compile_blocks(self.model)

    def _draw_stem(self, seed: int, model_name: str, kwargs: dict[str, Any]) -> None:
        """Replace all weights outside the blocks by those of the same model without blocks."""
        if not isinstance(self.model, VisionTransformer):
            raise InputError(
                f"stem_seed is {seed}, but {model_name} is not one of timm's ViTs: set "
                "stem_seed=None"
            )
        # On the CPU, so that no other generator has to be seeded and put back.
        with torch.random.fork_rng(devices=[]), torch.device("cpu"):
            torch.default_generator.manual_seed(seed)
            stem = timm.create_model(model_name, **{**kwargs, "num_classes": 0, "depth": 0})
        left = self.model.load_state_dict(stem.state_dict(), strict=False)
        assert not left.unexpected_keys
        assert all(name.startswith("blocks.") for name in left.missing_keys)

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
        classifier: ``ImageClassifier`` of this backbone, or of one that is tuned by LoRA, and a
            ``LinearClsHead``.

    Returns:
        A copy on the CPU; ``classifier`` is left as it is.
    """
    model = classifier.backbone.model
    # Rebuilt from its recorded arguments, so that timm writes down what it needs to do so again.
    args = {name: value for name, value in get_model_args(model).items() if name != "num_classes"}
    rebuilt = timm.create_model(
        model.pretrained_cfg["architecture"], num_classes=classifier.head.num_classes, **args
    )
    state_dict = merge_lora(classifier.state_dict(), classifier)
    rebuilt.load_state_dict(fuse_state_dict(timm_state_dict(state_dict)))
    return rebuilt
