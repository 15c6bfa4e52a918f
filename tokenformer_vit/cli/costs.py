"""Show what every part of a TokenFormer costs beside a Transformer: parameters and training FLOPs.

Nothing is computed with the models, so that their size does not matter::

    python tools/costs.py
    python tools/costs.py --model tokenformer_large --against vit_large_patch16_224 --tokens 577
    python tools/costs.py --model-kwargs num_ffn_param_tokens=1536 --json
    python tools/costs.py --model local-dir:work_dirs/grown --plot lengths.png
    python tools/costs.py --lm 150m --tokens 1024

Without ``--against`` the Transformer is that of the same width and depth (and vocabulary) with as
many weights in its blocks. With ``--lm`` they are language models.

FLOPs are those of one image or sequence, a multiplication and an addition being two; training takes
three times the forward. Those of Θ and other activations, softmax, norms, biases and sums are left
out, as in Table 3 of the paper (arXiv:2410.23168); tokenformer_vit/benchmarking/costs.py has the
formulas.
"""

import argparse
import json
import sys
import warnings
from collections.abc import Sequence
from dataclasses import asdict
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import timm
import torch
from rich.console import Console
from rich.table import Table
from rich.text import Text
from torch import nn

from tokenformer_vit.benchmarking.costs import PARTS, Cost, model_costs, total
from tokenformer_vit.benchmarking.lengths import draw_lengths
from tokenformer_vit.benchmarking.matched import matched_vit
from tokenformer_vit.command_line import whole_number
from tokenformer_vit.errors import InputError
from tokenformer_vit.models import LM_PRESETS, TokenFormerLM, TokenFormerViT, lm_config
from tokenformer_vit.models.checkpoints import load_model

from .arguments import KeyValues

MODEL = "tokenformer_base"


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command."""
    args = parse(argv)
    names, models = build_language(args.lm) if args.lm else build_vision(args)
    costs = [model_costs(model, args.tokens) for model in models]
    if args.plot:
        asked = args.lm or args.model or args.against
        lengths = range(1024, 32 * 1024 + 1, 1024) if args.lm or not asked else range(64, 4097, 64)
        drawn = dict(zip(names, models, strict=True)) if asked else None
        try:
            draw_lengths(args.plot, drawn, lengths)
        except ImportError as error:
            raise InputError("--plot needs matplotlib: pip install matplotlib") from error
        what = ", ".join(names) if asked else "the paper's growing language models"
        print(f"chart: {args.plot}, of {what}", file=sys.stderr)
    if args.json:
        print(json.dumps([as_json(name, each) for name, each in zip(names, costs, strict=True)]))
    else:
        item = "a sequence" if args.lm else "an image"
        Console().print(as_table(names, costs, item))


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for option, default in (
        ("model", MODEL),
        ("against", "the ViT of the same width and depth with as many weights"),
    ):
        parser.add_argument(
            f"--{option}",
            metavar="NAME",
            help=f"timm model name, or local-dir:FOLDER; default: {default}",
        )
        parser.add_argument(
            f"--{option}-kwargs",
            nargs="+",
            action=KeyValues,
            default={},
            metavar="KEY=VALUE",
            help=f"arguments of --{option}, such as img_size=384 or num_classes=0",
        )
    parser.add_argument(
        "--lm",
        metavar="PRESET|FOLDER",
        help="a language model instead: one of the presets, or a folder that save_pretrained wrote",
    )
    parser.add_argument(
        "--tokens",
        type=whole_number(1),
        metavar="N",
        help="tokens of a sequence, class token included; default: as many as each model makes of "
        "an image, or the whole context",
    )
    parser.add_argument("--json", action="store_true", help="print the counts as JSON")
    parser.add_argument(
        "--plot",
        type=Path,
        metavar="FILE.png",
        help="also draw cost against sequence length, of the models that are named; without any, "
        "of the paper's growing language models",
    )
    args = parser.parse_args(argv)
    if args.lm and (args.model or args.against):
        parser.error("--lm is instead of --model and --against")
    if args.against_kwargs and not args.against:
        parser.error("--against-kwargs needs --against NAME")
    return args


def build_vision(args: argparse.Namespace) -> tuple[list[str], list[nn.Module]]:
    """Build the model that was named and the one that it is compared with, with their names.

    Raises:
        InputError: If there is no such model, or none to compare it with.
    """
    name = args.model or MODEL
    model = build(name, args.model_kwargs)
    if args.against:
        return [name, args.against], [model, build(args.against, args.against_kwargs)]
    if not isinstance(model, TokenFormerViT):
        raise InputError(f"{name} is no TokenFormer: name what it is compared with by --against")
    vit, hidden = matched_vit(model)
    return [name, f"ViT, {hidden} hidden"], [model, vit]


def build(name: str, kwargs: dict[str, Any]) -> nn.Module:
    """Build a model of which only the sizes are real.

    Raises:
        InputError: If there is no such model, or not with these arguments.
    """
    if not name.startswith("local-dir:") and not timm.is_model(name):
        close = get_close_matches(name, timm.list_models(), n=3) or timm.list_models("tokenformer*")
        raise InputError(f"there is no model {name!r}; did you mean {', '.join(close)}?")
    with torch.device("meta"), warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*to a meta parameter")  # exported weights: not needed
        return load_model(name, None, **kwargs)


def build_language(name: str) -> tuple[list[str], list[nn.Module]]:
    """Build a language model and the Transformer that is its match, with their names.

    Raises:
        InputError: If there is no such preset or folder, or no such Transformer.
    """
    from tokenformer_vit import language  # says why, if transformers is missing

    if name in LM_PRESETS:
        config = lm_config(name)
        model = TokenFormerLM(config, device="meta")
    elif Path(name).is_dir():
        model = language.load_language_model(Path(name))
        config = model.config.lm_config()
    else:
        raise InputError(
            f"there is no folder {name}, nor a preset of this name; choose one of "
            f"{', '.join(LM_PRESETS)}, or give a folder that save_pretrained wrote"
        )
    with torch.device("meta"):
        transformer = language.matched_transformer(config)
    return [name, f"Transformer, {transformer.config.n_inner} hidden"], [model, transformer]


def as_json(name: str, costs: dict[str, Cost]) -> dict[str, Any]:
    """List the counts of a model, by part and in all."""
    counts = {
        part: {**asdict(cost), "training_flops": cost.training_flops}
        for part, cost in {**costs, "total": total(costs)}.items()
    }
    return {"model": name, **counts}


def as_table(names: Sequence[str], costs: Sequence[dict[str, Cost]], item: str) -> Table:
    """Lay the counts of two models out side by side."""
    title = "Parameters, and GFLOPs to train on {}: {} (left) and {} (right)"
    table = Table("part", title=Text(title.format(item, *names), "bold"), show_footer=True)
    table.columns[0].footer = "total"
    for each in costs:
        parameters, flops = figures(total(each))
        table.add_column("parameters", parameters, justify="right")
        table.add_column("GFLOPs", flops, justify="right")
    for part, label in PARTS.items():
        table.add_row(label, *(cell for each in costs for cell in figures(each[part])))
    return table


def figures(cost: Cost) -> tuple[str, str]:
    """Write out the parameters of a part and the GFLOPs of its training."""
    return f"{cost.parameters:,}", f"{cost.training_flops / 1e9:,.3f}"
