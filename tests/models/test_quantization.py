"""A quantised model computes with the rounded parameter tokens, and can do nothing else."""

# torchao is optional, and not in [dev].
# pyright: reportMissingImports=false

import copy
import io
import sys

import pytest
import torch

pytest.importorskip("torchao", reason="pip install '.[quantization]'")

from torchao.quantization import Int8WeightOnlyConfig, PerGroup

from tokenformer_vit.errors import InputError
from tokenformer_vit.growth import extract, grow, pattention_layers, set_top_k
from tokenformer_vit.growth.masks import TokenMasks
from tokenformer_vit.layers.quantized import QuantizedPattention
from tokenformer_vit.models import LMConfig, TokenFormerLM, quantize
from tokenformer_vit.models.checkpoints import save_model
from tokenformer_vit.models.quantization import model_bytes

KINDS = {
    "plain": {},
    "softmax": {"theta": "softmax", "pattention_args": {"gate": "learned", "learn_tau": True}},
}
LANGUAGE = {"vocab_size": 61, "context_length": 40, "embed_dim": 64, "depth": 2, "num_heads": 2}


@pytest.fixture
def build(small):
    """Build a model for images or language, and an input for it."""

    def build(subject, **kwargs):
        if subject == "images":
            model = small(embed_dim=64, num_heads=2, **kwargs)
            torch.nn.init.normal_(model.head.weight)
            return model, torch.randn(2, 3, 64, 64)
        return TokenFormerLM(LMConfig(**LANGUAGE, **kwargs)).eval(), torch.randint(61, (2, 20))

    return build


def quantized_layers(model):
    return {
        name: each for name, each in model.named_modules() if isinstance(each, QuantizedPattention)
    }


def rounded_tokens(layer, dtype):
    """Return the keys and values that a quantised layer multiplies with."""
    keys = layer.keys(torch.eye(layer.keys.in_features, dtype=dtype)).t()
    return keys, layer.values(torch.eye(layer.values.in_features, dtype=dtype))


@pytest.mark.parametrize("subject", ["images", "language"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("config", "levels", "group"), [("int8", 255, None), ("int4", 15, 32)])
@torch.no_grad()
def test_outputs_are_those_of_the_rounded_tokens(build, subject, kind, config, levels, group):
    model, x = build(subject, **KINDS[kind])
    quantized = copy.deepcopy(model)
    done = quantize(quantized, config)
    layers = pattention_layers(model)
    assert done.tensors == 2 * len(layers) == 2 * len(quantized_layers(quantized))
    for name, layer in quantized_layers(quantized).items():
        keys, values = rounded_tokens(layer, torch.float32)
        # A step is the range of the numbers that a product sums, over the number of levels. int8 is
        # symmetric. int4 also rounds its scale and zero.
        for old, new in (
            (layers[name].key_param_tokens, keys),
            (layers[name].value_param_tokens.t(), values.t()),
        ):
            parts = old.reshape(len(old), -1, group or old.shape[1])
            wide = 2 * parts.abs().amax(-1) if group is None else parts.amax(-1) - parts.amin(-1)
            half = wide[..., None] / levels / 2
            assert ((new.reshape(parts.shape) - parts).abs() <= 1.02 * half + 1e-6).all()
        layers[name].key_param_tokens.copy_(keys)
        layers[name].value_param_tokens.copy_(values)
    torch.testing.assert_close(quantized(x), model(x), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("subject", ["images", "language"])
@pytest.mark.parametrize(("config", "bytes_a_number"), [("int8", 1), ("int4", 0.5)])
@torch.no_grad()
def test_bfloat16_and_size(build, subject, config, bytes_a_number):
    model, x = build(subject)
    model.bfloat16()
    x = x.bfloat16() if x.is_floating_point() else x
    expected, before = model(x).float(), model_bytes(model)
    tokens = sum(2 * each.key_param_tokens.numel() for each in pattention_layers(model).values())
    done = quantize(model, config)
    output = model(x)
    assert output.dtype == torch.bfloat16
    change = (output.float() - expected).norm() / expected.norm()
    assert change < {"int8": 0.1, "int4": 0.5}[config]
    assert done.bytes_before == before
    assert done.bytes_after == model_bytes(model)
    # scales and zeros take up to a quarter of the bytes here
    saved = before - done.bytes_after
    assert tokens * (2 - 1.5 * bytes_a_number) < saved < tokens * (2 - bytes_a_number)
    assert all(layer.tau.dtype == torch.float32 for layer in quantized_layers(model).values())


@torch.no_grad()
def test_configuration_of_torchao(build):
    model, x = build("images")
    config = Int8WeightOnlyConfig(granularity=PerGroup(32), set_inductor_config=False)
    expected = model(x)
    assert quantize(model, config).tensors == 20
    assert (model(x) - expected).norm() < 0.1 * expected.norm()


@torch.no_grad()
def test_only_the_pairs_in_use_are_kept(build):
    model, x = build("images", nested=(0.5,))
    smaller = extract(model, 0.5)
    model.set_size(0.5)
    quantize(model)
    quantize(smaller)
    torch.testing.assert_close(model(x), smaller(x), atol=0, rtol=0)
    assert model_bytes(model) == model_bytes(smaller)


@pytest.mark.parametrize("config", ["int8", "int4"])
@torch.no_grad()
def test_state_dict_is_saved_and_loaded(build, config):
    model, x = build("images")
    fresh, _ = build("images")
    quantize(model, config)
    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    assert file.tell() < 1.5 * model_bytes(model)
    file.seek(0)
    quantize(fresh, config)
    fresh.load_state_dict(torch.load(file, weights_only=True), assign=True)
    torch.testing.assert_close(fresh(x), model(x), atol=0, rtol=0)


@pytest.mark.parametrize(
    "change",
    [
        quantize,
        lambda model: grow(model, num_ffn_param_tokens=300),
        lambda model: model.set_size(0.5),
        TokenMasks,
        lambda model: set_top_k(model, ffn=4),
        lambda model: extract(model, 0.5),
    ],
)
def test_changes_are_refused(build, change):
    model, x = build("images")
    quantize(model)
    before = model(x)
    with pytest.raises(InputError, match=r"quantised.*quantise it last") as error:
        change(model)
    assert "\n" not in str(error.value)
    assert torch.equal(model(x), before)


def test_export_and_cast_are_refused(build, tmp_path):
    model, x = build("images")
    quantize(model)
    with pytest.raises(InputError, match="quantise it last"):
        save_model(model, tmp_path / "saved")
    assert not (tmp_path / "saved").exists()
    before = model(x)
    assert torch.equal(model.float().to("cpu", torch.float32)(x), before)
    for cast in (model.bfloat16, lambda: model.to("cpu", torch.bfloat16), model.double):
        with pytest.raises(InputError, match=r"cast to torch\..*cast it.*quantise it last"):
            cast()


@pytest.mark.parametrize(
    ("prepare", "config", "message"),
    [
        (lambda model: None, "int3", "int8, int4, but got 'int3'"),
        (lambda model: set_top_k(model, ffn=4), "int8", r"blocks.0.mlp.*top_k.*None"),
        (lambda model: grow(model, num_ffn_param_tokens=260), "int4", r"mlp.*260 pairs.*'int8'"),
        (lambda model: grow(model, num_ffn_param_tokens=272), "int4", r"mlp.*272 pairs.*'int8'"),
    ],
)
def test_wrong_arguments_leave_the_model_as_it_is(build, prepare, config, message):
    model, x = build("images")
    prepare(model)
    before = model(x)
    with pytest.raises(InputError, match=message) as error:
        quantize(model, config)
    assert "\n" not in str(error.value)
    assert not quantized_layers(model)
    assert torch.equal(model(x), before)


def test_other_models_are_refused():
    with pytest.raises(InputError, match=r"Linear.*TokenFormer"):
        quantize(torch.nn.Linear(32, 32))


def test_missing_torchao_is_named(build, monkeypatch):
    model, _ = build("images")
    monkeypatch.setitem(sys.modules, "torchao.quantization", None)
    with pytest.raises(InputError, match=r"run pip install '\.\[quantization\]'"):
        quantize(model)
