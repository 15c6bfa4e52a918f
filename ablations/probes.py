"""What only ablations need of a training: measurements, baselines and held-out images.

The configs of runs name this file in ``custom_imports``; :mod:`net2net` has growth of Transformers.
"""

import copy
import inspect
import json
import math
import random
from collections.abc import Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import timm
import torch
import torch.nn.functional as F
from mmengine.dist import master_only
from mmengine.hooks import Hook
from mmengine.registry import HOOKS
from mmpretrain.models.peft import LoRAModel
from mmpretrain.models.peft.lora import LoRALinear
from mmpretrain.registry import DATASETS, MODELS
from scipy import stats
from timm.layers import Mlp
from timm.models import VisionTransformer, named_apply, register_model
from timm.models.vision_transformer import init_weights_vit_timm, vit_base_patch16_224
from torch import Tensor, nn

from tokenformer_vit.errors import InputError
from tokenformer_vit.growth import (
    count_pairs,
    join_tokens,
    measure_usage,
    nest,
    pattention_layers,
    prune,
    reorder,
)
from tokenformer_vit.models.checkpoints import save_model
from tokenformer_vit.models.sizes import find_layers
from tokenformer_vit.models.vit import ConvStem, draw_prefix_tokens
from tokenformer_vit.training import export, reports
from tokenformer_vit.training.models.backbone import TimmClassificationBackbone, unwrap

HELD_OUT = 5000  # examples, but at most a tenth of a training set


def part_of(size: int, held_out: bool) -> list[int]:
    """Return the held-out examples of a training set, always the same ones, or all others."""
    chosen = random.Random(0).sample(range(size), min(HELD_OUT, size // 10))
    return sorted(chosen if held_out else {*range(size)} - {*chosen})


@DATASETS.register_module()
def HeldOutImages(dataset: Mapping[str, Any], held_out: bool) -> Any:
    """Build a data set of images without those that are held out, or with these alone."""
    size = len(DATASETS.build({**dataset, "lazy_init": True}).load_data_list())
    return DATASETS.build({**dataset, "indices": part_of(size, held_out)})


@register_model
def vit_conv_stem(pretrained: bool = False, **kwargs: Any) -> VisionTransformer:
    """Build timm's ViT with the stem of ``stem="conv"``."""
    return vit_base_patch16_224(pretrained, embed_layer=ConvStem, **kwargs)


class JoinedMlps(nn.Module):
    """Query, key and value of timm's attention, each from an MLP of its own."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.parts = nn.ModuleList(Mlp(width, hidden, bias=False) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        """Map (B, N, C) to (B, N, 3 C)."""
        return torch.cat([part(x) for part in self.parts], dim=-1)


@register_model
def vit_probe(
    pretrained: bool = False,
    projections: int = 0,
    unit_variance: bool = False,
    stem: str = "patch",
    **kwargs: Any,
) -> VisionTransformer:
    """Build timm's ViT with a change of its blocks.

    With ``projections``, each of q, k, v and o is an MLP with so many hidden neurons. With
    ``unit_variance``, linear layers keep the variance of their inputs, which GELU halves about,
    and the 2 L branches of L blocks together add 1 to that of the residual stream.
    """
    if stem == "conv":
        kwargs["embed_layer"] = ConvStem
    vit = vit_base_patch16_224(pretrained, **kwargs)
    for block in vit.blocks:
        attention: Any = block.attn
        if projections:
            width = vit.embed_dim
            attention.qkv = JoinedMlps(width, projections)
            attention.proj = Mlp(width, projections, bias=False)
            named_apply(init_weights_vit_timm, attention)
        for name, layer in block.named_modules():
            if unit_variance and isinstance(layer, nn.Linear):
                variance = 1 / layer.in_features
                if name.endswith("fc2"):
                    variance /= 0.425  # of GELU, for standard normal inputs
                if name in ("attn.proj", "attn.proj.fc2", "mlp.fc2"):
                    variance /= 2 * len(vit.blocks)
                nn.init.normal_(layer.weight, std=math.sqrt(variance))
    return vit


@MODELS.register_module()
class ProbeBackbone(TimmClassificationBackbone):
    """A backbone whose parts start alike in several models, for comparisons.

    ``stem_seed`` draws all weights outside the blocks: a ViT and all TokenFormers of a width start
    alike there. ``frozen_norms`` freezes the LayerNorms in the blocks: from scratch, at 1 and 0.
    ``nested_tau="kept"`` starts the τ of smaller sizes from that of all pairs.
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
            own = inspect.signature(TimmClassificationBackbone).parameters
            sizes = {name: value for name, value in kwargs.items() if name not in own}
            self._draw_stem(stem_seed, model_name, **sizes)
        if nested_tau == "kept":
            for layer in pattention_layers(self.model).values():
                layer.set_nested(layer.nested, [layer.tau_at(1.0)] * len(layer.nested))
        if frozen_norms:
            for module in self.model.blocks.modules():
                if isinstance(module, nn.LayerNorm):
                    module.requires_grad_(False)

    def _draw_stem(self, seed: int, name: str, **sizes: Any) -> None:
        """Take the weights outside the blocks from a model without blocks, drawn from ``seed``."""
        # On the CPU: no other generator has to be seeded and restored.
        with torch.random.fork_rng(devices=[]), torch.device("cpu"):
            torch.default_generator.manual_seed(seed)
            stem = timm.create_model(name, **{**sizes, "num_classes": 0, "depth": 0})
            draw_prefix_tokens(stem, torch.Generator().manual_seed(seed))  # also of a ViT
        left = self.model.load_state_dict(stem.state_dict(), strict=False)
        assert not left.unexpected_keys
        assert all(name.startswith("blocks.") for name in left.missing_keys)


@MODELS.register_module()
class LoRABackbone(LoRAModel):
    """mmpretrain's ``LoRAModel`` (arXiv:2106.09685), which exports an ordinary model.

    A resumed run needs the whole state dict, from which ``LoRAModel`` removes all but LoRA.
    """

    module: Any

    @property
    def model(self) -> nn.Module:
        """Return the timm model."""
        return self.module.model

    def _register_state_dict_hooks(self) -> None:
        """Keep state dicts complete."""

    def exported(self, state_dict: dict[str, Tensor]) -> dict[str, Tensor]:
        """Add LoRA's products to the weights of their layers, in the state dict of a classifier."""
        merged = dict(state_dict)
        for name, layer in self.named_modules(prefix="backbone"):
            if isinstance(layer, LoRALinear):
                down, up = (merged.pop(f"{name}.lora_{part}.weight") for part in ("down", "up"))
                weight = f"{name}.original_layer.weight"  # (C_out, C_in)
                merged[weight] = merged[weight] + layer.scaling * (up @ down)
        plain = {name: name.replace("backbone.module.", "backbone.", 1) for name in merged}
        return {plain[name].replace(".original_layer", ""): merged[name] for name in merged}


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
    """Measure the Pattention layers at each validation, on its first images, without a change."""

    def after_val_iter(self, runner, batch_idx, data_batch: Any = None, outputs=None) -> None:
        """Note what is measured; a resumed run repeats a validation."""
        model = unwrap(runner.model)
        if batch_idx == 0 and find_layers(model):
            first = {name: data_batch[name][:64] for name in data_batch}
            known = runner.message_hub.runtime_info.get("layers") or []
            rows = [row for row in known if row["x"] != runner.iter]
            rows += [{"x": runner.iter, **row} for row in diagnose(model, first)]
            runner.message_hub.update_info("layers", rows)

    @master_only
    def after_train(self, runner) -> None:
        """Write what was measured, as rows of curves."""
        rows = runner.message_hub.runtime_info.get("layers") or []
        Path(runner.work_dir, "layers.json").write_text(json.dumps(rows))


def diagnose(classifier: nn.Module, batch: dict[str, Any]) -> list[dict[str, Any]]:
    """Measure the Pattention layers of a copy of a classifier, in float32 and evaluation mode.

    A row has a ``layer``, a ``kind`` and a ``value``: τ, the L2 norms of the parameter tokens and
    of their gradients by the mean cross-entropy, and two means over the input tokens. ``entropy``
    is that of the absolute weights, over ln P: 1 if all pairs weigh the same, 0 if one has it all.
    ``kurtosis`` is the excess kurtosis of the P scores. Tokens with equal scores, or zero weights,
    do not count.
    """
    copied: Any = copy.deepcopy(classifier).float().eval().requires_grad_(False)
    join_tokens(copied)  # one gradient for all keys, instead of old and new ones apart
    layers, figures = find_layers(copied), {}

    def note(layer: Any, inputs: tuple[Tensor, ...]) -> None:
        tokens = inputs[0].detach().flatten(0, -2)
        scores, weights = (each.detach().cpu() for each in layer.scores_and_weights(tokens))
        pairs = max(layer.num_used, 2)
        entropy = stats.entropy(weights.abs().numpy(), base=pairs, axis=-1)
        kurtosis = stats.kurtosis(scores.numpy(), axis=-1)
        figures[layer] = {"entropy": np.nanmean(entropy), "kurtosis": np.nanmean(kurtosis)}

    for layer in layers.values():
        layer.key_param_tokens.requires_grad_()
        layer.value_param_tokens.requires_grad_()
        layer.register_forward_pre_hook(note)
    images, labels = _prepared(copied, batch)
    with torch.enable_grad(), torch.autocast(images.device.type, enabled=False):
        # Not by forward(): mmengine may have compiled it, for the original model.
        F.cross_entropy(copied.head(copied.extract_feat(images)), labels).backward()
    rows = []
    for name, layer in layers.items():
        own = {**figures[layer], "tau": layer.tau}
        for kind in ("key", "value"):
            tokens = getattr(layer, f"{kind}_param_tokens")
            own[f"{kind}_norm"] = tokens.detach().norm()
            own[f"{kind}_grad_norm"] = tokens.grad.norm()
        short = name.removeprefix("backbone.model.")  # timm's name, such as blocks.3.attn.query
        rows += [{"layer": short, "kind": kind, "value": float(own[kind])} for kind in own]
    return [row for row in rows if math.isfinite(row["value"])]


def _prepared(classifier: Any, batch: Any) -> tuple[Tensor, Tensor]:
    """Return images of a validation as a classifier sees them, and their labels."""
    data = classifier.data_preprocessor(batch, False)
    labels = torch.cat([sample.gt_label for sample in data["data_samples"]])
    return data["inputs"], labels.to(data["inputs"].device)


@HOOKS.register_module()
class CompressionHook(Hook):
    """After training, measure the model with fewer pairs, and write it as a nested model.

    ``record.json`` gets ``compression``: top-1 at each share ``keep`` of the pairs, by column of
    results.csv. The folder ``nested`` gets the model, nested at these shares, with its pairs in the
    order of their usage on training images.
    """

    priority = "VERY_LOW"  # before ResultsHook

    def __init__(self, keep: Sequence[float], images: int = 1000) -> None:
        self._keep, self._images = tuple(keep), images

    def before_train(self, runner) -> None:
        """Check the run before it is trained."""
        assert runner.world_size == 1, "usage is measured by one process"

    def after_train(self, runner) -> None:
        """Measure and write."""
        classifier, loader = reports.validated_model(runner).eval(), runner.train_dataloader
        prepare = classifier.data_preprocessor
        model = export.as_timm_model(classifier).to(prepare.device).eval()
        batches = islice(loader, math.ceil(self._images / loader.batch_size))
        usage = measure_usage(model, (prepare(batch)["inputs"] for batch in batches))
        pairs = count_pairs(model)
        counts = [{n: max(1, round(keep * pairs[n])) for n in pairs} for keep in self._keep]
        models = [prune(copy.deepcopy(model), usage, each) for each in counts]
        images, right = 0, torch.zeros(len(models))
        for batch in runner.val_dataloader:
            inputs, labels = _prepared(classifier, batch)
            with torch.inference_mode():
                found = [(each(inputs).argmax(dim=1) == labels).sum() for each in models]
            images, right = images + len(labels), right + torch.stack(found).cpu()
        found = {
            f"pruned_at_{keep:g}": round(100 * count / images, 3)
            for keep, count in zip(self._keep, right.tolist(), strict=True)
        }
        runner.message_hub.update_info("compression", found)
        nest(reorder(model, usage), self._keep, usage)
        classes, images = loader.dataset.metainfo["classes"], export.preprocessing(runner.cfg)
        folder, facts = Path(runner.work_dir, "nested"), reports.card_of(runner)
        save_model(model, folder, classes, images, facts)
