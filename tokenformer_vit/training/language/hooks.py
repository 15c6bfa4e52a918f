"""Hooks of a language run: they check tokens and tokenizers, and export for transformers."""

from pathlib import Path

from tokenformer_vit.errors import InputError
from tokenformer_vit.language import check_tokens_agree, load_tokenizer, save_language_model

from ..engine import HOOKS
from ..hooks import GuardHook
from ..models.backbone import unwrap
from ..reports import ResultsHook, validated_model
from .model import CausalLM


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
