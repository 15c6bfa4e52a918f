"""Convert a ViT of timm to a TokenFormer with the same outputs, compare the two, grow it; seconds.

Run it by ``python examples/from_vit.py``.
"""

import timm
import torch

from tokenformer_vit.growth import grow
from tokenformer_vit.models import from_vit


@torch.no_grad()
def main() -> None:
    """Print how far the outputs of a TokenFormer are from those of its ViT."""
    vit = timm.create_model("vit_tiny_patch16_224", depth=4).eval()
    for parameter in vit.parameters():  # untrained biases are 0, and norms do nothing
        parameter += 0.02 * torch.randn_like(parameter)
    images = torch.randn(4, 3, 224, 224)
    expected = vit(images)
    model = from_vit(vit)  # type: ignore[arg-type]
    print(f"converted: relative error {(model(images) - expected).norm() / expected.norm():.1e}")
    grow(model, 512, 512, 1024)  # pairs of q, k and v; of the output; of the feed-forward part
    print(f"grown: relative error {(model(images) - expected).norm() / expected.norm():.1e}")


if __name__ == "__main__":
    main()
