"""Count the parameters and training FLOPs of each part of a TokenFormer and of a Transformer.

The models are built without weights: large ones need no memory::

    tokenformer-vit costs
    tokenformer-vit costs --model tokenformer_large --against vit_large_patch16_224 --tokens 577
    tokenformer-vit costs --model-kwargs num_ffn_param_tokens=1536 --json
    tokenformer-vit costs --model local-dir:work_dirs/grown
    tokenformer-vit costs --lm 150m --tokens 1024

Without ``--against``, the Transformer has the same width and depth, and as many weights in its
blocks. With ``--lm``, both are language models with the same vocabulary.

FLOPs are per image or per sequence. A multiplication and an addition are two FLOPs, and training
takes three times the forward FLOPs. As in Table 3 of the paper (arXiv:2410.23168), the FLOPs of Θ
and other activations, softmax, norms, biases and sums are not counted. The formulas are in
tokenformer_vit/benchmarking/costs.py.
"""

import argparse
import json
import warnings
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from rich.table import Table
from rich.text import Text
from torch import nn

from tokenformer_vit.benchmarking.costs import PARTS, Cost, model_costs, total
from tokenformer_vit.benchmarking.matched import matched_vit
from tokenformer_vit.command_line import command_parser, whole_number
from tokenformer_vit.errors import InputError
from tokenformer_vit.models import LM_PRESETS, TokenFormerLM, TokenFormerViT, lm_config
from tokenformer_vit.models.checkpoints import load_model

from .arguments import KeyValues
from .tables import print_table

_MODEL = "tokenformer_base"


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command."""
    args = parse(argv)
    names, models = _build_language(args.lm) if args.lm else _build_vision(args)
    costs = [model_costs(model, args.tokens) for model in models]
    if args.json:
        print(json.dumps([_as_json(name, each) for name, each in zip(names, costs, strict=True)]))
    else:
        item = "sequence" if args.lm else "image"
        print_table(_as_table(names, costs, item))


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line."""
    parser = command_parser(__doc__)
    add = parser.add_argument
    for option, default in (
        ("model", _MODEL),
        ("against", "the ViT of the same width and depth with as many weights"),
    ):
        add(
            f"--{option}",
            metavar="NAME",
            help=f"timm model name, or local-dir:FOLDER; default: {default}",
        )
        add(
            f"--{option}-kwargs",
            nargs="+",
            action=KeyValues,
            default={},
            metavar="KEY=VALUE",
            help=f"arguments of --{option}, such as img_size=384 or num_classes=0",
        )
    add(
        "--lm",
        metavar="PRESET|FOLDER",
        help="language model: a preset, or a folder that save_pretrained wrote",
    )
    add(
        "--tokens",
        type=whole_number(1),
        metavar="N",
        help="length of the sequence, with class token; default: the length for an image of each "
        "model's size, or the whole context",
    )
    add("--json", action="store_true", help="print the counts as JSON")
    args = parser.parse_args(argv)
    if args.lm and (args.model or args.against):
        parser.error("--lm cannot be combined with --model or --against")
    if args.against_kwargs and not args.against:
        parser.error("--against-kwargs needs --against NAME")
    return args


def _build_vision(args: argparse.Namespace) -> tuple[list[str], list[nn.Module]]:
    """Return the names of two vision models, and the models.

    Raises:
        InputError: If a model does not exist, or no ViT matches the model.
    """
    name = args.model or _MODEL
    model = _build(name, args.model_kwargs)
    if args.against:
        return [name, args.against], [model, _build(args.against, args.against_kwargs)]
    if not isinstance(model, TokenFormerViT):
        raise InputError(f"{name} is not a TokenFormer: give the other model with --against")
    with torch.device("meta"):
        vit, hidden = matched_vit(model)
    return [name, f"ViT, {hidden} hidden"], [model, vit]


def _build(name: str, kwargs: dict[str, Any]) -> nn.Module:
    """Build a model on the device ``meta``.

    Raises:
        InputError: If the model does not exist, or does not take these arguments.
    """
    with torch.device("meta"), warnings.catch_warnings():
        # The weights of an exported folder are not needed.
        warnings.filterwarnings("ignore", ".*to a meta parameter")
        return load_model(name, None, for_images=False, **kwargs)


def _build_language(name: str) -> tuple[list[str], list[nn.Module]]:
    """Return the names of a language model and its matched Transformer, and the models.

    Raises:
        InputError: If the preset or folder does not exist, or no Transformer matches.
    """
    from tokenformer_vit import language  # needs transformers

    if name in LM_PRESETS:
        config = lm_config(name)
        model = TokenFormerLM(config, device="meta")
    elif Path(name).is_dir():
        model = language.load_language_model(Path(name))
        config = model.config.lm_config()
    else:
        raise InputError(
            f"there is no preset or folder {name}; choose one of {', '.join(LM_PRESETS)}, or give "
            "a folder that save_pretrained wrote"
        )
    with torch.device("meta"):
        transformer = language.matched_transformer(config)
    return [name, f"Transformer, {transformer.config.n_inner} hidden"], [model, transformer]


def _as_json(name: str, costs: dict[str, Cost]) -> dict[str, Any]:
    """Return the counts of a model, by part and in total."""
    counts = {
        part: {**asdict(cost), "training_flops": cost.training_flops}
        for part, cost in {**costs, "total": total(costs)}.items()
    }
    return {"model": name, **counts}


def _as_table(names: Sequence[str], costs: Sequence[dict[str, Cost]], item: str) -> Table:
    """Lay out the counts of two models side by side."""
    title = "Parameters, and training GFLOPs per {}: {} (left) and {} (right)"
    table = Table("part", title=Text(title.format(item, *names), "bold"), show_footer=True)
    table.columns[0].footer = "total"
    for each in costs:
        parameters, flops = _figures(total(each))
        table.add_column("parameters", parameters, justify="right")
        table.add_column("GFLOPs", flops, justify="right")
    for part, label in PARTS.items():
        table.add_row(label, *(cell for each in costs for cell in _figures(each[part])))
    return table


def _figures(cost: Cost) -> tuple[str, str]:
    """Format the parameters and the training GFLOPs of a part."""
    return f"{cost.parameters:,}", f"{cost.training_flops / 1e9:,.3f}"
