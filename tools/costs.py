"""Show what every part of a TokenFormer costs beside a Transformer: parameters and training FLOPs.

Nothing is computed with the models, so that their size does not matter::

    python tools/costs.py
    python tools/costs.py --model tokenformer_large --against vit_large_patch16_224 --tokens 577
    python tools/costs.py --model-kwargs num_ffn_param_tokens=1536 --json
    python tools/costs.py --model local-dir:work_dirs/grown --plot lengths.png

FLOPs are those of one image, a multiplication and an addition being two; training takes three times
the forward. Those of Θ and other activations, softmax, norms, biases and sums are left out, as in
Table 3 of the paper (arXiv:2410.23168); tokenformer_vit/benchmarking/costs.py has the formulas.
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
from tokenformer_vit.command_line import run_tool, whole_number
from tokenformer_vit.errors import InputError
from tokenformer_vit.prediction import KeyValues, load_model


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command."""
    args = parse(argv)
    names = [args.model, args.against]
    costs = [
        model_costs(build(name, kwargs), args.tokens)
        for name, kwargs in zip(names, (args.model_kwargs, args.against_kwargs), strict=True)
    ]
    if args.plot:
        try:
            draw_lengths(args.plot)
        except ImportError as error:
            raise InputError("--plot needs matplotlib: pip install matplotlib") from error
        print(f"chart: {args.plot}", file=sys.stderr)
    if args.json:
        print(json.dumps([as_json(name, each) for name, each in zip(names, costs, strict=True)]))
    else:
        Console().print(as_table(names, costs))


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for option, default in (("model", "tokenformer_base"), ("against", "vit_base_patch16_224")):
        parser.add_argument(
            f"--{option}",
            default=default,
            metavar="NAME",
            help="timm model name, or local-dir:FOLDER; default: %(default)s",
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
        "--tokens",
        type=whole_number(1),
        metavar="N",
        help="tokens of an image, class token included; default: as many as each model makes",
    )
    parser.add_argument("--json", action="store_true", help="print the counts as JSON")
    parser.add_argument(
        "--plot",
        type=Path,
        metavar="FILE.png",
        help="also draw cost against sequence length, for the paper's growing language models",
    )
    return parser.parse_args(argv)


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


def as_json(name: str, costs: dict[str, Cost]) -> dict[str, Any]:
    """List the counts of a model, by part and in all."""
    counts = {
        part: {**asdict(cost), "training_flops": cost.training_flops}
        for part, cost in {**costs, "total": total(costs)}.items()
    }
    return {"model": name, **counts}


def as_table(names: Sequence[str], costs: Sequence[dict[str, Cost]]) -> Table:
    """Lay the counts of two models out side by side."""
    title = "Parameters, and GFLOPs to train on an image: {} (left) and {} (right)"
    table = Table("part", title=Text(title.format(*names), "bold"), show_footer=True)
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


if __name__ == "__main__":
    run_tool(main)
