"""Pre-training by masked image modelling (MAE): the encoder sees only the visible patches.

Decoder, target and loss are mmpretrain's; the encoder is the timm model itself.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from mmengine.dist import master_only
from mmengine.hooks import Hook
from mmengine.registry import HOOKS
from mmpretrain.models import MAE
from mmpretrain.models.utils import build_2d_sincos_position_embedding
from mmpretrain.registry import MODELS
from timm.models import VisionTransformer
from torch import Tensor
from torch.utils.data import Subset
from torch.utils.flop_counter import FlopCounterMode

from tokenformer_vit.benchmarking.costs import Cost, model_costs, total
from tokenformer_vit.errors import InputError
from tokenformer_vit.vision.drawing import draw_reconstructions

from .reports import BEFORE_RECORD, validated_model


@MODELS.register_module()
class MaskedAutoencoder(MAE):
    """mmpretrain's ``MAE`` with a timm model as its encoder.

    Decoder and target take their sizes from the encoder. As in MAE, the position embeddings are
    fixed: sines and cosines in two dimensions, or the embeddings of loaded weights. Fine-tuning
    trains them. The other weights of the encoder start as timm draws them.

    In training, every image gets a random mask. In evaluation, the place of an image in its batch
    decides its mask, and no global random generator changes.

    Args:
        backbone: Config of a ``TimmClassificationBackbone``.
        neck: Config of an ``MAEPretrainDecoder``.
        head: Config of an ``MAEPretrainHead``.
        mask_ratio: Share of the patches that the encoder does not see.
        train_cfg: None. A classifier has its batch augmentation here; MAE has none.
        **kwargs: Other arguments of ``MAE``.

    Raises:
        InputError: If the encoder is not one of timm's ViTs with a class token and position
            embeddings, an image does not consist of n x n patches, ``mask_ratio`` leaves no
            visible or no masked patch, or ``train_cfg`` is set.

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
        if train_cfg:
            raise InputError(
                f"model.train_cfg is {dict(train_cfg)}, but a MaskedAutoencoder does not mix "
                "images: set model.train_cfg=None"
            )
        encoder: Any = MODELS.build(dict(backbone))
        side, patch = _grid(encoder.model, backbone["model_name"])
        num_visible = int(side**2 * (1 - mask_ratio))
        if not 0 < num_visible < side**2:
            raise InputError(
                f"mask_ratio is {mask_ratio}, but an image has {side**2} patches: mask and leave "
                "at least one of them"
            )
        channels = encoder.model.in_chans
        decoder = {"num_patches": side**2, "embed_dim": encoder.model.embed_dim}
        super().__init__(
            encoder,  # type: ignore[arg-type]  # mmpretrain also takes a module
            {**neck, **decoder, "patch_size": patch, "in_chans": channels},
            {**head, "patch_size": patch, "in_channels": channels},
            **kwargs,
        )
        self._num_visible, self._size = num_visible, (channels, side * patch, side * patch)
        positions = encoder.model.pos_embed.requires_grad_(False)
        if not (backbone.get("checkpoint_path") or backbone.get("pretrained")):
            own = build_2d_sincos_position_embedding(side, positions.shape[-1], cls_token=True)
            positions.data[:, -(side**2) :] = own[:, 1:]
            positions.data[:, : -(side**2)] = 0  # of class and register tokens

    def training_flops(self) -> int:
        """Count the FLOPs of training on one image: encoder on visible patches, and decoder.

        Products are counted, as by :func:`~tokenformer_vit.benchmarking.costs.training_flops`.
        """
        encoder = self.backbone.model
        seen = total(model_costs(encoder, encoder.num_prefix_tokens + self._num_visible))
        tokens = self.neck.mask_token.new_empty(1, 1 + self._num_visible, encoder.embed_dim)
        restore = torch.arange(encoder.patch_embed.num_patches, device=tokens.device)[None]
        with torch.no_grad(), FlopCounterMode(display=False) as decoder:
            self.neck(tokens, restore)
        return (seen + Cost(forward_flops=decoder.get_total_flops())).training_flops

    def encode(self, images: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Mask images, and encode their visible patches.

        Args:
            images: (B, C, H, W), normalised.

        Returns:
            The class token and the V visible patches after the final norm, (B, 1 + V, C); the
            mask, (B, L), with 1 for masked patches; and the places that bring all patches, visible
            ones first, back into their order, (B, L) int64.

        Raises:
            InputError: If the images do not have the size of the encoder.
        """
        if images.shape[1:] != self._size:
            given, needed = (" x ".join(map(str, size)) for size in (images.shape[1:], self._size))
            raise InputError(
                f"a batch has images of {given} (channels, height, width), but the encoder takes "
                f"{needed}: change the crop of the pipelines, or model.backbone.img_size"
            )
        vit = self.backbone.model
        tokens = vit._pos_embed(vit.patch_embed(images))  # (B, P + L, C)
        prefix, patches = tokens.tensor_split([vit.num_prefix_tokens], dim=1)
        order, mask, restore = self._draw_mask(patches)
        visible = patches.take_along_dim(order[:, : self._num_visible, None], dim=1)
        encoded = vit.blocks(vit.norm_pre(torch.cat([prefix, visible], dim=1)))
        encoded = vit.fc_norm(vit.norm(encoded))  # one of them is the final norm
        # The decoder has no place for register tokens.
        return torch.cat([encoded[:, :1], encoded[:, prefix.shape[1] :]], dim=1), mask, restore

    def _draw_mask(self, patches: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Draw an order of the patches; return it with the mask and the way back."""
        if self.training:
            noise = torch.rand(patches.shape[:2], device=patches.device)
        else:
            generator = torch.Generator().manual_seed(0)
            noise = torch.rand(patches.shape[:2], generator=generator).to(patches.device)
        order = noise.argsort(dim=1)
        restore = order.argsort(dim=1)
        return order, (restore >= self._num_visible).float(), restore

    def extract_feat(self, inputs: Tensor) -> tuple[Tensor]:
        """Return the pooled features of whole images, (B, C)."""
        return self.backbone(inputs)

    def forward(self, inputs: Any, data_samples: Any = None, mode: str = "tensor") -> Any:
        """Compute features (``tensor``), the ``loss``, or the loss of each image (``predict``)."""
        if mode == "predict":
            predicted, mask = self._decode(inputs)
            losses = torch.vmap(self.head.loss)(predicted[:, None], inputs[:, None], mask[:, None])
            return [{"error": loss} for loss in losses]
        return super().forward(inputs, data_samples, mode)

    def loss(self, inputs: Tensor, data_samples: Any = None, **kwargs: Any) -> dict[str, Tensor]:
        """Return the mean ``loss`` of the masked patches; labels are not used."""
        predicted, mask = self._decode(inputs)
        return {"loss": self.head.loss(predicted, inputs, mask)}

    def _decode(self, images: Tensor) -> tuple[Tensor, Tensor]:
        encoded, mask, restore = self.encode(images)
        return self.neck(encoded, restore), mask

    @torch.no_grad()
    def reconstruct(self, images: Tensor) -> Tensor:
        """Fill the masked patches of images with the decoder's output.

        If the target is normalised by patch, a masked patch gets its true mean and variance back,
        as in MAE's own demonstration.

        Args:
            images: (B, C, H, W), normalised.

        Returns:
            (B, 3, C, H, W): the images; the images with 0 in place of masked patches; and the
            images with the reconstruction there.
        """
        head = self.head
        predicted, mask = self._decode(images)
        patches, masked = head.patchify(images), mask[:, :, None].bool()
        if head.norm_pix:
            variance, mean = torch.var_mean(patches, dim=-1, keepdim=True)
            predicted = predicted * (variance + 1e-6).sqrt() + mean
        pictures = (patches.masked_fill(masked, 0), torch.where(masked, predicted, patches))
        return torch.stack([images, *map(head.unpatchify, pictures)], dim=1)


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


@HOOKS.register_module()
class ReconstructionHook(Hook):
    """At the end, draw the reconstruction of validation images: ``reconstructions.png``.

    Validation uses the same weights.

    Args:
        images: Number of images. They are spread evenly over the validation set.
    """

    priority = BEFORE_RECORD

    def __init__(self, images: int = 8) -> None:
        self._images = images

    @master_only
    def after_train(self, runner) -> None:
        """Write the picture into the work directory."""
        loader, model = runner.val_dataloader, validated_model(runner).eval()
        number = min(self._images, len(loader.dataset))
        places = [index * len(loader.dataset) // number for index in range(number)]
        batch = loader.collate_fn(Subset(loader.dataset, places).__getitems__([*range(number)]))
        pictures = model.reconstruct(model.data_preprocessor(batch)["inputs"])
        pixels = pictures * model.data_preprocessor.std + model.data_preprocessor.mean
        path = Path(runner.work_dir) / "reconstructions.png"
        draw_reconstructions(pixels.round().clamp(0, 255).byte().cpu(), path)
