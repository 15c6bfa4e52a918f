"""Convert a GPT-2 of transformers to a TokenFormer that computes the same.

The parts of a block are those of a Vision Transformer; see :mod:`tokenformer_vit.models.from_vit`.
"""

import copy
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from tqdm import tqdm
from transformers import GPT2Config, GPT2LMHeadModel
from transformers.activations import ACT2FN
from transformers.models.gpt2 import modeling_gpt2 as gpt2
from transformers.pytorch_utils import Conv1D

from tokenformer_vit.errors import InputError
from tokenformer_vit.layers.arguments import COUNTS
from tokenformer_vit.models.conversion import (
    check_equal,
    covariances,
    readable,
    unseen,
    write_block,
)

from .modeling import TokenFormerConfig, TokenFormerForCausalLM

# Names of these are the same in both configurations.
_SAME = ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads")
_SAME += ("max_position_embeddings", "use_cache", "bos_token_id", "eos_token_id", "pad_token_id")
# Fields that change what a block computes: only the default has a counterpart.
_PLAIN = ("scale_attn_weights", "scale_attn_by_inverse_layer_idx", "add_cross_attention")
_PARTS = GPT2LMHeadModel, gpt2.GPT2Model, gpt2.GPT2Block, gpt2.GPT2Attention, gpt2.GPT2MLP
_PARTS += Conv1D, nn.LayerNorm, nn.Linear, nn.Embedding, nn.ModuleList, nn.Dropout


@torch.no_grad()
def from_gpt2(model: GPT2LMHeadModel, texts: Iterable[Tensor] = ()) -> TokenFormerForCausalLM:
    """Build a TokenFormer with the logits of a GPT-2 in evaluation mode.

    Args:
        model: The GPT-2, with its head. Its activation is GELU, exact or by tanh.
        texts: Batches of (B, N) tokens, to order the pairs as the images of ``from_vit`` do.

    Returns:
        A model with the Θ of :func:`.from_vit`, in evaluation mode, on the device and in the dtype
        of ``model``, with its generation configuration, without dropout.

    Raises:
        InputError: If a part of ``model`` has no exact counterpart, or the outputs differ.

    Note:
        Positions start after padding on the left, as in GPT-2's ``generate``, not its ``forward``.
        ``token_type_ids`` have no effect.
    """
    for name, module in model.named_modules():  # adapters and quantised layers are of other types
        known = *_PARTS, type(ACT2FN[model.config.activation_function])
        if type(module) not in known or (name == "lm_head") != isinstance(module, nn.Linear):
            raise _refusal(f"{name or 'it'} is a {type(module).__name__}")
        if deed := unseen(module):
            raise _refusal(f"{name or 'it'} {deed}")
    for name in _PLAIN:
        if (value := getattr(model.config, name)) != getattr(GPT2Config(), name):
            raise _refusal(f"{name} is {value!r}")
    source = readable(model)
    given, decoder, head = source.config, source.transformer, source.lm_head
    config = TokenFormerConfig(
        **{name: getattr(given, name) for name in _SAME},
        **dict.fromkeys(COUNTS.values(), 1),  # these layers are replaced
        positions="learned",
        tie_embeddings=head.weight is decoder.wte.weight,
        norm="weight+bias",
        norm_eps=given.layer_norm_epsilon,
    )
    result: Any = TokenFormerForCausalLM(config).to(head.weight)
    own = result.model
    of = covariances(source, [m for b in decoder.h for m in (b.attn.c_attn, b.attn.c_proj)], texts)
    pairs = [(own.embedding, decoder.wte), (own.positions, decoder.wpe), (own.norm, decoder.ln_f)]
    for block, target in zip(tqdm(decoder.h, "converting", disable=None), own.blocks, strict=True):
        convs = block.attn.c_attn, block.attn.c_proj, block.mlp.c_fc, block.mlp.c_proj
        qkv, proj, *mlp = map(_linear, convs)
        write_block(target, qkv, proj, (*mlp, block.mlp.act), of.get(convs[0]), of.get(convs[1]))
        pairs += [(target.norm1, block.ln_1), (target.norm2, block.ln_2)]
    for copied, part in (*pairs, (result.lm_head, head)):
        copied.load_state_dict(part.state_dict())
    own.record_param_tokens()
    result.generation_config = copy.deepcopy(model.generation_config)
    random = torch.Generator().manual_seed(0)
    tokens = torch.randint(given.vocab_size, (1, 16), generator=random)
    check_equal(result.eval(), source, tokens.to(head.weight.device))
    return result.to(model.lm_head.weight.dtype)


def _refusal(obstacle: str) -> InputError:
    return InputError(
        f"this model has no exact TokenFormer: {obstacle}; give a plain GPT2LMHeadModel"
    )


def _linear(conv: Conv1D) -> nn.Linear:
    """Return a layer that stores its weight as (C_in, C_out) as a linear layer."""
    linear = nn.Linear(*conv.weight.shape, device=conv.weight.device, dtype=conv.weight.dtype)
    linear.load_state_dict({"weight": conv.weight.t(), "bias": conv.bias})
    return linear
