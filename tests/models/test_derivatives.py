"""Second derivatives and forward mode of layers and whole models, against finite differences."""

import pytest
import timm
import torch
import torch.nn.functional as F
from torch.func import functional_call, grad, jvp, vmap

import tokenformer_vit  # noqa: F401
from tokenformer_vit.layers import Pattention
from tokenformer_vit.models import compile_blocks
from tokenformer_vit.ops import THETAS

STEP = 1e-8
# PyTorch's fused attention has no second derivative.
pytestmark = pytest.mark.usefixtures("plain_attention")


def double(net):
    """Cast also τ, which a cast of a layer leaves in float32."""
    for layer in net.double().modules():
        if isinstance(layer, Pattention):
            layer.tau.data = layer.tau.data.double()
    return net


def small(theta="gelu_l2", **kwargs):
    arguments = {"embed_dim": 16, "depth": 2, "num_heads": 2, "img_size": 16, "patch_size": 8}
    shared = {"learn_tau": THETAS[theta].norm_order > 0}
    arguments |= {"theta": theta, "pattention_args": shared, "num_classes": 5, **kwargs}
    return double(timm.create_model("tokenformer_tiny", **arguments))


def images():
    return torch.randn(3, 3, 16, 16, dtype=torch.float64, requires_grad=True)


def trained(net):
    return {name: tensor for name, tensor in net.named_parameters() if tensor.requires_grad}


def output(net, x):
    torch.manual_seed(0)  # drop the same units at each call
    return net(x)


def gradients(net, x, create_graph=False):
    loss = F.log_softmax(output(net, x), dim=-1).pow(3).sum()
    return torch.autograd.grad(loss, [*trained(net).values(), x], create_graph=create_graph)


def hessian_vector_product(net, x, directions):
    pairs = zip(gradients(net, x, create_graph=True), directions, strict=True)
    net.zero_grad()
    x.grad = None
    sum((slope * direction).sum() for slope, direction in pairs).backward()
    return [*(parameter.grad for parameter in trained(net).values()), x.grad]


def forward_mode(net, x, directions):
    def function(parameters, x):
        return output(lambda x: functional_call(net, parameters, (x,)), x)

    parameters = {name: tensor.detach() for name, tensor in trained(net).items()}
    tangents = dict(zip(parameters, directions[:-1], strict=True))
    return jvp(function, (parameters, x.detach()), (tangents, directions[-1]))[1]


def error(ours, expected):
    ours, expected = (torch.cat([each.flatten() for each in some]) for some in (ours, expected))
    return ((ours - expected).norm() / expected.norm()).item()


def check(net):
    """Compare Hessian-vector products and forward mode with central differences.

    Once in thousands of draws a kink of |gelu| or ReLU lies between the two points: two draws.
    """
    errors = [largest_error(net, images()) for _ in range(2)]
    assert min(errors) < 1e-5, errors


def largest_error(net, x):
    leaves = [*trained(net).values(), x]
    directions = [torch.randn_like(leaf) for leaf in leaves]

    def move(size):
        with torch.no_grad():
            for leaf, direction in zip(leaves, directions, strict=True):
                leaf += size * direction
        return [*gradients(net, x), output(net, x).detach()]

    after, before, _ = move(STEP), move(-2 * STEP), move(STEP)
    *products, change = [(a - b) / (2 * STEP) for a, b in zip(after, before, strict=True)]
    forward = error([forward_mode(net, x, directions)], [change])
    return max(forward, error(hessian_vector_product(net, x, directions), products))


@pytest.mark.parametrize("stem", ["patch", "conv"])
@pytest.mark.parametrize("theta", THETAS)
def test_of_models(theta, stem):
    check(small(theta, stem=stem))


@pytest.mark.parametrize("checkpointing", [False, True])
def test_with_dropout_checkpointing_and_a_frozen_layer_between_trained_ones(checkpointing):
    net = small(proj_drop_rate=0.2, attn_drop_rate=0.1, drop_path_rate=0.3).train()
    net.set_grad_checkpointing(checkpointing)
    net.blocks[1].mlp.requires_grad_(False)
    check(net)


def test_compiled_blocks_have_exact_ones_or_raise():
    """Code of AOTAutograd raises; after a transform the compiler leaves blocks to eager code.

    ``backend="eager"``, for debugging, is not here: PyTorch then gives wrong second derivatives of
    every autograd function that keeps more than its inputs, such as an exponential.
    """
    net, x = small(), images()
    directions = [torch.randn_like(leaf) for leaf in (*net.parameters(), x)]
    torch.compiler.reset()
    compile_blocks(net, backend="aot_eager")
    with pytest.raises(RuntimeError, match="not currently support double backward"):
        hessian_vector_product(net, x, directions)
    torch.compiler.reset()
    forward_mode(net, x, directions)
    check(net)


def test_of_single_samples():
    for net, x in ((small(stem=stem), images().detach()) for stem in ("patch", "conv")):

        def loss(parameters, x, net=net):
            return functional_call(net, parameters, (x[None],)).pow(3).sum()

        each = vmap(grad(loss), (None, 0))(dict(net.named_parameters()), x)
        for sample in range(3):
            net.zero_grad()
            net(x[sample : sample + 1]).pow(3).sum().backward()
            own = [of[sample] for of in each.values()]
            assert error(own, [p.grad for p in net.parameters()]) < 1e-9
