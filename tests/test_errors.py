from typing import Annotated, Literal

import pytest
from pydantic import AfterValidator, BaseModel, Field, ValidationError

from tokenformer_vit.errors import InputError, first_fault, one_line


def even(value: int) -> int:
    if value % 2:
        raise ValueError("it is odd; give an even number")
    return value


class Inner(BaseModel):
    rate: Annotated[float, Field(gt=0)] = 1.0


class Values(BaseModel):
    size: Annotated[int, AfterValidator(even)]
    mode: Literal["a", "b"] = "a"
    names: Annotated[list[str], Field(min_length=1)] = ["x"]
    inner: Inner = Inner()


@pytest.mark.parametrize(
    ("values", "fault"),
    [
        ({}, "size is missing"),
        ({"size": "x"}, "size is 'x', but must be a valid integer"),
        ({"size": 3}, "size is 3: it is odd; give an even number"),
        ({"size": 2, "mode": "c"}, "mode is 'c', but must be 'a' or 'b'"),
        ({"size": 2, "names": []}, "names is [], but must have at least 1 item"),
        ({"size": 2, "names": ["x", 5]}, "names.1 is 5, but must be a text"),
        ({"size": 2, "inner": {"rate": -1.0}}, "inner.rate is -1.0, but must be greater than 0"),
        ({"size": 2, "inner": 7}, "inner is 7, but must be a dict"),
        (5, "it is 5, but must be a dict"),
    ],
)
def test_a_fault_names_the_place_the_value_and_what_is_allowed(values, fault):
    with pytest.raises(ValidationError) as raised:
        Values.model_validate(values)
    said = first_fault(raised.value)
    assert said.startswith(fault)
    assert "\n" not in said


def test_a_fault_takes_another_name_and_cuts_long_values():
    with pytest.raises(ValidationError) as raised:
        Values.model_validate({"size": "9" * 500 + "x"})
    assert first_fault(raised.value, "model.size").startswith("model.size is '9")
    assert len(first_fault(raised.value)) < 200


def test_json_that_cannot_be_read_is_not_repeated():
    with pytest.raises(ValidationError) as raised:
        Values.model_validate_json("{" + "[" * 500)
    assert first_fault(raised.value).startswith("Invalid JSON")
    assert len(first_fault(raised.value)) < 200


def test_foreign_errors_become_one_line():
    assert one_line(RuntimeError(" cannot\n\tread  it\n")) == "cannot read it"
    assert one_line(KeyError()) == "KeyError"
    assert len(one_line(RuntimeError("x" * 999))) < 310
    assert one_line(RuntimeError("x" * 999), 5) == "xxxxx..."
    assert one_line(InputError("x" * 999)) == "x" * 999
