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
from probes import held_out_of
from torch import Tensor, nn

from tokenformer_vit.growth import TokenMasks, count_pairs, grow
from tokenformer_vit.language import MASKS
from tokenformer_vit.models.compilation import BLOCKS
from tokenformer_vit.training.distributed import unwrap
from tokenformer_vit.training.language.data import TokenDataset
from tokenformer_vit.training.language.model import CausalLM


@MODELS.register_module()
class MaskedLM(CausalLM):
    """A language model with a mask of pairs for each text.

    ``masks`` has ``new``, the name of a mask with the pairs for the training text: those that
    ``growth`` appends, or else all. Only these are active and change in training. Validation reads
    a text with the mask that has the name of its folder, or else with the newest mask.
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
        super().__init__(checkpoint=checkpoint, **kwargs)
        before = dict.fromkeys(count_pairs(self.model), 0)
        if growth:
            before = count_pairs(self.model)
            # Pairs outside the mask get no gradient; unless frozen, weight decay changes them.
            freeze = {"freeze": "old"} if masks else {}
            grow(self.model, **{"seed": torch.initial_seed(), **freeze, **growth})
        self.masks = None
        if masks:
            file = Path(checkpoint, MASKS)
            known = torch.load(file, weights_only=True) if checkpoint and file.is_file() else {}
            self.masks = TokenMasks(self.model, known)
            self.masks.add(masks["new"], {name: slice(n, None) for name, n in before.items()})
            self.masks.activate(masks["new"])
        if frozen_stem or (masks and growth):
            for parameter in self._stem():
                parameter.requires_grad_(not frozen_stem)

    def _stem(self) -> list[nn.Parameter]:
        """List the parameters outside the blocks: embeddings, positions, final norm and head."""
        parts = self.model.named_modules()
        blocks = [part for name, part in parts if name.rpartition(".")[2] in BLOCKS]
        within = {parameter for part in blocks for parameter in part.parameters()}
        return [parameter for parameter in self.model.parameters() if parameter not in within]

    def _measure(self, inputs: Tensor, source: Tensor) -> tuple[Tensor, Tensor]:
        """Read each text through its mask."""
        if self.masks is None:
            return super()._measure(inputs, source)
        losses, right, rows = [], [], []
        for number in map(int, source.unique()):
            name = self.sources[number] if number < len(self.sources) else ""
            rows.append((source == number).nonzero()[:, 0])
            with self.masks.use(name if name in self.masks.pairs else [*self.masks.pairs][-1]):
                own = super()._measure(inputs[rows[-1]], source[rows[-1]])
            losses.append(own[0])
            right.append(own[1])
        order = torch.cat(rows).argsort()
        return torch.cat(losses)[order], torch.cat(right)[order]


@HOOKS.register_module()
class MasksHook(Hook):
    """Tell a ``MaskedLM`` the names of the texts, and at the end save its masks beside it."""

    def before_train(self, runner) -> None:
        """Name the validation texts."""
        unwrap(runner.model).sources = runner.val_dataloader.dataset.metainfo["sources"]

    @master_only
    def after_train(self, runner) -> None:
        """Save the masks, which the next stage and ``evaluate-lm`` load."""
        if (masks := unwrap(runner.model).masks) is not None:
            torch.save(masks.pairs, Path(runner.work_dir, MASKS))


@DATASETS.register_module()
class HeldOutRows(TokenDataset):
    """The rows of a text without those that are held out, or with these alone."""

    def __init__(self, data_root: str, split: str, held_out: bool) -> None:
        super().__init__(data_root, split)
        self._held_out, size = held_out, super().__len__()
        chosen = held_out_of(size)
        self._rows = chosen if held_out else sorted({*range(size)} - {*chosen})

    def __reduce__(self) -> Any:
        """Open the files again in a worker that is not a fork."""
        return type(self), (str(self.folders[0]), self._split, self._held_out)

    def __len__(self) -> int:
        """Return the number of rows."""
        return len(self._rows)

    def __getitem__(self, index: int) -> dict[str, Any]:
        """Return a row."""
        return super().__getitem__(self._rows[index])
