"""Read a config, apply the options of the command line, and check both."""

import difflib
import os
import warnings
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from mmengine.config import Config, ConfigDict

import tokenformer_vit
from tokenformer_vit.errors import InputError
from tokenformer_vit.files import write_whole
from tokenformer_vit.vision.images import (
    HIDDEN,
    IMAGE_SUFFIXES,
    class_folders,
    say_left_out,
    scan_images,
)

__all__ = ["check_config", "find_config", "load_config"]

_PACKAGE = Path(tokenformer_vit.__file__).parent
_INSTALLED = _PACKAGE / ".mim" / "configs"  # as in OpenMMLab's packages
CONFIGS = _INSTALLED if _INSTALLED.is_dir() else _PACKAGE.parent / "configs"
LOADERS = ("train_dataloader", "val_dataloader", "test_dataloader")
# Sixteen cores prepare 5,000 photographs a second, more than a GPU takes; each worker needs memory.
_MOST_WORKERS = 16
# Environment variables with the number of processes on this machine.
_PROCESSES = ("LOCAL_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE", "SLURM_NTASKS_PER_NODE")
# Data sets whose classes are folders.
_FOLDERS = ("ImageNet", "CustomDataset", "ImagesInMemory")
_FIND_BASE = Config._get_cfg_path


def find_config(name: str | Path) -> Path:
    """Find a config: a file, or else one that comes with the package.

    Args:
        name: Path of a file, or the name of a shipped config: ``configs/digits_demo.py``,
            ``digits_demo.py`` or ``digits_demo``.

    Raises:
        InputError: If there is no such config; the message gives similar names.
    """
    path = Path(name)
    if path.is_file():
        return path
    shipped = _shipped(path.name)
    if str(path.parent) in (".", "configs") and shipped.is_file():
        return shipped
    names = [file.stem for file in CONFIGS.glob("*.py")]
    close = ", ".join(difflib.get_close_matches(path.stem, names)) or f"those in {CONFIGS}"
    what = "is a folder, not a config" if path.is_dir() else "is not there"
    raise InputError(f"{path} {what}; give a file *.py, or a shipped config: {close}")


def read_config(path: str | Path) -> Config:
    """Read a config, which may inherit from ``tokenformer_vit::NAME``, a shipped one."""
    path = find_config(path)
    if path.suffix != ".py":
        raise InputError(f"{path} is not a Python config: write it as a .py file")
    # mmengine finds `package::config` only in OpenMMLab's packages, and has no public way to add.
    with mock.patch.object(Config, "_get_cfg_path", staticmethod(_find_base)):
        return Config.fromfile(path)


def _find_base(name: str, file: str) -> tuple[str, str | None]:
    package, _, shipped = name.rpartition("::")
    if package == tokenformer_vit.__name__:
        return str(_shipped(shipped)), None
    return _FIND_BASE(name, file)


def _shipped(name: str) -> Path:
    return CONFIGS / f"{name.removesuffix('.py')}.py"


def load_config(
    path: str | Path,
    options: Mapping[str, Any] | None = None,
    data_root: str | None = None,
    batch_size: int | None = None,
    work_dir: str | None = None,
    compile: bool = False,
    batched: str = "train_dataloader",
) -> Config:
    """Read a config file, and override parts of it.

    A config of mmpretrain trains as it is, with our hooks, loop and sampler.

    Args:
        path: Python config with classic ``_base_`` inheritance, or the name of a shipped one.
        options: Values by dotted key, as from ``--cfg-options``; every key must exist.
        data_root: Root of the data, for all three loaders.
        batch_size: Images or sequences per process and iteration, for the loader ``batched``.
        work_dir: Folder of the run; default: the config's, or ``work_dirs/<name of the config>``.
        compile: Compile the blocks, whatever the config says.
        batched: Loader that ``batch_size`` is for; the others keep the config's batch size.

    Raises:
        InputError: If the file is missing, or an option names an unknown key.
    """
    cfg = read_config(path)
    _complete(cfg)
    for key in options or {}:
        _check_option(cfg, key)
    cfg.merge_from_dict(dict(options or {}))
    _limit_ranks(cfg)
    if compile:
        compiled = cfg.model.get("backbone", cfg.model)
        if compiled.type not in ("TimmClassificationBackbone", "CausalLM"):
            raise InputError(f"--compile is not for a {compiled.type}: leave it out")
        compiled.compile = compiled.get("compile") or True
    cfg.work_dir = work_dir or cfg.get("work_dir") or f"work_dirs/{Path(path).stem}"
    if batch_size is not None:
        cfg[batched].batch_size = batch_size
    for name, loader in loaders(cfg):
        for dataset in datasets(loader.dataset):
            if data_root is not None:
                dataset.data_root = data_root
            if str(dataset.get("ann_file")).endswith((".pkl", ".pickle")):
                raise InputError(f"{dataset.ann_file} could run code: save it as .json")
            if dataset.type in _FOLDERS:
                dataset.setdefault("extensions", list(IMAGE_SUFFIXES))  # mmpretrain's are fewer
            if dataset.type == "ImagesInMemory":
                loader.update(num_workers=0, collate_fn={"type": "collate_fetched"})
        _set_loading(loader, name)
    return cfg


def loaders(cfg: Config) -> Iterator[tuple[str, Any]]:
    """Yield names and configs of the loaders that a config has."""
    for name in LOADERS:
        if cfg.get(name):
            yield name, cfg[name]


def datasets(dataset: Any) -> Iterator[Any]:
    """Yield the configs of the data sets inside wrappers, such as ConcatDataset."""
    inner = dataset.get("datasets") or dataset.get("dataset")
    if inner is None:
        yield dataset
    for each in _listed(inner):
        yield from datasets(each)


def _complete(cfg: Config) -> None:
    """Add what a config leaves out, and put our loop and sampler in place of mmengine's.

    They train in the same way, and can also resume in the middle of an epoch.
    """
    for key in ("randomness", "default_hooks"):
        cfg[key] = ConfigDict(cfg.get(key) or {})
    cfg.randomness.setdefault("seed", None)
    cfg.setdefault("resume", False)
    cfg.setdefault("load_from", None)
    for name in ("val", "test"):
        if not cfg.get(f"{name}_dataloader"):
            cfg.update({f"{name}_{part}": None for part in ("dataloader", "cfg", "evaluator")})
    for name, loader in loaders(cfg):
        loader.setdefault("num_batch_per_epoch", None)
        sampler = loader.get("sampler") or {}
        if name != "train_dataloader" and sampler.get("type") == "DefaultSampler":
            sampler.setdefault("round_up", False)  # no image counts twice in several processes
    ours = Config.fromfile(CONFIGS / "_base_" / "runtime.py").default_hooks
    hooks = cfg.default_hooks
    for name in ours:
        hooks.setdefault(name, ours[name])
    if hooks.get("checkpoint") and hooks.checkpoint.type == "CheckpointHook":
        hooks.checkpoint.type = ours.checkpoint.type
    loop: Any = cfg.get("train_cfg") or {}
    if loop.get("type") == "EpochBasedTrainLoop" or ("type" not in loop and loop.get("by_epoch")):
        loop.pop("by_epoch", None)
        loop.type = "ResumableEpochLoop"
    sampler: Any = (cfg.get("train_dataloader") or {}).get("sampler") or {}
    if sampler.get("type") == "DefaultSampler":
        sampler.type = "ResumableSampler"


def _limit_ranks(cfg: Config) -> None:
    """Leave out the ranks of ``topk`` above the number of classes, down to top-1."""
    classes = (cfg.model.get("head") or {}).get("num_classes")
    for evaluator in (*_listed(cfg.val_evaluator), *_listed(cfg.test_evaluator)):
        if classes and "topk" in evaluator:
            evaluator.topk = tuple(k for k in _listed(evaluator.topk) if k <= classes) or (1,)


def _set_loading(loader: Any, name: str) -> None:
    """Set the workers of a loader, and let the sampler shorten epochs; mmengine cuts them off."""
    if loader.get("num_workers") == "auto":
        loader.num_workers = data_workers()
    # Workers of validation end with it: those of training already take all cores.
    loader.persistent_workers = (
        name == "train_dataloader"
        and loader.setdefault("num_workers", 0) > 0
        and loader.get("persistent_workers", True)
    )
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
    if hasattr(os, "sched_getaffinity"):
        cores = len(os.sched_getaffinity(0))
    else:  # macOS and Windows
        cores = os.cpu_count() or 1
    numbers = {name: int(text) for name, text in os.environ.items() if text.isdecimal()}
    if own := numbers.get("SLURM_CPUS_PER_TASK"):  # Slurm gives each process its cores
        return min(own, cores, _MOST_WORKERS)
    return max(1, min(cores // max(numbers.get(name, 1) for name in _PROCESSES), _MOST_WORKERS))


def _check_option(cfg: Config, key: str) -> None:
    """Refuse a dotted key that the config does not have; mmengine adds it silently."""
    node: Any = cfg
    for part in key.split("."):
        if isinstance(node, list | tuple):
            node = dict(enumerate(node))
            part = int(part) if part.isdecimal() else part
        known = list(node) if isinstance(node, Mapping | Config) else []
        if part not in known:
            close = difflib.get_close_matches(str(part), map(str, known), cutoff=0.5)
            raise InputError(
                f"--cfg-options {key}: there is no {part!r}; there is "
                f"{', '.join(close or sorted(map(str, known)))}. Add new keys in a config of yours"
            )
        node = node[part]


def check_config(cfg: Config) -> None:
    """Check what would give wrong numbers, or fail hours later, without a word.

    Raises:
        InputError: If two parts of the config do not fit each other.
    """
    needed = ("train_dataloader", "train_cfg", "optim_wrapper")
    if missing := [key for key in needed if not cfg.get(key)]:
        raise InputError(f"{cfg.filename} is no training config: it has no {', '.join(missing)}")
    for wrong, message in _checks(cfg):
        if wrong:
            raise InputError(message)
    check_schedule(cfg)
    figures = _figures(cfg)
    for key, name in _monitors(cfg):
        if figures is not None and name.partition("_at_")[0] not in (*figures, "auto"):
            raise InputError(
                f"{key} is {name!r}, but validation measures "
                f"{', '.join(sorted(figures)) or 'nothing'}: give one of these"
            )
    optimizer = str((cfg.optim_wrapper.get("optimizer") or {}).get("type")).rpartition(".")[2]
    starts = _listed((cfg.model.get("head") or {}).get("init_cfg"))
    zero = any(start.get("type") == "Constant" and not start.get("val") for start in starts)
    if zero and optimizer.lower() in ("lamb", "lars"):
        warnings.warn(
            f"{optimizer} hardly moves a head that starts at 0: set model.head.init_cfg="
            "dict(_delete_=True, type='TruncNormal', layer='Linear', std=0.02)",
            stacklevel=2,
        )


def _checks(cfg: Config) -> list[tuple[Any, str]]:
    """Return whether each mistake was made, and what to say then."""
    classes = (cfg.model.get("head") or {}).get("num_classes")
    prepares = cfg.model.get("data_preprocessor") or cfg.get("data_preprocessor") or {}
    mixes = (cfg.model.get("train_cfg") or {}).get("augments")
    pipeline = next(datasets(cfg.train_dataloader.dataset)).get("pipeline") or [{}]
    first, last = (pipeline[place].get("type") for place in (0, -1))
    steps = cfg.optim_wrapper.get("accumulative_counts", 1)
    nested = cfg.model.type == "NestedClassifier" or cfg.model.get("sandwich")
    return [
        (
            classes and mixes and prepares.get("num_classes") != classes,
            f"model.head.num_classes is {classes}, but data_preprocessor.num_classes is "
            f"{prepares.get('num_classes')}: set both to the number of classes",
        ),
        (
            first == "LoadImage" and prepares.get("to_rgb"),
            "LoadImage gives RGB, and data_preprocessor would turn it into BGR: set to_rgb=False",
        ),
        (
            mixes and last == "PackLabels" and prepares.get("type") != "LabelPreprocessor",
            "only data_preprocessor.type='LabelPreprocessor' mixes images whose labels PackLabels "
            "packs: set it, or end the pipeline with PackInputs",
        ),
        (
            cfg.train_dataloader.get("sampler", {}) is None,
            "train_dataloader.sampler is None, which takes images in the order of their files: set "
            "dict(type='ResumableSampler', shuffle=True)",
        ),
        (
            steps > 1 and (cfg.get("model_wrapper_cfg") or {}).get("static_graph"),
            f"accumulative_counts is {steps}, but PyTorch accumulates no gradients in a static "
            "graph: set model_wrapper_cfg.static_graph=False",
        ),
        (
            nested and cfg.get("activation_checkpointing"),
            "a nested model needs activation_checkpointing=None: the backward pass would compute "
            "blocks again at another size",
        ),
    ]


def check_schedule(cfg: Config) -> None:
    """Refuse a schedule of the learning rate that does not fit into the run."""
    limit = "max_iters" if "max_iters" in cfg.train_cfg else "max_epochs"
    length = cfg.train_cfg[limit]
    for index, part in enumerate(_listed(cfg.get("param_scheduler"))):
        by_epoch, begin = part.get("by_epoch", True), part.get("begin", 0)
        if by_epoch and limit == "max_iters" and not part.get("convert_to_iter_based"):
            raise InputError(
                f"param_scheduler.{index} counts epochs, but the run counts iterations: set "
                "by_epoch=False, and begin and end in iterations"
            )
        end = part.get("end", max(begin + 1, length))
        if by_epoch == (limit == "max_epochs") and not begin < end <= length:
            raise InputError(
                f"param_scheduler.{index} is from {begin} to {end}, but train_cfg.{limit} is "
                f"{length}: also set param_scheduler.{index}.begin and end, or param_scheduler=[]"
            )


def _figures(cfg: Config) -> set[str] | None:
    """Return the names of what validation measures; None if they are unknown."""
    names: set[str] = set()
    for metric in _listed(cfg.get("val_evaluator")):
        kind = metric["type"]
        if kind in ("Accuracy", "AccuracyAndLoss") and not metric.keys() & {"thrs", "prefix"}:
            names |= {f"accuracy/top{k}" for k in _listed(metric.get("topk", 1))}
            names |= {"cross_entropy"} if kind == "AccuracyAndLoss" else set()
        elif kind == "ReconstructionError":
            names.add("reconstruction/error")
        else:
            return None
    return names


def _monitors(cfg: Config) -> Iterator[tuple[str, str]]:
    """Yield keys of the config that name a figure of validation, and the names."""
    for name in _listed((cfg.default_hooks.get("checkpoint") or {}).get("save_best")):
        yield "default_hooks.checkpoint.save_best", name
    for index, part in enumerate(_listed(cfg.get("param_scheduler"))):
        if "ReduceOnPlateau" in str(part["type"]):
            yield f"param_scheduler.{index}.monitor", part.get("monitor", "val_loss")
    for index, hook in enumerate(_listed(cfg.get("custom_hooks"))):
        if hook["type"] == "EarlyStoppingHook":
            yield f"custom_hooks.{index}.monitor", hook["monitor"]


def _listed(value: Any) -> list[Any]:
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
        folder, left_out = Path(root, part or ""), Counter()
        if Path(root, "meta", f"{part}.txt").is_file():
            continue  # ImageNet's list of images
        if not folder.is_dir():
            raise InputError(
                f"there is no folder {folder}: give `--data-root` a folder that holds train/ and "
                "val/ with a folder for each class (`tokenformer-vit prepare-data` makes one)"
            )
        for each in class_folders(folder, left_out) if labels else [folder]:
            for entry in scan_images(each, left_out):
                if not entry.is_file():
                    raise InputError(f"{entry.path} is a broken link: replace or delete it")
        if left_out[HIDDEN]:
            raise InputError(f"{folder} holds hidden folders, which mmpretrain reads: move them")
        say_left_out(left_out, folder)


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
        raise InputError(
            f"{work_dir} already holds a run: add --resume to continue it, or choose another "
            "--work-dir"
        )
    if resume is None or (resume == "auto" and not has_run):
        return
    if resume == "auto":
        if pointer.is_file():
            path = work_dir / Path(pointer.read_text().strip()).name  # the folder may have moved
        else:  # killed before the first pointer was written; a file with this name is complete
            path = max(written, key=lambda path: path.stat().st_mtime)
    else:
        path = Path(resume)
        if has_run and path.resolve().parent != work_dir.resolve():
            raise InputError(
                f"{path} is not in {work_dir}, which already holds a run: choose another --work-dir"
            )
    if not path.is_file():
        there = ", ".join(sorted(map(str, written))) or "another --work-dir"
        raise InputError(f"there is no checkpoint {path}: give --resume one of {there}")
    cfg.resume, cfg.load_from = True, str(path)
