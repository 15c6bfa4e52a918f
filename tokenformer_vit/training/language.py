"""Language models in mmengine's runner: ``custom_imports`` of the configs ``lm_*.py``.

A whole model of transformers and its loss, rows of the tokens that prepare-text wrote, metrics of
each token's loss and prediction, and hooks that check tokens and export for transformers.
"""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.data import Dataset

from tokenformer_vit.errors import InputError
from tokenformer_vit.growth import grow
from tokenformer_vit.language import (
    TokenFormerConfig,
    TokenFormerForCausalLM,
    check_tokens_agree,
    load_language_model,
    load_tokenizer,
    save_language_model,
    transformer_lm,
)
from tokenformer_vit.language.data import open_tokens, read_text_meta
from tokenformer_vit.models import LMConfig, lm_config
from tokenformer_vit.models.sizes import at_size

from .engine import DATASETS, HOOKS, METRICS, MODELS, BaseModel
from .hooks import GuardHook
from .metrics import SumMetric, endings, sum_dtype
from .models.backbone import unwrap
from .models.nested import NestedTraining
from .reports import ResultsHook, validated_model


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


@DATASETS.register_module()
class TokenDataset(Dataset):
    """Memory-mapped rows of one folder, or of several folders one after the other.

    A row has ``inputs``, (N + 1,) int64 tokens, and ``source``, the number of its folder. Each
    token but the first is a target. The last token of a row is the first of the next.
    ``data_root`` is a folder that ``tokenformer-vit prepare-text`` made, or several.
    """

    def __init__(self, data_root: str | Sequence[str], split: str) -> None:
        roots = [data_root] if isinstance(data_root, str) else list(data_root)
        self.folders = [Path(root) for root in roots]
        metas = [read_text_meta(folder) for folder in self.folders]
        shared = {key: metas[0][key] for key in ("context_length", "vocab_size")}
        for key, value in shared.items():
            if any(meta[key] != value for meta in metas):
                raise InputError(f"{', '.join(roots)} have different values of {key}: choose one")
        for folder in self.folders[1:]:
            check_tokens_agree(self.folders[0], folder)
        sources = tuple(folder.name for folder in self.folders)
        if len(set(sources)) < len(sources):
            raise InputError(f"figures are named by the folders {', '.join(roots)}: rename one")
        self._split, self._length = split, metas[0]["context_length"]
        self._tokens = [open_tokens(folder, split) for folder in self.folders]
        self._ends = np.cumsum([(len(each) - 1) // self._length for each in self._tokens])
        self.metainfo: dict[str, Any] = {"sources": sources, **shared}

    def __reduce__(self) -> Any:
        """Open the files again in a worker that is not a fork: a pickle would hold all tokens."""
        return type(self), (list(map(str, self.folders)), self._split)

    def __len__(self) -> int:
        """Return the number of rows."""
        return int(self._ends[-1])

    def __getitem__(self, index: int) -> dict[str, Any]:
        """Return a row."""
        source = int(np.searchsorted(self._ends, index, side="right"))
        begin = (index - (self._ends[source - 1] if source else 0)) * self._length
        row = self._tokens[source][begin : begin + self._length + 1].astype(np.int64)
        return {"inputs": torch.from_numpy(row), "source": source}


@METRICS.register_module()
class Perplexity(SumMetric):
    """exp(mean cross-entropy per token), over all rows and over the rows of each text.

    A token is predicted from the tokens before it in its row. A smaller size of a nested model has
    ``perplexity_at_0.25``.
    """

    def sums(self, data_samples: Sequence[dict[str, Tensor]]) -> dict[str, Tensor]:
        """Add up tokens and losses, of all rows and of those of each of several texts."""
        sources = torch.stack([row["source"] for row in data_samples])  # (B,)
        rows = {"": torch.ones_like(sources, dtype=torch.bool)}
        texts = (self.dataset_meta or {}).get("sources", ())
        if len(texts) > 1:
            rows |= {f"/{name}": sources == number for number, name in enumerate(texts)}
        length = len(data_samples[0]["losses"])
        found = {f"tokens{text}": own.sum() * length for text, own in rows.items()}
        for size in endings(data_samples[0], "losses"):
            tokens = torch.stack([row[f"losses{size}"] for row in data_samples])
            losses = tokens.sum(dim=1, dtype=sum_dtype())  # (B,)
            for text, own in rows.items():
                found[f"perplexity{size}{text}"] = torch.where(own, losses, 0).sum()
        return found

    def compute_metrics(self, results: dict[str, float]) -> dict[str, float]:  # type: ignore[override]
        """Return the perplexities."""
        found = {}
        for name, total in results.items():
            _, slash, text = name.partition("/")
            tokens = results.get(f"tokens{slash}{text}")
            if name.startswith("perplexity") and tokens:  # a shortened validation may lack a text
                found[name] = math.inf if total > 700 * tokens else math.exp(total / tokens)
        return found


@METRICS.register_module()
class AnswerAccuracy(SumMetric):
    """Percentage of answers in which every token is the most likely one.

    An answer is the tokens after a ``start`` token, up to and with an ``end`` token in its row. It
    is right exactly if greedy generation gives it.
    """

    def __init__(self, start: int, end: int, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self._start, self._end = start, end

    def sums(self, data_samples: Sequence[dict[str, Tensor]]) -> dict[str, Tensor]:
        """Count the answers of a batch, and those that are right."""
        targets, right = (
            torch.stack([row[key] for row in data_samples]) for key in ("targets", "right")
        )  # (B, N)
        places = torch.arange(targets.shape[1], device=targets.device)
        start = targets == self._start
        end = (targets == self._end) & ~start
        # The last start up to each place, and the last end before it.
        begin = torch.where(start, places, -1).cummax(dim=1).values
        ended = torch.where(end, places, -1).cummax(dim=1).values.roll(1, dims=1)
        ended[:, 0] = -1
        answers = end & (begin > ended)
        wrong = (~right).cumsum(dim=1)
        none_wrong = wrong == wrong.gather(1, begin.clamp(min=0))
        return {"answers": answers.sum(), "right": (answers & none_wrong).sum()}

    def compute_metrics(self, results: dict[str, float]) -> dict[str, float]:  # type: ignore[override]
        """Return ``answers/accuracy`` in percent, and ``answers/count``, the number of answers."""
        answers, right = int(results["answers"]), int(results["right"])
        if not answers:
            raise InputError(
                f"no row has an answer between the tokens {self._start} and {self._end}; leave "
                "AnswerAccuracy out of val_evaluator"
            )
        return {"answers/accuracy": 100 * right / answers, "answers/count": answers}


@HOOKS.register_module()
class LanguageGuardHook(GuardHook):
    """Stop a run if the text does not fit the model, weights do not fit, or the loss diverges."""

    def before_train(self, runner) -> None:
        """Check that model, training text and validation text fit each other."""
        super().before_train(runner)
        model: CausalLM = unwrap(runner.model)
        datasets = [runner.train_dataloader.dataset]
        if runner.val_loop is not None:
            datasets.append(runner.val_dataloader.dataset)
        for dataset in datasets:
            for key in ("context_length", "vocab_size"):
                needed, have = dataset.metainfo[key], getattr(model, key)
                if needed > have:
                    raise InputError(
                        f"the text in {', '.join(map(str, dataset.folders))} has a {key} of "
                        f"{needed}, but the model's is {have}: set `model.config.{key}={needed}`"
                    )
        start = runner.cfg.model.get("checkpoint")
        if start and Path(start, "tokenizer_config.json").is_file():
            check_tokens_agree(Path(start), datasets[0].folders[0])
        check_tokens_agree(datasets[0].folders[0], datasets[-1].folders[0])


@HOOKS.register_module()
class LanguageResultsHook(ResultsHook):
    """At the end of a run, draw its curves, export for transformers, and write its record."""

    def prepare_export(self, runner) -> None:
        """Load the tokenizer: an error now costs no training."""
        text = runner.train_dataloader.dataset.folders[0]
        self._tokenizer = load_tokenizer(text, unwrap(runner.model).vocab_size)

    def export(self, runner) -> None:
        """Write the files."""
        save_language_model(validated_model(runner).model, Path(runner.work_dir), self._tokenizer)
