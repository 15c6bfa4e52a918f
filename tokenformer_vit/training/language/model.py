"""A causal language model for mmengine's runner.

An image classifier is mmpretrain's, with a backbone, a head and a preprocessor. A language model
has no such parts: this class wraps a whole model of transformers, and computes the loss itself.
"""

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
        growth: Arguments of :func:`tokenformer_vit.growth.grow`, to append pairs at the start. The
            default ``seed`` is the seed of the run.
        masks: ``new``, the name of a mask with the pairs for the training text: the pairs that
            ``growth`` appends, or all pairs without ``growth``. Only these pairs are active and
            change in training. Masks are saved with the model, and loaded with a ``checkpoint``.
            Validation reads a text with the mask that has the name of its folder; if there is none,
            with the newest mask.
        frozen_stem: Whether to freeze embeddings, positions, final norm and head.
        sandwich: Train a model with ``nested`` in its ``config`` at several sizes at once. A
            validation then also measures ``perplexity_at_0.25``, and so on.
        distill: With ``sandwich``: whether smaller sizes also learn from larger ones; see
            :class:`~tokenformer_vit.training.models.nested.NestedTraining`.
        compile: Whether to compile each block, or how: a mode of ``torch.compile``, or a dict of
            its arguments. Checkpoints stay the same.

    Raises:
        InputError: If the checkpoint cannot be read, ``config`` or ``masks`` do not fit the other
            arguments, or ``sandwich`` is given for a model that is not nested.

    Shape:
        Rows of (B, N + 1) tokens: the first N are read and the last N predicted.

    Note:
        The loss is the mean cross-entropy a token in nats, computed in float32.
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

    @property
    def context_length(self) -> int:
        """Largest number of tokens that the model reads."""
        return self.model.config.max_position_embeddings

    @property
    def vocab_size(self) -> int:
        """Number of entries of the embedding."""
        return self.model.config.vocab_size

    def forward(  # type: ignore[override]
        self, inputs: Tensor, source: Tensor | None = None, mode: str = "tensor"
    ) -> dict[str, Tensor] | list[dict[str, Tensor]] | Tensor:
        """Read (B, N + 1) tokens; ``source``, (B,), numbers the text of each row, for its mask.

        Mode ``loss`` gives a dict with the mean loss, ``tensor`` the (B, N, V) logits, and
        ``predict`` a dict for each row: ``losses`` (N,) float32; ``right`` (N,), whether the most
        likely token is the true one; ``targets`` (N,); ``source``; perhaps ``losses_at_0.25``.
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
        # Reading the numbers of the texts waits for the GPU; without masks none is needed.
        parts: list[tuple[int, Any]] = [(0, slice(None))]
        if self.masks is not None:
            numbers = source.unique().tolist()
            parts = [(int(number), (source == number).nonzero()[:, 0]) for number in numbers]
        targets = inputs[:, 1:]
        losses, right = torch.empty_like(targets, dtype=torch.float), targets.bool()
        for number, chosen in parts:
            logits, own = self._masked_logits(inputs[chosen], number).float(), targets[chosen]
            each = F.cross_entropy(logits.flatten(0, 1), own.flatten(), reduction="none")
            losses[chosen], right[chosen] = each.view_as(own), logits.argmax(dim=-1) == own
        return losses, right

    def _masked_logits(self, inputs: Tensor, source: int) -> Tensor:
        if self.masks is None:
            return self._logits(inputs)
        name = self.sources[source] if source < len(self.sources) else ""
        with self.masks.use(name if name in self.masks.pairs else [*self.masks.pairs][-1]):
            return self._logits(inputs)


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
    if set(wanted) != {"new"}:
        raise InputError(f"model.masks must be dict(new=NAME), but got {dict(wanted)}")
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
