import pytest
import torch
import torch.autograd.forward_ad as forward_ad

from tokenformer_vit.ops import THETAS, cpu_theta, default_tau, pattention


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    """Let a few rows be a block, and the last one smaller than the others."""
    monkeypatch.setattr(cpu_theta, "BLOCK_ELEMENTS", 576 * 10 // torch.get_num_threads())


def operands(dtype=torch.float32, rows=(2, 43), pairs=576):
    x = torch.randn(*rows, 48).to(dtype)
    keys, values = torch.randn(pairs, 48) / 7, torch.randn(pairs, 40) / 24
    return x, keys.to(dtype), values.to(dtype)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("theta", cpu_theta.KERNELS)
@pytest.mark.parametrize("pairs", [576, 577])  # whole vectors, and not
def test_blocks_give_the_results_of_the_kernels_on_all_rows(theta, pairs, dtype):
    scores, grad = torch.randn(2, 43, pairs).to(dtype), torch.randn(2, 43, pairs).to(dtype)
    scores[0, ::7] = 0
    tau, plain = torch.tensor(default_tau(theta, pairs)), THETAS[theta].kernels
    assert len(list(cpu_theta._blocks(scores))) > 3
    expected, kept = plain.forward(scores, tau, 1e-6)
    expected = expected, *kept, *plain.backward(kept, tau, grad)
    weights, kept = cpu_theta.KERNELS[theta].forward(scores, tau, 1e-6)
    actual = weights, *kept, *cpu_theta.KERNELS[theta].backward(kept, tau, grad)
    assert kept[0].data_ptr() == scores.data_ptr()
    for a, b in zip(actual, expected, strict=True):
        close = {} if pairs == 577 else {"rtol": 0, "atol": 0}
        torch.testing.assert_close(a, b, **close)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_training_and_inference_are_equal_bit_for_bit(dtype):
    inputs = operands(dtype)
    with torch.no_grad():
        inference = pattention(*inputs, "gelu_l2", torch.tensor(24.0))
    training = pattention(*inputs[:2], inputs[2].requires_grad_(), "gelu_l2", torch.tensor(24.0))
    assert torch.equal(inference, training)


def test_what_the_user_holds_is_not_written():
    inputs = [tensor.requires_grad_() for tensor in operands()]
    upstream = torch.randn(2, 43, 40)
    before = [tensor.detach().clone() for tensor in (*inputs, upstream)]
    out = pattention(*inputs, "gelu_l2", torch.tensor(24.0))
    first = torch.autograd.grad(out, inputs, upstream, retain_graph=True)
    copies = [grad.clone() for grad in first]
    second = torch.autograd.grad(out, inputs, upstream)
    for a, b in zip((*inputs, upstream), before, strict=True):
        assert torch.equal(a, b)
    for a, b, c in zip(first, copies, second, strict=True):
        assert torch.equal(a, b)
        assert torch.equal(a, c)


def test_a_batch_of_gradients():
    inputs = [tensor.requires_grad_() for tensor in operands(torch.float64)]
    upstreams = torch.randn(3, 2, 43, 40, dtype=torch.float64)
    out = pattention(*inputs, "gelu_l2", torch.tensor(24.0))
    batched = torch.autograd.grad(out, inputs, upstreams, is_grads_batched=True, retain_graph=True)
    for index, upstream in enumerate(upstreams):
        single = torch.autograd.grad(out, inputs, upstream, retain_graph=True)
        for a, b in zip(batched, single, strict=True):
            torch.testing.assert_close(a[index], b)


def test_transforms_of_torch_func():
    x, keys, values = operands(torch.float64)
    tau = torch.tensor(24.0)

    def op(x, keys, backend="fused"):
        return pattention(x, keys, values, "gelu_l2", tau, backend=backend)

    tangent = torch.randn_like(x)
    actual = torch.func.jvp(lambda x: op(x, keys), (x,), (tangent,))
    expected = torch.func.jvp(lambda x: op(x, keys, "reference"), (x,), (tangent,))
    for a, b in zip(actual, expected, strict=True):
        torch.testing.assert_close(a, b)
    torch.testing.assert_close(torch.func.vmap(op, (0, None))(x, keys), op(x, keys))


def test_forward_mode_outside_torch_func_is_refused():
    x, keys, values = operands()
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(x, torch.randn_like(x))
        with pytest.raises((NotImplementedError, RuntimeError)):
            pattention(dual, keys, values, "gelu_l2", torch.tensor(24.0), backend="fused")
