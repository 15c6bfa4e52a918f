"""The plan of a sweep: its runs, and checks that each of them can be trained."""

import argparse
import copy
import hashlib
import json
import math
from collections.abc import Mapping
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any

from mmengine.config import Config

from tokenformer_vit.errors import InputError
from tokenformer_vit.training.config import (
    check_config,
    check_schedule,
    find_config,
    load_config,
    read_config,
)

from .questions import Question
from .run import PROBES, ROOT, Run, difference, shown
from .variants import Shape, Variant

LARGEST_GAP = 0.01  # between the parameter counts of two variants
MOST_DIAGNOSES = 20  # epochs after which layers are measured, not counting the start


def plan(
    question: Question,
    args: argparse.Namespace,
    starts: Mapping[str, float | None] | None = None,
) -> list[Run]:
    """List the runs of a sweep, and check that each of them can be trained.

    Args:
        question: The question.
        args: The options of the command line.
        starts: Learning rate of the runs that others continue, by variant, or None for a variant
            that no run can continue. Default: a run continues one of its own learning rate.

    Raises:
        InputError: If the config, its data, an option or the weights to start from are wrong, or
            parameter counts differ that should be equal.
    """
    for module in PROBES:
        import_module(module)  # registers what some variants need
    args.config = str(find_config(args.config))
    check_config(load_config(args.config, args.cfg_options))
    field = question.field
    base = read_config(args.config).to_dict()
    chosen = _chosen(question, base, args)
    check_schedule(Config(chosen))
    shape, parameters = field.shape_of(question.start(chosen))
    length = chosen["train_cfg"][field.limit]
    runs: dict[tuple[str | None, float | None, int], Run] = {}
    ends: dict[str | None, Any] = {None: field.part(chosen)}  # model at the end of each variant
    for variant in _wanted(question, args.variants):
        part = variant.change(copy.deepcopy(ends[variant.start]), shape)
        outside = question.outside(variant, shape, length, args.data_root)
        if variant.costs:
            limit = _affordable(question, chosen, variant, part, shape)
            outside = _merged(outside, {"train_cfg": {field.limit: limit}})
        cfg = _merged(_with_part(question, chosen, part), outside)
        field.check_data(cfg)
        if outside:
            check_schedule(Config(cfg))  # it may be shorter than the config's
        start = question.start_of(part)
        hooks = cfg.get("custom_hooks") or []
        if (question.counts_flops or field.counts_flops) and {"type": "CostHook"} not in hooks:
            cfg["custom_hooks"] = [*hooks, {"type": "CostHook"}]

        ends[variant.name] = question.end_of(part)
        whole = _with_part(question, cfg, ends[variant.name])
        counts = question.counts(field.build(whole))
        gap = abs(counts["parameters"] / parameters - 1)
        if question.same_size and gap > LARGEST_GAP:
            raise InputError(
                f"{variant.name} has {counts['parameters']:,} parameters and the model of "
                f"{args.config} has {parameters:,}: they differ by {gap:.1%}, too much for a "
                f"comparison; leave {variant.name} out of --variants"
            )
        if variant.start is not None:
            part = field.continued(part)
        options = {**outside}
        if changes := difference(field.part(chosen), part):
            ((key, own),) = field.within(changes).items()
            options[key] = {**options.get(key, {}), **own}
        about = {
            "question": question.name,
            "variant": variant.name,
            "label": variant.label,
            "paper": variant.paper,
            "config": _named(args.config),
            **counts,
            **start,
            "options": options,
        }
        cfg = _with_part(question, cfg, part)
        for lr in [None] if variant.prepares else args.lr or [None]:
            for seed in range(args.seeds):
                from_lr = lr if starts is None else starts.get(variant.start or "", lr)
                if variant.start is not None and question.named(variant.start).prepares:
                    from_lr = None
                before = runs.get((variant.start, from_lr, seed))
                if before is None and variant.start is not None:
                    continue
                own = {**about, "seed": seed}
                run = _run(question, base, cfg, own, lr, before, args, variant.start_folder)
                runs[variant.name, lr, seed] = replace(
                    run, whole=whole, has_result=not variant.prepares
                )
    return list(runs.values())


def _chosen(question: Question, base: dict[str, Any], args: argparse.Namespace) -> dict[str, Any]:
    """Return the sweep's config with the options of the command line."""
    cfg = _merged(copy.deepcopy(base), args.cfg_options or {})
    question.put_data_root(cfg, args.data_root)
    if args.batch_size is not None:
        cfg["train_dataloader"]["batch_size"] = args.batch_size
    if args.amp:
        cfg["optim_wrapper"]["type"] = "AutocastOptimWrapper"
    if args.compile:
        question.field.part(cfg)["compile"] = True
    return cfg


def changes_between(old: str, new: str) -> dict[str, Any]:
    """Return the settings with which a config that inherits from ``old`` equals ``new``."""
    first, second = (read_config(path).to_dict() for path in (old, new))
    return difference(first, second)


def _wanted(question: Question, names: list[str] | None) -> list[Variant]:
    """List the variants of a sweep, each after the variant that it starts from."""
    if not names:
        return [variant for variant in question.variants if not variant.recorded]
    wanted = set(names)
    for variant in reversed(question.variants):
        if variant.name in wanted and variant.start is not None:
            wanted.add(variant.start)
    return [variant for variant in question.variants if variant.name in wanted]


def _affordable(
    question: Question, chosen: Mapping[str, Any], variant: Variant, part: Any, shape: Shape
) -> int:
    """Return the epochs or iterations of a model whose FLOPs are the variant's ``costs``.

    The variants in ``costs`` are trained from scratch for as long as the sweep's config.
    """
    field = question.field

    def flops(part: Any) -> int:
        return field.flops(_with_part(question, chosen, part))

    def cost(name: str) -> int:
        return flops(question.named(name).change(copy.deepcopy(field.part(chosen)), shape))

    total = sum(share * cost(name) for name, share in variant.costs)
    return max(1, round(total / flops(part) * chosen["train_cfg"][field.limit]))


def _with_part(question: Question, cfg: Mapping[str, Any], part: Any) -> dict[str, Any]:
    """Copy a config, and replace the part that variants change."""
    copied = copy.deepcopy(dict(cfg))
    question.field.replace(copied, copy.deepcopy(part))
    return copied


def _merged(cfg: dict[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """Merge changes into a config, also within nested dicts."""
    both = Config(cfg)
    both.merge_from_dict(copy.deepcopy(dict(changes)))
    return both.to_dict()


def _named(config: str) -> str:
    """Return a project config's path within the project, whatever the current folder is."""
    path = Path(config).resolve()
    return path.relative_to(ROOT).as_posix() if path.is_relative_to(ROOT) else shown(config)


def _run(
    question: Question,
    base: dict[str, Any],
    cfg: dict[str, Any],
    about: dict[str, Any],
    lr: float | None,
    before: Run | None,
    args: argparse.Namespace,
    start_folder: str,
) -> Run:
    """Make the run of a variant's config ``cfg``, which differs from the file's config ``base``."""
    cfg, field = copy.deepcopy(cfg), question.field
    cfg["randomness"]["seed"] = about["seed"]
    if field.seed_key and not question.loads_weights:  # loaded weights are not drawn
        field.part(cfg)[field.seed_key] = about["seed"]
    # A run starts from the config and the weights.
    beginning = {**base, "start": about["start"]} if "start" in about else base
    if before is not None:
        question.start_from(cfg, shown(before.folder / start_folder))
        source = {key: before.about[key] for key in ("base", "settings")}
        beginning = {**base, "start": _digest(source)}
    name = f"{about['variant']}_seed{about['seed']}"
    optimizer = cfg["optim_wrapper"]["optimizer"]
    if lr is not None and lr != optimizer["lr"]:
        optimizer["lr"] = lr
        name += f"_lr{lr:g}"
    length = cfg["train_cfg"][field.limit]
    hooks = [hook for hook in cfg.get("custom_hooks") or () if hook["type"] != "DiagnosticsHook"]
    if question.measures_layers(about["variant"]):
        hooks.append({"type": "DiagnosticsHook", "interval": math.ceil(length / MOST_DIAGNOSES)})
    cfg["custom_hooks"] = hooks
    settings = difference(base, cfg)
    digest = {"lr": optimizer["lr"], "base": _digest(beginning), "settings": settings}
    stem, folder = Path(args.config).stem, Path("work_dirs", "ablations")
    # Records of this repository's configs belong to the repository, other records to the user.
    is_ours = Path(args.config).resolve().is_relative_to(ROOT / "configs")
    out = ROOT / "ablations" if is_ours else Path(args.work_dir or folder)
    return Run(
        name=name,
        settings=settings,
        about={**about, **digest},
        base=Path(args.config).resolve(),
        field=field,
        length=length,
        start=before,
        work_dir=Path(args.work_dir or folder / question.name / stem),
        out=Path(args.out or out / "results" / f"{question.name}_{stem}"),
        whole={},
        same_training=args.same_training,
    )


def _digest(config: Mapping[str, Any]) -> str:
    """Return a short digest of a config's content, because its file may change."""
    text = json.dumps(config, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:12]
