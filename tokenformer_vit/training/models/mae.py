"""Pre-training by masked image modelling (MAE): the encoder sees only the visible patches.

Decoder, target and loss are mmpretrain's; the encoder is the timm model itself.
"""

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from mmpretrain.models import MAE
from mmpretrain.models.utils import build_2d_sincos_position_embedding
from mmpretrain.registry import MODELS
from timm.models import VisionTransformer
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from tokenformer_vit.benchmarking.costs import Cost, model_costs, total
from tokenformer_vit.errors import InputError


@MODELS.register_module()
class MaskedAutoencoder(MAE):
    """mmpretrain's ``MAE`` with a timm model as its encoder.

    Decoder and target take their sizes from the encoder. As in MAE, the position embeddings are
    fixed: sines and cosines in two dimensions, or the embeddings of loaded weights. Fine-tuning
    trains them. The other weights of the encoder start as timm draws them.

    In training, every image gets a random mask. In a validation, the index of an image in the data
    set decides its mask, and no global random generator changes.

    Args:
        backbone: Config of a ``TimmClassificationBackbone``.
        neck: Config of an ``MAEPretrainDecoder``.
        head: Config of an ``MAEPretrainHead``.
        mask_ratio: Share of the patches that the encoder does not see.
        train_cfg: None, or no augments: a classifier mixes images, and an autoencoder does not.
        **kwargs: Other arguments of ``MAE``.

    Raises:
        InputError: If the encoder is not one of timm's ViTs with a class token and position
            embeddings, an image does not consist of n x n patches, or images are to be mixed.

    Source:
        Masked Autoencoders Are Scalable Vision Learners, arXiv:2111.06377.
    """

    backbone: Any
    neck: Any
    head: Any

    def __init__(
        self,
        backbone: Mapping[str, Any],
        neck: Mapping[str, Any],
        head: Mapping[str, Any],
        mask_ratio: float = 0.75,
        train_cfg: Mapping[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        if train_cfg and train_cfg.get("augments"):
            raise InputError("a MaskedAutoencoder does not mix images: set model.train_cfg=None")
        encoder: Any = MODELS.build(dict(backbone))
        side, patch = _grid(encoder.model, backbone["model_name"])
        num_visible = int(side**2 * (1 - mask_ratio))
        channels = encoder.model.in_chans
        decoder = {"num_patches": side**2, "embed_dim": encoder.model.embed_dim}
        super().__init__(
            encoder,  # type: ignore[arg-type]  # mmpretrain also takes a module
            {**neck, **decoder, "patch_size": patch, "in_chans": channels},
            {**head, "patch_size": patch, "in_channels": channels},
            **kwargs,
        )
        self._num_visible = num_visible
        positions = encoder.model.pos_embed.requires_grad_(False)
        if not (backbone.get("checkpoint_path") or backbone.get("pretrained")):
            own = build_2d_sincos_position_embedding(side, positions.shape[-1], cls_token=True)
            positions.data[:, -(side**2) :] = own[:, 1:]
            positions.data[:, : -(side**2)] = 0  # of class and register tokens

    def training_flops(self) -> int:
        """Count the FLOPs of training on one image: encoder on visible patches, and decoder."""
        encoder = self.backbone.model
        seen = total(model_costs(encoder, encoder.num_prefix_tokens + self._num_visible))
        tokens = self.neck.mask_token.new_empty(1, 1 + self._num_visible, encoder.embed_dim)
        restore = torch.arange(encoder.patch_embed.num_patches, device=tokens.device)[None]
        with torch.no_grad(), FlopCounterMode(display=False) as decoder:
            self.neck(tokens, restore)
        return (seen + Cost(forward_flops=decoder.get_total_flops())).training_flops

    def encode(
        self, images: Tensor, indices: Iterable[int] | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Mask images, and encode their visible patches.

        Args:
            images: (B, C, H, W), normalised.
            indices: Numbers that decide the masks in evaluation; default: 0 to B - 1.

        Returns:
            The class token and the V visible patches after the final norm, (B, 1 + V, C); the
            mask, (B, L), with 1 for masked patches; and the places that bring all patches, visible
            ones first, back into their order, (B, L) int64.
        """
        vit = self.backbone.model
        tokens = vit._pos_embed(vit.patch_embed(images))  # (B, P + L, C)
        prefix, patches = tokens.tensor_split([vit.num_prefix_tokens], dim=1)
        order, mask, restore = self._draw_mask(patches, indices)
        visible = patches.take_along_dim(order[:, : self._num_visible, None], dim=1)
        encoded = vit.blocks(vit.norm_pre(torch.cat([prefix, visible], dim=1)))
        encoded = vit.fc_norm(vit.norm(encoded))  # one of them is the final norm
        # The decoder has no place for register tokens.
        return torch.cat([encoded[:, :1], encoded[:, prefix.shape[1] :]], dim=1), mask, restore

    def _draw_mask(
        self, patches: Tensor, indices: Iterable[int] | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Draw an order of the patches; return it with the mask and the way back."""
        if self.training:
            noise = torch.rand(patches.shape[:2], device=patches.device)
        else:
            seeds = range(len(patches)) if indices is None else indices
            generators = [torch.Generator().manual_seed(seed) for seed in seeds]
            rows = [torch.rand(patches.shape[1], generator=each) for each in generators]
            noise = torch.stack(rows).to(patches.device)
        order = noise.argsort(dim=1)
        restore = order.argsort(dim=1)
        return order, (restore >= self._num_visible).float(), restore

    def extract_feat(self, inputs: Tensor) -> tuple[Tensor]:
        """Return the pooled features of whole images, (B, C)."""
        return self.backbone(inputs)

    def forward(self, inputs: Any, data_samples: Any = None, mode: str = "tensor") -> Any:
        """Compute features (``tensor``), the ``loss``, or the loss of each image (``predict``)."""
        if mode == "predict":
            indices = [sample.sample_idx for sample in data_samples]
            predicted, mask = self._decode(inputs, indices)
            losses = torch.vmap(self.head.loss)(predicted[:, None], inputs[:, None], mask[:, None])
            return [{"error": loss} for loss in losses]
        return super().forward(inputs, data_samples, mode)

    def loss(self, inputs: Tensor, data_samples: Any = None, **kwargs: Any) -> dict[str, Tensor]:
        """Return the mean ``loss`` of the masked patches; labels are not used."""
        predicted, mask = self._decode(inputs)
        return {"loss": self.head.loss(predicted, inputs, mask)}

    def _decode(self, images: Tensor, indices: Any = None) -> tuple[Tensor, Tensor]:
        encoded, mask, restore = self.encode(images, indices)
        return self.neck(encoded, restore), mask


def _grid(vit: Any, name: str) -> tuple[int, int]:
    """Return the patches along a side of the image, and the pixels along a side of a patch."""
    if (
        not isinstance(vit, VisionTransformer)
        or vit.cls_token is None
        or vit.pos_embed is None
        or getattr(vit, "rope", None) is not None
    ):
        raise InputError(
            f"MAE needs one of timm's ViTs with a class token and only absolute position "
            f"embeddings, which {name} is not: choose a TokenFormer, or a ViT such as "
            "vit_base_patch16_224"
        )
    stem: Any = vit.patch_embed
    (rows, columns), patch = stem.grid_size, stem.patch_size[0]
    if rows != columns or stem.img_size != (rows * patch,) * 2 or stem.patch_size[1] != patch:
        raise InputError(
            f"img_size {stem.img_size} of {name} does not consist of n x n patches of "
            f"{stem.patch_size}, which MAE needs: change img_size or patch_size"
        )
    return rows, patch
