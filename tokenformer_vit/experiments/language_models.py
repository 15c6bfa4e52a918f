"""Language models of ablations: how to build them, and how variants change them."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from tokenformer_vit.errors import InputError

from .fields import Field, Measure, mean_flops
from .variants import PAIRS, ModelChange, Part, Shape

# Labels of the Transformers, by their positions.
TRANSFORMERS = {"learned": "Transformer (GPT-2)", "rotary": "Transformer (GPT-NeoX, rotary)"}
_ROTATION = ("rotary_share", "rotary_base")


class LanguageField(Field):
    """Language models, measured by perplexity."""

    measure = Measure(
        "perplexity", "perplexity", "", r"(perplexity(?:_at_[\d.]+)?(?:/.+)?)", logarithmic=True
    )
    path = ("model",)
    weights_key = "checkpoint"
    unit = "iteration"
    limit = "max_iters"
    begun = rb'"step": (\d+)'
    examples = "sequences"
    counts_flops = True
    transformer = "Transformer"

    def continued(self, part: Part) -> Part:
        """Leave the sizes to the checkpoint."""
        return {**part, "config": {}}

    def start_from(self, cfg: Part, folder: str) -> None:
        """Start from the language model in a folder."""
        cfg["model"]["checkpoint"] = folder

    def sized(self, part: Part, sizes: Mapping[str, int]) -> Part:
        """Set pairs or hidden neurons; see :meth:`Field.sized`."""
        return {**part, "config": {**part["config"], **sizes}}

    def flops(self, cfg: Mapping[str, Any]) -> int:
        """Count the FLOPs of a whole context; see :meth:`Field.flops`."""
        model: Any = self.build(cfg)
        return mean_flops(model, model.context_length)

    def num_examples(self, cfg: Mapping[str, Any]) -> int:
        """Count the training sequences."""
        from tokenformer_vit.training.language.data import TokenDataset

        dataset = cfg["train_dataloader"]["dataset"]
        return len(TokenDataset(dataset["data_root"], dataset["split"]))

    def random_loss(self, model: nn.Module, batch_size: int, device: torch.device) -> Tensor:
        """Return the loss of random tokens."""
        lm: Any = model
        shape = batch_size, lm.context_length + 1
        return lm(torch.randint(lm.vocab_size, shape, device=device), mode="loss")["loss"]

    def check_data(self, cfg: Mapping[str, Any]) -> None:
        """Check that the texts of a config can be read; see :class:`Field`."""
        from tokenformer_vit.training.language.data import TokenDataset

        for name in ("train_dataloader", "val_dataloader"):
            dataset = cfg[name]["dataset"]
            TokenDataset(dataset["data_root"], dataset["split"])

    def build(self, cfg: Mapping[str, Any]) -> nn.Module:
        """Build the language model of a config, which loads no weights; see :class:`Field`."""
        from mmengine.registry import DefaultScope
        from mmpretrain.registry import MODELS

        import tokenformer_vit.training.language  # noqa: F401  # registers CausalLM

        keys = ("type", "architecture", "config", "sandwich", "distill")
        sizes = {key: cfg["model"][key] for key in keys if key in cfg["model"]}
        with torch.device("meta"), DefaultScope.overwrite_default_scope("mmpretrain"):
            return MODELS.build(sizes)

    def shape_of(self, cfg: Mapping[str, Any]) -> tuple[Shape, int]:
        """Return sizes and parameter count of a TokenFormer; see :meth:`Field.shape_of`."""
        from tokenformer_vit.language import TokenFormerForCausalLM

        model: Any = self.build(cfg)
        if not isinstance(model.model, TokenFormerForCausalLM):
            raise InputError(
                f"the model of the config is a {cfg['model']['architecture']}, but an ablation "
                "needs a TokenFormer; choose another --config"
            )
        lm: Any = model.model.model
        keys = ("vocab_size", "context_length", "tie_embeddings", *_ROTATION)
        outside = {key: getattr(lm.config, key) for key in keys}
        shape = Shape.of(lm.blocks, lm.config.embed_dim, outside)
        return shape, sum(parameter.numel() for parameter in model.parameters())


LANGUAGE = LanguageField()


def sizes(**new: Any) -> ModelChange:
    """Set sizes and other arguments of the TokenFormer; without any, it stays as it is."""
    return lambda model, shape: {**model, "config": {**model["config"], **new}}


def share(part: float) -> ModelChange:
    """Keep a share of all pairs; with all of them, the config's model stays as it is."""
    return lambda model, shape: model if part == 1 else sizes(**shape.pairs(part))(model, shape)


def pairs_by_width(attention: float, ffn: float, **new: Any) -> ModelChange:
    """Set the pairs as multiples of the width.

    Args:
        attention: Pairs of each of q, k, v and o, as a multiple of the width.
        ffn: Pairs of the feed-forward layer, as a multiple of the width.
        new: Other arguments to set.
    """

    def change(model: Part, shape: Shape) -> Part:
        multiples = zip(PAIRS, (attention, attention, ffn), strict=True)
        pairs = {key: round(multiple * shape.embed_dim) for key, multiple in multiples}
        same = all(getattr(shape, key) == number for key, number in pairs.items())
        # The config's own model is written as in the config.
        return sizes(**({} if same else pairs), **new)(model, shape)

    return change


def transformer(
    model: Part, shape: Shape, hidden_features: int, positions: str = "learned"
) -> Part:
    """Use a Transformer with the TokenFormer's width and depth.

    Args:
        model: The config's model.
        shape: Its sizes.
        hidden_features: Neurons of each hidden layer.
        positions: ``learned`` for the form of GPT-2; ``rotary`` for the form of GPT-NeoX, which
            rotates as many dimensions as the TokenFormer.
    """
    rotary = positions == "rotary"
    outside = {key: size for key, size in shape.outside.items() if rotary or key not in _ROTATION}
    return {
        **model,
        "architecture": "transformer",
        "config": {
            **outside,
            **({"positions": positions} if rotary else {}),
            "embed_dim": shape.embed_dim,
            "depth": shape.depth,
            "num_heads": shape.num_heads,
            "hidden_features": hidden_features,
        },
    }


def to_matched_transformer(
    part: float = 1, pairs: float = 1, positions: str = "learned"
) -> ModelChange:
    """Use the Transformer whose hidden size :meth:`Shape.hidden` gives."""

    def change(model: Part, shape: Shape) -> Part:
        return transformer(model, shape, **shape.hidden(part, pairs), positions=positions)

    return change
