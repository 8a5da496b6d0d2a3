"""The documents are true: what they name exists, what they show runs, what they copy from the code is the code's."""

import json
import re
import tomllib
from pathlib import Path

import pytest

from oubliette.server import config
from oubliette.server.operations.catalogue import OPERATIONS
from oubliette.server.operations.schemas import schema
from tests import reference

ROOT = Path(__file__).parent.parent
PROSE = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")])
DECISIONS = sorted(ROOT.glob("docs/decisions/*.md"))
LINK = re.compile(r"\[[^]]*\]\(([^)\s]+)\)")
CODE = re.compile(r"`([^`\n]+)`")
# What looks like a file or a folder of this repository inside backticks.
FILE = re.compile(r"(?:[\w.-]+/)*[\w.-]+\.(?:py|md|toml|lock|sh)\Z|(?:[\w.-]+/)+\Z")
# Names of things elsewhere: in a home, in a box, made by the script.
ELSEWHERE = {"oubliette.toml", ".oubliette-dev/"}


def read(name: str) -> str:
    return ROOT.joinpath(name).read_text(encoding="utf-8")


def blocks(text: str, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)


def leads_somewhere(page: Path, target: str) -> bool:
    path, _, anchor = target.partition("#")
    aim = page.parent / path if path else page
    return aim.exists() and (not anchor or anchor in headings(aim))


def headings(page: Path) -> set[str]:
    titles = re.findall(r"^#+ (.+)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in titles}


@pytest.mark.parametrize("page", PROSE, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_link_leads_somewhere(page: Path):
    text = re.sub(r"^```.*?^```$", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    assert [target for target in LINK.findall(text) if not leads_somewhere(page, target)] == []


@pytest.mark.parametrize("page", PROSE, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_file_that_a_page_names_exists(page: Path):
    text = re.sub(r"^```sh.*?^```$", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    named = {word for word in CODE.findall(text) if FILE.match(word)} - ELSEWHERE
    places = (ROOT, ROOT / "src/oubliette", ROOT / "src/oubliette/server", page.parent)
    assert sorted(name for name in named if not any((place / name).exists() for place in places)) == []


def test_every_room_is_on_the_map():
    text = read("ARCHITECTURE.md")
    rooms = {module.parent.relative_to(ROOT / "src/oubliette") for module in ROOT.glob("src/oubliette/**/*.py")}
    assert sorted(str(room) for room in rooms if str(room) != "." and f"`{room}/`" not in text) == []


def test_the_map_shows_the_layers_that_are_checked():
    contracts = tomllib.loads(read("pyproject.toml"))["tool"]["importlinter"]["contracts"]
    (layers,) = [contract["layers"] for contract in contracts if contract["type"] == "layers"]
    assert "\n".join(layers) + "\n" in blocks(read("ARCHITECTURE.md"), "text")


def test_the_readmes_example_is_the_file_and_short():
    (shown,) = blocks(read("README.md"), "python")
    assert shown == read("examples/lend_a_tool.py")
    assert len(shown.splitlines()) < 30


def test_every_decision_has_its_number_its_state_and_its_reasons():
    assert [page.name[:4] for page in DECISIONS] == [f"{number:04}" for number in range(1, len(DECISIONS) + 1)]
    for page in DECISIONS:
        text = page.read_text(encoding="utf-8")
        assert text.startswith(f"# {page.name[:4]}. "), page.name
        assert re.search(r"^State: (Accepted|Superseded by \d{4}), \w+ \d{4}\.$", text, re.MULTILINE), page.name
        assert re.findall(r"^## (.+)$", text, re.MULTILINE) == ["Context", "Decision", "Consequences"], page.name


def test_the_changelog_knows_no_other_sections():
    sections = re.findall(r"^### (.+)$", read("CHANGELOG.md"), re.MULTILINE)
    assert set(sections) <= {"Security", "Removed", "Deprecated", "Added", "Changed", "Fixed"}


@pytest.mark.parametrize("name", sorted(reference.PAGES))
def test_a_reference_page_is_what_the_code_says(name: str):
    assert read(f"docs/reference/{name}") == reference.NOTE + reference.PAGES[name](), "see CONTRIBUTING.md"


def test_a_setting_that_prose_names_is_one():
    named = {
        word for page in PROSE for word in re.findall(r"`OUBLIETTE_([A-Z_]+[A-Z])`", page.read_text(encoding="utf-8"))
    }
    assert sorted(named - {name.upper() for name, *_ in config.table()} - config._NO_SETTINGS) == []


def test_the_readmes_conformance_count_is_the_baselines():
    baseline = tomllib.loads(read("tests/server/endpoints/mcp/conformance.toml"))
    told = re.findall(r"^\| (\d{4}-\d\d-\d\d) \| (\d+) of (\d+) \|", read("README.md"), re.MULTILINE)
    missed = {revision: int(required) - int(passed) for revision, passed, required in told}
    # The suite does not require its extensions' scenarios.
    assert missed == {
        revision: sum(not name.startswith("tasks-") for name in scenarios)
        for revision, scenarios in baseline.items()
        if revision != "ours"
    }


def test_the_license_is_whole():
    text = read("LICENSE")
    assert "Apache License" in text[:200]
    assert "END OF TERMS AND CONDITIONS" in text


def pins(name: str) -> dict[str, str]:
    text = read(name).replace("\\\n", " ")
    found = dict(re.findall(r"^([a-z0-9.-]+(?:\[[a-z0-9,-]+\])?)==(\S+)", text, re.MULTILINE))
    assert all("--hash=sha256:" in line for line in text.splitlines() if "==" in line)
    assert not re.search(r"https?:|--(index|find|extra|trusted)", text)
    return found


LOCKS = sorted(str(path.relative_to(ROOT)) for path in [*ROOT.glob("tests/**/*.lock"), *ROOT.glob("*.lock")])


@pytest.mark.parametrize("name", LOCKS)
def test_a_lock_holds_hashes_and_no_addresses(name: str):
    assert pins(name)


NODE_LOCKS = sorted(str(path.relative_to(ROOT)) for path in ROOT.glob("tests/peers/node/*/package-lock.json"))


def test_no_operation_has_what_is_said_to_be_not_offered():
    text = read("docs/decisions/0025-no-parameter-without-an-effect.md")
    (listed,) = re.findall(r"Not offered are:\n\n(.*?)\n\n", text, re.DOTALL)
    absent = {name for line in re.findall(r"^- ([^:]*):", listed, re.MULTILINE) for name in CODE.findall(line)}
    assert {"model", "mcp_servers", "tools_disallowed", "attachments", "dropped_events"} <= absent
    shown = json.dumps([schema(kind) for one in OPERATIONS for kind in (one.params, one.result)])
    names = set(re.findall(r'"(\w+)": ', shown))
    assert {"session_id", "autonomy", "first_index"} <= names
    assert not absent & names


@pytest.mark.parametrize("name", NODE_LOCKS)
def test_a_lock_of_node_packages_holds_hashes_and_no_addresses(name: str):
    packages = json.loads(read(name))["packages"]
    assert all(one["integrity"] for name, one in packages.items() if name)
    assert not any("resolved" in one for one in packages.values())


def test_each_node_program_has_an_environment_of_its_own():
    alone = [json.loads(read(name))["packages"][""]["dependencies"] for name in NODE_LOCKS]
    assert all(len(wanted) == 1 for wanted in alone)
    assert {(name, version) for wanted in alone for name, version in wanted.items()} == {
        ("@modelcontextprotocol/client", "2.4.0"),
        ("@modelcontextprotocol/conformance", "0.2.0-alpha.12"),
        ("@modelcontextprotocol/sdk", "1.17.5"),
        ("@modelcontextprotocol/sdk", "1.32.2"),
    }


def test_the_locks_agree():
    run, dev = pins("requirements.lock"), pins("requirements-dev.lock")
    assert run.items() <= dev.items()
    assert {"uv-build", "msgspec"} <= run.keys()
