"""The checks and the export of a run, where those of image classifiers do not fit."""

from pathlib import Path

from mmengine.dist import master_only
from mmengine.registry import HOOKS

from tokenformer_vit.errors import InputError
from tokenformer_vit.language import (
    MASKS,
    check_tokens_agree,
    load_tokenizer,
    save_language_model,
)

from ..guard import GuardHook, unwrap
from ..reports import ExportHook, validated_model
from .model import CausalLM


@HOOKS.register_module()
class LanguageGuardHook(GuardHook):
    """Stop on text that does not fit the model, weights of another model, or a loss gone bad."""

    unit = "sequences"

    def check_training(self, runner) -> None:
        """Check that model, training text and validation text fit each other."""
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
                    f"{where} has rows of {length} tokens, and the model's context_length is "
                    f"{model.context_length}: set `--cfg-options model.config.context_length="
                    f"{length}`, or prepare the text with --context-length {model.context_length}"
                )
            if entries > model.vocab_size:
                raise InputError(
                    f"{where} is of a tokenizer with {entries} entries, and the model's vocab_size "
                    f"is {model.vocab_size}: set `--cfg-options model.config.vocab_size={entries}` "
                    "or more, or prepare the text with the model's tokenizer"
                )
        first, *others = (loader.dataset.folders[0] for loader in loaders.values())
        start = runner.cfg.model.get("checkpoint")
        if start and Path(start, "tokenizer_config.json").is_file():
            check_tokens_agree(Path(start), first)
        for folder in others:
            if folder != first:
                check_tokens_agree(first, folder)

    def after_load_checkpoint(self, runner, checkpoint: dict) -> None:
        """Refuse weights of another model, and say how a run starts from those of a folder."""
        try:
            super().after_load_checkpoint(runner, checkpoint)
        except InputError as error:
            raise InputError(
                f"{error}; load_from takes the *.pth of a run, and model.checkpoint a folder with "
                "config.json and model.safetensors"
            ) from error

    def check_testing(self, runner) -> None:
        """Refuse to test: there are no classes."""
        raise InputError("a language model is evaluated by tools/evaluate_lm.py")


@HOOKS.register_module()
class LanguageExportHook(ExportHook):
    """At the end, write model and tokenizer as a folder that transformers loads.

    The work directory then holds ``model.safetensors``, ``config.json`` and the tokenizer's files,
    and of a model with masks ``masks.safetensors``.
    """

    purpose = "for transformers, tools/generate.py and tools/evaluate_lm.py"

    def before_train(self, runner) -> None:
        """Read the tokenizer, while nothing is lost if it cannot be read."""
        text = runner.train_dataloader.dataset.folders[0]
        self._tokenizer = load_tokenizer(text, unwrap(runner.model).vocab_size)

    @master_only
    def after_train(self, runner) -> None:
        """Write the files."""
        model: CausalLM = validated_model(runner)
        folder = Path(runner.work_dir)
        save_language_model(model.model, folder, self._tokenizer)
        if model.masks is not None:
            model.masks.save(folder / MASKS)
