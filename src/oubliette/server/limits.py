"""Every bound that is not a setting, in one place."""

PENDING_CALLS_PER_SESSION = 64
KNOWN_REQUESTS = 1024  # that a poll may name: it is given those of a whole tree
WAITERS_PER_CALL = 16
QUEUED_MESSAGES_PER_SESSION = 16
MESSAGE_BYTES = 1024 * 1024
TOOLS_PER_CALLER = 128
SCHEMA_BYTES = 64 * 1024
SCHEMA_NODES = 10_000
SCHEMA_PATTERNS = 200
CHECKS_PER_CALL = 20_000_000  # values of the arguments times nodes of the schema
DECLARATION_CPU_S = 1.0
DECLARATION_BYTES = 2 * 1024 * 1024
DESCRIPTION_BYTES = 16 * 1024
ARGUMENTS_BYTES = 4 * 1024 * 1024
RESULT_BYTES = 6 * 1024 * 1024
ERROR_BYTES = 64 * 1024
# Larger arguments travel by reference: some clients' SSE readers stop at 1 MiB.
INLINE_ARGUMENTS_BYTES = 256 * 1024
PENDING_ARGUMENTS_BYTES = 1024 * 1024  # of all pending calls together, as a list of them shows
# The same readers, and what follows a log: a larger event is pushed without what makes it large.
PUSHED_EVENT_BYTES = 256 * 1024
HTTP_BODY_BYTES = 8 * 1024 * 1024
STREAM_QUEUE_BYTES = 4 * 1024 * 1024
STREAMS_PER_PRINCIPAL = 64
MCP_SESSIONS_PER_PRINCIPAL = 256
MCP_SESSION_IDLE_S = 1800.0
EVENTS_PAGE = 500
PAGE_BYTES = 1024 * 1024
# An answer that may be an event of a stream, both copies of its result; what is around them has the rest of 1 MiB.
ANSWER_EVENT_BYTES = 960 * 1024
BULK_ROWS = 500  # of what is deleted in one transaction
WAIT_S_MAX = 45.0
WATCH_S_MAX = 3600.0
PROMISE_ANSWER_S = 5.0  # what an answer to session_message promises of the caller's return
PROMISE_POLL_S = 30.0  # what a poll, a page or a watch promises of the next
LIST_MAX = 200
OFFSET_MAX = 1_000_000_000  # beyond it a database's integers end
NAME_CHARS = 200
TEXT_CHARS = 10_000
TOKEN_LIFE_S_MAX = 100 * 366 * 86_400.0
