"""A plain Transformer, the baseline of TokenFormer language models."""

import numpy as np
from transformers import GPT2Config, GPT2LMHeadModel

from tokenformer_vit.benchmarking.matched import matched_hidden
from tokenformer_vit.errors import InputError
from tokenformer_vit.models import LMConfig


def transformer_lm(
    vocab_size: int,
    context_length: int,
    embed_dim: int,
    depth: int,
    num_heads: int,
    hidden_features: int | None = None,
    tie_embeddings: bool = True,
) -> GPT2LMHeadModel:
    """Build a causal Transformer in the form of GPT-2, with the initialisation of GPT-2.

    It has learned positions, added to the embedding; a LayerNorm before each of the two residual
    parts of a block and one before the head; GELU in its tanh approximation; and biases in every
    linear layer but the head. It has no dropout.

    Args:
        vocab_size: V, number of entries of the embedding.
        context_length: Largest number of tokens in a sequence.
        embed_dim: Width C.
        depth: Number of blocks.
        num_heads: Number of attention heads; divides ``embed_dim``.
        hidden_features: Neurons of each hidden layer; None for 4 C.
        tie_embeddings: Whether the embedding is also the head.

    Returns:
        The model. Its attention is PyTorch's own function. Its configuration names no end-of-text
        token; the tokenizer does.

    Raises:
        InputError: If a size does not fit.

    Source:
        Radford et al., Language Models are Unsupervised Multitask Learners, 2019, Section 2.3;
        12 × 768 with its vocabulary and context is its smallest model.
    """
    sizes = {
        "vocab_size": vocab_size,
        "context_length": context_length,
        "embed_dim": embed_dim,
        "depth": depth,
        "num_heads": num_heads,
        "hidden_features": 4 * embed_dim if hidden_features is None else hidden_features,
    }
    for name, size in sizes.items():
        if size < 1:
            raise InputError(f"{name} must be at least 1, but got {size}")
    if embed_dim % num_heads:
        raise InputError(f"embed_dim {embed_dim} must be a multiple of num_heads {num_heads}")
    config = GPT2Config(
        vocab_size=vocab_size,
        n_positions=context_length,
        n_embd=embed_dim,
        n_layer=depth,
        n_head=num_heads,
        n_inner=sizes["hidden_features"],
        activation_function="gelu_pytorch_tanh",  # GPT-2's own, in one call instead of five
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        tie_word_embeddings=tie_embeddings,
        bos_token_id=None,
        eos_token_id=None,
    )
    return GPT2LMHeadModel(config)


def matched_transformer(config: LMConfig) -> GPT2LMHeadModel:
    """Build the Transformer that matches a TokenFormer: its width, depth and weights in blocks.

    Args:
        config: Shape of the TokenFormer; of numbers of pairs by block, the mean counts.

    Returns:
        The model; see :func:`transformer_lm`.

    Raises:
        InputError: If no Transformer matches;
            see :func:`~tokenformer_vit.benchmarking.matched.matched_hidden`.
    """
    width = config.embed_dim
    qkv, proj, ffn = (
        default if pairs is None else np.mean(pairs)
        for pairs, default in (
            (config.num_qkv_param_tokens, width),
            (config.num_proj_param_tokens, width),
            (config.num_ffn_param_tokens, 4 * width),
        )
    )
    return transformer_lm(
        config.vocab_size,
        config.context_length,
        width,
        config.depth,
        config.num_heads,
        matched_hidden(width, round(3 * qkv + proj + ffn)),
        config.tie_embeddings,
    )
