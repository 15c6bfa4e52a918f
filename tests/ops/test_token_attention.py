import pytest
import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from tokenformer_vit.ops import attention

HEADS, WIDTH = 3, 32


def heads(tokens: int, seed: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    """Return (2, heads, tokens, width), with the strides that a model's heads have."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(2, tokens, HEADS * WIDTH, generator=generator).to(dtype)
    return x.reshape(2, tokens, HEADS, WIDTH).transpose(1, 2).requires_grad_()


def parts(queries: int, keys: int | None = None) -> list[torch.Tensor]:
    sizes = (queries, keys or queries, keys or queries)
    return [heads(size, seed) for seed, size in enumerate(sizes)]


def is_precise(out: torch.Tensor) -> bool:
    return "PreciseBackward" in type(out.grad_fn).__name__


def errors(function, queries, keys, **how) -> list[float]:
    """Return the relative errors of output and gradients, compared with float64."""
    own = parts(queries, keys)
    exact = [part.detach().double().requires_grad_() for part in own]
    out, true = function(*own, **how), F.scaled_dot_product_attention(*exact, **how)
    grad = heads(queries, 9).detach()
    found = (out, *torch.autograd.grad(out, own, grad))
    wanted = (true, *torch.autograd.grad(true, exact, grad.double()))
    with torch.no_grad():
        pairs = zip(found, wanted, strict=True)
        return [float((a.double() - b).norm() / b.norm()) for a, b in pairs]


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize(
    ("queries", "keys", "how"),
    [(17, 17, {}), (65, 65, {"is_causal": True}), (200, 200, {"scale": 0.3}), (7, 40, {})],
)
def test_gradients_are_more_exact_than_pytorchs(queries, keys, how, compiled):
    torch._dynamo.reset()
    assert is_precise(attention(*parts(queries, keys), **how))
    function = (
        torch.compile(attention, fullgraph=True, backend="aot_eager") if compiled else attention
    )
    ours = errors(function, queries, keys, **how)
    theirs = errors(F.scaled_dot_product_attention, queries, keys, **how)
    assert ours[0] == theirs[0]
    assert all(own < other for own, other in zip(ours[1:], theirs[1:], strict=True))


def test_no_more_is_kept_than_by_pytorchs():
    def kept(function) -> list[tuple]:
        saved = []
        with torch.autograd.graph.saved_tensors_hooks(
            lambda x: saved.append((x.shape, x.dtype)) or x, lambda x: x
        ):
            function(*parts(65))
        return sorted(saved, key=str)

    assert kept(attention) == kept(F.scaled_dot_product_attention)


def test_autocast_decides_the_precision():
    own = [part.detach().float().requires_grad_() for part in parts(17)]
    assert not is_precise(attention(*own))
    with torch.autocast("cpu", torch.bfloat16):
        out = attention(*own)
        assert is_precise(out)
        assert torch.equal(out, F.scaled_dot_product_attention(*own))
    out.sum().backward()
    assert all(part.grad.dtype == torch.float32 for part in own)


def test_pytorchs_own_backward_where_it_is_needed():
    own = parts(17)
    mask = torch.ones(17, 17, dtype=torch.bool)
    assert not is_precise(attention(*own, attn_mask=mask))
    assert not is_precise(attention(*own, dropout_p=0.1))
    assert not is_precise(attention(*parts(201)))
    assert not is_precise(attention(*parts(17, 201)))
    with sdpa_kernel(SDPBackend.MATH):  # also for gradients of gradients
        out = attention(*own)
        assert not is_precise(out)
        (grad,) = torch.autograd.grad(out.square().sum(), own[0], create_graph=True)
        grad.square().sum().backward()
    gradient = torch.func.grad(lambda x: attention(x, *own[1:]).square().sum())(own[0])
    assert torch.isfinite(gradient).all()


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("case", ["no tokens", "strides", "broadcast", "a wider value"])
def test_what_pytorchs_fused_attention_does_not_take(case, compiled):
    """Its operator would crash, or compute nonsense."""
    torch._dynamo.reset()
    function = torch.compile(attention, fullgraph=True, backend="aot_eager", disable=not compiled)
    query, key, value = parts(8)
    if case == "no tokens":
        query, key, value = parts(0)
    elif case == "strides":
        query, key, value = (part.transpose(2, 3).contiguous().transpose(2, 3) for part in parts(8))
    elif case == "broadcast":
        value = value[:1]
    else:
        value = torch.cat((value, value), dim=3)
    out = function(query, key, value)
    assert compiled or not is_precise(out)  # compiled code hides which backward it has
    torch.testing.assert_close(out, F.scaled_dot_product_attention(query, key, value))


def test_compiled_code_and_exports_for_any_number_of_tokens():
    torch._dynamo.reset()
    own = [part.detach().contiguous().requires_grad_() for part in parts(17)]
    for part in own:
        torch._dynamo.mark_dynamic(part, 2, min=2, max=1024)
    compiled = torch.compile(attention, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(*own), F.scaled_dot_product_attention(*own))
    own = [part.detach().contiguous().requires_grad_() for part in parts(300)]
    assert torch.equal(compiled(*own), F.scaled_dot_product_attention(*own))

    class Attend(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = torch.nn.Parameter(torch.ones((), dtype=torch.bfloat16))

        def forward(self, x):
            x = x * self.weight
            return attention(x, x, x)

    tokens = torch.export.Dim("tokens", min=2, max=1024)
    example = parts(17)[0].detach().contiguous()
    for strict in (False, True):
        exported = torch.export.export(
            Attend(), (example,), dynamic_shapes=({2: tokens},), strict=strict
        )
        x = own[0].detach()
        assert torch.equal(exported.module()(x), Attend()(x))
