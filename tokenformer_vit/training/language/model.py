"""A causal language model as mmengine trains and validates it."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from mmengine.model import BaseModel
from mmpretrain.registry import MODELS
from torch import Tensor, nn

from tokenformer_vit.benchmarking.costs import training_flops
from tokenformer_vit.errors import InputError
from tokenformer_vit.growth import TokenMasks, count_pairs, grow
from tokenformer_vit.language import (
    MASKS,
    TokenFormerConfig,
    TokenFormerForCausalLM,
    load_language_model,
    transformer_lm,
)
from tokenformer_vit.language.schemas import LMShape, check
from tokenformer_vit.models import LMConfig, compile_blocks, lm_config

from ..storage import secure_files


@MODELS.register_module()
class CausalLM(BaseModel):
    """A TokenFormer language model, or the Transformer that it is compared with.

    Args:
        architecture: ``tokenformer``, or ``transformer`` for GPT-2's form.
        config: Sizes of a new model. Of a TokenFormer a ``preset`` and what differs from it, or the
            fields of :class:`~tokenformer_vit.models.LMConfig`; of a Transformer the arguments of
            :func:`~tokenformer_vit.language.transformer_lm`.
        checkpoint: Folder of a trained model to start from, as a run leaves it, taken as float32;
            the sizes are its own then, and ``config`` is empty.
        growth: Arguments of :func:`tokenformer_vit.growth.grow`, to append pairs to what was built
            or loaded. Without a ``seed`` of their own they are drawn from that of the run.
        masks: Give each text pairs of its own. ``new`` names the mask of the pairs that ``growth``
            appends, or of all pairs where there is no growth: they alone are active in training,
            and the others keep their values. Masks are saved beside the model, and loaded with a
            ``checkpoint``. In validation a text, by the name of its folder, is read with the mask
            of its name, one without a mask with the newest.
        frozen_stem: Keep embeddings, positions, final norm and head as they are.
        compile: Compile each block, for training and evaluation alike; checkpoints stay the same.

    Raises:
        InputError: If an argument is none of those that exist, sizes do not fit, or the checkpoint
            cannot be read.

    Shape:
        Rows of (B, N + 1) tokens: N are read and the last N predicted.

    Attributes:
        sources: Names of the texts that are validated on, by their number; the guard sets it.

    Note:
        The loss is the mean over tokens of the cross-entropy in nats, computed in float32.
    """

    sources: tuple[str, ...] = ()

    def __init__(
        self,
        architecture: str = "tokenformer",
        config: Mapping[str, Any] | None = None,
        checkpoint: str = "",
        growth: dict[str, Any] | None = None,
        masks: Mapping[str, str] | None = None,
        frozen_stem: bool = False,
        compile: bool = False,
    ) -> None:
        super().__init__()
        secure_files()
        self.model: Any = _build(architecture, dict(config or {}), checkpoint)
        before = count_pairs(self.model) if masks and growth else {}
        if growth:
            # Old pairs that a mask leaves out get no gradient, but would decay if they trained.
            freeze = {"freeze": "old"} if masks else {}
            grow(self.model, **{"seed": torch.initial_seed(), **freeze, **growth})
        self.masks = _masks(self.model, checkpoint, masks, before) if masks else None
        if frozen_stem or (masks and growth):
            for parameter in _stem(self.model):
                parameter.requires_grad_(not frozen_stem)
        if compile:
            _compile(self.model)

    @property
    def context_length(self) -> int:
        """Most tokens that the model reads."""
        return self.model.config.max_position_embeddings

    @property
    def vocab_size(self) -> int:
        """Entries of the embedding."""
        return self.model.config.vocab_size

    def training_flops(self, num_tokens: int) -> int:
        """Count the FLOPs of training on one sequence; see :mod:`tokenformer_vit.benchmarking`."""
        return training_flops(self.model, num_tokens)

    def forward(  # type: ignore[override]
        self, inputs: Tensor, source: Tensor | None = None, mode: str = "tensor"
    ) -> dict[str, Tensor] | list[dict[str, Tensor]] | Tensor:
        """Read rows of tokens.

        Args:
            inputs: (B, N + 1) int64.
            source: (B,) number of the text of each row, for its mask.
            mode: ``loss``, ``predict`` or ``tensor``, as mmengine has them.

        Returns:
            ``loss``: a dict with the mean over tokens. ``predict``: of each row ``losses`` (N,)
            float32, ``right`` (N,) whether the likeliest token was the true one, ``targets`` (N,),
            and ``source``, all on the CPU. ``tensor``: (B, N, V) logits.
        """
        if mode == "loss":
            logits = self._logits(inputs)
            losses = F.cross_entropy(logits.flatten(0, 1).float(), inputs[:, 1:].flatten())
            return {"loss": losses}
        if mode == "predict":
            return self._predict(inputs, torch.zeros(len(inputs)) if source is None else source)
        return self._logits(inputs)

    def _logits(self, inputs: Tensor) -> Tensor:
        return self.model(input_ids=inputs[:, :-1], use_cache=False).logits

    def _predict(self, inputs: Tensor, source: Tensor) -> list[dict[str, Tensor]]:
        rows: list[dict[str, Tensor]] = [{} for _ in inputs]
        for number in source.unique().tolist():
            chosen = (source == number).nonzero()[:, 0]
            logits = self._masked_logits(inputs[chosen], int(number)).float()
            targets = inputs[chosen, 1:]
            losses = F.cross_entropy(
                logits.flatten(0, 1), targets.flatten(), reduction="none"
            ).view_as(targets)
            right = logits.argmax(dim=-1) == targets
            for index, *values in zip(
                chosen.tolist(), losses.cpu(), right.cpu(), targets.cpu(), strict=True
            ):
                rows[index] = dict(zip(("losses", "right", "targets"), values, strict=True))
                rows[index]["source"] = source[index].cpu()
        return rows

    def _masked_logits(self, inputs: Tensor, source: int) -> Tensor:
        if self.masks is None:
            return self._logits(inputs)
        name = self.sources[source] if source < len(self.sources) else ""
        with self.masks.use(name if name in self.masks.names else self.masks.names[-1]):
            return self._logits(inputs)


def _build(architecture: str, config: dict[str, Any], checkpoint: str) -> Any:
    if checkpoint:
        if config:
            raise InputError(
                f"model.config is {config}, but the model starts from {checkpoint} and has its "
                "sizes: set `config=dict(_delete_=True)`, or leave the checkpoint out"
            )
        # Steps of an optimiser are lost in weights of 16 bits, which published models may have.
        return load_language_model(Path(checkpoint), kinds=("tokenformer", "gpt2")).float().train()
    try:
        if architecture == "tokenformer":
            preset = config.pop("preset", None)
            shape: Any = check(LMShape, config)
            sizes = lm_config(preset, **shape) if preset else LMConfig(**shape)
            return TokenFormerForCausalLM(TokenFormerConfig(**vars(sizes)))
        if architecture == "transformer":
            return transformer_lm(**config)
    except (TypeError, InputError) as error:  # such as a name that neither has
        raise InputError(f"model.config of the {architecture}: {error}") from error
    raise InputError(
        f"unknown architecture {architecture!r}; choose one of tokenformer, transformer"
    )


def _masks(
    model: nn.Module, checkpoint: str, wanted: Mapping[str, str], before: Mapping[str, int]
) -> TokenMasks:
    """Load the masks of a checkpoint and add the new one, which is then active."""
    if set(wanted) != {"new"}:
        raise InputError(f"model.masks is {dict(wanted)}; it takes `new`, the name of a mask")
    file = Path(checkpoint, MASKS)
    masks = TokenMasks.load(file, model) if checkpoint and file.is_file() else TokenMasks(model)
    name = wanted["new"]
    if before:
        masks.add_appended(name, before)
    else:
        masks.add(name)
    masks.activate(name)
    return masks


def _stem(model: nn.Module) -> list[nn.Parameter]:
    """List what stands outside the blocks: embeddings, positions, final norm, head."""
    within = {
        id(parameter)
        for name, module in model.named_modules()  # GPT-2 calls its blocks h
        if name.endswith((".blocks", ".h"))
        for parameter in module.parameters()
    }
    return [parameter for parameter in model.parameters() if id(parameter) not in within]


def _compile(model: nn.Module) -> None:
    if not isinstance(model, TokenFormerForCausalLM):
        raise InputError("--compile is for the TokenFormer; leave it out for a Transformer")
    compile_blocks(model.model)
