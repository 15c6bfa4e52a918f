"""What only ablations need of a training: measurements, baselines and held-out images.

The configs of runs name this file in ``custom_imports``; :mod:`net2net` has growth of Transformers.
"""

import copy
import json
import math
import random
from collections.abc import Mapping, Sequence
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import timm
import torch
import torch.nn.functional as F
from mmengine.dist import is_main_process
from mmengine.hooks import Hook
from mmengine.registry import HOOKS
from mmpretrain.models.peft import LoRAModel
from mmpretrain.models.peft.lora import LoRALinear
from mmpretrain.registry import DATASETS, MODELS
from torch import Tensor, nn

from tokenformer_vit.errors import InputError
from tokenformer_vit.growth import measure_usage, nest, pattention_layers, reorder
from tokenformer_vit.layers import Pattention
from tokenformer_vit.layers.split import fuse_tokens
from tokenformer_vit.models.vit import draw_prefix_tokens
from tokenformer_vit.training.checkpoint import rng_state, set_rng_state
from tokenformer_vit.training.distributed import unwrap
from tokenformer_vit.training.export import export_classifier, run_facts, validated_model
from tokenformer_vit.training.models.backbone import TimmClassificationBackbone
from tokenformer_vit.vision.compression import candidates

HELD_OUT = 5000  # examples, but at most a tenth of a training set
LAYERS_FILE = "diagnostics.jsonl"
# Images in one forward and backward pass, in float32 and in addition to the run's own memory.
_CHUNK = 16
_WRAPPER = "backbone.module."  # before the names of a model with LoRA


def held_out_of(size: int) -> list[int]:
    """Choose the examples of a training set by which rates are chosen, the same ones each time."""
    return sorted(random.Random(0).sample(range(size), min(HELD_OUT, size // 10)))


@DATASETS.register_module()
def HeldOutImages(dataset: Mapping[str, Any], held_out: bool) -> Any:
    """Build a data set of images without those that are held out, or with these alone."""
    size = len(DATASETS.build({**dataset, "lazy_init": True}).load_data_list())
    chosen = held_out_of(size)
    indices = chosen if held_out else sorted({*range(size)} - {*chosen})
    return DATASETS.build({**dataset, "indices": indices})


@MODELS.register_module()
class ProbeBackbone(TimmClassificationBackbone):
    """A backbone whose parts start alike in several models, for comparisons.

    Args:
        model_name: Name of the timm model.
        stem_seed: Seed for all weights outside the blocks (patch embedding, class token,
            positions, final norm). With the same width and image size, a ViT and TokenFormers of
            any Θ and number of pairs then start from the same weights there. The blocks and the
            global random generators do not change. Not for loaded weights.
        frozen_norms: Freeze weight and bias of every LayerNorm in the blocks. From scratch they are
            1 and 0, and the model computes as if it had none; its checkpoints stay the same.
        nested_tau: Initial τ of the smaller sizes of a nested model: ``scaled`` by the number of
            pairs, or ``kept`` from all pairs.
        **kwargs: Other arguments of :class:`TimmClassificationBackbone`.
    """

    def __init__(
        self,
        model_name: str,
        stem_seed: int | None = None,
        frozen_norms: bool = False,
        nested_tau: str = "scaled",
        **kwargs: Any,
    ) -> None:
        super().__init__(model_name, **kwargs)
        if stem_seed is not None:
            if kwargs.get("checkpoint_path") or kwargs.get("pretrained"):
                raise InputError(f"stem_seed={stem_seed} would overwrite the loaded weights")
            own = ("pretrained", "checkpoint_path", "compile", "backend", "growth", "frozen")
            kwargs = {name: value for name, value in kwargs.items() if name not in own}
            self._draw_stem(stem_seed, model_name, kwargs)
        if nested_tau == "kept":
            for layer in pattention_layers(self.model).values():
                layer.set_nested(layer.nested, layer.tau)
        if frozen_norms:
            for module in self.model.blocks.modules():
                if isinstance(module, nn.LayerNorm):
                    module.requires_grad_(False)

    def _draw_stem(self, seed: int, name: str, kwargs: dict[str, Any]) -> None:
        """Take the weights outside the blocks from a model without blocks, drawn from ``seed``."""
        # On the CPU: no other generator has to be seeded and restored.
        with torch.random.fork_rng(devices=[]), torch.device("cpu"):
            torch.default_generator.manual_seed(seed)
            stem = timm.create_model(name, **{**kwargs, "num_classes": 0, "depth": 0})
            draw_prefix_tokens(stem, torch.Generator().manual_seed(seed))  # also of a ViT
        left = self.model.load_state_dict(stem.state_dict(), strict=False)
        assert not left.unexpected_keys
        assert all(name.startswith("blocks.") for name in left.missing_keys)


@MODELS.register_module()
class LoRABackbone(LoRAModel):
    """mmpretrain's ``LoRAModel`` (arXiv:2106.09685) with checkpoints of the whole model.

    ``LoRAModel`` removes everything but LoRA's weights from a state dict, also the step count of an
    averaged model, so a resumed run would start a new average. Here nothing is removed. The export
    is an ordinary model: the low-rank products are added to the weights.
    """

    @property
    def model(self) -> nn.Module:
        """Return the timm model."""
        module: Any = self.module  # mmpretrain's type says config, but it is built by now
        return module.model

    def _register_state_dict_hooks(self) -> None:
        """Keep state dicts complete."""

    def exported(self, state_dict: dict[str, Tensor]) -> dict[str, Tensor]:
        """Add LoRA's products to the weights of their layers, in the state dict of a classifier."""
        merged = dict(state_dict)
        for own, layer in self.named_modules(prefix="backbone"):
            if not isinstance(layer, LoRALinear):
                continue
            down, up = (merged.pop(f"{own}.lora_{part}.weight") for part in ("down", "up"))
            weight = merged.pop(f"{own}.original_layer.weight")  # (C_out, C_in)
            merged[f"{own}.weight"] = weight + layer.scaling * (up @ down)
            if (bias := merged.pop(f"{own}.original_layer.bias", None)) is not None:
                merged[f"{own}.bias"] = bias
        return {name.replace(_WRAPPER, "backbone.", 1): part for name, part in merged.items()}


@HOOKS.register_module()
class NoiseHook(Hook):
    """Add noise to all pairs before the second iteration, relative to their root mean square."""

    priority = "HIGHEST"  # as GrowthHook, which comes after it in the config

    def __init__(self, noise: float) -> None:
        self.noise = noise

    @torch.no_grad()
    def before_train_iter(self, runner, *args: Any, **kwargs: Any) -> None:
        """Add it."""
        if runner.iter == 1:
            generator = torch.Generator().manual_seed(runner.seed or 0)
            for layer in pattention_layers(unwrap(runner.model)).values():
                for tokens in (layer.key_param_tokens, layer.value_param_tokens):
                    drawn = torch.randn(tokens.shape, generator=generator).to(tokens)
                    tokens += self.noise * tokens.square().mean().sqrt() * drawn


@HOOKS.register_module()
class DiagnosticsHook(Hook):
    """Measure the Pattention layers during a run, into ``diagnostics.jsonl``.

    The main process sends the same validation examples through a copy of the model
    (:func:`diagnose`), and appends a line of JSON. The training does not change, to the last bit:
    the random generators are restored. A model without Pattention gets no file.

    There are ``times`` measurements, evenly spaced, and one before the training.
    """

    def __init__(self, times: int = 20, examples: int = 64) -> None:
        self.times, self.examples = times, examples
        self._batches: list[dict[str, Any]] = []

    def before_train(self, runner) -> None:
        """Read the examples, and measure the model that training starts from.

        A resumed run repeats the measurement that was due at its checkpoint, because the run may
        have been killed during it.
        """
        if not measured_layers(unwrap(runner.model)) or not is_main_process():
            return
        if runner.iter == 0:  # left by a run that ended before its first checkpoint
            Path(runner.work_dir, LAYERS_FILE).unlink(missing_ok=True)
        state, loader = rng_state(), runner.val_dataloader  # whose pipeline may draw numbers
        size = len(loader.dataset)
        chosen = random.Random(0).sample(range(size), min(self.examples, size))
        for start in range(0, len(chosen), _CHUNK):
            samples = [loader.dataset[index] for index in chosen[start : start + _CHUNK]]
            self._batches.append(loader.collate_fn(samples))
        set_rng_state(state)
        self._measure(runner, runner.iter)

    def after_train_iter(self, runner, *_args: Any, **_kwargs: Any) -> None:
        """Measure, if it is due."""
        self._measure(runner, runner.iter + 1)

    def _measure(self, runner, iteration: int) -> None:
        due = {round(place * runner.max_iters / self.times) for place in range(self.times + 1)}
        if iteration not in due or not self._batches:
            return
        state = rng_state()
        found = {"iteration": iteration, **diagnose(unwrap(runner.model), self._batches)}
        set_rng_state(state)
        with Path(runner.work_dir, LAYERS_FILE).open("a") as file:
            file.write(f"\n{json.dumps(found)}\n")  # a killed run may have left half a line


def measured_layers(model: nn.Module) -> dict[str, Pattention]:
    """Return the Pattention layers of a model, by timm's names such as ``blocks.3.attn.query``."""
    return {
        name[max(name.find("blocks."), 0) :]: module
        for name, module in model.named_modules()
        if isinstance(module, Pattention)
    }


def diagnose(model: nn.Module, batches: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Measure the Pattention layers of a classifier or language model on some examples.

    A copy is measured, in float32, in evaluation mode, without compiled code, and with all pairs.
    For each layer there are L2 norms of the parameter tokens and of their gradients by ``loss``,
    the mean cross-entropy; τ; and two means over the input tokens. ``entropy`` is that of the
    absolute weights, normalised to sum 1, over ln P: 1 if all pairs weigh the same, 0 if one has it
    all. ``kurtosis`` is the excess kurtosis of the P scores. Tokens with equal scores, or zero
    weights, do not count. Numbers that are not finite are None.
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
    figures = {"tau": layer.tau}
    for name, tokens in (("key", layer.key_param_tokens), ("value", layer.value_param_tokens)):
        figures[f"{name}_norm"] = tokens.norm()
        figures[f"{name}_grad_norm"] = (
            torch.zeros(()) if tokens.grad is None else tokens.grad.norm()
        )
    entropy, kurtosis = torch.cat(seen, dim=1).nanmean(dim=1)
    figures |= {"entropy": entropy, "kurtosis": kurtosis}
    return {name: _plain(number.item()) for name, number in figures.items()}


def _plain(number: float) -> float | None:
    """Round to the digits of float32, and replace NaN, which JSON does not have, by None."""
    return float(f"{number:.7g}") if math.isfinite(number) else None


@HOOKS.register_module()
class CompressionHook(Hook):
    """After training, measure the model with fewer pairs, and write it as a nested model.

    ``record.json`` gets ``compression``: method, share of the pairs, FLOPs of a forward pass and
    top-1 of each point. The folder ``nested`` in the work directory gets the model with its pairs
    in the order of their usage on training images, and nested at the shares ``keep``.
    """

    priority = "VERY_LOW"  # before ResultsHook

    def __init__(self, keep: Sequence[float], images: int = 1000) -> None:
        self._keep, self._images = tuple(keep), images

    def before_train(self, runner) -> None:
        """Check the run before it is trained."""
        assert runner.world_size == 1, "usage is measured by one process"

    def after_train(self, runner) -> None:
        """Measure and write."""
        classifier = copy.deepcopy(validated_model(runner))
        classifier.sandwich = False  # only the full size of each model is measured
        model, loader = classifier.backbone.model, runner.train_dataloader
        batches = islice(loader, math.ceil(self._images / loader.batch_size))
        prepare = classifier.data_preprocessor
        usage = measure_usage(model, (prepare(batch)["inputs"] for batch in batches))
        points = []
        for candidate in candidates(model, ("prune", "top-k"), self._keep, usage)[1:]:
            classifier.backbone.model = candidate.model
            point = {"method": candidate.method, "keep": candidate.keep}
            with candidate.reading():
                top1 = round(_top1(runner, classifier), 3)
                points.append({**point, "flops": candidate.flops(), "top1": top1})
        runner.message_hub.update_info("compression", points)
        nest(reorder(model, usage), self._keep, usage)
        classifier.backbone.model = model
        folder, metainfo = Path(runner.work_dir, "nested"), loader.dataset.metainfo
        export_classifier(classifier, runner.cfg, metainfo, folder, run_facts(runner))


@torch.no_grad()
def _top1(runner: Any, classifier: Any) -> float:
    """Validate a classifier on the validation images of a run."""
    loop = runner.val_loop
    classifier.eval()
    for batch in loop.dataloader:
        loop.evaluator.process(data_samples=classifier.val_step(batch), data_batch=batch)
    return loop.evaluator.evaluate(len(loop.dataloader.dataset))["accuracy/top1"]
