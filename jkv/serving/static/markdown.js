// Markdown and formulas as nodes of the page. What a model writes is not trusted: its HTML is shown as text, the HTML that Markdown
// becomes is cleaned, and images, which would be loaded from other hosts, become links.

const { marked, DOMPurify, katex } = window;

const escaped = text => text.replace(/[&<>"']/g, sign => `&#${sign.charCodeAt(0)};`);
const mark = ({ tex, isDisplay }) => `<code class="math${isDisplay ? " display" : ""}">${escaped(tex)}</code>`;

const DISPLAY = /^(?:\$\$([^]+?)\$\$|\\\[([^]+?)\\\]|(\\begin\{(\w+\*?)\}[^]+?\\end\{\4\}))/;
const INLINE = /^(?:\\\(([^]+?)\\\)|\$(?![\s$])((?:\\[^]|[^$`\\\n])+?)(?<!\s)\$(?!\d))/;  // "$5 or $6" has no formula

function formula(source, isBlock) {
  const display = DISPLAY.exec(source), found = display ?? (isBlock ? null : INLINE.exec(source));
  if (!found || (isBlock && !/^[ \t]*(\n|$)/.test(source.slice(found[0].length)))) return undefined;
  return { type: isBlock ? "mathBlock" : "math", raw: found[0], tex: (found[1] ?? found[2] ?? found[3]).trim(), isDisplay: Boolean(display) };
}

marked.use({
  gfm: true,
  breaks: true,
  extensions: [
    { name: "mathBlock", level: "block", start: text => text.match(/^(\$\$|\\\[|\\begin\{)/m)?.index, tokenizer: text => formula(text, true), renderer: mark },
    { name: "math", level: "inline", start: text => text.match(/\$|\\[([]|\\begin\{/)?.index, tokenizer: text => formula(text, false), renderer: mark },
  ],
  renderer: {
    html: ({ text }) => escaped(text),
    image: ({ href, text }) => `<a href="${escaped(href)}">${escaped(text || href)}</a>`,
    checkbox: ({ checked }) => (checked ? "\u2611 " : "\u2610 "),
  },
});

const CLEAN = {
  ALLOWED_TAGS: "a blockquote br code del em h1 h2 h3 h4 h5 h6 hr li ol p pre strong table tbody td th thead tr ul".split(" "),
  ALLOWED_ATTR: ["align", "class", "href", "start", "title"],
  ALLOWED_URI_REGEXP: /^(?:https?|mailto):/i,
  ALLOW_DATA_ATTR: false,
  RETURN_DOM_FRAGMENT: true,
};

function setFormula(code) {
  const place = document.createElement("span");
  place.className = code.className;
  katex.render(code.textContent, place, { displayMode: code.classList.contains("display"), output: "mathml", throwOnError: false, strict: false });
  code.replaceWith(place);
}

/** Shows a text of Markdown in an element. */
export function showMarkdown(element, text) {
  const content = DOMPurify.sanitize(marked.parse(text), CLEAN);
  content.querySelectorAll("code.math").forEach(setFormula);
  for (const link of content.querySelectorAll("a")) Object.assign(link, { target: "_blank", rel: "noopener noreferrer" });
  element.replaceChildren(content);
}
