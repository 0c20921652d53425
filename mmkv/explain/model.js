"use strict";
// What one recorded session held at every step. All of it follows from three things: at which step
// each entry was gone (0: before the recording), its log beta, and the highest score that went then.
// A head is a (layer, KV head); r counts those that the page shows, p the tokens that it shows.

const NEVER = 65535;
const MODALITIES = ["text", "image", "video"];

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

// The one place that says what became of something: colours and lists are made of this alone.
// share: of the heads that hold it; level: what the legend calls that.
const LEVELS = ["no head", "fewer than half", "half or more", "every head"];
const level = (share) => (share < 0 ? -1 : share === 0 ? 0 : share < 0.5 ? 1 : share < 1 ? 2 : 3);

class Run {
  constructor(data) {
    Object.assign(this, data); // as page.py names it
    this.steps = data.seen.length;
    this.tokens = data.texts.length;
  }

  async load() {
    const blobs = {};
    for (const [name, blob] of Object.entries(this.blobs)) blobs[name] = await unpack(blob);
    const { tokens, steps, rows } = this;
    Object.assign(this, { curves: blobs.curves, cuts: blobs.cuts, sampled: blobs.sampled, causes: blobs.causes });
    Object.assign(this, { lastScores: blobs.lastScores, attention: blobs.attention });
    if (blobs.beta) this.logBeta = widened(blobs.beta, this.range);
    this.born = new Uint16Array(tokens);
    for (let p = 0, step = 0; p < tokens; p++) {
      while (step < steps - 1 && this.seen[step] <= p + this.first) step++;
      this.born[p] = step;
    }
    const { born } = this, gone = (this.gone = blobs.lives);
    this.perRow = new Int32Array(rows.length * (steps + 1));
    this.worth = new Float64Array(tokens); // mean beta, or the share of its steps that it was held
    this.lastGone = new Uint16Array(tokens);
    this.firstGone = new Uint16Array(tokens).fill(NEVER);
    for (let r = 0; r < rows.length; r++) {
      const line = r * (steps + 1);
      for (let p = 0, cell = r * tokens; p < tokens; p++, cell++) {
        if (gone[cell] && gone[cell] !== NEVER) gone[cell] += born[p] - 1;
        const end = gone[cell];
        this.lastGone[p] = Math.max(this.lastGone[p], end);
        this.firstGone[p] = Math.min(this.firstGone[p], end);
        if (!end) continue;
        if (end > born[p]) this.perRow[line + born[p]]++, this.perRow[line + Math.min(end, steps)]--;
        this.worth[p] += (this.logBeta ? Math.exp(this.logBeta[cell])
          : (Math.max(Math.min(end, steps), born[p]) - born[p]) / (steps - born[p])) / rows.length;
      }
      for (let step = 1; step < steps; step++) this.perRow[line + step] += this.perRow[line + step - 1];
    }
    this.counted = { at: -1, row: -2, counts: new Uint16Array(tokens) };
    this.cutsOfGroup = new Map();
    return this;
  }

  holds(r, p, at) {
    return this.born[p] <= at && at < this.gone[r * this.tokens + p];
  }

  keptAt(at) {
    return this.rows.map((_, r) => {
      const found = [];
      for (let p = 0; p < this.tokens; p++) if (this.holds(r, p, at)) found.push(p + this.first);
      return found;
    });
  }

  held(at) {
    return this.curves[at] + this.curves[this.steps + at] + this.curves[2 * this.steps + at];
  }

  // How many of the chosen heads (row -1: all that are shown) hold each token.
  countsAt(at, row) {
    const { counted, tokens } = this;
    if (counted.at === at && counted.row === row) return counted.counts;
    const { counts } = counted, { born, gone } = this;
    counts.fill(0);
    for (let r = row < 0 ? 0 : row; r < (row < 0 ? this.rows.length : row + 1); r++)
      for (let p = 0, cell = r * tokens; p < tokens; p++, cell++)
        if (born[p] <= at && at < gone[cell]) counts[p]++;
    [counted.at, counted.row] = [at, row];
    return counts;
  }

  // What became of tokens [from, to) by a step: see LEVELS. went: when the last head let them go.
  fate(at, row, from, to = from + 1) {
    const counts = this.countsAt(at, row), of = row < 0 ? this.rows.length : 1;
    let sum = 0, went = 0;
    for (let p = from; p < to; p++) {
      if (this.born[p] > at) return { share: -1, level: -1, held: 0, of, went: -1 };
      sum += counts[p];
      went = Math.max(went, row < 0 ? this.lastGone[p] : this.gone[row * this.tokens + p]);
    }
    const share = sum / of / (to - from);
    return { share, level: level(share), held: sum / (to - from), of, went };
  }

  // In words.
  told(fate) {
    if (fate.share < 0) return "not read yet";
    if (fate.held === 0) return fate.went ? `forgotten by every head since step ${fate.went}` : "gone before the recording";
    const held = Number.isInteger(fate.held) ? fate.held : fate.held.toFixed(1);
    return fate.of === 1 ? "held" : `held by ${held} of ${fate.of} heads`;
  }

  // The scores, as docs/reference/policies.md has them; NaN where they do not follow from the record.
  scoreOf(r, p, at) {
    const rule = this.rule, position = p + this.first;
    if (position < rule.first || (rule.recent && position >= this.seen[at] - rule.recent)) return Infinity;
    if (rule.kernel === "recency") return position;
    if (rule.kernel !== "retention" || !this.logBeta) return this.sampleOf(r, p, at);
    const x = this.logBeta[r * this.tokens + p], n = rule.lookahead ?? Infinity;
    const age = this.seen[at] - position + rule.shift, decayed = (age ? age * x : 0) + rule.bonus;
    if (n === 1) return decayed;
    if (n === 2) return decayed + Math.log1p(Math.exp(x));
    if (n === Infinity) return decayed - Math.log(-Math.expm1(x));
    return decayed + Math.log(x === 0 ? n : Math.expm1(n * x) / Math.expm1(x));
  }

  sampleOf(r, p, at) {
    for (let s = this.sampleSteps.length - 1; s >= 0; s--)
      if (this.sampleSteps[s] === at) return this.sampled[(s * this.rows.length + r) * this.tokens + p];
    return NaN;
  }

  get computed() {
    return this.rule.kernel === "recency" || !!this.logBeta;
  }

  // The highest score that went at each step where the heads of a group compete.
  cutsOf(group) {
    const { steps, tokens, rows } = this;
    if (this.cuts) return this.cuts.subarray(group * steps, (group + 1) * steps);
    if (!this.cutsOfGroup.has(group)) {
      const found = new Float32Array(steps).fill(NaN);
      for (let r = 0; r < rows.length; r++)
        for (let p = 0; this.rule.group[r] === group && p < tokens; p++) {
          const at = this.gone[r * tokens + p], score = at > 0 && at < steps ? this.lastScore(r, p) : NaN;
          if (Number.isFinite(score) && !(score <= found[at])) found[at] = score;
        }
      this.cutsOfGroup.set(group, found);
    }
    return this.cutsOfGroup.get(group);
  }

  // What an entry's score was when it went.
  lastScore(r, p) {
    const cell = r * this.tokens + p;
    if (this.causes && this.causes[cell]) return NaN;
    if (this.computed) return this.scoreOf(r, p, this.gone[cell]);
    return this.lastScores ? this.lastScores[cell] : NaN;
  }

  // The lowest of those that stayed where a head competes.
  justAbove(r, at, count = 5) {
    const group = this.rule.group[r], found = [];
    const when = this.computed ? at : Math.max(-1, ...this.sampleSteps.filter((step) => step <= at));
    if (when < 0) return found;
    for (let other = 0; other < this.rows.length; other++) {
      if (this.rule.group[other] !== group) continue;
      for (let p = 0; p < this.tokens; p++) {
        if (!this.holds(other, p, at)) continue;
        const score = this.scoreOf(other, p, when);
        if (Number.isNaN(score) || (found.length === count && score >= found[count - 1].score)) continue;
        found.push({ row: other, p, score });
        found.sort((a, b) => a.score - b.score || a.p - b.p || a.row - b.row);
        found.length = Math.min(found.length, count);
      }
    }
    return found;
  }

  why(r, p) {
    const { names, steps, tokens } = this, end = this.gone[r * tokens + p];
    const name = names[r][0].toUpperCase() + names[r].slice(1);
    if (!end) return { text: `${name} had lost ${this.named(p)} before the recording began.`, above: [] };
    if (end === NEVER) return { text: `${name} still holds ${this.named(p)} at the end.`, above: this.justAbove(r, steps - 1) };
    const what = `${name} lost ${this.named(p)} at step ${end}`, group = this.rule.group[r];
    const cause = this.causes ? this.causes[r * tokens + p] : 0;
    if (cause) return { text: `${what}: ${["", "its write gate did not admit it", "its picture was pruned", "its thought was over and is forgotten"][cause]}.`, end, above: [] };
    const rivals = this.rule.sizes[group], here = this.rule.group.filter((other) => other === group).length;
    const when = end === this.born[p] ? "the step that read it" : `when ${this.seen[end] - 1 - p - this.first} more tokens had been read`;
    const total = this.groupHeld(group, end), mine = this.perRow[r * (steps + 1) + end];
    return {
      text: `${what}, ${when}. Its score was ${shown(this.lastScore(r, p))}; the highest that went then was ` +
        `${shown(this.cutsOf(group)[end])}${this.cuts || here === rivals ? "" : " (of the heads shown)"}. ` +
        `${rivals === 1 ? "The head has a budget of its own" : `${rivals} heads compete there${this.rule.shared ? ", and those of other sessions" : ""}`}; ` +
        `this one held ${mine} of ${here === rivals ? `their ${total} entries` : `the ${total} entries of the ${here} heads shown`} afterwards.`,
      part: here < rivals, end, above: this.justAbove(r, end),
    };
  }

  groupHeld(group, at) {
    let held = 0;
    for (let r = 0; r < this.rows.length; r++)
      if (this.rule.group[r] === group) held += this.perRow[r * (this.steps + 1) + at];
    return held;
  }

  // The most telling loss: of what the answer needed, in the head that reads it most; or else the
  // entry that was worth most of all that went; or null.
  telling() {
    const { needed, rows, steps, tokens, gone } = this;
    const lost = (cell) => gone[cell] > 0 && gone[cell] < steps;
    let best = null, most = -Infinity;
    if (needed >= 0)
      for (let r = 0; r < rows.length; r++)
        if (lost(r * tokens + needed) && this.paid[r] > most)
          [best, most] = [{ row: r, p: needed, needed: true }, this.paid[r]];
    if (best) return best;
    for (let r = 0; r < rows.length; r++)
      for (let p = 0; p < tokens; p++) {
        const cell = r * tokens + p;
        if (!lost(cell)) continue;
        const value = this.logBeta ? this.logBeta[cell] : gone[cell] - this.born[p];
        if (value > most) [best, most] = [{ row: r, p, needed: false }, value];
      }
    return best;
  }

  frameOf(p) {
    return this.frames.find((frame) => this.cellOf(frame, p) >= 0);
  }

  named(p) {
    const frame = this.frameOf(p);
    if (!frame) return `token ${p + this.first} ${JSON.stringify(this.texts[p])}`;
    const cell = this.cellOf(frame, p);
    return `the patch at row ${Math.floor(cell / frame.wide) + 1}, column ${(cell % frame.wide) + 1} of ${frame.caption}`;
  }

  cellOf(frame, p) {
    const offset = p + this.first - frame.start, y = Math.floor(offset / frame.stride), x = offset % frame.stride;
    return offset >= 0 && y < frame.high && x < frame.wide ? y * frame.wide + x : -1;
  }
}

const shown = (x) => (Number.isFinite(x) ? x.toPrecision(4) : x === Infinity ? "above all (protected)" : "not known");
