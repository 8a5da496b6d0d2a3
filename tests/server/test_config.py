from pathlib import Path

import pytest

from oubliette.server import config
from oubliette.server.config import Settings, load, read
from oubliette.server.errors import NotConfigured

HOME = {"HOME": "/home/ada"}


def refusal(text: str = "", env: dict[str, str] | None = None, flags: dict[str, object] | None = None) -> str:
    with pytest.raises(NotConfigured) as refused:
        load(text, HOME | (env or {}), flags or {})
    return refused.value.message


def test_without_any_source_every_setting_has_its_default():
    assert load("", HOME, {}) == Settings(home=Path("/home/ada/.oubliette"))


def test_the_environment_wins_over_the_file_and_a_flag_over_both():
    text = "port = 1\nhost = 'file'\nlog_level = 'error'"
    settings = load(text, HOME | {"OUBLIETTE_PORT": "2", "OUBLIETTE_HOST": "env"}, {"port": 3, "host": None})
    assert (settings.port, settings.host, settings.log_level) == (3, "env", "error")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("prot = 1", "oubliette.toml: there is no setting `prot`; did you mean `port`?"),
        ("zzz = 1", "oubliette.toml: there is no setting `zzz`"),
        ("port = '1'", "oubliette.toml: port: Expected `int`, got `str`"),
        ("port = 70000", "oubliette.toml: port: Expected `int` <= 65535"),
        ("runtime = 'docker'", "oubliette.toml: runtime: Invalid enum value 'docker'"),
        ("[server]\nport = 1", "oubliette.toml: there is no setting `server`"),
    ],
)
def test_a_wrong_file_is_refused_with_the_name_at_fault(text: str, message: str):
    assert refusal(text).startswith(message)


def test_a_file_that_is_not_toml_is_refused_with_its_line():
    assert "line 2" in refusal("port = 1\nhost = \nruntime = 1")


def test_a_misspelt_variable_is_refused_and_a_foreign_one_is_not_ours():
    assert refusal(env={"OUBLIETTE_PROT": "1"}) == ("OUBLIETTE_PROT: there is no setting `prot`; did you mean `port`?")
    foreign = {"OUBLIETTE_API_KEY": "oub_1", "OUBLIETTE_DEMO_COLOUR": "red", "PORT": "1"}
    assert load("", HOME | foreign, {}) == load("", HOME, {})


@pytest.mark.parametrize("name", sorted(config._NO_SETTINGS))
def test_variables_that_callers_and_droids_read_are_never_taken_for_settings(name: str):
    assert load("", HOME | {f"OUBLIETTE_{name}": "x"}, {}) == load("", HOME, {})


def test_a_wrong_variable_is_named():
    assert refusal(env={"OUBLIETTE_PORT": "eighty"}) == "OUBLIETTE_PORT: Expected `int`, got `str`"


def test_an_unknown_flag_is_refused():
    assert refusal(flags={"prot": 1}) == "--prot: there is no setting `prot`; did you mean `port`?"


def test_a_wrong_flag_is_named_as_it_was_typed():
    assert refusal(flags={"idle_after_s": 0}) == "--idle-after-s: Expected `float` > 0.0"


NUMBERS = [name for name, kind, *_ in config.table() if kind in ("number", "whole number")]


@pytest.mark.parametrize("name", NUMBERS)
@pytest.mark.parametrize("number", ["inf", "-inf", "nan", "1e999"])
def test_no_number_is_infinite_or_none_at_all(name: str, number: str):
    assert refusal(f"{name} = {number}").startswith(f"oubliette.toml: {name}: ")
    assert refusal(env={f"OUBLIETTE_{name.upper()}": number}).startswith(f"OUBLIETTE_{name.upper()}: ")


def test_lists_and_truth_come_from_the_environment_as_text():
    env = {"OUBLIETTE_ALLOWED_HOSTS": "a.example, b.example,", "OUBLIETTE_UNSAFE_NO_SANDBOX": "true"}
    settings = load("", HOME | env, {})
    assert (settings.allowed_hosts, settings.unsafe_no_sandbox) == (("a.example", "b.example"), True)


def test_a_list_in_a_flag_is_separated_by_commas():
    assert load("", HOME, {"allowed_hosts": "a.example,b.example"}).allowed_hosts == ("a.example", "b.example")


def test_a_default_wait_above_the_maximum_is_refused():
    assert "is more than caller_tool_timeout_max_s (600)" in refusal("caller_tool_timeout_s = 601")


def test_no_home_variable_is_no_error():
    assert load("", {}, {}).home == Path("~/.oubliette").expanduser()


def test_the_home_comes_from_flag_then_environment_and_is_absolute():
    assert load("", HOME | {"OUBLIETTE_HOME": "~/boxes"}, {}).home == Path("/home/ada/boxes")
    assert load("", HOME | {"OUBLIETTE_HOME": "/x"}, {"home": Path("here")}).home == Path.cwd() / "here"


def test_an_empty_home_is_refused():
    assert refusal(env={"OUBLIETTE_HOME": ""}).startswith("OUBLIETTE_HOME: Expected a path")


def test_the_file_in_the_home_is_found(tmp_path: Path):
    tmp_path.joinpath("oubliette.toml").write_text("port = 9")
    assert read(HOME, {"home": tmp_path}).port == 9


def test_what_is_good_only_together_with_the_file_is_taken(tmp_path: Path):
    (tmp_path / "oubliette.toml").write_text("caller_tool_timeout_max_s = 3600")
    settings = read(HOME | {"OUBLIETTE_CALLER_TOOL_TIMEOUT_S": "900"}, {"home": str(tmp_path)})
    assert (settings.caller_tool_timeout_s, settings.caller_tool_timeout_max_s) == (900, 3600)


def test_the_file_in_the_home_may_not_move_the_home(tmp_path: Path):
    tmp_path.joinpath(".oubliette").mkdir()
    tmp_path.joinpath(".oubliette", "oubliette.toml").write_text("home = '/elsewhere'")
    with pytest.raises(NotConfigured, match="another home"):
        read({"HOME": str(tmp_path)}, {})


def test_a_named_file_is_read_instead_and_may_name_the_home(tmp_path: Path):
    named = tmp_path / "named.toml"
    named.write_text(f"home = '{tmp_path}/home'\nport = 7")
    expected = Settings(home=tmp_path / "home", port=7)
    assert read(HOME, {}, file=named) == expected
    assert read(HOME | {"OUBLIETTE_CONFIG": str(named)}, {}) == expected


def test_a_named_file_that_is_missing_is_an_error(tmp_path: Path):
    with pytest.raises(NotConfigured, match="cannot be read: No such file"):
        read(HOME, {}, file=tmp_path / "none.toml")


def test_every_setting_is_documented():
    rows = config.table()
    assert [name for name, *_ in rows] == list(Settings.__struct_fields__)
    assert all(described.endswith(".") for *_, described in rows)
    assert ("port", "whole number", "8080", "The TCP port; 0 takes a free one.") in rows
