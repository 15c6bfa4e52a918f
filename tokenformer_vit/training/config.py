"""Read a config, apply the options of the command line, and check both."""

import difflib
import os
import warnings
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any
from unittest import mock

import torch

import tokenformer_vit
from tokenformer_vit.errors import InputError
from tokenformer_vit.files import write_whole
from tokenformer_vit.vision.datasets import class_images
from tokenformer_vit.vision.images import IMAGE_SUFFIXES, images_in, is_hidden

from .engine import Config

__all__ = ["check_config", "load_config"]

_INSTALLED = Path(tokenformer_vit.__file__).parent / ".mim/configs"  # as in OpenMMLab's packages
CONFIGS = _INSTALLED if _INSTALLED.is_dir() else _INSTALLED.parents[2] / "configs"
# Data sets whose classes are folders.
_FOLDERS = ("ImageNet", "CustomDataset", "ImagesInMemory")


def find_config(name: str | Path) -> Path:
    """Find a config: a file, or one that comes with the package, such as ``digits_demo``."""
    path = Path(name)
    if path.is_file() and path.suffix == ".py":  # YAML could run code
        return path
    shipped = CONFIGS / f"{path.stem}.py"
    if str(path.parent) in (".", "configs") and shipped.is_file():
        return shipped
    names = [file.stem for file in CONFIGS.glob("*.py")]
    close = ", ".join(difflib.get_close_matches(path.stem, names)) or f"those in {CONFIGS}"
    raise InputError(f"{path} is no config: give a file *.py, or a shipped config: {close}")


def read_config(path: str | Path) -> Config:
    """Read a config, which may inherit from ``tokenformer_vit::NAME``, a shipped one."""
    # mmengine finds `package::config` only in OpenMMLab's packages, and has no public way to add.
    find = Config._get_cfg_path

    def find_base(name: str, file: str) -> tuple[str, str | None]:
        shipped = name.removeprefix("tokenformer_vit::")
        return find(name, file) if shipped == name else (str(CONFIGS / shipped), None)

    with mock.patch.object(Config, "_get_cfg_path", staticmethod(find_base)):
        try:
            return Config.fromfile(find_config(path))
        except SystemExit as error:  # its status may be 0
            raise InputError(f"{path} ends the program: leave exit() out") from error


def load_config(
    path: str | Path,
    options: Mapping[str, Any] | None = None,
    data_root: str | None = None,
    work_dir: str | None = None,
    compile: bool = False,
) -> Config:
    """Read a config file, and override parts of it.

    A config of mmpretrain trains as it is, with our hooks, loop and sampler.

    Args:
        path: Python config with classic ``_base_`` inheritance, or the name of a shipped one.
        options: Values by dotted key, as from ``--cfg-options``; every key must exist.
        data_root: Root of the data, for all three loaders.
        work_dir: Folder of the run; default: the config's, or ``work_dirs/<name of the config>``.
        compile: Compile the blocks, whatever the config says.

    Raises:
        InputError: If the file is missing, or an option names an unknown key.
    """
    cfg = read_config(path)
    _complete(cfg)
    for key in options or {}:
        _check_option(cfg, key)
    cfg.merge_from_dict(dict(options or {}))
    if compile:
        compiled = cfg.model.get("backbone", cfg.model)
        compiled.compile = compiled.get("compile") or True
    cfg.work_dir = work_dir or cfg.get("work_dir") or f"work_dirs/{Path(path).stem}"
    for name, loader in loaders(cfg):
        for dataset in datasets(loader.dataset):
            if data_root is not None:
                dataset.data_root = data_root
            if str(dataset.get("ann_file")).endswith((".pkl", ".pickle")):
                raise InputError(f"{dataset.ann_file} could run code: save it as .json")
            if dataset.type in _FOLDERS:
                dataset.setdefault("extensions", list(IMAGE_SUFFIXES))  # all we read
            if dataset.type == "ImagesInMemory":  # on the GPU, if there is one
                collate = {"type": "collate_fetched"}
                loader.update(num_workers=0, pin_memory=False, collate_fn=collate)
        _set_loading(loader, name)
    return cfg


def loaders(cfg: Config) -> Iterator[tuple[str, Any]]:
    """Yield names and configs of the loaders that a config has."""
    for name in ("train_dataloader", "val_dataloader", "test_dataloader"):
        if cfg.get(name):
            yield name, cfg[name]


def datasets(dataset: Any) -> Iterator[Any]:
    """Yield the configs of the data sets inside wrappers, such as ConcatDataset."""
    inner = dataset.get("datasets") or dataset.get("dataset")
    if inner is None:
        yield dataset
    for each in listed(inner):
        yield from datasets(each)


def _complete(cfg: Config) -> None:
    """Add what a config leaves out; our loop and sampler, which resume anywhere, replace stock."""
    cfg.randomness = {"seed": None, **(cfg.get("randomness") or {})}
    cfg.setdefault("resume", False)
    cfg.setdefault("load_from", None)
    for name in ("val", "test"):
        if not cfg.get(f"{name}_dataloader"):
            cfg.update({f"{name}_{part}": None for part in ("dataloader", "cfg", "evaluator")})
    for name, loader in loaders(cfg):
        loader.setdefault("num_batch_per_epoch", None)
        sampler: Any = loader.get("sampler") or {}
        if sampler.get("type") == "DefaultSampler" and name == "train_dataloader":
            sampler.type = "ResumableSampler"
        elif sampler.get("type") == "DefaultSampler":
            sampler.setdefault("round_up", False)  # no image counts twice in several processes
    ours = Config.fromfile(CONFIGS / "_base_" / "runtime.py").default_hooks
    cfg.default_hooks = {**ours, **(cfg.get("default_hooks") or {})}
    checkpoint: Any = cfg.default_hooks.checkpoint or {}
    if checkpoint.get("type") == "CheckpointHook":
        checkpoint.type = ours.checkpoint.type
    loop: Any = cfg.get("train_cfg") or {}
    if loop.get("type") == "EpochBasedTrainLoop" or ("type" not in loop and loop.get("by_epoch")):
        loop.pop("by_epoch", None)
        loop.type = "ResumableEpochLoop"


def _set_loading(loader: Any, name: str) -> None:
    """Set the workers of a loader, and let the sampler shorten epochs; mmengine cuts them off."""
    if loader.setdefault("num_workers", 0) == "auto":
        loader.num_workers = data_workers()
    # Workers of validation end with it: those of training already take all cores.
    persistent = name == "train_dataloader" and loader.get("persistent_workers", True)
    loader.persistent_workers = persistent and loader.num_workers > 0
    loader.pin_memory = torch.cuda.is_available() and loader.get("pin_memory", True)
    batches = loader.pop("num_batch_per_epoch")
    if batches is not None:
        if loader.sampler.type == "DefaultSampler":
            loader.sampler.type = "ResumableSampler"  # which does the same
        loader.sampler.num_samples = batches * loader.get("batch_size", 1)


def set_autocast(cfg: Config) -> None:
    """Let a run train and validate under bfloat16 autocast."""
    cfg.optim_wrapper.type = "AutocastOptimWrapper"
    for key in ("loss_scale", "dtype"):  # of mmengine's AmpOptimWrapper
        cfg.optim_wrapper.pop(key, None)
    if cfg.val_cfg is not None:
        cfg.val_cfg.fp16 = True  # mmengine's name for autocast, which is in float16 by default
        torch.set_autocast_dtype("cuda", torch.bfloat16)


def data_workers() -> int:
    """Return the workers of a loader: this machine's cores, shared by its processes; at most 16."""
    cores: Any = os.cpu_count() or 1
    if hasattr(os, "sched_getaffinity"):  # not on macOS and Windows
        cores = len(os.sched_getaffinity(0))
    numbers = {name: int(text) for name, text in os.environ.items() if text.isdecimal()}
    counts = ("LOCAL_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE", "SLURM_NTASKS_PER_NODE")
    processes = max(numbers.get(name, 1) for name in counts)  # on this machine
    share = numbers.get("SLURM_CPUS_PER_TASK") or max(1, cores // processes)
    # 16 prepare 5,000 photographs a second, more than a GPU takes; each needs memory.
    return min(share, cores, 16)


def _check_option(cfg: Config, key: str) -> None:
    """Refuse a dotted key that the config does not have; mmengine adds it silently."""
    node: Any = cfg.to_dict()
    for part in key.split("."):
        if isinstance(node, list | tuple):
            node = {str(index): each for index, each in enumerate(node)}
        known = [str(name) for name in node] if isinstance(node, dict) else []
        if part not in known:
            close = difflib.get_close_matches(part, known, cutoff=0.5)
            there = ", ".join(close or sorted(known))
            raise InputError(f"--cfg-options {key}: there is no {part!r}; there is {there}")
        node = node[part]


def check_config(cfg: Config) -> None:
    """Check what would give wrong numbers, or fail hours later, without a word.

    Raises:
        InputError: If two parts of the config do not fit each other.
    """
    prepares = cfg.model.get("data_preprocessor") or cfg.get("data_preprocessor") or {}
    pipeline = next(datasets(cfg.train_dataloader.dataset)).get("pipeline") or [{}]
    first, last = (pipeline[place].get("type") for place in (0, -1))
    if first == "LoadImage" and prepares.get("to_rgb"):
        raise InputError("LoadImage gives RGB: set data_preprocessor.to_rgb=False")
    mixes = (cfg.model.get("train_cfg") or {}).get("augments")
    if mixes and last == "PackLabels" and prepares.get("type") != "LabelPreprocessor":
        raise InputError("only a LabelPreprocessor mixes labels of PackLabels; use PackInputs")
    if cfg.train_dataloader.get("sampler", {}) is None:
        raise InputError("train_dataloader.sampler=None does not shuffle: set a ResumableSampler")
    wrapper = cfg.get("model_wrapper_cfg") or {}
    if cfg.optim_wrapper.get("accumulative_counts", 1) > 1 and wrapper.get("static_graph"):
        raise InputError("gradients accumulate only with model_wrapper_cfg.static_graph=False")
    nested = cfg.model.type == "NestedClassifier" or cfg.model.get("sandwich")
    if nested and cfg.get("activation_checkpointing"):
        # The backward pass would compute blocks again at another size.
        raise InputError("a nested model needs activation_checkpointing=None")
    check_schedule(cfg)
    figures = _figures(cfg)
    for key, name in _monitors(cfg):
        if figures and name.partition("_at_")[0] not in figures:
            raise InputError(f"{key} is {name!r}, but validation measures {', '.join(figures)}")
    optimizer = str((cfg.optim_wrapper.get("optimizer") or {}).get("type")).rpartition(".")[2]
    starts = listed((cfg.model.get("head") or {}).get("init_cfg"))
    zero = any(start.get("type") == "Constant" and not start.get("val") for start in starts)
    if zero and optimizer.lower() in ("lamb", "lars"):
        warnings.warn(
            f"{optimizer} hardly moves a head that starts at 0: set model.head.init_cfg="
            "dict(_delete_=True, type='TruncNormal', layer='Linear', std=0.02)",
            stacklevel=2,
        )


def check_schedule(cfg: Config) -> None:
    """Refuse a schedule of the learning rate that does not fit into the run."""
    limit = "max_iters" if "max_iters" in cfg.train_cfg else "max_epochs"
    length = cfg.train_cfg[limit]
    for index, part in enumerate(listed(cfg.get("param_scheduler"))):
        by_epoch, begin = part.get("by_epoch", True), part.get("begin", 0)
        if by_epoch and limit == "max_iters" and not part.get("convert_to_iter_based"):
            raise InputError(f"param_scheduler.{index} counts epochs: set by_epoch=False")
        end = part.get("end", length)
        if by_epoch == (limit == "max_epochs") and not begin < end <= length:
            raise InputError(
                f"param_scheduler.{index} is from {begin} to {end}, but train_cfg.{limit} is "
                f"{length}: also set param_scheduler.{index}.begin and end, or param_scheduler=[]"
            )


def _figures(cfg: Config) -> list[str]:
    """Return the names of what validation measures, and ``auto``; nothing if they are unknown."""
    names = ["auto"]
    for metric in listed(cfg.get("val_evaluator")):
        ranks = {"Accuracy": (1,), "AccuracyAndLoss": (1, 5)}.get(metric["type"])
        if metric["type"] == "ReconstructionError":
            names.append("reconstruction/error")
        elif ranks and not metric.keys() & {"thrs", "prefix"}:
            names += [f"accuracy/top{k}" for k in listed(metric.get("topk", ranks))]
            names += ["cross_entropy"] * (metric["type"] == "AccuracyAndLoss")
        else:
            return []
    return names


def _monitors(cfg: Config) -> Iterator[tuple[str, str]]:
    """Yield keys of the config that name a figure of validation, and the names."""
    for name in listed((cfg.default_hooks.get("checkpoint") or {}).get("save_best")):
        yield "default_hooks.checkpoint.save_best", name
    for index, part in enumerate(listed(cfg.get("param_scheduler"))):
        if "ReduceOnPlateau" in str(part["type"]):
            yield f"param_scheduler.{index}.monitor", part.get("monitor", "val_loss")
    for index, hook in enumerate(listed(cfg.get("custom_hooks"))):
        if hook["type"] == "EarlyStoppingHook":
            yield f"custom_hooks.{index}.monitor", hook["monitor"]


def name_of(kind: Any) -> str:
    """Return the name of a ``type`` in a config: a class, or a name with or without its module."""
    return str(getattr(kind, "__name__", kind)).rpartition(".")[2]


def listed(value: Any) -> list[Any]:
    """Return a list; a config may have one dict or number instead of a list, or None."""
    if value is None:
        return []
    return list(value) if isinstance(value, list | tuple) else [value]


def check_folders(cfg: Config, names: Sequence[str]) -> None:
    """Refuse folders of images that are not there, and broken links: mmpretrain skips both.

    Files that are no images are counted on stderr.
    """
    found = [each for name in names if cfg.get(name) for each in datasets(cfg[name].dataset)]
    for root, part, labels in dict.fromkeys(
        (each.data_root, each.get("split") or each.get("data_prefix"), each.get("with_label", True))
        for each in found
        if each.type in _FOLDERS and not each.get("ann_file")
    ):
        folder = Path(root, part or "")
        if Path(root, "meta", f"{part}.txt").is_file():
            continue  # ImageNet's list of images
        if not folder.is_dir():
            raise InputError(
                f"there is no folder {folder}: give `--data-root` a folder that holds train/ and "
                "val/ with a folder for each class (`tokenformer-vit prepare-data` makes one)"
            )
        for path in chain(*class_images(folder).values()) if labels else images_in(folder):
            if not os.path.isfile(path):
                raise InputError(f"{path} is a broken link: replace or delete it")
        hidden = [each.name for each in folder.iterdir() if each.is_dir() and is_hidden(each.name)]
        if labels and hidden:
            raise InputError(f"mmpretrain takes folders of {folder} for classes: move {hidden}")


def write_config(cfg: Config) -> None:
    """Write a config into the work directory, unless it was read there: a copy repeats the run."""
    path = Path(cfg.work_dir, Path(cfg.filename).name)
    if not (path.exists() and path.samefile(cfg.filename)):
        write_whole(path, Config({k: cfg[k] for k in cfg if k != "work_dir"}).pretty_text.encode())


def choose_checkpoint(cfg: Config, resume: str | None) -> None:
    """Set what ``--resume`` resumes from, ``auto`` or a file, and protect other runs."""
    work_dir = Path(cfg.work_dir)
    pointer = work_dir / "last_checkpoint"
    # The checkpoint of the best epoch has only weights.
    written = [path for path in work_dir.glob("*.pth") if not path.name.startswith("best_")]
    has_run = bool(written) or pointer.is_file()
    if resume is None and has_run:
        raise InputError(f"{work_dir} already holds a run: add --resume, or another --work-dir")
    if resume is None or (resume == "auto" and not has_run):
        return
    if resume != "auto":
        path = Path(resume)
    elif pointer.is_file():
        path = work_dir / Path(pointer.read_text().strip()).name  # the folder may have moved
    else:  # killed before the first pointer was written; a file with this name is complete
        path = max(written, key=lambda path: path.stat().st_mtime)
    if has_run and path.resolve().parent != work_dir.resolve():
        raise InputError(
            f"{path} is not in {work_dir}, which already holds a run: choose another --work-dir"
        )
    if not path.is_file():
        raise InputError(f"there is no checkpoint {path}: give --resume a file that is there")
    cfg.resume, cfg.load_from = True, str(path)
