"""A signature is a schema, and what arrives is decoded by it."""

from dataclasses import dataclass
from typing import Annotated, Any, Literal

import jsonschema_rs
import msgspec
import pytest

from oubliette.caller.errors import InvalidArguments
from oubliette.caller.tool import tool_of


@dataclass
class Place:
    name: str
    floor: int = 0


class Person(msgspec.Struct):
    mail: str
    friends: list["Person"] = []


def book(
    title: str,
    hours: float,
    seats: int,
    urgent: bool,
    place: Place,
    people: list[Person],
    kind: Literal["desk", "room"] = "room",
    note: str | None = None,
    tags: list[str] = ["a"],  # noqa: B006 - a mutable default is what this is about
    extra: dict[str, int] | None = None,
    colour: Annotated[str, msgspec.Meta(description="as people say it", max_length=9)] = "red",
    anything=None,
) -> None:
    """Book a place.

    The caller is asked for each.
    """


ARGUMENTS: dict[str, Any] = {
    "title": "t",
    "hours": 1.5,
    "seats": 3,
    "urgent": True,
    "place": {"name": "attic"},
    "people": [{"mail": "a@b", "friends": [{"mail": "c@d"}]}],
}


def test_the_signature_and_the_docstring_are_the_declaration() -> None:
    declared = tool_of(book, timeout_s=5).declaration()
    assert declared["name"] == "book"
    assert declared["description"] == "Book a place.\n\nThe caller is asked for each."
    assert declared["timeoutSeconds"] == 5
    schema = declared["inputSchema"]
    assert schema["type"] == "object"
    assert schema["required"] == ["title", "hours", "seats", "urgent", "place", "people"]
    assert schema["additionalProperties"] is False
    assert schema["properties"]["hours"] == {"type": "number"}
    assert schema["properties"]["kind"] == {"enum": ["desk", "room"], "default": "room"}
    assert schema["properties"]["colour"]["description"] == "as people say it"
    assert schema["properties"]["place"] == {"$ref": "#/$defs/Place"}
    assert set(schema["$defs"]) == {"Place", "Person"}


def test_what_fits_the_schema_is_decoded_to_the_types_of_the_signature() -> None:
    tool = tool_of(book)
    jsonschema_rs.validator_for(tool.input_schema).validate(ARGUMENTS)
    got = tool.decode(msgspec.json.encode(ARGUMENTS))
    assert got == {
        "title": "t",
        "hours": 1.5,
        "seats": 3,
        "urgent": True,
        "place": Place("attic"),
        "people": [Person("a@b", [Person("c@d")])],
        "kind": "room",
        "note": None,
        "tags": ["a"],
        "extra": None,
        "colour": "red",
        "anything": None,
    }
    got["tags"].append("b")
    assert tool.decode(msgspec.json.encode(ARGUMENTS))["tags"] == ["a"], "a default is never shared between calls"


@pytest.mark.parametrize(
    "wrong", [{"seats": "many"}, {"unknown": 1}, {"kind": "roof"}, {"colour": "as long as this"}, {"place": {}}]
)
def test_what_does_not_fit_is_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(InvalidArguments):
        tool_of(book).decode(msgspec.json.encode(ARGUMENTS | wrong))


def test_a_function_that_takes_any_keyword_is_given_any_argument() -> None:
    def log(level: int = 1, **fields: Any) -> None: ...

    tool = tool_of(log)
    assert tool.input_schema["additionalProperties"] is True
    assert tool.decode(b'{"level":2,"who":"ant"}') == {"level": 2, "who": "ant"}


def test_a_tool_without_parameters_has_an_empty_object_as_schema() -> None:
    schema = tool_of(lambda: 1, name="one").input_schema
    assert (schema["type"], schema["properties"]) == ("object", {})


def test_methods_and_callable_objects_are_tools() -> None:
    class Counter:
        """Counts."""

        def add(self, by: int) -> int:
            return by

        async def __call__(self, by: int) -> int:
            return by

    counter = Counter()
    assert list(tool_of(counter.add).input_schema["properties"]) == ["by"]
    tool = tool_of(counter, name="count")
    assert tool.is_async
    assert tool.description == "Counts."


def positional(a: int, /) -> None: ...
def starred(*a: int) -> None: ...
def unknown(a: "Nowhere") -> None: ...  # type: ignore[name-defined]  # noqa: F821
def unspeakable(a: object, b: complex) -> None: ...


@pytest.mark.parametrize("function", [positional, starred, unknown, unspeakable])
def test_a_signature_that_json_cannot_fill_is_refused_when_it_is_lent(function: Any) -> None:
    with pytest.raises(TypeError, match=function.__name__):
        tool_of(function)


async def waits() -> None: ...


def test_an_async_function_cannot_be_threaded() -> None:
    with pytest.raises(TypeError, match="only a plain one"):
        tool_of(waits, threaded=True)
