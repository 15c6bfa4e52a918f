"""Measure speed and memory of a TokenFormer against a baseline.

One process measures the TokenFormer, the same in plain formulas (``reference``), the formula of the
authors' language code with the same parameters, and a timm baseline, each eager and with compiled
blocks. Needs only torch and timm, and matplotlib for the chart::

    tokenformer-vit benchmark --quick                              # two minutes on two CPU cores
    tokenformer-vit benchmark --batch-sizes 128 256 --precisions autocast bfloat16
    tokenformer-vit benchmark --lm 150m --num-tokens 1024          # needs transformers
    tokenformer-vit benchmark --profile                            # kernels of a training step

``--profile`` prints the table of PyTorch's profiler instead, of steps of the first group by each
compiled variant.

With ``--lm`` it measures a language model. The baseline is a Transformer in GPT-2's form with the
same width, depth, heads and vocabulary, and as many weights in its blocks; with ``--positions
rotary`` it has GPT-NeoX's form. Both are models of transformers.

A *group* is a mode, a precision and a batch size. Mode ``train`` is forward pass, cross entropy,
backward pass and a step of fused AdamW. For images, ``infer`` is the forward pass without
gradients. For language, ``prefill`` is the forward pass up to the logits of the last token, and
``decode`` adds the last 32 tokens of each sequence (half of a sequence shorter than 64) one by one,
with transformers' cache; it is never compiled. Precisions: ``float32``; ``autocast`` to bfloat16
with float32 weights; ``bfloat16`` with bfloat16 weights. In a group, all variants are first built
and warmed up, then timed in turns, round by round.

The record (``--out``) is rewritten after each group. After an interruption, run the same command
with ``--resume``: it skips the groups that the record has. The keys of a record are described in
tokenformer_vit/benchmarking/records.py.
"""

import argparse
import itertools
import os
from collections.abc import Sequence
from dataclasses import asdict
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import timm
import torch
from tqdm import tqdm

from tokenformer_vit.benchmarking.images import MATCHED, Images
from tokenformer_vit.benchmarking.language import Language
from tokenformer_vit.benchmarking.records import (
    counted,
    group_of,
    new_record,
    raise_ceilings,
    read_benchmark,
    resume,
)
from tokenformer_vit.benchmarking.reports import draw, draw_summary, figures, table
from tokenformer_vit.benchmarking.variants import (
    BACKENDS,
    OUT_OF_MEMORY,
    PRECISIONS,
    BenchmarkVariant,
    Group,
    Setting,
    measure_group,
    profile_step,
)
from tokenformer_vit.command_line import command_parser, whole_number
from tokenformer_vit.errors import InputError, one_line
from tokenformer_vit.models import LM_PRESETS, lm_config
from tokenformer_vit.records import device_in_name, write_record

from .arguments import choose_device

# Defaults of --quick.
_QUICK = {
    "depth": 2,
    "precisions": ["float32"],
    "batch_sizes": [2],
    "backends": ["auto"],
    "rounds": 5,
}
_QUICK_TOKENS = 128
_ROUNDS = 11
# Defaults for images.
IMAGES = {"model": "tokenformer_base_matched", "baseline": "vit_base_patch16_224", "img_size": 224}
_COMPILE_OFF = ("TORCHDYNAMO_DISABLE", "TORCH_COMPILE_DISABLE")


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command.

    Raises:
        InputError: If options cannot be used, or, after all is measured, if something other than
            memory kept a variant from being measured.
    """
    args = parse(argv)
    if args.draw:
        print(chart(args.draw, read_benchmark(args.draw)))
        return
    if args.threads:
        torch.set_num_threads(args.threads)
    subject, models = _language_subject(args) if args.lm else _image_subject(args)
    setting = Setting(subject, torch.device(args.device), args.seed, args.rounds)
    if args.profile:
        group = Group(args.modes[0], args.precisions[0], args.batch_sizes[0])
        variants = _variants_of(group.mode, args)
        for variant in [each for each in variants if each.compiled] or variants:
            print(f"{variant.name}\n{profile_step(setting, group, variant)}")
        return
    record = new_record(setting, models)
    if args.resume and args.out.exists():
        resume(args.out, record)
    args.out.parent.mkdir(parents=True, exist_ok=True)

    asked = map(Group._make, itertools.product(args.modes, args.precisions, args.batch_sizes))
    there = {group_of(entry): _measured(entry) for entry in record["groups"]}
    plan = {group: _variants_of(group.mode, args) for group in asked}
    # A group is measured as a whole: again with what it has, if it lacks a variant.
    plan = {
        group: list(dict.fromkeys([*variants, *there.get(group, ())]))
        for group, variants in plan.items()
        if not {*variants} <= {*there.get(group, ())}
    }
    broken: list[str] = []
    steps = sum(map(len, plan.values())) * (1 + args.rounds)
    with tqdm(total=steps, disable=None) as bar:
        for group, variants in plan.items():

            def tick(variant: str, group: Group = group) -> None:
                bar.set_description(f"{' '.join(map(str, group))}: {variant}", refresh=False)
                bar.update()

            raise_ceilings(record["ceilings"].setdefault(group.precision, {}), setting, group)
            entry = measure_group(setting, group, variants, tick)
            others = [other for other in record["groups"] if group_of(other) != group]
            # All groups again, because the ceilings may be higher by now.
            record["groups"] = [figures(each, record) for each in (*others, entry)]
            write_record(args.out, record)
            bar.write(f"{table(record['groups'][-1], subject.unit)}\n")
            broken += [
                f"{row['variant']} ({' '.join(map(str, group))}: {row['failed']})"
                for row in entry["variants"]
                if row.get("failed", OUT_OF_MEMORY) != OUT_OF_MEMORY
            ]
    print(f"Done. Record: {args.out}; {chart(args.out, record)}")
    if broken:
        raise InputError(
            f"not measured: {', '.join(broken)}; the record has the others: correct the cause, or "
            "leave the backend out of --backends"
        )


def _measured(entry: dict[str, Any]) -> list[BenchmarkVariant]:
    """Return the variants that a group of a record has; one with an error is tried again."""
    return [
        BenchmarkVariant(row["implementation"], row["compiled"])
        for row in entry["variants"]
        if row.get("failed", OUT_OF_MEMORY) == OUT_OF_MEMORY
    ]


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line.

    Raises:
        InputError: If options exclude each other, or the device does not exist.
    """
    parser = command_parser(__doc__)
    positive = whole_number(1)
    add = parser.add_argument
    add("--model", metavar="NAME", help=f"default: {IMAGES['model']}")
    add(
        "--baseline",
        metavar="NAME",
        help=f"timm name, or {MATCHED}: the ViT of the model's width and depth with as many "
        f"weights; default: {IMAGES['baseline']}",
    )
    add("--img-size", type=positive, metavar="S", help=f"default: {IMAGES['img_size']}")
    add("--lm", choices=LM_PRESETS, metavar="PRESET", help=f"one of {', '.join(LM_PRESETS)}")
    add(
        "--num-tokens",
        type=whole_number(2),
        metavar="N",
        help="length of a sequence; default: the context length",
    )
    add(
        "--positions",
        choices=["learned", "rotary"],
        help="of the Transformer that --lm is compared with; default: learned",
    )
    add(
        "--backends",
        nargs="+",
        choices=BACKENDS,
        default=[*BACKENDS],
        metavar="BACKEND",
        help="%(choices)s; default: both",
    )
    add("--modes", nargs="+", metavar="MODE", help="default: all modes")
    add("--precisions", nargs="+", choices=PRECISIONS, default=[*PRECISIONS], help="default: all")
    add(
        "--batch-sizes",
        nargs="+",
        type=positive,
        metavar="B",
        help="default: 128 (CPU: 4); language: 8 (CPU: 1)",
    )
    add("--rounds", type=positive, metavar="N", help=f"default: {_ROUNDS}")
    add("--depth", type=positive, metavar="N", help="blocks; default: the depth of each model")
    add("--device", choices=["cpu", "cuda"], help="default: cuda if available")
    add("--threads", type=positive, metavar="N", help="threads of a CPU operation")
    add("--seed", type=whole_number(0), default=0, metavar="N", help="default: %(default)s")
    add("--out", type=Path, metavar="FILE", help="default: work_dirs/speed_MODEL_DEVICE.json")
    add("--resume", action="store_true", help="skip the groups that FILE has")
    add("--eager", action="store_true", help="compile nothing: no C++ compiler, no ratios")
    add("--quick", action="store_true", help="two blocks and a few variants")
    add("--draw", type=Path, metavar="RECORD", help="only draw the charts of a record")
    add("--profile", action="store_true", help="print the kernels of the first group")
    args = parser.parse_args(argv)
    if args.quick:
        parser.set_defaults(**_QUICK)
        args = parser.parse_args(argv)

    _complete(args)
    return args


def _complete(args: argparse.Namespace) -> None:
    """Set the defaults that depend on the kind of model and on the device.

    Raises:
        InputError: In the cases of :func:`parse`.
    """
    for name in IMAGES if args.lm else ("num_tokens", "positions"):
        if getattr(args, name) is not None:
            reason = "is for images, not for --lm" if args.lm else "needs --lm"
            raise InputError(f"--{name.replace('_', '-')} {reason}; remove one of them")
    modes = Language.modes if args.lm else Images.modes
    args.modes = args.modes or modes
    for mode in args.modes:
        if mode not in modes:
            raise InputError(f"--modes {mode}: choose from {', '.join(modes)}")
    if args.lm:
        args.positions = args.positions or "learned"
        context = lm_config(args.lm).context_length
        args.num_tokens = args.num_tokens or (
            min(context, _QUICK_TOKENS) if args.quick else context
        )
        if args.num_tokens > context:
            raise InputError(f"--num-tokens {args.num_tokens}: {args.lm} takes at most {context}")
    else:
        for name, default in IMAGES.items():
            setattr(args, name, getattr(args, name) or default)

    args.rounds = args.rounds or _ROUNDS
    args.device = choose_device(args.device or "auto").type
    off = [name for name in _COMPILE_OFF if os.environ.get(name) == "1"]
    if off and not args.eager:
        raise InputError(f"{off[0]}=1 disables torch.compile; unset it, or give --eager")
    if not args.batch_sizes:
        few, many = (1, 8) if args.lm else (4, 128)
        args.batch_sizes = [few if args.device == "cpu" else many]
    if args.out is None:
        model = f"lm_{args.lm}_{args.num_tokens}" if args.lm else args.model
        model += "_rotary" if args.positions == "rotary" else ""
        name = f"speed_{model}_{device_in_name(args.device)}"
        args.out = Path("work_dirs", f"{name}_quick.json" if args.quick else f"{name}.json")


def _variants_of(mode: str, args: argparse.Namespace) -> list[BenchmarkVariant]:
    """Return the variants to measure in a mode."""
    compiled = (False,) if args.eager or mode == "decode" else (False, True)
    variants = [
        BenchmarkVariant(implementation, each)
        for implementation in ("baseline", "released", *dict.fromkeys(args.backends))
        for each in compiled
    ]
    if args.quick and True in compiled:
        left_out = (BenchmarkVariant("baseline", False), BenchmarkVariant("released", True))
        variants = [variant for variant in variants if variant not in left_out]
    return variants


def _image_subject(args: argparse.Namespace) -> tuple[Images, dict[str, Any]]:
    """Return the models for images, and their entries in the record.

    Raises:
        InputError: If a model does not exist or cannot be measured.
    """
    subject = Images(args.model, args.baseline, args.img_size, args.depth)
    ours = timm.list_models("tokenformer*")
    counts = {}
    for key, implementation in (("model", "reference"), ("baseline", "baseline")):
        name, option = getattr(args, key), f"--{key}"
        if not timm.is_model(name) and not (key == "baseline" and name == MATCHED):
            close = ", ".join(get_close_matches(name, [*timm.list_models(), MATCHED], n=3) or ours)
            raise InputError(f"{option}: there is no model {name!r}; did you mean {close}?")
        if key == "model" and name.partition(".")[0] not in ours:
            raise InputError(
                f"{option} {name} is not a TokenFormer; choose one of {', '.join(ours)}, and give "
                "the other model as --baseline"
            )
        try:
            counts[key] = subject.costs(implementation)
        except (AssertionError, AttributeError, RuntimeError, TypeError, ValueError) as error:
            raise InputError(
                f"{option} {name} cannot be measured: {one_line(error)}; choose another model"
            ) from error
    return subject, {**subject._asdict(), **counted(subject.unit, counts)}


def _language_subject(args: argparse.Namespace) -> tuple[Language, dict[str, Any]]:
    """Return the models for language, and their entries in the record.

    Raises:
        InputError: If transformers is not installed, or no Transformer matches the TokenFormer.
    """
    from tokenformer_vit import language  # needs transformers

    config = lm_config(args.lm, **({"depth": args.depth} if args.depth else {}))
    subject = Language(
        lambda: language.TokenFormerForCausalLM(language.TokenFormerConfig(**asdict(config))),
        lambda: language.matched_transformer(config, args.positions),
        config.vocab_size,
        args.num_tokens,
    )
    counts = {"model": subject.costs("reference"), "baseline": subject.costs("baseline")}
    with torch.device("meta"):
        hidden = language.matched_transformer(config).config.n_inner
    baseline = "transformer, rotary" if args.positions == "rotary" else "transformer"
    return subject, {
        **{"model": args.lm, "baseline": baseline, "depth": args.depth},
        **{"num_tokens": args.num_tokens, "config": asdict(config), "hidden_features": hidden},
        **counted(subject.unit, counts),
    }


def chart(path: Path, record: dict[str, Any]) -> str:
    """Draw the charts of a record; return where they are, or how to draw them."""
    pictures = [path.with_suffix(".png"), path.with_name(f"{path.stem}_summary.png")]
    try:
        draw(record, pictures[0])
        if not draw_summary(record, pictures[1]):
            del pictures[1]
    except ImportError:
        return f"no chart: pip install matplotlib, then tokenformer-vit benchmark --draw {path}"
    return f"chart: {', '.join(map(str, pictures))}"
