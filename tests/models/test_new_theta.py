"""A new Θ needs only an entry in the table to work everywhere."""

import io
import warnings

import pytest
import torch
import torch.nn.functional as F
from timm.layers import set_scriptable

from tokenformer_vit.growth import grow
from tokenformer_vit.layers import Pattention
from tokenformer_vit.models.checkpoints import load_model, save_model
from tokenformer_vit.ops import THETAS
from tokenformer_vit.ops.theta import Theta


def relu_l1(scores: torch.Tensor, tau: torch.Tensor, eps: float) -> torch.Tensor:
    activation = F.relu(scores)
    return activation / (activation.sum(dim=-1, keepdim=True) / tau + eps)


@pytest.fixture(autouse=True)
def _entry(monkeypatch):
    monkeypatch.setitem(THETAS, "relu_l1", Theta(relu_l1, 1, False, torch.pi))


@pytest.fixture
def model(small):
    return small(theta="relu_l1")


@pytest.mark.parametrize("backend", ["auto", "reference"])
def test_layer(backend):
    layer = Pattention(256, 128, 576, theta="relu_l1", backend=backend)
    assert layer.tau == 576
    x = torch.randn(512, 256)
    scores = x @ layer.key_param_tokens.t()
    expected = relu_l1(scores, layer.tau, 1e-6) @ layer.value_param_tokens
    torch.testing.assert_close(layer(x), expected)
    assert layer(x).std().item() == pytest.approx(1, rel=0.1)
    layer(x).sum().backward()
    assert all(parameter.grad.any() for parameter in layer.parameters())


@pytest.mark.parametrize("init", ["zero_key", "duplicate"])
def test_growth_keeps_the_function(model, images, init):
    x = images()
    before = model(x)
    grow(model, num_ffn_param_tokens=384, init=init)
    torch.testing.assert_close(model(x), before, rtol=1e-4, atol=1e-5)
    assert all(block.mlp.gate is None for block in model.blocks)


def test_folder(model, images, tmp_path):
    save_model(model, tmp_path / "exported")
    x = images()
    assert torch.equal(load_model(None, tmp_path / "exported")(x), model(x))


def test_exported_programs(model, images):
    x = images()
    torch.testing.assert_close(torch.export.export(model, (x,)).module()(x), model(x))
    file = io.BytesIO()
    with set_scriptable(True), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.jit.save(torch.jit.script(model), file)
    file.seek(0)
    torch.testing.assert_close(torch.jit.load(file)(x), model(x))
