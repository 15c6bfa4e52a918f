"""Measure a trained classifier with fewer pairs, and make a nested model of it."""

import copy
import math
from collections.abc import Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from mmengine.dist import all_reduce, is_main_process
from mmengine.hooks import Hook
from mmengine.registry import HOOKS

from tokenformer_vit.errors import InputError
from tokenformer_vit.growth import measure_usage, nest, reorder
from tokenformer_vit.models import TokenFormerViT
from tokenformer_vit.vision.compression import candidates

from .distributed import unwrap
from .export import export_classifier, run_facts
from .reports import BEFORE_RECORD, validated_model


@HOOKS.register_module()
class CompressionHook(Hook):
    """After training, measure the model with fewer pairs, and write it as a nested model.

    ``record.json`` gets ``compression``: the method (``prune`` or ``top-k``), the share of the
    pairs, the FLOPs of a forward pass and top-1 of each point. The folder ``nested`` in the work
    directory gets the same model with its pairs in the order of their usage, and nested at the
    shares. Nothing is trained. Usage is measured on training images.

    Args:
        keep: Shares of each layer's pairs, between 0 and 1.
        images: Number of training images.

    Raises:
        InputError: If a share is out of range, or the model is no TokenFormer classifier.
    """

    priority = BEFORE_RECORD

    def __init__(self, keep: Sequence[float], images: int = 1000) -> None:
        self._keep, self._images = tuple(keep), images
        if not keep or not all(0 < share < 1 for share in keep):
            raise InputError(
                f"keep of CompressionHook is {keep}: give shares between 0 and 1, such as [0.5]"
            )

    def before_train(self, runner) -> None:
        """Check the model before it is trained."""
        model = getattr(getattr(unwrap(runner.model), "backbone", None), "model", None)
        if not isinstance(model, TokenFormerViT):
            raise InputError(
                "CompressionHook measures a TokenFormer classifier, but the model is a "
                f"{type(model or unwrap(runner.model)).__name__}: remove the hook"
            )

    def after_train(self, runner) -> None:
        """Measure and write."""
        classifier = copy.deepcopy(validated_model(runner))
        classifier.size_rule = None  # only the full size of each model is measured
        model, loader = classifier.backbone.model, runner.train_dataloader
        batches = islice(loader, math.ceil(self._images / loader.batch_size / runner.world_size))
        prepare = classifier.data_preprocessor
        usage = measure_usage(model, (prepare(batch)["inputs"] for batch in batches))
        for each in usage.values():  # every process has other images
            all_reduce(each.sizes, "mean")
            all_reduce(each.shares, "mean")
        points = []
        for candidate in candidates(model, ("prune", "top-k"), self._keep, usage)[1:]:
            classifier.backbone.model = candidate.model
            with candidate.reading():
                points.append(
                    {
                        "method": candidate.method,
                        "keep": candidate.keep,
                        "flops": candidate.flops(),
                        "top1": round(_top1(runner, classifier), 3),
                    }
                )
        runner.message_hub.update_info("compression", points)
        if is_main_process():
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
