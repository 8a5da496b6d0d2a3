"""An agent that stands on the public ACP library: the oracle for the host's side. Run as a program.

The prompt says what it does: words of `DEEDS`, in order.
"""

import asyncio
from typing import Any, cast

import acp
from acp.schema import (
    AgentCapabilities,
    Cost,
    Implementation,
    InitializeResponse,
    LoadSessionResponse,
    NewSessionResponse,
    PermissionOption,
    PromptResponse,
    SessionCapabilities,
    SetSessionModeResponse,
    ToolCallUpdate,
    Usage,
    UsageUpdate,
)


class LibraryAgent:
    def __init__(self) -> None:
        self.stop = asyncio.Event()
        self.seen: list[str] = []

    def on_connect(self, conn: Any) -> None:
        self.host = conn

    async def initialize(self, protocol_version: int, client_capabilities: Any = None, **_: Any) -> InitializeResponse:
        assert protocol_version == 1
        assert client_capabilities.terminal is False
        return InitializeResponse(
            protocol_version=1,
            agent_capabilities=AgentCapabilities(load_session=True, session_capabilities=SessionCapabilities()),
            agent_info=Implementation(name="library", version="1"),
        )

    async def new_session(self, cwd: str, mcp_servers: Any = None, **_: Any) -> NewSessionResponse:
        (server,) = mcp_servers
        self.seen.append(f"{server.name} {server.args[-1]} {[variable.name for variable in server.env]}")
        return NewSessionResponse(session_id="one")

    async def load_session(self, cwd: str, session_id: str, mcp_servers: Any = None, **_: Any) -> LoadSessionResponse:
        await self.host.session_update(session_id, acp.update_user_message_text("an old question"))
        await self.host.session_update(session_id, acp.update_agent_message_text("an old answer"))
        self.seen.append(f"loaded {session_id}")
        return LoadSessionResponse()

    async def set_session_mode(self, session_id: str, mode_id: str, **_: Any) -> SetSessionModeResponse:
        self.seen.append(f"mode {mode_id}")
        return SetSessionModeResponse()

    async def prompt(self, session_id: str, prompt: Any, **_: Any) -> PromptResponse:
        self.stop.clear()
        for deed in prompt[0].text.split():
            if deed == "wait":
                await self.stop.wait()
                return PromptResponse(stop_reason="cancelled")
            await getattr(self, deed)(session_id)
        counts = Usage(total_tokens=30, input_tokens=10, output_tokens=20)
        return PromptResponse(stop_reason="end_turn", usage=counts)

    async def cancel(self, session_id: str, **_: Any) -> None:
        self.stop.set()

    # deeds

    async def tell(self, session_id: str) -> None:
        await self.host.session_update(session_id, acp.update_agent_message_text("; ".join(self.seen)))

    async def think(self, session_id: str) -> None:
        for word in ("let ", "me ", "see"):
            await self.host.session_update(session_id, acp.update_agent_thought_text(word))

    async def talk(self, session_id: str) -> None:
        for word in ("all ", "is ", "well"):
            await self.host.session_update(session_id, acp.update_agent_message_text(word))

    async def plan(self, session_id: str) -> None:
        entries = [acp.plan_entry("look", status="completed"), acp.plan_entry("do", priority="high")]
        await self.host.session_update(session_id, acp.update_plan(entries))

    async def use(self, session_id: str) -> None:
        used = UsageUpdate(session_update="usage_update", used=12, size=100, cost=Cost(amount=0.5, currency="USD"))
        await self.host.session_update(session_id, used)

    async def call(self, session_id: str) -> None:
        await self.host.session_update(
            session_id, acp.start_tool_call("t1", "ant_echo", kind="other", status="pending", raw_input={"a": 1})
        )
        await self.host.session_update(session_id, acp.update_tool_call("t1", status="in_progress"))
        content = [acp.tool_content(acp.text_block("done"))]
        await self.host.session_update(session_id, acp.update_tool_call("t1", status="completed", content=content))

    async def ask(self, session_id: str) -> None:
        # `allow_always` comes first, as with some real agents: place must not matter.
        options = [
            PermissionOption(option_id="forever", name="Always", kind="allow_always"),
            PermissionOption(option_id="never", name="No", kind="reject_once"),
            PermissionOption(option_id="now", name="Once", kind="allow_once"),
        ]
        call = ToolCallUpdate(tool_call_id="t2", title="rm", kind="delete")
        answer = await self.host.request_permission(session_id=session_id, tool_call=call, options=options)
        outcome = answer.outcome.model_dump(by_alias=True)
        await self.host.session_update(session_id, acp.update_agent_message_text(str(outcome.get("optionId"))))


if __name__ == "__main__":
    asyncio.run(acp.run_agent(cast(Any, LibraryAgent())))
