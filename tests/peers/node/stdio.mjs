// Drives a server over stdio with one of the public SDKs: `stdio.mjs SDK MODE COMMAND [ARGUMENT…]`.
// SDK is @modelcontextprotocol/sdk or @modelcontextprotocol/client; MODE is legacy or auto. What it saw goes to
// stdout as one JSON object. The server is expected to have `ant_echo`, and to get a tool when `ant_grow` is called.

const [sdk, mode, command, ...args] = process.argv.slice(2);
const isOld = sdk.endsWith('/sdk');
const { Client } = await import(isOld ? `${sdk}/client/index.js` : sdk);
const { StdioClientTransport } = await import(isOld ? `${sdk}/client/stdio.js` : `${sdk}/stdio`);
const changed = isOld
  ? (await import(`${sdk}/types.js`)).ToolListChangedNotificationSchema
  : 'notifications/tools/list_changed';

const client = new Client({ name: 'tests', version: '0' }, { capabilities: {}, versionNegotiation: { mode } });
const heard = new Promise((resolve) => client.setNotificationHandler(changed, resolve));
await client.connect(new StdioClientTransport({ command, args, env: process.env }));
if (mode === 'auto') await client.listen({ toolsListChanged: true });

const before = await client.listTools();
const echo = await client.callTool({ name: 'ant_echo', arguments: { text: 'grüße' } });
const failed = await client.callTool({ name: 'ant_echo', arguments: { fail: true } });
const numbers = [...Array(10).keys()];
const many = await Promise.all(numbers.map((n) => client.callTool({ name: 'ant_echo', arguments: { n } })));
await client.callTool({ name: 'ant_grow', arguments: {} });
await heard;
const after = await client.listTools();
await client.close();

console.log(JSON.stringify({
  before: before.tools,
  after: after.tools.map((tool) => tool.name),
  echo,
  failed,
  many: many.map((result) => result.structuredContent.n),
}));
