"""A plain Transformer, the baseline of TokenFormer language models."""

from typing import Any

import numpy as np
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel, GPTNeoXConfig, GPTNeoXForCausalLM

from tokenformer_vit.benchmarking.matched import matched_hidden
from tokenformer_vit.layers.arguments import COUNTS, released_stds
from tokenformer_vit.models import LMConfig
from tokenformer_vit.models.compilation import blocks_of


def transformer_lm(
    vocab_size: int,
    context_length: int,
    embed_dim: int,
    depth: int,
    num_heads: int,
    hidden_features: int | None = None,
    tie_embeddings: bool = True,
    positions: str = "learned",
    rotary_share: float = 0.25,
    rotary_base: float = 10_000.0,
) -> Any:
    """Build a causal Transformer in the form of GPT-2, or of GPT-NeoX with rotary positions.

    Both have a LayerNorm before each residual part and before the head, biases in every linear
    layer but the head, and no dropout. Weights start from N(0, 0.02²), those of the last layer of
    each residual part from 0.02 / √(2 · depth), or 2 / (depth · √C) with rotary positions.

    The arguments are fields of :class:`~tokenformer_vit.models.LMConfig`, and ``hidden_features``,
    the number of neurons of each hidden layer; None for 4 C.

    Returns:
        ``GPT2LMHeadModel``, whose GELU is the tanh approximation, or ``GPTNeoXForCausalLM``, whose
        feed-forward part follows attention as in GPT-2 and in a TokenFormer.

    Source:
        Radford et al., Language Models are Unsupervised Multitask Learners, 2019; GPT-NeoX:
        arXiv:2204.06745; ``124M_naive_transformer.yml`` of the TokenFormer authors.
    """
    hidden = 4 * embed_dim if hidden_features is None else hidden_features
    sizes = (vocab_size, context_length, embed_dim, depth, num_heads)
    LMConfig(*sizes, positions=positions, rotary_share=rotary_share)  # checks the last two
    names = ("vocab_size", "max_position_embeddings", "hidden_size", "num_hidden_layers")
    common: Any = dict(zip((*names, "num_attention_heads"), sizes, strict=True))
    common |= {"tie_word_embeddings": tie_embeddings}
    common |= {"bos_token_id": None, "eos_token_id": None}  # the tokenizer says them
    if positions == "learned":
        parts: Any = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
        # GPT-2's own GELU, in one call instead of five.
        parts |= {"n_inner": hidden, "activation_function": "gelu_pytorch_tanh"}
        return GPT2LMHeadModel(GPT2Config(**common, **parts))
    turns = {"rope_theta": rotary_base, "partial_rotary_factor": rotary_share}
    parts = {"intermediate_size": hidden, "use_parallel_residual": False}
    parts |= {"rope_parameters": {"rope_type": "default", **turns}}
    model = GPTNeoXForCausalLM(GPTNeoXConfig(**common, **parts))
    _, std = released_stds(embed_dim, depth)  # the authors have one rule for both architectures
    for block in blocks_of(model.gpt_neox):
        for layer in (block.attention.dense, block.mlp.dense_4h_to_h):
            nn.init.normal_(layer.weight, std=std)  # transformers has smaller ones only for GPT-2
    return model


def matched_transformer(config: LMConfig, positions: str = "learned") -> Any:
    """Build the :func:`transformer_lm` of a TokenFormer's width, depth and weights in blocks.

    Args:
        config: Shape of the TokenFormer; of numbers of pairs by block, the mean counts.
        positions: ``learned``, or ``rotary`` with the share and base of the TokenFormer.

    Raises:
        InputError: If no Transformer matches; see :func:`.matched_hidden`.
    """
    width = config.embed_dim
    qkv, proj = (np.mean(getattr(config, COUNTS[kind]) or width) for kind in ("qkv", "proj"))
    ffn = np.mean(config.num_ffn_param_tokens or 4 * width)
    hidden = matched_hidden(width, round(3 * qkv + proj + ffn))
    same = ("vocab_size", "context_length", "embed_dim", "depth", "num_heads", "tie_embeddings")
    shape = {name: getattr(config, name) for name in (*same, "rotary_share", "rotary_base")}
    return transformer_lm(**shape, hidden_features=hidden, positions=positions)
