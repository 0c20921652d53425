// Markdown to nodes: marked makes HTML, DOMPurify lets through what is listed here, nothing else.

const { Lexer, Marked } = globalThis.marked;
const purify = globalThis.DOMPurify;
const LANGUAGES = {
  bash: ["sh", "shell", "zsh", "console"], c: ["h"], cpp: ["c++", "cc", "hpp"], css: [], diff: ["patch"],
  go: ["golang"], java: [], javascript: ["js", "jsx", "mjs"], json: ["jsonc"], python: ["py", "python3"],
  rust: ["rs"], sql: [], typescript: ["ts", "tsx"], xml: ["html", "svg"], yaml: ["yml"],
};
const NAMED = new Map(Object.entries(LANGUAGES).flatMap(([name, more]) => [name, ...more].map((one) => [one, name])));
const RULES = {
  ALLOWED_TAGS: [
    "a", "blockquote", "br", "code", "del", "em", "h1", "h2", "h3", "h4", "h5", "h6", "hr", "input",
    "li", "ol", "p", "pre", "span", "strong", "table", "tbody", "td", "th", "thead", "tr", "ul",
  ],
  ALLOWED_ATTR: ["href", "class", "align", "start", "title", "type", "checked", "disabled"],
  ALLOWED_URI_REGEXP: /^(?:https?|mailto):/i,
  ALLOW_DATA_ATTR: false,
  ALLOW_ARIA_ATTR: false,
  RETURN_DOM_FRAGMENT: true,
};
const escaped = (text) => text.replaceAll("&", "&amp;").replaceAll("<", "&lt;").replaceAll(">", "&gt;").replaceAll('"', "&quot;");

const parser = new Marked({
  gfm: true,
  breaks: true,
  renderer: {
    html: ({ text }) => escaped(text), // what a model writes as HTML is shown, not done
    image: ({ href, text }) => `<a href="${escaped(href)}">${escaped(text || href)}</a>`, // nothing is loaded
  },
});

// marked's time grows with the square of the marks in a text, and of a word's length: such a text stays as it is written.
const LONG = /\S{1500}|[^\S\n]{1500}/;
const inline = Lexer.prototype.inlineTokens;
Lexer.prototype.inlineTokens = function (text, tokens = []) {
  if (text.length < 1000 || !(LONG.test(text) || text.replace(/[^*_~[<`]/g, "").length > 1000)) return inline.call(this, text, tokens);
  tokens.push({ type: "text", raw: text, text, escaped: false });
  return tokens;
};

purify.addHook("afterSanitizeAttributes", (node) => {
  if (node.nodeName === "A") {
    node.setAttribute("target", "_blank");
    node.setAttribute("rel", "noopener noreferrer");
  } else if (node.nodeName === "INPUT") {
    node.type = "checkbox";
    node.disabled = true;
    node.setAttribute("aria-label", node.checked ? "done" : "to do");
  }
});

let highlighter = null; // loaded with the first code
let loading = null;
const languages = new Map();

function load(name) {
  loading ??= import("./web/vendor/highlight.js").then((made) => { highlighter = made.default; });
  if (!languages.has(name)) {
    languages.set(name, loading.then(() => import(`./web/vendor/languages/${name}.js`))
      .then((language) => highlighter.registerLanguage(name, language.default)));
  }
  return languages.get(name);
}

// At once where the language is there: code that grows must not lose its colours with each piece.
function colour(code, name) {
  const found = NAMED.get(name);
  if (!found) return;
  if (!highlighter?.getLanguage(found)) {
    load(found).then(() => colour(code, found), () => languages.delete(found)); // it stays plain then
    return;
  }
  const { value } = highlighter.highlight(code.textContent, { language: found, ignoreIllegals: true });
  code.replaceChildren(purify.sanitize(value, RULES));
}

// Code gets a line with its language and a button that copies it.
function dress(fragment) {
  for (const pre of fragment.querySelectorAll("pre")) {
    const code = pre.querySelector("code") ?? pre;
    const language = /language-([\w+-]+)/.exec(code.className)?.[1]?.toLowerCase() ?? "";
    const box = document.createElement("div");
    box.className = "code";
    const head = document.createElement("div");
    const label = document.createElement("span");
    label.textContent = language || "text";
    const copy = document.createElement("button");
    copy.type = "button";
    copy.className = "plain";
    copy.textContent = "Copy";
    copy.title = "Copy the code";
    copy.addEventListener("click", () => copyText(code.textContent.replace(/\n$/, ""), copy));
    head.append(label, copy);
    pre.tabIndex = 0; // it may scroll
    pre.replaceWith(box);
    box.append(head, pre);
    colour(code, language);
  }
  for (const table of fragment.querySelectorAll("table")) {
    const box = document.createElement("div");
    box.className = "wide";
    box.tabIndex = 0;
    table.replaceWith(box);
    box.append(table);
  }
  return fragment;
}

export async function copyText(text, button) {
  const before = button.textContent;
  try {
    await navigator.clipboard.writeText(text);
    if (before) button.textContent = "Copied";
    button.dataset.done = "";
  } catch {
    if (before) button.textContent = "Select and copy by hand";
  }
  setTimeout(() => {
    if (before) button.textContent = before;
    delete button.dataset.done;
  }, 1500);
}

// What is nested deeper than the browser's stack reaches is shown as it was written.
function blocksOf(text) {
  try {
    return parser.lexer(text).filter((one) => one.type !== "space");
  } catch {
    return [{ type: "plain", raw: text }];
  }
}

function nodesOf(token) {
  try {
    if (token.type !== "plain") {
      const html = parser.parser([token], { ...parser.defaults });
      return [...dress(purify.sanitize(html, RULES)).childNodes];
    }
  } catch { /* below */ }
  const plain = document.createElement("p");
  plain.className = "plain-text";
  plain.textContent = token.raw;
  return [plain];
}

// Shows a text that grows: blocks that have not changed keep their nodes.
export class MarkdownView {
  constructor(place) {
    this.place = place;
    this.blocks = [];
  }

  show(text) {
    const blocks = blocksOf(text);
    blocks.forEach((token, index) => {
      const before = this.blocks[index];
      if (before?.raw === token.raw && before.type === token.type) return;
      const nodes = nodesOf(token);
      const after = before?.nodes.at(-1)?.nextSibling ?? null;
      for (const node of before?.nodes ?? []) node.remove();
      for (const node of nodes) this.place.insertBefore(node, before ? after : null);
      this.blocks[index] = { raw: token.raw, type: token.type, nodes };
    });
    for (const gone of this.blocks.splice(blocks.length)) for (const node of gone.nodes) node.remove();
  }
}
