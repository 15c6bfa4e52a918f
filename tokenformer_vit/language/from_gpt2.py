"""Convert a GPT-2 of transformers to a TokenFormer that computes the same, as from_vit a ViT."""

import copy
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from transformers import GPT2LMHeadModel
from transformers.activations import ACT2FN
from transformers.models.gpt2 import modeling_gpt2 as gpt2
from transformers.pytorch_utils import Conv1D

from tokenformer_vit.errors import InputError
from tokenformer_vit.layers.arguments import COUNTS
from tokenformer_vit.models.conversion import check_equal, readable, unseen, write_blocks

from .modeling import TokenFormerConfig, TokenFormerForCausalLM

# Names of these are the same in both configurations.
_SAME = ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads")
_SAME += ("max_position_embeddings", "use_cache", "bos_token_id", "eos_token_id", "pad_token_id")
# Only the defaults of these have a counterpart.
_PLAIN = ("scale_attn_weights", "scale_attn_by_inverse_layer_idx", "add_cross_attention")
_PARTS = GPT2LMHeadModel, gpt2.GPT2Model, gpt2.GPT2Block, gpt2.GPT2Attention, gpt2.GPT2MLP
_PARTS += Conv1D, nn.LayerNorm, nn.Linear, nn.Embedding, nn.ModuleList, nn.Dropout


@torch.no_grad()
def from_gpt2(model: GPT2LMHeadModel, texts: Iterable[Tensor] = ()) -> TokenFormerForCausalLM:
    """Build a TokenFormer with the logits of a GPT-2, as :func:`.from_vit` does with a ViT.

    Args:
        model: The GPT-2, with its head. Its activation is GELU, exact or by tanh.
        texts: Batches of (B, N) tokens, in place of images.

    Returns:
        A model in evaluation mode, without dropout, on the device and in the dtype of ``model``,
        with its generation configuration. Positions start after padding on the left, as in GPT-2's
        ``generate``, not its ``forward``.

    Raises:
        InputError: If a part of ``model`` has no exact counterpart, or the outputs differ.
    """
    for obstacle in _obstacles(model):
        raise InputError(
            f"this model has no exact TokenFormer: {obstacle}; give a plain GPT2LMHeadModel"
        )
    source = readable(model)
    for name, module in [*source.named_modules()]:
        if isinstance(module, Conv1D):  # a linear layer that stores its weight as (C_in, C_out)
            linear = nn.Linear(len(module.weight), len(module.bias)).to(module.weight)
            linear.load_state_dict({"weight": module.weight.t(), "bias": module.bias})
            source.set_submodule(name, linear)
    decoder, head, blocks = source.transformer, source.lm_head, source.transformer.h
    pairs: Any = dict.fromkeys(COUNTS.values(), 1)  # of layers that are replaced
    config = TokenFormerConfig(
        **{name: getattr(source.config, name) for name in _SAME},
        **pairs,
        positions="learned",
        tie_embeddings=head.weight is decoder.wte.weight,
        norm="weight+bias",
        norm_eps=source.config.layer_norm_epsilon,
    )
    result: Any = TokenFormerForCausalLM(config).to(head.weight)
    own = result.model
    parts = [(b.attn.c_attn, b.attn.c_proj, b.mlp.c_fc, b.mlp.c_proj, b.mlp.act) for b in blocks]
    write_blocks(source, own.blocks, parts, texts)
    same = [(own.embedding, decoder.wte), (own.positions, decoder.wpe), (own.norm, decoder.ln_f)]
    for target, block in zip(own.blocks, blocks, strict=True):
        same += [(target.norm1, block.ln_1), (target.norm2, block.ln_2)]
    for target, module in (*same, (result.lm_head, head)):
        target.load_state_dict(module.state_dict())
    own.record_param_tokens()
    result.generation_config = copy.deepcopy(model.generation_config)
    tokens = torch.arange(min(16, config.vocab_size, config.context_length))[None]
    check_equal(result.eval(), source, tokens.to(head.weight.device))
    return result.to(model.lm_head.weight.dtype)


def _obstacles(model: Any) -> Iterator[str]:
    if type(model) is not GPT2LMHeadModel:
        yield f"it is a {type(model).__name__}"
    for name, module in model.named_modules():  # adapters and quantised layers are of other types
        if type(module) not in (*_PARTS, type(ACT2FN[model.config.activation_function])):
            yield f"{name} is a {type(module).__name__}"
    yield from unseen(model)
    for name in _PLAIN:
        if (value := getattr(model.config, name)) != getattr(type(model.config)(), name):
            yield f"{name} is {value!r}"
