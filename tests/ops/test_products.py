import math

import pytest
import torch
import torch.autograd.forward_ad as forward_ad
from torch.utils.flop_counter import FlopCounterMode

from tokenformer_vit import ops
from tokenformer_vit.layers import Pattention
from tokenformer_vit.ops import default_tau, pattention, pattention_reference, products

on_x86 = pytest.mark.skipif(not products._HAS_BOTH, reason="oneDNN is used on x86, in place of MKL")


def onednn_products(function, name="mkldnn::_linear_pointwise"):
    """Count the products of a call that oneDNN computes."""
    with torch.profiler.profile() as profiler:
        function()
    return sum(event.count for event in profiler.key_averages() if event.key == name)


def reference(x, keys, values, theta, tau):
    return pattention_reference(x, keys, values, theta, tau, 1e-6)


WIDE = 512  # from this width on, one token is multiplied by oneDNN on x86


def wide_layer(pairs):
    keys = torch.randn(pairs, WIDE, dtype=torch.float64) / math.sqrt(WIDE)
    values = torch.randn(pairs, WIDE, dtype=torch.float64) / math.sqrt(pairs)
    return keys, values, torch.tensor(default_tau("gelu_l2", pairs))


@pytest.mark.parametrize("pairs", [2, 37, 512])
def test_one_token_of_a_wide_layer_agrees_with_float64(pairs):
    keys, values, tau = wide_layer(pairs)
    x = torch.randn(1, 1, WIDE, dtype=torch.float64)
    expected = pattention_reference(x, keys, values, "gelu_l2", tau.double(), 1e-6)
    for token in (x.float(), x.float()[0, 0], x.float().expand(4, 1, WIDE)):
        out = pattention(token, keys.float(), values.float(), "gelu_l2", tau)
        torch.testing.assert_close(out, expected.float().view(-1).expand_as(out), atol=1e-5, rtol=0)
    together = ops.pattention_joint(
        x.float(), [keys.float()] * 3, [values.float()] * 3, "gelu_l2", [tau] * 3, few=True
    )
    for out in together:
        assert torch.equal(out, pattention(x.float(), keys.float(), values.float(), "gelu_l2", tau))


@pytest.mark.parametrize("pairs", [16, 256, 512])
def test_one_token_of_a_wide_layer_keeps_its_digits_when_pairs_are_added(pairs):
    keys, values, tau = wide_layer(pairs)
    keys, values, x = keys.float(), values.float(), torch.randn(1, 1, WIDE)
    grown = torch.cat((keys, torch.zeros(pairs, WIDE))), torch.cat((values, torch.randn_like(keys)))
    out = pattention(x, keys, values, "gelu_l2", tau)
    assert torch.equal(pattention(x, *grown, "gelu_l2", tau), out)


@on_x86
@pytest.mark.parametrize("slow", [False, True])
def test_one_token_of_a_wide_layer_is_multiplied_by_onednn(slow, monkeypatch):
    monkeypatch.setattr(products, "MKL_IS_SLOW", slow)
    keys, values, tau = (each.float() for each in wide_layer(64))
    for tokens, expected in ((1, 2), (2, 0), (16, 2 * slow)):
        x = torch.randn(1, tokens, WIDE)
        assert onednn_products(lambda x=x: pattention(x, keys, values, "gelu_l2", tau)) == expected


@pytest.fixture
def slow_mkl(monkeypatch):
    monkeypatch.setattr(products, "MKL_IS_SLOW", True)


def gradients(x, keys, values, tau, theta="gelu_l2", op=pattention):
    out = op(x, keys, values, theta, tau)
    return [out.detach(), *torch.autograd.grad(out.square().sum(), (x, keys, values))]


def many(pairs, dtype=torch.float32, tokens=192):
    keys, values, tau = wide_layer(pairs)
    x = torch.randn(2, tokens, WIDE, dtype=torch.float64)
    return [each.to(dtype).requires_grad_() for each in (x, keys, values)], tau


@on_x86
@pytest.mark.parametrize("pairs", [2, 37, 512])
@pytest.mark.parametrize(
    "compiler", [None, "aot_eager", pytest.param("inductor", marks=pytest.mark.slow)]
)
def test_many_tokens_agree_with_float64_if_mkl_is_slow(pairs, compiler, slow_mkl):
    inputs, tau = many(pairs)
    op = pattention
    if compiler is not None:
        op = torch.compile(pattention, backend=compiler, fullgraph=True)
    actual = gradients(*inputs, tau, op=op)
    # A product for the scores, one for the output, and two gradients of each.
    name = "tokenformer_vit::linear" if compiler else "mkldnn::_linear_pointwise"
    assert onednn_products(lambda: gradients(*inputs, tau, op=op), name) == 6
    exact = [each.detach().double().requires_grad_() for each in inputs]
    for own, expected in zip(actual, gradients(*exact, tau.double(), op=reference), strict=True):
        torch.testing.assert_close(
            own.double(), expected, rtol=1e-4, atol=1e-4 * expected.abs().max().item()
        )


@on_x86
@pytest.mark.parametrize("compiler", [None, "aot_eager"])
def test_a_narrow_layer_uses_onednn_for_many_tokens(compiler, slow_mkl):
    op, name = pattention, "mkldnn::_linear_pointwise"
    if compiler is not None:
        name = "tokenformer_vit::linear"
    keys, values = torch.randn(2, 48, 64).unbind()
    tau = torch.tensor(default_tau("gelu_l2", 48))
    for tokens, products_of_onednn in ((1023, 0), (1024, 2), (2000, 2), (9, 0)):
        if compiler is not None:
            torch._dynamo.reset()  # otherwise the second number makes code for any number
            op = torch.compile(pattention, backend=compiler, fullgraph=True)
        x = torch.randn(tokens, 64)
        with torch.no_grad():
            out = op(x, keys, values, "gelu_l2", tau)
            count = onednn_products(lambda x=x, op=op: op(x, keys, values, "gelu_l2", tau), name)
        assert count == products_of_onednn
        expected = reference(x.double(), keys.double(), values.double(), "gelu_l2", tau.double())
        torch.testing.assert_close(out, expected.float(), rtol=1e-4, atol=1e-5)


@on_x86
def test_code_for_any_number_of_tokens_does_not_depend_on_it(slow_mkl):
    torch._dynamo.reset()
    op = torch.compile(pattention, backend="aot_eager", fullgraph=True)
    keys, values = torch.randn(2, 48, 64).unbind()
    tau = torch.tensor(default_tau("gelu_l2", 48))
    with torch.no_grad():
        for tokens in (9, 4000):
            x = torch.randn(tokens, 64)
            torch._dynamo.mark_dynamic(x, 0, min=2, max=5000)
            torch.testing.assert_close(
                op(x, keys, values, "gelu_l2", tau), pattention(x, keys, values, "gelu_l2", tau)
            )


@on_x86
def test_what_onednn_cannot_do_is_left_to_pytorch(slow_mkl):
    inputs, tau = many(37)

    def twice(op=pattention):
        out = op(*inputs, "gelu_l2", tau)
        (first,) = torch.autograd.grad(out.square().sum(), inputs[0], create_graph=True)
        return torch.autograd.grad(first.square().sum(), inputs)

    def batched():
        out = pattention(*inputs, "gelu_l2", tau)
        torch.autograd.grad(out, inputs, torch.ones(3, *out.shape), is_grads_batched=True)

    def counted():
        with FlopCounterMode(display=False) as counter:
            gradients(*inputs, tau)
        assert counter.get_total_flops() == 3 * 2 * 2 * 2 * 192 * 37 * WIDE

    def with_autocast():
        with torch.autocast("cpu"):
            gradients(*inputs, tau)

    def in_double():
        gradients(*many(37, torch.float64)[0], tau.double())

    def switched_off():
        with torch.backends.mkldnn.flags(enabled=False):
            gradients(*inputs, tau)

    for own, plain in zip(twice(), twice(reference), strict=True):
        torch.testing.assert_close(own, plain, rtol=1e-3, atol=1e-3 * plain.abs().max().item())
    assert onednn_products(twice) == 2 + 4  # the first forward, and its backward in the second one
    assert onednn_products(batched) == 2  # the forward
    for function in (counted, with_autocast, in_double, switched_off):
        assert onednn_products(function) == 0, function.__name__


@on_x86
def test_an_export_has_only_operators_of_pytorch(slow_mkl):
    inputs, _ = many(37)
    layer = Pattention(WIDE, WIDE, num_param_tokens=37).eval()
    with torch.no_grad():
        program = torch.export.export(layer, (inputs[0].detach(),))
    names = {str(node.target) for node in program.graph.nodes if node.op == "call_function"}
    assert names
    assert not [name for name in names if "mkldnn" in name or "tokenformer_vit" in name]


def test_a_wide_layer_of_other_tensors_computes_one_token_as_well():
    keys, values, tau = (each.float() for each in wide_layer(64))
    x = torch.randn(1, 1, WIDE)
    out = pattention(x, keys, values, "gelu_l2", tau)
    with FlopCounterMode(display=False) as counter:
        pattention(x, keys, values, "gelu_l2", tau)
    assert counter.get_total_flops() == 2 * 2 * 64 * WIDE
    compiled = torch.compile(pattention, backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(x, keys, values, "gelu_l2", tau), out)
    with torch.autocast("cpu"):
        assert pattention(x, keys, values, "gelu_l2", tau).dtype == torch.bfloat16
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(torch.cat((x, x)), torch.ones(2, 1, WIDE))
        both = forward_ad.unpack_dual(pattention(dual, keys, values, "gelu_l2", tau)).tangent
        own = forward_ad.unpack_dual(pattention(dual[:1], keys, values, "gelu_l2", tau)).tangent
    torch.testing.assert_close(own, both[:1])
    half = [each.bfloat16() for each in (x, keys, values)]
    assert pattention(*half, "gelu_l2", tau).dtype == torch.bfloat16
    assert pattention(*(each.to("meta") for each in (x, keys, values)), "gelu_l2", tau).is_meta
