"""A decoding step: what it calls, that it is exact, and that no change of a model is overlooked."""

import pytest
import torch
from tokenformer_vit.layers.segments import split_tokens
from torch import nn
from torch.nn.utils import prune
from torch.nn.utils.parametrize import register_parametrization
from torch.utils._python_dispatch import TorchDispatchMode

from tokenformer_vit.growth import grow
from tokenformer_vit.layers import Pattention
from tokenformer_vit.models import LMConfig, TokenFormerLM
from tokenformer_vit.models.causal_block import KVCache
from tokenformer_vit.ops import THETAS, fused, norm, pattention_reference

SHAPE = {"vocab_size": 61, "context_length": 24, "embed_dim": 32, "num_heads": 2}
# Operations of PyTorch in a block, views included: ten products, three Θ of seven operations,
# two norms, rotation, cache and attention. Under autocast Θ also casts scores and weights.
MOST_OPERATIONS = {False: 74, True: 80}


class Operations(TorchDispatchMode):
    """List the operations of PyTorch."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


def build(depth=2, **changes):
    return TokenFormerLM(LMConfig(**{**SHAPE, **changes}, depth=depth)).eval()


def tokens(length, batch=1):
    return torch.randint(SHAPE["vocab_size"], (batch, length))


@torch.no_grad()
def step(model, autocast=False):
    """Return the operations of one decoding step."""
    cache = KVCache()
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        for length in (5, 1):
            model(tokens(length), cache=cache)
        with Operations() as operations:
            model(tokens(1), cache=cache)
    return operations.names


@pytest.mark.parametrize("autocast", [False, True])
def test_a_layer_takes_few_operations(autocast):
    names, more = (step(build(depth), autocast) for depth in (2, 3))
    assert len(more) - len(names) <= MOST_OPERATIONS[autocast]


def test_tokens_are_cast_once_for_all_steps():
    def casts(model):
        return step(model, autocast=True).count("_to_copy")

    small, large = build(1), build(1)
    for layer in small.modules():
        if isinstance(layer, Pattention):
            layer.requires_grad_(False)  # autocast keeps no casts of these
    assert casts(small) - casts(large) == 2 * 5


def test_no_autograd_function_without_a_gradient(monkeypatch):
    called = []
    for function in (fused._Pattention, norm._Norm):
        apply = function.apply
        monkeypatch.setattr(
            function, "apply", lambda *args, own=apply: called.append(own) or own(*args)
        )
    model = build()
    step(model)
    assert not called
    model(tokens(3))
    assert len(called) == 2 * 5 + 2 * 2


@pytest.mark.parametrize("theta", THETAS)
@torch.no_grad()
def test_steps_agree_with_float64(theta):
    model, prompt = build(theta=theta), tokens(9, batch=2)
    exact = build(theta=theta).double()
    exact.load_state_dict(model.state_dict())
    for layer in exact.modules():
        if hasattr(layer, "backend"):
            layer.backend = "reference"
    expected, cache = exact(prompt), KVCache()
    found = torch.cat([model(token, cache=cache) for token in prompt.split(1, dim=1)], dim=1)
    torch.testing.assert_close(found.double(), expected, rtol=1e-4, atol=1e-5)


def edit_keys(layer):
    layer.key_param_tokens.mul_(1.5)
    layer.key_param_tokens[0] = 0


def edit_data(layer):
    layer.value_param_tokens.data = torch.randn_like(layer.value_param_tokens)


def replace(layer):
    layer.value_param_tokens = nn.Parameter(torch.randn_like(layer.value_param_tokens))


def load(layer):
    other = Pattention(8, 6, 12, tau=2.0)
    layer.load_state_dict(other.state_dict())


def assign(layer):
    layer.load_state_dict(Pattention(8, 6, 12, tau=2.0).state_dict(), assign=True)


def fewer_pairs(layer):
    layer.size = 7


def mask(layer):
    layer.active = torch.tensor([1, 4, 5, 11])


def another_tau(layer):
    layer.tau.fill_(0.7)


def another_eps(layer):
    layer.eps = 0.5


def another_theta(layer):
    layer.theta = "softmax"


def another_dtype(layer):
    layer.double()


def split(layer):
    split_tokens(layer, 8)


def parametrize(layer):
    class Double(nn.Module):
        def forward(self, tensor):
            return 2 * tensor

    register_parametrization(layer, "value_param_tokens", Double())


def prune_values(layer):
    prune.random_unstructured(layer, "value_param_tokens", amount=0.5)


@pytest.mark.parametrize(
    "change",
    [
        *(edit_keys, edit_data, replace, load, assign, fewer_pairs, mask, another_tau),
        *(another_eps, another_theta, another_dtype, split, parametrize, prune_values),
    ],
)
@pytest.mark.parametrize("learned", [False, True])
@torch.no_grad()
def test_the_next_call_sees_a_change(change, learned):
    layer, x = Pattention(8, 6, 12, learn_tau=learned), torch.randn(1, 1, 8)
    before = layer(x)
    change(layer)
    x = x.to(layer.key_param_tokens.dtype)
    used = slice(layer.size) if layer.active is None else layer.active
    keys, values = layer.key_param_tokens[used], layer.value_param_tokens[used]
    tau = layer.tau if layer.size is None else layer.tau_of(layer.size)
    after, scale = layer(x), (layer.theta, tau, layer.eps)
    expected = pattention_reference(x, keys, values, *scale)
    torch.testing.assert_close(after, expected)
    if change not in (another_dtype, split):
        assert not torch.allclose(after, before, rtol=1e-3)


@torch.no_grad()
def test_the_next_step_sees_growth():
    model = build()
    step(model)
    grow(model, 40, 40, 150, init="random")
    twin = TokenFormerLM(model.config).eval()
    twin.load_state_dict(model.state_dict())
    prompt = tokens(9)
    assert torch.equal(model(prompt), twin(prompt))
    assert model.blocks[0].attn.query.num_used == 40
