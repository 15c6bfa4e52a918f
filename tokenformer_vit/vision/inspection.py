"""Find the patches and the images that the pairs of a layer respond to."""

import math
from collections.abc import Callable, Generator, Sequence
from contextlib import closing
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import torch
from timm.data import resolve_input_data_config
from torch import Tensor, nn

from tokenformer_vit.errors import InputError
from tokenformer_vit.growth import pattention_layers
from tokenformer_vit.layers import Pattention
from tokenformer_vit.models import TokenFormerViT

from .images import read_images

MOST = 32  # rows or columns of a picture; with more, it would be hard to read


def _find_layer(model: nn.Module, name: str | None) -> tuple[str, Pattention]:
    if not isinstance(model, TokenFormerViT):
        raise InputError(f"{type(model).__name__} has no parameter tokens; give a TokenFormer")
    layers = pattention_layers(model)
    if name is None:
        # Early blocks see little more than colours and edges. In the last block, patches do not
        # affect a head that reads the class token.
        name = f"blocks.{len(model.blocks) // 2}.mlp"  # type: ignore[arg-type]
    if name not in layers:
        close = get_close_matches(name, layers, n=5) or list(layers)[-5:]
        raise InputError(
            f"the model has no Pattention layer {name!r}; it has {len(model.blocks)} blocks: "  # type: ignore[arg-type]
            f"choose a layer such as {', '.join(close)}"
        )
    return name, layers[name]


@torch.no_grad()
def token_weights(model: nn.Module, images: Tensor, layer: str) -> Tensor:
    """Compute the weight of each key-value pair of a layer for each patch of some images.

    Args:
        model: :class:`~tokenformer_vit.models.TokenFormerViT` in evaluation mode.
        images: (B, 3, H, W) images, normalised for the model, on its device.
        layer: Name of a Pattention layer; see :func:`~tokenformer_vit.growth.pattention_layers`.

    Returns:
        (B, N, P) weights Θ(X K_Pᵀ) in float32 of the N patches, row by row. Class and register
        tokens are left out. The weight of an inactive pair is zero.

    Raises:
        InputError: If the model is not a TokenFormer or does not have the layer, or if a weight is
            not finite.

    Source:
        TokenFormer, arXiv:2410.23168, Eq. 4 to 6.
    """
    layer, module = _find_layer(model, layer)
    inputs: list[Tensor] = []
    hook = module.register_forward_pre_hook(lambda _, given: inputs.append(given[0]))
    try:
        # Compiled code would leave out the hook.
        with torch.compiler.set_stance("force_eager"):
            model.forward_intermediates(  # type: ignore[operator]
                images,
                indices=[int(layer.split(".")[1])],
                stop_early=True,
                intermediates_only=True,
                output_fmt="NLC",
            )
    finally:
        hook.remove()
    weights = module.weights(inputs[0][:, model.num_prefix_tokens :])  # type: ignore[misc]
    if not weights.isfinite().all():
        raise InputError(
            f"weights in {layer} are not finite: the training diverged; use an earlier checkpoint"
        )
    if module.num_used == module.num_param_tokens:
        return weights
    every = weights.new_zeros(*weights.shape[:-1], module.num_param_tokens)
    every[..., slice(module.size) if module.active is None else module.active] = weights
    return every


def map_tokens(
    model: nn.Module,
    paths: Sequence[Path],
    layer: str | None = None,
    tokens: Sequence[int] | None = None,
    top: int = 8,
    batch_size: int = 32,
    device: torch.device | str = "cpu",
    skipped: Callable[[Path, Exception], object] = print,
) -> dict[str, Any]:
    """Map the weights of some pairs of a layer over a few images.

    Args:
        model: Model, as for :func:`token_weights`; it is moved to ``device``.
        paths: Image files, at most :data:`MOST`.
        layer: Name of the layer; default: the feed-forward layer of the middle block.
        tokens: Numbers of the pairs; default: the pairs with the largest weights on these images.
        top: Number of pairs, if ``tokens`` is not given.
        batch_size: Images in a forward pass.
        device: Device to compute on.
        skipped: Function that is called with each unreadable image and its error.

    Returns:
        A record for :func:`~tokenformer_vit.vision.drawing.draw_maps` and for JSON: ``layer``,
        ``theta``, ``num_param_tokens``, ``grid`` [rows, columns], ``patch_size`` [height, width] in
        pixels, ``images`` (the files that were read), ``chosen_by``, and ``tokens``. Each entry of
        ``tokens`` has the number of the pair (``token``), its ``value_norm``, and for every image
        the largest weight (``peaks``) and all weights (``weights``, row by row), to six decimals.

    Raises:
        InputError: If a layer or pair does not exist, there is too much to draw, or no image can be
            read.
    """
    if len(paths) > MOST:
        raise InputError(
            f"{len(paths)} images are too many for maps, which show at most {MOST}: give fewer "
            "images, or show the exemplars of a data set (--exemplars 9)"
        )
    layer, module = _find_layer(model, layer)
    tokens = _check_tokens(tokens, top, layer, module)
    files, parts = [], []
    with closing(_stream(model, paths, layer, batch_size, device, skipped)) as batches:
        for names, weights in batches:
            files += names
            parts.append(weights.cpu())
    weights = torch.cat(parts)  # (B, N, P)
    peaks = weights.amax(dim=1)  # (B, P)
    chosen = tokens or _largest(peaks.amax(dim=0), top)
    norms = _value_norms(module)
    header = _header(model, layer, module)
    return {
        **header,
        "images": [str(file) for file in files],
        "chosen_by": "number" if tokens else "largest weight on these images",
        "tokens": [
            {
                "token": token,
                "value_norm": _plain(norms[token]),
                "peaks": _plain(peaks[:, token]),
                "weights": _plain(weights[:, :, token].unflatten(1, header["grid"])),
            }
            for token in chosen
        ],
    }


def find_exemplars(
    model: nn.Module,
    paths: Sequence[Path],
    layer: str | None = None,
    number: int = 9,
    tokens: Sequence[int] | None = None,
    top: int = 8,
    batch_size: int = 32,
    device: torch.device | str = "cpu",
    skipped: Callable[[Path, Exception], object] = print,
) -> dict[str, Any]:
    """Find the images of a data set for which some pairs of a layer have the largest weights.

    Args:
        model: Model, as for :func:`token_weights`; it is moved to ``device``.
        paths: Image files, any number of them: memory holds the weights of one batch.
        layer: Name of the layer; default: the feed-forward layer of the middle block.
        number: Number of exemplars for each pair, at most :data:`MOST`.
        tokens: Numbers of the pairs; default: the most selective ones, see Note.
        top: Number of pairs, if ``tokens`` is not given.
        batch_size: Images in a forward pass.
        device: Device to compute on.
        skipped: Function that is called with each unreadable image and its error.

    Returns:
        A record for :func:`~tokenformer_vit.vision.drawing.draw_exemplars` and for JSON: ``layer``,
        ``theta``, ``num_param_tokens``, ``grid`` and ``patch_size`` as in :func:`map_tokens`,
        ``images`` (the number that was read), ``chosen_by``, and ``tokens``. Each entry of
        ``tokens`` has the number of the pair (``token``), its ``value_norm``, its
        ``mean_abs_weight`` over all patches, its ``selectivity``, and its ``exemplars``, largest
        weight first. An exemplar has its ``file``, its largest ``weight``, and the ``patch`` [row,
        column] with this weight.

    Raises:
        InputError: If a layer or pair does not exist, there is too much to draw, or no image can be
            read.

    Note:
        The ``selectivity`` of a pair is the mean weight of its exemplars, divided by its mean
        |weight|. Only the half of the pairs with the largest mean |weight| · ‖value‖, which add
        most to the output, are candidates; the most selective candidates are chosen. Selectivity
        alone would choose pairs that do almost nothing. The other measure alone would choose pairs
        that respond to everything, and their exemplars would show nothing. Kurtosis would depend on
        single outliers; selectivity depends on every image that is shown.
    """
    layer, module = _find_layer(model, layer)
    tokens = _check_tokens(tokens, top, layer, module)
    if not 1 <= number <= MOST:
        raise InputError(f"cannot draw {number} exemplars of a pair; give 1 to {MOST}")
    files: list[Path] = []
    total = torch.zeros(module.num_param_tokens, dtype=torch.float64)
    # The best images of every pair so far: largest weight, number and patch, each (<=K, P).
    peaks = torch.empty(0, module.num_param_tokens)
    images = patches = torch.empty(0, module.num_param_tokens, dtype=torch.long)
    with closing(_stream(model, paths, layer, batch_size, device, skipped)) as batches:
        for names, weights in batches:
            total += torch.linalg.vector_norm(weights, ord=1, dim=(0, 1)).cpu()
            new, at = (part.cpu() for part in weights.max(dim=1))  # (B, P)
            numbers = torch.arange(len(files), len(files) + len(names))
            files += names
            peaks, order = torch.cat([peaks, new]).topk(min(number, len(files)), dim=0)
            images = torch.cat([images, numbers[:, None].expand_as(new)]).gather(0, order)
            patches = torch.cat([patches, at]).gather(0, order)
            del weights  # before the next batch is computed
    header = _header(model, layer, module)
    mean = total / (len(files) * math.prod(header["grid"]))
    norms = _value_norms(module)
    selectivity = peaks.mean(dim=0) / mean.clamp_min(torch.finfo(torch.float32).tiny)
    strong = _largest(mean * norms, max(top, module.num_param_tokens // 2))
    chosen = tokens or [strong[i] for i in _largest(selectivity[strong], top)]
    return {
        **header,
        "images": len(files),
        "chosen_by": "number" if tokens else "selectivity",
        "tokens": [
            {
                "token": token,
                "value_norm": _plain(norms[token]),
                "mean_abs_weight": _plain(mean[token]),
                "selectivity": _plain(selectivity[token]),
                "exemplars": [
                    {
                        "file": str(files[image]),
                        "weight": weight,
                        "patch": list(divmod(patch, header["grid"][1])),
                    }
                    for image, weight, patch in zip(
                        images[:, token].tolist(),
                        _plain(peaks[:, token]),
                        patches[:, token].tolist(),
                        strict=True,
                    )
                ],
            }
            for token in chosen
        ],
    }


def _check_tokens(
    tokens: Sequence[int] | None, top: int, layer: str, module: Pattention
) -> list[int]:
    """Return the given pairs without repetitions; none if they are to be chosen."""
    tokens = list(dict.fromkeys(tokens or ()))
    for token in tokens:
        if not 0 <= token < module.num_param_tokens:
            raise InputError(
                f"{layer} has no pair {token}; its {module.num_param_tokens} pairs are 0 to "
                f"{module.num_param_tokens - 1}"
            )
    if not 1 <= (asked := len(tokens) or top) <= MOST:
        raise InputError(f"cannot draw {asked} pairs in one picture; give 1 to {MOST}")
    return tokens


def _stream(
    model: nn.Module,
    paths: Sequence[Path],
    layer: str,
    batch_size: int,
    device: torch.device | str,
    skipped: Callable[[Path, Exception], object],
) -> Generator[tuple[list[Path], Tensor], None, None]:
    """Yield the readable paths of each batch and their (B, N, P) weights; report other paths."""
    config, model, found = resolve_input_data_config(model), model.to(device), False
    with closing(read_images(list(dict.fromkeys(paths)), config, batch_size)) as batches:
        for batch in batches:
            for path, image in batch:
                if isinstance(image, Exception):
                    skipped(path, image)
            readable = {path: image for path, image in batch if isinstance(image, Tensor)}
            if readable:
                found = True
                images = torch.stack(list(readable.values())).to(device)
                yield list(readable), token_weights(model, images, layer)
    if not found:
        raise InputError("none of the images could be read; the lines above say why")


def _header(model: Any, layer: str, module: Pattention) -> dict[str, Any]:
    size = resolve_input_data_config(model)["input_size"][1:]
    return {
        "layer": layer,
        "theta": module.theta,
        "num_param_tokens": module.num_param_tokens,
        "grid": list(model.patch_embed.dynamic_feat_size(size)),
        "patch_size": list(model.patch_embed.patch_size),
    }


def _value_norms(module: Pattention) -> Tensor:
    return module.value_param_tokens.detach().double().norm(dim=1).cpu()  # (P,)


def _largest(measure: Tensor, number: int) -> list[int]:
    return measure.topk(min(number, len(measure))).indices.tolist()


def _plain(numbers: Tensor) -> Any:
    return numbers.double().round(decimals=6).tolist()
