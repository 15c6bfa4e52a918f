"""What only ablations of language need of a training: pairs for each text, and held-out rows.

Configs name these classes with their module, because it needs transformers.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from mmengine.dist import master_only
from mmengine.hooks import Hook
from mmengine.registry import HOOKS
from mmpretrain.registry import DATASETS, MODELS
from probes import part_of
from torch import Tensor
from torch.utils.data import Subset

from tokenformer_vit.errors import InputError
from tokenformer_vit.growth import count_pairs, use_pairs
from tokenformer_vit.training.language.data import TokenDataset
from tokenformer_vit.training.language.model import CausalLM
from tokenformer_vit.training.models.backbone import unwrap

MASKS = "masks.pt"


@MODELS.register_module()
class MaskedLM(CausalLM):
    """A language model with a mask of pairs for each text.

    ``masks`` has ``new``, the name of a mask with the pairs for the training text: those that no
    mask of the checkpoint has. Only these are active and change in training. Validation reads a
    text with the mask that has the name of its folder, or else with the newest mask.
    ``frozen_stem`` freezes embeddings, positions, final norm and head.
    """

    sources: tuple[str, ...] = ()  # names of the validation texts, by number

    def __init__(
        self,
        masks: Mapping[str, str] | None = None,
        frozen_stem: bool = False,
        checkpoint: str = "",
        growth: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        if masks and growth:  # weight decay changes pairs outside the mask unless they are frozen
            growth = {"freeze": "old", **growth}
        super().__init__(checkpoint=checkpoint, growth=growth, **kwargs)
        self.masks: dict[str, dict[str, Tensor]] = {}  # indices by text and layer, newest last
        if masks:
            file = Path(checkpoint, MASKS)
            if checkpoint and file.is_file():
                self.masks = torch.load(file, weights_only=True)
            elif growth:
                raise InputError(f"{checkpoint} has no {MASKS}: its pairs would be in the new mask")
            used = [
                max((int(m[name][-1]) + 1 for m in self.masks.values()), default=0)
                for name in count_pairs(self.model)
            ]
            counts = count_pairs(self.model).items()
            self.masks[masks["new"]] = {
                name: torch.arange(start, count)
                for start, (name, count) in zip(used, counts, strict=True)
            }
        for name, parameter in self.model.named_parameters() if frozen_stem or masks else ():
            if "blocks." not in name:
                parameter.requires_grad_(not frozen_stem)

    def forward(self, inputs: Tensor, source: Tensor | None = None, mode: str = "tensor") -> Any:
        """Use the pairs of the newest mask."""
        newest = self.masks[[*self.masks][-1]] if self.masks else {}
        with use_pairs(self.model, newest):
            return super().forward(inputs, source, mode)

    def _measure(self, inputs: Tensor, source: Tensor) -> tuple[Tensor, Tensor]:
        """Read each text through its mask."""
        if not self.masks:
            return super()._measure(inputs, source)
        losses = torch.zeros(inputs[:, 1:].shape, device=inputs.device)
        right, names = losses.bool(), dict(enumerate(self.sources))
        for number in map(int, source.unique()):
            name, rows = names.get(number), source == number
            with use_pairs(self.model, self.masks.get(str(name), self.masks[[*self.masks][-1]])):
                losses[rows], right[rows] = super()._measure(inputs[rows], source[rows])
        return losses, right


@HOOKS.register_module()
class MasksHook(Hook):
    """Tell a ``MaskedLM`` the names of the texts, and at the end save its masks beside it."""

    def before_train(self, runner) -> None:
        """Name the validation texts."""
        unwrap(runner.model).sources = runner.val_dataloader.dataset.metainfo["sources"]

    @master_only
    def after_train(self, runner) -> None:
        """Save the masks, which the next stage loads."""
        torch.save(unwrap(runner.model).masks, Path(runner.work_dir, MASKS))


@DATASETS.register_module()
class HeldOutRows(Subset):
    """The rows of a text without those that are held out, or with these alone."""

    def __init__(self, data_root: str, split: str, held_out: bool) -> None:
        text = TokenDataset(data_root, split)
        super().__init__(text, part_of(len(text), held_out))
        self.folders, self.metainfo = text.folders, text.metainfo
