// Charts and pictures as SVG, so that what is on the screen can be saved as it is.

const $ = (id) => document.getElementById(id);
const SVG = "http://www.w3.org/2000/svg";

function element(name, text, className) {
  const made = document.createElement(name);
  if (text !== undefined) made.textContent = text;
  if (className) made.className = className;
  return made;
}

function svg(name, attributes = {}, ...children) {
  const made = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  made.append(...children);
  return made;
}

// A colour of the style sheet as the present scheme has it: "rgb(1, 2, 3)".
function colour(name) {
  const probe = $("probe");
  probe.style.color = `var(--${name})`;
  return getComputedStyle(probe).color;
}

const channels = (name) => colour(name).match(/[\d.]+/g).slice(0, 3).map(Number);
const count = (value) => Math.round(value).toLocaleString("en");

// Round numbers from low to high, about as many as asked for.
function ticks(low, high, about) {
  const rough = (high - low) / Math.max(about, 1) || 1, power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map((m) => m * power).find((size) => size >= rough * 0.99);
  const found = [];
  for (let k = Math.ceil(low / step - 1e-9); k * step <= high + step * 1e-9; k++) found.push(k * step || 0); // not -0
  return found;
}

const FONT = { "font-family": "system-ui, sans-serif", "font-size": 12 };

// Lines or stacked areas over steps, each of which is a column. series: {name, colour, values, dashed,
// area, level, points}: area and level keep their height for a column, others go from centre to
// centre; NaN and infinity leave a gap. Returns {svg, stepAt, mark}: mark(step) moves the upright line.
function chart({ width, height, series, steps, marks = [], xLabel, yLabel, label, bands = [], zero = false }) {
  let low = zero ? 0 : Infinity, high = zero ? 1 : -Infinity;
  const every = Math.max(1, Math.ceil(steps / 1600));
  const chosen = [];
  for (let s = 0; s < steps; s += every) chosen.push(s);
  if (chosen.at(-1) !== steps - 1) chosen.push(steps - 1);
  const stacked = new Float64Array(steps);
  const lines = series.map((one) => {
    const values = one.area ? chosen.map((s) => (stacked[s] += one.values[s])) : chosen.map((s) => one.values[s]);
    for (const y of values) if (Number.isFinite(y)) [low, high] = [Math.min(low, y), Math.max(high, y)];
    return values;
  });
  if (!(low <= high)) [low, high] = [0, 1];
  if (low === high) [low, high] = [low - 1, high + 1];
  const spoken = (value) => (Math.abs(value) >= 1000 ? count(value) : String(+value.toPrecision(3)));
  const yTicks = ticks(low, high, Math.max(2, Math.floor(height / 55)));
  const left = 26 + 7.2 * Math.max(...yTicks.map((value) => spoken(value).length)), right = 10;
  let at = left, down = 15;
  const names = series.map(({ name }) => { // where each stands above the plot
    const wide = 32 + 6.6 * name.length;
    if (at + wide > width && at > left) [at, down] = [left, down + 16];
    at += wide;
    return [at - wide, down];
  });
  const top = down + 11, bottom = (xLabel ? 40 : 22) + (bands.length ? 6 : 0);
  const x = (s) => left + ((s + 0.5) / steps) * (width - left - right);
  // From edge to edge of the columns.
  const edges = (values) => chosen.flatMap((s, k) => {
    const upTo = k + 1 < chosen.length ? chosen[k + 1] : steps;
    return [[x(s - 0.5), y(values[k])], [x(upTo - 0.5), y(values[k])]].map((pair) => pair.map((n) => +n.toFixed(1)));
  });
  const y = (value) => top + ((high - value) / (high - low)) * (height - top - bottom);
  const ink = { fill: colour("muted"), ...FONT };
  const made = svg("svg", { xmlns: SVG, viewBox: `0 0 ${width} ${height}`, width, height, role: "img", "aria-label": label });
  made.append(svg("rect", { width, height, fill: colour("raised") }));
  const text = (at, content, more = {}) => {
    const node = svg("text", { x: at[0], y: at[1], ...ink, ...more });
    node.textContent = content;
    made.append(node);
    return node;
  };
  for (const value of yTicks) {
    made.append(svg("line", { x1: left, x2: width - right, y1: y(value), y2: y(value), stroke: colour("line") }));
    text([left - 6, y(value) + 4], spoken(value), { "text-anchor": "end" });
  }
  const base = height - bottom;
  for (const value of ticks(0, steps - 1, Math.max(2, Math.floor(width / 90))).filter(Number.isInteger)) {
    made.append(svg("line", { x1: x(value), x2: x(value), y1: base, y2: base + (bands.length ? 10 : 4), stroke: colour("edge") }));
    text([x(value), base + (bands.length ? 22 : 17)], count(value), { "text-anchor": "middle" });
  }
  if (xLabel) text([left + (width - left - right) / 2, height - 5], xLabel, { "text-anchor": "middle" });
  if (yLabel) text([12, top + (base - top) / 2], yLabel, { "text-anchor": "middle", transform: `rotate(-90 12 ${top + (base - top) / 2})` });
  for (const { from, to, fill, title } of bands) {
    const band = svg("rect", { x: x(from - 0.5), width: Math.max(x(to - 0.5) - x(from - 0.5) - 1, 1), y: base + 2, height: 6, fill });
    const name = svg("title");
    name.textContent = title;
    band.append(name);
    made.append(band);
  }
  let below = chosen.map(() => 0);
  series.forEach((one, i) => {
    const values = lines[i];
    if (one.area) {
      const around = [...edges(values), ...edges(below).reverse()];
      made.append(svg("polygon", { points: around.join(" "), fill: one.colour, "fill-opacity": 0.8 }));
      below = values;
    } else {
      let path = "", open = false;
      const places = one.level ? edges(values) : chosen.map((s, k) => [x(s), y(values[k])]);
      places.forEach(([px, py]) => {
        if (!Number.isFinite(py)) return void (open = open && one.dashed && !one.level);
        path += `${open ? "L" : "M"}${px.toFixed(1)} ${py.toFixed(1)}`;
        if (!one.level && (!open || one.points)) made.append(svg("circle", { cx: px, cy: py, r: 2.2, fill: one.colour }));
        open = true;
      });
      if (path) made.append(svg("path", { d: path, fill: "none", stroke: one.colour, "stroke-width": 2, ...(one.dashed ? { "stroke-dasharray": "5 4" } : {}) }));
    }
    const [px, py] = names[i];
    made.append(svg("line", { x1: px, x2: px + 14, y1: py - 4, y2: py - 4, stroke: one.colour, "stroke-width": one.area ? 9 : 2, ...(one.dashed ? { "stroke-dasharray": "4 3" } : {}) }));
    text([px + 19, py], one.name);
  });
  for (const [step, stroke] of marks)
    made.append(svg("line", { x1: x(step), x2: x(step), y1: top, y2: base, stroke, "stroke-dasharray": "2 2" }));
  const cursor = svg("line", { class: "cursor", y1: top - 2, y2: base, stroke: colour("text"), "stroke-width": 1.5 });
  made.append(cursor);
  const mark = (step) => {
    cursor.setAttribute("x1", x(step));
    cursor.setAttribute("x2", x(step));
  };
  mark(steps - 1);
  const stepAt = (px) => Math.max(0, Math.min(steps - 1, Math.floor(((px - left) / (width - left - right)) * steps)));
  return { svg: made, stepAt, mark };
}

// What an SVG on the page looks like, as a file of its own with a line of text below.
function standalone(drawn, caption) {
  const box = drawn.viewBox.baseVal, margin = 12, below = caption ? 26 : 0;
  const width = box.width + 2 * margin, height = box.height + 2 * margin + below;
  const inner = drawn.cloneNode(true);
  for (const [key, value] of Object.entries({ x: margin, y: margin, width: box.width, height: box.height })) inner.setAttribute(key, value);
  const outer = svg("svg", { xmlns: SVG, width, height, viewBox: `0 0 ${width} ${height}` });
  outer.append(svg("rect", { width, height, fill: colour("page") }), inner);
  const text = svg("text", { x: margin, y: height - 12, fill: colour("text"), ...FONT });
  text.textContent = caption;
  outer.append(text);
  return { text: new XMLSerializer().serializeToString(outer), width, height };
}

async function exported(drawn, caption, kind) {
  const { text, width, height } = standalone(drawn, caption);
  if (kind === "svg") return new Blob([text], { type: "image/svg+xml" });
  const image = new Image();
  image.src = `data:image/svg+xml;charset=utf-8,${encodeURIComponent(text)}`;
  await image.decode();
  const canvas = element("canvas");
  [canvas.width, canvas.height] = [2 * width, 2 * height];
  canvas.getContext("2d").drawImage(image, 0, 0, 2 * width, 2 * height);
  return new Promise((done) => canvas.toBlob(done, "image/png"));
}

// Two buttons that save what drawn() gives as NAME.png and NAME.svg.
function savers(name, drawn, caption) {
  return ["png", "svg"].map((kind) => {
    const button = element("button", kind.toUpperCase(), "plain small");
    button.type = "button";
    button.dataset.save = `${name}.${kind}`;
    button.setAttribute("aria-label", `save the ${name} as ${kind.toUpperCase()}`);
    button.addEventListener("click", async () => {
      const link = element("a"), blob = await exported(drawn(), caption(), kind);
      link.download = `${name}.${kind}`;
      link.setAttribute("href", URL.createObjectURL(blob));
      link.click();
      setTimeout(() => URL.revokeObjectURL(link.getAttribute("href")), 1000);
    });
    return button;
  });
}

// Puts axes around a canvas whose cells are lines and columns; ticks are [share of the length, text].
function plot(canvas, { xLabel, xTicks, yLabel, yTicks }) {
  const box = element("div", undefined, "plot"), inside = element("div", undefined, "cells");
  canvas.replaceWith(box);
  const side = element("div", undefined, "ytick"), under = element("div", undefined, "xtick");
  for (const [at, text] of yTicks) side.append(element("span", text)), (side.lastChild.style.top = `${100 * at}%`);
  for (const [at, text] of xTicks) under.append(element("span", text)), (under.lastChild.style.left = `${100 * at}%`);
  inside.append(canvas);
  box.append(element("div", yLabel, "ylabel"), side, inside, under, element("div", xLabel, "xlabel"));
}
