"""Count the parameters and training FLOPs of each part of a TokenFormer and of a Transformer.

    tokenformer-vit costs --model tokenformer_large --against vit_large_patch16_224 --tokens 577
    tokenformer-vit costs --lm 150m --tokens 1024

Without --against, the Transformer has the same width and depth, and as many weights in its blocks.
Training takes three times the forward FLOPs. As in Table 3 of the paper, only products count.
"""

import json
import warnings
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from tokenformer_vit.benchmarking.costs import model_costs, total
from tokenformer_vit.benchmarking.matched import matched_vit
from tokenformer_vit.errors import InputError
from tokenformer_vit.models import LM_PRESETS, lm_config
from tokenformer_vit.models.checkpoints import load_model

from .arguments import KEY_VALUES, Parser, whole_number


def main(argv: list[str]) -> None:
    """Run the command."""
    parser = Parser(prog="tokenformer-vit costs", description=__doc__)
    add, name = parser.add_argument, "timm model name, or local-dir:FOLDER"
    add("--model", metavar="NAME", help=f"{name}; default: tokenformer_base")
    add("--model-kwargs", **KEY_VALUES, help="its arguments, such as img_size=384")
    add("--against", metavar="NAME", help=name)
    add("--lm", metavar="PRESET|FOLDER", help="language model: preset, or folder of transformers")
    add("--tokens", type=whole_number(1), metavar="N", help="default: an image, the whole context")
    add("--json", action="store_true", help="print the counts as JSON")
    args = parser.parse_args(argv)
    if args.lm and (args.model or args.against):
        parser.error("--lm cannot be combined with --model or --against")
    costs: list[dict[str, Any]] = []
    with torch.device("meta"), warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*to a meta parameter")  # weights of exported folders
        for name, model in _models(args):
            parts = model_costs(model, args.tokens)
            costs.append({"model": name, **parts, "total": total(parts)})
    if args.json:
        print(json.dumps(costs, default=asdict))
        return
    names = " and, on the right, ".join(each.pop("model") for each in costs)
    print(f"Parameters and training GFLOPs of {names}")
    for part in costs[0]:
        pair = [each[part] for each in costs]
        cells = [f"{cost.parameters:16,}{3e-9 * cost.forward_flops:14,.3f}" for cost in pair]
        print(f"{part:14}", *cells, sep="")


def _models(args: Any) -> list[tuple[str, Any]]:
    """Return two models with their names."""
    if name := args.lm:
        from tokenformer_vit import language  # needs transformers

        if name not in LM_PRESETS and not Path(name, "config.json").is_file():
            raise InputError(f"no preset or folder {name}; choose of {', '.join(LM_PRESETS)}")
        if name in LM_PRESETS:
            config = language.TokenFormerConfig(**vars(lm_config(name)))
        else:
            config = language.TokenFormerConfig.from_pretrained(name)
        model: Any = language.TokenFormerForCausalLM(config)
        other: Any = language.matched_transformer(config)
        return [(name, model), (f"GPT-2, {other.config.n_inner} hidden", other)]
    name = args.model or "tokenformer_base"
    model = load_model(name, None, **dict(args.model_kwargs))
    if args.against:
        return [(name, model), (args.against, load_model(args.against, None))]
    vit, hidden = matched_vit(model)
    return [(name, model), (f"ViT, {hidden} hidden", vit)]
