"""Count the parameters and training FLOPs of each part of a TokenFormer and of a Transformer.

    tokenformer-vit costs --model tokenformer_large --against vit_large_patch16_224 --tokens 577
    tokenformer-vit costs --model-kwargs num_ffn_param_tokens=1536 --json
    tokenformer-vit costs --lm 150m --tokens 1024

Without --against, the Transformer has the same width and depth, and as many weights in its blocks.
Training takes three times the forward FLOPs. As in Table 3 of the paper, only products count.
"""

import argparse
import json
import warnings
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from tokenformer_vit.benchmarking.costs import PARTS, model_costs, total
from tokenformer_vit.benchmarking.matched import matched_vit
from tokenformer_vit.errors import InputError
from tokenformer_vit.models import LM_PRESETS, TokenFormerLM, TokenFormerViT, lm_config
from tokenformer_vit.models.checkpoints import load_model

from .arguments import KEY_VALUES, Parser, whole_number


def main(argv: list[str]) -> None:
    """Run the command."""
    parser = Parser(prog="tokenformer-vit costs", description=__doc__)
    add, name = parser.add_argument, "timm model name, or local-dir:FOLDER"
    add("--model", metavar="NAME", help=f"{name}; default: tokenformer_base")
    add("--model-kwargs", **KEY_VALUES, help="its arguments, such as img_size=384")
    add("--against", metavar="NAME", help=name)
    add("--against-kwargs", **KEY_VALUES, help="its arguments")
    add("--lm", metavar="PRESET|FOLDER", help="language model: preset, or folder of transformers")
    add("--tokens", type=whole_number(1), metavar="N", help="default: an image, the whole context")
    add("--json", action="store_true", help="print the counts as JSON")
    args = parser.parse_args(argv)
    if args.lm and (args.model or args.against):
        parser.error("--lm cannot be combined with --model or --against")
    if args.against_kwargs and not args.against:
        parser.error("--against-kwargs needs --against NAME")
    names, models = _language(args.lm) if args.lm else _vision(args)
    costs = [model_costs(model, args.tokens) for model in models]
    costs = [{**each, "total": total(each)} for each in costs]
    if args.json:
        records = [{"model": name, **each} for name, each in zip(names, costs, strict=True)]
        print(json.dumps(records, default=asdict))
        return
    item = "sequence" if args.lm else "image"
    print(f"Parameters, and training GFLOPs per {item}: {names[0]} (left) and {names[1]} (right)")
    print(f"{'part':24}", f"{'parameters':>16}{'GFLOPs':>14}" * 2, sep="")
    for part, label in {**PARTS, "total": "total"}.items():
        pair = [each[part] for each in costs]
        cells = [f"{cost.parameters:16,}{cost.training_flops / 1e9:14,.3f}" for cost in pair]
        print(f"{label:24}", *cells, sep="")


def _vision(args: argparse.Namespace) -> tuple[list[str], list[Any]]:
    """Return the names of two vision models, and the models."""
    name = args.model or "tokenformer_base"
    with torch.device("meta"), warnings.catch_warnings():
        # The weights of an exported folder are not needed.
        warnings.filterwarnings("ignore", ".*to a meta parameter")
        model = load_model(name, None, **args.model_kwargs)
        if args.against:
            other = load_model(args.against, None, **args.against_kwargs)
            return [name, args.against], [model, other]
        if not isinstance(model, TokenFormerViT):
            raise InputError(f"{name} is not a TokenFormer: give the other model with --against")
        vit, hidden = matched_vit(model)
    return [name, f"ViT, {hidden} hidden"], [model, vit]


def _language(name: str) -> tuple[list[str], list[Any]]:
    """Return the names of a language model and its matched Transformer, and the models."""
    from tokenformer_vit import language  # needs transformers

    if name in LM_PRESETS:
        config = lm_config(name)
    elif Path(name, "config.json").is_file():
        config = language.TokenFormerConfig.from_pretrained(name)
    else:
        raise InputError(f"there is no preset or folder {name}; choose of {', '.join(LM_PRESETS)}")
    model = TokenFormerLM(config, device="meta")
    with torch.device("meta"):
        transformer = language.matched_transformer(config)
    return [name, f"Transformer, {transformer.config.n_inner} hidden"], [model, transformer]
