"""Append pairs to a trained model without changing its outputs.

From an exported folder (model.safetensors and config.json) to a new one::

    tokenformer-vit grow work_dirs/run work_dirs/run_grown --ffn 3072 --qkv 768 --proj 768

From any checkpoint of a timm model::

    tokenformer-vit grow checkpoint.pth grown --model tokenformer_base --ffn 6144

From one file of tensors to another, for any model::

    tokenformer-vit grow checkpoint.pth grown.safetensors --ffn 6144 --theta gelu_l2

The numbers are the new numbers of pairs in each layer. The paper's growth series keeps
qkv = proj = ffn / 4. OUT is written whole or not at all.
"""

import argparse
import copy
from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors.torch import save_file

from tokenformer_vit.errors import InputError
from tokenformer_vit.files import new_folder
from tokenformer_vit.growth import INITS, grow, grow_state_dict
from tokenformer_vit.models import TokenFormerViT
from tokenformer_vit.models.checkpoints import (
    description_of,
    load_model,
    read_checkpoint,
    save_model,
    state_dict_in,
)
from tokenformer_vit.ops import THETAS

from .arguments import MODEL_KWARGS, Parser, whole_number

_FILE = ".safetensors"  # suffix of OUT, if it is a file of tensors


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command line."""
    args = _parse(argv)
    if args.target.exists():
        raise InputError(f"{args.target} already exists; choose another OUT, or remove it")
    how = {
        "num_qkv_param_tokens": args.qkv,
        "num_proj_param_tokens": args.proj,
        "num_ffn_param_tokens": args.ffn,
        "init": args.init,
        "gate": args.gate,
        "nested": args.nested,
        "seed": args.seed,
    }
    if args.target.suffix == _FILE:
        _grow_file(args, how)
    else:
        _grow_model(args, how)


def _grow_file(args: argparse.Namespace, how: dict) -> None:
    if args.theta is None:
        raise InputError(
            f"{args.target} is a file of tensors, which does not contain Θ: give --theta, or a "
            "folder as OUT"
        )
    if args.source.is_dir():
        raise InputError(
            f"{args.source} is a folder, but {args.target} is a file; give a folder as OUT"
        )
    if not args.source.is_file():
        raise InputError(f"there is no checkpoint file {args.source}")
    content = read_checkpoint(args.source)
    before = state_dict_in(content, args.source)
    described = description_of(args.source, content).get("model_args") or {}
    trained = described.get("theta", args.theta)
    if args.theta != trained:
        raise InputError(
            f"--theta is {args.theta}, but {args.source} was trained with {trained}: give "
            f"--theta {trained}"
        )
    after = grow_state_dict(
        before, **how, theta=args.theta, missing_tau=args.missing_tau or "error"
    )
    with new_folder(args.target.parent) as partial:
        save_file(after, partial / args.target.name, {"format": "pt"})
    counts = [sum(t.numel() for t in each.values()) for each in (before, after)]
    print(f"{counts[0]:,} -> {counts[1]:,} entries\nDone. In {args.target}: the grown state dict")


def _grow_model(args: argparse.Namespace, how: dict) -> None:
    model = load_model(args.model, args.source, **args.model_kwargs)
    if not isinstance(model, TokenFormerViT):
        raise InputError(f"{args.source} is a {type(model).__name__}; only a TokenFormer can grow")
    before = copy.deepcopy(model)
    grow(model, **how)
    history = {
        "Grown from": args.source.name,
        "New pairs": f"start as {args.init}; not trained since",
    }
    save_model(model, args.target, facts={"Growth": history})
    counts = [sum(p.numel() for p in each.parameters()) for each in (before, model)]
    gated = any(name.endswith(".gate") for name in model.state_dict())
    print(
        f"{counts[0]:,} -> {counts[1]:,} parameters; on random images the output changed by "
        f"{_change(before, model):.1e}, relative to its largest entry\n"
        f"Done. In {args.target}: model.safetensors, config.json and README.md. To continue "
        f"training, set load_from={args.target}/model.safetensors and the new numbers of pairs"
        + (" and pattention_args=dict(gate='learned')" if gated else "")
        + (f" and nested={list(model.sizes[:-1])}" if len(model.sizes) > 1 else "")
        + " in the config"
    )


@torch.inference_mode()
def _change(before: TokenFormerViT, after: TokenFormerViT) -> float:
    size = before.patch_embed.img_size
    images = torch.randn(2, before.in_chans, *size, generator=torch.Generator().manual_seed(0))
    old, new = before.eval()(images), after.eval()(images)
    return ((new - old).abs().max() / old.abs().max()).item()


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = Parser(prog="tokenformer-vit grow", description=__doc__)
    add = parser.add_argument
    add("source", type=Path, metavar="IN", help="exported folder, or checkpoint")
    add("target", type=Path, metavar="OUT", help="folder, or .safetensors file")
    for name, what in (
        ("qkv", "query, key and value"),
        ("proj", "output"),
        ("ffn", "feed-forward"),
    ):
        add(f"--{name}", type=whole_number(1), metavar="PAIRS", help=f"pairs of each {what} layer")
    add("--init", choices=INITS, default="zero_key", help="default: zero_key")
    add(
        "--gate",
        choices=("learned",),
        help="gate of new pairs under softmax (default with zero_key)",
    )
    add("--nested", action="store_true", help="keep the present size as a nested size")
    add("--seed", type=whole_number(0), default=0, help="seed of random numbers")
    add("--model", metavar="NAME", help="timm model of the checkpoint")
    add("--model-kwargs", **MODEL_KWARGS)
    add("--theta", choices=list(THETAS), help="Θ, for a file of tensors")
    add(
        "--missing-tau",
        choices=("error", "default"),
        help="if a file of tensors has no τ: stop (default), or take the default for its number of "
        "pairs",
    )
    args = parser.parse_args(argv)
    if not (args.qkv or args.proj or args.ffn):
        parser.error("give a new number of pairs: --qkv, --proj or --ffn")
    to_file = args.target.suffix == _FILE
    if to_file and (args.model or args.model_kwargs):
        parser.error(
            f"--model and --model-kwargs are for a folder as OUT, but {args.target} is a file of "
            "tensors, which needs --theta alone: leave them out, or give a folder"
        )
    if not to_file and (args.theta or args.missing_tau):
        parser.error(
            f"--theta and --missing-tau are for a file of tensors, but {args.target} is a folder, "
            f"whose model has its own Θ: leave them out, or give a file *{_FILE}"
        )
    return args
