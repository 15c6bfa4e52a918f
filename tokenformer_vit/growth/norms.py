"""What a Θ variant divides its rows by."""

from tokenformer_vit.ops import check_theta

__all__ = ["norm_order"]


def norm_order(theta: str) -> int:
    """Return p of the Lₚ norm over pairs in a Θ variant: 1 or 2.

    The p-th power of that norm is a sum over pairs. Hence τᵖ is what has to follow that sum where
    pairs come or go and the others are to keep their weight.

    Args:
        theta: Name of the variant.

    Raises:
        InputError: If the variant is unknown.
    """
    return 1 if check_theta(theta) in ("softmax", "gelu_l1") else 2
