// The page, over what model.js has made of the data and with what draw.js draws.

const data = JSON.parse($("data").textContent);
const run = new Run(data), other = data.other ? new Run(data.other) : null;
const view = { at: 0, row: -1, picked: null };
const KINDS = { start: "start", prompt: "prompt", reply: "reply", budget: "budget changed", shared: "shared budget", forget: "thought forgotten", context: "context full" };
const BANDS = { start: "line", prompt: "gone", reply: "text", budget: "danger", shared: "danger", forget: "danger", context: "danger" };
const GLOSSARY = {
  head: ["(layer, KV head)", "Each layer of the model has a few KV heads, and each of them holds entries of its own. “Head” on this page is one (layer, KV head)."],
  entry: ["entry", "Key and value of one token in one (layer, KV head). All entries together are the model's memory of the conversation, the KV cache."],
  freed: ["memory freed", "The share of all entries that were made and are not held any more; their pages went back to the pool."],
  step: ["step", "A piece of the prompt, a token of the reply, a change of the budget, or an eviction by a budget that sessions share."],
  budget: ["budget", "How many entries may be held. Where there are more, those with the lowest scores go."],
  beta: ["beta", "What a gate gave the entry when it was made, from 0 to 1: an entry of age a is worth beta to the power of a."],
  score: ["score", "What the policy ranks entries by. For learned retention, the logarithm of what the entry is worth over the next steps; higher stays longer."],
  cut: ["highest score that went", "At each step, the best of the entries that were evicted: whoever scores above it stays."],
  patch: ["patch", "The part of a picture that one token stands for."],
  attention: ["looked at", "The attention that the reply's tokens pay, on average over all heads, when the same conversation is read with a cache that forgets nothing."],
};

// --- fate as a colour -----------------------------------------------------------------------

const veil = (share) => (share < 0 ? 0.97 : share === 0 ? 0.92 : 0.72 * (1 - share));

function paint(node, fate) {
  node.classList.toggle("unread", fate.level === -1);
  node.classList.toggle("none", fate.level === 0);
  node.dataset.level = fate.level;
  node.style.setProperty("--held", `${fate.share > 0 ? 9 + 36 * fate.share : 0}%`);
}

const fateOf = (of, from, to) => of.fate(stepOf(of), rowOf(of), from, to);
const stepOf = (of) => (of === run ? view.at : view.at === run.steps - 1 ? other.steps - 1 : Math.max(0, other.seen.findLastIndex((n) => n <= run.seen[view.at])));
const rowOf = (of) => (of === run || view.row < 0 ? view.row : other.names.indexOf(run.names[view.row]));

// --- pictures -------------------------------------------------------------------------------

class Pictures {
  constructor(of) {
    this.run = of;
    this.number = Math.max(0, of.frames.findIndex((frame) => of.needed >= 0 && of.cellOf(frame, of.needed) >= 0));
    this.node = element("div", undefined, "pictures");
    this.holder = element("div", undefined, "picture");
    this.strip = element("div", undefined, "strip");
    this.caption = element("p", undefined, "small muted");
    this.node.append(this.holder, this.caption);
    if (of.frames.length > 1) this.node.append(this.strip), this.fillStrip();
    this.build();
  }

  get frame() {
    return this.run.frames[this.number];
  }

  fillStrip() {
    this.thumbs = this.run.frames.map((frame, number) => {
      const button = element("button", undefined, "thumb"), image = element("img"), canvas = element("canvas");
      button.type = "button";
      button.setAttribute("aria-label", `show ${frame.caption}`);
      if (frame.jpeg) (image.src = this.source(frame)), (image.alt = ""), button.append(image);
      [canvas.width, canvas.height] = [frame.wide, frame.high];
      button.style.aspectRatio = `${frame.wide} / ${frame.high}`;
      button.append(canvas);
      button.addEventListener("click", () => this.show(number));
      this.strip.append(button);
      return { button, canvas };
    });
  }

  source(frame) {
    return `data:image/jpeg;base64,${this.run.jpegs[frame.jpeg - 1]}`;
  }

  show(number) {
    this.number = number;
    this.build();
    this.draw();
  }

  token(cell) {
    return this.frame.start - this.run.first + Math.floor(cell / this.frame.wide) * this.frame.stride + (cell % this.frame.wide);
  }

  build() {
    const { frame, run: of } = this, { wide, high } = frame, size = (window.innerWidth < 600 || other ? 380 : 500) / Math.max(wide, high);
    const drawn = svg("svg", { xmlns: SVG, viewBox: `0 0 ${wide * size} ${high * size}`, tabindex: 0, role: "group" });
    drawn.setAttribute("aria-label", `${frame.caption}: ${wide * high} patches; arrow keys choose one and ask why it went`);
    drawn.append(svg("rect", { width: wide * size, height: high * size, fill: colour("surface") }));
    if (frame.jpeg)
      drawn.append(svg("image", { width: wide * size, height: high * size, preserveAspectRatio: "none", href: this.source(frame) }));
    this.patches = Array.from({ length: wide * high }, (_, cell) => {
      const [x, y] = [(cell % wide) * size, Math.floor(cell / wide) * size];
      const rect = svg("rect", { x, y, width: size, height: size, fill: colour("page"), stroke: colour("line"), "stroke-width": Math.min(1, size / 60) });
      const title = svg("title"), made = { rect, title };
      rect.append(title);
      drawn.append(rect);
      if (size >= 40) {
        const text = `${of.rows.length}/${of.rows.length}`, width = Math.min(size - 4, 12 + 8 * text.length);
        made.pill = svg("g", {}, svg("rect", { x: x + size - width - 3, y: y + size - 23, width, height: 20, rx: 4, fill: colour("page"), "fill-opacity": 0.85 }));
        made.text = svg("text", { x: x + size - width / 2 - 3, y: y + size - 8, "text-anchor": "middle", fill: colour("text"), ...FONT, "font-size": 14 });
        made.pill.append(made.text);
        made.pill.setAttribute("pointer-events", "none");
        drawn.append(made.pill);
      }
      return made;
    });
    const ring = (stroke, width, more = {}) => svg("rect", { width: size, height: size, fill: "none", stroke, "stroke-width": width, "pointer-events": "none", visibility: "hidden", ...more });
    this.size = size;
    this.ringNeeded = ring(colour("of-image"), Math.max(2, Math.min(5, size / 12)), { rx: 2 });
    this.ringPicked = ring(colour("text"), Math.max(1.5, Math.min(3, size / 15)), { "stroke-dasharray": size > 30 ? "7 5" : "3 2" });
    drawn.append(this.ringNeeded, this.ringPicked);
    this.place(this.ringNeeded, of.needed);
    drawn.addEventListener("click", (event) => {
      const box = drawn.getBoundingClientRect();
      const x = Math.floor(((event.clientX - box.left) / box.width) * wide), y = Math.floor(((event.clientY - box.top) / box.height) * high);
      pickToken(of, this.token(Math.min(y, high - 1) * wide + Math.min(x, wide - 1)));
    });
    drawn.addEventListener("keydown", (event) => {
      const moves = { ArrowLeft: -1, ArrowRight: 1, ArrowUp: -wide, ArrowDown: wide };
      if (!(event.key in moves)) return;
      event.preventDefault();
      const now = view.picked && view.picked.of === of ? of.cellOf(frame, view.picked.p) : -1;
      const next = now < 0 ? 0 : now + moves[event.key];
      if (next >= 0 && next < wide * high) pickToken(of, this.token(next));
    });
    this.svg = drawn;
    this.holder.replaceChildren(drawn);
    const note = this.ringNeeded.getAttribute("visibility") === "visible" ? "; outlined: what the answer looked at most" : "";
    this.caption.textContent = `${frame.caption[0].toUpperCase()}${frame.caption.slice(1)}: the clearer a patch, the more heads hold it${note}.`;
  }

  place(ring, p) {
    const cell = p === undefined || p < 0 ? -1 : this.run.cellOf(this.frame, p);
    ring.setAttribute("visibility", cell < 0 ? "hidden" : "visible");
    ring.setAttribute("x", (cell % this.frame.wide) * this.size);
    ring.setAttribute("y", Math.floor(cell / this.frame.wide) * this.size);
  }

  draw() {
    const { run: of, frame } = this;
    this.patches.forEach((patch, cell) => {
      const p = this.token(cell), fate = p < 0 ? { share: 0, held: 0, of: 1, went: 0 } : fateOf(of, p);
      patch.rect.setAttribute("fill-opacity", veil(fate.share).toFixed(3));
      patch.title.textContent = `row ${Math.floor(cell / frame.wide) + 1}, column ${(cell % frame.wide) + 1}: ${of.told(fate)}`;
      if (!patch.text) return;
      patch.pill.setAttribute("visibility", fate.share < 0 ? "hidden" : "visible");
      patch.text.textContent = fate.of === 1 ? (fate.held ? "held" : "gone") : `${fate.held}/${fate.of}`;
    });
    const mine = view.picked && view.picked.of === of;
    this.place(this.ringPicked, mine && view.picked.p !== of.needed ? view.picked.p : -1);
    if (!this.thumbs) return;
    const page = channels("page");
    this.thumbs.forEach(({ button, canvas }, number) => {
      const shown = of.frames[number], image = new ImageData(shown.wide, shown.high);
      for (let y = 0, at = 0; y < shown.high; y++)
        for (let x = 0; x < shown.wide; x++, at += 4) {
          const p = shown.start - of.first + y * shown.stride + x;
          image.data.set([...page, Math.round(255 * veil(p < 0 ? 0 : fateOf(of, p).share))], at);
        }
      canvas.getContext("2d").putImageData(image, 0, 0);
      button.setAttribute("aria-pressed", String(number === this.number));
    });
  }
}

// --- words ----------------------------------------------------------------------------------

const PAGE = 4000;
class Words {
  constructor(of) {
    this.run = of;
    this.node = element("div", undefined, "words");
    this.text = element("div", undefined, "text");
    this.text.tabIndex = 0;
    this.text.setAttribute("role", "group");
    this.text.setAttribute("aria-label", "the conversation; left and right arrows choose a token and ask why it went");
    this.turn = element("div", undefined, "row");
    this.node.append(this.text, this.turn);
    this.fill(0);
    for (let start = 0; of.tokens > PAGE && start < of.tokens; start += PAGE) {
      const button = element("button", `from token ${count(start + of.first)}`);
      button.addEventListener("click", () => (this.fill(start), this.draw()));
      this.turn.append(button);
    }
    this.text.addEventListener("click", (event) => {
      if (event.target.dataset.from !== undefined) pickToken(of, +event.target.dataset.from);
    });
    this.text.addEventListener("keydown", (event) => {
      const move = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
      if (!move) return;
      event.preventDefault();
      const spans = [...this.text.children];
      const now = spans.findIndex((span) => span.classList.contains("picked"));
      const next = spans[Math.max(0, Math.min(spans.length - 1, now < 0 ? 0 : now + move))];
      pickToken(of, +next.dataset.from);
      next.scrollIntoView({ block: "nearest" });
    });
  }

  fill(from) {
    const { run: of } = this, parts = [];
    for (let p = from; p < Math.min(from + PAGE, of.tokens); ) {
      let to = p + 1;
      const visual = +of.modality[p], frame = visual ? of.frameOf(p) : null;
      while (visual && to < of.tokens && of.modality[to] === of.modality[p] &&
        (!frame || to + of.first < frame.start + frame.high * frame.stride)) to++;
      const span = element("span", visual ? `[${frame ? frame.caption : MODALITIES[visual]}: ${to - p} tokens]` : of.texts[p]);
      [span.dataset.from, span.dataset.to] = [p, to];
      parts.push(span);
      p = to;
    }
    this.text.replaceChildren(...parts);
  }

  // Brings a token into sight, if it lies in a part that is not.
  reveal(p) {
    if (!this.text.querySelector(`[data-from="${p}"]`)) this.fill(PAGE * Math.floor(p / PAGE));
    this.draw();
    const span = this.text.querySelector(".picked");
    if (span) this.text.scrollTop = span.offsetTop - this.text.offsetTop - this.text.clientHeight / 2;
  }

  draw() {
    const { run: of } = this, picked = view.picked && view.picked.of === of ? view.picked.p : -1;
    for (const span of this.text.children) {
      const from = +span.dataset.from, to = +span.dataset.to, fate = fateOf(of, from, to);
      span.classList.toggle("picked", picked >= from && picked < to);
      const told = of.told(fate);
      if (span.told === told) continue; // most words stay as they are from step to step
      span.told = told;
      paint(span, fate);
      span.title = `${to === from + 1 ? `token ${from + of.first}` : `tokens ${from + of.first} to ${to - 1 + of.first}`}: ${told}`;
      span.classList.toggle("needed", of.needed >= from && of.needed < to);
    }
  }
}

// --- one timeline ---------------------------------------------------------------------------

let timeline = null;
function drawTimeline() {
  const { steps, curves, allowed, kinds, seen } = run;
  const series = MODALITIES.map((name, m) => ({
    name, colour: colour(`of-${name}`), area: true, values: curves.subarray(m * steps, (m + 1) * steps),
  })).filter(({ values }) => values.some((v) => v > 0));
  const sum = Array.from(seen, (_, s) => run.held(s)), most = Math.max(...sum);
  if (other) {
    const theirs = Array.from(seen, (n, s) => other.held(s === steps - 1 ? other.steps - 1 : Math.max(0, other.seen.findLastIndex((m) => m <= n))));
    series.push({ name: `all of ${other.run}`, colour: colour("text"), values: theirs, level: true });
  }
  // A budget far above what is held would flatten the curves.
  if (allowed.some((a) => a >= 0 && a <= 2 * most))
    series.push({ name: "budget", colour: colour("danger"), values: allowed.map((a) => (a >= 0 && a <= 2 * most ? a : NaN)), dashed: true, level: true });
  const bands = [];
  for (let from = 0, to; from < steps; from = to) {
    for (to = from + 1; to < steps && kinds[to] === kinds[from]; ) to++;
    const kind = run.kindNames[+kinds[from]];
    bands.push({ from, to, fill: colour(BANDS[kind]), title: KINDS[kind], name: BANDS[kind] });
  }
  $("bands").replaceChildren(...[...new Map(bands.map((band) => [band.title, band])).values()].map(({ title, name }) => {
    const item = element("span", undefined, "swatch"), sample = element("span", undefined, "strip-sample");
    sample.style.background = `var(--${name})`;
    item.append(sample, title);
    return item;
  }));
  const holder = $("timeline"), width = holder.clientWidth || 560;
  timeline = chart({
    width, height: width < 460 ? 200 : other ? 250 : 330, steps, series, bands, zero: true,
    xLabel: "step", yLabel: "entries held", label: "entries held over the steps, by what they are of",
  });
  holder.replaceChildren(timeline.svg);
  timeline.mark(view.at);
}

function listenToTimeline() {
  let down = false;
  const seek = (event) => {
    const box = timeline.svg.getBoundingClientRect();
    go(timeline.stepAt(((event.clientX - box.left) / box.width) * timeline.svg.viewBox.baseVal.width));
  };
  $("timeline").addEventListener("pointerdown", (event) => ((down = true), seek(event)));
  window.addEventListener("pointermove", (event) => down && seek(event));
  window.addEventListener("pointerup", () => (down = false));
}

// --- depth ----------------------------------------------------------------------------------

const most = (values) => values.reduce((high, value) => Math.max(high, value), 1);

function drawMap() {
  const canvas = $("map"), { tokens, rows } = run, kinds = MODALITIES.map((name) => channels(`of-${name}`));
  [canvas.width, canvas.height] = [tokens, rows.length];
  const image = new ImageData(tokens, rows.length), cells = new Uint32Array(image.data.buffer);
  const whole = ([red, green, blue]) => (255 << 24) | (blue << 16) | (green << 8) | red; // as bytes lie in memory
  const [page, evicted] = [whole(channels("page")), whole(channels("hover"))], { born, gone } = run, { at } = view;
  const colours = Uint32Array.from(run.modality, (kind) => whole(kinds[+kind]));
  for (let r = 0, cell = 0; r < rows.length; r++)
    for (let p = 0; p < tokens; p++, cell++)
      cells[cell] = born[p] > at ? page : at < gone[cell] ? colours[p] : evicted;
  canvas.getContext("2d").putImageData(image, 0, 0);
  canvas.setAttribute("aria-label", `${count(run.held(view.at))} entries are held at step ${view.at}; arrow keys choose one`);
}

let rowsImage = null;
function drawRows() {
  const canvas = $("rows"), { steps, rows, perRow } = run;
  if (!rowsImage) {
    let high = 1;
    for (let r = 0; r < rows.length; r++)
      for (let s = 0; s < steps; s++) high = Math.max(high, perRow[r * (steps + 1) + s]);
    const [low, full] = [channels("raised"), channels("accent")];
    rowsImage = new ImageData(steps, rows.length);
    for (let r = 0, at = 0; r < rows.length; r++)
      for (let s = 0; s < steps; s++, at += 4) {
        const part = Math.sqrt(perRow[r * (steps + 1) + s] / high);
        for (let c = 0; c < 3; c++) rowsImage.data[at + c] = low[c] + (full[c] - low[c]) * part;
        rowsImage.data[at + 3] = 255;
      }
    [canvas.width, canvas.height] = [steps, rows.length];
    $("rowsMost").textContent = count(high);
  }
  const pen = canvas.getContext("2d");
  pen.putImageData(rowsImage, 0, 0);
  pen.fillStyle = colour("of-image");
  pen.globalAlpha = 0.6;
  pen.fillRect(view.at, 0, 1, rows.length);
  pen.globalAlpha = 1;
}

function drawScore() {
  if (!view.picked || view.picked.of !== run) return;
  const { row, p } = view.picked, { steps, tokens, born, computed } = run, end = run.gone[row * tokens + p], own = [];
  for (let s = 0; s < steps; s++) {
    const alive = born[p] <= s && s <= end, score = alive ? run.scoreOf(row, p, s) : NaN;
    own.push(alive && s === end && Number.isNaN(score) ? run.lastScore(row, p) : score);
  }
  const unit = { retention: "score (log of retention)", recency: "score (token index)" }[run.rule.kernel] ?? "score";
  const { svg: drawn, mark } = chart({
    width: $("score").clientWidth || 900, height: 240, steps, xLabel: "step", yLabel: unit, label: "the entry's score against the highest score that went",
    series: [
      { name: computed ? "this entry's score" : "this entry's score, where it was sampled", colour: colour("accent"), values: own, dashed: !computed, points: steps < 60 },
      { name: "highest score that went", colour: colour("danger"), values: Array.from(run.cutsOf(run.rule.group[row])), dashed: true, points: steps < 60 },
    ],
    marks: end !== NEVER && end > born[p] ? [[end, colour("danger")]] : [],
  });
  mark(view.at);
  $("score").replaceChildren(drawn);
}

function table(target, head, lines) {
  const top = element("tr");
  for (const name of head) top.append(element("th", name)), (top.lastChild.scope = "col");
  const body = element("tbody");
  body.append(...lines.map((cells) => {
    const line = element("tr");
    for (const cell of cells) {
      const box = element("td");
      box.append(cell);
      line.append(box);
    }
    return line;
  }));
  const header = element("thead");
  header.append(top);
  target.replaceChildren(header, body);
}

function word(of, p) {
  const made = element("span", of.frameOf(p) ? of.named(p) : of.texts[p].trim() ? of.texts[p] : JSON.stringify(of.texts[p]), "token");
  paint(made, fateOf(of, p));
  made.dataset.token = p;
  return made;
}

// What stayed and what went, by the very fate that colours the words.
const LISTED = 10;
function drawLists() {
  const fates = [];
  for (let p = 0; p < run.tokens; p++) fates.push(run.fate(view.at, view.row, p));
  const weight = (p) => (run.attention ? run.attention[p] : run.worth[p]);
  const chosen = (right, order) => fates.map((_, p) => p).filter((p) => right(fates[p])).sort(order);
  const stayed = chosen((f) => f.level > 0, (a, b) => fates[b].held - fates[a].held || weight(b) - weight(a) || a - b);
  const went = chosen((f) => f.level === 0, (a, b) => weight(b) - weight(a) || a - b);
  const lines = (list, last) => list.slice(0, LISTED).map((p) => [word(run, p), last(fates[p])]);
  table($("stayed"), [`held by most heads (of ${count(stayed.length)} that are held)`, "heads"], lines(stayed, (f) => `${f.held} of ${f.of}`));
  const about = run.attention ? "most looked at first" : run.logBeta ? "highest mean beta first" : "longest held first";
  table($("went"), [`forgotten by every head (${count(went.length)}; ${about})`, "since step"], lines(went, (f) => (f.went ? String(f.went) : "before the recording")));
}

function drawDiffering() {
  if (!other) return;
  const shared = Math.min(run.tokens, other.tokens), offset = run.first - other.first, found = [];
  for (let p = 0; p < shared; p++) {
    const q = p + offset;
    if (q < 0 || q >= other.tokens || run.texts[p] !== other.texts[q]) continue;
    const [mine, theirs] = [fateOf(run, p), fateOf(other, q)];
    if (mine.share >= 0 && theirs.share >= 0 && mine.share !== theirs.share) found.push({ p, q, mine, theirs, gap: Math.abs(mine.share - theirs.share) });
  }
  found.sort((a, b) => b.gap - a.gap || a.p - b.p);
  table($("differing"), ["token or patch", run.run, other.run], found.slice(0, LISTED).map(({ p, mine, theirs }) =>
    [run.frameOf(p) ? run.named(p) : run.named(p), `${mine.held} of ${mine.of}`, `${theirs.held} of ${theirs.of}`]));
}

function fillBudgets() {
  const { steps, kinds, allowed } = run, changes = [];
  for (let s = 1; s < steps; s++)
    if (+kinds[s] === 3) changes.push([`step ${s}`, `${count(allowed[s - 1])} to ${count(allowed[s])} entries`, `${count(run.held(s - 1) - run.held(s))} evicted at once`]);
  if (!changes.length) return;
  const made = element("table");
  table(made, ["budget changed", "from, to", "effect"], changes);
  $("budgets").append(made);
}

// --- choosing -------------------------------------------------------------------------------

let stages = [];
function pick(row, p, lead = "") {
  if (p < 0 || p >= run.tokens) return;
  view.picked = { of: run, row, p };
  const said = run.why(row, p);
  $("why").textContent = lead + said.text;
  table($("above"), [said.part ? "just above the cut, of the heads shown" : "just above the cut: these stayed", "(layer, KV head)", "score"],
    said.above.map(({ row: near, p: token, score }) => [run.named(token), run.names[near], shown(score)]));
  if (!said.above.length) $("above").replaceChildren();
  for (const stage of stages) stage.draw();
  drawScore();
}

// In the chosen head, or in the one that lost it last.
function pickToken(of, p) {
  if (of !== run) {
    view.picked = { of, row: -1, p };
    $("why").textContent = `${of.run}: ${of.named(p)} is ${of.told(fateOf(of, p))}.`;
    $("above").replaceChildren();
    $("score").replaceChildren();
    return stages.forEach((stage) => stage.draw());
  }
  let row = view.row;
  if (row < 0) {
    row = 0;
    const end = (r) => (run.gone[r * run.tokens + p] === NEVER ? -1 : run.gone[r * run.tokens + p]);
    for (let r = 1; r < run.rows.length; r++) if (end(r) > end(row)) row = r;
  }
  pick(row, p);
}

function pickFirst() {
  const telling = run.telling();
  if (!telling) return void ($("why").textContent = "Nothing was forgotten. Click an entry, a token or a patch to see its scores.");
  pick(telling.row, telling.p, telling.needed ? "The answer looked most at this. " : "Of all that went, this was worth most. ");
  stages.find((stage) => stage instanceof Words && stage.run === run)?.reveal(telling.p);
}

// --- time -----------------------------------------------------------------------------------

function draw() {
  const { steps, kinds, seen, allowed } = run;
  $("time").value = view.at;
  const kind = run.kindNames[+kinds[view.at]];
  $("when").textContent = `${view.at} of ${steps - 1}: ${count(seen[view.at])} tokens read, ${KINDS[kind]}`;
  $("time").setAttribute("aria-valuetext", `step ${$("when").textContent}`);
  const budget = allowed[view.at] >= 0 ? ` of ${count(allowed[view.at])} allowed` : "";
  $("held").textContent = `${count(run.held(view.at))} entries held${budget}`;
  for (const stage of stages) stage.draw();
  timeline?.mark(view.at);
  drawMap();
  drawRows();
  drawScore();
  drawLists();
  drawDiffering();
}

function go(at) {
  view.at = Math.max(0, Math.min(run.steps - 1, at));
  draw();
}

function redraw() {
  rowsImage = null;
  for (const stage of stages) stage.build?.();
  fillLegends();
  drawTimeline();
  draw();
}

function listen() {
  $("time").max = run.steps - 1;
  $("time").addEventListener("input", (event) => go(+event.target.value));
  $("row").append(new Option("all heads", -1), ...run.names.map((name, r) => new Option(name, r)));
  $("row").addEventListener("change", (event) => ((view.row = +event.target.value), draw()));
  $("map").addEventListener("click", (event) => {
    const box = $("map").getBoundingClientRect();
    const p = Math.floor(((event.clientX - box.left) / box.width) * run.tokens);
    pick(Math.min(Math.floor(((event.clientY - box.top) / box.height) * run.rows.length), run.rows.length - 1), p);
  });
  $("map").addEventListener("keydown", (event) => {
    const [dr, dp] = { ArrowLeft: [0, -1], ArrowRight: [0, 1], ArrowUp: [-1, 0], ArrowDown: [1, 0] }[event.key] ?? [];
    if (dr === undefined) return;
    event.preventDefault();
    const { row, p } = view.picked?.of === run ? view.picked : { row: 0, p: 0 };
    pick(Math.max(0, Math.min(run.rows.length - 1, row + dr)), Math.max(0, Math.min(run.tokens - 1, p + dp)));
  });
  document.addEventListener("keydown", (event) => { // anywhere on the page, as on the slider itself
    const to = { ArrowLeft: view.at - 1, ArrowRight: view.at + 1, Home: 0, End: run.steps - 1 }[event.key];
    if (event.target !== document.body || to === undefined || event.ctrlKey || event.metaKey || event.altKey) return;
    event.preventDefault();
    go(to);
  });
  let timer = 0;
  $("play").addEventListener("click", () => {
    if (timer) {
      clearInterval(timer);
      timer = 0;
    } else {
      if (view.at === run.steps - 1) go(0);
      const each = Math.max(1, Math.round(run.steps / 300)); // a short dialogue plays slowly
      timer = setInterval(() => {
        go(view.at + each);
        if (view.at === run.steps - 1) $("play").click();
      }, run.steps < 60 ? 450 : 80);
    }
    $("play").textContent = timer ? "Stop" : "Play";
    $("play").setAttribute("aria-pressed", String(!!timer));
  });
  listenToTimeline();
  listenToTerms();
  // The controls stay in sight once their place is above the window.
  window.addEventListener("scroll", () => {
    const place = $("controlsPlace"), above = place.getBoundingClientRect().bottom < 0;
    if (above === $("controls").classList.contains("docked")) return;
    place.style.height = above ? `${$("controls").offsetHeight}px` : "";
    $("controls").classList.toggle("docked", above);
  }, { passive: true });
  let width = window.innerWidth;
  window.addEventListener("resize", () => {
    if (window.innerWidth === width) return; // a phone's bars come and go
    width = window.innerWidth;
    redraw();
  });
  window.matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redraw);
  new MutationObserver(redraw).observe(document.documentElement, { attributeFilter: ["data-theme"] });
}

function listenToTerms() {
  const tip = $("tip"), hide = () => (tip.hidden = true);
  const show = (term) => {
    tip.textContent = GLOSSARY[term.dataset.term][1];
    tip.hidden = false;
    const at = term.getBoundingClientRect(), room = document.documentElement.clientWidth - tip.offsetWidth - 8;
    tip.style.left = `${Math.max(8, Math.min(at.left, room)) + window.scrollX}px`;
    tip.style.top = `${at.bottom + 6 + window.scrollY}px`;
  };
  for (const term of document.querySelectorAll(".term")) {
    term.setAttribute("aria-describedby", "tip");
    for (const name of ["pointerenter", "focus", "click"]) term.addEventListener(name, () => show(term));
    for (const name of ["pointerleave", "blur"]) term.addEventListener(name, hide);
  }
  document.addEventListener("keydown", (event) => event.key === "Escape" && hide());
  for (const [name, meaning] of Object.values(GLOSSARY)) $("glossary").append(element("dt", name), element("dd", meaning));
}

// --- what stands still ----------------------------------------------------------------------

function fillLegends() {
  for (const holder of document.querySelectorAll("[data-legend]")) {
    const words = holder.dataset.legend === "words", last = run.rows.length;
    holder.replaceChildren(...[1, 0.5, 1 / last, 0, -1].map((share) => {
      const name = share === 1 ? "all" : share === 0.5 ? "half" : share > 0 ? "one" : share === 0 ? "none" : "unread";
      const item = element("span", undefined, "swatch"), sample = element("span", words ? "word" : undefined, words ? "token" : "sample");
      if (words) paint(sample, { share, level: level(share) });
      else sample.style.setProperty("--veil", `${Math.round(100 * veil(share))}%`);
      item.append(sample, name);
      return item;
    }));
  }
}

function fillStages() {
  const main = $("stage"), words = new Words(run);
  const own = run.frames.length ? new Pictures(run) : words;
  stages = own === words ? [words] : [own, words];
  $("legend").dataset.legend = own === words ? "words" : "patches";
  if (own === words) $("text").remove();
  else $("words").append(words.node);
  words.text.id = "conversation";
  main.prepend(own.node);
  if (other) {
    const theirs = other.frames.length ? new Pictures(other) : new Words(other);
    stages.push(theirs);
    $("hero").classList.add("two");
    const titled = ({ run: name, reply }) => `${name}: “${reply.length > 60 ? `${reply.slice(0, 60)}…` : reply}”`;
    $("ours").textContent = titled(run);
    $("theirs").textContent = titled(other);
    $("otherHeadline").textContent = other.headline;
    $("otherStage").append(theirs.node);
  }
  for (const id of ["ours", "otherFigure", "difference"]) $(id).hidden = !other;
  const when = () => `${run.run}; step ${view.at} of ${run.steps - 1}, ${$("held").textContent}`;
  if (own !== words) $("savePicture").append(...savers("picture", () => own.svg, when));
  $("saveTimeline").append(...savers("timeline", () => timeline.svg, when));
  return own;
}

function fillPlots() {
  const { rows, heads, tokens, steps, first } = run, layers = [];
  rows.forEach((row, r) => {
    if (!r || Math.floor(row / heads) !== Math.floor(rows[r - 1] / heads)) layers.push([r / rows.length, String(Math.floor(row / heads))]);
  });
  const every = Math.ceil(layers.length / 9), yTicks = layers.filter((_, i) => i % every === 0);
  const across = (length, from) => ticks(0, length - 1, window.innerWidth < 600 ? 4 : 8).filter(Number.isInteger).map((at) => [(at + 0.5) / length, count(at + from)]);
  for (const id of ["map", "rows"]) $(id).style.height = `${Math.min(Math.max(rows.length * 8, 160), 600)}px`;
  plot($("map"), { xLabel: "token", xTicks: across(tokens, first), yLabel: "layer, KV head", yTicks });
  plot($("rows"), { xLabel: "step", xTicks: across(steps, 0), yLabel: "layer, KV head", yTicks });
}

if (typeof DecompressionStream === "undefined") {
  $("headline").textContent = "This browser is too old for the page: it cannot decompress data.";
} else {
  Promise.all([run.load(), other?.load()]).then(() => {
    view.at = run.steps - 1;
    $("headline").textContent = data.headline.replace(/ (?=%|\d+[:.])/g, "\u00a0"); // no break before a number
    $("detail").textContent = data.detail;
    $("facts").textContent = data.facts;
    for (const note of data.notes) $("notes").append(element("li", note));
    const own = fillStages();
    fillPlots();
    fillBudgets();
    $("forgotten").hidden = !data.forgotten?.length;
    table($("regions"), ["picture or turn", "risk"], (data.forgotten ?? []).map(([name, share]) => [name, `${(100 * share).toFixed(1)} %`]));
    listen();
    fillLegends();
    drawTimeline();
    draw();
    pickFirst();
    window.mmkv = { run, other, view, steps: run.steps, rows: run.rows, pick, go, pictures: own, exported, timeline: () => timeline };
    for (const name of ["keptAt", "why", "holds", "scoreOf", "cutsOf", "justAbove", "fate", "telling"]) window.mmkv[name] = run[name].bind(run);
    Object.assign(window.mmkv, { born: run.born, gone: run.gone, perRow: run.perRow });
    document.documentElement.dataset.ready = "1";
  });
}
