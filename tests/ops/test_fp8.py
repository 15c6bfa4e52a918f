import math

import pytest
import torch

from tokenformer_vit.benchmarking.fp8 import EMULATED, computed, emulate, relative_error
from tokenformer_vit.errors import InputError
from tokenformer_vit.layers import Pattention
from tokenformer_vit.ops import THETAS, default_tau, fp8, pattention

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
WIDTH, PAIRS = 48, 64
L2 = [name for name, theta in THETAS.items() if theta.norm_order == 2]


def operands(pairs=PAIRS, width=WIDTH, tokens=37, device="cpu"):
    x = torch.nn.functional.layer_norm(torch.randn(2, tokens, width), (width,))
    keys = torch.randn(pairs, width) / math.sqrt(width)
    values = torch.randn(pairs, 2 * width) / math.sqrt(pairs)
    return [each.to(device).requires_grad_() for each in (x, keys, values)]


def run(inputs, theta, backend, upstream, dtype=None, tau=None):
    """Return output and gradients, in ``dtype``, or under autocast to bfloat16 if it is None."""
    device = inputs[0].device
    tau = default_tau(theta, inputs[1].shape[0]) if tau is None else tau
    tau = torch.as_tensor(tau, dtype=torch.float32, device=device)
    if dtype is not None:
        inputs = [each.detach().to(dtype).requires_grad_() for each in inputs]
    with torch.autocast(device.type, torch.bfloat16, enabled=dtype is None):
        output = pattention(*inputs, theta, tau, backend=backend)
    return [output.detach(), *torch.autograd.grad(output, inputs, upstream.to(output))]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [None, torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("theta", L2)
def test_errors_are_those_of_three_bits_of_mantissa(theta, dtype, device):
    inputs = operands(device=device)
    upstream = torch.randn(2, 37, 2 * WIDTH, device=device)
    exact = run(inputs, theta, "reference", upstream, torch.float64)
    for result, expected in zip(run(inputs, theta, "fp8", upstream, dtype), exact, strict=True):
        # Each of a few factors is off by 2.6 % on average: their mantissas are rounded to 1/8.
        assert 0.01 < relative_error([result], [expected]) < 0.08


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_products_are_summed_in_float32(device, dtype):
    a, b = (fp8.scaled(100 * torch.randn(rows, 48, device=device)) for rows in (32, 64))
    exact = (a.numbers.double() @ b.numbers.double().t()) * (a.factor * b.factor).double()
    result = fp8.product(a, b, dtype)
    assert result.dtype == dtype
    # Tensor cores of a Hopper keep 14 bits of each sum of 32 numbers.
    assert relative_error([result], [exact]) < (4e-3 if dtype == torch.bfloat16 else 1e-3)
    if device == "cpu":  # what a GPU runs, with its layout of memory
        b_t = b.numbers.t()
        scaled_mm = torch._scaled_mm(
            a.numbers, b_t, scale_a=a.factor, scale_b=b.factor, out_dtype=dtype
        )
        torch.testing.assert_close(result, scaled_mm)


@pytest.mark.parametrize(
    ("size", "dtype"),
    [(1e-30, torch.float32), (1e-5, torch.float16), (1.0, torch.float16), (1e30, torch.bfloat16)],
)
def test_scales_are_powers_of_two_that_fit_the_largest_number(size, dtype):
    tensor = (size * torch.randn(20, 50)).to(dtype).t()
    numbers, factor = fp8.scaled(tensor)
    assert numbers.is_contiguous()
    tensor = tensor.float()
    assert 223 < numbers.float().abs().max() <= 448
    assert math.frexp(factor.item())[0] == 0.5
    large = tensor.abs() > tensor.abs().max() / 2**10  # others are below E4M3's normal range
    error = (numbers.float() * factor - tensor)[large].abs() / tensor[large].abs()
    assert error.max() <= 2**-4


def test_zeros_and_numbers_that_are_not_finite():
    assert not fp8.scaled(torch.zeros(16)).numbers.float().any()
    assert fp8.scaled(torch.zeros(16)).factor.isfinite()
    for value in (math.inf, math.nan):
        numbers, factor = fp8.scaled(torch.tensor([1.0, value]))
        assert (numbers.float() * factor).isnan().any()
    assert fp8.fixed(torch.tensor([1e4, -1e4])).numbers.tolist() == [448, -448]


@pytest.mark.parametrize(
    ("theta", "pairs", "dtype", "tokens"),
    [
        ("gelu_l2", 56, torch.float32, 37),
        ("gelu_l2", PAIRS, torch.float64, 37),
        ("gelu_l1", PAIRS, torch.float32, 37),
        ("softmax", PAIRS, torch.float32, 37),
        ("gelu_l2", PAIRS, torch.float32, 0),
    ],
)
def test_what_does_not_fit_is_computed_by_fused(theta, pairs, dtype, tokens):
    inputs, upstream = operands(pairs, tokens=tokens), torch.randn(2, tokens, 2 * WIDTH)
    ours, fused = (run(inputs, theta, name, upstream, dtype) for name in ("fp8", "fused"))
    assert all(map(torch.equal, ours, fused))


def test_transforms_of_torch_func_are_computed_by_the_reference():
    x, keys, values = (each.detach() for each in operands())
    tau = torch.tensor(8.0)

    def of(backend):
        return torch.func.vmap(
            lambda row: pattention(row, keys, values, "gelu_l2", tau, backend=backend)
        )(x)

    assert torch.equal(of("fp8"), of("reference"))


def test_a_learned_tau_gets_its_gradient():
    inputs, grads = operands(), []
    for backend, dtype in (("fp8", torch.float32), ("reference", torch.float64)):
        tau = torch.tensor(9.0, requires_grad=True)
        own = [each.detach().to(dtype) for each in inputs]
        # A random gradient would have terms of both signs that nearly cancel.
        output = pattention(*own, "gelu_l2", tau, backend=backend)
        (grad,) = torch.autograd.grad(output, tau, output.detach())
        grads.append(grad)
    assert grads[0].item() == pytest.approx(grads[1].item(), rel=0.08)


def test_frozen_operands_get_no_gradient_and_gradients_have_none():
    x, keys, values = operands()
    tau = torch.tensor(8.0)
    x.requires_grad_(False)
    keys.requires_grad_(False)
    output = pattention(x, keys, values, "gelu_l2", tau, backend="fp8")
    (grad,) = torch.autograd.grad(output.square().sum(), values, create_graph=True)
    assert grad.shape == values.shape
    with pytest.raises(RuntimeError, match="once_differentiable"):
        grad.sum().backward()


def test_on_the_meta_device():
    inputs = [each.detach().to("meta").requires_grad_() for each in operands()]
    output = pattention(*inputs, "gelu_l2", torch.tensor(8.0, device="meta"), backend="fp8")
    assert output.shape == (2, 37, 2 * WIDTH)
    grads = torch.autograd.grad(output.sum(), inputs)
    assert [grad.shape for grad in grads] == [each.shape for each in inputs]


def test_inference_computes_the_same():
    inputs = operands()
    tau = torch.tensor(8.0)
    recorded = pattention(*inputs, "gelu_l2", tau, backend="fp8")
    with torch.no_grad():
        assert torch.equal(recorded, pattention(*inputs, "gelu_l2", tau, backend="fp8"))


@pytest.mark.parametrize("device", DEVICES)
def test_compiled_in_one_graph(device):
    inputs = operands(device=device)
    tau = torch.tensor(8.0, device=device)
    upstream = torch.randn(2, 37, 2 * WIDTH, device=device)

    def call(*inputs):
        return pattention(*inputs, "gelu_l2", tau, backend="fp8")

    backend = "aot_eager" if device == "cpu" else "inductor"
    compiled = torch.compile(call, fullgraph=True, backend=backend)
    results = []
    for function in (call, compiled):
        output = function(*inputs)
        results.append([output, *torch.autograd.grad(output, inputs, upstream)])
    # A number that is rounded the other way moves by an eighth.
    assert relative_error(results[1], [each.double() for each in results[0]]) < 0.01


@pytest.mark.parametrize(("capability", "hip"), [((8, 0), None), ((9, 4), "6.4")])
def test_devices_without_8_bit_products_are_refused(monkeypatch, capability, hip):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(torch.version, "hip", hip)
    with pytest.raises(InputError, match=r"8\.9 .*cuda:0; choose backend fused"):
        fp8._check_device(torch.device("cuda:0"))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 9))
    monkeypatch.setattr(torch.version, "hip", None)
    fp8._check_device(torch.device("cuda:0"))


def test_the_emulation_agrees_with_the_backend():
    layer = Pattention(WIDTH, WIDTH, PAIRS)
    x = torch.nn.functional.layer_norm(torch.randn(64, WIDTH), (WIDTH,))
    grad = torch.randn(64, WIDTH)
    backend = computed(layer, "fp8", x, grad)
    exact = computed(layer.double(), "reference", x.double(), grad.double(), autocast=False)
    layer.float()
    errors = {name: [] for name in EMULATED}
    for name, formats in EMULATED.items():
        for index, result in enumerate(emulate(formats, layer, x, grad)):
            errors[name].append(relative_error([result], [exact[index]]))
    ours = [relative_error([one], [other]) for one, other in zip(backend, exact, strict=True)]
    assert ours == pytest.approx(errors["E4M3, emulated"], rel=0.15)
    assert errors["gradients in E5M2"][1] > 1.2 * ours[1]
    assert errors["gradients of parameter tokens also in 8 bits"][3] > 1.1 * ours[3]
