// The page: a conversation with the served model, and what its cache holds meanwhile. Nothing leaves for another host.

import { messagesOf, newAnswer, refusalOf, stream } from "./answers.js";
import { draw } from "./graph.js";
import { showMarkdown } from "./markdown.js";

const KEPT = "jkv";  // where the browser keeps the conversation
const RETRY = 3000, LOOK = 2000;  // milliseconds until the server is asked again, and between two looks at its memory
const at = id => document.getElementById(id);
const form = at("form"), fields = form.elements, main = at("turns");
const remembered = ["system", "policy", "budget", "compare", "temperature", "limit"];  // a key is not written down

let card = null;  // what the server says of its model
let turns = [];  // each with a text and the records of its answers
let leave = null;  // stops the answers under way
const drawn = [];  // functions that draw a turn's graph

const megabytes = bytes => `${(bytes / 1e6).toLocaleString("en", { maximumSignificantDigits: 3 })} MB`;
const count = (number, what) => `${number.toLocaleString("en")} ${what}${number === 1 ? "" : "s"}`;

function make(tag, className, text = "") {
  const made = document.createElement(tag);
  made.className = className;
  made.textContent = text;
  return made;
}

function once(action) {  // at the next frame, however often it was asked for
  let isDue = false;
  return () => {
    if (isDue) return;
    isDue = true;
    requestAnimationFrame(() => { isDue = false; action(); });
  };
}

const toEnd = () => scrollTo(0, document.body.scrollHeight);
const isAtEnd = () => innerHeight + scrollY >= document.body.scrollHeight - 40;  // a reader who scrolled up stays there

// What the browser keeps.

function save() {
  const settings = Object.fromEntries(remembered.map(name => [name, fields[name].value]));
  try {
    localStorage.setItem(KEPT, JSON.stringify({ turns, settings }));
  } catch {
    at("say").textContent = "The browser has no room to keep the conversation.";
  }
}

function restore() {
  let kept = null;
  try {
    kept = JSON.parse(localStorage.getItem(KEPT));
  } catch {
    return {};  // nothing is kept, or nothing that can be read
  }
  turns = kept?.turns ?? [];
  for (const answer of turns.flatMap(turn => turn.answers)) {
    if (["waiting", "running"].includes(answer.state)) answer.state = "stopped";
  }
  return kept?.settings ?? {};
}

// The server.

const withKey = () => (fields.key.value ? { headers: { authorization: `Bearer ${fields.key.value}` } } : {});

async function connect() {
  try {
    const response = await fetch("v1/models", withKey());
    if (!response.ok) {
      at("about").textContent = await refusalOf(response);
      if (response.status === 401) return at("settings").setAttribute("open", "");
      return setTimeout(connect, RETRY);  // such as a server that still compiles
    }
    card = (await response.json()).data[0];
    showCard();
    await lookAtMemory();
  } catch {
    at("about").textContent = "The server does not answer.";
    setTimeout(connect, RETRY);
  }
}

function showCard() {
  document.title = `${card.id} · jkv`;
  at("model").textContent = card.id;
  at("system-label").hidden = !card.is_chat;
  fields.text.placeholder = card.is_chat ? "A message" : "A text that the model goes on with";
  fields.limit.placeholder = card.is_chat ? "what fits" : "512";
  at("empty").hidden = turns.length > 0;
  const chosen = fields.policy.value || fields.policy.dataset.kept || "";
  fields.policy.replaceChildren(new Option(`the server's (${card.policy})`, ""), ...card.policies.map(({ name }) => new Option(name)));
  fields.policy.value = card.policies.some(({ name }) => name === chosen) ? chosen : "";
  settle();
}

/** Lets what does not apply to the policy be no choice. */
function settle() {
  if (!card) return;
  const name = fields.policy.value || card.policy, known = card.policies.find(one => one.name === name);
  fields.budget.disabled = known ? !known.has_budget : false;
  fields.budget.placeholder = name === card.policy && card.budget ? String(card.budget) : "";
  fields.compare.disabled = name === "full" || !card.policies.some(one => one.name === "full");
  fields.compare.title = name === "full" ? "Choose another policy than full to compare it." : "";
}

async function lookAtMemory() {
  const response = await fetch("metrics"), held = /^jkv:kv_bytes\{.*\} (\S+)$/m.exec(response.ok ? await response.text() : "")?.[1];
  const policy = card.budget ? `${card.policy}, budget ${card.budget}` : card.policy;
  const memory = `${held === undefined ? "" : `${megabytes(Number(held))} of `}${megabytes(card.kv_pool_bytes)} of cache${held === undefined ? "" : " in use"}`;
  at("about").textContent = `${policy} · up to ${count(card.max_model_len, "token")} · ${memory} · jkv ${await version()}`;
}

let known = "";
async function version() {
  return (known ||= (await (await fetch("version")).json()).version);
}

// A turn.

function answerView(answer) {
  const view = make("article", "answer"), thoughts = make("details", "reasoning"), figures = make("div", "figures");
  const title = make("summary", ""), reasoning = make("div", ""), content = make("div", "content"), error = make("p", "error");
  const told = make("span", ""), copy = make("button", "", "Copy");
  thoughts.append(title, reasoning);
  figures.append(told, copy);
  view.append(make("p", `name ${answer.kind}`, answer.name), thoughts, content, error, figures);
  content.classList.toggle("plain", answer.raw !== undefined);
  copy.type = "button";
  copy.addEventListener("click", () => copyText(answer.content || answer.reasoning, copy));
  title.addEventListener("click", () => { thoughts.dataset.isChosen = "yes"; });
  const show = () => {
    thoughts.hidden = !answer.reasoning;
    const isThinking = answer.state === "running" && !answer.content;
    if (!thoughts.dataset.isChosen) thoughts.open = isThinking;
    title.textContent = thinkingLine(answer, isThinking);
    reasoning.textContent = answer.reasoning;
    if (isThinking) reasoning.scrollTop = reasoning.scrollHeight;
    if (answer.raw === undefined) showMarkdown(content, answer.content);
    else content.textContent = answer.content;
    content.classList.toggle("plain", answer.raw !== undefined);
    error.textContent = answer.error;
    error.hidden = !answer.error;
    copy.hidden = !(answer.content || answer.reasoning);
    told.textContent = figuresOf(answer);
  };
  show();
  return { view, show };
}

function thinkingLine({ reasoningTokens, reasoningSeconds }, isThinking) {
  const tokens = reasoningTokens ? `, ${count(reasoningTokens, "token")}` : "";
  return `${isThinking ? "Thinking" : "Reasoning"}${tokens}${reasoningSeconds ? `, ${reasoningSeconds.toFixed(1)} s` : ""}`;
}

function figuresOf(answer) {
  const { tokens, speed, held, prompt, peak, state } = answer;
  if (!tokens) return { waiting: "waiting for the first tokens", running: "waiting for the first tokens", stopped: "stopped" }[state] ?? "";
  const bytes = card && state === "running" ? megabytes(held * card.kv_bytes_per_token) : peak ? `at most ${megabytes(peak)}` : "";
  return [
    count(tokens, "token"),
    speed ? `${speed.toFixed(speed < 100 ? 1 : 0)} tokens/s` : "",
    `holds ${held.toLocaleString("en")} of ${count(prompt + tokens, "token")}`,
    bytes,
    state === "stopped" ? "stopped" : "",
  ].filter(Boolean).join(" · ");
}

async function copyText(text, button) {
  try {
    await navigator.clipboard.writeText(text);
    button.textContent = "Copied";
  } catch {
    button.textContent = "Not allowed";  // browsers give the clipboard to https and localhost alone
  }
  setTimeout(() => { button.textContent = "Copy"; }, 1500);
}

function linesOf(answers) {
  const lines = answers.map(({ kind, name, points }) => ({ kind, name, points }));
  const longest = answers.reduce((one, other) => (other.tokens > one.tokens ? other : one));
  const whole = longest.points.length ? [[0, longest.prompt], [longest.tokens, longest.prompt + longest.tokens]] : [];
  if (!answers.some(({ kind, name }) => kind === "full" || name === "full")) lines.unshift({ kind: "whole", name: "every token (a full cache)", points: whole });
  return lines;
}

function turnView({ text, answers }) {
  const view = make("section", "turn"), columns = make("div", answers.length > 1 ? "answers two" : "answers");
  const figure = make("figure", ""), legend = make("figcaption", "");
  figure.insertAdjacentHTML("beforeend", '<svg role="img"></svg>');
  figure.append(legend);
  const parts = answers.map(answerView);
  columns.append(...parts.map(part => part.view));
  view.append(make("div", "question", text), columns, figure);
  const paint = () => {
    const lines = linesOf(answers);
    figure.hidden = !lines.some(line => line.points.length);
    if (figure.hidden) return;
    if (legend.childElementCount !== lines.length) legend.replaceChildren(...lines.map(({ kind, name }) => make("span", kind, name)));
    draw(figure, lines, card?.kv_bytes_per_token ?? 0);
  };
  main.append(view);
  drawn.push(paint);
  paint();
  const shown = once(() => {
    const follows = isAtEnd();
    parts.forEach(part => part.show());
    paint();
    if (follows) toEnd();
  });
  return shown;
}

// Questions.

/** The answers that the settings ask for: each with its record and the fields of its request. */
function asked() {
  const own = {}, policy = fields.policy.value, { budget, temperature, limit, compare } = fields, sampling = {};
  if (policy) own.policy = policy;
  if (budget.value && !budget.disabled) own.budget = Number(budget.value);
  if (temperature.value) sampling.temperature = Number(temperature.value);
  if (limit.value) sampling.max_tokens = Number(limit.value);
  else if (!card.is_chat) sampling.max_tokens = 512;
  const slots = own.budget ?? (policy ? null : card.budget), name = policy || card.policy;
  const wanted = [{ answer: newAnswer("own", slots ? `${name}, budget ${slots}` : name), own: { ...sampling, ...own } }];
  if (compare.value && !compare.disabled) wanted.unshift({ answer: newAnswer("full", "full cache"), own: { ...sampling, policy: "full" } });
  return wanted;
}

function requestOf({ answer, own }, text, before) {
  const messages = [...messagesOf(before, answer.kind, fields.system.value), { role: "user", content: text }];
  const body = { ...own, ...(card.is_chat ? { messages } : { prompt: text }) };
  return { path: card.is_chat ? "v1/chat/completions" : "v1/completions", body, key: fields.key.value, isChat: card.is_chat };
}

async function send() {
  const text = fields.text.value, wanted = asked(), before = turns, turn = { text, answers: wanted.map(one => one.answer) };
  const requests = wanted.map(one => requestOf(one, text, before));
  turns = [...turns, turn];
  fields.text.value = "";
  at("empty").hidden = true;
  const shown = turnView(turn), own = leave = new AbortController(), look = setInterval(() => lookAtMemory().catch(() => {}), LOOK);
  setBusy(true);
  toEnd();
  save();
  const run = index => stream(wanted[index].answer, requests[index], own.signal, shown);
  if (fields.compare.value === "together") await Promise.all(wanted.map((_, index) => run(index)));
  else for (const index of wanted.keys()) await run(index);
  clearInterval(look);
  if (leave !== own) return;  // a new chat has begun
  leave = null;
  setBusy(false);
  save();
  at("say").textContent = wanted.some(one => one.answer.error) ? "The answer failed." : "The answer is complete.";
  lookAtMemory().catch(() => {});
}

function setBusy(isBusy) {
  at("send").disabled = isBusy;
  at("stop").disabled = !isBusy;
}

function begin() {
  leave?.abort();
  leave = null;
  turns = [];
  drawn.length = 0;
  main.querySelectorAll(".turn").forEach(view => view.remove());
  at("empty").hidden = !card;
  setBusy(false);
  save();
  fields.text.focus();
}

form.addEventListener("submit", event => {
  event.preventDefault();
  if (!at("send").disabled && card && fields.text.value.trim()) send();
});
fields.text.addEventListener("keydown", event => {
  if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
  event.preventDefault();
  form.requestSubmit();
});
at("stop").addEventListener("click", () => leave?.abort());
at("new").addEventListener("click", begin);
fields.policy.addEventListener("change", settle);
fields.key.addEventListener("change", connect);
addEventListener("resize", once(() => drawn.forEach(paint => paint())));
addEventListener("pagehide", save);

const settings = restore();
for (const [name, value] of Object.entries(settings)) if (remembered.includes(name)) fields[name].value = value;
fields.policy.dataset.kept = settings.policy ?? "";
turns.forEach(turnView);
connect().then(() => { drawn.forEach(paint => paint()); toEnd(); });
