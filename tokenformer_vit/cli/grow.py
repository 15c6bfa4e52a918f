"""Append pairs to a trained model without changing its outputs.

From an exported folder, a checkpoint of any TokenFormer, or a model in this package::

    tokenformer-vit grow work_dirs/run work_dirs/run_grown --ffn 3072 --qkv 768 --proj 768
    tokenformer-vit grow checkpoint.pth grown --model tokenformer_base --ffn 6144
    tokenformer-vit grow tokenformer_cifar10_micro grown --ffn 768

The numbers are the new numbers of pairs in each layer. The paper's growth series keeps
qkv = proj = ffn / 4.
"""

import copy
from pathlib import Path
from typing import Any

from tokenformer_vit.errors import InputError
from tokenformer_vit.growth import INITS, grow
from tokenformer_vit.models.checkpoints import load_model, save_model
from tokenformer_vit.models.conversion import compare_outputs, noise_images
from tokenformer_vit.models.sizes import layer_arguments

from .arguments import KEY_VALUES, Parser, whole_number

_LAYERS = {"qkv": "query, key and value", "proj": "output", "ffn": "feed-forward"}


def main(argv: list[str]) -> None:
    """Run the command line."""
    parser = Parser(prog="tokenformer-vit grow", description=__doc__)
    add = parser.add_argument
    add("source", type=Path, metavar="IN", help="exported folder, file, or model")
    add("target", type=Path, metavar="OUT", help="folder, which must not exist")
    for name, what in _LAYERS.items():
        add(f"--{name}", type=whole_number(1), metavar="PAIRS", help=f"pairs of each {what} layer")
    add("--init", choices=INITS, default="zero_key", help="default: zero_key")
    add("--nested", action="store_true", help="keep the present size as a nested size")
    add("--seed", type=whole_number(0), default=0, help="seed of random numbers")
    add("--model", metavar="NAME", help="timm model of the checkpoint")
    add("--model-kwargs", **KEY_VALUES, help="its arguments")
    args = parser.parse_args(argv)
    counts = {f"num_{name}_param_tokens": getattr(args, name) for name in _LAYERS}
    if not any(counts.values()):
        parser.error("give a new number of pairs: --qkv, --proj or --ffn")
    if args.target.exists():
        raise InputError(f"{args.target} already exists; choose another OUT, or remove it")
    model: Any = load_model(args.model, args.source, **dict(args.model_kwargs))
    before = copy.deepcopy(model)
    grow(model, **counts, init=args.init, nested=args.nested, seed=args.seed)
    compare_outputs(model, before, [noise_images(before, 2)], "images of noise")
    facts = {"Grown from": args.source.name, "New pairs": f"{args.init}; not trained since"}
    save_model(model, args.target, facts={"Growth": facts})
    settings, now = ["the new numbers of pairs"], layer_arguments(model, None)
    settings += [f"{name}={[*now[name]]}" for name in ("nested", "nested_kinds") if now[name]]
    print(f"Done. To train further, set load_from={args.target}/model.safetensors in the config,")
    print(f"and {', '.join(settings)}")
