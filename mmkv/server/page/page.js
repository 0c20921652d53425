// The chat: what is shown follows from the signals below; client.js asks, markdown.js renders.

import * as server from "./client.js";
import { MarkdownView, copyText } from "./markdown.js";

const { h, render } = globalThis.preact;
const { useEffect, useRef, useState } = globalThis.preactHooks;
const { signal, computed, batch } = globalThis.preactSignals;
const html = globalThis.htm.bind(h);

// --- state ------------------------------------------------------------------------------------

const model = signal(null); // as /v1/models has it
const locked = signal(false); // the server wants a key
const sessions = signal([]);
const current = signal(null); // id of the conversation that is shown; null: a new one
const log = signal([]); // its messages, see fromServer
const memory = signal(null); // what it remembers, as /memory has it
const speed = signal(null); // tokens per second of the latest reply
const usage = signal(null); // of the latest reply
const running = signal(null); // the turn that is followed: { id, abort, stopping }
const queue = signal([]); // pictures and videos that go with the next message
const draft = signal("");
const editing = signal(null); // the messages before the one that is edited
const notice = signal(null); // { text, failed }
const search = signal("");
const drawer = signal(null); // on a small screen: "list" or "memory"
const dialog = signal(null); // "settings", "save" or "delete"
const canSave = signal(false);
const saved = signal([]);
const settings = signal({ tokens: 1024, temperature: "", system: "", budget: "" });

const busy = computed(() => running.value !== null);
const stored = computed(() => log.value.filter((one) => !one.failed && !one.pending)); // what is sent, or was
const record = computed(() => sessions.value.find((one) => one.id === current.value) ?? null);
const SETTINGS = "mmkv-settings";
const OPEN = "mmkv-open";
const texts = new Map(); // what was said in the conversations that were looked at, for the search

try {
  settings.value = { ...settings.value, ...JSON.parse(sessionStorage.getItem(SETTINGS) ?? "{}") };
} catch { /* as they are */ }

const number = (count) => Math.round(count).toLocaleString("en");
const percent = (share) => `${Math.round(share * 100)} %`;
const count = (n, one, many = `${one}s`) => `${number(n)} ${n === 1 ? one : many}`;

function bytes(size) {
  const power = size < 1024 ? 0 : Math.min(3, Math.floor(Math.log2(size) / 10));
  return `${(size / 1024 ** power).toFixed(power ? 1 : 0)} ${["B", "KiB", "MiB", "GiB"][power]}`;
}

function tell(text, failed = false) {
  const mine = notice.value = text ? { text, failed } : null;
  if (text && !failed) setTimeout(() => { if (notice.value === mine) notice.value = null; }, 8000);
}

// Runs what a button asks for; an error is told, whatever it was.
const guarded = (work) => async (event) => {
  event?.preventDefault?.();
  tell("");
  try {
    await work(event);
  } catch (error) {
    if (error.status === 401) locked.value = true;
    else if (error.name !== "AbortError") tell(error.message, true);
  }
};

// --- messages ---------------------------------------------------------------------------------

const KINDS = { image: "picture", video: "video" };

function fromServer(one) {
  const content = typeof one.content === "string" ? [{ type: "text", text: one.content }] : one.content ?? [];
  return {
    role: one.role,
    text: content.filter((part) => part.type === "text").map((part) => part.text).join(""),
    media: content.filter((part) => part.type !== "text").map((part) => ({ kind: part.type, digest: part.digest })),
    thought: one.reasoning_content ?? "",
    calls: (one.tool_calls ?? []).map((call) => ({ id: call.id, ...call.function })),
    callId: one.tool_call_id,
    name: one.name,
  };
}

async function toServer(id, one, lenient = false) {
  const media = [];
  for (const part of one.media) {
    let url = part.url;
    try {
      url ??= await server.mediaUrl(id, part.digest);
    } catch (error) {
      if (!lenient) throw error;
      media.push({ type: "text", text: `[a ${KINDS[part.kind]} that is not kept]` });
      continue;
    }
    media.push(part.kind === "video" ? { type: "video_url", video_url: { url } } : { type: "image_url", image_url: { url } });
  }
  const text = one.text || !media.length ? [{ type: "text", text: one.text }] : [];
  const made = { role: one.role, content: [...media, ...text] };
  if (one.role === "assistant") {
    made.content = one.text;
    if (one.thought) made.reasoning_content = one.thought;
    if (one.calls.length) {
      made.tool_calls = one.calls.map(({ id: call, name, arguments: given }) => ({ id: call, type: "function", function: { name, arguments: given } }));
    }
  }
  if (one.callId) made.tool_call_id = one.callId;
  if (one.name) made.name = one.name;
  return made;
}

const message = (role, text, media = []) => ({ role, text, media, thought: "", calls: [] });

function titleOf(text, media) {
  const words = text.trim().split(/\s+/).join(" ");
  if (!words) return media.length ? `A ${KINDS[media[0].kind]}` : "New chat";
  if (words.length <= 48) return words;
  const cut = words.slice(0, 48);
  return `${cut.slice(0, Math.max(cut.lastIndexOf(" "), 24))}…`;
}

// The server may have it no more.
function shownTitle() {
  if (record.value) return nameOf(record.value);
  const first = log.value.find((one) => one.role === "user");
  return first ? titleOf(first.text, first.media) : "New chat";
}

const nameOf = (one) => one.metadata?.title || one.id.replace(/^sess_/, "").slice(0, 12);

// --- conversations ----------------------------------------------------------------------------

async function refresh() {
  sessions.value = await server.listSessions();
}

async function remember() {
  const id = current.value;
  if (id === null) return;
  const found = await server.readMemory(id);
  if (id === current.value && !running.value) memory.value = found;
}

function remembered(id) {
  try {
    if (id) sessionStorage.setItem(OPEN, id);
    else sessionStorage.removeItem(OPEN);
  } catch { /* the newest is opened next time */ }
}

let opened = 0; // counts what was opened last, so that a late answer shows nothing

async function open(id) {
  const mine = ++opened, left = record.value, leaving = running.value;
  leaving?.abort.abort(); // the reply goes on without the page
  // What the list says may be older than what the page shows.
  if (left && left.id !== id && unused(left) && !leaving && !stored.value.length) {
    server.deleteSession(left.id).catch(() => {});
    sessions.value = sessions.value.filter((one) => one !== left);
  }
  const same = id === current.value; // it is looked at again: what was not sent stays with it
  const unsent = same ? log.value.filter((one) => one.failed) : [];
  batch(() => {
    running.value = null;
    current.value = id;
    memory.value = usage.value = speed.value = null;
    if (!same) editing.value = null;
    log.value = [];
    drawer.value = null;
  });
  remembered(id);
  document.title = "mmkv";
  if (leaving) refresh().catch(() => {}); // it says that a reply is under way there
  if (id === null) {
    focusText();
    return;
  }
  const known = record.value;
  document.title = `${known ? nameOf(known) : "Chat"} · mmkv`;
  const found = (await server.readMessages(id)).map(fromServer);
  if (mine !== opened) return;
  log.value = [...found, ...unsent];
  noteText(id);
  if (known?.busy || known?.failed) await rejoin(id);
  else await remember();
}

// One whose only turn was refused, or that never had one.
const unused = (one) => one.turns === 0 && !one.busy && !one.failed;

function noteText(id) {
  texts.set(id, stored.value.map((one) => one.text).join("\n").toLowerCase());
}

async function start() {
  model.value = await server.models();
  locked.value = false;
  await refresh();
  server.savedSessions().then((found) => {
    canSave.value = true;
    saved.value = found;
  }, () => { canSave.value = false; });
  const last = sessionStorage.getItem(OPEN);
  const there = sessions.value.some((one) => one.id === last);
  await open(there ? last : null);
}

function budgetField() {
  const given = settings.value.budget.trim();
  if (!given) return {};
  return { budget: Number.isFinite(Number(given)) ? Number(given) : given };
}

// --- turns ------------------------------------------------------------------------------------

let reading = Promise.resolve(); // of files that were given

async function send() {
  if (busy.value) throw new Error("a reply is under way; stop it, or wait for its end");
  await reading;
  const text = draft.value, media = queue.value;
  if (!text.trim() && !media.length) return;
  const asked = message("user", text, media);
  const earlier = editing.value;
  batch(() => {
    draft.value = "";
    queue.value = [];
    editing.value = null;
  });
  if (earlier === null && current.value !== null) {
    await turn(current.value, asked);
    return;
  }
  const system = settings.value.system.trim();
  try {
    await branch(earlier ?? (system ? [message("system", system)] : []), asked);
  } catch (error) {
    editing.value = earlier;
    putBack(asked); // there is no conversation for it
    throw error;
  }
}

// Sends messages as a conversation of its own: what earlier turns left of them is not read again.
async function branch(earlier, asked) {
  const from = current.value, title = titleOf(asked.text, asked.media);
  const first = earlier.find((one) => one.role === "user");
  const metadata = { title: first ? titleOf(first.text, first.media) : title };
  if (from !== null && earlier.some((one) => one.role !== "system")) metadata.from = from;
  const sent = [...earlier, asked];
  for (const one of sent) {
    for (const part of one.media) part.url ??= await server.mediaUrl(from, part.digest);
  }
  const made = await server.createSession({ ...(from === null ? budgetField() : sameBudget()), metadata });
  await refresh();
  opened += 1;
  batch(() => {
    current.value = made.id;
    memory.value = usage.value = speed.value = null;
    log.value = earlier;
  });
  remembered(made.id);
  document.title = `${nameOf(made)} · mmkv`;
  await turn(made.id, asked, true);
}

function sameBudget() {
  const shown = record.value?.budget ?? "";
  const entries = /^([\d.]+) entries per row$/.exec(shown), size = /^([\d,]+) bytes$/.exec(shown);
  if (entries) return { budget: Number(entries[1]) };
  if (size) return { budget: `${size[1].replaceAll(",", "")}B` };
  return {};
}

async function turn(id, asked, fresh = false) {
  const abort = new AbortController();
  const known = record.value?.messages ?? 0;
  const sent = [...stored.value.slice(known), asked]; // what the server lacks
  const stood = log.value;
  running.value = { id, abort, stopping: false };
  log.value = [...stood, asked, { ...message("assistant", ""), pending: true }];
  follow.bottom = true;
  try {
    const body = {
      model: model.value.id, stream: true, stream_options: { include_usage: true },
      messages: await Promise.all(sent.map((one) => toServer(id, one))),
      max_tokens: Number(settings.value.tokens) || undefined, mmkv: { background: true },
    };
    const temperature = String(settings.value.temperature).trim();
    if (temperature) body.temperature = Number(temperature); // else as the checkpoint says
    await read(server.sendTurn(id, body, abort.signal));
  } catch (error) {
    if (abort.signal.aborted) return;
    if (error instanceof TypeError && await rejoined(id, abort, known)) return;
    if (error.code === "session_not_found" && !fresh && current.value === id) await revive(id, stood, asked);
    else refused(id, stood, [asked], error);
  } finally {
    await ended(id, abort);
  }
}

// The server was started anew, or another tab deleted the conversation: it goes on, as one of its
// own, from what the page shows.
async function revive(id, stood, asked) {
  running.value = null;
  log.value = stood;
  try {
    const earlier = [];
    for (const one of stored.value) {
      const media = [];
      let text = one.text;
      for (const part of one.media) {
        const url = part.url ?? await server.mediaUrl(id, part.digest).catch(() => null);
        if (url) media.push({ ...part, url });
        else text = `[a ${KINDS[part.kind]} that is not kept] ${text}`;
      }
      earlier.push({ ...one, media, text });
    }
    tell("The server had this conversation no more; it goes on from what this page shows.");
    await branch(earlier, asked);
  } catch (error) {
    refused(id, stood, [asked], error);
  }
}

// The server took the turn back: it is shown with the reason, and nothing of it is sent again.
function refused(id, stood, asked, error) {
  if (current.value !== id) return;
  tell("");
  if (error.status === 401 && asked.length) {
    log.value = stood;
    putBack(asked.at(-1)); // it waits for the key
    locked.value = true;
    return;
  }
  if (error.code === "turn_stopped") {
    log.value = stood;
    putBack(asked.at(-1));
    tell("Stopped before the reply began; your message is back in the box.");
    return;
  }
  const reason = error instanceof TypeError ? "the server cannot be reached" : error.message;
  const kept = asked.map((one, index) => (index === asked.length - 1 ? { ...one, failed: reason } : one));
  log.value = [...stood, ...kept];
}

function putBack(one) {
  batch(() => {
    draft.value = one.text;
    queue.value = one.media;
  });
  focusText();
}

async function rejoin(id) {
  const abort = new AbortController();
  running.value = { id, abort, stopping: false };
  const stood = log.value;
  let asked = [];
  follow.bottom = true;
  try {
    await read(server.rejoinTurn(id, abort.signal), (found) => {
      asked = found.map(fromServer);
      log.value = [...stood, ...asked, { ...message("assistant", ""), pending: true }];
    });
  } catch (error) {
    if (abort.signal.aborted) return;
    if (error.code === "no_turn") log.value = (await server.readMessages(id)).map(fromServer);
    else if (!(error instanceof TypeError && await rejoined(id, abort, stood.length))) refused(id, stood, asked, error);
  } finally {
    await ended(id, abort);
  }
}

// The connection broke: the reply goes on at the server, so the page asks for it again. Returns
// whether it was there; known: messages that the server had before.
async function rejoined(id, abort, known) {
  for (let wait = 500; wait < 20000 && !abort.signal.aborted; wait *= 2) {
    tell("The connection broke; trying again…");
    await new Promise((resolve) => setTimeout(resolve, wait));
    try {
      const found = (await server.readMessages(id)).map(fromServer);
      if (abort.signal.aborted) return true;
      await refresh();
      tell("");
      if (!record.value?.busy && found.length <= known) return false; // the turn never came there
      log.value = found;
      if (record.value?.busy) {
        const stood = found;
        await read(server.rejoinTurn(id, abort.signal), (asked) => {
          log.value = [...stood, ...asked.map(fromServer), { ...message("assistant", ""), pending: true }];
        });
      }
      return true;
    } catch (error) {
      if (!(error instanceof TypeError)) return false;
    }
  }
  return false;
}

async function ended(id, abort) {
  if (running.value?.abort !== abort) return;
  running.value = null;
  noteText(id);
  await refresh().then(remember).catch(() => {});
  // Not away from what somebody uses meanwhile, and no keyboard over the reply on a phone.
  if (document.activeElement === document.body && !matchMedia("(pointer: coarse)").matches) {
    document.getElementById("text")?.focus({ preventScroll: true });
  }
}

// The first token's time belongs to the prompt.
function measure(tokens, seconds) {
  speed.value = tokens > 1 && seconds > 0 ? (tokens - 1) / seconds : null;
}

async function read(events, joined) {
  let reply = { ...message("assistant", ""), pending: true };
  let waits = null;
  const show = () => {
    clearTimeout(waits);
    waits = null;
    log.value = [...log.value.slice(0, -1), reply];
  };
  try {
    for await (const event of events) {
      if (event.mmkv?.asked) joined?.(event.mmkv.asked);
      if (event.mmkv?.memory) {
        memory.value = { ...event.mmkv.memory, state: "memory" };
        measure(event.mmkv.tokens, event.mmkv.seconds);
      }
      const choice = event.choices[0];
      if (choice) {
        reply = grown(reply, choice.delta);
        if (choice.finish_reason) reply = { ...reply, pending: false, cut: choice.finish_reason === "length" };
        if (choice.finish_reason) show();
        else waits ??= setTimeout(show, 30); // a reply may grow faster than a screen
      }
      if (event.usage) {
        usage.value = event.usage;
        measure(event.usage.completion_tokens, event.mmkv?.seconds);
      }
    }
  } finally {
    clearTimeout(waits);
  }
}

function grown(reply, delta) {
  const made = { ...reply, text: reply.text + (delta.content ?? ""), thought: reply.thought + (delta.reasoning_content ?? "") };
  for (const call of delta.tool_calls ?? []) {
    made.calls = [...made.calls];
    const before = made.calls[call.index] ?? { id: call.id, name: "", arguments: "" };
    made.calls[call.index] = {
      ...before, name: before.name + (call.function.name ?? ""), arguments: before.arguments + (call.function.arguments ?? ""),
    };
  }
  return made;
}

async function stop() {
  const turn = running.value;
  if (!turn) return;
  running.value = { ...turn, stopping: true };
  while (running.value?.abort === turn.abort) {
    try {
      await server.stopTurn(turn.id);
      return;
    } catch (error) {
      if (error.code !== "no_turn") {
        if (running.value?.abort === turn.abort) running.value = turn; // to try again
        throw error;
      }
    }
    await new Promise((resolve) => setTimeout(resolve, 300)); // it has just ended, or is on its way there
  }
}

const before = (index) => log.value.slice(0, index).filter((one) => !one.failed);

async function regenerate(index) {
  if (busy.value) throw new Error("a reply is under way; stop it, or wait for its end");
  const last = log.value.slice(0, index).findLastIndex((one) => one.role === "user" && !one.failed);
  await branch(before(last), log.value[last]);
}

async function edit(index) {
  if (busy.value) throw new Error("a reply is under way; stop it, or wait for its end");
  const one = log.value[index];
  for (const part of one.media) part.url ??= await server.mediaUrl(current.value, part.digest);
  if (one.failed) log.value = log.value.filter((other) => other !== one); // it was never part of it
  else editing.value = before(index);
  putBack({ ...one, media: [...one.media] });
}

// --- files ------------------------------------------------------------------------------------

let files = 0;

async function addFiles(given) {
  const able = model.value?.mmkv;
  if (!able?.images) throw new Error("this model reads no pictures");
  const coming = (async () => {
    for (const file of given) {
      const kind = file.type.startsWith("video/") ? "video" : file.type.startsWith("image/") ? "image" : null;
      if (!kind) throw new Error(`${file.name} is neither a picture nor a video`);
      if (kind === "video" && !able.videos) throw new Error("this model watches no videos");
      const url = await server.dataUrl(file);
      const one = { key: ++files, kind, url, name: file.name, size: file.size };
      if (kind === "image") await readable(one);
      queue.value = [...queue.value, one];
    }
  })();
  reading = Promise.all([reading, coming.catch(() => {})]); // a message waits for them
  await coming;
  focusText();
}

// What the browser cannot read, the server cannot read either, and it is refused before it is sent.
async function readable(one) {
  const image = new Image();
  image.src = one.url;
  try {
    await image.decode();
  } catch {
    throw new Error(`${one.name} cannot be read as a picture; it was not added`);
  }
}

// --- export -----------------------------------------------------------------------------------

async function exported(form) {
  const id = current.value, whole = stored.value;
  const messages = await Promise.all(whole.map((one) => toServer(id, one, true)));
  const title = shownTitle();
  const name = title.replace(/[^\p{L}\p{N}]+/gu, "-").replace(/^-|-$/g, "").slice(0, 40) || "chat";
  if (form === "json") {
    download(`${name}.json`, "application/json", JSON.stringify({ title, model: model.value.id, messages }, null, 2));
    return;
  }
  const parts = messages.map(({ role, content, tool_calls: calls }) => {
    const text = typeof content === "string" ? content : content.map((part) => (
      part.type === "text" ? part.text : part.image_url ? `![picture](${part.image_url.url})` : "[video]")).join("\n\n");
    const called = (calls ?? []).map((call) => `\`\`\`json\n${call.function.name} ${call.function.arguments}\n\`\`\``);
    return [`## ${role[0].toUpperCase()}${role.slice(1)}`, text, ...called].join("\n\n");
  });
  download(`${name}.md`, "text/markdown", `# ${title}\n\n${parts.join("\n\n")}\n`);
}

function download(name, type, text) {
  const link = document.createElement("a");
  link.href = URL.createObjectURL(new Blob([text], { type }));
  link.download = name;
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 10000);
}

// --- pieces -----------------------------------------------------------------------------------

const PATHS = {
  menu: "M4 6h16M4 12h16M4 18h16",
  pen: "M12 20h9M16.5 3.5a2.1 2.1 0 0 1 3 3L7 19l-4 1 1-4Z",
  plus: "M12 5v14M5 12h14",
  clip: "m21 11-9 9a5.5 5.5 0 0 1-8-8l9-9a3.7 3.7 0 0 1 5 5l-9 9a1.8 1.8 0 0 1-2.5-2.5l8.5-8.5",
  send: "M12 19V5M5 12l7-7 7 7",
  copy: "M9 9h11v11H9zM5 15H4V4h11v1",
  again: "M3 12a9 9 0 1 0 3-6.7L3 8M3 3v5h5",
  gauge: "M12 14l4-5M4 18a9 9 0 1 1 16 0",
  more: "M5 12h.01M12 12h.01M19 12h.01",
  close: "M6 6l12 12M18 6 6 18",
  gear: "M4 7h10M18 7h2M4 17h2M10 17h10M16 5v4M8 15v4",
  theme: "M12 3v18M12 3a9 9 0 0 1 0 18 9 9 0 0 1 0-18",
  branch: "M6 4v10M6 14a3 3 0 1 0 .1 0M18 4a3 3 0 1 0 .1 0M18 10c0 5-6 4-9 6",
  film: "M4 5h16v14H4zM8 5v14M16 5v14M4 12h16",
  check: "m5 12 5 5L20 7",
};
const Icon = ({ name }) => html`
  <svg viewBox="0 0 24 24" fill="none" stroke="currentColor" stroke-width="2" stroke-linecap="round" stroke-linejoin="round" aria-hidden="true">
    <path d=${PATHS[name]} /></svg>`;

const IconButton = ({ name, label, ...more }) => html`
  <button type="button" class="plain icon" aria-label=${label} title=${label} ...${more}><${Icon} name=${name} /></button>`;

function Picture({ part, session, kept, label }) {
  const [url, setUrl] = useState(part.url ?? null);
  const [gone, setGone] = useState(null);
  useEffect(() => {
    if (part.url) setUrl(part.url);
    else if (part.digest && session) server.mediaUrl(session, part.digest).then(setUrl, (error) => setGone(error.message));
  }, [part.url, part.digest, session]);
  const told = kept === undefined || kept === null ? "" : `, ${percent(kept)} of it kept`;
  const fade = kept === undefined || kept === null ? undefined : { opacity: 0.35 + 0.65 * kept, filter: `grayscale(${1 - kept})` };
  if (part.kind === "video") {
    return html`<span class="film" style=${fade} role="img" aria-label=${`${label}${told}`}><${Icon} name="film" /><span>${part.name ?? "video"}</span></span>`;
  }
  if (gone) return html`<span class="film" title=${gone}>${gone}</span>`;
  return url ? html`<img src=${url} alt=${`${label}${told}`} style=${fade} title=${told ? `The memory keeps ${percent(kept)} of this picture` : undefined} />` : html`<span class="film" aria-label=${label} role="img"></span>`;
}

function Markdown({ text }) {
  const place = useRef(null), view = useRef(null), frame = useRef(0), latest = useRef(text);
  latest.current = text;
  useEffect(() => {
    view.current ??= new MarkdownView(place.current);
    if (frame.current) return; // one rendering for each picture that the screen shows
    frame.current = requestAnimationFrame(() => {
      frame.current = 0;
      view.current.show(latest.current);
      follow();
    });
  }, [text]);
  useEffect(() => () => cancelAnimationFrame(frame.current), []);
  return html`<div class="markdown" ref=${place}></div>`;
}

function Call({ call, result }) {
  let shown = call.arguments;
  try {
    shown = JSON.stringify(JSON.parse(call.arguments), null, 2);
  } catch { /* it is still coming */ }
  return html`
    <details class="call">
      <summary><span class="muted">Calls</span> <code>${call.name}</code></summary>
      <pre tabindex="0">${shown}</pre>
      ${result && html`<p class="small muted">Result</p><pre tabindex="0">${result}</pre>`}
    </details>`;
}

function Message({ one, index, share, last }) {
  const id = current.value;
  const said = { user: "You", assistant: "Reply", system: "System prompt", tool: "Result" }[one.role] ?? one.role;
  const result = (call) => log.value.find((other) => other.role === "tool" && other.callId === call.id)?.text;
  if (one.role === "system") {
    return html`<li class="message system"><details><summary>System prompt</summary><p class="plain-text">${one.text}</p></details></li>`;
  }
  const waiting = one.pending && !one.text && !one.thought && !one.calls.length;
  return html`
    <li class=${`message ${one.role}${one.failed ? " failed" : ""}`} id=${`message-${index}`} aria-busy=${one.pending ? "true" : undefined}>
      <h2 class="said">${said}</h2>
      ${one.media.length > 0 && html`<ul class="media">${one.media.map((part, at) => html`
        <li key=${part.digest ?? part.key ?? at}><${Picture} part=${part} session=${id} kept=${share?.media[at]} label=${`${KINDS[part.kind] ?? part.kind} ${at + 1}`} /></li>`)}</ul>`}
      ${one.thought && html`<details class="thought"><summary>${one.pending && !one.text ? "Thinking…" : "Thought"}</summary><p class="plain-text">${one.thought}</p></details>`}
      ${one.role === "user" || one.role === "tool"
        ? one.text && html`<p class="plain-text bubble">${one.text}</p>`
        : html`<${Markdown} text=${one.text} />`}
      ${!one.pending && !one.text.trim() && !one.thought && !one.calls.length && one.role === "assistant" && html`<p class="muted">The reply is empty.</p>`}
      ${one.calls.map((call) => html`<${Call} key=${call.id} call=${call} result=${result(call)} />`)}
      ${waiting && html`<p class="waiting" role="status"><span></span><span class="said">waiting for the reply</span></p>`}
      ${one.failed && html`<p class="note failed" role="alert">Not sent: ${one.failed}</p>`}
      ${!one.pending && html`<div class="acts">
        ${one.text && html`<${IconButton} name="copy" label="Copy the message" onClick=${(event) => copyText(one.text, event.currentTarget)} />`}
        ${one.role === "user" && html`<${IconButton} name="pen" label=${one.failed ? "Edit and send again" : "Edit as a new branch"} onClick=${guarded(() => edit(index))} />`}
        ${one.role === "assistant" && last && html`<${IconButton} name="again" label="Another reply, as a new branch" onClick=${guarded(() => regenerate(index))} />`}
        ${one.cut && html`<span class="small muted">cut off</span>`}
        ${share && share.kept !== null && !one.failed && html`<span class="small muted kept" title="of this message's entries in the cache">${percent(share.kept)} kept</span>`}
      </div>`}
    </li>`;
}

function follow() {
  const place = document.getElementById("log");
  if (place && follow.bottom) place.scrollTop = place.scrollHeight;
}
follow.bottom = true;

// What is kept of a message; one that was refused is not in the conversation.
function shareOf(one) {
  return one.failed ? undefined : memory.value?.kept_by_message?.[stored.value.indexOf(one)];
}

function Log() {
  useEffect(follow);
  const scrolled = (event) => {
    const { scrollTop, scrollHeight, clientHeight } = event.currentTarget;
    follow.bottom = scrollHeight - scrollTop - clientHeight < 60;
  };
  const shown = log.value.filter((one) => one.role !== "tool" || !one.callId || one.media.length);
  const lastReply = log.value.findLastIndex((one) => one.role === "assistant");
  return html`
    <div id="log" onScroll=${scrolled} tabindex="0" role="region" aria-label="Messages">
      ${shown.length === 0 && html`<${Welcome} />`}
      <ol class="messages" aria-live="polite" aria-relevant="additions">
        ${log.value.map((one, index) => shown.includes(one) && html`<${Message} key=${index} one=${one} index=${index} share=${shareOf(one)} last=${index === lastReply} />`)}
      </ol>
    </div>`;
}

function Welcome() {
  const able = model.value?.mmkv;
  return html`
    <div class="welcome">
      <h1>Ask something</h1>
      <p class="muted">${able?.images
        ? `Write below${able.videos ? "; paste or drop pictures and videos" : "; paste or drop pictures"}. The memory of this conversation never grows past its budget: what it forgets, you see at the side.`
        : "Write below. The memory of this conversation never grows past its budget: what it forgets, you see at the side."}</p>
      ${able && html`<p class="small muted">${model.value.id} · ${able.policy} · ${able.budget}</p>`}
    </div>`;
}

function focusText() {
  requestAnimationFrame(() => document.getElementById("text")?.focus());
}

function Composer() {
  const area = useRef(null);
  useEffect(() => {
    const place = area.current;
    place.style.height = "auto";
    place.style.height = `${Math.min(place.scrollHeight + 2, window.innerHeight * 0.35)}px`;
  }, [draft.value]);
  const pressed = (event) => {
    if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
      event.preventDefault();
      guarded(send)();
    } else if (event.key === "Escape") {
      if (busy.value) guarded(stop)();
      else if (editing.value !== null) cancelEdit();
    }
  };
  const picked = guarded(async (event) => {
    const given = [...event.target.files];
    event.target.value = "";
    await addFiles(given);
  });
  const able = model.value?.mmkv;
  const accept = `image/png,image/jpeg,image/webp,image/gif,image/bmp${able?.videos ? ",video/mp4,video/webm,video/x-matroska,video/x-msvideo" : ""}`;
  const stopping = running.value?.stopping;
  return html`
    <form class="composer" onSubmit=${guarded(send)}>
      ${editing.value !== null && html`<p class="small muted editing">Editing a message: a new branch begins there, and the old one stays.
        <button type="button" class="plain" onClick=${cancelEdit}>Cancel</button></p>`}
      ${queue.value.length > 0 && html`<ul class="media queue" aria-label="Goes with the message">${queue.value.map((one, at) => html`
        <li key=${one.key ?? one.digest}><${Picture} part=${one} label=${one.name ?? `${KINDS[one.kind]} ${at + 1}`} />
          <button type="button" class="icon remove" aria-label=${`Remove ${one.name ?? `${KINDS[one.kind]} ${at + 1}`}`}
            onClick=${() => { queue.value = queue.value.filter((other) => other !== one); focusText(); }}><${Icon} name="close" /></button></li>`)}</ul>`}
      <label for="text" class="said">Message</label>
      <textarea id="text" ref=${area} rows="1" placeholder="Message" value=${draft.value} autofocus
        onInput=${(event) => { draft.value = event.target.value; }} onKeyDown=${pressed}></textarea>
      <div class="tools">
        ${able?.images && html`<label class="button plain icon" title="Add pictures or videos"><${Icon} name="clip" /><span class="said">Add pictures or videos</span>
          <input type="file" id="files" class="said" accept=${accept} multiple onChange=${picked} /></label>`}
        <${IconButton} name="gear" label="Settings" onClick=${() => { dialog.value = "settings"; }} />
        <span class="hint small muted">Enter sends, Shift+Enter begins a line</span>
        ${busy.value
          ? html`<button type="button" id="stop" disabled=${stopping} onClick=${guarded(stop)}>${stopping ? "Stopping…" : "Stop"}</button>`
          : html`<button id="send" class="primary icon" aria-label="Send" title="Send" disabled=${!draft.value.trim() && !queue.value.length}><${Icon} name="send" /></button>`}
      </div>
    </form>`;
}

function cancelEdit() {
  batch(() => {
    editing.value = null;
    draft.value = "";
    queue.value = [];
  });
  focusText();
}

// --- the list ---------------------------------------------------------------------------------

let searching = 0;

async function searched(words) {
  search.value = words;
  const mine = ++searching;
  if (words.trim().length < 3) return;
  for (const one of sessions.value) {
    if (texts.has(one.id) || one.state === "empty") continue;
    const found = await server.readMessages(one.id).catch(() => null);
    if (found) texts.set(one.id, found.map((each) => fromServer(each).text).join("\n").toLowerCase());
    if (mine !== searching) return;
    search.value = `${words}`; // what was found shows at once
    sessions.value = [...sessions.value];
  }
}

function day(seconds) {
  const then = new Date(seconds * 1000), today = new Date();
  const days = Math.floor((today.setHours(0, 0, 0, 0) - new Date(then).setHours(0, 0, 0, 0)) / 86400000);
  if (days <= 0) return "Today";
  return days === 1 ? "Yesterday" : days < 7 ? "This week" : "Earlier";
}

function List() {
  const words = search.value.trim().toLowerCase();
  const all = sessions.value.filter((one) => !unused(one) || one.id === current.value).reverse().sort((a, b) => b.created - a.created);
  const found = all.filter((one) => !words || nameOf(one).toLowerCase().includes(words) || texts.get(one.id)?.includes(words));
  const groups = new Map();
  for (const one of found) groups.set(day(one.created), [...(groups.get(day(one.created)) ?? []), one]);
  return html`
    <nav id="list" class=${drawer.value === "list" ? "side open" : "side"} aria-label="Conversations">
      <div class="head"><strong>mmkv</strong><${IconButton} name="close" label="Close the list" class="plain icon small-only" onClick=${() => { drawer.value = null; }} /></div>
      <button type="button" id="new" onClick=${guarded(() => open(null))}><${Icon} name="plus" /> New chat</button>
      ${sessions.value.length > 0 && html`<label class="said" for="search">Search conversations</label>
        <input id="search" type="search" placeholder="Search" value=${search.value} onInput=${(event) => searched(event.target.value)} />`}
      <div class="scroll" tabindex="-1">
        ${[...groups].map(([name, ones]) => html`<h2 class="small muted" key=${name}>${name}</h2><ul>${ones.map((one) => html`
          <li key=${one.id}><button type="button" class="plain" aria-current=${one.id === current.value ? "true" : undefined} onClick=${guarded(() => open(one.id))}
            title=${`${nameOf(one)}, ${count(one.turns, "turn")}`}>
            ${one.metadata?.from && html`<${Icon} name="branch" />`}<span>${nameOf(one)}</span>${one.busy && html`<span class="dot"><span class="said">, a reply is under way</span></span>`}</button></li>`)}</ul>`)}
        ${words && found.length === 0 && html`<p class="small muted">Nothing found.</p>`}
        ${canSave.value && saved.value.length > 0 && !words && html`<h2 class="small muted">Saved on the server</h2><ul>${saved.value.map((one) => html`
          <li key=${one.id}><button type="button" class="plain" title=${`Open ${one.id}, ${bytes(one.bytes)}`} onClick=${guarded(() => load(one.id))}><span>${one.id}</span></button></li>`)}</ul>`}
      </div>
      <div class="foot">
        <button type="button" class="plain icon" data-theme-switch aria-label="Colours" ><${Icon} name="theme" /></button>
        ${server.hasKey() && html`<button type="button" class="plain" onClick=${forgetKey}>Forget the key</button>`}
      </div>
    </nav>`;
}

async function load(name) {
  const made = await server.createSession({ file: name, metadata: { title: name } });
  await refresh();
  await open(made.id);
}

function forgetKey() {
  server.setKey("");
  location.reload();
}

// --- the memory -------------------------------------------------------------------------------

const OF = { text: "Text", image: "Pictures", video: "Videos" };

function shares(found) {
  const perToken = (found.entries + found.evicted) / Math.max(found.tokens_seen, 1);
  return Object.entries(OF).map(([name, label]) => {
    const seen = found.seen_by_modality[name] * perToken;
    return { name, label, kept: found.by_modality[name], seen };
  }).filter((one) => one.seen > 0);
}

function Bar({ found }) {
  const most = Math.max(found.most_entries ?? 0, found.entries) || 1;
  const words = found.most_entries === null ? `${number(found.entries)} entries, no budget binds them` : `${number(found.entries)} of ${number(found.most_entries)} entries`;
  return html`<div class="bar" role="img" aria-label=${`Memory: ${words}`}>
    ${shares(found).map((one) => html`<span key=${one.name} class=${`of-${one.name}`} style=${{ width: `${(100 * one.kept) / most}%` }}></span>`)}</div>`;
}

function Memory() {
  const found = memory.value, known = found?.entries !== undefined;
  const pictures = known ? log.value.flatMap((one, index) => one.media.map((part, at) => (
    { part, kept: shareOf(one)?.media[at] ?? null, index, at }))).filter(({ kept }) => kept !== null) : [];
  const turns = known ? log.value.map((one, index) => ({ one, index, kept: shareOf(one)?.kept ?? null }))
    .filter(({ kept }) => kept !== null) : [];
  const gone = known ? found.evicted / Math.max(found.entries + found.evicted, 1) : 0;
  return html`
    <aside id="memory" class=${drawer.value === "memory" ? "side open" : "side"} aria-label="Memory">
      <div class="head"><h2>Memory</h2><${IconButton} name="close" label="Close the memory" class="plain icon small-only" onClick=${() => { drawer.value = null; }} /></div>
      <div class="scroll" tabindex="-1">
      ${!known && html`<p class="small muted">Empty. It fills with the first message.</p>`}
      ${known && html`
        <${Bar} found=${found} />
        <p class="small muted number" data-of="entries" title="An entry is one token in one (layer, KV head) of the cache">${found.most_entries === null
          ? `${number(found.entries)} entries, no budget` : `${number(found.entries)} of ${number(found.most_entries)} entries`}</p>
        <ul class="legend">${shares(found).map((one) => html`<li key=${one.name} data-of=${one.name}>
          <span class=${`swatch of-${one.name}`}></span><span>${one.label}</span><span class="number muted">${percent(one.kept / one.seen)} kept</span></li>`)}</ul>
        <p data-of="forgotten">${gone > 0 ? `${percent(gone)} of what was read is forgotten.` : "Nothing is forgotten yet."}</p>
        ${pictures.length > 0 && html`<h3>Pictures</h3><ul class="fading">${pictures.map(({ part, kept, index, at }) => html`
          <li key=${`${index}-${at}`}><button type="button" class="plain" onClick=${() => jump(index)} aria-label=${`${KINDS[part.kind]} ${at + 1} of message ${index + 1}, ${percent(kept)} kept`}>
            <${Picture} part=${part} session=${current.value} kept=${kept} label="" /><span class="small number muted">${percent(kept)}</span></button></li>`)}</ul>`}
        ${turns.length > 0 && html`<h3>Messages</h3><ul class="turns">${turns.map(({ one, index, kept }) => html`
          <li key=${index}><button type="button" class="plain" onClick=${() => jump(index)} title=${`${percent(kept)} kept`}>
            <span class="words">${one.text.trim().slice(0, 60) || (one.media.length ? KINDS[one.media[0].kind] : "…")}</span>
            <span class="bar"><span class="of-text" style=${{ width: percent(kept).replace(" ", "") }}></span></span><span class="said">, ${percent(kept)} kept</span></button></li>`)}</ul>`}
        <details class="small"><summary>Details</summary><dl>
          ${[["tokens read", number(found.tokens_seen)], ["entries kept", number(found.entries)], ["entries dropped", number(found.evicted)],
            ["budget", record.value?.budget ?? "-"], ["policy", model.value?.mmkv.policy], ["keys and values", bytes(found.kv_bytes)], ["pages", number(found.pages)],
            ["lies in", found.state]].map(([name, value]) => html`<div key=${name}><dt>${name}</dt><dd class="number">${value}</dd></div>`)}
        </dl></details>`}
      </div>
      <p class="small muted number speed" data-of="speed">${[
        speed.value !== null && `${speed.value.toFixed(speed.value < 10 ? 1 : 0)} tokens/s`,
        usage.value !== null && `${count(usage.value.prompt_tokens - usage.value.mmkv.resumed, "token")} read, ${number(usage.value.mmkv.resumed)} from memory`,
      ].filter(Boolean).join(" · ")}</p>
    </aside>`;
}

function jump(index) {
  drawer.value = null;
  document.getElementById(`message-${index}`)?.scrollIntoView({ block: "center", behavior: "smooth" });
}

// --- dialogs ----------------------------------------------------------------------------------

function Dialog({ name, title, children, onSubmit, submit, danger }) {
  const place = useRef(null);
  useEffect(() => { place.current.showModal(); }, []);
  const close = () => { if (dialog.value === name) dialog.value = null; };
  return html`<dialog ref=${place} class="card" aria-labelledby=${`${name}-title`} onClose=${close} onClick=${(event) => event.target === place.current && close()}>
    <form class="stack" onSubmit=${async (event) => { event.preventDefault(); if (await onSubmit(event) !== false) close(); }}>
      <h2 id=${`${name}-title`}>${title}</h2>
      ${children}
      <div class="row end"><button type="button" onClick=${close}>Cancel</button><button class=${danger ? "danger" : "primary"}>${submit}</button></div>
    </form></dialog>`;
}

function Settings() {
  const [given, setGiven] = useState(settings.value);
  const field = (name) => ({ value: given[name], onInput: (event) => setGiven({ ...given, [name]: event.target.value }) });
  const fresh = current.value === null;
  const keep = () => {
    settings.value = given;
    try {
      sessionStorage.setItem(SETTINGS, JSON.stringify(given));
    } catch { /* until the page is closed */ }
  };
  return html`<${Dialog} name="settings" title="Settings" submit="Keep" onSubmit=${keep}>
    <label for="system">System prompt${fresh ? "" : " (next new chat)"}</label>
    <textarea id="system" rows="4" placeholder="None" ...${field("system")}></textarea>
    <div class="fields">
      <div><label for="tokens">Longest reply (tokens)</label><input id="tokens" type="number" min="1" step="1" required ...${field("tokens")} /></div>
      <div><label for="temperature">Temperature</label><input id="temperature" type="number" min="0" max="2" step="0.1" placeholder="the model's" ...${field("temperature")} /></div>
      <div><label for="budget">Budget${fresh ? "" : " (next new chat)"}</label><input id="budget" autocomplete="off" placeholder=${model.value?.mmkv.budget ?? ""} aria-describedby="budget-help" ...${field("budget")} /></div>
    </div>
    <p id="budget-help" class="small muted">Entries per row such as 256, or bytes such as 64MiB.</p>
  <//>`;
}

function Save() {
  const [name, setName] = useState("");
  const [over, setOver] = useState(false);
  const save = guarded(async () => {
    const { file } = await server.saveSession(current.value, { name: name.trim(), overwrite: over });
    saved.value = await server.savedSessions();
    tell(`Saved on the server as ${file}.`);
  });
  return html`<${Dialog} name="save" title="Save on the server" submit="Save" onSubmit=${save}>
    <label for="name">Name</label>
    <input id="name" required autocomplete="off" pattern="[A-Za-z0-9][A-Za-z0-9._\\-]*" title="letters, digits, dots, dashes and underscores" value=${name} onInput=${(event) => setName(event.target.value)} />
    <label class="row"><input id="overwrite" type="checkbox" checked=${over} onChange=${(event) => setOver(event.target.checked)} /> replace one of this name</label>
  <//>`;
}

function Delete() {
  const remove = guarded(async () => {
    const id = current.value;
    await server.deleteSession(id);
    texts.delete(id);
    await refresh();
    await open(null);
    tell("Deleted.");
  });
  return html`<${Dialog} name="delete" title="Delete this conversation?" submit="Delete" danger=${true} onSubmit=${remove}>
    <p>Its messages, pictures and memory go. Branches and saved files stay.</p>
  <//>`;
}

function Key() {
  const [key, setKey] = useState("");
  const [wrong, setWrong] = useState("");
  const place = useRef(null);
  useEffect(() => { place.current.focus(); }, []);
  const use = async (event) => {
    event.preventDefault();
    server.setKey(key);
    try {
      await start();
    } catch (error) {
      server.setKey("");
      setWrong(error.status === 401 ? "This is no key of this server." : error.message);
    }
  };
  return html`<main class="locked"><form class="card stack" onSubmit=${use}>
    <h1>mmkv</h1><p>This server asks for an API key. It stays in this tab.</p>
    <label for="key">API key</label><input id="key" ref=${place} type="password" autocomplete="off" required value=${key} onInput=${(event) => setKey(event.target.value)} />
    ${wrong && html`<p class="note failed" role="alert">${wrong}</p>`}
    <button class="primary">Use</button></form></main>`;
}

function Menu() {
  const place = useRef(null);
  const pick = (work) => () => { place.current.open = false; work(); };
  useEffect(() => {
    const outside = (event) => { if (place.current?.open && !place.current.contains(event.target)) place.current.open = false; };
    document.addEventListener("click", outside);
    return () => document.removeEventListener("click", outside);
  }, []);
  const fork = guarded(async () => {
    const title = `${nameOf(record.value).replace(/ \(copy\)$/, "")} (copy)`;
    const made = await server.forkSession(current.value, { title, from: current.value });
    await refresh();
    await open(made.id);
    tell("This is a copy; the other one stays as it is.");
  });
  return html`<details class="menu" ref=${place} onKeyDown=${(event) => { if (event.key === "Escape") place.current.open = false; }}>
    <summary class="button plain icon" aria-label="More" title="More"><${Icon} name="more" /></summary>
    <div class="card" role="group" aria-label="This conversation">
      <button type="button" class="plain" onClick=${pick(fork)} disabled=${busy.value || !record.value}>Fork</button>
      <button type="button" class="plain" onClick=${pick(guarded(() => exported("md")))}>Export as Markdown</button>
      <button type="button" class="plain" onClick=${pick(guarded(() => exported("json")))}>Export as JSON</button>
      ${canSave.value && html`<button type="button" class="plain" disabled=${busy.value || !record.value?.turns} onClick=${pick(() => { dialog.value = "save"; })}>Save on the server</button>`}
      <button type="button" class="plain danger" disabled=${busy.value || !record.value} onClick=${pick(() => { dialog.value = "delete"; })}>Delete</button>
    </div></details>`;
}

function Notice() {
  const said = notice.value;
  return html`<div class="notices" role="status">${said && html`<p class=${`note${said.failed ? " failed" : ""}`}>${said.text}
    <${IconButton} name="close" label="Dismiss" onClick=${() => tell("")} /></p>`}</div>`;
}

function App() {
  if (locked.value) return html`<${Key} />`;
  const found = memory.value;
  return html`
    <a class="skip" href="#text" onClick=${(event) => { event.preventDefault(); focusText(); }}>Skip to the message</a>
    <${List} />
    ${drawer.value && html`<div class="shade" onClick=${() => { drawer.value = null; }}></div>`}
    <main>
      <header>
        <${IconButton} name="menu" label="Conversations" class="plain icon small-only" aria-expanded=${drawer.value === "list"} onClick=${() => { drawer.value = "list"; }} />
        <p class="title">${shownTitle()}</p>
        <span class="small muted wide-only">${model.value?.id}</span>
        <button type="button" class="plain small-only mini" aria-expanded=${drawer.value === "memory"} onClick=${() => { drawer.value = "memory"; }}>
          <span class="said">Memory</span>${found?.entries !== undefined ? html`<${Bar} found=${found} />` : html`<${Icon} name="gauge" />`}</button>
        ${current.value !== null && html`<${Menu} />`}
      </header>
      <${Log} />
      <${Notice} />
      <${Composer} />
    </main>
    <${Memory} />
    ${dialog.value === "settings" && html`<${Settings} />`}
    ${dialog.value === "save" && html`<${Save} />`}
    ${dialog.value === "delete" && html`<${Delete} />`}`;
}

// --- the document -----------------------------------------------------------------------------

document.addEventListener("paste", (event) => {
  const given = [...(event.clipboardData?.files ?? [])];
  if (given.length) guarded(() => addFiles(given))(event);
});
for (const kind of ["dragover", "dragleave", "drop"]) {
  document.addEventListener(kind, (event) => {
    if (!event.dataTransfer?.types.includes("Files")) return;
    event.preventDefault();
    document.body.classList.toggle("over", kind === "dragover");
    if (kind === "drop") {
      const given = [...event.dataTransfer.files];
      guarded(() => addFiles(given))(event);
    }
  });
}
document.addEventListener("keydown", (event) => {
  if (event.key === "Escape" && drawer.value) drawer.value = null;
});
// Other tabs and clients change conversations, too; a page that is looked at shows where they stand.
setInterval(() => {
  if (document.hidden || running.value || locked.value || !model.value) return;
  refresh().then(() => {
    const one = record.value; // a turn of another tab, or of another client
    if (one && (one.busy || one.messages > stored.value.length)) return open(one.id);
    return remember();
  }).catch(() => {});
}, 10000);

render(html`<${App} />`, document.getElementById("app"));
guarded(start)();
