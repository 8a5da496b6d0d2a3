// A caller on @modelcontextprotocol/client 2.x, in either era and on each carrier that the era has.
//
//     node caller_2x.mjs URL PROJECT MESSAGE legacy|auto push|request|listen|poll < TOKEN
//
// prints what it saw as one JSON object. `push` is the legacy stream, `request` notifications on the caller's own
// `session_watch`, `listen` a subscription and reads of the resource, `poll` the operation of that name.
import { readFileSync } from "node:fs";
import { Client, StreamableHTTPClientTransport } from "@modelcontextprotocol/client";

const [url, project, message, mode, carrier] = process.argv.slice(2);
const token = readFileSync(0, "utf8").trim();
const tool = {
  name: "echo",
  description: "Give back what was given.",
  inputSchema: { type: "object", properties: { n: { type: "integer" } }, required: ["n"] },
};
const client = new Client({ name: "caller", version: "1" }, { capabilities: {}, versionNegotiation: { mode } });
const requests = [];
let arrived;
const first = new Promise((resolve) => (arrived = resolve));
const take = (request) => {
  requests.push(request);
  arrived(request);
};
client.setNotificationHandler("notifications/message", ({ params }) => {
  if (params.data.type === "caller_tool_request") take(params.data);
});
await client.connect(
  new StreamableHTTPClientTransport(new URL(url), { requestInit: { headers: { Authorization: `Bearer ${token}` } } }),
);

const call = async (name, args, meta) => {
  const result = await client.callTool({ name, arguments: args, ...(meta && { _meta: meta }) });
  if (result.isError) throw new Error(JSON.stringify(result.content));
  return result.structuredContent;
};
const context = { caller_id: "ant", caller_tools: [tool] };
const { session_id } = await call("session_message", { project_id: project, message, context });
const watch = { session_id, wait_seconds: 20 };

let watching;
let subscription;
if (carrier === "request") {
  watching = call("session_watch", watch, { "io.modelcontextprotocol/logLevel": "info" });
} else if (carrier === "listen") {
  const uri = `oubliette://sessions/${session_id}/caller-requests`;
  client.setNotificationHandler("notifications/resources/updated", async () => {
    const { contents } = await client.readResource({ uri });
    for (const request of JSON.parse(contents[0].text).requests) take(request);
  });
  subscription = await client.listen({ resourceSubscriptions: [uri] });
} else if (carrier === "poll") {
  const page = await call("caller_tool_poll", { session_id, wait_seconds: 20 });
  for (const request of page.requests) take(request);
}
const request = await first;
const taken = await call("caller_tool_response", {
  session_id: request.session_id,
  request_id: request.request_id,
  result: { echoed: request.arguments },
});
const watched = await (watching ?? call("session_watch", watch));
await subscription?.close();
const version = client.getNegotiatedProtocolVersion();
console.log(JSON.stringify({ version, requests, taken, text: watched.final_response }));
await client.close();
