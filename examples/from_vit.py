"""Convert a ViT of timm to a TokenFormer with the same outputs, compare them, and convert it back.

Run it by ``python examples/from_vit.py``; it takes seconds.
"""

from typing import Any

import timm
import torch
from timm.utils import reparameterize_model

from tokenformer_vit.growth import grow
from tokenformer_vit.models import from_vit, to_vit


@torch.no_grad()
def main() -> None:
    """Print how far the outputs of each model are from those of the ViT, and its parameters."""
    vit: Any = timm.create_model("vit_tiny_patch16_224", depth=4).eval()
    for parameter in vit.parameters():  # untrained biases are 0, and norms do nothing
        parameter += 0.02 * torch.randn_like(parameter)
    images = torch.randn(4, 3, 224, 224)  # a few hundred real ones order the pairs of q, k, v, o
    expected = vit(images)

    def show(name: str, model: Any) -> None:
        error = (model(images) - expected).norm() / expected.norm()
        count = sum(parameter.numel() for parameter in model.parameters())
        print(f"{name}: {count:,} parameters, relative error {error:.1e}")

    show("ViT", vit)
    model = from_vit(vit, images)
    show("converted", model)
    show("fused for inference", reparameterize_model(model))
    grow(model, num_ffn_param_tokens=1024)
    show("grown", model)
    show("a ViT again", to_vit(model))


if __name__ == "__main__":
    main()
