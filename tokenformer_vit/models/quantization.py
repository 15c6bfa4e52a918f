"""Quantise the parameter tokens of a trained model with torchao, for inference."""

# torchao is optional, and not in [dev].
# pyright: reportMissingImports=false

from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from tokenformer_vit.errors import InputError, one_line
from tokenformer_vit.layers.quantized import QuantizedPattention

from .sizes import find_layers

if TYPE_CHECKING:
    from torchao.core.config import AOBaseConfig

CONFIGS = ("int8", "int4")
_GROUP = 32  # weights that share a scale under int4; the widths of most small models allow it


@dataclass(frozen=True)
class Quantized:
    """What :func:`quantize` changed.

    Args:
        tensors: Number of quantised tensors, two for each Pattention layer.
        bytes_before: Bytes of all parameters and buffers of the model before.
        bytes_after: Bytes of all parameters and buffers of the model now.
    """

    tensors: int
    bytes_before: int
    bytes_after: int


def quantize(model: nn.Module, config: "str | AOBaseConfig" = "int8") -> Quantized:
    """Quantise the keys and values of all Pattention layers of a model, in place.

    The model is then only for inference: its pairs cannot be grown, pruned, masked or nested.
    Embeddings, norms and the head stay as they are. (torchao's own ``quantize_(model, config)``
    quantises linear layers. In these models it finds only the head.) A layer with a ``size`` or a
    mask keeps only the pairs in use.

    Args:
        model: Image or language model, on its device, in float32, bfloat16 or float16.
        config: ``int8``: a scale for each key, and for each output of the values. ``int4``: a scale
            and a zero point for each 32 numbers that a product sums. Or a configuration of torchao
            for the weights of linear layers.

    Returns:
        Number of tensors, and bytes before and after.

    Raises:
        InputError: If torchao is missing, the model has no Pattention layer or is quantised
            already, a layer has ``top_k``, or torchao cannot quantise every tensor. Then nothing is
            changed.

    Note:
        Products are computed in the dtype of the input. On a CPU, ``int4`` uses a tensor that
        torchao calls a prototype; the counts of a layer must be multiples of 32.

    Source:
        torchao: https://github.com/pytorch/ao
    """
    layers = find_layers(model)
    if not layers or "" in layers:
        raise InputError(
            f"{type(model).__name__} contains no Pattention layer to quantise; give a TokenFormer"
        )
    if top_k := [name for name, layer in layers.items() if layer.top_k is not None]:
        raise InputError(
            f"{top_k[0]} reads only the values of its strongest pairs (top_k), which a quantised "
            "layer cannot: set top_k to None"
        )
    device = next(iter(layers.values())).key_param_tokens.device.type
    chosen = _config(config, device) if isinstance(config, str) else config
    before = model_bytes(model)
    made = {name: _quantized(name, layer, chosen) for name, layer in layers.items()}
    for name, layer in made.items():
        parent, _, last = name.rpartition(".")
        setattr(model.get_submodule(parent), last, layer)
    return Quantized(2 * len(made), before, model_bytes(model))


def model_bytes(model: nn.Module) -> int:
    """Count the bytes of all parameters and buffers of a model, quantised or not."""
    return sum(map(_bytes, chain(model.parameters(), model.buffers())))


def _quantized(name: str, layer: Any, config: Any) -> QuantizedPattention:
    from torchao.quantization import quantize_

    made = QuantizedPattention(layer)
    try:
        quantize_(made, config)
        # torchao skips a matrix whose size does not fit, and says so only in its log.
        if not all(map(is_traceable_wrapper_subclass, made.parameters())):
            raise ValueError("a group does not divide one of these numbers")
    except Exception as error:  # each format has its own demands on shapes, devices and packages
        shape = f"{made.keys.in_features} -> {layer.num_used} pairs -> {made.values.out_features}"
        raise InputError(
            f"torchao cannot quantise {name} ({shape}) with {type(config).__name__}: "
            f"{one_line(error)}; choose another configuration, such as 'int8'"
        ) from error
    return made


def _config(name: str, device: str) -> Any:
    if name not in CONFIGS:
        raise InputError(
            f"config must be a configuration of torchao or one of {', '.join(CONFIGS)}, but got "
            f"{name!r}"
        )
    try:
        from torchao.prototype.quantization.int4 import PrototypeInt4WeightOnlyConfig
        from torchao.quantization import Int4WeightOnlyConfig, Int8WeightOnlyConfig
        from torchao.quantization.quantize_.workflows import Int4PackingFormat
    except ImportError as error:
        raise InputError(
            f"quantisation needs torchao 0.18 or later ({one_line(error)}): "
            "in the clone, run pip install '.[quantization]'"
        ) from error
    # set_inductor_config would change torch.compile for the whole process.
    if name == "int8":
        return Int8WeightOnlyConfig(set_inductor_config=False)
    if device == "cpu":
        return PrototypeInt4WeightOnlyConfig(group_size=_GROUP, set_inductor_config=False)
    return Int4WeightOnlyConfig(
        group_size=_GROUP,
        int4_packing_format=Int4PackingFormat.TILE_PACKED_TO_4D,
        set_inductor_config=False,
    )


def _bytes(tensor: Tensor) -> int:
    if not is_traceable_wrapper_subclass(tensor):
        return tensor.nbytes
    names, _ = tensor.__tensor_flatten__()
    return sum(_bytes(getattr(tensor, name)) for name in names)
