"""The schema, as steps forward. A step that was released is never edited; the next change is a new step."""

_FIRST = (
    # This installation: its id labels boxes; its epoch counts starts and keeps request ids of different lives apart.
    """CREATE TABLE installation (
        id TEXT PRIMARY KEY, epoch INTEGER NOT NULL)""",
    """CREATE TABLE tokens (
        id TEXT PRIMARY KEY, principal TEXT NOT NULL, name TEXT NOT NULL, hash BLOB NOT NULL UNIQUE,
        hint TEXT NOT NULL, scope TEXT NOT NULL, project_id TEXT,
        session_id TEXT, creator TEXT,
        created_at REAL NOT NULL, expires_at REAL, revoked_at REAL, last_used_at REAL)""",
    "CREATE INDEX tokens_by_session ON tokens (session_id)",
    """CREATE TABLE audit (
        id INTEGER PRIMARY KEY, at REAL NOT NULL, token_id TEXT, principal TEXT, session_id TEXT,
        door TEXT NOT NULL, operation TEXT NOT NULL, target TEXT, outcome TEXT NOT NULL)""",
    """CREATE TABLE projects (
        id TEXT PRIMARY KEY, name TEXT NOT NULL, description TEXT NOT NULL, settings TEXT NOT NULL,
        default_workspace_id TEXT NOT NULL, creator TEXT NOT NULL, created_at REAL NOT NULL)""",
    """CREATE TABLE workspaces (
        id TEXT PRIMARY KEY, project_id TEXT NOT NULL REFERENCES projects (id) ON DELETE CASCADE,
        created_at REAL NOT NULL, last_session_at REAL, external_id TEXT, source TEXT)""",
    "CREATE INDEX workspaces_by_project ON workspaces (project_id, created_at)",
    """CREATE TABLE sessions (
        id TEXT PRIMARY KEY, project_id TEXT NOT NULL, workspace_id TEXT NOT NULL,
        owner TEXT NOT NULL, token_id TEXT, state TEXT NOT NULL, reason TEXT,
        parent_id TEXT, root_id TEXT NOT NULL, depth INTEGER NOT NULL,
        settings TEXT NOT NULL,
        declaration TEXT, stream_id TEXT,
        next_index INTEGER NOT NULL DEFAULT 0, first_index INTEGER NOT NULL DEFAULT 0,
        event_bytes INTEGER NOT NULL DEFAULT 0,
        turns INTEGER NOT NULL DEFAULT 0, external_id TEXT, source TEXT,
        created_at REAL NOT NULL, updated_at REAL NOT NULL, ended_at REAL)""",
    "CREATE INDEX sessions_by_workspace ON sessions (project_id, workspace_id, created_at)",
    "CREATE INDEX sessions_by_state ON sessions (state)",
    "CREATE INDEX sessions_by_parent ON sessions (parent_id)",
    """CREATE TABLE events (
        session_id TEXT NOT NULL, idx INTEGER NOT NULL, type TEXT NOT NULL, at REAL NOT NULL, body BLOB NOT NULL,
        PRIMARY KEY (session_id, idx)) WITHOUT ROWID""",
    """CREATE TABLE turns (
        session_id TEXT NOT NULL, number INTEGER NOT NULL, prompt TEXT NOT NULL, state TEXT NOT NULL,
        source TEXT, created_at REAL NOT NULL, started_at REAL, ended_at REAL,
        stop_reason TEXT, text TEXT, error TEXT, usage TEXT,
        PRIMARY KEY (session_id, number)) WITHOUT ROWID""",
    # Every writing request of a box: caller tools and operations alike (a call key names it to the droid's side).
    # Its id is made of session and call key, so that one index keeps both unique.
    """CREATE TABLE calls (
        session_id TEXT NOT NULL, request_id TEXT NOT NULL, call_key TEXT NOT NULL,
        kind TEXT NOT NULL, tool TEXT NOT NULL, digest BLOB NOT NULL, arguments BLOB, request_index INTEGER,
        owner TEXT, instance TEXT, state TEXT NOT NULL, redelivery INTEGER NOT NULL DEFAULT 0,
        created_at REAL NOT NULL, deadline_at REAL, deadline_max_at REAL, timeout_s REAL,
        ended_at REAL, outcome BLOB,
        PRIMARY KEY (session_id, request_id))""",
    "CREATE INDEX calls_pending ON calls (created_at) WHERE state = 'pending'",
    """CREATE TABLE boxes (
        id TEXT PRIMARY KEY, session_id TEXT NOT NULL, runtime TEXT NOT NULL, handle TEXT NOT NULL,
        relay_key_hash BLOB NOT NULL, keeper_key_hash BLOB NOT NULL,
        state TEXT NOT NULL, created_at REAL NOT NULL, ended_at REAL)""",
    "CREATE INDEX boxes_by_session ON boxes (session_id)",
    "CREATE INDEX boxes_live ON boxes (state) WHERE state = 'running'",
    # A droid's process: how far its numbered streams are stored, and what its protocol needs to go on.
    """CREATE TABLE processes (
        id TEXT PRIMARY KEY, box_id TEXT NOT NULL, session_id TEXT NOT NULL,
        stdout_offset INTEGER NOT NULL DEFAULT 0, stdin_offset INTEGER NOT NULL DEFAULT 0,
        conversation TEXT, state TEXT NOT NULL, created_at REAL NOT NULL, ended_at REAL)""",
    "CREATE INDEX processes_by_session ON processes (session_id)",
    """CREATE TABLE process_input (
        process_id TEXT NOT NULL, start INTEGER NOT NULL, data BLOB NOT NULL,
        PRIMARY KEY (process_id, start)) WITHOUT ROWID""",
    # A droid's output that is stored and not whole yet: a line longer than the keeper holds, a growing message.
    """CREATE TABLE process_pieces (
        process_id TEXT NOT NULL, kind TEXT NOT NULL, start INTEGER NOT NULL, data BLOB NOT NULL,
        PRIMARY KEY (process_id, kind, start)) WITHOUT ROWID""",
    # A legacy MCP session: any server, before or after a restart, accepts its requests.
    """CREATE TABLE mcp_sessions (
        id TEXT PRIMARY KEY, principal TEXT NOT NULL, token_id TEXT, version TEXT NOT NULL,
        capabilities TEXT NOT NULL, client TEXT NOT NULL, log_level TEXT, initialized INTEGER NOT NULL DEFAULT 0,
        subscriptions TEXT NOT NULL DEFAULT '[]', created_at REAL NOT NULL, seen_at REAL NOT NULL)""",
    "CREATE INDEX mcp_sessions_by_principal ON mcp_sessions (principal, seen_at)",
)

# The end that a session is coming to: decided in one commit, complete in a later one.
_ENDINGS = (
    "ALTER TABLE sessions ADD COLUMN ending TEXT",
    "CREATE INDEX sessions_not_ended ON sessions (created_at) WHERE ended_at IS NULL",
)

# What grows with every event stands apart: a session's row is wide, and is written whole. Events lie in the order of
# their logs under one number each, so that the next of a log is written beside the one before.
_LOGS = (
    """CREATE TABLE logs (
        number INTEGER PRIMARY KEY AUTOINCREMENT, session_id TEXT NOT NULL UNIQUE,
        next_index INTEGER NOT NULL DEFAULT 0, first_index INTEGER NOT NULL DEFAULT 0,
        event_bytes INTEGER NOT NULL DEFAULT 0)""",
    """INSERT INTO logs (session_id, next_index, first_index, event_bytes)
        SELECT id, next_index, first_index, event_bytes FROM sessions ORDER BY created_at""",
    "ALTER TABLE events RENAME TO events_by_session",
    """CREATE TABLE events (
        place INTEGER PRIMARY KEY, type TEXT NOT NULL, at REAL NOT NULL, body BLOB NOT NULL)""",
    """INSERT INTO events (place, type, at, body)
        SELECT (logs.number << 32) + idx, type, at, body
        FROM logs JOIN events_by_session ON events_by_session.session_id = logs.session_id ORDER BY 1""",
    "DROP TABLE events_by_session",
    "ALTER TABLE sessions DROP COLUMN next_index",
    "ALTER TABLE sessions DROP COLUMN first_index",
    "ALTER TABLE sessions DROP COLUMN event_bytes",
)

MIGRATIONS = (_FIRST, _ENDINGS, _LOGS)
