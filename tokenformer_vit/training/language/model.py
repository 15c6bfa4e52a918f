"""A causal language model for mmengine's runner: a whole model of transformers, and its loss."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from mmengine.model import BaseModel
from mmpretrain.registry import MODELS
from torch import Tensor, nn

from tokenformer_vit.errors import InputError
from tokenformer_vit.growth import TokenMasks, count_pairs, grow
from tokenformer_vit.language import (
    MASKS,
    TokenFormerConfig,
    TokenFormerForCausalLM,
    load_language_model,
    transformer_lm,
)
from tokenformer_vit.models import LMConfig, compile_blocks, lm_config
from tokenformer_vit.models.compilation import BLOCKS
from tokenformer_vit.models.sizes import at_size

from ..models.nested import NestedTraining


@MODELS.register_module()
class CausalLM(NestedTraining, BaseModel):
    """A TokenFormer language model, or a Transformer as a baseline.

    Args:
        architecture: ``tokenformer``, or ``transformer`` for the form of GPT-2 or GPT-NeoX.
        config: Sizes of a new model: for a TokenFormer the fields of
            :class:`~tokenformer_vit.models.LMConfig`, perhaps with a ``preset``; for a Transformer
            the arguments of :func:`~tokenformer_vit.language.transformer_lm`.
        checkpoint: Folder of a trained model to start from; its weights are converted to float32.
        growth: Arguments of :func:`tokenformer_vit.growth.grow`, to append pairs at the start; by
            default with the seed of the run.
        masks: ``new``, the name of a mask with the pairs for the training text: those that
            ``growth`` appends, or else all. Only these are active and change in training. Masks
            are saved with the model, and loaded with a ``checkpoint``. Validation reads a text
            with the mask that has the name of its folder, or else with the newest mask.
        frozen_stem: Whether to freeze embeddings, positions, final norm and head.
        sandwich: Train a model with ``nested`` in its ``config`` at several sizes at once. A
            validation then also measures ``perplexity_at_0.25``, and so on.
        distill: With ``sandwich``: whether smaller sizes also learn from larger ones; see
            :class:`~tokenformer_vit.training.models.nested.NestedTraining`.
        compile: Whether to compile each block, or how: a mode of ``torch.compile``, or a dict of
            its arguments. Checkpoints stay the same.
    """

    sources: tuple[str, ...] = ()  # names of the validation texts, by number; the guard sets them

    def __init__(
        self,
        architecture: str = "tokenformer",
        config: Mapping[str, Any] | None = None,
        checkpoint: str = "",
        growth: dict[str, Any] | None = None,
        masks: Mapping[str, str] | None = None,
        frozen_stem: bool = False,
        sandwich: bool = False,
        distill: bool = False,
        compile: bool | str | dict[str, Any] = False,
    ) -> None:
        non_blocking = torch.cuda.is_available()
        super().__init__({"type": "BaseDataPreprocessor", "non_blocking": non_blocking})
        self.model: Any = _build(architecture, dict(config or {}), checkpoint)
        self.context_length = self.model.config.max_position_embeddings
        self.vocab_size = self.model.config.vocab_size
        before = count_pairs(self.model) if masks and growth else {}
        if growth:
            # Pairs outside the mask get no gradient; unless frozen, weight decay changes them.
            freeze = {"freeze": "old"} if masks else {}
            grow(self.model, **{"seed": torch.initial_seed(), **freeze, **growth})
        self.masks = _masks(self.model, checkpoint, masks, before) if masks else None
        if frozen_stem or (masks and growth):
            for parameter in _stem(self.model):
                parameter.requires_grad_(not frozen_stem)
        if sandwich:
            if masks:
                raise InputError("pairs of a mask have no smaller sizes: remove masks or sandwich")
            self.train_sizes(distill)
        if compile:
            compile_blocks(self.model.base_model, compile)

    @property
    def sized(self) -> Any:
        """The language model."""
        return self.model

    def forward(  # type: ignore[override]
        self, inputs: Tensor, source: Tensor | None = None, mode: str = "tensor"
    ) -> dict[str, Tensor] | list[dict[str, Tensor]] | Tensor:
        """Read the first N of (B, N + 1) tokens, and predict the last N.

        ``source``, (B,), numbers the text of each row, for its mask. Mode ``loss`` gives a dict
        with the mean cross-entropy, ``tensor`` the (B, N, V) logits, and ``predict`` a dict for
        each row: ``losses`` (N,) float32; ``right`` (N,), whether the most likely token is the true
        one; ``targets`` (N,); ``source``; perhaps ``losses_at_0.25``.
        """
        if mode == "loss":
            if not self.sandwich:
                return {"loss": _cross_entropy(self._logits(inputs), inputs)}
            return self.loss_of_sizes(
                lambda: self._logits(inputs),
                lambda logits: _cross_entropy(logits, inputs),
                lambda logits: logits,
            )
        if mode == "predict":
            return self._predict(inputs, torch.zeros(len(inputs)) if source is None else source)
        return self._logits(inputs)

    def _logits(self, inputs: Tensor) -> Tensor:
        return self.model(input_ids=inputs[:, :-1], use_cache=False).logits

    def _predict(self, inputs: Tensor, source: Tensor) -> list[dict[str, Tensor]]:
        losses, right = self._measure(inputs, source)
        found = {"losses": losses, "right": right, "targets": inputs[:, 1:], "source": source}
        for size in self.smaller_sizes:
            with at_size(self.sized, size):
                found[f"losses_at_{size:g}"], _ = self._measure(inputs, source)
        return [dict(zip(found, row, strict=True)) for row in zip(*found.values(), strict=True)]

    def _measure(self, inputs: Tensor, source: Tensor) -> tuple[Tensor, Tensor]:
        """Return the losses, and whether the most likely tokens are right; both (B, N)."""
        logits, targets = self._masked_logits(inputs, source).float(), inputs[:, 1:]
        losses = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none")
        return losses.view_as(targets), logits.argmax(dim=-1) == targets

    def _masked_logits(self, inputs: Tensor, source: Tensor) -> Tensor:
        """Read each text through its mask; this waits for the GPU if there are masks."""
        if self.masks is None:
            return self._logits(inputs)
        logits, rows = [], []
        for number in map(int, source.unique()):
            name = self.sources[number] if number < len(self.sources) else ""
            rows.append((source == number).nonzero()[:, 0])
            with self.masks.use(name if name in self.masks.pairs else [*self.masks.pairs][-1]):
                logits.append(self._logits(inputs[rows[-1]]))
        return torch.cat(logits)[torch.cat(rows).argsort()]


def _cross_entropy(logits: Tensor, inputs: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1).float(), inputs[:, 1:].flatten())


def _build(architecture: str, config: dict[str, Any], checkpoint: str) -> Any:
    if checkpoint:
        if config:
            raise InputError(
                f"the checkpoint {checkpoint} has its own sizes: set `config=dict(_delete_=True)`, "
                "or remove model.checkpoint"
            )
        # Published models may have 16-bit weights, in which the optimiser's steps would be lost.
        return load_language_model(Path(checkpoint)).float().train()
    if architecture == "tokenformer":
        preset = config.pop("preset", None)
        sizes = lm_config(preset, **config) if preset else LMConfig(**config)
        return TokenFormerForCausalLM(TokenFormerConfig(**vars(sizes)))
    if architecture == "transformer":
        return transformer_lm(**config)
    raise InputError(f"architecture must be tokenformer or transformer, but got {architecture!r}")


def _masks(
    model: nn.Module, checkpoint: str, wanted: Mapping[str, str], before: Mapping[str, int]
) -> TokenMasks:
    """Load the masks of a checkpoint, add the new one and activate it."""
    file = Path(checkpoint, MASKS)
    known = torch.load(file, weights_only=True) if checkpoint and file.is_file() else {}
    masks = TokenMasks(model, known)
    if before:
        masks.add_appended(wanted["new"], before)
    else:
        masks.add(wanted["new"])
    masks.activate(wanted["new"])
    return masks


def _stem(model: nn.Module) -> list[nn.Parameter]:
    """List the parameters outside the blocks: embeddings, positions, final norm and head."""
    blocks = [part for name, part in model.named_modules() if name.rpartition(".")[2] in BLOCKS]
    within = {parameter for part in blocks for parameter in part.parameters()}
    return [parameter for parameter in model.parameters() if parameter not in within]
