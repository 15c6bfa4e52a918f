"""Convert a ViT to a TokenFormer, and compare the two: ``tokenformer-vit convert`` for images."""

import argparse
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import timm
import torch
from timm.data import resolve_input_data_config
from torch import Tensor, nn
from tqdm import tqdm

from tokenformer_vit.benchmarking.costs import model_costs, total
from tokenformer_vit.errors import InputError, one_line
from tokenformer_vit.models import from_vit
from tokenformer_vit.models.checkpoints import load_model, save_model
from tokenformer_vit.vision.compression import tensor_batches
from tokenformer_vit.vision.images import list_images

_NOISE = 32  # images, where no folder is given


def convert_vit(args: argparse.Namespace) -> None:
    """Convert the ViT that the arguments name, and write an exported folder."""
    paths = [Path(path) for path in list_images([args.images])] if args.images else []
    vit: Any = load_vit(args).eval()
    model: Any = from_vit(vit)
    costs = [total(model_costs(each)) for each in (vit, model)]
    for each in (vit, model):
        each.to(args.device)
    if paths:
        images: Iterable[Tensor] = tensor_batches(vit, paths, args.batch_size, args.device)
        what = f"{len(paths)} images of {args.images}"
    else:
        images = tqdm(_noise(vit).to(args.device).split(args.batch_size), "comparing", disable=None)
        what = f"{_NOISE} images of noise"
    errors, same = compare(vit, model, images)
    error = f"{errors.max():.1e} at most, {errors.mean():.1e} on average, on {what} in float32"
    path = local_path(args.source)
    # The name of a folder alone: its place is private.
    weights = path.resolve().name if path.exists() else args.source
    facts = {"Model": vit.pretrained_cfg["architecture"], "Weights": weights}
    facts["Relative error of the outputs"] = error
    if same is not None:
        facts["Same top-1 class"] = f"{same:.2%}"
    shown = [f"{name}: {facts[name]}" for name in [*facts][2:]]
    for label, name, unit, form in (
        ("Parameters", "parameters", 1, ",.0f"),
        ("GFLOPs per image", "forward_flops", 1e9, ".4g"),
    ):
        old, new = (getattr(each, name) / unit for each in costs)
        shown.append(f"{label}: {old:{form}} -> {new:{form}} ({new / old:.2f} times)")
    save_model(model.cpu(), args.target, facts={"Converted from": facts})
    target = str(args.target)
    print(*shown, f"Done. In {target}: model.safetensors, config.json and README.md", sep="\n")


def load_vit(args: argparse.Namespace) -> nn.Module:
    """Load a file or folder, or the pretrained weights of a timm name."""
    path = local_path(args.source)
    if args.model or path.exists():
        return load_model(args.model, path, args.num_classes, **args.model_kwargs)
    classes = {} if args.num_classes is None else {"num_classes": args.num_classes}
    try:
        return timm.create_model(args.source, pretrained=True, **classes, **args.model_kwargs)
    except (AssertionError, KeyError, OSError, RuntimeError, TypeError, ValueError) as error:
        raise InputError(
            f"the pretrained weights of {args.source} cannot be loaded ({one_line(error)}): "
            "correct the name or arguments, or check the network"
        ) from error


def local_path(source: str) -> Path:
    """Return the place of IN, if it is a file or a folder."""
    return Path(source.removeprefix("local-dir:")).expanduser()


def _noise(vit: Any) -> Tensor:
    size = resolve_input_data_config(vit)["input_size"][1:]
    random = torch.Generator().manual_seed(0)
    return torch.randn(_NOISE, vit.patch_embed.proj.in_channels, *size, generator=random)


@torch.inference_mode()
def compare(vit: Any, model: Any, images: Iterable[Tensor]) -> tuple[Tensor, float | None]:
    """Compare the outputs of two models on batches of images.

    Args:
        vit: Model whose outputs are the reference, in evaluation mode.
        model: Model to compare, in evaluation mode.
        images: (B, C, H, W) batches.

    Returns:
        (N,) relative error of each image, without what is common to a whole row of outputs; and
        the share of images with the same top-1 class, None if there are no classes.

    Raises:
        InputError: If an output is not finite.
    """
    errors, same = [], []
    for batch in images:
        outputs = [each(batch).float() for each in (vit, model)]
        if not all(each.isfinite().all() for each in outputs):
            raise InputError(
                "the outputs are not finite: give weights of a training that converged"
            )
        if vit.num_classes > 1 and outputs[0].ndim == 2:  # without a pool, tokens have logits
            same.append(outputs[0].argmax(-1) == outputs[1].argmax(-1))
        if outputs[0].shape[-1] > 1:
            outputs = [each - each.mean(dim=-1, keepdim=True) for each in outputs]
        expected, found = (each.flatten(1).double() for each in outputs)
        norm = expected.norm(dim=1).clamp(min=torch.finfo(torch.float32).tiny)
        errors.append((found - expected).norm(dim=1) / norm)
    share = torch.cat(same).double().mean().item() if same else None
    return torch.cat(errors).cpu(), share
