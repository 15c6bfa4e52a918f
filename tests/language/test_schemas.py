"""JSON that fits its schema is read; other JSON is refused in one line."""

import dataclasses
import inspect

import pytest

pytest.importorskip("transformers", reason="pip install '.[language]'")

from tokenformer_vit.errors import InputError
from tokenformer_vit.language import TokenFormerConfig, transformer_lm
from tokenformer_vit.language.schemas import LMShape, TextMeta, TransformerShape, check, read_json
from tokenformer_vit.models import LMConfig


def test_the_schema_of_a_model_has_the_fields_of_its_configuration():
    assert set(LMShape.__annotations__) == {field.name for field in dataclasses.fields(LMConfig)}
    arguments = {*inspect.signature(transformer_lm).parameters}
    assert set(TransformerShape.__annotations__) == arguments
    default = dataclasses.asdict(LMConfig())
    assert check(LMShape, default) == default


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"num_heads": 0}, "num_heads is 0,"),
        ({"vocab_size": 0}, "vocab_size is 0,"),
        ({"depth": -1}, "depth is -1,"),
        ({"depth": 1.5}, "depth is 1.5,"),
        ({"depth": "12"}, "depth is '12',"),
        ({"embed_dim": True}, "embed_dim is True,"),
        ({"context_length": 2**40}, "context_length is 1099511627776,"),
        ({"num_ffn_param_tokens": 0}, "num_ffn_param_tokens is 0,"),
        ({"num_ffn_param_tokens": [8, 0]}, "num_ffn_param_tokens is [8, 0],"),
        ({"rotary_base": float("nan")}, "rotary_base is nan,"),
        ({"rotary_share": 1.5}, "rotary_share is 1.5,"),
        ({"norm_eps": -1.0}, r"norm_eps is -1.0,"),
        ({"theta": 5}, "theta is 5,"),
        ({"pattention_args": {"eps": "x"}}, "pattention_args.eps is 'x',"),
        ({"pattention_args": {"eps": -1.0}}, "pattention_args.eps is -1.0,"),
        ({"pattention_args": {"tau": 0.0}}, "pattention_args.tau is 0.0,"),
        ({"hidden_size": 0}, "embed_dim is 0,"),
    ],
)
def test_a_size_that_no_model_has_is_refused_with_its_name(fields, message):
    with pytest.raises(InputError) as caught:
        TokenFormerConfig(**fields)
    assert str(caught.value).startswith(message)
    assert "\n" not in str(caught.value)


def test_a_value_that_is_long_is_cut(tmp_path):
    (tmp_path / "meta.json").write_text('{"context_length": "' + "9" * 5000 + '"}')
    with pytest.raises(InputError, match=r"context_length is '9+\.\.\., .*; do this$") as caught:
        read_json(tmp_path / "meta.json", TextMeta, "a description", "do this")
    assert len(str(caught.value)) < 300
