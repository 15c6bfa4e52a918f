"""Θ in two Triton kernels, one for each direction; for NVIDIA GPUs.

Both read a row once, hold it in registers, and write their results once. A row of P entries is
split into two power-of-two blocks where that pads less: 576 = 512 + 64 leaves no idle lane, but a
single block would be padded to 1024. README.md in this folder counts the savings.

All variants share the two kernels. THETA, the name of a variant, chooses their arithmetic while
they are compiled.
"""

# Pyright does not know that Triton decides `if` on a constexpr, or that all of this needs Triton.
# pyright: reportPossiblyUnboundVariable=false, reportArgumentType=false
# pyright: reportOperatorIssue=false
from __future__ import annotations  # without Triton there is no tl for annotations

try:
    import triton
    import triton.language as tl
    from triton.language import constexpr
except ImportError:  # a call raises an error
    triton = None


def _kernel(function):
    if triton is None:
        return function
    # A kernel works for any number of rows and need not be compiled for each.
    return triton.jit(do_not_specialize=["num_rows"])(function)


@_kernel
def _exp2(x, PTX: constexpr):
    """Return 2ˣ; with PTX by NVIDIA's instruction, which other GPUs and the interpreter lack.

    Flushing results below 1e-38 to zero saves three instructions and does no harm here.
    """
    if PTX:
        return tl.inline_asm_elementwise(
            "ex2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1
        )
    else:
        return tl.exp2(x)


@_kernel
def _reciprocal(x, PTX: constexpr):
    """Return 1 / x for x ≥ 1, without the range checks of a division (four instructions)."""
    if PTX:
        return tl.inline_asm_elementwise(
            "rcp.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1
        )
    else:
        return 1.0 / x


@_kernel
def _normal(z, PTX: constexpr):
    """Return the density φ(z) of the normal distribution and its tail 1 - Φ(|z|).

    Source: Abramowitz and Stegun, Handbook of Mathematical Functions, 26.2.17 (for erf, 7.1.26),
    has this form with five terms and an error of 7.5e-8 in Φ, which is visible in float32. These
    six terms minimise the maximum of max(1, |z|) times the error: 1.2e-8.
    """
    # exp(-z²/2) / √(2π); the constants are log2(e) / 2 and log2(√(2π)).
    density = _exp2(tl.fma(z * -0.7213475204444817, z, -1.3257480647361592), PTX)
    t = _reciprocal(tl.fma(tl.abs(z), 0.275, 1.0), PTX)
    ratio = tl.fma(t, -0.286170136, 1.12588669)
    ratio = tl.fma(t, ratio, -0.818132021)
    ratio = tl.fma(t, ratio, 0.827735057)
    ratio = tl.fma(t, ratio, 0.109281564)
    ratio = tl.fma(t, ratio, 0.294713013) * t
    return density, ratio * density


@_kernel
def _logistic(z, PTX: constexpr):
    """Return what takes the place of φ(z) and 1 - Φ(|z|) in the tanh approximation of GELU.

    It has Φ(z) ≈ (1 + tanh y) / 2 with y = √(2/π) (z + 0.044715 z³). Then the tail is
    1 / (1 + exp(2|y|)), and the density is the derivative of the approximate Φ.
    """
    square = z * z
    # exp(-2|y|); the constants are -2 √(2/π) log2(e), without and with 0.044715.
    small = _exp2(tl.abs(z) * tl.fma(square, -0.10294324, -2.3022082), PTX)
    tail = small * _reciprocal(1.0 + small, PTX)
    # 2y'; the constants are 2 √(2/π), with and without 3 · 0.044715.
    return tl.fma(-tail, tail, tail) * tl.fma(square, 0.21406445, 1.5957691), tail


@_kernel
def _density_and_tail(z, THETA: constexpr, PTX: constexpr):
    if THETA == "gelu_tanh_l2":
        return _logistic(z, PTX)
    else:
        return _normal(z, PTX)


@_kernel
def _gelu(z, tail):
    """Return zΦ(z), which is max(z, 0) - |z| (1 - Φ(|z|)) for either sign of z."""
    return tl.fma(-tl.abs(z), tail, tl.maximum(z, 0.0))


@_kernel
def _gelu_slope(z, density, tail):
    """Return gelu'(z) = Φ(z) + zφ(z)."""
    return tl.fma(z, density, tl.where(z < 0, tail, 1.0 - tail))


@_kernel
def _exponential(a, peak, PTX: constexpr):
    # Not one fma: for large scores, the rounded product with the peak would no longer cancel.
    return _exp2((a - peak) * 1.4426950408889634, PTX)


@_kernel
def _rows(num_rows, ROWS: constexpr):
    """Return the rows of this program, a number or (ROWS, 1), and which of them exist."""
    first = tl.program_id(0).to(tl.int64) * ROWS  # 64 bits: R · P may exceed 2³¹
    if ROWS == 1:
        return first, True
    else:
        rows = first + tl.arange(0, ROWS)[:, None]
        return rows, rows < num_rows


@_kernel
def _load_tau(tau, ROWS: constexpr, SEGMENTS: constexpr):
    """Return the τ of each row: τ[row % SEGMENTS], by 32-bit numbers that cannot overflow."""
    row = tl.program_id(0) % SEGMENTS * ROWS
    if ROWS > 1 and SEGMENTS > 1:
        row += tl.arange(0, ROWS)[:, None]
    return tl.load(tau + row % SEGMENTS).to(tl.float32)


@_kernel
def _block(start: constexpr, size: constexpr, rows, there, P: constexpr, ROWS: constexpr):
    """Return the offsets of columns in these rows, and which of them are no padding."""
    columns = start + tl.arange(0, size)
    if ROWS > 1:
        columns = columns[None, :]
    if start + size <= P:
        return rows * P + columns, there
    else:
        return rows * P + columns, there & (columns < P)


@_kernel
def _row_sum(x, ROWS: constexpr):
    if ROWS == 1:
        return tl.sum(x, axis=0)
    else:
        return tl.sum(x, axis=1, keep_dims=True)


@_kernel
def _row_max(x, ROWS: constexpr):
    if ROWS == 1:
        return tl.max(x, axis=0)
    else:
        return tl.max(x, axis=1, keep_dims=True)


@_kernel
def _load(tensor, offsets, inside):
    return tl.load(tensor + offsets, mask=inside, other=0.0).to(tl.float32)


@_kernel
def _load_scores(scores, offsets, inside, THETA: constexpr):
    """Load a block of rows, with scores for the padding that have no weight.

    Under softmax, rows that do not exist become NaN, which is never stored.
    """
    if THETA == "softmax":
        return tl.load(scores + offsets, mask=inside, other=float("-inf")).to(tl.float32)
    else:
        return _load(scores, offsets, inside)


@_kernel
def _numerator(a, peak, THETA: constexpr, PTX: constexpr):
    """Return what the factor of a row multiplies."""
    if THETA == "softmax":
        return _exponential(a, peak, PTX)
    elif THETA == "gelu_l1" or THETA == "gelu_l2_post":
        return _gelu(a, _density_and_tail(a, THETA, PTX)[1])
    else:
        return a


@_kernel
def _norm_term(x, THETA: constexpr):
    """Return what is summed over a row for its factor."""
    if THETA == "softmax":
        return x
    elif THETA == "gelu_l1":
        return tl.abs(x)
    else:
        return x * x


@_kernel
def _factor(total, tau, eps, THETA: constexpr):
    eps = tl.cast(eps, tl.float32)  # before 2.15, PyTorch's compiled code passes numbers in 64 bits
    if THETA == "softmax":
        return 1.0 / total
    elif THETA == "gelu_l1":
        return 1.0 / (total / tau + eps)
    else:
        return tl.rsqrt(total / (tau * tau) + eps)


@_kernel
def _weights(x, factor, tau, THETA: constexpr, PTX: constexpr):
    if THETA == "softmax":
        return x * (tau * factor)
    elif THETA == "gelu_l1" or THETA == "gelu_l2_post":
        return x * factor
    else:
        z = x * factor
        return _gelu(z, _density_and_tail(z, THETA, PTX)[1])


@_kernel
def _gradient_terms(
    scores, grad, weights, offsets, inside, peak, factor, tau,
    THETA: constexpr, PTX: constexpr,
):  # fmt: skip
    """Store the weights of a block; return g, h and terms, and the gradient but for a sum.

    The gradient is a multiple of g - h d / τᵖ, where d is the sum of the terms over a row.
    """
    dtype = weights.dtype.element_ty
    a = _load_scores(scores, offsets, inside, THETA)
    u = _load(grad, offsets, inside)
    if THETA == "softmax":
        p = factor * _exponential(a, peak, PTX)
        tl.store(weights + offsets, (tau * p).to(dtype), mask=inside)
        g = p * u
        return g, p, g
    else:
        z = a
        if THETA == "gelu_l2" or THETA == "gelu_tanh_l2":
            z = a * factor
        density, tail = _density_and_tail(z, THETA, PTX)
        w = _gelu(z, tail)
        if THETA == "gelu_l1" or THETA == "gelu_l2_post":
            w *= factor
        tl.store(weights + offsets, w.to(dtype), mask=inside)
        slope = _gelu_slope(z, density, tail)
        g = u * slope
        if THETA == "gelu_l1":
            return g, tl.where(z == 0, 0.0, tl.where(z < 0, -slope, slope)), u * w
        elif THETA == "gelu_l2_post":
            return g, slope * w, u * w
        else:
            return g, z, g * z


@_kernel
def _gradient_factors(dot, factor, tau, THETA: constexpr):
    """Return the factors of g and h in the gradient of the scores, and that of τ times τ."""
    if THETA == "softmax":
        return tau, tau * dot, tau * dot
    elif THETA == "gelu_l1":
        return factor, factor * dot / tau, dot
    else:
        return factor, factor * dot / (tau * tau), dot


@_kernel
def forward_kernel(
    scores, tau, weights, factors, eps, num_rows,
    THETA: constexpr, P: constexpr, LEFT: constexpr, RIGHT: constexpr, ROWS: constexpr,
    SEGMENTS: constexpr, PTX: constexpr,
):  # fmt: skip
    """Write weights (R, P) and factors (R, 1), for softmax (R, 2), ROWS rows in each program."""
    rows, there = _rows(num_rows, ROWS)
    t = _load_tau(tau, ROWS, SEGMENTS)
    left, in_left = _block(0, LEFT, rows, there, P, ROWS)
    x_left, peak = _load_scores(scores, left, in_left, THETA), 0.0
    if RIGHT > 0:
        right, in_right = _block(LEFT, RIGHT, rows, there, P, ROWS)
        x_right = _load_scores(scores, right, in_right, THETA)
    if THETA == "softmax":
        peak = _row_max(x_left, ROWS)
        if RIGHT > 0:
            peak = tl.maximum(peak, _row_max(x_right, ROWS))

    x_left = _numerator(x_left, peak, THETA, PTX)
    total = _row_sum(_norm_term(x_left, THETA), ROWS)
    if RIGHT > 0:
        x_right = _numerator(x_right, peak, THETA, PTX)
        total += _row_sum(_norm_term(x_right, THETA), ROWS)

    factor = _factor(total, t, eps, THETA)
    if THETA == "softmax":
        tl.store(factors + 2 * rows, peak, mask=there)
        tl.store(factors + 2 * rows + 1, factor, mask=there)
    else:
        tl.store(factors + rows, factor, mask=there)

    dtype = weights.dtype.element_ty
    tl.store(weights + left, _weights(x_left, factor, t, THETA, PTX).to(dtype), mask=in_left)
    if RIGHT > 0:
        w_right = _weights(x_right, factor, t, THETA, PTX)
        tl.store(weights + right, w_right.to(dtype), mask=in_right)


@_kernel
def backward_kernel(
    scores, tau, factors, grad, weights, dots, num_rows,
    THETA: constexpr, P: constexpr, LEFT: constexpr, RIGHT: constexpr, ROWS: constexpr,
    SEGMENTS: constexpr, PTX: constexpr,
):  # fmt: skip
    """Write weights (R, P) and dots (R, 1); replace the weights' gradient by the scores'."""
    rows, there = _rows(num_rows, ROWS)
    t, peak = _load_tau(tau, ROWS, SEGMENTS), 0.0
    if THETA == "softmax":
        peak = _load(factors, 2 * rows, there)
        factor = _load(factors, 2 * rows + 1, there)
    else:
        factor = _load(factors, rows, there)

    left, in_left = _block(0, LEFT, rows, there, P, ROWS)
    g_left, h_left, terms = _gradient_terms(
        scores, grad, weights, left, in_left, peak, factor, t, THETA, PTX
    )
    dot = _row_sum(terms, ROWS)
    if RIGHT > 0:
        right, in_right = _block(LEFT, RIGHT, rows, there, P, ROWS)
        g_right, h_right, terms = _gradient_terms(
            scores, grad, weights, right, in_right, peak, factor, t, THETA, PTX
        )
        dot += _row_sum(terms, ROWS)

    dtype = grad.dtype.element_ty
    of_g, of_h, of_tau = _gradient_factors(dot, factor, t, THETA)
    tl.store(dots + rows, of_tau, mask=there)
    tl.store(grad + left, (of_g * g_left - of_h * h_left).to(dtype), mask=in_left)
    if RIGHT > 0:
        tl.store(grad + right, (of_g * g_right - of_h * h_right).to(dtype), mask=in_right)
