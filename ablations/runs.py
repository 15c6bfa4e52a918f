"""The runs of a sweep: what each is told, whether it is done, and the record that it leaves.

A run's settings are all that differs from the config of the sweep. They stand in a small config of
its own, ``WORK_DIR/<run>.py``, which inherits from the sweep's; the run itself works in
``WORK_DIR/<run>/``. They are also in its record, so that a record is never taken for that of other
settings.
"""

import argparse
import ast
import copy
import hashlib
import inspect
import json
import logging
import math
import os
import re
import shlex
import signal
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from pprint import pformat
from typing import Any

import torch
from mmengine.config import Config
from mmengine.registry import DefaultScope
from mmpretrain.registry import MODELS
from questions import Question, Shape, Variant
from timm.models import VisionTransformer

from tokenformer_vit.errors import InputError
from tokenformer_vit.files import write_whole
from tokenformer_vit.integrations import read_diagnostics
from tokenformer_vit.integrations.config import (
    LOADERS,
    check_data_folders,
    check_schedule,
    load_config,
)
from tokenformer_vit.integrations.reports import read_scalars
from tokenformer_vit.models import TokenFormerViT
from tokenformer_vit.records import environment, write_record

ROOT = Path(__file__).resolve().parents[1]
MOST_LOSSES = 100  # points of a loss curve in a record
MOST_DIAGNOSES = 20  # epochs after which layers are measured, besides the start
MOST_FIGURES = 4500  # of diagnostics in a record
LARGEST_GAP = 0.01  # of the parameter counts of two variants


@dataclass(frozen=True)
class Run:
    """One training of one variant.

    Args:
        name: Of its files: variant, seed, and the learning rate where it is not the config's.
        settings: All that differs from the sweep's config.
        about: What its record says of it.
        base: The sweep's config.
        epochs: How many it takes.
        work_dir: Where the sweep works.
        out: Where the sweep's records go.
    """

    name: str
    settings: dict[str, Any]
    about: dict[str, Any]
    base: Path
    epochs: int
    work_dir: Path
    out: Path

    @property
    def config(self) -> Path:
        """The config that says what differs."""
        return self.work_dir / f"{self.name}.py"

    @property
    def folder(self) -> Path:
        """The work directory of the training."""
        return self.work_dir / self.name

    @property
    def record(self) -> Path:
        """Where its record goes."""
        return self.out / f"{self.name}.json"


def plan(question: Question, args: argparse.Namespace) -> list[Run]:
    """List the runs of a sweep, and check that each can be run.

    Args:
        question: What is asked.
        args: The command line of a sweep.

    Raises:
        InputError: If the config, its data, an option or the weights to start from will not do, or
            two variants would not have as many parameters where they should.
    """
    load_config(args.config, args.cfg_options)  # says what is wrong with either
    base = Config.fromfile(args.config).to_dict()
    chosen = Config.fromfile(args.config)
    chosen.merge_from_dict(args.cfg_options or {})
    chosen = chosen.to_dict()
    for loader in (chosen[name] for name in LOADERS):
        if args.data_root is not None:
            loader["dataset"]["data_root"] = args.data_root
        if args.batch_size is not None:
            loader["batch_size"] = args.batch_size
    if args.amp:
        chosen["optim_wrapper"]["type"] = "AutocastOptimWrapper"
    if args.compile:
        chosen["model"]["backbone"]["compile"] = True
    check_schedule(Config(chosen))
    check_data_folders(Config(chosen), ("train_dataloader", "val_dataloader"))

    backbone = chosen["model"]["backbone"]
    shape, parameters = _shape(chosen, question.pretraining)
    equal = question.compute is None and question.pretraining is None
    runs = []
    for variant in question.variants:
        if args.variants and variant.name not in args.variants:
            continue
        changed = variant.change(copy.deepcopy(backbone), shape)
        own = copy.deepcopy(chosen)
        own["model"]["backbone"] = changed
        outside = {}
        if variant.outside is not None:
            outside = variant.outside(shape, chosen["train_cfg"]["max_epochs"])
            own = _merged(own, outside)
        facts: dict[str, Any] = {}
        if question.pretraining is not None:
            facts["start"] = _start(changed, question.pretraining)
        if question.compute is not None:
            own["custom_hooks"] = [*(own.get("custom_hooks") or ()), {"type": "CostHook"}]
        model = _build(own, loaded=question.pretraining is not None)
        count = _count(model)
        if question.pretraining is not None:
            facts["trainable"] = _count(model, trained=True)
        if equal and abs(count / parameters - 1) > LARGEST_GAP:
            raise InputError(
                f"{variant.name} has {count:,} parameters and the model of {args.config} "
                f"{parameters:,}: {abs(count / parameters - 1):.1%} apart, so that the two cannot "
                f"be compared; leave {variant.name} out by --variants"
            )
        options = {**outside}
        if of_backbone := difference(backbone, changed):
            options["model"] = {"backbone": of_backbone}
        for lr in args.lr or [None]:
            for seed in range(args.seeds):
                about = _about(question, variant, args.config, seed, count, options) | facts
                runs.append(_run(base, own, about, lr, args))
    return runs


def _about(
    question: Question,
    variant: Variant,
    config: str,
    seed: int,
    parameters: int,
    options: dict[str, Any],
) -> dict[str, Any]:
    return {
        "question": question.name,
        "variant": variant.name,
        "label": variant.label,
        "paper": variant.paper,
        "config": _named(config),
        "seed": seed,
        "parameters": parameters,
        "options": options,
    }


def _start(backbone: Mapping[str, Any], pretraining: str) -> dict[str, str] | None:
    """Name the weights from which a backbone starts, and what is in them, if it is from any."""
    path = _timms(backbone)["checkpoint_path"]
    if not path:
        return None
    if not Path(path).is_file():
        raise InputError(
            f"there is no file {path} to start from: `{pretraining}` makes it, or give "
            "`--cfg-options model.backbone.checkpoint_path=...`"
        )
    return {"file": path, "sha256": hashlib.sha256(Path(path).read_bytes()).hexdigest()}


def _merged(cfg: dict[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """Put changes into a config, dicts into dicts."""
    merged = Config(cfg)
    merged.merge_from_dict(copy.deepcopy(dict(changes)))
    return merged.to_dict()


def _named(config: str) -> str:
    """Name a config of the project from its root, wherever the command was given."""
    path = Path(config).resolve()
    return str(path.relative_to(ROOT)) if path.is_relative_to(ROOT) else shown(config)


def _run(
    base: dict[str, Any],
    cfg: dict[str, Any],
    about: dict[str, Any],
    lr: float | None,
    args: argparse.Namespace,
) -> Run:
    cfg = copy.deepcopy(cfg)
    cfg["randomness"]["seed"] = about["seed"]
    if "start" not in about:  # else there is nothing that variants could draw alike
        cfg["model"]["backbone"]["stem_seed"] = about["seed"]
    usual = cfg["optim_wrapper"]["optimizer"]["lr"]
    name = f"{about['variant']}_seed{about['seed']}"
    if lr is not None and lr != usual:
        cfg["optim_wrapper"]["optimizer"]["lr"] = lr
        name += f"_lr{lr:g}"
    epochs = cfg["train_cfg"]["max_epochs"]
    interval = math.ceil(epochs / MOST_DIAGNOSES)
    hooks = [hook for hook in cfg.get("custom_hooks") or () if hook["type"] != "DiagnosticsHook"]
    # Of cost and of tuning, the layers are not what is asked about.
    if {"type": "CostHook"} not in hooks and "start" not in about:
        hooks.append({"type": "DiagnosticsHook", "interval": interval})
    cfg["custom_hooks"] = hooks
    settings = difference(base, cfg)
    about = {
        **about,
        "lr": cfg["optim_wrapper"]["optimizer"]["lr"],
        # Weights are as much a part of what a run begins with as the config is.
        "base": digest({**base, "start": about["start"]} if "start" in about else base),
        "settings": settings,
    }
    stem = f"{about['question']}_{Path(args.config).stem}"
    return Run(
        name=name,
        settings=settings,
        about=about,
        base=Path(args.config).resolve(),
        epochs=epochs,
        work_dir=Path(
            args.work_dir
            or Path("work_dirs", "ablations", about["question"], Path(args.config).stem)
        ),
        out=Path(args.out) if args.out else ROOT / "ablations" / "results" / stem,
    )


def digest(config: Mapping[str, Any]) -> str:
    """Return a short name of a config's content, since its file may change."""
    text = json.dumps(config, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def _build(cfg: Mapping[str, Any], loaded: bool = False) -> Any:
    """Build the classifier of a config with no memory behind its weights, unless it loads some."""
    model = copy.deepcopy({**cfg["model"], "train_cfg": None})  # mixup logs a line
    _timms(model["backbone"]).update(compile=False, stem_seed=None)
    preprocessor = copy.deepcopy(cfg["data_preprocessor"])
    logging.disable(logging.INFO)  # of LoRA, a line for each layer
    try:
        with (
            torch.device("cpu" if loaded else "meta"),
            DefaultScope.overwrite_default_scope("mmpretrain"),
        ):
            return MODELS.build({"data_preprocessor": preprocessor, **model})
    finally:
        logging.disable(logging.NOTSET)


def _timms(backbone: Mapping[str, Any]) -> Any:
    """Return the config of the timm model, which LoRA has within its own."""
    return backbone["module"] if backbone["type"] == "LoRABackbone" else backbone


def _count(model: torch.nn.Module, trained: bool = False) -> int:
    """Count the parameters of a model, all or those that are trained."""
    return sum(
        parameter.numel()
        for parameter in model.parameters()
        if parameter.requires_grad or not trained
    )


def _shape(cfg: Mapping[str, Any], pretraining: str | None = None) -> tuple[Shape, int]:
    """Return the sizes of a config's TokenFormer, and the number of its parameters.

    Where it starts from trained weights they are those before any pair is appended.
    """
    weights = cfg["model"]["backbone"].get("checkpoint_path")
    if pretraining is None and weights:
        raise InputError(
            f"model.backbone.checkpoint_path is {weights}, but an ablation trains from scratch"
        )
    if pretraining is not None:
        if not weights:
            raise InputError(
                "the config starts from no trained weights, but they are what is tuned here: set "
                f"model.backbone.checkpoint_path to those that `{pretraining}` makes"
            )
        cfg = _merged(dict(cfg), {"model": {"backbone": {"checkpoint_path": "", "growth": None}}})
    model = _build(cfg)
    vit = getattr(model.backbone, "model", None)
    if not isinstance(vit, TokenFormerViT):
        raise InputError(
            f"the backbone of the config is {type(vit or model.backbone).__name__}; an ablation "
            "starts from a TokenFormer"
        )
    block = vit.blocks[0]
    own, timms = (
        set(inspect.signature(kind).parameters) for kind in (TokenFormerViT, VisionTransformer)
    )
    shape = Shape(
        embed_dim=vit.embed_dim,
        depth=len(vit.blocks),
        num_heads=block.attn.num_heads,
        img_size=vit.patch_embed.img_size[0],
        patch_size=vit.patch_embed.patch_size[0],
        num_qkv_param_tokens=block.attn.query.num_param_tokens,
        num_proj_param_tokens=block.attn.proj.num_param_tokens,
        num_ffn_param_tokens=block.mlp.num_param_tokens,
        own_arguments=frozenset(own - timms - {"kwargs"}),
    )
    return shape, _count(model)


def difference(base: Mapping[str, Any], new: Mapping[str, Any]) -> dict[str, Any]:
    """Return what a config that inherits from ``base`` has to say to become ``new``."""
    said = {}
    for key, value in new.items():
        old = base.get(key)
        if key in base and value == old:
            continue
        if isinstance(value, dict) and key in base:
            inherits = isinstance(old, dict) and old.keys() <= value.keys()
            said[key] = difference(old, value) if inherits else {"_delete_": True, **value}
        else:
            said[key] = value
    return said


def prepare(run: Run) -> None:
    """Write the config of a run.

    Raises:
        InputError: If a run of that name was begun with other settings.
    """
    if run.config.is_file():
        tree = ast.parse(run.config.read_text())
        there = {node.targets[0].id: ast.literal_eval(node.value) for node in tree.body}
        del there["_base_"]  # the folder may have been moved
        text = run.config.read_text()
        there["base"] = (re.findall(r"^# Its base: (\w+)$", text, re.MULTILINE) or [None])[0]
        _check_same(there, {**run.settings, "base": run.about["base"]}, run.config, "--work-dir")
    lines = [
        f"# {run.name} of ablations/{run.about['question']}.py: what differs from its base.",
        f"# Its base: {run.about['base']}",
        f"_base_ = {str(run.base)!r}",
        *(
            f"{key} = {pformat(value, width=90, sort_dicts=False)}"
            for key, value in run.settings.items()
        ),
    ]
    run.config.parent.mkdir(parents=True, exist_ok=True)
    write_whole(run.config, "\n".join([*lines, ""]).encode())


def _check_same(
    there: Mapping[str, Any], wanted: Mapping[str, Any], path: Path, option: str
) -> None:
    differing = dict(_differing(_plain(there), _plain(wanted)))
    if differing:
        key, (old, new) = next(iter(differing.items()))
        raise InputError(
            f"{shown(path)} is of a run with other settings, such as {key}: {old} there and {new} "
            f"here; choose another {option}, or delete what is there"
        )


def _differing(one: Any, other: Any, key: str = "") -> Iterator[tuple[str, tuple[Any, Any]]]:
    if isinstance(one, dict) and isinstance(other, dict):
        for name in {**one, **other}:
            unset = "the config's"
            yield from _differing(one.get(name, unset), other.get(name, unset), f"{key}.{name}")
    elif one != other:
        yield key.removeprefix("."), (one, other)


def _plain(value: Any) -> Any:
    """Return what JSON makes of a value."""
    return json.loads(json.dumps(value))


def read_record(run: Run) -> dict[str, Any] | None:
    """Return the record of a run, if there is one.

    Raises:
        InputError: If it is of other settings.
    """
    if not run.record.is_file():
        return None
    record = json.loads(run.record.read_text())
    keys = ("settings", "question", "variant", "base")
    there, wanted = ({key: each[key] for key in keys} for each in (record, run.about))
    _check_same(there, wanted, run.record, "--out and --work-dir")
    return record


def adopt(run: Run, processes: int) -> str | None:
    """Take over the record of the same training from another question.

    The config's own model is a variant of every question.

    Args:
        run: The run.
        processes: On how many it would be trained.

    Returns:
        The record it was, if there is one.
    """
    stem = run.base.stem
    wanted = {key: run.about[key] for key in ("config", "base", "settings")}
    # By other code, or on another number of processes, it would not be the same.
    wanted = _plain({**wanted, "commit": environment()["commit"], "processes": processes})
    for path in sorted(run.out.parent.glob(f"*_{stem}/*.json")):
        record = json.loads(path.read_text())
        there = {key: record.get(key, "") for key in wanted}
        for each in (there, wanted):
            # Records, once written, can be what makes a tree dirty.
            each["commit"] = each["commit"].removesuffix("-dirty")
        if there == wanted and "failed" not in record:
            source = f"{path.parent.name}/{path.name}"
            _write(run, {**record, **run.about, "taken_from": source})
            return source
    return None


def is_finished(run: Run) -> bool:
    """Tell whether the training of a run came to its end."""
    path = run.folder / "record.json"
    return path.is_file() and json.loads(path.read_text())["epochs"] == run.epochs


def collect(run: Run, failed: str | None = None) -> dict[str, Any]:
    """Write the record of a run out of what its training left behind.

    Args:
        run: The run.
        failed: Why it did not come to its end.

    Returns:
        The record.
    """
    train, val = read_scalars(sorted(run.folder.glob("*/vis_data/scalars.json")))
    if failed is None:
        training = json.loads((run.folder / "record.json").read_text())
        training["training_command"] = training.pop("command")
    else:
        training = {**environment(), "failed": failed, "n": 1}
    record = {
        "command": shlex.join(["python", shown(sys.argv[0]), *sys.argv[1:]]),
        **{key: value for key, value in training.items() if not key.startswith("accuracy/")},
        **run.about,
        **_accuracy(val),
        "loss": {
            "iteration": (steps := thin(list(train), MOST_LOSSES)),
            "loss": [_number(train[step]["loss"]) for step in steps],
        },
        **_diagnostics(run.folder / "diagnostics.jsonl"),
    }
    if failed is None and "final" not in record:
        record["failed"] = "its log has no validation accuracy (accuracy/top1)"
    _write(run, record)
    return record


def _accuracy(val: Mapping[int, Mapping[str, Any]]) -> dict[str, Any]:
    """Return the last and the best accuracy, and the curve of top-1."""
    epochs = {
        epoch: {
            key.removeprefix("accuracy/"): round(float(value), 3)
            for key, value in line.items()
            if key.startswith("accuracy/")
        }
        for epoch, line in val.items()
        if "accuracy/top1" in line
    }
    if not epochs:
        return {}
    best = max(epochs, key=lambda epoch: epochs[epoch]["top1"])
    return {
        "final": epochs[max(epochs)],
        "best": {"epoch": best, **epochs[best]},
        "validation": {
            "epoch": list(epochs),
            "top1": [accuracy["top1"] for accuracy in epochs.values()],
            **({"flops": [val[epoch]["flops"] for epoch in epochs]} if _costs(val) else {}),
        },
    }


def _costs(val: Mapping[int, Mapping[str, Any]]) -> bool:
    return all("flops" in line for line in val.values())


def _diagnostics(path: Path) -> dict[str, Any]:
    """Return the figures of every layer over the epochs, fewer of those where layers are many."""
    if not path.is_file():
        return {}  # of a model without Pattention, or a run that failed before it was measured
    measured = {line["epoch"]: line["layers"] for line in read_diagnostics(path).values()}
    if not measured:
        return {}  # it was killed at the first line
    first, last = measured[min(measured)], measured[max(measured)]
    layers, names = list(last), list(next(iter(last.values())))
    if all(first[layer]["tau"] == last[layer]["tau"] for layer in layers):
        names.remove("tau")  # it is not learned
    most = min(MOST_DIAGNOSES + 1, MOST_FIGURES // (len(layers) * len(names)))
    epochs = thin(list(measured), max(2, most))
    return {
        "diagnostics": {
            "epoch": epochs,
            "layers": layers,
            **{
                name: [
                    [_number(measured[epoch][layer][name]) for layer in layers] for epoch in epochs
                ]
                for name in names
            },
        }
    }


def thin(points: Sequence[int], most: int) -> list[int]:
    """Keep at most so many of a sequence, evenly spread, with the first and the last."""
    if len(points) <= most:
        return list(points)
    return [points[round(i * (len(points) - 1) / (most - 1))] for i in range(most)]


def _number(value: float | None) -> float | None:
    """Round to four digits; JSON has no NaN."""
    return float(f"{value:.4g}") if value is not None and math.isfinite(value) else None


def _write(run: Run, record: dict[str, Any]) -> None:
    run.out.mkdir(parents=True, exist_ok=True)
    write_record(run.record, record)


def error_line(output: str, status: int) -> str:
    """Find the line that says why a training ended.

    Args:
        output: What it printed.
        status: Its exit status, negative where a signal ended it.
    """
    if status < 0:
        return f"killed by {signal.Signals(-status).name}"
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    ours = [line.removeprefix("error: ") for line in lines if line.startswith("error: ")]
    # torchrun ends with an error of its own, which says nothing of the cause.
    raised = [
        line
        for line in lines
        if re.match(r"(\[rank\d+\]: )?[\w.]*(Error|Exception)\b", line)
        and "ChildFailedError" not in line
    ]
    line = (ours or raised or lines or [f"exit status {status}, and no output"])[-1]
    return line.replace(f"{Path.cwd()}{os.sep}", "")


def shown(path: str | Path) -> str:
    """Write a path relative to the present folder where it is within it."""
    path = Path(path)
    absolute = Path(os.path.abspath(path))
    return (
        str(absolute.relative_to(Path.cwd())) if absolute.is_relative_to(Path.cwd()) else str(path)
    )
