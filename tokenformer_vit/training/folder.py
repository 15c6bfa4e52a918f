"""A first config for a folder of images: its classes, image size, model and recipe."""

import copy
import json
import pprint
import random
import statistics
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

from timm.data import resolve_input_data_config

from tokenformer_vit.errors import InputError
from tokenformer_vit.files import make_folder, write_whole
from tokenformer_vit.models.checkpoints import describe_model, find_weights, load_model
from tokenformer_vit.vision.datasets import VALIDATION, class_images, find_splits
from tokenformer_vit.vision.images import read_image

from .config import choose_checkpoint, name_of, read_config
from .engine import Config
from .models.backbone import check_classifier


class Start(NamedTuple):
    """The model of a first run, as options of the command; nothing is a small TokenFormer."""

    model: str | None = None
    checkpoint: Path | None = None
    freeze: bool = False


def configure_folder(
    folder: str | Path, work_dir: str | Path, start: Start, resume: str | None, say: bool = True
) -> Path:
    """Write a config that trains on a folder of images, and return its path.

    The folder has ``train/<class>/*`` and ``val/<class>/*``, or ``<class>/*``: then a fifth of each
    class is held out, the same images every time. With ``test/<class>/*`` beside both, that is what
    the config tests on. Lists of images and classes are in ``work_dir``.
    """
    folder, work_dir = Path(folder).resolve(), Path(work_dir).resolve()
    path = work_dir / f"{folder.name}.py"
    title = f"# The first run on a folder of images, by `tokenformer-vit train`: {start!r}."
    if resume is not None and path.is_file():
        if start != Start() and title not in path.read_text():
            raise InputError(f"{path} began otherwise: leave --model, --checkpoint, --freeze out")
        return path
    choose_checkpoint(Config({"work_dir": str(work_dir)}), None)  # refuses to replace a run
    found = _find_images(folder, work_dir)
    train, paths = found["train"], [*chain(*found["train"].values())]
    sample = random.Random(0).sample(paths, min(100, len(paths)))
    side = int(statistics.median(min(read_image(each).size) for each in sample))
    recipe = "digits_demo" if side <= 16 else "cifar10_tiny" if side <= 48 else "imagenette_tiny"
    cfg = read_config(recipe)
    model, images = _model(start, cfg.model.backbone, side, len(paths), len(train))
    values = {"model": model, **_values(cfg, start, len(paths), images)}
    values["data_preprocessor"]["num_classes"] = len(train)
    make_folder(work_dir, "--work-dir")
    for split, listed in found.items():
        files = {"ann_file": f"{work_dir / split}.txt", "classes": f"{work_dir / 'classes.txt'}"}
        loader = values.setdefault(f"{split}_dataloader", copy.deepcopy(values["val_dataloader"]))
        loader["dataset"] |= {"data_root": str(folder), "data_prefix": "", **files}
        pairs = ((file, label) for label, name in enumerate(train) for file in listed.get(name, ()))
        lines = [f"{file[len(str(folder)) + 1 :]} {label}" for file, label in pairs]
        _write_lines(work_dir / f"{split}.txt", lines)
    _write_lines(work_dir / "classes.txt", list(train))
    # As literals, in which a checkpoint's arguments run no code; mmengine would replace {{...}}.
    code = [
        f"{key} = {pprint.pformat(value, width=97 - len(key), compact=True, sort_dicts=False)}"
        for key, value in Config(values).to_dict().items()
    ]
    code = [line.replace("{{", "{\\x7b") for line in code]
    code += ["test_dataloader = val_dataloader"] * ("test" not in found)
    _write_lines(path, [title, f'_base_ = "tokenformer_vit::{recipe}.py"', *code])
    if say:
        name, size = model["backbone"]["model_name"], images["input_size"][-1]
        print(f"{path}: the recipe of {recipe} for {name} and {size} x {size} pixels")
        if start.checkpoint is None:
            way = "tokenformer_cifar10_stem, or a ViT that `tokenformer-vit convert` made"
            print(f"Its weights are random. With few images, fine-tune: --checkpoint {way}")
        if found["val"] is train:
            print("No image can be held out: accuracy is that on the training images")
    return path


def _find_images(folder: Path, work_dir: Path) -> dict[str, dict[str, list[str]]]:
    """List the images of train, val and perhaps test by class."""
    splits = find_splits(folder)
    roots = {name: splits[name] for name in ("train", "val", "test") if name in splits}
    roots.setdefault("train", folder)
    if not all(isinstance(root, Path) for root in roots.values()):
        raise InputError(f"{folder} holds no folders of images: `tokenformer-vit prepare-data` it")
    if roots.get("val") == roots.get("test"):  # a test set alone is for validation
        roots.pop("test", None)
    if any(work_dir.is_relative_to(root) for root in roots.values()):
        raise InputError(f"--work-dir {work_dir} is among the classes of {folder}: choose another")
    found = {name: class_images(root) for name, root in roots.items()}
    train, val, generator = found["train"], {}, random.Random(0)
    if len(train) < 2:
        raise InputError(f"{folder} has {len(train)} class folders: make cat/1.jpg, dog/1.jpg")
    if empty := [name for name, files in train.items() if not files]:
        raise InputError(f"{folder} has folders without images: remove {', '.join(empty)}")
    for root, classes in zip(roots.values(), found.values(), strict=True):
        if {name.lower() for name in classes} <= {"train", "training", *VALIDATION}:
            raise InputError(f"{root} has {', '.join(classes)}: name them train and val")
        if unknown := classes.keys() - train.keys():
            raise InputError(f"{root} has classes that train lacks: {', '.join(unknown)}")
        for path in (each[len(str(folder)) + 1 :] for each in chain(*classes.values())):
            if path != path.lstrip() or len(path.splitlines()) > 1:  # mmpretrain strips lines
                raise InputError(f"{folder}: rename {path!r}: no space first, no line breaks")
    if "val" in found:
        return found
    for name, files in train.items():
        held_out = max(1, round(len(files) / 5)) if len(files) > 1 else 0
        val[name] = sorted(generator.sample(files, held_out))
        train[name] = sorted(set(files) - set(val[name]))
    return {"train": train, "val": val if any(val.values()) else train}


def _model(start: Start, recipe: Any, side: int, count: int, classes: int) -> tuple[Any, Any]:
    """Return the model of a config, and timm's data config of its images."""
    kept = ("type", "checkpoint_path", "frozen")
    backbone = {"_delete_": True} | {key: recipe[key] for key in kept if key in recipe}
    if start.checkpoint is not None:
        model: Any = load_model(start.model, start.checkpoint, new_norm=True)
        described = describe_model(model, classes)
        json.loads(json.dumps(described["model_args"]), object_pairs_hook=_check_plain)
        weights = find_weights(start.checkpoint)
        backbone |= {"model_name": described["architecture"], **described["model_args"]}
        backbone |= {"checkpoint_path": str(weights.resolve()), "frozen": start.freeze}
        images = resolve_input_data_config(model)
    elif start.freeze:
        raise InputError("--freeze trains only the head: give the other weights with --checkpoint")
    else:
        name, patch = start.model or recipe.model_name, recipe.patch_size
        size = 128 if side >= 96 else 64 if side > 48 else 32 if side > 16 else side
        size = max(2 * patch, size // patch * patch)
        own = ("theta", "norm") if name.startswith("tokenformer") else ()
        arguments = {key: recipe[key] for key in ("patch_size", "drop_path_rate", *own)}
        arguments["img_size"] = size
        if start.model is None and count < 10_000:  # few images: the size of digits_demo
            arguments |= {"embed_dim": 96, "depth": 4, "num_heads": 3}
        model = load_model(name, None, num_classes=classes, **arguments)
        check_classifier(model, f"--model {name}")
        backbone |= {"model_name": name, **arguments}
        images = {"input_size": (3, size, size), "crop_pct": 1.0, "interpolation": "bicubic"}
    head = {"num_classes": classes, "in_channels": model.num_features}
    return {"backbone": backbone, "head": head}, images


def _check_plain(pairs: list[tuple[str, Any]]) -> None:
    """Refuse arguments that would run as code: mmengine dumps keys and ``{{`` as they are."""
    if "{{" in str(pairs) or not all(key.isidentifier() for key, _ in pairs):
        raise InputError(f"the checkpoint has model arguments {pairs}: do not trust it")


def _values(cfg: Config, start: Start, count: int, images: dict[str, Any]) -> dict[str, Any]:
    """Fit pipelines, batch size, learning rate and averaging to the images and their number."""
    given = [key for key in ("mean", "std") if key in images]  # of a checkpoint
    scales = {key: [255 * value for value in images.pop(key)] for key in given}
    test = {"type": "EvalTransform", **images, "crop_mode": "center"}
    grey = [{"type": "v2/Grayscale"}] * (images["input_size"][0] == 1)
    load, *augment, pack = cfg.train_dataloader.dataset.pipeline
    if "size" in augment[0]:  # a crop
        augment[0].size = images["input_size"][-1]
    if name_of(augment[0].type) == "v2/RandomResizedCrop":
        augment[0].interpolation = images["interpolation"]
    else:  # the recipe is for images of one size
        augment.insert(0, {**test, "crop_pct": 1.0})
    train, batch = [load, *augment, *grey, pack], cfg.train_dataloader.batch_size
    while batch > 8 and count < 20 * batch:
        batch //= 2
    steps = -(-count // batch)
    # The average reaches over a sixteenth of the run, as in digits_demo.
    momentum = float(f"{min(0.5, 16 / (steps * cfg.train_cfg.max_epochs)):.1g}")
    values: dict[str, Any] = {
        "data_preprocessor": scales,
        "train_dataloader": {"batch_size": batch, "dataset": {"pipeline": train}},
        "val_dataloader": {"dataset": {"pipeline": [load, test, *grey, {"type": "PackInputs"}]}},
        "default_hooks": {"logger": {"interval": min(steps, 100)}, "ema": {"momentum": momentum}},
        "auto_scale_lr": {"base_batch_size": batch},
    }
    if start.checkpoint is not None:  # a head alone is trained as in tuning_imagenette
        values["optim_wrapper"] = {"optimizer": {"lr": 1e-2 if start.freeze else 1e-4}}
    return values


def _write_lines(path: Path, lines: list[str]) -> None:
    write_whole(path, "".join(f"{line}\n" for line in lines).encode("utf-8", "surrogateescape"))
