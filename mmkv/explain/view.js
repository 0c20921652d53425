// The views, over what model.js has made of the data.

function sized(canvas, height) {
  const scale = window.devicePixelRatio || 1, width = canvas.clientWidth || 1000;
  canvas.width = Math.round(width * scale);
  canvas.height = Math.round(height * scale);
  canvas.style.height = `${height}px`;
  const pen = canvas.getContext("2d");
  pen.scale(scale, scale);
  pen.font = "12px system-ui, sans-serif";
  return { pen, width, height };
}

function drawMap() {
  const canvas = $("map");
  canvas.width = tokens;
  canvas.height = rows.length;
  canvas.style.height = `${Math.min(Math.max(rows.length * 4, 120), 600)}px`;
  const image = new ImageData(tokens, rows.length);
  for (let r = 0, at = 0; r < rows.length; r++)
    for (let p = 0; p < tokens; p++, at += 4) {
      const unread = born[p] > view.at;
      const colour = unread ? [255, 255, 255] : holds(r, p, view.at)
        ? [[29, 78, 216], [194, 65, 12], [15, 118, 110]][+data.modality[p]] : [226, 232, 240];
      image.data.set([...colour, 255], at);
    }
  canvas.getContext("2d").putImageData(image, 0, 0);
  canvas.setAttribute("aria-label", `${held(view.at)} entries are held at step ${view.at}`);
}

let rowsImage = null;
function drawRows() {
  const canvas = $("rows");
  if (!rowsImage) {
    let most = 1;
    for (let r = 0; r < rows.length; r++)
      for (let s = 0; s < steps; s++) most = Math.max(most, perRow[r * (steps + 1) + s]);
    rowsImage = new ImageData(steps, rows.length);
    for (let r = 0, at = 0; r < rows.length; r++)
      for (let s = 0; s < steps; s++, at += 4) {
        const dark = Math.sqrt(perRow[r * (steps + 1) + s] / most);
        rowsImage.data.set([255 - 240 * dark, 255 - 220 * dark, 255 - 150 * dark, 255], at);
      }
    canvas.width = steps;
    canvas.height = rows.length;
    canvas.style.height = `${Math.min(Math.max(rows.length * 4, 120), 600)}px`;
  }
  const pen = canvas.getContext("2d");
  pen.putImageData(rowsImage, 0, 0);
  pen.fillStyle = "rgba(194, 65, 12, 0.6)";
  pen.fillRect(view.at, 0, 1, rows.length);
}

// Lines over steps; NaN and infinity leave a gap. series: {name, colour, values, dashed}.
function chart(canvas, series, marks) {
  const { pen, width, height } = sized(canvas, 220);
  let low = Infinity, high = -Infinity;
  for (const { values } of series)
    for (const y of values) if (Number.isFinite(y)) [low, high] = [Math.min(low, y), Math.max(high, y)];
  if (!(low <= high)) return;
  if (low === high) [low, high] = [low - 1, high + 1];
  const left = 64, right = 12, top = 22, bottom = 24;
  const x = (s) => left + (s / Math.max(steps - 1, 1)) * (width - left - right);
  const y = (value) => top + ((high - value) / (high - low)) * (height - top - bottom);
  pen.fillStyle = "#52606f";
  pen.strokeStyle = "#e2e8f0";
  for (let tick = 0; tick <= 4; tick++) {
    const value = low + ((high - low) * tick) / 4;
    pen.strokeRect(left, y(value), width - left - right, 0);
    pen.fillText(Math.abs(value) >= 100 ? Math.round(value).toLocaleString("en") : value.toPrecision(3), 4, y(value) + 4);
  }
  pen.fillText("step 0", left, height - 6);
  pen.fillText(String(steps - 1), width - right - 30, height - 6);
  let at = left;
  for (const { name, colour, values, dashed } of series) {
    pen.strokeStyle = pen.fillStyle = colour;
    pen.setLineDash(dashed ? [5, 4] : []);
    pen.fillText(name, at, 14);
    at += pen.measureText(name).width + 18;
    pen.beginPath();
    let open = false;
    values.forEach((value, s) => {
      if (!Number.isFinite(value)) return void (open = open && dashed);
      if (open) pen.lineTo(x(s), y(value));
      else pen.fillRect(x(s) - 1, y(value) - 1, 3, 3), pen.moveTo(x(s), y(value));
      open = true;
    });
    pen.stroke();
  }
  pen.setLineDash([]);
  for (const [step, colour] of marks) {
    pen.strokeStyle = colour;
    pen.strokeRect(x(step), top, 0, height - top - bottom);
  }
}

const held = (at) => curves[at] + curves[steps + at] + curves[2 * steps + at];

function drawCurves() {
  const series = MODALITIES.map((name, m) => ({
    name, colour: COLOURS[m], values: Array.from(curves.subarray(m * steps, (m + 1) * steps)),
  })).filter(({ values }) => values.some((v) => v > 0));
  const sum = seen.map((_, s) => held(s));
  series.push({ name: "all", colour: "#1c2430", values: sum });
  // A budget far above what is held would flatten the curves.
  const most = Math.max(...sum);
  if (allowed.some((a) => a >= 0 && a <= 2 * most))
    series.push({ name: "budget", colour: "#be123c", values: allowed.map((a) => (a >= 0 && a <= 2 * most ? a : NaN)), dashed: true });
  chart($("curves"), series, [[view.at, "#c2410c"]]);
}

function drawScore() {
  if (!view.picked) return;
  const { row, p } = view.picked, end = gone[row * tokens + p], own = [];
  for (let s = 0; s < steps; s++) {
    const alive = born[p] <= s && s <= end;
    const score = alive ? scoreOf(row, p, s) : NaN;
    own.push(alive && s === end && Number.isNaN(score) ? lastScore(row, p) : score);
  }
  const marks = [[view.at, "#94a3b8"]];
  if (end !== NEVER && end > born[p]) marks.push([end, "#c2410c"]);
  const name = computed() ? "this entry's score" : "this entry's score, where it was sampled";
  chart($("score"), [
    { name, colour: "#1d4ed8", values: own, dashed: !computed() },
    { name: "highest score that went", colour: "#be123c", values: Array.from(cutsOf(data.rule.group[row])), dashed: true },
  ], marks);
}

function drawFrames() {
  for (const frame of data.frames) {
    if (!frame.canvas) continue;
    const image = new ImageData(frame.wide, frame.high);
    for (let y = 0, at = 0; y < frame.high; y++)
      for (let x = 0; x < frame.wide; x++, at += 4) {
        const p = frame.start - first + y * frame.stride + x, part = p < 0 ? 0 : share(p, view.at);
        image.data.set(part < 0 ? [255, 255, 255, 235] : [15, 23, 42, Math.round(215 * (1 - Math.sqrt(part)))], at);
      }
    frame.canvas.getContext("2d").putImageData(image, 0, 0);
  }
}

function drawText() {
  for (const span of $("text").children) {
    const from = +span.dataset.from, to = +span.dataset.to;
    let sum = 0, unread = false;
    for (let p = from; p < to; p++) {
      const part = share(p, view.at);
      unread ||= part < 0;
      sum += Math.max(part, 0) / (to - from);
    }
    span.style.opacity = unread ? 0.25 : 1;
    span.style.color = !unread && sum === 0 ? "#9aa5b1" : "";
    span.style.backgroundColor = sum > 0 ? `rgba(29, 78, 216, ${(0.08 + 0.5 * sum).toFixed(3)})` : "";
    span.classList.toggle("picked", !!view.picked && view.picked.p >= from && view.picked.p < to);
  }
}

function draw() {
  $("time").value = view.at;
  const kind = data.kindNames[+kinds[view.at]];
  $("when").textContent = `${view.at} of ${steps - 1}: ${seen[view.at].toLocaleString("en")} tokens seen, ${NAMES[kind]}`;
  const budget = allowed[view.at] >= 0 ? ` of ${allowed[view.at].toLocaleString("en")} allowed` : "";
  $("held").textContent = `${held(view.at).toLocaleString("en")} entries held${budget}`;
  drawFrames();
  drawText();
  drawMap();
  drawRows();
  drawCurves();
  drawScore();
}

// --- what stands still ---------------------------------------------------------------------

const PAGE = 4000;
function fillText(from) {
  const parts = [];
  for (let p = from; p < Math.min(from + PAGE, tokens); ) {
    let to = p + 1;
    const frame = +data.modality[p] ? data.frames.find((f) => cellOf(f, p) >= 0) : null;
    while (+data.modality[p] && to < tokens && data.modality[to] === data.modality[p] &&
      (!frame || to + first < frame.start + frame.high * frame.stride)) to++;
    const label = frame ? frame.caption : MODALITIES[+data.modality[p]];
    const span = element("span", +data.modality[p] ? `[${label}: ${to - p} tokens]` : texts[p]);
    [span.dataset.from, span.dataset.to] = [p, to];
    span.title = to === p + 1 ? `token ${p + first}` : `tokens ${p + first} to ${to - 1 + first}`;
    parts.push(span);
    p = to;
  }
  $("text").replaceChildren(...parts);
  const turns = [];
  for (let start = 0; tokens > PAGE && start < tokens; start += PAGE) {
    const button = element("button", `from ${start + first}`);
    button.addEventListener("click", () => (fillText(start), drawText()));
    turns.push(button);
  }
  $("turn").replaceChildren(...turns);
}

function fillFrames() {
  if (!data.frames.length) return void $("pictures").remove();
  for (const frame of data.frames) {
    const figure = element("figure"), box = element("div", undefined, "picture");
    const wide = Math.max(96, Math.min(360, 24 * frame.wide));
    box.style.width = `${wide}px`;
    box.style.height = `${Math.round((wide * frame.high) / frame.wide)}px`;
    if (frame.jpeg) {
      const image = element("img");
      image.src = `data:image/jpeg;base64,${data.jpegs[frame.jpeg - 1]}`;
      image.alt = frame.caption;
      box.append(image);
    }
    frame.canvas = element("canvas", undefined, "patches");
    [frame.canvas.width, frame.canvas.height] = [frame.wide, frame.high];
    frame.canvas.addEventListener("click", (event) => {
      const x = Math.floor((event.offsetX / frame.canvas.clientWidth) * frame.wide);
      const y = Math.floor((event.offsetY / frame.canvas.clientHeight) * frame.high);
      pickToken(frame.start - first + y * frame.stride + x);
    });
    box.append(frame.canvas);
    figure.append(box, element("figcaption", frame.caption));
    $("frames").append(figure);
  }
}

function table(target, head, lines) {
  const top = element("tr");
  for (const name of head) top.append(element("th", name));
  target.replaceChildren(top, ...lines.map((cells) => {
    const line = element("tr");
    cells.forEach((cell, i) => line.append(element("td", cell, i ? "" : "token")));
    return line;
  }));
}

function fillRanking() {
  const order = Array.from(perToken.keys()).sort((a, b) => perToken[b] - perToken[a] || a - b);
  const measure = logBeta ? "mean beta" : "share of steps held";
  $("ranking").textContent = logBeta
    ? "By retention: the mean of beta over the rows. Beta to the power of its age is what an entry is worth."
    : "By the share of its steps that a token was held, a mean over the rows.";
  const lines = (chosen) => chosen.map((p) => [named(p), perToken[p].toPrecision(4)]);
  table($("top"), ["stays", measure], lines(order.slice(0, 12)));
  table($("bottom"), ["goes", measure], lines(order.slice(-12).reverse()));
}

function fillBudgets() {
  const changes = [];
  for (let s = 1; s < steps; s++)
    if (+kinds[s] === 3) changes.push([`step ${s}`, `${allowed[s - 1].toLocaleString("en")} to ${allowed[s].toLocaleString("en")} entries`, `${(held(s - 1) - held(s)).toLocaleString("en")} evicted at once`]);
  if (!changes.length) return;
  const made = element("table");
  table(made, ["budget changed", "from, to", "effect"], changes);
  $("budgets").append(made);
}

function pick(row, p) {
  if (p < 0 || p >= tokens) return;
  view.picked = { row, p };
  const said = why(row, p);
  $("why").textContent = said.text;
  table($("above"), [said.part ? "just above the cut, of the rows shown" : "just above the cut", "row", "score"],
    said.above.map(({ row: other, p: token, score }) => [named(token), names[other], shown(score)]));
  if (!said.above.length) $("above").replaceChildren();
  drawText();
  drawScore();
}

// In the chosen row, or in the one that lost it last.
function pickToken(p) {
  let row = view.row;
  if (row < 0) {
    row = 0;
    const end = (r) => (gone[r * tokens + p] === NEVER ? -1 : gone[r * tokens + p]);
    for (let r = 1; r < rows.length; r++) if (end(r) > end(row)) row = r;
  }
  pick(row, p);
}

function go(at) {
  view.at = Math.max(0, Math.min(steps - 1, at));
  draw();
}

function listen() {
  $("time").max = steps - 1;
  $("time").addEventListener("input", (event) => go(+event.target.value));
  $("row").append(new Option("all rows", -1), ...names.map((name, r) => new Option(name, r)));
  $("row").addEventListener("change", (event) => { view.row = +event.target.value; draw(); });
  $("map").addEventListener("click", (event) => {
    const box = $("map").getBoundingClientRect();
    const p = Math.floor(((event.clientX - box.left) / box.width) * tokens);
    pick(Math.min(Math.floor(((event.clientY - box.top) / box.height) * rows.length), rows.length - 1), p);
  });
  $("text").addEventListener("click", (event) => {
    if (event.target.dataset.from !== undefined) pickToken(+event.target.dataset.from);
  });
  let timer = 0;
  $("play").addEventListener("click", () => {
    if (timer) {
      clearInterval(timer);
      timer = 0;
    } else {
      if (view.at === steps - 1) view.at = 0;
      timer = setInterval(() => {
        go(view.at + Math.max(1, Math.round(steps / 300)));
        if (view.at === steps - 1) $("play").click();
      }, 80);
    }
    $("play").textContent = timer ? "stop" : "play";
  });
  window.addEventListener("resize", draw);
}

if (typeof DecompressionStream === "undefined") {
  $("facts").textContent = "This browser is too old for the page: it cannot decompress data.";
} else {
  load().then(() => {
    $("facts").textContent = data.facts;
    for (const note of data.notes) $("notes").append(element("li", note));
    fillFrames();
    fillText(0);
    fillRanking();
    fillBudgets();
    listen();
    draw();
    window.mmkv = { steps, rows, keptAt, why, pick, go, holds, born, gone, scoreOf, cutsOf, justAbove, perRow };
    document.documentElement.dataset.ready = "1";
  });
}
