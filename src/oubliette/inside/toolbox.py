"""The tools that the droid sees, and where a call of each one goes.

Three kinds: the caller's (as the server declared them, with their final names), the platform's (`oubliette_` and the
operation's name), and the client's own two. Agents that never look at a changed list get two more, `tools_search`
and `tools_call`, which reach whatever came later.
"""

from __future__ import annotations

from oubliette.inside.link import encode, is_list, is_object

TYPE_CHECKING = False  # see link.py
if TYPE_CHECKING:
    from typing import Any, Callable, Dict, FrozenSet, List, Optional, Tuple

    Json = Dict[str, Any]

PLATFORM_PREFIX = "oubliette_"
SEARCH_LIMIT = 20

# What of a tool's definition an agent may see.
SHOWN = ("title", "description", "inputSchema", "outputSchema", "annotations", "_meta")
SHOWN_TYPES = {"title": str, "description": str, "outputSchema": dict, "annotations": dict, "_meta": dict}

BASE_TOOLS: List[Json] = [
    {
        "name": "session_message",
        "description": (
            "Give work to another agent. Without session_id a child session is started in a sandbox of its own "
            "and gets the message; with the session_id of a child of this session the message goes to that one "
            "(queued while it is busy). Returns at once with the session's id and state, or waits up to wait_seconds "
            "for the turn to end. Follow it with session_events."
        ),
        "inputSchema": {
            "type": "object",
            "properties": {
                "message": {"type": "string", "description": "What the agent is asked to do."},
                "session_id": {"type": "string", "description": "A child session to continue; omit to start one."},
                "workspace_id": {"type": "string", "description": "The workspace that a new child works in."},
                "create_workspace": {
                    "type": "boolean",
                    "default": False,
                    "description": "Make the workspace for a new child if it does not exist.",
                },
                "wait_seconds": {
                    "type": "number",
                    "minimum": 0,
                    "default": 0,
                    "description": "Wait at most this long for the turn to end before answering.",
                },
            },
            "required": ["message"],
            "additionalProperties": False,
        },
        "annotations": {"readOnlyHint": False},
    },
    {
        "name": "session_events",
        "description": (
            "Read what happened in a child session: its messages, tool calls, results and state, oldest first. Pass "
            "the last index that was seen as since_index to get only what came after it; with wait_seconds the answer "
            "waits until there is something new, or until that time has passed."
        ),
        "inputSchema": {
            "type": "object",
            "properties": {
                "session_id": {"type": "string", "description": "The session to read."},
                "since_index": {
                    "type": "integer",
                    "default": -1,
                    "description": "Only events after this index; -1 reads from the first.",
                },
                "max_events": {"type": "integer", "minimum": 1, "default": 100},
                "wait_seconds": {"type": "number", "minimum": 0, "default": 0},
            },
            "required": ["session_id"],
            "additionalProperties": False,
        },
        "annotations": {"readOnlyHint": True},
    },
]

SEARCH_TOOLS: List[Json] = [
    {
        "name": "tools_search",
        "description": (
            "Find tools by words in their names and descriptions, also ones that were added after this conversation "
            "began. Returns their definitions; call them with tools_call. Without a query it lists what there is."
        ),
        "inputSchema": {
            "type": "object",
            "properties": {
                "query": {"type": "string", "description": "Words to look for."},
                "limit": {"type": "integer", "minimum": 1, "maximum": 100, "default": SEARCH_LIMIT},
            },
            "additionalProperties": False,
        },
        "annotations": {"readOnlyHint": True},
    },
    {
        "name": "tools_call",
        "description": "Call a tool that tools_search found, with the arguments that its inputSchema asks for.",
        "inputSchema": {
            "type": "object",
            "properties": {
                "name": {"type": "string", "description": "The tool's name as tools_search gave it."},
                "arguments": {"type": "object", "description": "The tool's arguments."},
            },
            "required": ["name"],
            "additionalProperties": False,
        },
    },
]

# Kinds of a route: what the socket frame is made of, and how its answer is read.
RELAYED = 0  # a caller's tool: any JSON may come back
PLATFORM = 1  # an operation of the platform: a finished tool result comes back
OWN = 2  # a base tool: the arguments are the parameters
SEARCH = 3
CALL = 4


class Route:
    """Where a call goes: the socket frame is `before`, the arguments, `after`, with the call key in between."""

    __slots__ = ("before", "kind", "parameters", "required")

    def __init__(self, kind: int, before: str = "", schema: Optional[Json] = None) -> None:
        self.kind = kind
        self.before = before
        self.parameters: FrozenSet[str] = frozenset(schema["properties"] if schema else ())
        self.required = tuple(schema.get("required", ())) if schema else ()


def shown(name: str, tool: Json) -> Json:
    """A tool's definition for the agent; one bad field must not cost it the whole list."""
    definition: Json = {"name": name}
    for field in SHOWN:
        value = tool.get(field)
        if field == "inputSchema":
            schema: Json = dict(value) if is_object(value) else {}
            if schema.get("type") != "object":
                schema["type"] = "object"
            definition[field] = schema
        elif isinstance(value, SHOWN_TYPES[field]):
            definition[field] = value
    return definition


class Toolbox:
    """The current list. `version` changes when and only when what the agent would see changes."""

    def __init__(self, api_key: str, warn: Callable[[str], None]) -> None:
        self.version = 0
        self.routes: Dict[str, Route] = {}
        self.tools_json = "[]"
        self._api_key = api_key
        self._warn = warn
        self._caller: List[Tuple[Json, Route]] = []
        self._platform: List[Tuple[Json, Route]] = []
        self._offers_search = False
        self._tools: List[Json] = []
        self._rebuild()

    def declare(self, tools: Any) -> bool:
        """Take the caller's tools, whole, from a config frame; whether the list changed."""
        self._caller = []
        for tool in tools if is_list(tools) else ():
            name, box_name = (tool.get("name"), tool.get("box_name")) if is_object(tool) else (None, None)
            if not (isinstance(name, str) and isinstance(box_name, str) and name and box_name):
                self._warn("the server declared a tool without a name or box_name: left out")
                continue
            before = ',"method":"caller_tool","params":{"tool":%s,"arguments":' % encode(name)
            self._caller.append((shown(box_name, tool), Route(RELAYED, before)))
        return self._rebuild()

    def offer(self, tools: Any) -> bool:
        """Take the platform's tools, whole, from the answer to `oubliette_tools`; whether the list changed."""
        self._platform = []
        key = encode(self._api_key)
        for tool in tools if is_list(tools) else ():
            name = tool.get("name") if is_object(tool) else None
            if not isinstance(name, str) or not name:
                self._warn("the server offered a tool without a name: left out")
                continue
            before = ',"method":"oubliette_call_tool","params":{"api_key":%s,"tool":%s,"arguments":' % (
                key,
                encode(name),
            )
            self._platform.append((shown(PLATFORM_PREFIX + name, tool), Route(PLATFORM, before)))
        return self._rebuild()

    def offer_search(self, offered: bool) -> bool:
        """Whether this agent needs tools_search and tools_call; whether the list changed."""
        self._offers_search = offered
        return self._rebuild()

    def search(self, query: str, limit: int) -> List[Json]:
        """Definitions, best match first: a word in the name counts more than one in the description."""
        words = query.lower().replace("_", " ").split()
        found: List[Tuple[int, int, Json]] = []
        for position, tool in enumerate(self._tools):
            if self.routes[tool["name"]].kind in (SEARCH, CALL):
                continue
            name = tool["name"].lower().replace("_", " ")
            text = (tool.get("title", "") + " " + tool.get("description", "")).lower()
            score = sum(3 if word in name else 1 if word in text else 0 for word in words)
            if score or not words:
                found.append((-score, position, tool))
        found.sort(key=lambda entry: entry[:2])
        return [tool for _, _, tool in found[:limit]]

    def _rebuild(self) -> bool:
        entries = self._caller + self._platform
        for tool in BASE_TOOLS:
            entries.append((tool, Route(OWN, ',"method":"%s","params":' % tool["name"], tool["inputSchema"])))
        if self._offers_search:
            kinds = {"tools_search": SEARCH, "tools_call": CALL}
            entries += [(tool, Route(kinds[tool["name"]], "", tool["inputSchema"])) for tool in SEARCH_TOOLS]
        # Names are unique as declared; were two the same, the later one, the client's own, is the one that counts.
        tools = {tool["name"]: tool for tool, _ in entries}
        self.routes = {tool["name"]: route for tool, route in entries}
        self._tools = list(tools.values())
        before, self.tools_json = self.tools_json, encode(self._tools)
        changed = self.tools_json != before
        self.version += changed
        return changed


def argument_problem(route: Route, arguments: Any) -> str:
    """What is wrong with the names of these arguments; types are the server's to judge."""
    if not is_object(arguments):
        return "arguments must be an object"
    if route.kind <= PLATFORM:
        return ""
    for name in route.required:
        if name not in arguments:
            return "%s is required" % name
    for name in arguments:
        if name not in route.parameters:
            return "there is no argument %s" % encode(name[:100])
    return ""
