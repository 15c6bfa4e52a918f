"""Measurements of Pattention layers during training: gradients, entropy of Θ, tails of scores."""

import copy
import json
import math
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from mmengine.dist import is_main_process
from mmengine.hooks import Hook
from mmengine.registry import HOOKS
from mmengine.runner import IterBasedTrainLoop
from torch import Tensor, nn

from tokenformer_vit.errors import InputError
from tokenformer_vit.layers import Pattention
from tokenformer_vit.layers.split import fuse_tokens

from .distributed import unwrap
from .mae import MaskedAutoencoder
from .random_state import rng_state, set_rng_state

FILE = "diagnostics.jsonl"
# Images in one forward and backward pass, in float32 and in addition to the run's own memory.
_CHUNK = 16


@HOOKS.register_module()
class DiagnosticsHook(Hook):
    """Measure the Pattention layers during a run, into ``diagnostics.jsonl``.

    Before training, after the first, every ``interval``-th and the last epoch, the main process
    sends the same validation images through a copy of the model (:func:`diagnose`). It appends one
    line of JSON: ``iteration`` and ``epoch`` (numbers finished), ``examples``, and the result of
    :func:`diagnose`. In a run that counts iterations, as language models do, the times are
    iterations, the examples are rows of tokens, and there is no ``epoch``. The training does not
    change, to the last bit: the copy is uncompiled, in float32 and in evaluation mode, and the
    random generators are restored.

    A model without Pattention gets no file. Set ``custom_hooks = [dict(type="DiagnosticsHook")]``
    to use it; :func:`read_diagnostics` reads the file.

    Args:
        interval: Number of epochs, or iterations, between two measurements, at least 1.
        examples: Number of images or rows of tokens, at least 1, or all if there are fewer. They
            are the first ones for validation or, if images are sorted by class, evenly spaced ones.

    Raises:
        InputError: If ``interval`` or ``examples`` is below 1, the run has no validation data or
            trains a ``MaskedAutoencoder``, or the file cannot be written.

    Source:
        TokenFormer, arXiv:2410.23168: Appendix A derives the gradient that reaches the tokens
        through a softmax; this hook measures it for any Θ.
    """

    def __init__(self, interval: int = 1, examples: int = 64) -> None:
        for name, number in (("interval", interval), ("examples", examples)):
            if number < 1:
                raise InputError(f"{name} of DiagnosticsHook is {number}; give at least 1")
        self.interval = interval
        self.examples = examples
        self._batches: list[dict[str, Any]] = []

    def before_train(self, runner) -> None:
        """Read the examples, and measure the model that training starts from.

        A resumed run repeats the measurement that was due at its checkpoint, because the run may
        have been killed during it.
        """
        if not measured_layers(unwrap(runner.model)):
            return
        if isinstance(unwrap(runner.model), MaskedAutoencoder):
            raise InputError(
                "DiagnosticsHook measures a cross-entropy, which a MaskedAutoencoder does not "
                "have: remove the hook, or use it in the fine-tuning"
            )
        if runner.val_loop is None:
            raise InputError(
                "DiagnosticsHook needs validation data, but the run has none: set "
                "val_dataloader, val_cfg and val_evaluator, or remove the hook"
            )
        if not is_main_process():
            return
        self._batches = []
        path = Path(runner.work_dir) / FILE
        if runner.iter == 0:
            path.unlink(missing_ok=True)  # left by a run that ended before its first checkpoint
        # The pipeline that reads an image may draw random numbers.
        state = rng_state()
        loader = runner.val_dataloader
        indices = probe_indices(loader.dataset, self.examples)
        for start in range(0, len(indices), _CHUNK):
            samples = [loader.dataset[index] for index in indices[start : start + _CHUNK]]
            self._batches.append(loader.collate_fn(samples))
        set_rng_state(state)
        if _counts_iterations(runner):
            self._measure_if_due(runner, {"iteration": runner.iter})
        elif runner.iter == runner.epoch * len(runner.train_dataloader):
            self._measure_if_due(runner, {"iteration": runner.iter, "epoch": runner.epoch})

    def after_train_iter(self, runner, *_args: Any, **_kwargs: Any) -> None:
        """Measure, if the run counts iterations and a measurement is due."""
        if _counts_iterations(runner):
            self._measure_if_due(runner, {"iteration": runner.iter + 1})

    def after_train_epoch(self, runner) -> None:
        """Measure, if the run counts epochs and a measurement is due."""
        if not _counts_iterations(runner):
            self._measure_if_due(runner, {"iteration": runner.iter, "epoch": runner.epoch + 1})

    def _measure_if_due(self, runner, time: dict[str, int]) -> None:
        finished = time.get("epoch", time["iteration"])
        last = runner.max_epochs if "epoch" in time else runner.max_iters
        if not self._batches or (finished % self.interval and finished not in (1, last)):
            return
        state = rng_state()
        measured = diagnose(unwrap(runner.model), self._batches)
        set_rng_state(state)
        examples = sum(len(batch["inputs"]) for batch in self._batches)
        append_line(Path(runner.work_dir) / FILE, {**time, "examples": examples, **measured})


def _counts_iterations(runner) -> bool:
    return isinstance(runner.train_loop, IterBasedTrainLoop)


def measured_layers(model: nn.Module) -> dict[str, Pattention]:
    """Return the Pattention layers of a model, by timm's names such as ``blocks.3.attn.query``."""
    return {
        name[max(name.find("blocks."), 0) :]: module
        for name, module in model.named_modules()
        if isinstance(module, Pattention)
    }


def probe_indices(dataset: Any, number: int) -> list[int]:
    """Choose the same images of a data set every time, from many classes if possible.

    Args:
        dataset: Data set of mmpretrain, or any with a length.
        number: Number of images, or all images if there are fewer.

    Returns:
        Indices: the first ones if the labels are known and not sorted, otherwise evenly spaced.
    """
    size = len(dataset)
    number = min(number, size)
    labels = dataset.get_gt_labels() if hasattr(dataset, "get_gt_labels") else np.zeros(size)
    if (np.diff(labels) < 0).any():
        return list(range(number))
    return [index * size // number for index in range(number)]


def diagnose(model: nn.Module, batches: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Measure every Pattention layer of a model on some examples.

    Args:
        model: mmpretrain's ``ImageClassifier``, or a ``CausalLM``. A copy is measured, in float32,
            in evaluation mode, without compiled code, and with all pairs of a nested model.
        batches: Images and labels, or rows of tokens, from a data loader; they count as one batch.

    Returns:
        ``loss``, the mean cross-entropy of the images or tokens, and ``layers``: for each layer by
        its name

        =================== ===================================================================
        ``key_grad_norm``   L2 norm of the gradient of ``loss`` by the key parameter tokens
        ``value_grad_norm`` the same by the value parameter tokens
        ``key_norm``        L2 norm of the key parameter tokens themselves
        ``value_norm``      L2 norm of the value parameter tokens themselves
        ``entropy``         of the absolute weights Θ, normalised to sum 1, over ln P, mean over the
                            input tokens: 1 if all pairs weigh the same, 0 if one pair has it all
        ``kurtosis``        excess kurtosis of a token's P scores, mean over the input tokens: 0
                            for normal scores, more for heavier tails
        ``tau``             the layer's τ
        =================== ===================================================================

        Numbers that are not finite are None. Tokens with equal scores do not count in ``kurtosis``,
        and tokens with zero weights do not count in ``entropy``, because both are undefined there.

    Note:
        Computed in float32 for any precision of the training. Only the data preprocessor may draw
        random numbers.
    """
    copied: Any = copy.deepcopy(model).float().eval().requires_grad_(False)
    layers = measured_layers(copied)
    seen: dict[str, list[Tensor]] = {name: [] for name in layers}  # of (2, tokens)
    for name, layer in layers.items():
        fuse_tokens(layer)  # one gradient for all keys, instead of old and new ones apart
        layer.key_param_tokens.requires_grad_()
        layer.value_param_tokens.requires_grad_()
        layer.register_forward_pre_hook(partial(_note_rows, seen[name]))
    device = next(copied.parameters()).device.type
    examples = sum(len(batch["inputs"]) for batch in batches)
    loss = 0.0
    with torch.enable_grad(), torch.autocast(device, enabled=False):
        for batch in batches:
            data = copied.data_preprocessor(batch, False)
            part = _mean_loss(copied, data) * (len(batch["inputs"]) / examples)
            part.backward()
            loss += part.item()
    return {"loss": _plain(loss), "layers": {n: _figures(m, seen[n]) for n, m in layers.items()}}


def _mean_loss(model: Any, data: dict[str, Any]) -> Tensor:
    """Return the mean cross-entropy of a batch, without the label smoothing of training."""
    if "data_samples" not in data:
        return F.cross_entropy(model(**data).float().flatten(0, 1), data["inputs"][:, 1:].flatten())
    labels = torch.cat([sample.gt_label for sample in data["data_samples"]])
    # Not by forward(): mmengine may have compiled it, for the original model.
    logits = model.head(model.extract_feat(data["inputs"]))
    return F.cross_entropy(logits, labels.to(logits.device))


@torch.no_grad()
def _note_rows(seen: list[Tensor], layer: Any, inputs: tuple[Tensor, ...]) -> None:
    """Append entropy and kurtosis of every input token, (2, tokens), NaN where undefined."""
    scores, weights = layer.scores_and_weights(inputs[0].flatten(0, -2))  # (tokens, P)
    shares = weights.abs() / weights.abs().sum(dim=-1, keepdim=True)
    entropy = torch.special.entr(shares).sum(dim=-1) / math.log(max(scores.shape[-1], 2))
    centred = scores - scores.mean(dim=-1, keepdim=True)
    deviation = centred.square().mean(dim=-1, keepdim=True).sqrt()
    # Rounding may leave a small deviation where all scores are equal.
    equal = deviation <= 1e-6 * scores.abs().amax(dim=-1, keepdim=True)
    kurtosis = (centred / deviation.masked_fill(equal, math.nan)).pow(4).mean(dim=-1) - 3
    seen.append(torch.stack([entropy, kurtosis]))


def _figures(layer: Pattention, seen: list[Tensor]) -> dict[str, float | None]:
    keys, values = layer.key_param_tokens, layer.value_param_tokens
    entropy, kurtosis = torch.cat(seen, dim=1).nanmean(dim=1)
    figures = {
        "key_grad_norm": _norm(keys.grad),
        "value_grad_norm": _norm(values.grad),
        "key_norm": _norm(keys),
        "value_norm": _norm(values),
        "entropy": entropy.item(),
        "kurtosis": kurtosis.item(),
        "tau": layer.tau.item(),
    }
    return {name: _plain(number) for name, number in figures.items()}


def _norm(tensor: Tensor | None) -> float:
    return 0.0 if tensor is None else torch.linalg.vector_norm(tensor).item()


def _plain(number: float) -> float | None:
    """Round to the digits of float32, and replace NaN, which JSON does not have, by None."""
    return float(f"{number:.7g}") if math.isfinite(number) else None


def append_line(path: Path, record: dict[str, Any]) -> None:
    """Append a record to a file of JSON lines, on a new line after a half-written one.

    Raises:
        InputError: If the file cannot be written.
    """
    line = json.dumps(record, allow_nan=False).encode() + b"\n"
    try:
        with path.open("ab+") as file:
            if file.tell():
                file.seek(-1, 2)
                if file.read() != b"\n":
                    line = b"\n" + line
            file.write(line)
    except OSError as error:
        raise InputError(
            f"cannot write {path} ({error.strerror}): free some space, then run the same command "
            "with --resume"
        ) from error


def read_diagnostics(path: str | Path) -> dict[int, dict[str, Any]]:
    """Read the file of a :class:`DiagnosticsHook`, also of a resumed run.

    Args:
        path: The file, ``diagnostics.jsonl``.

    Returns:
        The records by iteration, in ascending order. Where a resumed run repeats a measurement, the
        later record counts. Incomplete lines are left out.

    Raises:
        InputError: If there is no such file.
    """
    try:
        lines = Path(path).read_text(encoding="utf-8", errors="replace").splitlines()
    except FileNotFoundError as error:
        raise InputError(
            f"there is no file {path}: a run writes it with custom_hooks = "
            "[dict(type='DiagnosticsHook')] and a model that has Pattention layers"
        ) from error
    records = {}
    for line in lines:
        try:
            record = json.loads(line)
        except json.JSONDecodeError:
            continue  # the line that a killed run was writing
        records[record["iteration"]] = record
    return dict(sorted(records.items()))
