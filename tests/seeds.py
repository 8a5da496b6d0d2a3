"""The manifest: every requirement, scenario and rule that oubliette was asked to fulfil, as data.

Four documents stand behind it: two specifications (of the caller-tool relay, and of the platform's tools in the box)
and the design of each. An entry has an id, where it stands, and what has to happen, in our own words. Tests say
which entry they prove: `@pytest.mark.seed("REQ-CTR-001.1")`. `tests/test_seeds.py` checks both ways, and
`tests/mutants.py` names for every entry a place in the product whose change a test notices.
"""

from dataclasses import dataclass

RELAY = "caller-tool relay, specification"
RELAY_DESIGN = "caller-tool relay, design"
TOOLS = "oubliette tools, specification"
TOOLS_DESIGN = "oubliette tools, design"


@dataclass(frozen=True)
class Entry:
    id: str
    source: str
    behaviour: str


def _entries(source: str, *told: tuple[str, str]) -> tuple[Entry, ...]:
    return tuple(Entry(name, source, behaviour) for name, behaviour in told)


MANIFEST = (
    *_entries(
        RELAY,
        (
            "REQ-CTR-001",
            "A droid in a box calls its caller's tools as native MCP tools named by the caller's id, and the request"
            " travels on the stream that the caller holds anyway.",
        ),
        (
            "REQ-CTR-001.1",
            "The droid calls ant_send_response; a caller_tool_request reaches the stream; the caller answers by"
            " caller_tool_response; the droid gets that result.",
        ),
        ("REQ-CTR-001.2", "The caller does not answer within its time: the droid gets a timeout error."),
        ("REQ-CTR-001.3", "The caller disconnects before it answered: the droid gets a connection error."),
        ("REQ-CTR-002", "What a caller declares in a session's context becomes MCP tools of the droid, at any time."),
        (
            "REQ-CTR-002.1",
            "Tools in session_message's context reach the client by caller_tools_config; it registers"
            " ant_send_response, and the droid finds and calls it.",
        ),
        ("REQ-CTR-002.2", "The inputSchema of a declared tool is in the droid's list, and arguments are held to it."),
        ("REQ-CTR-003", "Each call of a caller's tool is a caller_tool_request event on the stream."),
        (
            "REQ-CTR-003.1",
            "The event carries type caller_tool_request, a unique request_id, the tool's name as declared, and"
            " exactly the arguments of the call.",
        ),
        ("REQ-CTR-004", "Callers answer by the MCP method caller_tool_response."),
        ("REQ-CTR-004.1", "An answer with a result resolves the pending request, and the droid gets the result."),
        ("REQ-CTR-004.2", "An answer with an error resolves the pending request, and the droid gets that error."),
        ("REQ-CTR-005", "The socket between client and server takes caller_tool requests."),
        ("REQ-CTR-005.1", "A caller_tool request on the socket is processed, and answered when the caller has."),
    ),
    *_entries(
        RELAY_DESIGN,
        (
            "CTR-SDK.1",
            "Requests are pushed as MCP log notifications of level info by the logger oubliette.session; the event is"
            " their data, whatever level the client set, or set none.",
        ),
        ("CTR-SDK.2", "Tools in the box are named {caller}_{tool}, and their inputSchema is of type object."),
        ("CTR-SDK.3", "A declared inputSchema reaches the droid as it was declared."),
        (
            "CTR-SDK.4",
            "caller_tool_response is an ordinary MCP tool, in tools/list with description and schema; there is no"
            " method of our own.",
        ),
        ("CTR-FLOW.1", "A droid's call blocks until the response comes, and only that call does."),
        ("CTR-FLOW.2", "Pending requests are told apart by request_id: answers in any order reach the right call."),
        ("CTR-DATA.1", "context.caller_id and context.caller_tools (name, description, inputSchema) declare tools."),
        ("CTR-DATA.2", "A declaration is stored with the session and sent to every client that attaches."),
        ("CTR-DATA.3", "A tool may be declared without inputSchema, and takes any object then."),
        (
            "CTR-CONFIG.1",
            "The notification has type caller_tools_config and params with caller_id and the tools' name,"
            " description and inputSchema.",
        ),
        ("CTR-CONFIG.2", "The client registers each of its tools: ant_send_response and ant_get_memory."),
        ("CTR-EVENT.1", "The event is {type, request_id (UUIDv4), tool, arguments}, beside what a log needs."),
        ("CTR-RESPONSE.1", "The tool takes session_id, request_id, result and error; error null means success."),
        ("CTR-RESPONSE.2", "session_id and request_id are required, result (any JSON) and error (text) are not."),
        ("CTR-SOCKET.1", "The request is JSON-RPC 2.0: method caller_tool, params tool and arguments."),
        ("CTR-SOCKET.2", "The response is JSON-RPC 2.0 with the request's id and the caller's result unchanged."),
        ("CTR-TIMEOUT.1", "The wait is 60 seconds unless configured otherwise: by server, session or tool."),
        ("CTR-TIMEOUT.2", "When it passes, the droid gets an error, and nothing else of it is disturbed."),
        ("CTR-TIMEOUT.3", "Answering promptly is the caller's part: a late answer changes nothing and is told so."),
        ("CTR-SECURITY.1", "Only the caller that created the session may answer its requests."),
        ("CTR-SECURITY.2", "A request_id is good for one answer: replaying it does nothing."),
        ("CTR-SECURITY.3", "Requests are of their session: answers under another, or after its end, do nothing."),
        ("CTR-ERROR.1", "Caller disconnected: the error comes at once (with the grace set to none)."),
        ("CTR-ERROR.2", "Timeout: the error comes when the time is up, and says that it is a timeout."),
        ("CTR-ERROR.3", "Tool failed: the caller's words reach the droid as an error."),
        ("CTR-ERROR.4", "Invalid request_id: a warning in the log, and the answer is ignored."),
    ),
    *_entries(
        TOOLS,
        ("OT-DISCOVERY", "A client with OUBLIETTE_API_KEY asks for the platform's tools and registers them."),
        ("OT-DISCOVERY.1", "An admin key finds every tool, each with the prefix oubliette_."),
        ("OT-DISCOVERY.2", "A read key finds what reads, and nothing that writes or administers."),
        ("OT-DISCOVERY.3", "An invalid key: an authentication error, no tools, a warning, and the client goes on."),
        ("OT-EXECUTION", "Droids call the tools that were found; each call is held to the key's scope."),
        ("OT-EXECUTION.1", "oubliette_project_list sends oubliette_call_tool with the key, and its result comes back."),
        ("OT-EXECUTION.2", "oubliette_project_create with a write key makes a project and returns its details."),
        ("OT-EXECUTION.3", "token_create with a write key is a scope error, and the droid is told."),
        ("OT-EXECUTION.4", "A key that expired since the start: an authentication error, and the droid is told."),
        ("OT-NAMING", "Every tool of the platform has the prefix oubliette_ in the box."),
        ("OT-NAMING.1", "project_create is registered as, and seen in tools/list as, oubliette_project_create."),
        ("OT-NOKEY", "Without OUBLIETTE_API_KEY no tool of the platform is there."),
        ("OT-NOKEY.1", "Without a key no oubliette_tools is sent; only the caller's and the base tools are there."),
    ),
    *_entries(
        TOOLS_DESIGN,
        ("OTD-TOOLS.1", "oubliette_tools takes {api_key} and gives {tools: [{name, description, inputSchema}]}."),
        ("OTD-TOOLS.2", "With an invalid key: error -32001, “invalid or expired API key”."),
        ("OTD-CALL.1", "oubliette_call_tool takes {api_key, tool, arguments} and gives {content: [text], isError}."),
        ("OTD-CALL.2", "What succeeds is JSON as text with isError false."),
        ("OTD-CALL.3", "What the tool itself refuses is a result with isError true, and an MCP error at the droid."),
        ("OTD-CALL.4", "With an invalid key: error -32001."),
        ("OTD-CALL.5", "Beyond the key's scope: error -32002."),
        ("OTD-SCOPE.1", "Scope admin: all tools."),
        ("OTD-SCOPE.2", "Scope write: the tools of projects, sessions and workspaces, and none of tokens."),
        (
            "OTD-SCOPE.3",
            "Scope read: project_list, project_get, session_list, session_get, session_events, workspace_list and"
            " config_limits, and what came later and only reads.",
        ),
        ("OTD-SCOPE.4", "token_create, token_list and token_revoke are for scope admin alone."),
        ("OTD-START.1", "At start, a key in the environment is noticed in the log and the tools are asked for."),
        ("OTD-START.2", "Where that fails the log has a WARNING, and the start goes on."),
        ("OTD-START.3", "The client keeps the key and sends it with each later call."),
        ("OTD-START.4", "Each tool is registered with its description and inputSchema as the server gave them."),
        ("OTD-START.5", "A call's content and isError reach the droid as an MCP result."),
        ("OTD-SECURITY.1", "The key comes by the environment and is never logged or persisted."),
        ("OTD-SECURITY.2", "The key is validated at every call, not remembered as valid."),
        ("OTD-SECURITY.3", "A key's scope bounds what can be called, whatever was listed."),
        ("OTD-SECURITY.4", "A box gets no more rights than its key has."),
        ("OTD-SECURITY.5", "Calls leave a trail that names the key by its id."),
        ("OTD-TESTING.1", "Tested: which tools each scope is shown."),
        ("OTD-TESTING.2", "Tested: discovery with a valid key."),
        ("OTD-TESTING.3", "Tested: discovery with an invalid key fails."),
        ("OTD-TESTING.4", "Tested: a call with a valid key."),
        ("OTD-TESTING.5", "Tested: a call beyond the scope fails."),
        ("OTD-TESTING.6", "Tested: a call with an invalid key fails."),
        ("OTD-TESTING.7", "Tested from end to end: a droid makes a project through oubliette_project_create."),
    ),
)

IDS = tuple(entry.id for entry in MANIFEST)
