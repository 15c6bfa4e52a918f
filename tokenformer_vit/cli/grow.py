"""Append pairs to a trained model without changing its outputs.

From an exported folder, a checkpoint of any TokenFormer, or a model in this package, to a new
folder::

    tokenformer-vit grow work_dirs/run work_dirs/run_grown --ffn 3072 --qkv 768 --proj 768
    tokenformer-vit grow checkpoint.pth grown --model tokenformer_base --ffn 6144
    tokenformer-vit grow tokenformer_cifar10_micro grown --ffn 768

The numbers are the new numbers of pairs in each layer. The paper's growth series keeps
qkv = proj = ffn / 4.
"""

import copy
from pathlib import Path

import torch

from tokenformer_vit.errors import InputError
from tokenformer_vit.growth import INITS, grow
from tokenformer_vit.models import TokenFormerViT
from tokenformer_vit.models.checkpoints import load_model, save_model

from .arguments import MODEL_KWARGS, Parser, whole_number

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
    what = "gate of new pairs under softmax (default with zero_key)"
    add("--gate", choices=("learned",), help=what)
    add("--nested", action="store_true", help="keep the present size as a nested size")
    add("--seed", type=whole_number(0), default=0, help="seed of random numbers")
    add("--model", metavar="NAME", help="timm model of the checkpoint")
    add("--model-kwargs", **MODEL_KWARGS)
    args = parser.parse_args(argv)
    counts = {f"num_{name}_param_tokens": getattr(args, name) for name in _LAYERS}
    if not any(counts.values()):
        parser.error("give a new number of pairs: --qkv, --proj or --ffn")
    if args.target.exists():
        raise InputError(f"{args.target} already exists; choose another OUT, or remove it")
    model = load_model(args.model, args.source, **args.model_kwargs)
    if not isinstance(model, TokenFormerViT):
        raise InputError(f"{args.source} is a {type(model).__name__}; only a TokenFormer can grow")
    before = copy.deepcopy(model)
    grow(model, **counts, init=args.init, gate=args.gate, nested=args.nested, seed=args.seed)
    new = f"start as {args.init}; not trained since"
    save_model(
        model, args.target, facts={"Growth": {"Grown from": args.source.name, "New pairs": new}}
    )
    old, now = (sum(p.numel() for p in each.parameters()) for each in (before, model))
    gated = any(name.endswith(".gate") for name in model.state_dict())
    print(
        f"{old:,} -> {now:,} parameters; on random images the output changed by "
        f"{_change(before, model):.1e}, relative to its largest entry\n"
        f"Done. To continue training, set load_from={args.target}/model.safetensors and the new "
        "numbers of pairs"
        + " and pattention_args=dict(gate='learned')" * gated
        + (f" and nested={list(model.sizes[:-1])}" if len(model.sizes) > 1 else "")
        + " in the config"
    )


@torch.inference_mode()
def _change(before: TokenFormerViT, after: TokenFormerViT) -> float:
    size = before.patch_embed.img_size
    images = torch.randn(2, before.in_chans, *size, generator=torch.Generator().manual_seed(0))
    old, new = before.eval()(images), after.eval()(images)
    return ((new - old).abs().max() / old.abs().max()).item()
