"""The plan of a sweep: which runs it has, and that each can be run."""

import argparse
import copy
import hashlib
import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from mmengine.config import Config

from tokenformer_vit.errors import InputError
from tokenformer_vit.training.config import LOADERS, load_config
from tokenformer_vit.training.schedule import check_schedule

from .fields import Field
from .questions import Question, Variant
from .runs import MOST_DIAGNOSES, ROOT, Run, difference, shown

LARGEST_GAP = 0.01  # of the parameter counts of two variants
TEXTS = "data"  # the folder that holds those of a question, where the command line names none


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
    field, builder = question.field, question.field.builder()
    base = Config.fromfile(args.config).to_dict()
    chosen = _chosen(question, args)
    check_schedule(Config(chosen))

    part = field.part(chosen)
    shape, parameters = builder.shape_of(chosen, question.pretraining)
    runs: dict[tuple[str, float | None, int], Run] = {}
    ends: dict[str, Any] = {}  # of a variant, the model that its run ends with
    for variant in _wanted(question, args.variants):
        beginning = part if variant.start is None else ends[variant.start]
        changed = variant.change(copy.deepcopy(beginning), shape)
        own = copy.deepcopy(chosen)
        field.replace(own, changed)
        outside = _outside(question, variant, shape, chosen, args)
        own = merged(own, outside)
        builder.check_data(own)
        facts: dict[str, Any] = {}
        if question.pretraining is not None:
            facts["start"] = builder.start_of(changed, question.pretraining)
        hooks = own.get("custom_hooks") or []
        if (question.compute is not None or field.costs) and {"type": "CostHook"} not in hooks:
            own["custom_hooks"] = [*hooks, {"type": "CostHook"}]
        if question.texts:
            ends[variant.name] = builder.end_of(changed)
            field.replace(own, ends[variant.name])
        model = builder.build(own, loaded=question.pretraining is not None)
        count = _count(model)
        if question.pretraining is not None:
            facts["trainable"] = _count(model, trained=True)
        if question.equal and abs(count / parameters - 1) > LARGEST_GAP:
            raise InputError(
                f"{variant.name} has {count:,} parameters and the model of {args.config} "
                f"{parameters:,}: {abs(count / parameters - 1):.1%} apart, so that the two cannot "
                f"be compared; leave {variant.name} out by --variants"
            )
        if variant.start is not None:
            changed = builder.started(changed)
        field.replace(own, changed)
        options = {**outside}
        if of_part := difference(part, changed):
            options |= field.within(of_part)
        for lr in args.lr or [None]:
            for seed in range(args.seeds):
                about = _about(question, variant, args.config, seed, count, options) | facts
                start = runs.get((variant.start or "", lr, seed))
                run = _run(field, base, own, about, lr, start, args)
                runs[variant.name, lr, seed] = run
    return list(runs.values())


def _chosen(question: Question, args: argparse.Namespace) -> dict[str, Any]:
    """Return the sweep's config, with what its command line says."""
    cfg = Config.fromfile(args.config)
    cfg.merge_from_dict(args.cfg_options or {})
    chosen = cfg.to_dict()
    for loader in (chosen[name] for name in LOADERS):
        if args.data_root is not None and not question.texts:
            loader["dataset"]["data_root"] = args.data_root
    if args.batch_size is not None:
        chosen["train_dataloader"]["batch_size"] = args.batch_size
    if question.texts:
        texts = [str(Path(args.data_root or TEXTS, text)) for text in question.texts]
        for name in ("val_dataloader", "test_dataloader"):
            chosen[name]["dataset"]["data_root"] = texts
    if args.amp:
        chosen["optim_wrapper"]["type"] = "AutocastOptimWrapper"
    if args.compile:
        question.field.part(chosen)["compile"] = True
    return chosen


def _wanted(question: Question, names: list[str] | None) -> list[Variant]:
    """List the variants of a sweep, with those from whose ends they start, these first."""
    if not names:
        return list(question.variants)
    wanted = set(names)
    for variant in reversed(question.variants):
        if variant.name in wanted and variant.start is not None:
            wanted.add(variant.start)
    return [variant for variant in question.variants if variant.name in wanted]


def _outside(
    question: Question,
    variant: Variant,
    shape: Any,
    chosen: Mapping[str, Any],
    args: argparse.Namespace,
) -> dict[str, Any]:
    """Say what a variant changes of a config outside the model."""
    outside = {}
    if variant.outside is not None:
        outside = variant.outside(shape, chosen["train_cfg"][question.field.limit])
    if variant.text is not None:
        text = str(Path(args.data_root or TEXTS, variant.text))
        outside = {**outside, "train_dataloader": {"dataset": {"data_root": text}}}
    return outside


def _count(model: torch.nn.Module, trained: bool = False) -> int:
    """Count the parameters of a model, all or those that are trained."""
    return sum(
        parameter.numel()
        for parameter in model.parameters()
        if parameter.requires_grad or not trained
    )


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


def merged(cfg: dict[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """Put changes into a config, dicts into dicts."""
    both = Config(cfg)
    both.merge_from_dict(copy.deepcopy(dict(changes)))
    return both.to_dict()


def _named(config: str) -> str:
    """Name a config of the project from its root, wherever the command was given."""
    path = Path(config).resolve()
    return str(path.relative_to(ROOT)) if path.is_relative_to(ROOT) else shown(config)


def _run(
    field: Field,
    base: dict[str, Any],
    cfg: dict[str, Any],
    about: dict[str, Any],
    lr: float | None,
    start: Run | None,
    args: argparse.Namespace,
) -> Run:
    cfg = copy.deepcopy(cfg)
    cfg["randomness"]["seed"] = about["seed"]
    if field.seed_key and "start" not in about:  # else there is nothing to be drawn alike
        field.part(cfg)[field.seed_key] = about["seed"]
    # Weights are as much a part of what a run begins with as the config is.
    beginning = {**base, "start": about["start"]} if "start" in about else base
    if start is not None:
        field.part(cfg)["checkpoint"] = shown(start.folder)
        beginning = {
            **base,
            "start": digest({key: start.about[key] for key in ("base", "settings")}),
        }
    usual = cfg["optim_wrapper"]["optimizer"]["lr"]
    name = f"{about['variant']}_seed{about['seed']}"
    if lr is not None and lr != usual:
        cfg["optim_wrapper"]["optimizer"]["lr"] = lr
        name += f"_lr{lr:g}"
    length = cfg["train_cfg"][field.limit]
    hooks = [hook for hook in cfg.get("custom_hooks") or () if hook["type"] != "DiagnosticsHook"]
    # Of cost and of tuning, the layers are not what is asked about.
    if {"type": "CostHook"} not in hooks and "start" not in about:
        interval = math.ceil(length / MOST_DIAGNOSES)
        hooks.append({"type": "DiagnosticsHook", "interval": interval})
    cfg["custom_hooks"] = hooks
    settings = difference(base, cfg)
    about = {
        **about,
        "lr": cfg["optim_wrapper"]["optimizer"]["lr"],
        "base": digest(beginning),
        "settings": settings,
    }
    stem = f"{about['question']}_{Path(args.config).stem}"
    return Run(
        name=name,
        settings=settings,
        about=about,
        base=Path(args.config).resolve(),
        field=field,
        length=length,
        start=start,
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
