"use strict";
// Counts what a trace kept at any moment. Nothing here touches the document; `kept.js` draws what it returns.
const number = (value, digits = 0) =>
  value.toLocaleString("en", { minimumFractionDigits: digits, maximumFractionDigits: digits });
const mean = (value) => number(value, value % 1 ? 1 : 0);
const bytes = (value) => {
  const power = Math.min(4, Math.max(0, Math.floor(Math.log10(Math.max(value, 1)) / 3)));
  return number(value / 1000 ** power, power ? 1 : 0) + "\u00a0" + ["B", "kB", "MB", "GB", "TB"][power];
};
const plural = (count, word) => number(count) + " " + word + (count === 1 ? "" : "s");
// The index of the last of ascending numbers that is at most `value`, -1 if none is.
const lastUpTo = (numbers, value, low = 0, high = numbers.length) => {
  const first = low;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (numbers[middle] <= value) low = middle + 1;
    else high = middle;
  }
  return low > first ? low - 1 : -1;
};

// Reading what is packed.

async function unpack(text) {
  const packed = Uint8Array.from(atob(text), (character) => character.charCodeAt(0));
  const stream = new Blob([packed]).stream().pipeThrough(new DecompressionStream("deflate"));
  return new Int16Array(await new Response(stream).arrayBuffer());
}

async function load(sample) {
  const total = sample.ids.length, groups = (sample.layers * sample.heads) / sample.group_size;
  const numbers = await unpack(sample.changes), places = groups * total;
  const offset = new Int32Array(places + 1);
  for (let i = 0; i < places; i++) offset[i + 1] = offset[i] + numbers[i];
  const count = offset[places];
  const stops = sample.stops || Array.from({ length: total - sample.prompt + 1 }, (_, i) => sample.prompt - 1 + i);
  return {
    sample, total, groups, offset, stops, generated: total - sample.prompt,
    tick: numbers.subarray(places, places + count), change: numbers.subarray(places + count),
    replaced: new Set(sample.replaced),
  };
}

// The groups of a choice of layer and head; -1 is all.
function groupsOf(sample, layer, head) {
  const chosen = [];
  for (let l = 0; l < sample.layers; l++) {
    if (layer >= 0 && l !== layer) continue;
    if (sample.group_size > 1) chosen.push(l);
    else for (let k = 0; k < sample.heads; k++) if (layer < 0 || head < 0 || k === head) chosen.push(l * sample.heads + k);
  }
  return chosen;
}

// For each token, the ticks at which a choice of groups keeps more or fewer of it, and how many heads keep it from then on.
function choose(view, chosen) {
  const { sample, total, offset, tick, change } = view;
  const heads = chosen.length * sample.group_size;
  const sum = new Int32Array(sample.ticks.length), isTouched = new Uint8Array(sum.length);
  const start = new Int32Array(total + 1), ticks = [], counts = [];
  for (let token = 0; token < total; token++) {
    const touched = [];
    for (const group of chosen) {
      const place = group * total + token;
      for (let e = offset[place]; e < offset[place + 1]; e++) {
        if (!isTouched[tick[e]]) { isTouched[tick[e]] = 1; touched.push(tick[e]); }
        sum[tick[e]] += change[e];
      }
    }
    let kept = heads;
    for (const t of touched.sort((a, b) => a - b)) {
      kept += sum[t];
      if (sum[t]) { ticks.push(t); counts.push(kept); }
      sum[t] = isTouched[t] = 0;
    }
    start[token + 1] = ticks.length;
  }
  Object.assign(view, { heads, start, ticks, counts, changed: new Set(ticks.map((t) => sample.ticks[t])) });
  view.sizes = sizesOf(view);
}

// Slots filled at each stop, mean over the chosen heads.
function sizesOf({ sample, stops, total, heads, start, ticks, counts }) {
  const steps = new Float64Array(stops.length + 1);
  const stopOf = (position) => 1 + lastUpTo(stops, position - 1);
  for (let token = 0; token < total; token++) {
    steps[stopOf(token)] += heads;
    let kept = heads;
    for (let e = start[token]; e < start[token + 1]; e++) {
      steps[stopOf(sample.ticks[ticks[e]])] += counts[e] - kept;
      kept = counts[e];
    }
  }
  let sum = 0;
  return Array.from(stops, (_, i) => (sum += steps[i]) / heads);
}

// How many of the chosen heads keep a token when the query at `position` reads.
function keptAt({ sample, heads, start, ticks, counts }, token, position) {
  const last = lastUpTo(ticks, lastUpTo(sample.ticks, position), start[token], start[token + 1]);
  return last < 0 ? heads : counts[last];
}

function standsFor({ sample }, token, position) {
  return sample.again.reduce((sum, [t, begin, end]) => sum + (t === token && begin <= position && position < end), 0);
}

// Several panels under one slider. A time is a number of generated tokens.

// Times at which a panel has a stop, ascending.
function timesOf(views) {
  const times = new Set();
  for (const { stops, sample } of views) for (const stop of stops) times.add(stop - sample.prompt + 1);
  return Array.from(times).sort((a, b) => a - b);
}

// The last stop of a panel up to a time: its own end, where another panel's text is longer.
const stopAt = ({ stops, sample }, time) => Math.max(0, lastUpTo(stops, sample.prompt - 1 + time));

// The earliest time at which a panel keeps less than before, and the panels that do; null if all is kept.
function openingOf(views) {
  const timeOf = ({ sample }) => (sample.first === null ? Infinity : sample.first - sample.prompt + 1);
  const time = views.reduce((least, view) => Math.min(least, timeOf(view)), Infinity);
  return time === Infinity ? null : { time, first: views.filter((view) => timeOf(view) === time) };
}

// How many generated tokens all panels share from the first; null if the texts are the same to the end.
function sharedTokens(views) {
  const [first, ...others] = views.map(({ sample }) => sample.ids.slice(sample.prompt));
  let count = null;
  for (const other of others) {
    let same = 0;
    while (same < first.length && same < other.length && first[same] === other[same]) same++;
    if (same < first.length || same < other.length) count = count === null ? same : Math.min(count, same);
  }
  return count;
}

// What a panel keeps at a time, in words.
function stateOf(view, time) {
  const { sample, heads, stops, sizes } = view, stop = stopAt(view, time), seen = stops[stop] + 1;
  const words = [(sample.comes_back ? "reads " : "keeps ") + mean(sizes[stop]) + " of " + plural(seen, "token")];
  if (heads > 1) words.push("mean over " + number(heads) + " heads");
  if (sample.slot_bytes) words.push(bytes(sizes[stop] * heads * sample.slot_bytes) + " of " + bytes(seen * heads * sample.slot_bytes));
  if (time > view.generated) words.push("ended after " + plural(view.generated, "token") + " (" + sample.finish + ")");
  return words.join(", ");
}

function generatedAt({ sample }, position) {
  const count = position - sample.prompt + 1;
  return count <= 0 ? "with the prompt" : "at generated token " + number(count);
}

// What is known of a token when the query at `position` reads, in lines.
function tell(view, token, position) {
  const { sample, heads, start, ticks, counts } = view;
  const said = sample.pieces[token].replaceAll("\n", "\u21b5"), verb = sample.comes_back ? "read" : "kept";
  const lines = ["\u201c" + said + "\u201d  id " + sample.ids[token] + ", position " + token];
  if (token > position) return [...lines, "not generated yet"].join("\n");
  const kept = keptAt(view, token, position), others = standsFor(view, token, position);
  lines.push(verb + " by " + number(kept) + " of " + plural(heads, "head") + (heads > 1 ? " (" + number((100 * kept) / heads) + "%)" : ""));
  if (others) lines.push("stands for " + plural(others, "later token") + " too");
  let first = null, last = null, before = heads;
  for (let e = start[token]; e < start[token + 1]; e++) {
    if (counts[e] < before) { first = first === null ? ticks[e] : first; last = ticks[e]; }
    before = counts[e];
  }
  const word = view.replaced.has(token) ? "replaced " : sample.comes_back ? "not read " : "evicted ";
  if (first === null) lines.push(sample.comes_back ? "read to the end" : "never evicted");
  else if (first === last) lines.push(word + generatedAt(view, sample.ticks[first]) + (before ? ", by " + plural(heads - before, "head") : ""));
  else lines.push("first " + word + generatedAt(view, sample.ticks[first]) + ", last " + generatedAt(view, sample.ticks[last]));
  return lines.join("\n");
}
