"""Hooks of a language run: they check tokens and tokenizers, and export for transformers."""

from pathlib import Path

import torch
from mmengine.registry import HOOKS

from tokenformer_vit.errors import InputError
from tokenformer_vit.language import MASKS, check_tokens_agree, load_tokenizer, save_language_model

from ..distributed import unwrap
from ..export import validated_model
from ..hooks import GuardHook
from ..reports import ResultsHook
from .model import CausalLM


@HOOKS.register_module()
class LanguageGuardHook(GuardHook):
    """Stop a run if the text does not fit the model, weights do not fit, or the loss diverges."""

    unit = "sequences"

    def check_training(self, runner) -> None:
        """Check that model, training text and validation text fit each other."""
        super().check_training(runner)
        model: CausalLM = unwrap(runner.model)
        loaders = {"train": runner.train_dataloader}
        if runner.val_loop is not None:
            loaders["val"] = runner.val_dataloader
            model.sources = runner.val_dataloader.dataset.metainfo["sources"]
        for split, loader in loaders.items():
            dataset = loader.dataset
            length, entries = (dataset.metainfo[key] for key in ("context_length", "vocab_size"))
            where = f"the {split} text in {', '.join(map(str, dataset.folders))}"
            if length > model.context_length:
                raise InputError(
                    f"{where} has rows of {length} tokens, but the model's context_length is "
                    f"{model.context_length}: set `model.config.context_length={length}`, or "
                    f"prepare the text with --context-length {model.context_length}"
                )
            if entries > model.vocab_size:
                raise InputError(
                    f"{where} has a tokenizer with {entries} entries, but the model's vocab_size "
                    f"is {model.vocab_size}: set `model.config.vocab_size={entries}` or more, or "
                    "prepare the text with the model's tokenizer"
                )
        first, *others = (loader.dataset.folders[0] for loader in loaders.values())
        start = runner.cfg.model.get("checkpoint")
        if start and Path(start, "tokenizer_config.json").is_file():
            check_tokens_agree(Path(start), first)
        for folder in others:
            if folder != first:
                check_tokens_agree(first, folder)

    def check_testing(self, runner) -> None:
        """Refuse to test: there are no classes."""
        raise InputError("test is for image classifiers; use tokenformer-vit evaluate-lm")


@HOOKS.register_module()
class LanguageResultsHook(ResultsHook):
    """At the end of a run, draw its curves, export model and tokenizer, and write its record.

    The export is a folder of transformers; of a model with masks it also has ``masks.pt``.
    """

    packages = ("transformers", "tokenizers", "datasets")

    def prepare_export(self, runner) -> None:
        """Load the tokenizer: an error now costs no training."""
        text = runner.train_dataloader.dataset.folders[0]
        self._tokenizer = load_tokenizer(text, unwrap(runner.model).vocab_size)

    def export(self, runner) -> None:
        """Write the files."""
        model: CausalLM = validated_model(runner)
        folder = Path(runner.work_dir)
        save_language_model(model.model, folder, self._tokenizer)
        if model.masks is not None:
            torch.save(model.masks.pairs, folder / MASKS)
