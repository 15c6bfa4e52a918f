"""A causal language model for mmengine's runner: a whole model of transformers, and its loss."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tokenformer_vit.errors import InputError
from tokenformer_vit.growth import grow
from tokenformer_vit.language import (
    TokenFormerConfig,
    TokenFormerForCausalLM,
    load_language_model,
    transformer_lm,
)
from tokenformer_vit.models import LMConfig, lm_config
from tokenformer_vit.models.sizes import at_size

from ..engine import MODELS, BaseModel
from ..models.nested import NestedTraining


@MODELS.register_module()
class CausalLM(NestedTraining, BaseModel):
    """A TokenFormer language model, or a Transformer as a baseline.

    Args:
        architecture: ``tokenformer``, or ``transformer`` for the form of GPT-2 or GPT-NeoX.
        config: Sizes of a new model, as for :class:`~tokenformer_vit.models.LMConfig`, perhaps with
            a ``preset``, or :func:`~tokenformer_vit.language.transformer_lm`.
        checkpoint: Folder of a trained model to start from; its weights are converted to float32.
        growth: Arguments of :func:`tokenformer_vit.growth.grow`, to append pairs at the start.
        sandwich: Train the sizes ``nested`` of ``config`` at once, and measure each.
        distill: With ``sandwich``: whether smaller sizes also learn from larger ones.
    """

    def __init__(
        self,
        architecture: str = "tokenformer",
        config: Mapping[str, Any] | None = None,
        checkpoint: str = "",
        growth: dict[str, Any] | None = None,
        sandwich: bool = False,
        distill: bool = False,
    ) -> None:
        non_blocking = torch.cuda.is_available()
        super().__init__({"type": "BaseDataPreprocessor", "non_blocking": non_blocking})
        self.model: Any = _build(architecture, dict(config or {}), checkpoint)
        self.context_length = self.model.config.max_position_embeddings
        self.vocab_size = self.model.config.vocab_size
        if growth:
            grow(self.model, **{"seed": torch.initial_seed(), **growth})
        if sandwich:
            self.train_sizes(distill)

    @property
    def sized(self) -> Any:
        """The language model."""
        return self.model

    def forward(  # type: ignore[override]
        self, inputs: Tensor, source: Tensor | None = None, mode: str = "tensor"
    ) -> dict[str, Tensor] | list[dict[str, Tensor]] | Tensor:
        """Read the first N of (B, N + 1) tokens, and predict the last N, (B, N, V).

        ``source``, (B,), numbers the text of each row. Mode ``predict`` gives a dict for each row:
        ``losses`` (N,), ``right`` (N,), ``targets`` (N,), ``source``, perhaps ``losses_at_0.25``.
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
        logits, targets = self._logits(inputs).float(), inputs[:, 1:]
        losses = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none")
        return losses.view_as(targets), logits.argmax(dim=-1) == targets


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
