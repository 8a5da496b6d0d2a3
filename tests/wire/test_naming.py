"""Names in the box: always short and plain, and never two for one."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from oubliette.wire import naming
from oubliette.wire.naming import BASE_TOOLS, BOX_NAME_MAX, PLAIN, SEARCH_TOOLS

letters = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789"
caller_ids = st.from_regex(r"\A[A-Za-z][A-Za-z0-9_-]{0,31}\Z")
tool_names = st.text(letters + "_.-/", min_size=1, max_size=128)


@given(caller_ids, tool_names)
def test_a_name_in_the_box_is_plain_and_short(caller_id: str, tool: str) -> None:
    assert PLAIN.match(naming.box_name(caller_id, tool))


@given(st.text(letters + "_", min_size=1, max_size=BOX_NAME_MAX))
def test_a_name_that_is_plain_and_short_stays_as_it_is(name: str) -> None:
    assert naming.plain(name) == name


@given(st.text(max_size=200), st.text(max_size=200))
def test_long_names_that_differ_anywhere_stay_different(head: str, tail: str) -> None:
    middle = "x" * BOX_NAME_MAX
    first, second = head + middle + "a" + middle + tail, head + middle + "b" + middle + tail
    assert naming.plain(first) != naming.plain(second)


@given(caller_ids, st.lists(tool_names, max_size=12))
def test_no_two_tools_of_a_declaration_share_a_name(caller_id: str, tools: list[str]) -> None:
    problems = naming.tool_problems(caller_id, tools)
    taken = [naming.box_name(caller_id, name) for position, name in enumerate(tools) if position not in problems]
    assert len(set(taken)) == len(taken)
    assert not set(taken) & {*BASE_TOOLS, *SEARCH_TOOLS}
    # A problem is told of the later one, and never of a tool that nothing speaks against.
    for position in problems:
        name = naming.box_name(caller_id, tools[position])
        before = [naming.box_name(caller_id, other) for other in tools[:position]]
        assert name in before or name in {*BASE_TOOLS, *SEARCH_TOOLS} or name.startswith(naming.PLATFORM_PREFIX)


@pytest.mark.parametrize(
    "caller_id, tool, name",
    [
        ("ant", "send_response", "ant_send_response"),
        ("my-caller", "files.read/now", "my_caller_files_read_now"),
        ("ant", "x" * 43, "ant_" + "x" * 43),
        ("ant", "a" * 60 + "z" * 60, "ant_aaaaaaaaaaaaaaa_8c9a91_zzzzzzzzzzzzzzzzzzzz"),
    ],
)
def test_names_that_are_known_by_heart(caller_id: str, tool: str, name: str) -> None:
    assert naming.box_name(caller_id, tool) == name
    assert len(name) <= BOX_NAME_MAX


def test_a_platform_tool_has_its_prefix() -> None:
    assert naming.platform_name("project_list") == "oubliette_project_list"


@pytest.mark.parametrize(
    "caller_id, tools, problem",
    [
        ("sess", ["a", "a"], "declared twice"),
        ("a", ["b.c", "b_c"], "could not tell it from 'b.c'"),
        ("a", ["ümlaut"], "1 to 128"),
        ("a", ["trailing\n"], "1 to 128"),
    ],
)
def test_what_cannot_be_told_apart_is_a_problem(caller_id: str, tools: list[str], problem: str) -> None:
    problems = naming.tool_problems(caller_id, tools)
    assert list(problems) == [len(tools) - 1]
    assert problem in problems[len(tools) - 1]


@pytest.mark.parametrize("name", [*BASE_TOOLS, *SEARCH_TOOLS, "oubliette_project_list"])
def test_the_platforms_own_names_cannot_be_reached_by_any_split(name: str) -> None:
    for at in range(1, len(name)):
        if name[at] == "_":
            caller_id, tool = name[:at], name[at + 1 :]
            assert naming.caller_problem(caller_id) or naming.tool_problems(caller_id, [tool])


@pytest.mark.parametrize("caller_id", ["ant", "Ant", "a", "a-b_c9", "sessions", "x" * 32])
def test_a_caller_id_that_means_nothing_else_is_free(caller_id: str) -> None:
    assert naming.caller_problem(caller_id) is None


@pytest.mark.parametrize(
    "caller_id", ["", "9a", "_a", "a b", "a\n", "é", "x" * 33, "oubliette", "OUBLIETTE-2", "session_a", "tools"]
)
def test_a_caller_id_that_means_something_else_is_not(caller_id: str) -> None:
    assert naming.caller_problem(caller_id)
