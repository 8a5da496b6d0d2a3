"""Identifiers: who makes which, and what they look like."""

import hashlib
import re
import secrets
import time
import uuid

SESSION = re.compile(r"gogol_\d{8}_\d{6}_[0-9a-f]{8}\Z")


def new_uuid() -> str:
    """A project or a workspace: UUIDv4."""
    return str(uuid.uuid4())


def call_uuid(session_id: str, call_key: str) -> str:
    """The id of the request that a call key names: as random as the key, and the same for the same."""
    digest = hashlib.sha256(f"{session_id}\0{call_key}".encode("utf-8", "surrogatepass")).hexdigest()
    variant = "89ab"[int(digest[16], 16) & 3]
    return f"{digest[:8]}-{digest[8:12]}-4{digest[13:16]}-{variant}{digest[17:20]}-{digest[20:32]}"


def new_session_id(now: float) -> str:
    return f"gogol_{time.strftime('%Y%m%d_%H%M%S', time.gmtime(now))}_{secrets.token_hex(4)}"


def new_token_id() -> str:
    return f"tok_{secrets.token_hex(8)}"


def new_principal() -> str:
    return f"prn_{secrets.token_hex(8)}"


def new_box_id() -> str:
    return f"box_{secrets.token_hex(8)}"


def new_key() -> str:
    """A secret of 256 bits that never leaves this host."""
    return secrets.token_hex(32)


def is_uuid(text: str) -> bool:
    try:
        return str(uuid.UUID(text)) == text.lower()
    except ValueError:
        return False
