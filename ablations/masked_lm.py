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
from tokenformer_vit.growth import TokenMasks, count_pairs
from tokenformer_vit.training.distributed import unwrap
from tokenformer_vit.training.language.data import TokenDataset
from tokenformer_vit.training.language.model import CausalLM

MASKS = "masks.pt"  # beside a model


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
        self.masks = None
        if masks:
            file = Path(checkpoint, MASKS)
            known = torch.load(file, weights_only=True) if checkpoint and file.is_file() else {}
            if growth and not known:
                raise InputError(f"{checkpoint} has no {MASKS}: its pairs would be in the new mask")
            self.masks = TokenMasks(self.model, known)
            new = {}
            for name in count_pairs(self.model):
                used = max((int(mask[name][-1]) + 1 for mask in known.values()), default=0)
                new[name] = slice(used, None)
            self.masks.add(masks["new"], new)
            self.masks.activate(masks["new"])
        for name, parameter in self.model.named_parameters() if frozen_stem or masks else ():
            if "blocks." not in name:
                parameter.requires_grad_(not frozen_stem)

    def _measure(self, inputs: Tensor, source: Tensor) -> tuple[Tensor, Tensor]:
        """Read each text through its mask."""
        if self.masks is None:
            return super()._measure(inputs, source)
        losses = torch.zeros(inputs[:, 1:].shape, device=inputs.device)
        right, names = losses.bool(), dict(enumerate(self.sources))
        for number in map(int, source.unique()):
            name, rows = names.get(number), source == number
            with self.masks.use(name if name in self.masks.pairs else [*self.masks.pairs][-1]):
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
        torch.save(unwrap(runner.model).masks.pairs, Path(runner.work_dir, MASKS))


@DATASETS.register_module()
class HeldOutRows(Subset):
    """The rows of a text without those that are held out, or with these alone."""

    def __init__(self, data_root: str, split: str, held_out: bool) -> None:
        text = TokenDataset(data_root, split)
        super().__init__(text, part_of(len(text), held_out))
        self.folders, self.metainfo = text.folders, text.metainfo
