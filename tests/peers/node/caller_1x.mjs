// A caller on @modelcontextprotocol/sdk 1.x: lends one tool, gets the request on its stream, answers it.
//
//     node caller_1x.mjs URL PROJECT MESSAGE < TOKEN      prints what it saw as one JSON object
import { readFileSync } from "node:fs";
import { Client } from "@modelcontextprotocol/sdk/client/index.js";
import { StreamableHTTPClientTransport } from "@modelcontextprotocol/sdk/client/streamableHttp.js";
import { LoggingMessageNotificationSchema } from "@modelcontextprotocol/sdk/types.js";

const [url, project, message] = process.argv.slice(2);
const token = readFileSync(0, "utf8").trim();

const tool = {
  name: "echo",
  description: "Give back what was given.",
  inputSchema: { type: "object", properties: { n: { type: "integer" } }, required: ["n"] },
};
const client = new Client({ name: "caller", version: "1" }, { capabilities: {} });
const requests = [];
let arrived;
const first = new Promise((resolve) => (arrived = resolve));
client.setNotificationHandler(LoggingMessageNotificationSchema, ({ params }) => {
  if (params.data.type !== "caller_tool_request") return;
  requests.push(params.data);
  arrived(params.data);
});
let version;
const transport = new StreamableHTTPClientTransport(new URL(url), {
  requestInit: { headers: { Authorization: `Bearer ${token}` } },
});
const setVersion = transport.setProtocolVersion?.bind(transport);
transport.setProtocolVersion = (negotiated) => setVersion?.((version = negotiated));
await client.connect(transport);

const call = async (name, args) => {
  const result = await client.callTool({ name, arguments: args });
  if (result.isError) throw new Error(JSON.stringify(result.content));
  return result.structuredContent;
};
const context = { caller_id: "ant", caller_tools: [tool] };
const { session_id } = await call("session_message", { project_id: project, message, context });
const request = await first;
const taken = await call("caller_tool_response", {
  session_id: request.session_id,
  request_id: request.request_id,
  result: { echoed: request.arguments },
});
const watched = await call("session_watch", { session_id, wait_seconds: 20 });
console.log(JSON.stringify({ version, requests, taken, text: watched.final_response }));
await client.close();
