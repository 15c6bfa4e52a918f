"""Pattention layers with the same input, computed together."""

import math
from collections import Counter
from contextlib import nullcontext

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from tokenformer_vit.ops import (
    THETAS,
    default_tau,
    pattention,
    pattention_joint,
    pattention_reference,
)

WIDTH, OUT, LAYERS = 48, 40, 3
NAMES = ("output", "x", "keys", "values", "tau")


@pytest.fixture(autouse=True)
def poison():
    """Fill fresh memory with NaN, to show memory that is read before it is written."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def operands(theta, tokens, pairs, dtype=torch.float32, learned=True):
    """Return x, and the keys, the values and the τ of each layer."""
    x = torch.randn(2, tokens, WIDTH, dtype=torch.float64)
    keys = torch.randn(LAYERS, pairs, WIDTH, dtype=torch.float64) / math.sqrt(WIDTH)
    values = torch.randn(LAYERS, pairs, OUT, dtype=torch.float64) / math.sqrt(pairs)
    taus = torch.tensor([0.37, 1.0, 1.6]) * default_tau(theta, pairs)
    inputs = [tensor.to(dtype).requires_grad_() for tensor in (x, *keys, *values)]
    exact = torch.float64 if dtype == torch.float64 else torch.float32
    return inputs + [tau.to(exact).clone().requires_grad_(learned) for tau in taus]


def together(inputs, theta, eps=1e-6, backend="fused"):
    keys, values, taus = (inputs[1 + i * LAYERS : 1 + (i + 1) * LAYERS] for i in range(3))
    return pattention_joint(inputs[0], keys, values, theta, taus, eps, backend)


def apart(inputs, theta, eps=1e-6, op=pattention_reference):
    x, *rest = inputs
    return tuple(op(x, *rest[i::LAYERS][:2], theta, rest[i::LAYERS][2], eps) for i in range(LAYERS))


def upstreams(tokens, dtype=torch.float32):
    """Return gradients of the outputs as attention gives them: by head, not contiguous."""
    heads = torch.randn(LAYERS, 2, 4, tokens, OUT // 4)
    return [grad.to(dtype).transpose(1, 2).reshape(2, tokens, OUT) for grad in heads]


def run(op, inputs, grads):
    """Return outputs and gradients, joined by kind as in NAMES."""
    outs = op(inputs)
    wanted = [tensor for tensor in inputs if tensor.requires_grad]
    found = torch.autograd.grad(
        outs, wanted, [g.to(out.dtype) for g, out in zip(grads, outs, strict=True)]
    )
    parts = [outs, found[:1], *(found[1 + i : 1 + i + LAYERS] for i in range(0, len(found) - 1, 3))]
    return [torch.cat([tensor.detach().double().flatten() for tensor in part]) for part in parts]


def exact(inputs, theta, grads):
    doubled = [tensor.detach().double().requires_grad_() for tensor in inputs]
    return run(lambda i: apart(i, theta), doubled, [grad.double() for grad in grads])


@pytest.mark.parametrize("pairs", [64, 100, 576])
@pytest.mark.parametrize("theta", THETAS)
def test_agrees_with_float64(theta, pairs):
    inputs, grads = operands(theta, 197, pairs), upstreams(197)
    with torch.no_grad():
        inputs[0][:, ::7] = 0
    expected = exact(inputs, theta, grads)
    actual = run(lambda i: together(i, theta), inputs, grads)
    # |gelu(a)| has a kink at zero: a score that rounds to its other side changes its own gradient.
    limit = 2e-3 if theta == "gelu_l1" else 3e-6
    for name, a, b in zip(NAMES, actual, expected, strict=True):
        most = 2e-5 if name == "tau" else limit  # a sum of numbers of both signs
        assert (a - b).norm() <= most * b.norm(), name


@pytest.mark.parametrize("eps", [0.0, 0.3])
@pytest.mark.parametrize("theta", THETAS)
def test_gradients_and_their_gradients(theta, eps):
    shapes = ((2, 2), *[(3, 2)] * LAYERS, *[(3, 2)] * LAYERS)
    inputs = [torch.randn(shape, dtype=torch.float64) for shape in shapes]
    inputs += [*torch.tensor([0.8, 1.0, 1.7], dtype=torch.float64) * default_tau(theta, 3)]
    inputs = [tensor.clone().requires_grad_() for tensor in inputs]

    def op(*tensors):
        return together(tensors, theta, eps)

    assert torch.autograd.gradcheck(op, inputs)
    assert torch.autograd.gradgradcheck(op, inputs)


@pytest.mark.parametrize("autocast", [True, False])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("theta", THETAS)
def test_low_precision_rounds_where_single_layers_do(theta, dtype, autocast):
    inputs = operands(theta, 197, 576, torch.float32 if autocast else dtype)
    grads = upstreams(197, dtype)
    low = [tensor.detach().to(dtype) for tensor in inputs[:-LAYERS]]
    expected = exact([*low, *inputs[-LAYERS:]], theta, grads)

    def errors(op):
        with torch.autocast("cpu", dtype) if autocast else nullcontext():
            outs = op(inputs)
        assert all(out.dtype == dtype for out in outs)
        found = run(lambda _: outs, inputs, grads)
        return [(a - b).norm() / b.norm() for a, b in zip(found, expected, strict=True)]

    ours = errors(lambda i: together(i, theta))
    single = errors(lambda i: apart(i, theta, op=pattention))
    for name, a, b in zip(NAMES[:-1], ours, single, strict=False):  # few τ: a matter of luck
        assert a <= 1.1 * b, name


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_backward_may_run_under_autocast(dtype):
    inputs, grads = operands("gelu_l2", 9, 20, dtype), upstreams(9, dtype)
    expected = exact(inputs, "gelu_l2", grads)
    outs = together(inputs, "gelu_l2")
    with torch.autocast("cpu", torch.bfloat16):
        actual = run(lambda _: outs, inputs, grads)
    for a, b in zip(actual, expected, strict=True):
        assert (a - b).norm() <= 2e-2 * b.norm()


@pytest.mark.parametrize("theta", THETAS)
@pytest.mark.parametrize("autocast", [True, False])
def test_keeps_no_more_than_single_layers(theta, autocast):
    inputs = operands(theta, 65, 144)
    kept = {}
    for op in (lambda i: together(i, theta), lambda i: apart(i, theta, op=pattention)):
        tensors = {}
        with (
            torch.autograd.graph.saved_tensors_hooks(
                lambda t, found=tensors: found.setdefault(t.untyped_storage().data_ptr(), t),
                lambda t: t,
            ),
            torch.autocast("cpu", torch.bfloat16, enabled=autocast),
        ):
            # The norm before these layers gives their input in the precision of the products.
            op([inputs[0].bfloat16() if autocast else inputs[0], *inputs[1:]])
        kept[op] = sum(t.untyped_storage().nbytes() for t in tensors.values())
    joint, single = kept.values()
    assert joint <= single + 8 * LAYERS  # three more numbers: τ in one tensor


class Operations(TorchDispatchMode):
    """Count matrix products, and the elements of copies."""

    def __init__(self):
        super().__init__()
        self.products, self.copied = 0, Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        self.products += name == "mm"
        if name in ("cat", "stack", "clone", "copy_", "contiguous", "_to_copy"):
            self.copied[name] += out.numel()
        return out


def test_computes_fewer_products_and_copies_only_keys():
    inputs, grads = operands("gelu_l2", 197, 96), upstreams(197)
    counts = []
    for op in (lambda i: together(i, "gelu_l2"), lambda i: apart(i, "gelu_l2", op=pattention)):
        with Operations() as operations:
            torch.autograd.grad(op(inputs), inputs, grads)
        counts.append(operations)
    joint, single = counts
    assert single.products == 6 * LAYERS
    assert joint.products == 3 * LAYERS + 3  # scores, gradients of x and keys are one each
    keys = sum(tensor.numel() for tensor in inputs[1 : 1 + LAYERS])
    copied = sum(joint.copied.values()) - sum(single.copied.values())
    assert copied <= 2 * keys + LAYERS


@pytest.mark.parametrize("theta", THETAS)
def test_no_products_for_what_is_frozen(theta):
    kinds = {"x": slice(0, 1), "keys": slice(1, 4), "values": slice(4, 7), "one key": slice(2, 3)}
    kinds |= {"one value": slice(6, 7)}
    for frozen in (["x"], ["keys"], ["values"], ["keys", "values"], ["one key"], ["one value"]):
        flops = []
        for op in (together, lambda i, theta: apart(i, theta, op=pattention)):
            inputs = operands(theta, 33, 24, learned=False)
            for kind in frozen:
                for tensor in inputs[kinds[kind]]:
                    tensor.requires_grad_(False)
            with FlopCounterMode(display=False) as counter:
                sum(out.sum() for out in op(inputs, theta)).backward()
            flops.append(counter.get_total_flops())
            assert all((t.grad is None) is not t.requires_grad for t in inputs)
        assert flops[0] == flops[1], frozen


def test_only_one_output_may_be_used():
    inputs, (grad, *_) = operands("gelu_l2", 9, 20), upstreams(9)
    used = [inputs[0], *inputs[2::LAYERS]]
    ours, expected = (
        torch.autograd.grad(op(inputs, "gelu_l2")[1], used, grad) for op in (together, apart)
    )
    for a, b in zip(ours, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("sizes", [(20, 20, 30), (7, 8, 9)])
def test_layers_of_unequal_size_are_computed_alone(sizes):
    x = torch.randn(5, WIDTH)
    keys, values = ([torch.randn(pairs, WIDTH) for pairs in sizes] for _ in range(2))
    taus = [torch.tensor(float(pairs)) for pairs in sizes]
    outs = pattention_joint(x, keys, values, "gelu_l2", taus)
    for out, *layer, tau in zip(outs, keys, values, taus, strict=True):
        assert torch.equal(out, pattention(x, *layer, "gelu_l2", tau))


@pytest.mark.parametrize("backend", ["reference", "fused"])
def test_tau_may_stay_on_the_cpu(backend):
    *tokens, _, _, _ = operands("gelu_l2", 9, 20)
    inputs = [tensor.detach().to("meta").requires_grad_() for tensor in tokens]
    outs = together([*inputs, *torch.ones(LAYERS)], "gelu_l2", backend=backend)
    assert [out.shape for out in outs] == LAYERS * [(2, 9, OUT)]
    grads = torch.autograd.grad([out.sum() for out in outs], inputs)
    assert all(grad.is_meta for grad in grads)


def test_widths_of_outputs_may_differ():
    x, keys = torch.randn(5, WIDTH), torch.randn(2, 20, WIDTH)
    values = [torch.randn(20, width) for width in (8, 24)]
    taus = [torch.tensor(4.0), torch.tensor(5.0)]
    outs = pattention_joint(x, [*keys], values, "gelu_l2", taus)
    for out, *layer, tau in zip(outs, keys, values, taus, strict=True):
        torch.testing.assert_close(out, pattention(x, *layer, "gelu_l2", tau))


@pytest.mark.parametrize("shape", [(WIDTH,), (0, WIDTH), (2, 0, WIDTH), (2, 3, 5, WIDTH)])
def test_takes_what_linear_takes(shape):
    _, *rest = operands("gelu_l2", 1, 20)
    inputs = [torch.randn(shape, requires_grad=True), *rest]
    grads = [torch.randn(*shape[:-1], OUT) for _ in range(LAYERS)]
    ours, plain = (
        run(lambda i, op=op: op(i, "gelu_l2"), inputs, grads) for op in (together, apart)
    )
    for a, b in zip(ours, plain, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("backend", ["reference", "auto"])
def test_backends_and_no_gradient(backend):
    inputs = operands("softmax", 9, 20)
    with torch.no_grad():
        for a, b in zip(
            together(inputs, "softmax", backend=backend), apart(inputs, "softmax"), strict=True
        ):
            assert not a.requires_grad
            torch.testing.assert_close(a, b)


def test_a_batch_of_gradients_and_transforms():
    inputs = operands("gelu_l2", 7, 11, torch.float64)
    outs = together(inputs, "gelu_l2")
    for used in (outs, outs[1:], outs[2:]):
        batch = [torch.randn(3, *out.shape, dtype=torch.float64) for out in used]
        arguments = {"retain_graph": True, "materialize_grads": True}
        batched = torch.autograd.grad(used, inputs, batch, is_grads_batched=True, **arguments)
        for index in range(3):
            grads = [grad[index] for grad in batch]
            single = torch.autograd.grad(used, inputs, grads, **arguments)
            for a, b in zip(batched, single, strict=True):
                torch.testing.assert_close(a[index], b)

    x, *rest = (tensor.detach() for tensor in inputs)

    def loss(x, op):
        return sum(out.square().sum() for out in op([x, *rest], "gelu_l2"))

    grads = torch.func.vmap(torch.func.grad(lambda x: loss(x, together)))(x)
    torch.testing.assert_close(grads, torch.func.grad(lambda x: loss(x, apart))(x))


@pytest.mark.slow
def test_compiled_code_computes_the_same():
    inputs, grads = operands("gelu_l2", 37, 72), upstreams(37)
    compiled = torch.compile(lambda *i: together(i, "gelu_l2"), fullgraph=True)
    ours = run(lambda i: compiled(*i), inputs, grads)
    for a, b in zip(ours, exact(inputs, "gelu_l2", grads), strict=True):
        assert (a - b).norm() <= 1e-5 * b.norm()
