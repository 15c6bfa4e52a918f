"""Quantise the parameter tokens of a trained model to 8 bits for prediction. Needs torchao.

``quantize_`` of torchao looks for linear layers, so keys and values become the weights of two.
"""

import timm
import torch
from torch import Tensor, nn
from torchao.quantization import Int8WeightOnlyConfig, quantize_  # pyright: ignore

from tokenformer_vit.layers import Pattention
from tokenformer_vit.ops import find_theta


class LinearPattention(nn.Module):
    """Pattention for prediction, with 8-bit linear layers in place of keys and values."""

    def __init__(self, layer: Pattention) -> None:
        super().__init__()
        keys, values, self.tau, score_bias = layer.used_tokens()  # τ stays as it is
        self.weights, self.eps = find_theta(layer.theta).weights, layer.eps
        self.keys, self.values = linear(keys, score_bias), linear(values.T, layer.bias)
        quantize_(self, Int8WeightOnlyConfig(set_inductor_config=False))

    def forward(self, x: Tensor) -> Tensor:
        """Map (..., C_in) tokens to (..., C_out)."""
        return self.values(self.weights(self.keys(x), self.tau, self.eps).to(x.dtype))


def linear(weight: Tensor, bias: Tensor | None) -> nn.Linear:
    """Return a linear layer with copies of a (C_out, C_in) weight and of a bias."""
    layer = nn.Linear(weight.shape[1], weight.shape[0], bias=bias is not None)
    state = {"weight": weight} | ({} if bias is None else {"bias": bias})
    copies = {name: tensor.detach().clone() for name, tensor in state.items()}
    layer.load_state_dict(copies, assign=True)
    return layer.requires_grad_(False)


@torch.no_grad()
def main() -> None:
    """Compare the outputs of the model in the package before and after."""
    model = timm.create_model("tokenformer_cifar10_micro", pretrained=True).eval()
    images = torch.randn(64, 3, 32, 32)
    before = model(images)
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if isinstance(child, Pattention):
                setattr(parent, name, LinearPattention(child))
    print(f"change of the outputs: {(model(images) - before).norm() / before.norm():.2%}")


if __name__ == "__main__":
    main()
