"""Schemas of the JSON files that are read: one for each kind of file."""

from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

from pydantic import ConfigDict, Field, TypeAdapter, ValidationError, WrapValidator
from pydantic_core import PydanticCustomError
from typing_extensions import NotRequired, TypedDict  # pydantic needs this one below Python 3.12

from tokenformer_vit.errors import InputError, first_fault

T = TypeVar("T")

_MOST_CONTEXT = 2**31 - 2  # Arrow counts the entries of a row, one more, by 32 bits
Count = Annotated[int, Field(ge=0, lt=2**63)]
Context = Annotated[int, Field(ge=1, le=_MOST_CONTEXT)]
Vocabulary = Annotated[int, Field(ge=1, le=2**32)]
Token = Annotated[int, Field(ge=0, lt=2**32)]
SplitName = Annotated[str, Field(pattern=r"^[\w-][\w.-]*$")]
# No path may lead out of the folder of the file.
FileName = Annotated[str, Field(pattern=r"^[\w-][\w.-]*(/[\w-][\w.-]*)*$")]


class Counts(TypedDict):
    """Size of a split: rows, and the tokens, documents and bytes of their text."""

    rows: Count
    tokens: Count
    documents: Count
    bytes: Count
    left_over: NotRequired[Count]


class TextMeta(TypedDict):
    """``meta.json`` of a folder of tokens."""

    context_length: Context
    vocab_size: Vocabulary
    splits: Annotated[dict[SplitName, Counts], Field(min_length=1)]
    end: NotRequired[Token | None]
    tokenizer: NotRequired[str]
    sources: NotRequired[list[str]]
    settings: NotRequired[dict[str, Any]]


class WriterState(TypedDict):
    """Place in a split from which an interrupted preparation continues to write."""

    counts: Counts
    shards: Count
    rest: list[Token]


class Position(TypedDict):
    """Place in the sources from which an interrupted preparation continues to read."""

    source: Count
    state: dict[str, Any] | None


class Progress(TypedDict):
    """``progress.json`` of an unfinished folder of tokens."""

    settings: dict[str, Any]
    position: Position | None
    splits: dict[SplitName, WriterState]
    files: list[FileName]


class Part(TypedDict):
    """A file in ``parts``: what ``evaluate-lm`` keeps of each text and task."""

    settings: dict[str, Any]
    values: dict[str, int | float | None]


class ConfigFile(TypedDict):
    """Entries of ``config.json`` that are checked before transformers reads it."""

    model_type: NotRequired[str]
    is_encoder_decoder: NotRequired[Literal[False]]
    return_dict: NotRequired[Literal[True]]
    num_labels: NotRequired[Annotated[int, Field(ge=0, le=10**6)]]  # each gets a name in memory


class ShardIndex(TypedDict):
    """``model.safetensors.index.json``: the file of each tensor."""

    weight_map: Annotated[dict[str, FileName], Field(min_length=1)]


Size = Annotated[int, Field(ge=1, lt=2**31)]


def _name_pairs(value: Any, rules: Callable[[Any], Any]) -> Any:
    try:
        return rules(value)
    except ValidationError as error:  # pydantic would describe each part of the union
        text = "Input should be a whole number of at least 1, or a list of one for each block"
        raise PydanticCustomError("pairs", text) from error


PairCounts = Annotated[Size | list[Size] | tuple[Size, ...], WrapValidator(_name_pairs)]
Share = Annotated[float, Field(gt=0, le=1)]
# A nested size; see models/sizes.py.
LMSize = Share | dict[str, Share | Size]


class PattentionArgs(TypedDict, total=False):
    """Arguments that the layer does not check, or does not report in one line."""

    __pydantic_config__ = ConfigDict(strict=True, extra="allow", allow_inf_nan=False)  # type: ignore[misc]

    tau: Annotated[float, Field(gt=0)] | None
    learn_tau: bool
    eps: Annotated[float, Field(ge=0)]
    key_init_scale: Annotated[float, Field(gt=0)]
    gate: str


class _Shape(TypedDict, total=False):
    """What TokenFormers and Transformers have in common."""

    __pydantic_config__ = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False)  # type: ignore[misc]

    vocab_size: Size
    context_length: Size
    embed_dim: Size
    depth: Size
    num_heads: Size
    positions: str
    rotary_share: Annotated[float, Field(gt=0, le=1)]
    rotary_base: Annotated[float, Field(gt=0)]
    tie_embeddings: bool


class TransformerShape(_Shape, total=False):
    """The arguments of :func:`~tokenformer_vit.language.transformer_lm`."""

    hidden_features: Size | None


class LMShape(_Shape, total=False):
    """The fields of :class:`~tokenformer_vit.models.LMConfig` in ``config.json``."""

    num_qkv_param_tokens: PairCounts | None
    num_proj_param_tokens: PairCounts | None
    num_ffn_param_tokens: PairCounts | None
    theta: str
    norm: str
    norm_eps: Annotated[float, Field(ge=0)]
    pattention_args: PattentionArgs | None
    nested: list[LMSize] | tuple[LMSize, ...]


def read_json(path: Path, schema: type[T], what: str, way_out: str) -> T:
    """Read a JSON file and check it by a schema.

    Args:
        path: The file.
        schema: Type that pydantic knows; values are not converted.
        what: Name of such a file for the error, such as ``a description of tokens``.
        way_out: What to do if the file does not fit.

    Returns:
        The content of the file.

    Raises:
        InputError: If it is not JSON, or does not fit the schema.
        OSError: If it cannot be read.
    """
    try:
        return TypeAdapter(schema).validate_json(path.read_bytes(), strict=True)
    except ValidationError as error:
        raise InputError(f"{path} is not {what} ({first_fault(error)}); {way_out}") from error


def check(schema: type[T], value: Any) -> T:
    """Check a value by a schema; see :func:`read_json`.

    Raises:
        InputError: If it does not fit; the message says where and why.
    """
    try:
        return TypeAdapter(schema).validate_python(value)
    except ValidationError as error:
        raise InputError(first_fault(error)) from error
