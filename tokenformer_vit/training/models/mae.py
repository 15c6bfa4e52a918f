"""Pre-training by masked image modelling (MAE): a timm model encodes only the visible patches."""

from collections.abc import Iterable
from typing import Any

import torch
from timm.models import VisionTransformer
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from tokenformer_vit.benchmarking.costs import model_costs, total
from tokenformer_vit.errors import InputError

from ..engine import MAE, MODELS, build_2d_sincos_position_embedding


@MODELS.register_module()
class MaskedAutoencoder(MAE):
    """mmpretrain's ``MAE`` (arXiv:2111.06377) with a timm model as its encoder.

    Decoder and target take their sizes from the encoder. The position embeddings are fixed: sines
    and cosines in two dimensions, or those of loaded weights; fine-tuning trains them. Masks are
    random in training; in a validation, the index of an image in the data set decides its mask.
    ``mask_ratio`` is the share of the patches that the encoder does not see.
    """

    backbone: Any
    neck: Any
    head: Any

    def __init__(
        self, backbone: dict, neck: dict, head: dict, mask_ratio: float = 0.75, **kwargs: Any
    ) -> None:
        if (kwargs.pop("train_cfg", None) or {}).get("augments"):
            raise InputError("a MaskedAutoencoder does not mix images: set model.train_cfg=None")
        encoder: Any = MODELS.build(dict(backbone))
        vit, stem = encoder.model, encoder.model.patch_embed
        # Others would compute without a class token, or without their positions.
        tokens = isinstance(vit, VisionTransformer) and vit.cls_token is not None
        if not tokens or vit.pos_embed is None or getattr(vit, "rope", None) is not None:
            raise InputError(
                "MAE needs a class token and only absolute position embeddings, unlike "
                f"{backbone['model_name']}: choose a TokenFormer, or vit_base_patch16_224"
            )
        # The head refuses images that do not consist of n x n square patches.
        side, patch = stem.grid_size[0], stem.patch_size[0]
        decoder = {"num_patches": side**2, "embed_dim": vit.embed_dim, "in_chans": vit.in_chans}
        super().__init__(
            encoder,  # type: ignore[arg-type]  # mmpretrain also takes a module
            {**neck, **decoder, "patch_size": patch},
            {**head, "patch_size": patch, "in_channels": vit.in_chans},
            **kwargs,
        )
        self._num_visible = int(side**2 * (1 - mask_ratio))
        positions = vit.pos_embed.requires_grad_(False)
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
        return 3 * (seen.forward_flops + decoder.get_total_flops())

    def encode(
        self, images: Tensor, indices: Iterable[int] | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Encode the class token and the V visible patches, (B, 1 + V, C), with masks by indices.

        Also return the mask, (B, L), with 1 for masked patches, and the places that bring all
        patches, visible ones first, back into their order, (B, L) int64.
        """
        vit = self.backbone.model
        tokens = vit._pos_embed(vit.patch_embed(images))  # (B, P + L, C)
        prefix, patches = tokens.tensor_split([vit.num_prefix_tokens], dim=1)
        order = self._draw_order(patches, indices)
        restore = order.argsort(dim=1)
        mask = (restore >= self._num_visible).float()
        visible = patches.take_along_dim(order[:, : self._num_visible, None], dim=1)
        encoded = vit.blocks(vit.norm_pre(torch.cat([prefix, visible], dim=1)))
        encoded = vit.fc_norm(vit.norm(encoded))  # one of them is the final norm
        # The decoder has no place for register tokens.
        return torch.cat([encoded[:, :1], encoded[:, prefix.shape[1] :]], dim=1), mask, restore

    def _draw_order(self, patches: Tensor, indices: Iterable[int] | None) -> Tensor:
        """Draw an order of the patches, in which the first ones are visible."""
        if self.training:
            return torch.rand(patches.shape[:2], device=patches.device).argsort(dim=1)
        seeds = range(len(patches)) if indices is None else indices
        generators = [torch.Generator().manual_seed(seed) for seed in seeds]
        rows = [torch.rand(patches.shape[1], generator=each) for each in generators]
        return torch.stack(rows).to(patches.device).argsort(dim=1)

    def forward(self, inputs: Any, data_samples: Any = None, mode: str = "tensor") -> Any:
        """Compute the ``loss`` of a batch, or the loss of each image (``predict``)."""
        if mode == "predict":
            indices = [sample.sample_idx for sample in data_samples]
            encoded, mask, restore = self.encode(inputs, indices)
            parts = (self.neck(encoded, restore), inputs, mask)
            losses = torch.vmap(self.head.loss)(*(part[:, None] for part in parts))
            return [{"error": loss} for loss in losses]
        return super().forward(inputs, data_samples, mode)

    def loss(self, inputs: Tensor, data_samples: Any = None, **kwargs: Any) -> dict[str, Tensor]:
        """Return the mean ``loss`` of the masked patches; labels are not used."""
        encoded, mask, restore = self.encode(inputs)
        return {"loss": self.head.loss(self.neck(encoded, restore), inputs, mask)}
