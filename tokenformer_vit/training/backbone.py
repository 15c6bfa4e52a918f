"""A timm model as an mmpretrain backbone."""

from pathlib import Path
from typing import Any, Literal

import timm
import torch
from mmengine.model import BaseModule
from mmpretrain.registry import MODELS
from timm.models import VisionTransformer, group_parameters
from timm.models.deit import VisionTransformerDistilled
from torch import Tensor, nn

from tokenformer_vit.errors import InputError
from tokenformer_vit.growth import grow, pattention_layers
from tokenformer_vit.models import TokenFormerViT, compile_blocks
from tokenformer_vit.models.checkpoints import load_model
from tokenformer_vit.models.vit import draw_prefix_tokens

from .storage import secure_files


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
        frozen: Train only the head: a linear probe.
        frozen_norms: Freeze weight and bias of every LayerNorm in the blocks. From scratch they are
            1 and 0, and the model computes as if it had none; its checkpoints stay the same.
        nested_tau: Initial τ of the smaller sizes of a nested model: ``scaled`` by the number of
            pairs, or ``kept`` from all pairs.
        stem_seed: Seed for all weights outside the blocks (patch embedding, class token,
            positions, final norm). With the same width and image size, a ViT and TokenFormers of
            any Θ and number of pairs then start from the same weights there. The blocks and the
            global random generators do not change.
        **kwargs: Arguments of the timm model.

    Raises:
        InputError: If the model has no linear head, the checkpoint cannot be read or does not fit,
            ``init_cfg`` is given, ``stem_seed`` is given together with loaded weights or for a
            model that is no ViT, ``frozen`` together with ``growth``, ``frozen_norms`` for a model
            without such norms, or ``backend`` is unknown or given for a ViT.

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
        frozen_norms: bool = False,
        nested_tau: Literal["scaled", "kept"] = "scaled",
        stem_seed: int | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__()
        secure_files()
        self.model: Any
        if "init_cfg" in kwargs:
            raise InputError(
                f"{type(self).__name__} has no init_cfg: give the file of the weights as "
                "checkpoint_path"
            )
        if stem_seed is not None and (checkpoint_path or pretrained):
            raise InputError(
                f"stem_seed is {stem_seed}, but the weights are loaded "
                f"({checkpoint_path or 'pretrained=True'}): set stem_seed=None, or start from "
                "fresh weights"
            )
        if frozen and growth:
            raise InputError(
                "frozen=True would also freeze the pairs that growth appends: set one of the two, "
                "or train only the new pairs with growth=dict(..., freeze='old')"
            )
        if checkpoint_path:
            if not Path(checkpoint_path).is_file():
                raise InputError(
                    f"there is no file {checkpoint_path} to start from: set "
                    "model.backbone.checkpoint_path; the header of the config says how to make one"
                )
            self.model = load_model(
                model_name, Path(checkpoint_path), for_images=False, **kwargs
            ).train()
            self.model.reset_classifier(0)
        else:
            self.model = timm.create_model(
                model_name, pretrained=pretrained, num_classes=0, **kwargs
            )
        self.has_distillation_token = isinstance(self.model, VisionTransformerDistilled)
        check_classifier(self.model, model_name)
        if stem_seed is not None:
            self._draw_stem(stem_seed, model_name, kwargs)
        if growth:
            grow(self.model, **{"seed": torch.initial_seed(), **growth})
        if nested_tau == "kept":
            for layer in pattention_layers(self.model).values():
                layer.set_nested(layer.nested, layer.tau)
        if frozen:
            self.model.requires_grad_(False)
        if frozen_norms:
            _freeze_norms(self.model, model_name)
        if backend != "auto":
            if not isinstance(self.model, TokenFormerViT):
                raise InputError(
                    f"backend is {backend!r}, but {model_name} is not a TokenFormer: set "
                    "backend='auto'"
                )
            self.model.set_backend(backend)
        compile_blocks(self.model, compile)

    def _draw_stem(self, seed: int, model_name: str, kwargs: dict[str, Any]) -> None:
        """Take the weights outside the blocks from a model without blocks, drawn from ``seed``."""
        if not isinstance(self.model, VisionTransformer):
            raise InputError(
                f"stem_seed is {seed}, but {model_name} is not one of timm's ViTs: set "
                "stem_seed=None"
            )
        # On the CPU: no other generator has to be seeded and restored.
        with torch.random.fork_rng(devices=[]), torch.device("cpu"):
            torch.default_generator.manual_seed(seed)
            stem = timm.create_model(model_name, **{**kwargs, "num_classes": 0, "depth": 0})
            draw_prefix_tokens(stem, torch.Generator().manual_seed(seed))  # also of a ViT
        left = self.model.load_state_dict(stem.state_dict(), strict=False)
        assert not left.unexpected_keys
        assert all(name.startswith("blocks.") for name in left.missing_keys)

    def init_weights(self) -> None:
        """Leave the weights as timm initialised or loaded them."""

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


def _freeze_norms(model: Any, name: str) -> None:
    modules = model.blocks.modules() if isinstance(model, VisionTransformer) else ()
    norms = [norm for norm in modules if isinstance(norm, nn.LayerNorm) and norm.elementwise_affine]
    if not norms:
        raise InputError(
            f"frozen_norms is True, but the blocks of {name} have no LayerNorm with weight and "
            "bias: set frozen_norms=False"
        )
    for norm in norms:
        norm.requires_grad_(False)


def check_classifier(model: Any, name: str) -> None:
    """Check that a timm model has a linear head, so that it can be a backbone.

    Raises:
        InputError: If it has another one.
    """
    heads = model.pretrained_cfg.get("classifier")
    if heads != "head" and list(heads or ()) != ["head", "head_dist"]:
        raise InputError(
            f"{name} has no linear classifier called 'head': choose a TokenFormer or one of timm's "
            "ViTs"
        )


def num_classes(classifier: Any) -> int:
    """Return the number of classes of a head; 0 for a masked autoencoder."""
    return getattr(classifier.head, "num_classes", 0)
