"""Measure what a rewrite of the core must keep, and compare it with a record.

``python tests/baseline.py PART [PART ...] [--record FILE]`` prints parts as JSON, or adds them to a
file; baseline.json is that of da6feacf, with which errors and classes are compared. Times are only
comparable within an hour: run two versions in turn, each with its checkout as PYTHONPATH. Parts:

- errors: relative errors of each Θ, output and gradients, against float64;
- classes: what both shipped models predict for the 10,000 test images of CIFAR-10;
- speed: training and inference on a CPU, compiled, relative to a ViT of the same size;
- decoding: time of a token of the language model ``tiny``, relative to a Transformer;
- calls: Python functions of this package that a block calls, forward and in a training step;
- training: ``cifar10_micro_50k`` with three seeds: top-1 and images a second (10 minutes or more).
"""

import argparse
import io
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import timm
import torch
from timm.layers import set_fused_attn
from timm.models.vision_transformer import VisionTransformer

import tokenformer_vit
from tokenformer_vit.models import compile_blocks
from tokenformer_vit.models.compilation import blocks_of
from tokenformer_vit.ops import THETAS, default_tau, pattention
from tokenformer_vit.records import environment

RECORD = Path(__file__).with_suffix(".json")
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
NAMES = ("output", "x", "keys", "values", "tau")
ROUNDS = 11


def ratios_in_turn(models: list, time_of: Callable[..., float], rounds: int) -> list[float]:
    """Time two models in turn; return the sorted ratios of the second's time to the first's."""
    ratios = []
    for round_ in range(rounds + 2):
        order = models if round_ % 2 else models[::-1]
        times = {id(model): time_of(model) for model in order}
        ratios.append(times[id(models[1])] / times[id(models[0])])
    return sorted(ratios[2:])  # the first two are warm-up


def measure_errors() -> dict[str, dict[str, dict[str, float]]]:
    """Return relative errors by Θ and dtype: over 64 draws, of outputs and gradients."""
    return {
        theta: {name: theta_errors(theta, dtype) for name, dtype in DTYPES.items()}
        for theta in THETAS
    }


def theta_errors(theta: str, dtype: torch.dtype, draws: int = 64) -> dict[str, float]:
    """Return the relative errors of one Θ in one dtype; inputs are drawn in that dtype."""
    names = NAMES if THETAS[theta].norm_order else NAMES[:-1]  # else τ has no gradient
    wrong, size = dict.fromkeys(names, 0.0), dict.fromkeys(names, 0.0)
    for seed in range(draws):
        random = torch.Generator().manual_seed(seed)
        shapes = [(256, 96), (384, 96), (384, 96), (256, 96)]
        x, keys, values, grad = (torch.randn(shape, generator=random) for shape in shapes)
        drawn = [each.to(dtype) for each in (x, keys / 96**0.5, values, grad)]
        exact = outputs_and_gradients([each.double() for each in drawn], theta)
        for name, ours, truth in zip(
            names, outputs_and_gradients(drawn, theta), exact, strict=True
        ):
            wrong[name] += float((ours.double() - truth).square().sum())
            size[name] += float(truth.square().sum())
    return {name: (wrong[name] / size[name]) ** 0.5 for name in names}


def outputs_and_gradients(drawn: list[torch.Tensor], theta: str) -> list[torch.Tensor]:
    """Return the output of one layer and the gradients of its inputs and τ."""
    tau = torch.tensor(default_tau(theta, 384))
    leaves = [each.clone().requires_grad_() for each in (*drawn[:3], tau)]
    output = pattention(*leaves[:3], theta, leaves[3])
    leaves = leaves if THETAS[theta].norm_order else leaves[:3]
    return [output.detach(), *torch.autograd.grad(output, leaves, drawn[3])]


@torch.no_grad()
def measure_classes() -> dict[str, str]:
    """Return the classes of CIFAR-10's test images, a digit each, by model."""
    from PIL import Image
    from pyarrow import parquet

    folder = Path(os.environ["TOKENFORMER_TEST_DATA"], "cifar10/plain_text")
    (file,) = folder.glob("test-*.parquet")
    rows = [each["bytes"] for each in parquet.read_table(file)[0].to_pylist()]
    found = {}
    for name in ("tokenformer_cifar10_micro", "tokenformer_cifar10_stem"):
        model = timm.create_model(name, pretrained=True).eval()
        transform = timm.data.create_transform(**timm.data.resolve_model_data_config(model))
        images = torch.stack([transform(Image.open(io.BytesIO(row))) for row in rows])
        classes = torch.cat([model(part).argmax(1) for part in images.split(250)])
        found[name] = "".join(map(str, classes.tolist()))
    return found


def measure_speed() -> dict[str, dict[str, float]]:
    """Return the median ratio of the ViT's time to ours, 1 for as fast, by case and mode."""
    micro = {"img_size": 32, "patch_size": 8, "embed_dim": 96, "depth": 4, "num_heads": 3}
    base = {"depth": 2, "num_classes": 10}
    own, vit = "tokenformer_base_matched", {**micro, "num_classes": 10}
    return {
        "base_matched, 2 blocks, float32": compare(own, base, base, 4, False),
        "base_matched, 2 blocks, bfloat16": compare(own, base, base, 4, True),
        "cifar10_micro, float32": compare("tokenformer_cifar10_micro", {}, vit, 64, False),
    }


def compare(name: str, own: dict, vit: dict, batch: int, bfloat16: bool) -> dict[str, float]:
    """Time a TokenFormer and a ViT in turn, both compiled by block with the same attention."""
    set_fused_attn(not bfloat16)  # products are faster in bfloat16 on a CPU; for both models
    torch.manual_seed(0)
    torch._dynamo.reset()
    models = [timm.create_model(name, **own), VisionTransformer(**vit)]
    size = models[0].patch_embed.img_size
    images = torch.randn(batch, 3, *size)
    for model in models:
        compile_blocks(model)

    def step(model: torch.nn.Module, train: bool) -> float:
        model.train(train)
        begin = time.perf_counter()
        autocast = torch.autocast("cpu", torch.bfloat16, enabled=bfloat16)
        with torch.set_grad_enabled(train), autocast:
            output = model(images)
        if train:
            output.float().square().mean().backward()
            model.zero_grad()
        return time.perf_counter() - begin

    result = {}
    for mode, train in (("train", True), ("inference", False)):
        ordered = ratios_in_turn(models, lambda m, t=train: min(step(m, t), step(m, t)), ROUNDS)
        result[mode] = statistics.median(ordered)
        result[f"{mode} p20"], result[f"{mode} p80"] = ordered[2], ordered[-3]
    return {key: round(value, 3) for key, value in result.items()}


@torch.no_grad()
def measure_decoding() -> dict[str, float]:
    """Return the median time of 32 greedy tokens relative to a GPT-NeoX of the same size."""
    from transformers import GPTNeoXConfig, GPTNeoXForCausalLM

    from tokenformer_vit.language import TokenFormerConfig, TokenFormerForCausalLM

    torch.manual_seed(0)
    shape = {"vocab_size": 512, "num_hidden_layers": 4, "num_attention_heads": 4}
    names = {"embed_dim": 128, "depth": 4, "num_heads": 4, "context_length": 256}
    ours = TokenFormerForCausalLM(TokenFormerConfig(vocab_size=512, **names)).eval()
    shape |= {"hidden_size": 128, "intermediate_size": 1024}  # as many weights in a block
    neox = GPTNeoXConfig(**shape, max_position_embeddings=256, use_parallel_residual=False)
    models = [ours, GPTNeoXForCausalLM(neox).eval()]
    prompt = torch.randint(512, (1, 32))
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # more threads do not help a single token

    def decode(model: torch.nn.Module) -> float:
        output, token = model(prompt, use_cache=True), prompt[:, -1:]
        name = "cache" if "cache" in output else "past_key_values"  # of transformers
        cache = output[name]
        begin = time.perf_counter()
        for _ in range(32):
            output = model(token, use_cache=True, **{name: cache})
            token = output.logits[:, -1].argmax(-1, keepdim=True)
        return time.perf_counter() - begin

    ratios = ratios_in_turn(models[::-1], decode, 2 * ROUNDS - 2)
    torch.set_num_threads(threads)
    return {"ours / Transformer": round(statistics.median(ratios), 3)}


def count_calls() -> dict[str, int]:
    """Return how many Python functions of this package one block calls."""
    block = blocks_of(timm.create_model("tokenformer_tiny", img_size=32))[0]
    x = torch.randn(2, 5, 192, requires_grad=True)
    own, calls = str(Path(tokenformer_vit.__file__).parent), [0]

    def trace(frame, event, arg):
        calls[-1] += event == "call" and frame.f_code.co_filename.startswith(own)

    block(x)
    for step in (lambda: block.eval()(x), lambda: block.train()(x).sum().backward()):
        calls.append(0)
        with torch.set_grad_enabled(len(calls) > 2):
            sys.setprofile(trace)
            step()
            sys.setprofile(None)
    return dict(zip(("forward", "training step"), calls[1:], strict=True))


def measure_training() -> dict[str, list[float]]:
    """Train cifar10_micro_50k with three seeds, from the parquet files of CIFAR-10."""
    command = [sys.executable, "-m", "tokenformer_vit"]
    found = {"top-1": [], "images/s": []}
    with tempfile.TemporaryDirectory() as folder:
        data = Path(os.environ["TOKENFORMER_TEST_DATA"], "cifar10")
        subprocess.run([*command, "prepare-data", data, f"{folder}/data"], check=True)
        for seed in range(3):
            train = [*command, "train", "configs/cifar10_micro_50k.py", "--seed", str(seed)]
            train += ["--data-root", f"{folder}/data", "--work-dir", f"{folder}/{seed}"]
            subprocess.run(train, check=True)
            record = json.loads(Path(folder, str(seed), "record.json").read_text(encoding="utf-8"))
            found["top-1"].append(record["accuracy/top1"])
            (log,) = Path(folder, str(seed)).glob("*/vis_data/scalars.json")
            lines = map(json.loads, log.read_text(encoding="utf-8").splitlines())
            speeds = [line["images/s"] for line in lines if "images/s" in line]
            found["images/s"].append(round(statistics.median(speeds)))
    return found


def compare_with_record(measured: dict) -> None:
    """Say how errors and classes differ from the record."""
    known = json.loads(RECORD.read_text(encoding="utf-8"))
    relative = [
        (error / known["errors"][theta][dtype][name], theta, dtype, name)
        for theta in known["errors"].keys() & measured.get("errors", {}).keys()
        for dtype in DTYPES
        for name, error in measured["errors"][theta][dtype].items()
    ]
    if relative:
        print(f"largest error relative to the record: {max(relative)}")
    if "classes" in measured:
        for model, classes in measured["classes"].items():
            other = sum(a != b for a, b in zip(classes, known["classes"][model], strict=True))
            print(f"{model}: other classes than the record: {other} of {len(classes)}")


PARTS = {
    "errors": measure_errors,
    "classes": measure_classes,
    "speed": measure_speed,
    "decoding": measure_decoding,
    "calls": count_calls,
    "training": measure_training,
}


def main() -> None:
    """Measure the parts that the command line names."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("parts", nargs="+", choices=[*PARTS])
    parser.add_argument("--record", type=Path, help="file to add the measurements to")
    args = parser.parse_args()
    measured = {part: PARTS[part]() for part in args.parts}
    print(json.dumps({k: v for k, v in measured.items() if k != "classes"}, indent=1))
    if args.record:
        old = json.loads(args.record.read_text()) if args.record.exists() else {}
        about = {**environment("cpu"), "threads": torch.get_num_threads()}
        args.record.write_text(json.dumps({**old, "about": about, **measured}) + "\n")
    elif RECORD.exists():
        compare_with_record(measured)


if __name__ == "__main__":
    main()
