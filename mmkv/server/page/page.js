// Talks to the server that sent it, by /v1/sessions. Whatever comes back is shown as text.

const $ = (id) => document.getElementById(id);
const KEY = "mmkv-key"; // in sessionStorage alone: it goes with the tab

let model = null; // as /v1/models has it
let sessions = [];
let current = null; // id of the session that is shown
let pictures = []; // data: URLs that go with the next message
let reading = Promise.resolve(); // of files that were given
let turn = null; // what ends the turn under way
let shown = 0; // counts what was shown last, so that a late answer shows nothing

// --- the server -----------------------------------------------------------------------------

async function ask(path, method = "GET", body, more = {}) {
  const key = sessionStorage.getItem(KEY);
  const headers = { ...more.headers };
  if (key) headers.Authorization = `Bearer ${key}`;
  if (body !== undefined) headers["Content-Type"] = "application/json";
  const answer = await fetch(`v1/${path}`, {
    method, headers, signal: more.signal, body: body === undefined ? undefined : JSON.stringify(body),
  });
  if (!answer.ok) {
    const found = await answer.json().catch(() => ({}));
    if (answer.status === 401) $("key").focus();
    throw new Error(found.error?.message ?? `the server answered ${answer.status}`);
  }
  return answer;
}

const json = async (...given) => (await ask(...given)).json();

// One name goes with all requests of a session, so that a router can keep it in one place.
const place = (id) => ({ headers: { "X-Session-Id": id } });
const at = (id, what = "") => `sessions/${encodeURIComponent(id)}${what}`;

function newId() {
  const bytes = crypto.getRandomValues(new Uint8Array(12));
  return `sess_${Array.from(bytes, (one) => one.toString(16).padStart(2, "0")).join("")}`;
}

async function* events(answer) {
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    const blocks = (rest + value).split("\n\n");
    rest = blocks.pop();
    for (const block of blocks) {
      const data = block.split("\n").filter((line) => line.startsWith("data: "));
      const text = data.map((line) => line.slice(6)).join("\n");
      if (text && text !== "[DONE]") yield JSON.parse(text);
    }
  }
}

// --- showing --------------------------------------------------------------------------------

function element(kind, text, attributes = {}) {
  const made = document.createElement(kind);
  made.textContent = text;
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  return made;
}

function say(text, failed = false) {
  $("status").textContent = text;
  $("status").classList.toggle("failed", failed);
}

// Runs what a button asks for; an error is told, whatever it was.
const guarded = (work) => async (event) => {
  event?.preventDefault();
  say("");
  try {
    await work(event);
  } catch (error) {
    say(error.name === "AbortError" ? "stopped; the turn was taken back" : error.message, true);
  }
};

function addMessage(role, content) {
  const item = element("li", "", { class: role });
  for (const part of typeof content === "string" ? [{ type: "text", text: content }] : content) {
    if (part.type === "text") item.append(element("span", part.text));
    else if (part.image_url) item.append(element("img", "", { src: part.image_url.url, alt: "a picture that was sent" }));
    else item.append(element("em", `[${part.type}] `));
  }
  $("log").append(item);
  item.scrollIntoView({ block: "end" });
  return item;
}

function showSessions() {
  $("sessions").replaceChildren(...sessions.map((one) => {
    const words = `${one.id.replace(/^sess_/, "").slice(0, 12)}: ${one.turns} turns, ${one.state}`;
    const button = element("button", words, { type: "button", "aria-current": String(one.id === current) });
    button.addEventListener("click", guarded(() => open(one.id)));
    const item = document.createElement("li");
    item.append(button);
    return item;
  }));
  for (const id of ["fork", "delete", "name"]) $(id).disabled = current === null;
  $("save-form").querySelector("button").disabled = current === null;
}

const number = (count) => count.toLocaleString("en");

function bytes(count) {
  const power = count < 1024 ? 0 : Math.min(3, Math.floor(Math.log2(count) / 10));
  return `${(count / 1024 ** power).toFixed(power ? 1 : 0)} ${["B", "KiB", "MiB", "GiB"][power]}`;
}

function showMemory(memory) {
  $("bars").replaceChildren();
  $("numbers").replaceChildren();
  const record = sessions.find((one) => one.id === current);
  const rows = [["budget", record?.budget ?? "-"]];
  if (memory?.entries !== undefined) {
    // Every token seen made one entry in each row (layer, KV head).
    const perToken = (memory.entries + memory.evicted) / Math.max(memory.tokens_seen, 1);
    for (const [name, kept] of Object.entries(memory.by_modality)) {
      const most = memory.seen_by_modality[name] * perToken;
      if (!most) continue;
      const words = `${name}: ${number(kept)} of ${number(most)} entries`;
      const bar = element("div", words, { class: "bar", "data-modality": name });
      bar.append(element("meter", "", { min: 0, max: most, value: kept, "aria-label": words }));
      $("bars").append(bar);
    }
    rows.push(
      ["tokens seen", number(memory.tokens_seen)], ["kept", number(memory.entries)],
      ["evicted", number(memory.evicted)], ["pages", number(memory.pages)],
      ["keys and values", bytes(memory.kv_bytes)], ["in all", bytes(memory.bytes)],
      ["lies in", memory.state],
    );
  }
  for (const [name, value] of rows) $("numbers").append(element("dt", name), element("dd", value, { "data-of": name }));
}

function showPictures() {
  $("pictures").replaceChildren(...pictures.map((url, index) => {
    const item = document.createElement("li");
    const remove = element("button", `Remove picture ${index + 1}`, { type: "button" });
    remove.addEventListener("click", () => {
      pictures.splice(index, 1);
      showPictures();
      $("text").focus();
    });
    item.append(element("img", "", { src: url, alt: `picture ${index + 1}` }), remove);
    return item;
  }));
}

// --- what the user does -----------------------------------------------------------------------

async function list() {
  sessions = (await json("sessions")).data;
  if (!sessions.some((one) => one.id === current)) current = null;
  showSessions();
}

async function remember() {
  const id = current;
  const memory = id === null ? null : await json(at(id, "/memory"), "GET", undefined, place(id));
  if (id === current) showMemory(memory);
}

async function open(id) {
  if (turn) throw new Error("a reply is under way; stop it first");
  current = id;
  const mine = ++shown;
  $("log").replaceChildren();
  showSessions();
  showMemory(null);
  if (id === null) return;
  const messages = (await json(at(id, "/messages"), "GET", undefined, place(id))).data;
  if (mine !== shown) return;
  for (const one of messages) addMessage(one.role, one.content);
  await remember();
}

async function create(fields) {
  if (turn) throw new Error("a reply is under way; stop it first");
  const made = await json("sessions", "POST", fields, place(newId()));
  await list();
  await open(made.id);
  $("text").focus();
}

async function start() {
  model = (await json("models")).data[0];
  $("model").textContent = `${model.id}, policy ${model.mmkv.policy}, ${model.mmkv.budget}`;
  $("budget").placeholder = model.mmkv.budget.split(" ")[0];
  $("picture").hidden = $("picture-label").hidden = !model.mmkv.images;
  await list();
  await open(current ?? sessions.at(-1)?.id ?? null);
}

async function send() {
  if (turn) throw new Error("a reply is under way; stop it first");
  turn = new AbortController();
  try {
    await reading;
    const text = $("text").value, sent = pictures;
    if (!text.trim() && !sent.length) return;
    if (current === null) {
      current = (await json("sessions", "POST", budgetField(), place(newId()))).id;
      await list();
    }
    $("stop").hidden = false;
    await showTurn(current, text, sent);
  } finally {
    turn = null;
    $("stop").hidden = true;
    await list().then(remember).catch(() => {});
    $("text").focus();
  }
}

async function showTurn(id, text, sent) {
  const content = [...sent.map((url) => ({ type: "image_url", image_url: { url } })), { type: "text", text }];
  $("text").value = "";
  pictures = [];
  showPictures();
  const asked = addMessage("user", content);
  const reply = addMessage("assistant", "");
  reply.setAttribute("aria-busy", "true");
  try {
    await stream(id, content, reply);
  } catch (error) {
    // The server took the turn back: so does the page.
    asked.remove();
    reply.remove();
    $("text").value = text;
    pictures = sent;
    showPictures();
    throw error;
  } finally {
    reply.removeAttribute("aria-busy");
  }
}

async function stream(id, content, reply) {
  const body = {
    model: model.id, messages: [{ role: "user", content }], stream: true,
    stream_options: { include_usage: true },
    max_tokens: Number($("tokens").value),
  };
  const temperature = $("temperature").value.trim();
  if (temperature) body.temperature = Number(temperature); // else as the checkpoint says
  const more = { ...place(id), signal: turn.signal };
  let ended = false;
  for await (const event of events(await ask(at(id, "/chat/completions"), "POST", body, more))) {
    if (event.error) throw new Error(event.error.message);
    const piece = event.choices[0]?.delta.content;
    if (piece) reply.append(piece);
    reply.scrollIntoView({ block: "end" });
    if (event.usage) {
      const { mmkv: own, prompt_tokens: all, completion_tokens: said } = event.usage;
      say(`${number(all - own.resumed)} tokens read, ${number(own.resumed)} resumed, ${number(said)} said`);
      ended = true;
    }
  }
  if (!ended) throw new Error("the connection ended before the reply did");
}

function budgetField() {
  const given = $("budget").value.trim();
  if (!given) return {};
  return { budget: Number.isFinite(Number(given)) ? Number(given) : given };
}

async function addFiles(files) {
  if (!model?.mmkv.images) throw new Error("this model reads no pictures");
  const coming = Promise.all([...files].map(dataUrl)).then((urls) => {
    pictures.push(...urls);
    showPictures();
  });
  reading = reading.then(() => coming.catch(() => {})); // a message waits for them
  await coming;
}

async function dataUrl(file) {
  if (!file.type.startsWith("image/")) throw new Error(`${file.name} is no picture`);
  return new Promise((resolve, reject) => {
    const reader = new FileReader();
    reader.onload = () => resolve(reader.result);
    reader.onerror = () => reject(new Error(`${file.name} cannot be read`));
    reader.readAsDataURL(file);
  });
}

$("key-form").addEventListener("submit", guarded(async () => {
  const key = $("key").value;
  if (key) sessionStorage.setItem(KEY, key);
  else sessionStorage.removeItem(KEY);
  $("key").value = "";
  $("key").placeholder = key ? "in use" : "none";
  current = null;
  await start();
}));
$("new-form").addEventListener("submit", guarded(() => create(budgetField())));
$("load-form").addEventListener("submit", guarded(() => create({ file: $("file").value.trim() })));
$("save-form").addEventListener("submit", guarded(async () => {
  const asked = { name: $("name").value.trim(), overwrite: $("overwrite").checked };
  const { file } = await json(at(current, "/save"), "POST", asked, place(current));
  say(`saved as ${file}`);
}));
$("fork").addEventListener("click", guarded(async () => {
  const made = await json(at(current, "/fork"), "POST", undefined, place(current));
  await list();
  await open(made.id);
}));
$("delete").addEventListener("click", guarded(async () => {
  if (turn) throw new Error("a reply is under way; stop it first");
  await json(at(current), "DELETE", undefined, place(current));
  await list();
  await open(sessions.at(-1)?.id ?? null);
}));
$("turn-form").addEventListener("submit", guarded(send));
$("stop").addEventListener("click", () => turn?.abort());
$("text").addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
    event.preventDefault();
    $("turn-form").requestSubmit();
  } else if (event.key === "Escape") turn?.abort();
});
$("picture").addEventListener("change", guarded(async () => {
  await addFiles($("picture").files);
  $("picture").value = "";
}));
document.addEventListener("paste", (event) => {
  const files = [...(event.clipboardData?.files ?? [])];
  if (files.length) guarded(() => addFiles(files))(event);
});
for (const kind of ["dragover", "dragleave", "drop"]) {
  document.addEventListener(kind, (event) => {
    if (!event.dataTransfer?.types.includes("Files")) return;
    event.preventDefault();
    $("chat").classList.toggle("over", kind === "dragover");
    if (kind === "drop") guarded(() => addFiles(event.dataTransfer.files))(event);
  });
}
// Sessions move to files while others work; a page that is looked at shows where they lie.
setInterval(() => {
  if (!document.hidden && !turn && model) list().then(remember).catch(() => {});
}, 5000);

if (sessionStorage.getItem(KEY)) $("key").placeholder = "in use";
guarded(start)();
