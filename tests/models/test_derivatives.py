"""Second derivatives and forward mode of layers and whole models, against finite differences."""

import pytest
import timm
import torch
import torch.nn.functional as F
from timm.layers import set_fused_attn
from torch import nn
from torch.func import functional_call, grad, jvp, vmap

import tokenformer_vit  # noqa: F401
from tokenformer_vit.layers import BlockLayerNorm, Pattention
from tokenformer_vit.models import compile_blocks
from tokenformer_vit.ops import THETAS

STEP = 1e-6


@pytest.fixture(autouse=True)
def _attention_by_products():
    torch.compiler.reset()
    set_fused_attn(False)  # PyTorch's fused attention has no second derivative
    yield
    set_fused_attn(True)


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


def output(net, x):
    torch.manual_seed(0)  # drop the same units at each call
    return net(x)


def gradients(net, x, create_graph=False):
    loss = F.log_softmax(output(net, x), dim=-1).pow(3).sum()
    return torch.autograd.grad(loss, [*net.parameters(), x], create_graph=create_graph)


def hessian_vector_product(net, x, directions, way):
    leaves = [*net.parameters(), x]
    pairs = zip(gradients(net, x, create_graph=True), directions, strict=True)
    total = sum((slope * direction).sum() for slope, direction in pairs)
    if way == "grad":
        return torch.autograd.grad(total, leaves)
    for leaf in leaves:
        leaf.grad = None
    total.backward()
    return [leaf.grad for leaf in leaves]


def forward_mode(net, x, directions):
    def function(parameters, x):
        return output(lambda x: functional_call(net, parameters, (x,)), x)

    parameters = {name: tensor.detach() for name, tensor in net.named_parameters()}
    tangents = dict(zip(parameters, directions[:-1], strict=True))
    return jvp(function, (parameters, x.detach()), (tangents, directions[-1]))[1]


def close(ours, expected):
    ours, expected = (torch.cat([each.flatten() for each in some]) for some in (ours, expected))
    assert (ours - expected).norm() < 1e-5 * expected.norm()


def check(net, x):
    """Compare Hessian-vector products and forward mode with central differences."""
    leaves = [*net.parameters(), x]
    directions = [torch.randn_like(leaf) for leaf in leaves]

    def moved(size):
        """Return gradients and output with all leaves at another place."""
        with torch.no_grad():
            torch._foreach_add_(leaves, directions, alpha=size)
        found = [*gradients(net, x), output(net, x).detach()]
        with torch.no_grad():
            torch._foreach_add_(leaves, directions, alpha=-size)
        return found

    pairs = zip(moved(STEP), moved(-STEP), strict=True)
    *products, change = [(after - before) / (2 * STEP) for after, before in pairs]
    for way in ("grad", "backward"):
        close(hessian_vector_product(net, x, directions, way), products)
    close([forward_mode(net, x, directions)], [change])


@pytest.mark.parametrize("theta", THETAS)
def test_of_models(theta):
    for stem in ("patch", "conv"):
        check(small(theta, stem=stem), images())


@pytest.mark.parametrize("checkpointing", [False, True])
def test_with_dropout_and_gradient_checkpointing(checkpointing):
    net = small(proj_drop_rate=0.2, attn_drop_rate=0.1, drop_path_rate=0.3).train()
    net.set_grad_checkpointing(checkpointing)
    check(net, images())


@pytest.mark.parametrize("way", ["grad", "backward"])
@pytest.mark.parametrize("transformed_before", [False, True])
def test_compiled_blocks_have_exact_ones_or_raise(way, transformed_before):
    """Code of AOTAutograd raises; after a transform the compiler leaves blocks to eager code.

    ``backend="eager"``, for debugging, is not here: PyTorch then gives wrong second derivatives of
    every autograd function that keeps more than its inputs, such as an exponential.
    """
    net, x = small(), images()
    directions = [torch.randn_like(leaf) for leaf in (*net.parameters(), x)]
    expected = [each.clone() for each in hessian_vector_product(net, x, directions, way)]
    expected_forward = forward_mode(net, x, directions)
    compile_blocks(net, backend="aot_eager")
    if transformed_before:
        close([forward_mode(net, x, directions)], [expected_forward])
        close(hessian_vector_product(net, x, directions, way), expected)
    else:
        with pytest.raises(RuntimeError, match="not currently support double backward"):
            hessian_vector_product(net, x, directions, way)


def test_of_a_gradient_penalty_through_a_frozen_layer():
    net = double(nn.Sequential(nn.Linear(6, 6), BlockLayerNorm(6), Pattention(6, 5, 7)))
    net[2].requires_grad_(False)
    x = torch.randn(3, 6).double().requires_grad_()

    def penalty(weight):
        y = net[2](net[1](F.linear(x, weight)))
        return torch.autograd.grad(y.pow(2).sum(), x, create_graph=True)[0].square().sum()

    assert torch.autograd.gradcheck(penalty, net[0].weight)


def test_of_second_order_maml():
    net = double(Pattention(6, 5, 7, learn_tau=True))
    first, second = torch.randn(2, 3, 6).double()
    names, parameters = zip(*net.named_parameters(), strict=True)

    def outer(*parameters):
        named = dict(zip(names, parameters, strict=True))
        inner = functional_call(net, named, (first,)).square().sum()
        slopes = torch.autograd.grad(inner, parameters, create_graph=True)
        fast = {n: p - 0.1 * s for (n, p), s in zip(named.items(), slopes, strict=True)}
        return functional_call(net, fast, (second,)).square().sum()

    assert torch.autograd.gradcheck(outer, parameters)


@pytest.mark.parametrize("stem", ["patch", "conv"])
def test_of_single_samples(stem):
    net, x = small(stem=stem), images().detach()
    parameters = {name: parameter.detach() for name, parameter in net.named_parameters()}

    def loss(parameters, x):
        return functional_call(net, parameters, (x[None],)).pow(3).sum()

    together = vmap(grad(loss), (None, 0))(parameters, x)
    for sample in range(3):
        net.zero_grad()
        net(x[sample : sample + 1]).pow(3).sum().backward()
        close([each[sample] for each in together.values()], [p.grad for p in net.parameters()])
