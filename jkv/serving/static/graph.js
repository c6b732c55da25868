// What the cache holds as an answer grows: tokens on the left axis, megabytes on the right one, over the generated tokens.

const NAMESPACE = "http://www.w3.org/2000/svg";
const LEFT = 50, RIGHT = 56, TOP = 20, BOTTOM = 36;

function node(name, attributes, text = "") {
  const made = document.createElementNS(NAMESPACE, name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  made.textContent = text;
  return made;
}

/** Round numbers from 0 up to `most`, about `count` of them. */
export function ticks(most, count) {
  const rough = most / count, power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].find(digit => digit * power >= rough) * power;
  return Array.from({ length: Math.floor(most / step + 1e-9) + 1 }, (_, index) => Number((index * step).toPrecision(12)));
}

const number = value => value.toLocaleString("en", { maximumSignificantDigits: 4 });

/**
 * Draws lines into a figure.
 *
 * figure: an element with an svg.
 * lines: each with `name`, `kind` (own, full or whole) and `points` of [generated tokens, held tokens].
 * bytesPerToken: of keys and values in all layers; 0 where it is unknown, and then there is no right axis.
 */
export function draw(figure, lines, bytesPerToken) {
  const svg = figure.querySelector("svg"), { clientWidth: width, clientHeight: height } = svg;
  const points = lines.flatMap(line => line.points);
  if (!points.length || !width) return;
  const mostNew = Math.max(1, ...points.map(point => point[0])), mostHeld = 1.05 * Math.max(1, ...points.map(point => point[1]));
  const right = width - RIGHT, low = height - BOTTOM;
  const x = value => LEFT + value / mostNew * (right - LEFT), y = value => low - value / mostHeld * (low - TOP);
  const parts = [];
  for (const value of ticks(mostHeld, 4)) {
    parts.push(node("line", { x1: LEFT, x2: right, y1: y(value), y2: y(value) }));
    parts.push(node("text", { x: LEFT - 6, y: y(value) + 4, "text-anchor": "end" }, number(value)));
  }
  for (const value of ticks(mostNew, Math.max(2, Math.floor(width / 90)))) {
    parts.push(node("line", { x1: x(value), x2: x(value), y1: low, y2: low + 4 }));
    parts.push(node("text", { x: x(value), y: low + 17, "text-anchor": "middle" }, number(value)));
  }
  const megabytes = mostHeld * bytesPerToken / 1e6;
  for (const value of bytesPerToken ? ticks(megabytes, 4) : []) {
    const place = y(value * 1e6 / bytesPerToken);
    parts.push(node("line", { x1: right, x2: right + 4, y1: place, y2: place }));
    parts.push(node("text", { x: right + 7, y: place + 4 }, number(value)));
  }
  parts.push(node("text", { x: 0, y: 11 }, "tokens held"));
  if (bytesPerToken) parts.push(node("text", { x: width, y: 11, "text-anchor": "end" }, "MB held"));
  parts.push(node("text", { x: (LEFT + right) / 2, y: height - 3, "text-anchor": "middle" }, "generated tokens"));
  for (const { kind, points } of lines) {
    if (points.length) parts.push(node("path", { class: kind, d: "M" + points.map(([tokens, held]) => `${x(tokens)},${y(held)}`).join("L") }));
  }
  svg.setAttribute("viewBox", `0 0 ${width} ${height}`);
  svg.setAttribute("aria-label", lines.filter(line => line.points.length).map(({ name, points }) =>
    `${name}: ${points.at(-1)[1]} tokens held after ${points.at(-1)[0]} generated.`).join(" "));
  svg.replaceChildren(...parts);
}
