"""A first config for a folder of images: its classes, image size, model and recipe."""

import pprint
import random
import statistics
from collections import Counter
from pathlib import Path
from typing import Any, NamedTuple

from mmengine.config import Config
from timm.data import resolve_input_data_config

from tokenformer_vit.command_line import printable
from tokenformer_vit.errors import InputError
from tokenformer_vit.files import make_folder, write_whole
from tokenformer_vit.models.checkpoints import WEIGHTS, describe_model, load_model
from tokenformer_vit.vision.images import class_folders, read_image, say_left_out, scan_images

from .config import choose_checkpoint, read_config
from .models.backbone import check_classifier

__all__ = ["Start", "configure_folder"]

HELD_OUT = 0.2  # of each class
_SAMPLE = 100  # images that are opened to see their size
_FEW = 10_000  # training images; with fewer, the model is as small as that of digits_demo
_SMALL = {"embed_dim": 96, "depth": 4, "num_heads": 3}
# The average of the weights reaches over one of so many parts of a run, as in digits_demo.
_AVERAGES = 16
_FINE_TUNING_LR = 1e-4
_PROBE_LR = 1e-2  # as in tuning_imagenette, which trains a head and a few pairs
_VALIDATION = ("val", "valid", "validation")
# Names of the parts of a data set, in lower case: folders with such names are no classes.
_PARTS = {*_VALIDATION, "train", "training", "dev", "test", "testing"}


class Start(NamedTuple):
    """The model of a first run.

    Args:
        model: Name of a timm model, TokenFormer or ViT; None for a small TokenFormer, or for the
            model that ``checkpoint`` describes.
        checkpoint: File or exported folder with the first weights.
        freeze: Train only the head.
    """

    model: str | None = None
    checkpoint: Path | None = None
    freeze: bool = False


def configure_folder(
    folder: str | Path, work_dir: str | Path, start: Start, resume: str | None, say: bool = True
) -> Path:
    """Write a config that trains on a folder of images, and return its path.

    Args:
        folder: Folder with ``train/<class>/*`` and ``val/<class>/*``, or with ``<class>/*``. In the
            second case a fifth of each class is held out, the same images every time. The images
            stay in place; ``train.txt``, ``val.txt`` and ``classes.txt`` in ``work_dir`` list them.
        work_dir: Folder for the config, whose name is that of ``folder``.
        start: Model and first weights.
        resume: Value of ``--resume``. A run that is resumed already has its config; ``start`` must
            be what it was, or empty.
        say: Print what was chosen.

    Raises:
        InputError: If ``work_dir`` already holds a run or is among the class folders, a resumed run
            started otherwise, or the folder has no two classes.
    """
    folder, work_dir = Path(folder).resolve(), Path(work_dir).resolve()
    path = work_dir / f"{folder.name}.py"
    written = f"# The first run on a folder of images, by `tokenformer-vit train`: {start!r}."
    if resume is not None and path.is_file():
        if start != Start() and written not in path.read_text():
            raise InputError(
                f"--resume continues the run of {path}, which began with another --model, "
                "--checkpoint or --freeze: leave these options out"
            )
        return path
    choose_checkpoint(Config({"work_dir": str(work_dir)}), None)  # refuses to replace a run
    train, val = _find_images(folder, work_dir)
    paths = [folder / file for files in train.values() for file in files]
    sample = random.Random(0).sample(paths, min(_SAMPLE, len(paths)))
    side = int(statistics.median(min(read_image(each).size) for each in sample))
    recipe = "digits_demo" if side <= 16 else "cifar10_tiny" if side <= 48 else "imagenette_tiny"
    cfg = read_config(recipe)
    backbone, width, images = _model(start, cfg.model.backbone, side, len(paths), len(train))
    head = {"num_classes": len(train), "in_channels": width}
    model = {"backbone": {"_delete_": True, **backbone}, "head": head}
    values = {"model": model, **_values(cfg, start, len(paths), images)}
    values["data_preprocessor"]["num_classes"] = len(train)
    make_folder(work_dir, "--work-dir")
    for split, listed in (("train", train), ("val", val)):
        values[f"{split}_dataloader"]["dataset"] |= {
            "data_root": str(folder),
            "data_prefix": "",
            "ann_file": str(work_dir / f"{split}.txt"),
            "classes": str(work_dir / "classes.txt"),
        }
        _write_list(work_dir / f"{split}.txt", train, listed)
    _write_lines(work_dir / "classes.txt", train)
    _write_lines(path, [written, f'_base_ = "tokenformer_vit::{recipe}.py"', *_assignments(values)])
    if say:
        size = images["input_size"][-1]
        print(
            f"{path}: the recipe of {recipe} for {start.checkpoint or backbone['model_name']} and "
            f"{size} x {size} pixels. Edit a copy for the next run: tokenformer-vit train COPY"
        )
    return path


def _find_images(folder: Path, work_dir: Path) -> tuple[dict[str, list], dict[str, list]]:
    """List training and validation images by class, as paths within ``folder``."""
    root = folder / "train" if (folder / "train").is_dir() else folder
    parts = [folder / name for name in _VALIDATION if root != folder and (folder / name).is_dir()]
    if any(work_dir.is_relative_to(each) for each in (root, *parts)):
        raise InputError(
            f"--work-dir {work_dir} is in {folder}, where folders are classes: choose another"
        )
    train = _scan(root, folder)
    if len(train) < 2:
        raise InputError(
            f"{root} has {len(train)} class folders, but a classifier needs 2: put the images of "
            "each class into a folder, such as cat/1.jpg and dog/1.jpg"
        )
    if parts:
        val = _scan(parts[0], folder)
        if unknown := val.keys() - train.keys():
            raise InputError(f"{parts[0]} has classes that {root} lacks: {', '.join(unknown)}")
        return train, val
    generator, val = random.Random(0), {}
    for name, files in train.items():
        held_out = max(1, round(HELD_OUT * len(files))) if len(files) > 1 else 0
        val[name] = sorted(generator.sample(files, held_out))
        train[name] = sorted(set(files) - set(val[name]))
    return train, val


def _scan(root: Path, folder: Path) -> dict[str, list[str]]:
    """List the images of each class as paths within ``folder``."""
    left_out: Counter[str] = Counter()
    found = {
        each.name: [str(Path(e.path).relative_to(folder)) for e in scan_images(each, left_out)]
        for each in class_folders(root, left_out)
    }
    say_left_out(left_out, root)
    if found and {name.lower() for name in found} <= _PARTS:
        raise InputError(
            f"{root} has the folders {', '.join(found)}, which look like parts of a data set and "
            "not like classes: name them train and val"
        )
    if empty := [printable(name) for name, files in found.items() if not files]:
        raise InputError(f"{root} has folders without images: remove {', '.join(empty)}")
    return found


def _model(
    start: Start, recipe: Any, side: int, count: int, classes: int
) -> tuple[dict[str, Any], int, dict[str, Any]]:
    """Return the backbone of a config, its width, and timm's data config of its images."""
    kept = ("type", "checkpoint_path", "frozen", "compile", "backend")
    options = {key: recipe[key] for key in kept if key in recipe}
    if start.freeze and start.checkpoint is None:
        raise InputError("--freeze trains only the head: give the other weights with --checkpoint")
    if start.checkpoint is not None:
        model: Any = load_model(start.model, start.checkpoint, for_images=False)
        described = describe_model(model, classes)
        weights = start.checkpoint / (WEIGHTS if start.checkpoint.is_dir() else "")
        _check_plain(described["model_args"])
        options |= {
            "model_name": described["architecture"],
            **described["model_args"],
            "checkpoint_path": str(weights.resolve()),
            "frozen": start.freeze,
        }
        return options, model.num_features, resolve_input_data_config(model)
    patch = recipe.patch_size
    size = 128 if side >= 96 else 64 if side > 48 else 32 if side > 16 else side
    size = max(2 * patch, size // patch * patch)
    name = start.model or recipe.model_name
    own = ("theta", "norm") if name.startswith("tokenformer") else ()
    arguments = {
        "img_size": size,
        "patch_size": patch,
        **{key: recipe[key] for key in (*own, "drop_path_rate")},
        **(_SMALL if start.model is None and count < _FEW else {}),
    }
    model = load_model(name, None, classes, for_images=False, **arguments)
    check_classifier(model, f"--model {name}")
    images = {"input_size": (3, size, size), "crop_pct": 1.0, "interpolation": "bicubic"}
    return {**options, "model_name": name, **arguments}, model.num_features, images


def _check_plain(value: Any) -> None:
    """Refuse arguments that would run as code: mmengine dumps keys and ``{{`` as they are."""
    if isinstance(value, dict):
        for key in value:
            if not key.isidentifier():
                raise InputError(f"the checkpoint has a model argument {key!r}: do not trust it")
            _check_plain(value[key])
    elif isinstance(value, list):
        for each in value:
            _check_plain(each)
    elif "{{" in str(value):
        raise InputError(f"the checkpoint has a model argument {value!r}: do not trust it")


def _values(cfg: Config, start: Start, count: int, images: dict[str, Any]) -> dict[str, Any]:
    """Fit pipelines, batch size, learning rate and averaging to the images and their number."""
    test = {key: images[key] for key in ("input_size", "crop_pct", "interpolation")}
    test = {"type": "EvalTransform", **test, "crop_mode": "center"}
    load, *augment = cfg.train_dataloader.dataset.pipeline
    size = images["input_size"][-1]
    if augment[0].type == "v2/RandomResizedCrop":
        augment[0].update(size=size, interpolation=images["interpolation"])
    else:  # the recipe is for images of one size
        augment.insert(0, {**test, "crop_pct": 1.0})
        if augment[1].type == "v2/RandomCrop":
            augment[1].size = size
    batch = cfg.train_dataloader.batch_size
    while batch > 8 and count < 20 * batch:
        batch //= 2
    steps = -(-count // batch)
    momentum = min(0.5, _AVERAGES / (steps * cfg.train_cfg.max_epochs))
    values: dict[str, Any] = {
        "data_preprocessor": {},
        "train_dataloader": {"batch_size": batch, "dataset": {"pipeline": [load, *augment]}},
        "val_dataloader": {"dataset": {"pipeline": [load, test, {"type": "PackInputs"}]}},
        "default_hooks": {
            "logger": {"interval": min(steps, 100)},
            "ema": {"momentum": float(f"{momentum:.1g}")},
        },
        "auto_scale_lr": {"base_batch_size": batch},
    }
    if start.checkpoint is not None:
        lr = _PROBE_LR if start.freeze else _FINE_TUNING_LR
        values["optim_wrapper"] = {"optimizer": {"lr": lr}}
        for key in ("mean", "std"):
            values["data_preprocessor"][key] = [255 * value for value in images[key]]
    return values


def _assignments(values: dict[str, Any]) -> list[str]:
    """Return Python code that assigns values; mmengine would replace ``{{...}}`` in it."""
    plain = Config(values).to_dict()
    lines = [
        f"{name} = {pprint.pformat(value, width=96 - len(name), sort_dicts=False)}"
        for name, value in plain.items()
    ]
    return [*(line.replace("{{", "{\\x7b") for line in lines), "test_dataloader = val_dataloader"]


def _write_list(path: Path, classes: Any, images: dict[str, list[str]]) -> None:
    lines = [f"{file} {n}" for n, name in enumerate(classes) for file in images.get(name, ())]
    _write_lines(path, lines)


def _write_lines(path: Path, lines: Any) -> None:
    write_whole(path, "".join(f"{line}\n" for line in lines).encode("utf-8", "surrogateescape"))
