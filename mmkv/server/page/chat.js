// What the page knows and does: conversations, their versions, turns, files. page.js shows it.

import * as server from "./client.js";

const { signal, computed, batch } = globalThis.preactSignals;

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
const editing = signal(null); // how many messages stand before the one that is edited
const notice = signal(null); // { text, failed }
const search = signal("");
const drawer = signal(null); // on a small screen: "list" or "memory"
const dialog = signal(null); // "settings", "rename", "save" or "delete"
const saved = signal([]);
const settings = signal({ tokens: 1024, temperature: "", system: "", budget: "" });

const busy = computed(() => running.value !== null);
const stored = computed(() => log.value.filter((one) => !one.failed && !one.pending)); // what is sent, or was
const byId = computed(() => new Map(sessions.value.map((one) => [one.id, one])));
const record = computed(() => byId.value.get(current.value) ?? null);
const SETTINGS = "mmkv-settings";
const OPEN = "mmkv-open";
const texts = new Map(); // what was said in the conversations that were looked at, for the search

try {
  settings.value = { ...settings.value, ...JSON.parse(sessionStorage.getItem(SETTINGS) ?? "{}") };
} catch { /* as they are */ }

function keepSettings(given) {
  settings.value = given;
  try {
    sessionStorage.setItem(SETTINGS, JSON.stringify(given));
  } catch { /* until the page is closed */ }
}

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
    if (error.status === 401) lock();
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

// The server's errors and notes name a file as its URL does.
const named = (url, name) => (name && !url.includes(";name=")
  ? url.replace(/^data:[^;,]*/, (head) => `${head};name=${encodeURIComponent(name.slice(-60))}`) : url);

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
    url = named(url, part.name);
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
  if (record.value) return nameOf(record.value.id);
  const first = log.value.find((one) => one.role === "user");
  return first ? titleOf(first.text, first.media) : "New chat";
}

// --- versions ---------------------------------------------------------------------------------

// An edit, or another reply, is a session of its own. Its metadata say which one it departs from
// (`from`), and at which message (`at`): what stands before is shared, and listed as one.

const departs = (id) => {
  const said = byId.value.get(id)?.metadata;
  return said?.from && said.at !== undefined ? { from: said.from, at: Number(said.at) } : null;
};

// The session in which message `index` of a session was written.
function writtenIn(id, index) {
  let left = departs(id);
  for (let steps = sessions.value.length; left && index < left.at && steps; steps -= 1) {
    id = left.from;
    left = departs(id);
  }
  return id;
}

const rootOf = (id) => writtenIn(id, -1);

// All versions of each conversation, the oldest first.
const families = computed(() => {
  const found = new Map();
  for (const one of sessions.value) found.set(rootOf(one.id), [...(found.get(rootOf(one.id)) ?? []), one]);
  return found;
});

const familyOf = (id) => families.value.get(rootOf(id)) ?? [];

function nameOf(id) {
  const title = familyOf(id).map((one) => one.metadata?.title).find(Boolean);
  return title || id.replace(/^sess_/, "").slice(0, 12);
}

// The sessions that continue the same messages before `index` in different ways, one for each way,
// the newest; `shown`: which of them the page shows.
function versionsAt(index) {
  const id = current.value, before = index > 0 ? writtenIn(id, index - 1) : null;
  const ways = new Map();
  for (const one of familyOf(id)) {
    if (unused(one) || index >= Math.max(one.messages, (departs(one.id)?.at ?? -1) + 1)) continue;
    if (before === null || writtenIn(one.id, index - 1) === before) ways.set(writtenIn(one.id, index), one.id);
  }
  return { ids: [...ways.values()], shown: [...ways.keys()].indexOf(writtenIn(id, index)) };
}

// Shows another version from message `index` on.
async function turnTo(id, index) {
  await open(id, stored.value.slice(0, index));
  requestAnimationFrame(() => {
    const place = document.getElementById(`message-${index}`);
    place?.scrollIntoView({ block: "nearest" });
    place?.querySelector(".versions button:not(:disabled)")?.focus();
  });
}

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

// `known`: the messages that are there already, as another version has them.
async function open(id, known = []) {
  const mine = ++opened, left = record.value, leaving = running.value;
  leaving?.abort.abort(); // the reply goes on without the page
  // What the list says may be older than what the page shows.
  if (left && left.id !== id && unused(left) && !leaving && stored.value.length <= (departs(left.id)?.at ?? 0)) {
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
    log.value = known;
    drawer.value = null;
  });
  remembered(id);
  document.title = "mmkv";
  if (leaving) refresh().catch(() => {}); // it says that a reply is under way there
  if (id === null) {
    focusText();
    return;
  }
  const one = record.value;
  document.title = `${one ? nameOf(id) : "Chat"} · mmkv`;
  const found = (await server.readMessages(id)).map(fromServer);
  if (mine !== opened) return;
  log.value = [...found, ...unsent];
  noteText(id);
  if (one?.busy || one?.failed) await rejoin(id);
  else await remember();
}

// One whose only turn was refused, or that never had one.
const unused = (one) => one.turns === 0 && !one.busy && !one.failed;

function noteText(id) {
  texts.set(id, stored.value.map((one) => one.text).join("\n").toLowerCase());
}

const canSave = () => Boolean(model.value?.mmkv.saved_sessions);

async function start() {
  if (server.wantsKey && !server.hasKey()) {
    server.askForKey();
    await new Promise((resolve) => setTimeout(resolve, 150)); // for another tab to answer
    locked.value = !server.hasKey();
    return;
  }
  model.value = await server.models();
  locked.value = false;
  await refresh();
  if (canSave()) saved.value = await server.savedSessions();
  const last = sessionStorage.getItem(OPEN);
  const there = sessions.value.some((one) => one.id === last);
  await open(there ? last : null);
}

async function unlock(key) {
  server.setKey(key);
  try {
    await start();
  } catch (error) {
    server.setKey("");
    locked.value = true;
    throw error;
  }
}

// The server takes the key no more; another tab may have the next one.
function lock() {
  server.setKey("");
  locked.value = true;
  server.askForKey();
}

function budgetField() {
  const given = settings.value.budget.trim();
  if (!given) return {};
  return { budget: Number.isFinite(Number(given)) ? Number(given) : given };
}

// --- turns ------------------------------------------------------------------------------------

const coming = { files: Promise.resolve() }; // that were given, and are read

async function send() {
  if (busy.value) throw new Error("a reply is under way; stop it, or wait for its end");
  await coming.files;
  const text = draft.value, media = queue.value;
  if (!text.trim() && !media.length) return;
  const asked = message("user", text, media);
  const earlier = editing.value;
  batch(() => {
    draft.value = "";
    queue.value = [];
    editing.value = null;
  });
  const refusedVersion = departs(current.value) && unused(record.value);
  if (earlier === null && current.value !== null && !refusedVersion) {
    await turn(current.value, asked);
    return;
  }
  const system = settings.value.system.trim();
  try {
    if (refusedVersion) await branch(earlier ?? stored.value.length, asked);
    else if (earlier === null) await begin(system ? [message("system", system)] : [], asked);
    else await branch(earlier, asked);
  } catch (error) {
    editing.value = earlier;
    putBack(asked); // there is no conversation for it
    throw error;
  }
}

// Another version of message `index`, or with `at` of the reply to it.
async function branch(index, asked, at = index) {
  const id = current.value, left = departs(id), instead = Boolean(left && unused(record.value)); // of one whose turn was refused
  const from = instead ? left.from : id;
  if (instead) at = Math.min(at, left.at);
  await begin(stored.value.slice(0, index), asked, { title: nameOf(id), from, at: String(at) }, instead);
}

// Sends messages as a session of their own: what earlier turns left of them is not read again.
async function begin(earlier, asked, metadata, instead = false) {
  const from = current.value;
  const first = [...earlier, asked].find((one) => one.role === "user");
  for (const one of [...earlier, asked]) {
    for (const part of one.media) part.url ??= await server.mediaUrl(from, part.digest);
  }
  metadata ??= { title: titleOf(first.text, first.media) };
  const made = await server.createSession({ ...(from === null ? budgetField() : sameBudget()), metadata });
  if (instead) await server.deleteSession(from).catch(() => {});
  await refresh();
  opened += 1;
  batch(() => {
    current.value = made.id;
    memory.value = usage.value = speed.value = null;
    log.value = [...earlier, ...log.value.filter((one) => instead && one.failed)];
  });
  remembered(made.id);
  document.title = `${nameOf(made.id)} · mmkv`;
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
    await begin(earlier, asked);
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
    lock();
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

async function regenerate(index) {
  if (busy.value) throw new Error("a reply is under way; stop it, or wait for its end");
  const place = stored.value.indexOf(log.value[index]);
  const last = stored.value.slice(0, place).findLastIndex((one) => one.role === "user");
  await branch(last, stored.value[last], last + 1);
}

async function edit(index) {
  if (busy.value) throw new Error("a reply is under way; stop it, or wait for its end");
  const one = log.value[index];
  for (const part of one.media) part.url ??= await server.mediaUrl(current.value, part.digest);
  if (one.failed) log.value = log.value.filter((other) => other !== one); // it was never part of it
  else editing.value = stored.value.indexOf(one);
  putBack({ ...one, media: [...one.media] });
}

async function rename(title) {
  const root = familyOf(current.value)[0];
  await server.describeSession(root.id, { ...root.metadata, title });
  await refresh();
  document.title = `${title} · mmkv`;
}

async function remove() {
  const all = familyOf(current.value);
  if (all.some((one) => one.busy)) throw new Error("a reply is under way in another version; wait for its end");
  for (const one of all) {
    await server.deleteSession(one.id);
    texts.delete(one.id);
  }
  await refresh();
  await open(null);
  tell("Deleted.");
}

async function copy() {
  const made = await server.forkSession(current.value, { title: `${shownTitle().replace(/ \(copy\)$/, "")} (copy)` });
  await refresh();
  await open(made.id);
  tell("This is a copy; the other one stays as it is.");
}

async function load(name) {
  const made = await server.createSession({ file: name, metadata: { title: name } });
  await refresh();
  await open(made.id);
}

// --- the page ---------------------------------------------------------------------------------

function focusText() {
  requestAnimationFrame(() => document.getElementById("text")?.focus());
}

function follow() {
  const place = document.getElementById("log");
  if (place && follow.bottom) place.scrollTop = place.scrollHeight;
}
follow.bottom = true;

function cancelEdit() {
  batch(() => {
    editing.value = null;
    draft.value = "";
    queue.value = [];
  });
  focusText();
}

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

export {
  KINDS, busy, bytes, cancelEdit, canSave, coming, copy, count, current, dialog, draft, drawer, edit, editing, families,
  familyOf, focusText, follow, guarded, keepSettings, load, locked, log, memory, model, nameOf, notice, number, open, percent,
  queue, record, refresh, regenerate, remember, remove, rename, rootOf, running, saved, search, searched, send, sessions,
  settings, shownTitle, speed, start, stop, stored, tell, texts, toServer, turnTo, unlock, unused, usage, versionsAt,
};
