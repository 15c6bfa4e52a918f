"""Measure the rounding errors of 8-bit products in Pattention, and count what they could save.

Needs no GPU::

    python -m tokenformer_vit.benchmarking.fp8 --out RECORD.json

``errors`` has the relative error, ‖result - exact‖ / ‖exact‖, of the output and the gradients of
each kind of layer, of a block, and of all blocks of ``tokenformer_base_matched``. Exact is the
reference in float64. Layers get the inputs and gradients that they have in the first block.
Parameter tokens are fresh, the inputs of blocks have unit RMS, and the size of the gradient varies
between tokens by a log-normal factor. An entry is bfloat16 autocast, the backend ``fp8`` under it,
or an emulation of another choice of formats, which rounds to 8 bits and back and multiplies in
float32.

``savings`` counts the milliseconds that all Pattention layers of a model need for the
forward and the backward pass of a batch. A product takes the longer of two times: that of its
FLOPs, and that of its bytes. Everything else takes the time of its bytes, if each fused kernel
reads and writes each tensor once. ``step_ms`` is a whole training step at the assumed ``mfu``.
"""

import argparse
import shlex
import sys
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import timm
import torch
from torch import Tensor, nn

from tokenformer_vit.command_line import run_tool
from tokenformer_vit.layers import BlockNorm, Pattention
from tokenformer_vit.models import TokenFormerLM, lm_config
from tokenformer_vit.ops import THETAS
from tokenformer_vit.records import environment, write_record

from .costs import training_flops

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
MODEL, IMAGES, SEED = "tokenformer_base_matched", 4, 0
IMAGE_MODELS = ("tokenformer_base_matched", "tokenformer_large_matched")
LANGUAGE_MODELS = ("450m", "1.5b")
ROWS = 128 * 197  # tokens in a step
LENGTHS = {**dict.fromkeys(IMAGE_MODELS, 197), **dict.fromkeys(LANGUAGE_MODELS, 1024)}
# An H100: 75 % of its dense rates, 90 % of its bandwidth.
RATES = {"bfloat16_tflops": 742, "fp8_tflops": 1484, "copy_gb_per_s": 3015}
PEAK_TFLOPS, MFU = 989, 0.4  # in bfloat16; of a step
LAYERS = {"attn.query": "q, k, v", "attn.proj": "output projection", "mlp": "feed-forward"}


class Formats(NamedTuple):
    """Formats of the emulated products; weights and inputs are always E4M3.

    Args:
        gradients: Format of gradients, scaled a tensor at a time.
        all_six: Whether the gradients of parameter tokens are also 8-bit products.
        dynamic: Whether inputs and weights are scaled by their largest number.
    """

    gradients: torch.dtype = E4M3
    all_six: bool = False
    dynamic: bool = False


EMULATED = {
    "E4M3, emulated": Formats(),
    "inputs and weights scaled by their largest number": Formats(dynamic=True),
    "gradients in E5M2": Formats(E5M2),
    "gradients of parameter tokens also in 8 bits": Formats(all_six=True),
    "both of the last two": Formats(E5M2, all_six=True),
}


def rounded(tensor: Tensor, dtype: torch.dtype, dynamic: bool = True) -> Tensor:
    """Round to ``dtype`` and back; first scale so that the largest number is the format's."""
    most = torch.finfo(dtype).max
    scale = most / tensor.abs().max() if dynamic else 1.0
    return (tensor * scale).clamp(-most, most).to(dtype).float() / scale


def emulate(formats: Formats, layer: Pattention, x: Tensor, grad: Tensor) -> list[Tensor]:
    """Return output and gradients of a layer, with the products of ``formats``.

    Products are summed in float32 and rounded to bfloat16, as are inputs and Θ.

    Args:
        formats: Formats of the operands.
        layer: Layer with float32 parameters.
        x: (R, C_in) inputs.
        grad: (R, C_out) gradient of the output.

    Returns:
        Output, gradients of inputs, keys and values.
    """
    kernels = THETAS[layer.theta].kernels
    assert kernels is not None
    activation = partial(rounded, dtype=E4M3, dynamic=formats.dynamic)
    gradient = partial(rounded, dtype=formats.gradients)
    keys, values = (rounded(each.detach(), E4M3) for each in layer.parameters())
    x, grad = x.bfloat16().float(), grad.bfloat16().float()
    scores = (activation(x) @ keys.t()).bfloat16()
    weights, kept = kernels.forward(scores, layer.tau, layer.eps)
    output = activation(weights.float()) @ values
    grad_weights = (gradient(grad) @ values.t()).bfloat16()
    again, grad_scores = (
        each.float() for each in kernels.backward(kept, layer.tau, grad_weights)[:2]
    )
    grad_x = gradient(grad_scores) @ keys
    if formats.all_six:
        x, again = activation(x), activation(again)
        grad, grad_scores = gradient(grad), gradient(grad_scores)
    return [each.bfloat16() for each in (output, grad_x, grad_scores.t() @ x, again.t() @ grad)]


def computed(
    module: nn.Module, backend: str, x: Tensor, grad: Tensor, autocast: bool = True
) -> list[Tensor]:
    """Return the output of a module by a backend, and the gradients of input and parameters."""
    for each in module.modules():
        if isinstance(each, BlockNorm | Pattention):
            each.backend = backend
    x = x.detach().requires_grad_()
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        output = module(x)
    return [output, *torch.autograd.grad(output, [x, *module.parameters()], grad.to(output.dtype))]


def relative_error(results: Iterable[Tensor], exact: Iterable[Tensor]) -> float:
    """Return ‖results - exact‖ / ‖exact‖ of several tensors together."""
    one, other = (torch.cat([t.double().flatten() for t in each]) for each in (results, exact))
    return float(f"{((one - other).norm() / other.norm()).item():.4g}")


def errors() -> Iterator[dict[str, Any]]:
    """Yield the errors of layers and blocks; the module's description explains them."""
    torch.manual_seed(SEED)
    model: Any = timm.create_model(MODEL, num_classes=0)
    blocks = model.blocks.double()
    x = torch.randn(IMAGES, model.patch_embed.num_patches + 1, model.embed_dim).double()
    grad = torch.randn_like(x) * torch.randn(*x.shape[:-1], 1).exp() * 1e-4
    seen: dict[str, list[Tensor]] = {}
    hooks = []
    for name, words in LAYERS.items():
        layer = blocks[0].get_submodule(name)
        hooks += [
            layer.register_forward_hook(lambda _, i, o, w=words: seen.update({w: [i[0].detach()]})),
            layer.register_full_backward_hook(lambda _, i, o, w=words: seen[w].append(o[0])),
        ]
    computed(blocks[0], "reference", x, grad, autocast=False)
    for hook in hooks:
        hook.remove()
    for name, words in LAYERS.items():
        layer = blocks[0].get_submodule(name)
        inputs, gradient = (each.flatten(0, -2) for each in seen[words])
        yield from _errors(words, layer, inputs, gradient)
    yield from _errors("block", blocks[0], x, grad)
    yield from _errors(f"{len(blocks)} blocks", blocks, x, grad)


def _errors(words: str, module: nn.Module, x: Tensor, grad: Tensor) -> Iterator[dict[str, Any]]:
    exact = computed(module.double(), "reference", x, grad, autocast=False)
    x, grad = x.float(), grad.float()
    module.float()
    ways = {"bfloat16": "fused", "backend fp8": "fp8"}
    results = {name: computed(module, backend, x, grad) for name, backend in ways.items()}
    if isinstance(module, Pattention):
        results |= {name: emulate(how, module, x, grad) for name, how in EMULATED.items()}
    # After output and input come the keys and values of each layer.
    parts = {"output": slice(1), "x": slice(1, 2), "keys": slice(2, None, 2)}
    parts["values"] = slice(3, None, 2)
    for name, tensors in results.items():
        each = {part: relative_error(tensors[at], exact[at]) for part, at in parts.items()}
        yield {"of": words, "computed": name, **each}


def layer_seconds(rows: int, width: int, pairs: int, fp8: bool) -> float:
    """Count the seconds that a Pattention layer takes in a training step.

    Args:
        rows: Number of tokens.
        width: C, of inputs and outputs.
        pairs: P.
        fp8: Whether four products are of 8-bit numbers.
    """
    rate = {2: RATES["bfloat16_tflops"] * 1e12, 1: RATES["fp8_tflops"] * 1e12}
    copy, tokens = RATES["copy_gb_per_s"] * 1e9, rows * width

    def product(operand_bytes: int, left: int, right: int, result: int) -> float:
        moved = operand_bytes * (left + right) + 2 * result
        return max(2 * rows * width * pairs / rate[operand_bytes], moved / copy)

    scores, parameters, item = rows * pairs, pairs * width, 1 if fp8 else 2
    seconds = product(item, tokens, parameters, scores) + product(item, scores, parameters, tokens)
    seconds *= 2  # the gradients of weights and inputs
    seconds += 2 * product(2, scores, tokens, parameters)
    # Θ reads scores and writes weights; its backward reads two tensors and writes two.
    moved = (2 + item) * scores + 8 * scores
    moved += (4 + 2) * 2 * parameters  # keys and values: casts
    if fp8:
        moved += (2 + 1) * tokens  # inputs
        # The largest number of a tensor is needed before the tensor can be scaled.
        moved += (2 + 2 + 1) * tokens + (2 + 1) * scores  # gradients of outputs and scores
        moved += (4 - 1 + 2) * 2 * parameters  # a second read, 8 bits, a transposed copy
    return seconds + moved / copy


def savings() -> Iterator[dict[str, Any]]:
    """Yield the counted times of models; the module's description explains them."""
    with torch.device("meta"):
        models: dict[str, Any] = {name: timm.create_model(name) for name in IMAGE_MODELS}
        models |= {name: TokenFormerLM(lm_config(name)) for name in LANGUAGE_MODELS}
    for name, model in models.items():
        layers = [each for each in model.modules() if isinstance(each, Pattention)]
        seconds = [
            sum(
                layer_seconds(ROWS, each.in_features, each.num_param_tokens, fp8) for each in layers
            )
            for fp8 in (False, True)
        ]
        seconds.append(
            training_flops(model, LENGTHS[name]) * ROWS / LENGTHS[name] / (MFU * PEAK_TFLOPS * 1e12)
        )
        keys = ("bfloat16_ms", "fp8_ms", "step_ms")
        yield {
            "model": name,
            "width": layers[0].in_features,
            **{key: round(1e3 * each, 2) for key, each in zip(keys, seconds, strict=True)},
        }


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=Path("work_dirs/fp8.json"), help="record")
    args = parser.parse_args(argv)
    words = ["python", "-m", "tokenformer_vit.benchmarking.fp8", *sys.argv[1:]]
    record = {
        "command": shlex.join(words),
        **environment(("torch", "timm"), "cpu"),
        "model": MODEL,
        "images": IMAGES,
        "seed": SEED,
        "errors": list(errors()),
        "assumed": {**RATES, "peak_tflops": PEAK_TFLOPS, "mfu": MFU},
        "tokens": ROWS,
        "savings": list(savings()),
    }
    args.out.parent.mkdir(parents=True, exist_ok=True)
    write_record(args.out, record)
    for entry in (*record["errors"], *record["savings"]):
        print(*entry.values(), sep=", ")


if __name__ == "__main__":
    run_tool(main)
