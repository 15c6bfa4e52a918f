"""Convert a GPT-2 of transformers to a TokenFormer that computes the same.

The parts of a block are those of a Vision Transformer; see :mod:`tokenformer_vit.models.from_vit`.
"""

import copy
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from tqdm import tqdm
from transformers import GPT2LMHeadModel
from transformers.activations import ACT2FN
from transformers.models.gpt2 import modeling_gpt2 as gpt2
from transformers.pytorch_utils import Conv1D

from tokenformer_vit.errors import InputError
from tokenformer_vit.layers.arguments import COUNTS
from tokenformer_vit.layers.pattention import unseen
from tokenformer_vit.models.comparison import check_equal
from tokenformer_vit.models.from_vit import covariances, linear_layers, readable, write_block

from .modeling import TokenFormerConfig, TokenFormerForCausalLM

# Names of these are the same in both configurations.
_SAME = ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads")
_SAME += ("max_position_embeddings", "use_cache", "bos_token_id", "eos_token_id", "pad_token_id")
# Fields that change what a block computes, with the value that has a counterpart.
_PLAIN = {
    "scale_attn_weights": True,
    "scale_attn_by_inverse_layer_idx": False,
    "reorder_and_upcast_attn": False,
    "add_cross_attention": False,
}
_PARTS = GPT2LMHeadModel, gpt2.GPT2Model, gpt2.GPT2Block, gpt2.GPT2Attention, gpt2.GPT2MLP
_PARTS += Conv1D, nn.LayerNorm, nn.Linear, nn.Embedding, nn.ModuleList, nn.Dropout


@torch.no_grad()
def from_gpt2(model: GPT2LMHeadModel, texts: Iterable[Tensor] = ()) -> TokenFormerForCausalLM:
    """Build a TokenFormer with the logits of a GPT-2 in evaluation mode.

    Args:
        model: The GPT-2, with its head, and any number of hidden neurons. Its activation is GELU,
            exact or by tanh.
        texts: Batches of (B, N) tokens of typical texts. The first pairs of q, k, v, o are then the
            best map of their rank for such texts.

    Returns:
        A model with Θ ``linear`` in q, k, v, o, and ``gelu`` or ``gelu_tanh`` in the feed-forward
        part, in evaluation mode, on the device and in the dtype of ``model``, with its generation
        configuration, but no dropout. A block has 16d² weights in place of 12d².

    Raises:
        InputError: If a part of ``model`` has no exact counterpart, or the outputs differ.

    Note:
        Positions start after padding on the left, as in GPT-2's ``generate``, not its ``forward``.
        ``token_type_ids`` have no effect.
    """
    if obstacle := _obstacle(model):
        raise InputError(
            f"this model has no exact TokenFormer: {obstacle}; give a plain GPT2LMHeadModel"
        )
    source = readable(model)
    decoder, given = source.transformer, source.config
    embedding, positions, head = decoder.wte.weight, decoder.wpe.weight, source.lm_head.weight
    config = TokenFormerConfig(
        **{name: getattr(given, name) for name in _SAME},
        **dict.fromkeys(COUNTS.values(), 1),  # these layers are replaced
        positions="learned",
        tie_embeddings=head is embedding,
        norm="weight+bias",
        norm_eps=given.layer_norm_epsilon,
    )
    result: Any = TokenFormerForCausalLM(config).to(embedding)
    outer = {"model.embedding.weight": embedding, "model.positions.weight": positions}
    outer |= {f"model.norm.{name}": tensor for name, tensor in decoder.ln_f.named_parameters()}
    for number, block in enumerate(decoder.h):
        for own, norm in (("norm1", block.ln_1), ("norm2", block.ln_2)):
            names = norm.state_dict()
            outer |= {f"model.blocks.{number}.{own}.{name}": names[name] for name in names}
    result.load_state_dict({**outer, "lm_head.weight": head}, strict=False)
    of = covariances(source, [m for b in decoder.h for m in (b.attn.c_attn, b.attn.c_proj)], texts)
    blocks = tqdm(decoder.h, "converting", disable=None)
    for block, target in zip(blocks, result.model.blocks, strict=True):
        attn, proj, mlp = block.attn.c_attn, block.attn.c_proj, block.mlp
        fcs = (linear_layers(fc.weight.t(), fc.bias)[0] for fc in (mlp.c_fc, mlp.c_proj))
        qkv = linear_layers(attn.weight.t(), attn.bias, 3)
        (output,) = linear_layers(proj.weight.t(), proj.bias)
        write_block(target, qkv, output, (*fcs, mlp.act), of.get(attn), of.get(proj))
    result.model.record_param_tokens()
    result.generation_config = copy.deepcopy(model.generation_config)
    random = torch.Generator().manual_seed(0)
    tokens = torch.randint(given.vocab_size, (1, 16), generator=random).to(embedding.device)
    check_equal(result.eval(), source, tokens)
    return result.to(model.lm_head.weight.dtype)


def _obstacle(model: GPT2LMHeadModel) -> str:
    """Name the first part that has no counterpart; "" without any."""
    if type(model) is not GPT2LMHeadModel:
        return f"it is a {type(model).__name__}"
    for name, plain in _PLAIN.items():
        if (value := getattr(model.config, name)) != plain:
            return f"{name} is {value!r}"
    kinds = *_PARTS, type(ACT2FN[model.config.activation_function])
    if model.lm_head.bias is not None:
        return "lm_head has a bias"
    for name, module in model.named_modules():  # adapters and quantised layers are of other types
        if type(module) not in kinds or (name == "lm_head") != isinstance(module, nn.Linear):
            return f"{name} is a {type(module).__name__}"
        if deed := unseen(module):
            return f"{name or 'it'} {deed}"
    return ""
