"""Measure speed and memory of a TokenFormer against a baseline.

One process measures the TokenFormer (auto), the authors' formula with the same parameters
(released) and the baseline, eager and with compiled blocks, in turns::

    tokenformer-vit benchmark --depth 2 --precisions float32       # minutes on two CPU cores
    tokenformer-vit benchmark --batch-sizes 128 256 --precisions autocast bfloat16
    tokenformer-vit benchmark --lm 150m --num-tokens 1024          # needs transformers
    tokenformer-vit benchmark --profile                            # kernels of a training step

--baseline is a timm name, or matched-vit: of the same width, depth and weights. With --lm it is a
GPT-2, or with --positions rotary a GPT-NeoX. Mode train is forward and backward pass and a step of
AdamW; prefill is the forward pass up to the last token's logits; decode adds the last 32 tokens
(half of a sequence below 64) with the cache. autocast computes in bfloat16 with float32 weights.
"""

import argparse
import itertools
import os
from dataclasses import asdict
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import timm

from tokenformer_vit.benchmarking import benchmark, reports
from tokenformer_vit.benchmarking.benchmark import MATCHED, PRECISIONS, Group, variants
from tokenformer_vit.errors import InputError
from tokenformer_vit.models import LM_PRESETS, lm_config
from tokenformer_vit.records import read_json, write_record

from .arguments import Parser, device, whole_number


def main(argv: list[str]) -> None:
    """Run the command."""
    parser, number = Parser(prog="tokenformer-vit benchmark", description=__doc__), whole_number(1)
    add = parser.add_argument
    add("--model", default="tokenformer_base_matched", metavar="NAME", help="default: %(default)s")
    add("--baseline", default="vit_base_patch16_224", metavar="NAME", help=f"also {MATCHED}")
    add("--img-size", type=number, default=224, metavar="S", help="default: %(default)s")
    add("--lm", choices=LM_PRESETS, metavar="PRESET", help=f"one of {', '.join(LM_PRESETS)}")
    add("--num-tokens", type=whole_number(2), metavar="N", help="default: the context length")
    add("--positions", choices=["learned", "rotary"], default="learned", help="of the Transformer")
    add("--modes", nargs="+", metavar="MODE", help="default: all modes")
    add("--precisions", nargs="+", choices=PRECISIONS, default=[*PRECISIONS], help="default: all")
    add("--batch-sizes", nargs="+", type=number, metavar="B", help="default: 4 to 128, by device")
    add("--rounds", type=number, default=11, metavar="N", help="default: %(default)s")
    add("--depth", type=number, metavar="N", help="blocks; default: the depth of each model")
    add("--device", type=device, default="auto", help="default: cuda if it is there, else cpu")
    add("--out", type=Path, metavar="FILE", help="default: work_dirs/speed_MODEL_DEVICE.json")
    add("--eager", action="store_true", help="compile nothing: no C++ compiler, no ratios")
    add("--draw", type=Path, metavar="RECORD", help="only draw a record's chart, by matplotlib")
    add("--profile", action="store_true", help="print the kernels of the first group")
    args = parser.parse_args(argv)
    if os.environ.get("TORCHDYNAMO_DISABLE") == "1" and not args.eager:
        parser.error("TORCHDYNAMO_DISABLE=1 disables torch.compile; unset it, or give --eager")
    if args.draw:
        reports.draw(read_json(args.draw), args.draw.with_suffix(".png"))
        print(f"Done. Chart: {args.draw.with_suffix('.png')}")
        return
    subject, models = _language(args) if args.lm else _images(args)
    modes = args.modes or subject.modes
    if unknown := {*modes}.difference(subject.modes):
        raise InputError(f"--modes {min(unknown)}: choose from {', '.join(subject.modes)}")
    few, many = (1, 8) if args.lm else (4, 128)
    sizes = args.batch_sizes or [few if args.device.type == "cpu" else many]
    groups = list(itertools.starmap(Group, itertools.product(modes, args.precisions, sizes)))
    if args.profile:
        found = variants(groups[0], args.eager)
        for variant in [each for each in found if each.compiled] or found:
            print(f"{variant}\n{benchmark.profile_step(subject, args.device, groups[0], variant)}")
        return
    record = reports.new_record(subject, {**models, "n": args.rounds}, args.device.type)
    out = args.out or Path("work_dirs", f"speed_{args.lm or args.model}_{args.device.type}.json")
    out.parent.mkdir(parents=True, exist_ok=True)
    for group in groups:
        found = variants(group, args.eager)
        entry = benchmark.measure_group(subject, args.device, group, found, args.rounds)
        reports.add_figures(entry, record)
        record["groups"].append(entry)
        write_record(out, record)
        print(f"{reports.table(entry, subject.unit)}\n", flush=True)
    print(f"Done. Record: {out}. For a chart: tokenformer-vit benchmark --draw {out}")


def _images(args: argparse.Namespace) -> tuple[benchmark.Images, dict[str, Any]]:
    """Return the models for images, and their entries in the record."""
    every = [*timm.list_models(), MATCHED]
    for name, known in ((args.model, timm.list_models("tokenformer*")), (args.baseline, every)):
        if name.partition(".")[0] not in known:
            close = get_close_matches(name, known)
            raise InputError(f"there is no model {name!r} to measure; close names are {close}")
    subject = benchmark.Images(args.model, args.baseline, args.img_size, args.depth)
    return subject, subject._asdict()


def _language(args: argparse.Namespace) -> tuple[benchmark.Language, dict[str, Any]]:
    """Return the models for language, and their entries in the record."""
    from tokenformer_vit import language  # needs transformers

    config = lm_config(args.lm, **({"depth": args.depth} if args.depth else {}))
    tokens = args.num_tokens or config.context_length
    if tokens > config.context_length:
        raise InputError(f"--num-tokens {tokens}: {args.lm} takes at most {config.context_length}")
    subject = benchmark.Language(
        lambda: language.TokenFormerForCausalLM(language.TokenFormerConfig(**asdict(config))),
        lambda: language.matched_transformer(config, args.positions),
        config.vocab_size,
        tokens,
    )
    baseline = "transformer" + ", rotary" * (args.positions == "rotary")
    models = {"model": args.lm, "baseline": baseline, "depth": args.depth, "num_tokens": tokens}
    return subject, {**models, "config": asdict(config)}
