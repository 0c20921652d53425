// Talks to the server that sent the page. Sessions are conversations; turns go on in the background.

// The key lies in sessionStorage, which goes with its tab, and a new tab asks the others for it. In
// localStorage it would stay on the disk for whoever uses the browser next; so it goes with the last
// tab. Only pages of this origin hear the channel, and they could read either storage.
const KEY = "mmkv-key";
const BROWSER = "mmkv-browser"; // in localStorage: whose conversations these are, without keys

export class Refused extends Error {
  constructor(status, error) {
    super(error?.message ?? `the server answered ${status}`);
    this.status = status;
    this.code = error?.code;
  }
}

function random(bytes) {
  const text = String.fromCharCode(...crypto.getRandomValues(new Uint8Array(bytes)));
  return btoa(text).replaceAll("+", "-").replaceAll("/", "_").replaceAll("=", "");
}

let browser = null;
try {
  browser = localStorage.getItem(BROWSER);
  if (!/^[\w-]{32,128}$/.test(browser ?? "")) {
    browser = random(32);
    localStorage.setItem(BROWSER, browser);
  }
} catch {
  browser = random(32); // no storage: the conversations go with the page
}

export const wantsKey = document.documentElement.dataset.key !== undefined;
export const hasKey = () => Boolean(sessionStorage.getItem(KEY));

export function setKey(key) {
  if (key) sessionStorage.setItem(KEY, key);
  else sessionStorage.removeItem(KEY);
}

const tabs = wantsKey ? new BroadcastChannel(KEY) : null;

// Calls `heard` when another tab has a key for this one, and `gone` when all are to forget it.
export function shareKey(heard, gone) {
  if (!tabs) return;
  tabs.onmessage = ({ data }) => {
    if (data.wanted && hasKey()) tabs.postMessage({ key: sessionStorage.getItem(KEY) });
    else if (data.key && !hasKey()) heard(data.key);
    else if (data.forget) gone();
  };
}
export const askForKey = () => tabs?.postMessage({ wanted: true });
export const giveKey = () => tabs?.postMessage({ key: sessionStorage.getItem(KEY) });
export const forgetEverywhere = () => tabs?.postMessage({ forget: true });

export async function ask(path, { method = "GET", body, session, signal } = {}) {
  const key = sessionStorage.getItem(KEY);
  const headers = key ? { Authorization: `Bearer ${key}` } : { "X-Mmkv-Browser": browser };
  // One name goes with all requests of a session, so that a router can keep it in one place.
  if (session) headers["X-Session-Id"] = session;
  if (body !== undefined) headers["Content-Type"] = "application/json";
  const answer = await fetch(`v1/${path}`, {
    method, headers, signal, body: body === undefined ? undefined : JSON.stringify(body),
  });
  if (!answer.ok) {
    const found = await answer.json().catch(() => ({}));
    throw new Refused(answer.status, found.error);
  }
  return answer;
}

export const json = async (path, more) => (await ask(path, more)).json();

const at = (id, what = "") => `sessions/${encodeURIComponent(id)}${what}`;

export const models = async () => (await json("models")).data[0];
export const listSessions = async () => (await json("sessions")).data;
export const createSession = (fields) =>
  json("sessions", { method: "POST", body: fields, session: `sess_${random(18)}` });
export const describeSession = (id, metadata) =>
  json(at(id), { method: "POST", body: { metadata }, session: id });
export const forkSession = (id, metadata) =>
  json(at(id, "/fork"), { method: "POST", body: { metadata }, session: id });
export const deleteSession = (id) => json(at(id), { method: "DELETE", session: id });
export const saveSession = (id, body) => json(at(id, "/save"), { method: "POST", body, session: id });
export const readMessages = async (id) => (await json(at(id, "/messages"), { session: id })).data;
export const readMemory = (id) => json(at(id, "/memory"), { session: id });
export const stopTurn = (id) => json(at(id, "/turn"), { method: "DELETE", session: id });
export const savedSessions = async () => (await json("saved_sessions")).data;

export async function* sendTurn(id, body, signal) {
  yield* events(await ask(at(id, "/chat/completions"), { method: "POST", body, session: id, signal }));
}

export async function* rejoinTurn(id, signal) {
  yield* events(await ask(at(id, "/turn"), { session: id, signal }));
}

// A picture of a session as a data: URL, the only kind that the page's policy lets it show.
const shownMedia = new Map();
export function mediaUrl(id, digest) {
  if (!shownMedia.has(digest)) {
    const loading = ask(at(id, `/media/${digest}`), { session: id })
      .then((answer) => answer.blob()).then(dataUrl);
    loading.catch(() => shownMedia.delete(digest));
    shownMedia.set(digest, loading);
    // A tab may stay open for weeks.
    if (shownMedia.size > 64) shownMedia.delete(shownMedia.keys().next().value);
  }
  return shownMedia.get(digest);
}

export function dataUrl(file) {
  return new Promise((resolve, reject) => {
    const reader = new FileReader();
    reader.onload = () => resolve(reader.result);
    reader.onerror = () => reject(new Error(`${file.name ?? "the file"} cannot be read`));
    reader.readAsDataURL(file);
  });
}

async function* events(answer) {
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "", ended = false;
  for (;;) {
    const { value, done } = await reader.read();
    if (done) break;
    const blocks = (rest + value).split("\n\n");
    rest = blocks.pop();
    for (const block of blocks) {
      const text = block.split("\n").filter((line) => line.startsWith("data: "))
        .map((line) => line.slice(6)).join("\n");
      if (text === "[DONE]") ended = true;
      else if (text) {
        const event = JSON.parse(text);
        if (event.error) throw new Refused(answer.status, event.error);
        yield event;
      }
    }
  }
  if (!ended) throw new TypeError("the connection ended before the reply did");
}
