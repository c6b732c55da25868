// openai-node and Vercel's AI SDK against a server: `node clients.mjs URL SPOKEN ARGUMENTS`, by `test_clients.py`.
// A line of the output is what the server's model does next, and a line of the input says that it does.
import assert from "node:assert/strict";
import { createInterface } from "node:readline";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { generateObject, generateText, Output, stepCountIs, streamText, tool } from "ai";
import OpenAI from "openai";
import { zodResponseFormat } from "openai/helpers/zod";
import { z } from "zod";

const [url, spoken, written] = process.argv.slice(2);
const lines = createInterface({ input: process.stdin })[Symbol.asyncIterator]();
const model = async (does) => { console.log(does); await lines.next(); };
const city = JSON.parse(written), messages = [{ role: "user", content: "Weather?" }];
const Weather = z.object({ city: z.string().max(12), days: z.number().int().min(1).max(9) });
const weather = async (given) => { await model("speaks"); assert.deepEqual(given, city); return "Rain."; };

const client = new OpenAI({ baseURL: `${url}/v1`, apiKey: "none", maxRetries: 0 });
const given = { model: "tiny", messages, max_tokens: 300 };
assert.equal((await client.chat.completions.create(given)).choices[0].message.content, spoken);
let text = "";
for await (const chunk of await client.chat.completions.create({ ...given, stream: true })) text += chunk.choices[0]?.delta.content ?? "";
assert.equal(text, spoken);
const first = await client.responses.create({ model: "tiny", input: "Weather?" });
const later = client.responses.stream({ model: "tiny", input: "And then?", previous_response_id: first.id });
assert.equal((await later.finalResponse()).output_text, spoken);
await model("calls");
const parameters = z.toJSONSchema(Weather);
const tools = [{ type: "function", function: { name: "weather", parameters, function: weather, parse: JSON.parse } }];
assert.equal(await client.chat.completions.runTools({ ...given, tools }).finalContent(), spoken);
await model("draws");
Weather.parse((await client.chat.completions.parse({ ...given, response_format: zodResponseFormat(Weather, "weather") })).choices[0].message.parsed);

await model("speaks");
const provider = createOpenAICompatible({ name: "jkv", baseURL: `${url}/v1`, apiKey: "none", supportsStructuredOutputs: true });
const asked = { model: provider("tiny"), prompt: "Weather?", maxOutputTokens: 300, maxRetries: 0 };
assert.equal((await generateText(asked)).text, spoken);
text = "";
for await (const piece of streamText(asked).textStream) text += piece;
assert.equal(text, spoken);
await model("calls");
const named = { weather: tool({ inputSchema: Weather, execute: weather }) };
assert.equal((await generateText({ ...asked, tools: named, stopWhen: stepCountIs(3) })).text, spoken);
text = "";
await model("calls");
for await (const part of streamText({ ...asked, tools: named, stopWhen: stepCountIs(3) }).fullStream) text += part.type === "text-delta" ? part.text : "";
assert.equal(text, spoken);
await model("draws");
let last;
for await (const object of streamText({ ...asked, output: Output.object({ schema: Weather }) }).partialOutputStream) last = object;
Weather.parse(last);
Weather.parse((await generateText({ ...asked, output: Output.object({ schema: Weather }) })).output);
Weather.parse((await generateObject({ ...asked, schema: Weather })).object);
const required = await generateText({ ...asked, tools: { weather: tool({ inputSchema: Weather }) }, toolChoice: "required" });
Weather.parse(required.toolCalls[0].input);
process.exit(0);
