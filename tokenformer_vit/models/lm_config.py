"""The shape of a language model, and the shapes that have a name."""

from dataclasses import dataclass
from typing import Any

from tokenformer_vit.errors import InputError
from tokenformer_vit.layers.arguments import COUNTS, Counts

from .sizes import Size


@dataclass(frozen=True)
class LMConfig:
    """The shape of a causal language model; the defaults are those of the released 150M model.

    Args:
        vocab_size: V, number of entries of the embedding.
        context_length: Largest number of tokens in a sequence.
        embed_dim: Width C.
        depth: Number of blocks.
        num_heads: Number of attention heads; divides ``embed_dim``.
        num_qkv_param_tokens: Pairs of each q, k and v; None for C; a list has one for each block.
        num_proj_param_tokens: Pairs of each output projection; None for C.
        num_ffn_param_tokens: Pairs of each feed-forward layer; None for 4 C.
        positions: ``rotary``, or ``learned``, which are added to the embedding.
        rotary_share: Share of the dimensions of each head that are rotated, the first ones.
        rotary_base: Base of the wavelengths.
        tie_embeddings: Whether the embedding is also the head. The head has no bias.
        theta: Name of the Θ variant.
        norm: Parameters of the LayerNorms in blocks (not of the final one), or ``rms``.
        norm_eps: Epsilon of all norms.
        pattention_args: Arguments of all Pattention layers, and ``init``: scaled or released.
        nested: Smaller sizes that are trained as well; see :meth:`TokenFormerLM.set_size`.
    """

    vocab_size: int = 50_304
    context_length: int = 2048
    embed_dim: int = 768
    depth: int = 12
    num_heads: int = 12
    num_qkv_param_tokens: Counts = None
    num_proj_param_tokens: Counts = None
    num_ffn_param_tokens: Counts = None
    positions: str = "rotary"
    rotary_share: float = 0.25
    rotary_base: float = 10_000.0
    tie_embeddings: bool = True
    theta: str = "gelu_l2"
    norm: str = "none"
    norm_eps: float = 1e-5
    pattention_args: dict[str, Any] | None = None
    nested: tuple[Size, ...] = ()

    def __post_init__(self) -> None:
        """Check the values that no layer checks."""
        if isinstance(self.nested, list):  # as JSON and configs have it
            object.__setattr__(self, "nested", tuple(self.nested))
        if self.positions not in ("rotary", "learned"):
            raise InputError(f"positions must be rotary or learned, but got {self.positions!r}")
        if self.positions == "rotary" and (self.rotary_dims < 2 or self.rotary_dims % 2):
            raise InputError(
                f"rotary_share {self.rotary_share} rotates {self.rotary_dims} dimensions of a "
                "head: give a share that rotates an even number, at least 2"
            )

    @property
    def rotary_dims(self) -> int:
        """Dimensions of each head that are rotated."""
        return int(self.embed_dim // self.num_heads * self.rotary_share)


def _pairs(pairs: int, **shape: int) -> dict[str, int]:
    return {**shape, **dict.fromkeys(COUNTS.values(), pairs), "num_ffn_param_tokens": 4 * pairs}


_RELEASED = {"embed_dim": 1024, "depth": 24, "num_heads": 16, "context_length": 1024}
LM_PRESETS: dict[str, dict[str, Any]] = {
    # Released: 151,881,216, 454,166,528, 903,252,480 and 1,587,219,456 parameters.
    "150m": {},
    "450m": {"embed_dim": 1024, "depth": 24, "num_heads": 16},
    "900m": {"embed_dim": 1280, "depth": 32, "num_heads": 16},
    "1.5b": {"embed_dim": 1536, "depth": 40, "num_heads": 16},
    # The growth series of the paper, Figure 3: each model is the one before with more pairs.
    "grown_124m": _pairs(576),
    "grown_354m": _pairs(2140),
    "grown_757m": _pairs(4850),
    "grown_1.4b": _pairs(8620),
    # The growth series that is released, for OpenWebText2 (incremental_scaling_openwebtext2 of the
    # authors' configuration files): 353,503,232 and 756,156,416 parameters.
    "released_354m": _pairs(768, **_RELEASED),
    "released_757m": _pairs(1792, **_RELEASED),
    # For tests and small text.
    "tiny": {"embed_dim": 128, "depth": 4, "num_heads": 4, "context_length": 256},
}


def lm_config(preset: str, **changes: Any) -> LMConfig:
    """Return the configuration of a preset of ``LM_PRESETS``, with changes of its fields."""
    if preset not in LM_PRESETS:
        raise InputError(f"preset must be one of {', '.join(LM_PRESETS)}, but got {preset!r}")
    return LMConfig(**{**LM_PRESETS[preset], **changes})
