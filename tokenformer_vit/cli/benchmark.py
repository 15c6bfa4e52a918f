"""Measure speed and memory of a TokenFormer against what one would run instead.

Every way to compute the model is measured in one process against a timm baseline and against the
formula of the authors' language code with the same parameters; each eager, and with its blocks
compiled. Needs torch and timm alone, and matplotlib for the chart::

    python tools/benchmark.py --quick                              # two minutes on two CPU cores
    python tools/benchmark.py --batch-sizes 128 256 --precisions autocast bfloat16
    python tools/benchmark.py --lm 150m --num-tokens 1024          # needs transformers

With ``--lm`` it is a language model against the Transformer in GPT-2's form of the same width,
depth, heads and vocabulary, with as many weights in its blocks. Both run as models of transformers.

A *group* is a mode, a precision and a batch size. Modes: ``train`` is forward, cross entropy,
backward and a step of fused AdamW; of images ``infer`` is the forward without gradients, and of
language ``prefill`` that up to the logits of the last token, and ``decode`` adds the last 32 tokens
of each sequence (half of it, if it is shorter than 64) one by one, with the keys and values of all
before them in transformers' cache; it is never compiled. Precisions: ``float32``; ``autocast``, to
bfloat16 over float32 weights; ``bfloat16``, weights included. Within a group all variants are built
and warmed up first, and then timed in turn, round after round.

The record (``--out``) is rewritten after each group. Interrupted, the same command with
``--resume`` leaves out the groups that are there. Beside what every record says (command, commit,
date, hardware, versions) it holds::

    device, threads            cpu or cuda; threads of a CPU operation
    unit                       image or token; called UNIT below
    model, baseline            timm names; or the preset, and "transformer"
    img_size                   of images
    num_tokens                 of language: in a sequence
    config, hidden_features    of language: fields of LMConfig; the Transformer's hidden layers
    depth                      null where each model has its own
    seed, n                    n is the number of rounds
    parameters                 {model, baseline}: how many
    flops_per_UNIT             {model, baseline}: {mode}
    ceilings                   {precision: {matmul_tflops, copy_gb_per_s}}, the most of the run
    groups                     a list of
      mode, precision, dtype, batch_size, input_shape
      items                    images of a step, or tokens that it learns from, reads or adds
      minimal_bytes            of a step, see below
      bound_UNITs_per_s        what the ceilings allow our model, and by which of the two:
      bound_by                 matmul or copy
      variants                 a list of
        variant                such as "fused compiled" or "baseline eager"
        implementation         baseline, released, or a backend: reference, fused or triton
        compiled               true or false
        failed                 why there is none of the following, such as "out of memory"
        seconds                of every round
        seconds_p20, _p50, _p80
        UNITs_per_s            at the median
        ratio_p20, _p50, _p80  of seconds, the compiled baseline's over its own in the same round,
                               in decoding the eager one's: above 1 is faster; absent if that
                               baseline failed
        saved_mb_per_UNIT      kept from forward to backward, in 10^6 bytes; null if not training
        peak_mib               most memory in a step, were the variant alone: its parameters, what
                               its optimiser keeps, and the rise during the step, but not the keys
                               and values of before it; null if unknown
        mfu                    FLOPs needed over those that the matmul ceiling allows in that time

Minimal bytes: inferring reads the inputs and every parameter once, decoding every parameter once
for each token of a sequence (cached keys and values come on top). Training reads the inputs, reads
every parameter for the forward and for the backward, writes every gradient and reads it, reads and
writes every parameter and both moments in the optimiser, and writes and reads the activations that
our most frugal variant of the group keeps. The bound is the larger of these bytes over the copy
ceiling and the FLOPs over the matmul ceiling.
"""

import argparse
import itertools
import json
import os
import re
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import timm
import torch
from tqdm import tqdm

from tokenformer_vit.benchmarking import measures
from tokenformer_vit.benchmarking.images import Images
from tokenformer_vit.benchmarking.language import Language
from tokenformer_vit.benchmarking.reports import draw, figures, table
from tokenformer_vit.benchmarking.variants import (
    BACKENDS,
    PRECISIONS,
    Group,
    Setting,
    Variant,
    measure_group,
    short,
)
from tokenformer_vit.command_line import whole_number
from tokenformer_vit.errors import InputError
from tokenformer_vit.models import LM_PRESETS, lm_config
from tokenformer_vit.records import environment, write_record

ROOT = Path(__file__).resolve().parents[2]
# What --quick means where the command line does not say otherwise.
QUICK = {
    "depth": 2,
    "precisions": ["float32"],
    "batch_sizes": [2],
    "backends": ["fused"],
    "rounds": 5,
}
QUICK_TOKENS = 128
# Of images, where the command line does not say otherwise.
IMAGES = {"model": "tokenformer_base_matched", "baseline": "vit_base_patch16_224", "img_size": 224}
COMPILE_OFF = ("TORCHDYNAMO_DISABLE", "TORCH_COMPILE_DISABLE")
# What a run must have in common with the one that it goes on from.
SAME = (
    *("model", "baseline", "img_size", "num_tokens", "depth", "n", "seed"),
    *("device", "threads", "hardware", "versions", "commit"),
)


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command."""
    args = parse(argv)
    if args.draw:
        print(chart(args.draw, read_record(args.draw)))
        return
    if args.threads:
        torch.set_num_threads(args.threads)
    subject, told = language_subject(args) if args.lm else image_subject(args)
    setting = Setting(subject, torch.device(args.device), args.seed, args.rounds)
    record = new_record(setting, told)
    if args.resume and args.out.exists():
        take_over(args.out, record)
    args.out.parent.mkdir(parents=True, exist_ok=True)

    asked = map(Group._make, itertools.product(args.modes, args.precisions, args.batch_sizes))
    there = {
        group_of(entry): {row["variant"] for row in entry["variants"]} for entry in record["groups"]
    }
    plan = {group: variants_of(group.mode, args) for group in asked}
    plan = {
        group: variants
        for group, variants in plan.items()
        if not {variant.name for variant in variants} <= there.get(group, set())
    }
    steps = sum(map(len, plan.values())) * (1 + args.rounds)
    with tqdm(total=steps, disable=None) as bar:
        for group, variants in plan.items():

            def tick(variant: str, group: Group = group) -> None:
                bar.set_description(f"{' '.join(map(str, group))}: {variant}", refresh=False)
                bar.update()

            raise_ceilings(record["ceilings"].setdefault(group.precision, {}), setting, group)
            entry = measure_group(setting, group, variants, tick)
            others = [other for other in record["groups"] if group_of(other) != group]
            # All of them anew, since their ceilings may be higher by now.
            record["groups"] = [figures(each, record) for each in (*others, entry)]
            write_record(args.out, record)
            bar.write(f"{table(record['groups'][-1], subject.unit)}\n")
    print(f"Done. Record: {args.out}; {chart(args.out, record)}")


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line.

    Raises:
        InputError: If options do not go together, the device is not there, or a backend does not
            run on it.
    """
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    positive = whole_number(1)
    add = parser.add_argument
    add("--model", metavar="NAME", help=f"default: {IMAGES['model']}")
    add("--baseline", metavar="NAME", help=f"default: {IMAGES['baseline']}")
    add("--img-size", type=positive, metavar="S", help=f"default: {IMAGES['img_size']}")
    add("--lm", choices=LM_PRESETS, metavar="PRESET", help=f"one of {', '.join(LM_PRESETS)}")
    add(
        "--num-tokens",
        type=whole_number(2),
        metavar="N",
        help="of a sequence; default: the context",
    )
    add("--backends", nargs="+", choices=BACKENDS, help="default: all that run on the device")
    add("--modes", nargs="+", metavar="MODE", help="default: all; see above")
    add("--precisions", nargs="+", choices=PRECISIONS, default=[*PRECISIONS], help="default: all")
    add(
        "--batch-sizes",
        nargs="+",
        type=positive,
        metavar="B",
        help="default: 128, on a CPU 4; of language 8 and 1",
    )
    add("--rounds", type=positive, default=11, metavar="N", help="default: %(default)s")
    add("--depth", type=positive, metavar="N", help="blocks; default: as many as each model has")
    add("--device", choices=["cpu", "cuda"], help="default: cuda, if there is one")
    add("--threads", type=positive, metavar="N", help="threads of a CPU operation")
    add("--seed", type=whole_number(0), default=0, metavar="N", help="default: %(default)s")
    add(
        "--out",
        type=Path,
        metavar="FILE",
        help="default: speed_MODEL_DEVICE.json in tokenformer_vit/benchmarking/results of a clone, "
        "or in work_dirs with --quick, --eager, --depth or --img-size; of language MODEL is "
        "lm_PRESET_N",
    )
    add("--resume", action="store_true", help="keep the groups that FILE has")
    add("--eager", action="store_true", help="nothing compiled: no C++ compiler, no ratios")
    add("--quick", action="store_true", help="two blocks and a few variants; FILE is in work_dirs")
    add("--draw", type=Path, metavar="RECORD", help="draw the chart of a record, nothing else")
    args = parser.parse_args(argv)
    if args.quick:
        parser.set_defaults(**QUICK)
        args = parser.parse_args(argv)

    complete(args)
    return args


def complete(args: argparse.Namespace) -> None:
    """Fill in what depends on the field and on the device.

    Raises:
        InputError: As :func:`parse`.
    """
    for name in IMAGES if args.lm else ("num_tokens",):
        if getattr(args, name) is not None:
            reason = "is of images, and --lm is not" if args.lm else "needs --lm"
            raise InputError(f"--{name.replace('_', '-')} {reason}; leave one out")
    modes = Language.modes if args.lm else Images.modes
    args.modes = args.modes or modes
    for mode in args.modes:
        if mode not in modes:
            raise InputError(f"--modes {mode}: choose from {', '.join(modes)}")
    if args.lm:
        context = lm_config(args.lm).context_length
        args.num_tokens = args.num_tokens or (min(context, QUICK_TOKENS) if args.quick else context)
        if args.num_tokens > context:
            raise InputError(f"--num-tokens {args.num_tokens}: {args.lm} takes at most {context}")
    else:
        for name, default in IMAGES.items():
            setattr(args, name, getattr(args, name) or default)

    cuda = torch.cuda.is_available()
    if args.device == "cuda" and not cuda:
        raise InputError("--device cuda, but this PyTorch sees no CUDA device; use --device cpu")
    args.device = args.device or ("cuda" if cuda else "cpu")
    off = [name for name in COMPILE_OFF if os.environ.get(name) == "1"]
    if off and not args.eager:
        raise InputError(f"{off[0]} switches torch.compile off; unset it, or give --eager")
    if args.device == "cpu" and "triton" in (args.backends or ()):
        raise InputError("--backends triton needs a CUDA device")
    if args.device == "cpu":
        kind, backends, batch_size = "cpu", ["reference", "fused"], 1 if args.lm else 4
    else:
        kind, backends = torch.cuda.get_device_name(), BACKENDS
        batch_size = 8 if args.lm else 128
    args.backends = args.backends or backends
    args.batch_sizes = args.batch_sizes or [batch_size]
    if args.out is None:
        model = f"lm_{args.lm}_{args.num_tokens}" if args.lm else args.model
        name = f"speed_{model}_{re.sub('[^a-z0-9]+', '_', kind.lower())}"
        # What is committed and rendered are whole models, images at their own size, compiled too.
        special = args.quick or args.eager or args.depth or args.img_size not in (None, 224)
        records = ROOT / "tokenformer_vit" / "benchmarking" / "results"  # a wheel has none
        folder = records if records.is_dir() and not special else ROOT / "work_dirs"
        args.out = folder / (f"{name}_quick.json" if args.quick else f"{name}.json")


def variants_of(mode: str, args: argparse.Namespace) -> list[Variant]:
    """Return what is measured in a mode."""
    compiled = (False,) if args.eager or mode == "decode" else (False, True)
    variants = [
        Variant(implementation, each)
        for implementation in ("baseline", "released", *dict.fromkeys(args.backends))
        for each in compiled
    ]
    if args.quick and True in compiled:
        left_out = (Variant("baseline", False), Variant("released", True))
        variants = [variant for variant in variants if variant not in left_out]
    return variants


def image_subject(args: argparse.Namespace) -> tuple[Images, dict[str, Any]]:
    """Return the models for images, and what a record says of them.

    Raises:
        InputError: If there is no such model, or it is none that can be measured.
    """
    subject = Images(args.model, args.baseline, args.img_size, args.depth)
    ours = timm.list_models("tokenformer*")
    counts = {}
    for key, implementation in (("model", "reference"), ("baseline", "baseline")):
        name, option = getattr(args, key), f"--{key}"
        if not timm.is_model(name):
            close = ", ".join(get_close_matches(name, timm.list_models(), n=3) or ours)
            raise InputError(f"{option}: there is no model {name!r}; did you mean {close}?")
        if key == "model" and name.partition(".")[0] not in ours:
            raise InputError(
                f"{option} {name} is no TokenFormer; choose one of {', '.join(ours)}, and give "
                "what it is compared with as --baseline"
            )
        try:
            counts[key] = subject.costs(implementation)
        except (AssertionError, AttributeError, RuntimeError, TypeError, ValueError) as error:
            reason = " ".join(str(error).split())
            raise InputError(f"{option} {name} cannot be measured: {reason}") from error
    return subject, {**subject._asdict(), **counted(subject.unit, counts)}


def language_subject(args: argparse.Namespace) -> tuple[Language, dict[str, Any]]:
    """Return the models for language, and what a record says of them.

    Raises:
        InputError: If transformers is not installed, or the TokenFormer has no match.
    """
    from tokenformer_vit import language  # of all that is measured, this alone needs transformers

    config = lm_config(args.lm, **({"depth": args.depth} if args.depth else {}))
    subject = Language(
        lambda: language.TokenFormerForCausalLM(language.TokenFormerConfig(**asdict(config))),
        lambda: language.matched_transformer(config),
        config.vocab_size,
        args.num_tokens,
    )
    counts = {"model": subject.costs("reference"), "baseline": subject.costs("baseline")}
    with torch.device("meta"):
        hidden = language.matched_transformer(config).config.n_inner
    return subject, {
        **{"model": args.lm, "baseline": "transformer", "depth": args.depth},
        **{"num_tokens": args.num_tokens, "config": asdict(config), "hidden_features": hidden},
        **counted(subject.unit, counts),
    }


def counted(unit: str, counts: Mapping[str, tuple[int, dict[str, int]]]) -> dict[str, Any]:
    """Say how many parameters two models have, and how many FLOPs they need."""
    return {
        "unit": unit,
        "parameters": {name: parameters for name, (parameters, _) in counts.items()},
        f"flops_per_{unit}": {name: flops for name, (_, flops) in counts.items()},
    }


def new_record(setting: Setting, told: Mapping[str, Any]) -> dict[str, Any]:
    """Describe the run that begins, on models of which ``told`` is known."""
    packages = ("torch", "timm", "triton", *(("transformers",) if told["unit"] == "token" else ()))
    return {
        "command": shlex.join(["python", *sys.argv]),
        **environment(packages, setting.device.type),
        "device": setting.device.type,
        "threads": torch.get_num_threads(),
        **told,
        "n": setting.rounds,
        "seed": setting.seed,
        "ceilings": {},
        "groups": [],
    }


def raise_ceilings(ceilings: dict[str, float], setting: Setting, group: Group) -> None:
    """Measure what the device does at most, and keep the most that was seen in this run.

    On a machine that does other work, too, a single measurement may come at a bad moment.
    """
    products = PRECISIONS[group.precision].products
    for name, rate in (
        ("matmul_tflops", measures.matmul_rate(setting.device, products) / 1e12),
        ("copy_gb_per_s", measures.copy_rate(setting.device) / 1e9),
    ):
        ceilings[name] = max(ceilings.get(name, 0.0), short(rate))


def group_of(entry: dict[str, Any]) -> Group:
    """Return the group that an entry of a record is about."""
    return Group(entry["mode"], entry["precision"], entry["batch_size"])


def read_record(path: Path) -> dict[str, Any]:
    """Read a record that this tool wrote.

    Raises:
        InputError: If it is no such record.
        OSError: If there is no such file.
    """
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
        if record["groups"] and record["ceilings"]:
            return record
    except (KeyError, TypeError, ValueError):
        pass  # told below, as for any other content
    raise InputError(f"{path} is no record of tools/benchmark.py")


def take_over(path: Path, record: dict[str, Any]) -> None:
    """Take what an earlier run measured into the record of the run that begins.

    Raises:
        InputError: If that run was not like this one.
    """
    earlier = read_record(path)
    for key in SAME:
        # The record itself, once written, can be what makes a tree dirty.
        old, new = (str(r.get(key)).removesuffix("-dirty") for r in (earlier, record))
        if old != new:
            raise InputError(
                f"{path} has {key} {old}, and now it is {new}: give another --out, or leave out "
                "--resume to replace it"
            )
    record["ceilings"], record["groups"] = earlier["ceilings"], earlier["groups"]


def chart(path: Path, record: dict[str, Any]) -> str:
    """Draw a record, and say where the chart is or what it takes to draw it."""
    picture = path.with_suffix(".png")
    try:
        draw(record, picture)
    except ImportError:
        return f"no chart: pip install matplotlib, then python tools/benchmark.py --draw {path}"
    return f"chart: {picture}"
