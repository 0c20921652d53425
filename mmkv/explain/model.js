"use strict";
// What one recorded session held at every step. All of it follows from three things: at which step
// each entry was gone (0: before the recording), its log beta, and the highest score that went then.

const $ = (id) => document.getElementById(id);
const data = JSON.parse($("data").textContent);
const { rows, names, heads, seen, allowed, kinds, texts, first } = data;
const steps = seen.length, tokens = texts.length;
const NEVER = 65535;
const COLOURS = ["#1d4ed8", "#c2410c", "#0f766e"], MODALITIES = ["text", "image", "video"];
const NAMES = { start: "recording begins", prompt: "prompt", reply: "reply", budget: "budget changed", shared: "shared budget", forget: "thought forgotten" };

const view = { at: steps - 1, row: -1, picked: null };
let gone, logBeta, curves, cuts, born, perRow, perToken, sampled, causes, lastScores;

function element(name, text, className) {
  const made = document.createElement(name);
  if (text !== undefined) made.textContent = text;
  if (className) made.className = className;
  return made;
}

async function unpack(blob) {
  const bytes = Uint8Array.from(atob(blob.base64), (c) => c.charCodeAt(0));
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("deflate"));
  const planes = new Uint8Array(await new Response(stream).arrayBuffer());
  // Bytes lie plane by plane: all lowest bytes first. They compress better so.
  const count = planes.length / blob.width, whole = new Uint8Array(planes.length);
  for (let plane = 0; plane < blob.width; plane++)
    for (let i = 0; i < count; i++) whole[i * blob.width + plane] = planes[plane * count + i];
  const kind = { u1: Uint8Array, u2: Uint16Array, u4: Uint32Array, f4: Float32Array }[blob.kind];
  return new kind(whole.buffer);
}

// Log beta as numbers: as they are, or 255 levels of their logarithm.
function widened(codes, range) {
  if (!range) return codes;
  const [low, high, levels] = range, made = new Float32Array(codes.length);
  for (let i = 0; i < codes.length; i++)
    made[i] = codes[i] === 255 ? 0 : -Math.exp(low + (codes[i] / Math.max(levels - 1, 1)) * (high - low));
  return made;
}

async function load() {
  const blobs = {};
  for (const [name, blob] of Object.entries(data.blobs)) blobs[name] = await unpack(blob);
  ({ curves, cuts, sampled, causes, lastScores } = blobs);
  if (blobs.beta) logBeta = widened(blobs.beta, data.range);
  born = new Uint16Array(tokens);
  for (let p = 0, step = 0; p < tokens; p++) {
    while (step < steps - 1 && seen[step] <= p + first) step++;
    born[p] = step;
  }
  gone = blobs.lives;
  for (let cell = 0; cell < gone.length; cell++)
    if (gone[cell] && gone[cell] !== NEVER) gone[cell] += born[cell % tokens] - 1;
  perRow = new Int32Array(rows.length * (steps + 1));
  perToken = new Float64Array(tokens);
  for (let r = 0; r < rows.length; r++) {
    const line = r * (steps + 1);
    for (let p = 0; p < tokens; p++) {
      const end = gone[r * tokens + p];
      if (!end) continue;
      if (end > born[p]) perRow[line + born[p]]++, perRow[line + Math.min(end, steps)]--;
      perToken[p] += logBeta ? Math.exp(logBeta[r * tokens + p]) / rows.length
        : (Math.max(Math.min(end, steps), born[p]) - born[p]) / (steps - born[p]) / rows.length;
    }
    for (let step = 1; step < steps; step++) perRow[line + step] += perRow[line + step - 1];
  }
}

const holds = (r, p, at) => born[p] <= at && at < gone[r * tokens + p];

function keptAt(at) {
  return rows.map((_, r) => {
    const found = [];
    for (let p = 0; p < tokens; p++) if (holds(r, p, at)) found.push(p + first);
    return found;
  });
}

// Share of the chosen rows that hold a token; -1 before it is read.
function share(p, at) {
  if (born[p] > at) return -1;
  if (view.row >= 0) return holds(view.row, p, at) ? 1 : 0;
  let count = 0;
  for (let r = 0; r < rows.length; r++) count += holds(r, p, at);
  return count / rows.length;
}

// The scores, as docs/reference/policies.md has them; NaN where they do not follow from the record.
function scoreOf(r, p, at) {
  const rule = data.rule, position = p + first;
  if (position < rule.first || (rule.recent && position >= seen[at] - rule.recent)) return Infinity;
  if (rule.kernel === "recency") return position;
  if (rule.kernel !== "retention" || !logBeta) return sampleOf(r, p, at);
  const x = logBeta[r * tokens + p], n = rule.lookahead ?? Infinity;
  const age = seen[at] - position + rule.shift, decayed = (age ? age * x : 0) + rule.bonus;
  if (n === 1) return decayed;
  if (n === 2) return decayed + Math.log1p(Math.exp(x));
  if (n === Infinity) return decayed - Math.log(-Math.expm1(x));
  return decayed + Math.log(x === 0 ? n : Math.expm1(n * x) / Math.expm1(x));
}

function sampleOf(r, p, at) {
  for (let s = data.sampleSteps.length - 1; s >= 0; s--)
    if (data.sampleSteps[s] === at) return sampled[(s * rows.length + r) * tokens + p];
  return NaN;
}

const latestSample = (at) => Math.max(-1, ...data.sampleSteps.filter((step) => step <= at));
const computed = () => data.rule.kernel === "recency" || !!logBeta;

// The highest score that went at each step where the rows of a group compete.
const cutsOfGroup = new Map();
function cutsOf(group) {
  if (cuts) return cuts.subarray(group * steps, (group + 1) * steps);
  if (!cutsOfGroup.has(group)) {
    const found = new Float32Array(steps).fill(NaN);
    for (let r = 0; r < rows.length; r++)
      for (let p = 0; data.rule.group[r] === group && p < tokens; p++) {
        const at = gone[r * tokens + p], score = at > 0 && at < steps ? lastScore(r, p) : NaN;
        if (Number.isFinite(score) && !(score <= found[at])) found[at] = score;
      }
    cutsOfGroup.set(group, found);
  }
  return cutsOfGroup.get(group);
}

// What an entry's score was when it went.
function lastScore(r, p) {
  if (causes && causes[r * tokens + p]) return NaN;
  if (computed()) return scoreOf(r, p, gone[r * tokens + p]);
  return lastScores ? lastScores[r * tokens + p] : NaN;
}

// The lowest of those that stayed where a row competes.
function justAbove(r, at, count = 5) {
  const group = data.rule.group[r], found = [], when = computed() ? at : latestSample(at);
  if (when < 0) return found;
  for (let other = 0; other < rows.length; other++) {
    if (data.rule.group[other] !== group) continue;
    for (let p = 0; p < tokens; p++) {
      if (!holds(other, p, at)) continue;
      const score = scoreOf(other, p, when);
      if (Number.isNaN(score) || (found.length === count && score >= found[count - 1].score)) continue;
      found.push({ row: other, p, score });
      found.sort((a, b) => a.score - b.score || a.p - b.p || a.row - b.row);
      found.length = Math.min(found.length, count);
    }
  }
  return found;
}

function why(r, p) {
  const end = gone[r * tokens + p];
  if (!end) return { text: `${names[r]} had lost ${named(p)} before the recording began.`, above: [] };
  if (end === NEVER) return { text: `${names[r]} still holds ${named(p)} at the end.`, above: justAbove(r, steps - 1) };
  const what = `${names[r]} lost ${named(p)} at step ${end}`, group = data.rule.group[r];
  const cause = causes ? causes[r * tokens + p] : 0;
  if (cause) return { text: `${what}: ${["", "its write gate did not admit it", "its picture was pruned", "its thought was over and is forgotten"][cause]}.`, end, above: [] };
  const rivals = data.rule.sizes[group], here = data.rule.group.filter((other) => other === group).length;
  const total = groupHeld(group, end);
  return {
    text: `${what}, ${end === born[p] ? "the step that read it" : `when ${seen[end] - 1 - p - first} more tokens had been read`}. Its score was ` +
      `${shown(lastScore(r, p))}, the highest that went then ${shown(cutsOf(group)[end])}${cuts || here === rivals ? "" : " (of the rows shown)"}. ` +
      `${rivals === 1 ? "The row has a budget of its own" : `${rivals} rows compete there${data.rule.shared ? ", and those of other sessions" : ""}`}; this one held ` +
      `${perRow[r * (steps + 1) + end]} of ${here === rivals ? `their ${total} entries` : `the ${total} entries of the ${here} rows shown`} afterwards.`,
    part: here < rivals, end, above: justAbove(r, end),
  };
}

function groupHeld(group, at) {
  let held = 0;
  for (let r = 0; r < rows.length; r++) if (data.rule.group[r] === group) held += perRow[r * (steps + 1) + at];
  return held;
}

const shown = (x) => (Number.isFinite(x) ? x.toPrecision(4) : x === Infinity ? "above all (protected)" : "not known");

function named(p) {
  const frame = data.frames.find((f) => cellOf(f, p) >= 0);
  if (frame) {
    const cell = cellOf(frame, p);
    return `patch (${Math.floor(cell / frame.wide) + 1}, ${(cell % frame.wide) + 1}) of ${frame.caption}`;
  }
  return `token ${p + first} ${JSON.stringify(texts[p])}`;
}

function cellOf(frame, p) {
  const offset = p + first - frame.start, y = Math.floor(offset / frame.stride), x = offset % frame.stride;
  return offset >= 0 && y < frame.high && x < frame.wide ? y * frame.wide + x : -1;
}
