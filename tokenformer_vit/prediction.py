"""Classify image files with a timm model and a checkpoint that is read without running its code."""

import argparse
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import closing
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import timm
import torch
from safetensors import SafetensorError
from timm.data import ImageNetInfo, resolve_model_data_config
from timm.models import load_state_dict, save_for_hf
from timm.utils import ParseKwargs
from torch import Tensor, nn

from tokenformer_vit.command_line import whole_number
from tokenformer_vit.errors import InputError
from tokenformer_vit.models import TokenFormerViT, checkpoint_filter_fn
from tokenformer_vit.vision.images import read_images

__all__ = [
    "KeyValues",
    "choose_device",
    "class_names",
    "data_config",
    "load_model",
    "model_arguments",
    "predict",
    "read_state_dict",
    "save_model",
]

_LOCAL = "local-dir:"
# What timm's save_for_hf writes beside config.json, the safe format first.
_WEIGHT_FILES = ("model.safetensors", "pytorch_model.bin")


class KeyValues(ParseKwargs):
    """Action of an option that takes ``KEY=VALUE`` pairs of Python literals into a dict."""

    def __call__(self, parser, namespace, values, option_string=None) -> None:
        """Parse the pairs of one option."""
        try:
            super().__call__(parser, namespace, values, option_string)
        except ValueError as error:  # it splits at "=" and trusts that there is one
            raise argparse.ArgumentError(self, "takes KEY=VALUE") from error


def model_arguments() -> argparse.ArgumentParser:
    """Return the options that say which model to build, and on what to run it.

    Returns:
        A parser to be named among the ``parents`` of another, with ``--model``,
        ``--model-kwargs``, ``--num-classes``, ``--batch-size`` and ``--device``.
    """
    parser = argparse.ArgumentParser(add_help=False)
    add = parser.add_argument_group("the model").add_argument
    add("--model", metavar="NAME", help="timm model name, or local-dir:FOLDER")
    add(
        "--model-kwargs",
        nargs="+",
        action=KeyValues,
        default={},
        metavar="KEY=VALUE",
        help="arguments of the model, such as img_size=32 patch_size=4",
    )
    add(
        "--num-classes", type=whole_number(1), metavar="N", help="default: as the checkpoint's head"
    )
    add("--batch-size", type=whole_number(1), default=32, metavar="B", help="default: 32")
    add("--device", choices=["auto", "cpu", "cuda"], default="auto")
    return parser


def choose_device(name: str) -> torch.device:
    """Return the device of a ``--device``: ``cpu``, ``cuda``, or ``auto`` for the best there is.

    Raises:
        InputError: If it is ``cuda`` and there is none.
    """
    if name == "cuda" and not torch.cuda.is_available():
        raise InputError("--device cuda, but this PyTorch sees no CUDA device; use --device cpu")
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    return torch.device(name)


def load_model(
    name: str | None,
    checkpoint: Path | None,
    num_classes: int | None = None,
    **kwargs: Any,
) -> nn.Module:
    """Build a timm model and load its weights strictly.

    Args:
        name: timm model name, or ``local-dir:FOLDER`` of a model that timm's ``save_for_hf``
            wrote; None where the checkpoint lies in such a folder.
        checkpoint: ``.safetensors`` file or PyTorch checkpoint, of timm or of mmpretrain
            training; None for the weights in a local folder, otherwise random ones.
        num_classes: Default: as many as the checkpoint's ``head.weight`` has rows.
        **kwargs: Arguments of the model.

    Returns:
        The model, on the CPU, in evaluation mode.

    Raises:
        InputError: If there is no such model or file, or the two do not fit.
    """
    if checkpoint is not None and not checkpoint.is_file():
        hint = f"; a folder is given as --model {_LOCAL}FOLDER" if checkpoint.is_dir() else ""
        raise InputError(f"there is no checkpoint file {checkpoint}{hint}")
    if name is None:
        if checkpoint is None or not (checkpoint.parent / "config.json").is_file():
            raise InputError(
                "no model given: name it with --model, or give the checkpoint of an exported "
                f"folder with config.json; ours are {', '.join(timm.list_models('tokenformer*'))}"
            )
        name = f"{_LOCAL}{checkpoint.parent}"
    if name.startswith(_LOCAL) and checkpoint is None:
        checkpoint = _weights_in(Path(name.removeprefix(_LOCAL)))
    _check_name(name)

    state_dict = read_state_dict(checkpoint) if checkpoint else None
    if state_dict is not None and num_classes is None:
        head = state_dict.get("head.weight", state_dict.get("head.fc.weight"))
        num_classes = None if head is None else len(head)
    try:
        model = timm.create_model(name, num_classes=num_classes, **kwargs)
    except (AssertionError, KeyError, RuntimeError, TypeError, ValueError) as error:
        raise InputError(f"the model {name} cannot be built: {_one_line(error)}") from error
    if state_dict is not None:
        _load(model, state_dict, f"{checkpoint} does not fit {name}", "img_size" in kwargs)
    return model.eval()


def save_model(
    model: nn.Module,
    folder: Path,
    label_names: Sequence[str] | None = None,
    data_config: dict[str, Any] | None = None,
) -> None:
    """Write a folder that ``timm.create_model("local-dir:FOLDER", pretrained=True)`` reads.

    Args:
        model: timm model.
        folder: Gets ``model.safetensors`` and ``config.json``, each at once; it is made.
        label_names: Of the classes, in order; default: those that the model's export had, if any.
        data_config: What timm is to know of the preprocessing; default: what the model says of it.

    Raises:
        OSError: If it cannot be written; what was there stays.
    """
    names = label_names or model.pretrained_cfg.get("label_names")  # type: ignore[union-attr, operator]
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder, prefix=".export-") as partial:
        save_for_hf(
            model,  # type: ignore[arg-type]
            partial,
            model_config={"label_names": list(names)} if names else None,
            safe_serialization=True,
            data_config=data_config,
        )
        for name in ("model.safetensors", "config.json"):
            (Path(partial) / name).replace(folder / name)


def _weights_in(folder: Path) -> Path:
    for file in _WEIGHT_FILES:
        if (folder / file).is_file():
            return folder / file
    raise InputError(f"there is none of {', '.join(_WEIGHT_FILES)} in the folder {folder}")


def _check_name(name: str) -> None:
    if name.startswith(_LOCAL):
        config = Path(name.removeprefix(_LOCAL)) / "config.json"
        if not config.is_file():
            raise InputError(f"there is no {config}; {_LOCAL} takes a folder that timm exported")
    elif not timm.is_model(name):
        ours = timm.list_models("tokenformer*")
        close = get_close_matches(name, ours, n=3) or ours
        raise InputError(f"there is no model {name!r}; did you mean {', '.join(close)}?")


def read_state_dict(path: Path) -> dict[str, Tensor]:
    """Read the tensors of a checkpoint without running its code.

    Args:
        path: ``.safetensors`` file, or PyTorch's of a state dict or of a training, averaged weights
            first.

    Returns:
        The tensors by name, on the CPU.

    Raises:
        InputError: If the file is damaged, or holds something else.
    """
    try:
        # Also unwraps timm's and mmengine's training checkpoints, averaged weights first.
        state_dict = load_state_dict(str(path), weights_only=True)
    except SafetensorError as error:
        raise InputError(
            f"{path} is not a readable safetensors file: {_one_line(error)}"
        ) from error
    except Exception as error:  # torch.load answers foreign bytes with nearly any exception
        raise InputError(
            f"{path} is damaged or holds more than tensors and plain values; it was not loaded, "
            "since that could run code: save the state dict alone, best as .safetensors "
            f"({_one_line(error)})"
        ) from error
    if not state_dict or not all(isinstance(value, Tensor) for value in state_dict.values()):
        raise InputError(
            f"{path} holds no state dict (found: {', '.join(map(str, list(state_dict)[:5]))}); "
            "save model.state_dict()"
        )
    return state_dict


def _load(model: nn.Module, state_dict: dict[str, Tensor], what: str, resample: bool) -> None:
    """Load strictly; ``resample`` allows positions of another image size."""
    wanted = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    found = {name: tuple(tensor.shape) for name, tensor in state_dict.items()}
    # The filter would resample these two to any size without a word, and so predict with a model
    # that nobody has trained.
    stem = ["patch_embed.proj.weight"] if resample else ["patch_embed.proj.weight", "pos_embed"]
    faults = []
    for name in stem:
        for shape in (found[key] for key in found if f".{key}".endswith(f".{name}")):
            if name in wanted and shape != wanted[name]:
                faults.append(f"{name} is {shape} in the file and {wanted[name]} in the model")
    if not faults:
        if isinstance(model, TokenFormerViT):
            state_dict = checkpoint_filter_fn(state_dict, model)
        found = {name: tuple(tensor.shape) for name, tensor in state_dict.items()}
        faults = [
            f"{name} is {found[name]} in the file and {shape} in the model"
            for name, shape in wanted.items()
            if name in found and found[name] != shape
        ]
        faults += [
            f"{name} {wanted[name]} is not in the file" for name in wanted if name not in found
        ]
        faults += [
            f"{name} {found[name]} is not in the model" for name in found if name not in wanted
        ]
    if faults:
        more = f" and {len(faults) - 3} more" if len(faults) > 3 else ""
        raise InputError(
            f"{what}: {'; '.join(faults[:3])}{more}. Give the --model it was trained as, "
            "with its --model-kwargs"
        )
    model.load_state_dict(state_dict)


def class_names(model: nn.Module) -> list[str]:
    """Name a model's classes: as its export says, else ImageNet-1K's if 1000, else by number."""
    count: int = model.num_classes  # type: ignore[assignment]
    names = model.pretrained_cfg.get("label_names")  # type: ignore[union-attr, operator]
    if names and len(names) == count:
        return [str(name) for name in names]
    if count == 1000:
        return ImageNetInfo().label_descriptions()  # type: ignore[return-value]
    return [f"class {index}" for index in range(count)]


def data_config(model: nn.Module) -> dict[str, Any]:
    """Return how images are prepared for a model, as arguments of timm's ``create_transform``.

    Args:
        model: timm model of RGB images.

    Returns:
        ``input_size`` (3, H, W), ``mean``, ``std``, and how to resize and crop.

    Raises:
        InputError: If the model takes no RGB images.
    """
    if model.in_chans != 3:
        raise InputError(f"the model takes images of {model.in_chans} channels; only RGB is read")
    # The size that the model was built for; its configuration may still say timm's default.
    size = getattr(getattr(model, "patch_embed", None), "img_size", None)
    return resolve_model_data_config(model, {"input_size": (3, *size)} if size else None)


def predict(
    model: nn.Module,
    paths: Sequence[Path],
    topk: int = 5,
    batch_size: int = 32,
    device: torch.device | str = "cpu",
) -> Iterator[tuple[Path, list[dict[str, Any]] | Exception]]:
    """Classify images with the transform of the model's evaluation.

    Args:
        model: timm classifier of RGB images.
        paths: Image files.
        topk: Number of classes an image, at most all.
        batch_size: Images in a forward pass.
        device: Where to compute.

    Yields:
        Every path in order, with the likeliest classes as {label, index, probability}, likeliest
        first, or with the error of reading the image.

    Raises:
        InputError: If the model takes no RGB images, has no classifier, or yields NaN.
    """
    config = data_config(model)
    if not model.num_classes:
        raise InputError("the model has no classifier: choose one that was trained to classify")
    names = class_names(model)
    topk = min(topk, len(names))
    model = model.to(device)
    with closing(read_images(paths, config, batch_size)) as batches:
        for batch in batches:
            readable = [image for _, image in batch if isinstance(image, Tensor)]
            tops = iter(_top(model, torch.stack(readable).to(device), topk) if readable else ())
            for path, image in batch:
                if isinstance(image, Exception):
                    yield path, image
                else:
                    yield (
                        path,
                        [{"label": names[i], "index": i, "probability": p} for i, p in next(tops)],
                    )


@torch.inference_mode()
def _top(model: nn.Module, images: Tensor, topk: int) -> list[list[tuple[int, float]]]:
    probabilities = model(images).float().softmax(dim=-1)  # (B, K)
    if not probabilities.isfinite().all():
        raise InputError(
            "the model's output is not finite; its checkpoint is of a training that diverged"
        )
    values, indices = probabilities.topk(topk)
    return [
        list(zip(i, p, strict=True)) for i, p in zip(indices.tolist(), values.tolist(), strict=True)
    ]


def _one_line(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0][:200] if lines else type(error).__name__
