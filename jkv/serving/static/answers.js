// Requests of the page, and the records of their answers. A record is plain data, which the page draws and keeps.

export const POINTS = 400;  // at most, of a line that is drawn

/** A record of an answer that has not begun. `kind` is own or full. */
export const newAnswer = (kind, name) => ({
  kind, name, state: "waiting", error: "", reasoning: "", content: "", tokens: 0, prompt: 0, held: 0, peak: 0,
  reasoningTokens: 0, reasoningSeconds: 0, speed: 0, points: [],
});

const isGood = answer => answer?.content && (answer.state === "done" || answer.state === "stopped");

/** The messages of a conversation as the column `kind` has seen it; turns without an answer are left out. */
export function messagesOf(turns, kind, system) {
  const messages = system ? [{ role: "system", content: system }] : [];
  for (const { text, answers } of turns) {
    const answer = answers.find(one => one.kind === kind && isGood(one)) ?? answers.find(isGood);
    if (answer) messages.push({ role: "user", content: text }, { role: "assistant", content: answer.content });
  }
  return messages;
}

/** The text of a completion as reasoning and content; a model without a chat template writes its own marks. */
export function parted(text) {
  const found = /^\s*<think>([^]*?)(?:<\/think>([^]*))?$/.exec(text);
  return found ? { reasoning: found[1].trimStart(), content: (found[2] ?? "").trimStart() } : { reasoning: "", content: text };
}

async function* chunks(response) {
  let rest = "";
  for await (const text of pieces(response.body.pipeThrough(new TextDecoderStream()))) {
    const events = (rest + text).split("\n\n");
    rest = events.pop();
    for (const event of events) {
      if (event === "data: [DONE]") return;
      if (event.startsWith("data: ")) yield JSON.parse(event.slice(6));
    }
  }
  throw Error("The answer broke off.");
}

async function* pieces(stream) {  // as `for await (const piece of stream)` does where streams can be iterated; Safari's cannot
  for (const reader = stream.getReader(); ;) {
    const { done, value } = await reader.read();
    if (done) return;
    yield value;
  }
}

/** What the server says of a refusal. */
export async function refusalOf(response) {
  const body = await response.json().catch(() => null);
  return body?.error?.message ?? `The server answered with status ${response.status}.`;
}

function read(answer, chunk, isChat, seconds) {
  const choice = chunk.choices?.[0] ?? {}, usage = chunk.usage;
  if (isChat) {
    answer.reasoning += choice.delta?.reasoning ?? "";
    answer.content += choice.delta?.content ?? "";
  } else if (choice.text) {
    answer.raw = (answer.raw ?? "") + choice.text;
    Object.assign(answer, parted(answer.raw));
  }
  if (!usage?.kv) return;
  const { kv, completion_tokens: tokens, prompt_tokens: prompt } = usage;
  Object.assign(answer, { tokens, prompt, held: kv.held_tokens });
  if (kv.bytes !== undefined) answer.peak = kv.bytes;
  if (answer.reasoning && !answer.content) Object.assign(answer, { reasoningTokens: tokens, reasoningSeconds: seconds });
  answer.reasoningTokens = usage.completion_tokens_details?.reasoning_tokens || answer.reasoningTokens;
  if (answer.points.at(-1)?.[0] === tokens) answer.points.pop();
  answer.points.push([tokens, kv.held_tokens]);
  if (answer.points.length > POINTS) answer.points = answer.points.filter((_, index) => index % 2 === 0 || index === POINTS);
}

/**
 * Fills a record with what the server streams; calls `changed` after each chunk. Never throws: the record has the error.
 *
 * asked: `path`, `body`, `key` and `isChat`.
 */
export async function stream(answer, asked, signal, changed) {
  const headers = { "content-type": "application/json", ...(asked.key ? { authorization: `Bearer ${asked.key}` } : {}) };
  const body = { ...asked.body, stream: true, stream_options: { include_usage: true, continuous_usage_stats: true } };
  let began = 0, first = 0;
  try {
    signal.throwIfAborted();
    const response = await fetch(asked.path, { method: "POST", headers, body: JSON.stringify(body), signal });
    if (!response.ok) throw Error(await refusalOf(response));
    answer.state = "running";
    for await (const chunk of chunks(response)) {
      if (chunk.error) throw Error(chunk.error.message);
      const now = performance.now() / 1000, before = answer.tokens;
      read(answer, chunk, asked.isChat, began ? now - began : 0);
      if (!began && answer.tokens) [began, first] = [now, answer.tokens];
      if (answer.tokens > before && now > began) answer.speed = (answer.tokens - first) / (now - began);
      changed();
    }
    answer.state = "done";
  } catch (error) {
    answer.state = error.name === "AbortError" ? "stopped" : "failed";
    if (answer.state === "failed") answer.error = error.message;
  }
  changed();
}
