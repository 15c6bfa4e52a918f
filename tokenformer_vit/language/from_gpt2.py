"""Convert a GPT-2 of transformers to a TokenFormer that computes the same.

The parts of a block are those of a Vision Transformer; see :mod:`tokenformer_vit.models.from_vit`.
"""

import copy
from typing import Any

import torch
from torch import nn
from tqdm import tqdm
from transformers import GPT2LMHeadModel
from transformers.activations import ACT2FN
from transformers.models.gpt2 import modeling_gpt2 as gpt2
from transformers.pytorch_utils import Conv1D

from tokenformer_vit.errors import InputError
from tokenformer_vit.models.from_vit import Affine, affine, num_pairs, write_block

from .modeling import TokenFormerConfig, TokenFormerForCausalLM

_THETAS = {"gelu_new": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh", "gelu": "gelu"}
# Names of these are the same in both configurations.
_SAME = ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads")
_SAME += ("max_position_embeddings", "use_cache", "bos_token_id", "eos_token_id", "pad_token_id")
# Fields that change what a block computes, with the values that have a counterpart.
_PLAIN = {
    "activation_function": tuple(_THETAS),
    "scale_attn_weights": (True,),
    "scale_attn_by_inverse_layer_idx": (False,),
    "reorder_and_upcast_attn": (False,),
    "add_cross_attention": (False,),
}
_PARTS = GPT2LMHeadModel, gpt2.GPT2Model, gpt2.GPT2Block, gpt2.GPT2Attention, gpt2.GPT2MLP
_PARTS += Conv1D, nn.LayerNorm, nn.Linear, nn.Embedding, nn.ModuleList, nn.Dropout


@torch.no_grad()
def from_gpt2(model: GPT2LMHeadModel) -> TokenFormerForCausalLM:
    """Build a TokenFormer with the logits of a GPT-2 in evaluation mode.

    Args:
        model: The GPT-2, with its head, and any number of hidden neurons. Its GELU is exact
            (``gelu``) or by tanh (``gelu_new``, ``gelu_pytorch_tanh``).

    Returns:
        A model with Θ ``gelu`` or ``gelu_tanh``, in evaluation mode, on the device and in the dtype
        of ``model``. It has the same embedding, positions, final norm, head, context, special
        tokens and generation configuration, but no dropout.

    Raises:
        InputError: If a part of ``model`` has no exact counterpart; the message names it.

    Note:
        The relative error of logits is 1e-6 to 1e-5 in float32. Convert a half-precision model as
        ``model.float()``. A block has 24d² weights in place of 12d². Keep weight decay off the bias
        of the norms, on which all offsets rest.
        Positions start after padding on the left, as in GPT-2's ``generate``, not its ``forward``.
        ``token_type_ids`` have no effect.
    """
    if obstacle := _obstacle(model):
        raise InputError(
            f"this model has no exact TokenFormer: {obstacle}; give a plain GPT2LMHeadModel"
        )
    source = model.config
    decoder: Any = model.transformer
    embedding, positions, head = decoder.wte.weight, decoder.wpe.weight, model.lm_head.weight
    width = source.hidden_size
    pairs: Any = num_pairs(width, 4 * width if source.n_inner is None else source.n_inner)
    config = TokenFormerConfig(
        **{name: getattr(source, name) for name in _SAME},
        **pairs,
        positions="learned",
        tie_embeddings=head is embedding,
        theta=_THETAS[source.activation_function],
        norm="bias",
        norm_eps=source.layer_norm_epsilon,
    )
    with torch.random.fork_rng([]):
        torch.manual_seed(0)  # for the values of pairs that are left over
        result: Any = TokenFormerForCausalLM(config)
    result.to(embedding)
    outer = {"model.embedding.weight": embedding, "model.positions.weight": positions}
    outer |= {f"model.norm.{name}": tensor for name, tensor in decoder.ln_f.named_parameters()}
    result.load_state_dict({**outer, "lm_head.weight": head}, strict=False)
    blocks = tqdm(decoder.h, "converting", disable=None)
    for block, target in zip(blocks, result.model.blocks, strict=True):
        qkv = zip(*(part.chunk(3) for part in _linear(block.attn.c_attn)), strict=True)
        proj, *mlp = map(_linear, (block.attn.c_proj, block.mlp.c_fc, block.mlp.c_proj))
        write_block(target, affine(block.ln_1), qkv, proj, affine(block.ln_2), *mlp)
    result.generation_config = copy.deepcopy(model.generation_config)
    return result.eval()


def _linear(layer: Any) -> Affine:
    """Read weight and bias of a layer that stores its weight as (C_in, C_out)."""
    weight, bias = affine(layer)
    return weight.t(), bias


def _obstacle(model: GPT2LMHeadModel) -> str:
    """Name the first part that has no counterpart; "" without any."""
    if type(model) is not GPT2LMHeadModel:
        return f"it is a {type(model).__name__}"
    for name, allowed in _PLAIN.items():
        if (value := getattr(model.config, name)) not in allowed:
            return f"{name} is {value!r}"
    kinds = *_PARTS, type(ACT2FN[model.config.activation_function])
    if model.lm_head.bias is not None:
        return "lm_head has a bias"
    for name, module in model.named_modules():  # adapters and quantised layers are of other types
        if type(module) not in kinds or (name == "lm_head") != isinstance(module, nn.Linear):
            return f"{name} is a {type(module).__name__}"
    return ""
