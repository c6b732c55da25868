// Draws a moment of one trace, or of two side by side: `data.panels` holds for each the records of `jkv.viz.kept.record_of`.
const at = (id) => document.getElementById(id);
const data = JSON.parse(at("data").textContent);
const stillness = matchMedia("(prefers-reduced-motion: reduce)");
let views = []; // the sample that is shown, of each panel
let times = []; // what the slider's steps mean: numbers of generated tokens
let timer = null;
let spoken = null; // the timer of what is yet to be announced

const make = (tag, className, ...parts) => {
  const element = document.createElement(tag);
  if (className) element.className = className;
  element.append(...parts);
  return element;
};
const makeSvg = (tag, className, attributes) => {
  const element = document.createElementNS(at("lines").namespaceURI, tag);
  element.setAttribute("class", className);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  return element;
};
const swatch = (name) => {
  const svg = makeSvg("svg", "swatch", { "aria-hidden": "true" });
  svg.append(makeSvg("line", name, { x1: 0, x2: 24, y1: 2, y2: 2 }));
  return svg;
};
const timeNow = () => times[Number(at("time").value)];
const panelName = ({ sample }) => sample.name + " (" + sample.limit + ")";

// Drawing.

function draw() {
  const time = timeNow(), last = times[times.length - 1];
  for (const view of views) drawPanel(view, time);
  for (const name of ["x1", "x2"]) at("cursor").setAttribute(name, (1000 * time) / Math.max(last, 1));
  at("now").replaceChildren(make("b", "", number(time)), " of " + number(last) + " generated");
  at("time").setAttribute("aria-valuetext", number(time) + " of " + number(last) + " generated tokens");
  announce();
}

function drawPanel(view, time) {
  const { sample, total, stops, spans, shown, heads } = view, position = stops[stopAt(view, time)];
  const donors = new Set();
  for (const [token, begin, end] of sample.again) if (begin <= position && position < end) donors.add(token);
  for (let token = 0; token < total; token++) {
    const kept = token <= position ? keptAt(view, token, position) : -1;
    let look = "future";
    if (kept > 0) look = donors.has(token) ? "kept donor" : "kept";
    else if (kept === 0) look = view.replaced.has(token) ? "shared" : sample.comes_back ? "unread" : "gone";
    if (token === position && token >= sample.prompt) look += " newest";
    if (token === view.differs) look += " differs";
    const key = look + kept;
    if (shown[token] === key) continue;
    shown[token] = key;
    spans[token].className = look;
    if (kept > 0) spans[token].style.setProperty("--strength", ((100 * kept) / heads).toFixed(1) + "%");
  }
  view.state.textContent = stateOf(view, time);
}

// The moment in words, once the reader rests at it: nothing while the picture plays or the slider moves.
function announce(first = "") {
  clearTimeout(spoken);
  if (timer) return;
  const states = () => views.map((view) => (views.length > 1 ? panelName(view) + " " : "") + stateOf(view, timeNow()) + ".");
  spoken = setTimeout(() => { at("say").textContent = [first, number(timeNow()) + " generated.", ...states()].filter(Boolean).join(" "); }, 600);
}

function drawChart() {
  const last = Math.max(times[times.length - 1], 1), most = views.reduce((a, view) => Math.max(a, view.total), 0);
  const { prompt } = views[0].sample;
  const place = (time, size) => ((1000 * time) / last).toFixed(1) + "," + (100 - (100 * size) / most).toFixed(2);
  const full = [place(0, prompt), place(most - prompt, most)], drawn = [], entries = [];
  views.forEach((view, i) => {
    const { stops, sizes } = view, every = Math.max(1, Math.floor(stops.length / 4000)), points = [];
    const end = stops.length - 1;
    for (let stop = 0; stop < end; stop += every) points.push(place(stops[stop] - prompt + 1, sizes[stop]));
    points.push(place(stops[end] - prompt + 1, sizes[end]));
    const corners = [place(0, 0), ...points, place(view.generated, 0)];
    if (views.length === 1) drawn.push(makeSvg("polygon", "area", { points: corners.join(" ") }));
    drawn.push(makeSvg("polyline", "line-" + i, { points: points.join(" ") }));
    const peak = mean(sizes.reduce((a, b) => Math.max(a, b), 0)), verb = view.sample.comes_back ? "reads" : "keeps";
    entries.push(["line-" + i, panelName(view) + " " + verb + " at most " + peak]);
  });
  drawn.unshift(makeSvg("polyline", "line-full", { points: full.join(" ") }));
  entries.push(["line-full", "full cache, " + number(most)]);
  drawn.push(makeSvg("line", "cursor", { id: "cursor", x1: 0, x2: 0, y1: 0, y2: 100 }));
  at("lines").replaceChildren(...drawn);
  at("lines").setAttribute("aria-label", "Tokens over time. " + entries.map(([, text]) => text).join("; "));
  at("key").replaceChildren(...entries.map(([line, text]) => make("span", "", swatch(line), text)));
}

function drawLegend() {
  const some = (test) => views.some(test), reads = views.every(({ sample }) => sample.comes_back);
  const verb = reads ? "read" : some(({ sample }) => sample.comes_back) ? "kept or read" : "kept";
  const entry = (look, text, strength) => {
    const sign = make("span", look, look === "scale" ? "" : "abc");
    if (strength) sign.style.setProperty("--strength", strength);
    return make("span", "", sign, text);
  };
  const isLost = (view) => view.sample.ids.some((_, token) => view.start[token] < view.start[token + 1] && !view.replaced.has(token));
  const entries = [views[0].heads > 1 ? entry("scale", verb + " by few to all heads") : entry("sign kept", verb, "100%")];
  if (some((view) => !view.sample.comes_back && isLost(view))) entries.push(entry("sign gone", "evicted"));
  if (some((view) => view.sample.comes_back && isLost(view))) entries.push(entry("sign unread", "not read now"));
  if (some(({ sample }) => sample.again.length)) {
    entries.push(entry("sign kept donor", "also stands for later tokens", "50%"));
    entries.push(entry("sign shared", "another page stands for it"));
  }
  entries.push(entry("sign future", "not generated yet"), entry("sign newest", "newest"));
  if (some(({ differs }) => differs !== null)) entries.push(entry("sign differs", "texts differ from here on"));
  at("legend").replaceChildren(...entries);
}

// A token's text, and the break after it: newlines are marks and one break, with a gap after it where they leave a line empty.
function makeToken(text, token) {
  const span = make("span"), breakOf = (part) => (part.length > 1 ? make("b") : "\n");
  span.dataset.token = token;
  let end = text.length;
  while (end && text[end - 1] === "\n") end--;
  for (const part of text.slice(0, end).split(/(\n+)/)) {
    if (part.startsWith("\n")) span.append(make("i", "", "\u21b5".repeat(part.length)), breakOf(part));
    else span.append(part);
  }
  if (end === text.length) return [span];
  span.append(make("i", "", "\u21b5".repeat(text.length - end)));
  return [span, breakOf(text.slice(end))];
}

function makePanel(view, panel) {
  const { sample } = view, isOne = data.panels.length === 1;
  view.shown = [];
  view.state = make("p", "state");
  const tokens = sample.pieces.map(makeToken);
  view.spans = tokens.map(([span]) => span);
  const parts = [["Prompt", 0, sample.prompt], ["Completion", sample.prompt]].flatMap(([title, begin, end]) => {
    const text = make("p", sample.is_text ? "text" : "text ids");
    for (const parts of tokens.slice(begin, end)) text.append(...parts);
    if (text.firstChild) text.firstChild.tabIndex = 0;
    text.dir = "auto";
    text.setAttribute("role", "group");
    text.setAttribute("aria-label", title + (isOne ? "" : " of " + panelName(view)) + ": arrow keys move from token to token");
    return [make("h3", "", title), text];
  });
  const name = make("h2", "", ...(isOne ? [] : [swatch("line-" + panel)]), sample.name, make("small", "", sample.limit));
  const section = make("section", "panel", make("div", "head", name, view.state), ...parts);
  section.setAttribute("aria-label", panelName(view));
  section.dataset.panel = panel;
  return section;
}

// Tips of tokens, for the mouse, a finger and the keyboard.

const tokenOf = (target) => (target.closest ? target.closest("[data-token]") : null);

function showTip(span) {
  const tip = at("tip"), described = document.querySelector("[aria-describedby]");
  if (described) described.removeAttribute("aria-describedby");
  tip.hidden = !span;
  if (!span) return;
  const view = views[span.closest("[data-panel]").dataset.panel];
  tip.textContent = tell(view, Number(span.dataset.token), view.stops[stopAt(view, timeNow())]);
  span.setAttribute("aria-describedby", "tip");
  const box = span.getClientRects()[0] || span.getBoundingClientRect(), own = tip.getBoundingClientRect();
  tip.style.left = Math.max(6, Math.min(box.left, innerWidth - own.width - 6)) + "px";
  tip.style.top = (box.bottom + own.height + 8 < innerHeight ? box.bottom + 6 : Math.max(6, box.top - own.height - 6)) + "px";
}

// The token that a key leads to from another; null for other keys.
function neighbour(span, key) {
  const tokens = Array.from(span.parentElement.querySelectorAll("[data-token]")), own = tokens.indexOf(span);
  const step = { ArrowRight: 1, ArrowLeft: -1, ArrowDown: 1, ArrowUp: -1 }[key];
  if (key === "Home") return tokens[0];
  if (key === "End") return tokens[tokens.length - 1];
  if (!step) return null;
  if (key === "ArrowRight" || key === "ArrowLeft") return tokens[own + step] || span;
  const place = (token) => token.getClientRects()[0], from = place(span);
  let line = null, best = span;
  for (let i = own + step; i >= 0 && i < tokens.length; i += step) {
    const box = place(tokens[i]);
    if (Math.abs(box.top - from.top) < from.height / 2) continue;
    if (line !== null && Math.abs(box.top - line) > box.height / 2) break;
    line = box.top;
    if (best === span || Math.abs(box.left - from.left) < Math.abs(place(best).left - from.left)) best = tokens[i];
  }
  return best;
}

// Each text is one stop of the Tab key: the token that was left last, or its first.
function focusToken(span, options) {
  for (const other of span.parentElement.querySelectorAll("[tabindex]")) other.removeAttribute("tabindex");
  span.tabIndex = 0;
  span.focus(options);
}

function pressKey(event) {
  if (event.key === "Escape") return showTip(null);
  const span = tokenOf(event.target);
  if (!span || event.ctrlKey || event.altKey || event.metaKey || event.shiftKey) return;
  const next = event.key === "Enter" || event.key === " " ? span : neighbour(span, event.key);
  if (!next) return;
  event.preventDefault();
  focusToken(next);
  showTip(next);
}

// What the reader does.

function fillSelect(id, texts) {
  at(id).replaceChildren(...texts.map((text, i) => Object.assign(make("option", "", String(text)), { value: i - 1 })));
}

function reselect() {
  at("head").disabled = Number(at("layer").value) < 0;
  for (const view of views) {
    choose(view, groupsOf(view.sample, Number(at("layer").value), at("head").disabled ? -1 : Number(at("head").value)));
    view.shown.length = 0;
  }
  drawLegend();
  drawChart();
  draw();
}

// Where the page opens when its address does not say: at the first loss, or at the end.
function openAtLoss() {
  const found = openingOf(views);
  at("time").value = found ? Math.max(0, lastUpTo(times, found.time)) : times.length - 1;
  if (!found) return "Nothing is evicted. Opened at the end.";
  const where = found.time ? "at generated token " + number(found.time) : "in the prompt";
  const verbOf = ({ sample }) => (sample.comes_back ? "skip" : sample.again.length ? "share or evict" : "evict");
  const verbs = Array.from(new Set(found.first.map(verbOf))).join(" or ");
  return "Opened where " + found.first.map(panelName).join(" and ") + " began to " + verbs + " tokens, " + where + ".";
}

function compareTexts() {
  const shared = sharedTokens(views);
  for (const view of views) view.differs = shared === null || shared >= view.generated ? null : view.sample.prompt + shared;
  if (views.length === 1) return "";
  if (shared === null) return "Both texts are the same.";
  const short = views.find(({ generated }) => generated === shared);
  if (short) return "The texts are the same for " + plural(shared, "token") + ", where that of " + panelName(short) + " ends.";
  return shared ? "The texts are the same for " + plural(shared, "generated token") + ", then differ." : "The texts differ from the first generated token on.";
}

async function show(index, wanted) {
  const loaded = await Promise.all(data.panels.map((samples) => load(samples[index])));
  if (Number(at("sample").value) !== index) return; // another was chosen meanwhile
  views = loaded;
  times = timesOf(views);
  const { sample } = views[0], names = (count) => ["all", ...Array.from({ length: count }, (_, i) => i)];
  fillSelect("layer", names(sample.layers));
  fillSelect("head", names(sample.heads));
  at("head-label").hidden = sample.group_size > 1 || sample.heads === 1;
  const chosen = (name, count) => Math.min(count - 1, Math.max(-1, parseInt(wanted.get(name) ?? -1) || 0));
  at("layer").value = chosen("layer", sample.layers);
  at("head").value = chosen("head", sample.heads);
  at("time").max = times.length - 1;
  const time = parseInt(wanted.get("t") ?? ""), isGiven = !Number.isNaN(time);
  if (isGiven) at("time").value = Math.max(0, lastUpTo(times, time));
  const notes = [isGiven ? "" : openAtLoss(), compareTexts()].filter(Boolean).join(" ");
  at("note").textContent = notes;
  at("panels").replaceChildren(...views.map(makePanel));
  reselect();
  announce(notes);
}

// To the nearest time at which something changes in a panel, before or after the one that is shown.
function jump(direction) {
  const isChange = (time) => views.some(({ sample, changed }) => changed.has(sample.prompt - 1 + time));
  let step = Number(at("time").value) + direction;
  while (step > 0 && step < times.length - 1 && !isChange(times[step])) step += direction;
  at("time").value = step;
  draw();
}

function pause() {
  if (!timer) return;
  clearInterval(timer);
  timer = null;
  at("play").textContent = "play";
  announce();
}

function play() {
  if (timer) return pause();
  if (stillness.matches) return;
  const last = times.length - 1, step = Math.max(1, Math.round(last / 240));
  if (Number(at("time").value) >= last) at("time").value = 0;
  at("play").textContent = "pause";
  timer = setInterval(() => {
    at("time").value = Math.min(last, Number(at("time").value) + step);
    draw();
    const growing = views.find(({ generated }) => generated >= timeNow());
    growing.spans[growing.stops[stopAt(growing, timeNow())]].scrollIntoView({ block: "nearest" });
    if (Number(at("time").value) >= last) pause();
  }, 40);
}

const address = new URLSearchParams(location.hash.slice(1)), [firsts] = data.panels;
const optionOf = (sample, i) => {
  const ends = data.panels.map((samples) => plural(samples[i].ids.length - sample.prompt, "token") + ", " + samples[i].finish);
  return Object.assign(make("option", "", sample.sample + ": " + ends.join(" / ")), { value: i });
};
at("sample").replaceChildren(...firsts.map(optionOf));
at("sample-label").hidden = firsts.length === 1;
at("sample").value = Math.max(0, firsts.findIndex((sample) => String(sample.sample) === address.get("sample")));
document.querySelector("main").classList.toggle("several", data.panels.length > 1);
new ResizeObserver(() => {
  const isFixed = getComputedStyle(document.querySelector("header")).position === "sticky";
  document.documentElement.style.setProperty("--top", (isFixed ? document.querySelector("header").offsetHeight : 0) + "px");
}).observe(document.querySelector("header"));
at("sample").addEventListener("change", () => { pause(); show(Number(at("sample").value), new URLSearchParams()); });
at("layer").addEventListener("change", reselect);
at("head").addEventListener("change", reselect);
at("time").addEventListener("input", () => { pause(); draw(); });
at("play").addEventListener("click", play);
at("before").addEventListener("click", () => { pause(); jump(-1); });
at("after").addEventListener("click", () => { pause(); jump(1); });
stillness.addEventListener("change", pause);
document.addEventListener("keydown", pressKey);
document.addEventListener("focusin", (event) => showTip(tokenOf(event.target)));
document.addEventListener("mouseover", (event) => showTip(tokenOf(event.target)));
document.addEventListener("click", (event) => {
  const span = tokenOf(event.target);
  if (span) focusToken(span, { preventScroll: true });
  showTip(span);
});
document.addEventListener("scroll", () => {
  const span = tokenOf(document.activeElement);
  showTip(span && !at("tip").hidden && span.hasAttribute("aria-describedby") ? span : null);
}, true);
show(Number(at("sample").value), address);
