// What is shown: it follows from the signals of chat.js; markdown.js renders replies.

import {
  KINDS, busy, bytes, cancelEdit, canSave, copy, count, current, dialog, draft, drawer, edit, editing, families, familyOf,
  focusText, follow, guarded, keepSettings, load, locked, log, memory, model, nameOf, notice, number, open, percent, queue,
  record, refresh, regenerate, remember, remove, rename, rootOf, running, saved, search, searched, send, sessions, settings,
  shownTitle, speed, start, stop, stored, tell, texts, turnTo, unlock, unused, usage, versionsAt,
} from "./chat.js";
import * as server from "./client.js";
import { EXAMPLE, addFiles, exported, tryExample } from "./files.js";
import { MarkdownView, copyText } from "./markdown.js";

const { h, render } = globalThis.preact;
const { useEffect, useRef, useState } = globalThis.preactHooks;
const html = globalThis.htm.bind(h);

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
  left: "m15 6-6 6 6 6",
  right: "m9 6 6 6-6 6",
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
  const [gone, setGone] = useState(null); // why it is not shown
  useEffect(() => {
    if (part.url) setUrl(part.url);
    else if (part.digest && session) server.mediaUrl(session, part.digest).then(setUrl, (error) => setGone(error.message));
  }, [part.url, part.digest, session]);
  const told = kept === undefined || kept === null ? "" : `, ${percent(kept)} of it kept`;
  const fade = kept === undefined || kept === null ? undefined : { opacity: 0.35 + 0.65 * kept, filter: `grayscale(${1 - kept})` };
  if (part.kind === "video") {
    return html`<span class="film" style=${fade} role="img" aria-label=${`${label}${told}`}><${Icon} name="film" /><span>${part.name ?? "video"}</span></span>`;
  }
  if (gone) return html`<span class="film" style=${fade} role="img" aria-label=${`${label}${told}`} title=${gone}><span>${part.name ?? "not shown"}</span></span>`;
  return url ? html`<img src=${url} alt=${`${label}${told}`} style=${fade} onError=${() => setGone("a picture that this browser cannot show")} title=${told ? `The memory keeps ${percent(kept)} of this picture` : undefined} />` : html`<span class="film" aria-label=${label} role="img"></span>`;
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

function Versions({ index }) {
  const { ids, shown } = versionsAt(index);
  if (ids.length < 2 || shown < 0) return null;
  const step = (by, name, label) => html`<${IconButton} name=${name} label=${label} disabled=${shown + by < 0 || shown + by >= ids.length}
    onClick=${guarded(() => turnTo(ids[shown + by], index))} />`;
  return html`<span class="versions" role="group" aria-label=${`Version ${shown + 1} of ${ids.length}`}>
    ${step(-1, "left", "The version before")}<span class="small number" aria-hidden="true">${shown + 1}/${ids.length}</span>${step(1, "right", "The next version")}</span>`;
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
        <li key=${part.key ?? at}><${Picture} part=${part} session=${id} kept=${share?.media[at]} label=${`${KINDS[part.kind] ?? part.kind} ${at + 1}`} /></li>`)}</ul>`}
      ${one.thought && html`<details class="thought"><summary>${one.pending && !one.text ? "Thinking…" : "Thought"}</summary><p class="plain-text">${one.thought}</p></details>`}
      ${one.role === "user" || one.role === "tool"
        ? one.text && html`<p class="plain-text bubble">${one.text}</p>`
        : html`<${Markdown} text=${one.text} />`}
      ${!one.pending && !one.text.trim() && !one.thought && !one.calls.length && one.role === "assistant" && html`<p class="muted">The reply is empty.</p>`}
      ${one.calls.map((call) => html`<${Call} key=${call.id} call=${call} result=${result(call)} />`)}
      ${waiting && html`<p class="waiting" role="status"><span></span><span class="said">waiting for the reply</span></p>`}
      ${one.failed && html`<p class="note failed" role="alert">Not sent: ${one.failed}</p>`}
      ${!one.pending && html`<div class="acts">
        ${!one.failed && html`<${Versions} index=${stored.value.indexOf(one)} />`}
        ${one.text && html`<${IconButton} name="copy" label="Copy the message" onClick=${(event) => copyText(one.text, event.currentTarget)} />`}
        ${one.role === "user" && html`<${IconButton} name="pen" label=${one.failed ? "Edit and send again" : "Edit as another version"} onClick=${guarded(() => edit(index))} />`}
        ${one.role === "assistant" && last && html`<${IconButton} name="again" label="Another reply" onClick=${guarded(() => regenerate(index))} />`}
        ${one.cut && html`<span class="small muted">cut off</span>`}
        ${share && share.kept !== null && !one.failed && html`<span class="small muted kept" title="of this message's entries in the cache">${percent(share.kept)} kept</span>`}
      </div>`}
    </li>`;
}

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
      ${shown.length > 0 && memory.value?.notes?.length > 0 && html`<ul class="messages told small" aria-label="Notes" aria-live="polite">
        ${memory.value.notes.map((one) => html`<li key=${one}>${one}</li>`)}</ul>`}
    </div>`;
}

function Welcome() {
  const able = model.value?.mmkv;
  return html`
    <div class="welcome">
      <h1>Ask something</h1>
      <p class="muted">${able?.images
        ? `Write below${able.videos ? "; paste or drop pictures and videos" : "; paste or drop pictures"}. Its memory never grows past a budget; “Memory” shows what was forgotten.`
        : "Write below. Its memory never grows past a budget; “Memory” shows what was forgotten."}</p>
      ${able?.images && html`<button type="button" class="example" disabled=${busy.value} onClick=${guarded(tryExample)}>
        <${Example} /><span>Try this picture: “${EXAMPLE}”</span></button>`}
      ${able && html`<p class="small muted as-is">${model.value.id} · ${able.policy} · ${able.budget}</p>`}
      ${able?.note && html`<p class="small muted">${able.note}</p>`}
    </div>`;
}

function Example() {
  const [url, setUrl] = useState(null);
  useEffect(() => { fetch("scene.png").then((found) => found.blob()).then(server.dataUrl).then(setUrl, () => {}); }, []);
  return url && html`<img src=${url} alt="" width="64" height="64" />`;
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
  const formats = able?.picture_formats ?? [];
  const accept = [...formats.map((one) => `image/${one.toLowerCase()}`), ...(formats.includes("HEIF") ? [".heic"] : []),
    ...(able?.videos ? ["video/mp4", "video/webm", "video/x-matroska", "video/x-msvideo"] : [])].join();
  const stopping = running.value?.stopping;
  return html`
    <form class="composer" onSubmit=${guarded(send)}>
      ${editing.value !== null && html`<p class="small muted editing">Editing a message: this makes another version of it, and the old one stays.
        <button type="button" class="plain" onClick=${cancelEdit}>Cancel</button></p>`}
      ${queue.value.length > 0 && html`<ul class="media queue" aria-label="Goes with the message">${queue.value.map((one, at) => html`
        <li key=${one.key ?? `old ${at}`}><${Picture} part=${one} session=${current.value} label=${one.name ?? `${KINDS[one.kind]} ${at + 1}`} />
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

// --- the list ---------------------------------------------------------------------------------

function day(seconds) {
  const then = new Date(seconds * 1000), today = new Date();
  const days = Math.floor((today.setHours(0, 0, 0, 0) - new Date(then).setHours(0, 0, 0, 0)) / 86400000);
  if (days <= 0) return "Today";
  return days === 1 ? "Yesterday" : days < 7 ? "This week" : "Earlier";
}

function List() {
  const words = search.value.trim().toLowerCase();
  const all = [...families.value.values()].filter((ones) => ones.some((one) => !unused(one) || one.id === current.value))
    .reverse().sort((a, b) => b[0].created - a[0].created);
  const says = (one) => texts.get(one.id)?.includes(words);
  const found = all.filter((ones) => !words || nameOf(ones[0].id).toLowerCase().includes(words) || ones.some(says));
  const groups = new Map();
  for (const ones of found) groups.set(day(ones[0].created), [...(groups.get(day(ones[0].created)) ?? []), ones]);
  const here = rootOf(current.value);
  const entry = (ones) => {
    const root = rootOf(ones[0].id), used = ones.filter((one) => !unused(one));
    const one = (words && used.findLast(says)) || used.at(-1) || ones.at(-1); // the newest version
    const versions = used.length > 1 ? `, ${used.length} versions` : "";
    return html`<li key=${root}><button type="button" class="plain" aria-current=${root === here ? "true" : undefined}
      onClick=${guarded(() => open(root === here && !words ? current.value : one.id))} title=${`${nameOf(root)}, ${count(one.turns, "turn")}${versions}`}>
      <span>${nameOf(root)}</span>${ones.some(({ busy }) => busy) && html`<span class="dot"><span class="said">, a reply is under way</span></span>`}</button></li>`;
  };
  return html`
    <nav id="list" class=${drawer.value === "list" ? "side open" : "side"} aria-label="Conversations">
      <div class="head"><strong>mmkv</strong><${IconButton} name="close" label="Close the list" class="plain icon small-only" onClick=${() => { drawer.value = null; }} /></div>
      <button type="button" id="new" onClick=${guarded(() => open(null))}><${Icon} name="plus" /> New chat</button>
      ${sessions.value.length > 0 && html`<label class="said" for="search">Search conversations</label>
        <input id="search" type="search" placeholder="Search" value=${search.value} onInput=${(event) => searched(event.target.value)} />`}
      <div class="scroll" tabindex="-1">
        ${[...groups].map(([name, ones]) => html`<h2 class="small muted" key=${name}>${name}</h2><ul>${ones.map(entry)}</ul>`)}
        ${words && found.length === 0 && html`<p class="small muted">Nothing found.</p>`}
        ${saved.value.length > 0 && !words && html`<h2 class="small muted">Saved on the server</h2><ul>${saved.value.map((one) => html`
          <li key=${one.id}><button type="button" class="plain" title=${`Open ${one.id}, ${bytes(one.bytes)}`} onClick=${guarded(() => load(one.id))}><span>${one.id}</span></button></li>`)}</ul>`}
      </div>
      <div class="foot">
        <button type="button" class="plain icon" data-theme-switch aria-label="Colours" ><${Icon} name="theme" /></button>
        ${server.hasKey() && html`<button type="button" class="plain" onClick=${() => { server.forgetEverywhere(); forgetKey(); }}>Forget the key</button>`}
      </div>
    </nav>`;
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
  const words = found.most_entries === null ? `${number(found.entries)} entries, no budget binds them` : `${number(found.entries)} entries, ${number(found.most_entries)} allowed`;
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
          ? `${number(found.entries)} entries, no budget` : `${number(found.entries)} entries, ${number(found.most_entries)} allowed`}</p>
        <ul class="legend">${shares(found).map((one) => html`<li key=${one.name} data-of=${one.name}>
          <span class=${`swatch of-${one.name}`}></span><span>${one.label}</span><span class="number muted">${percent(one.kept / one.seen)} kept</span></li>`)}</ul>
        <p data-of="forgotten" title="Dropped, of all entries that were made">${gone > 0 ? `${percent(gone)} of what was read is forgotten.` : "Nothing is forgotten yet."}</p>
        ${pictures.length > 0 && html`<h3>Pictures</h3><ul class="fading">${pictures.map(({ part, kept, index, at }) => html`
          <li key=${`${index}-${at}`}><button type="button" class="plain" onClick=${() => jump(index)} aria-label=${`${KINDS[part.kind]} ${at + 1} of message ${index + 1}, ${percent(kept)} kept`}>
            <${Picture} part=${part} session=${current.value} kept=${kept} label="" /><span class="small number muted">${percent(kept)}</span></button></li>`)}</ul>`}
        ${turns.length > 0 && html`<h3>Messages</h3><ul class="turns">${turns.map(({ one, index, kept }) => html`
          <li key=${index}><button type="button" class="plain" onClick=${() => jump(index)} title=${`${percent(kept)} kept`}>
            <span class="words">${one.text.trim().slice(0, 60) || (one.media.length ? KINDS[one.media[0].kind] : "…")}</span>
            <span class="bar"><span class="of-text" style=${{ width: percent(kept).replace(" ", "") }}></span></span><span class="said">, ${percent(kept)} kept</span></button></li>`)}</ul>`}
        <details class="small"><summary>Details</summary><dl>
          ${[["tokens seen", number(found.tokens_seen)], ["entries kept", number(found.entries)], ["entries dropped", number(found.evicted)],
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
  return html`<${Dialog} name="settings" title="Settings" submit="Keep" onSubmit=${() => keepSettings(given)}>
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

function Rename() {
  const [title, setTitle] = useState(shownTitle());
  return html`<${Dialog} name="rename" title="Rename" submit="Rename" onSubmit=${guarded(() => rename(title.trim()))}>
    <label for="title">Title</label>
    <input id="title" required maxlength="100" pattern=".*\\S.*" autocomplete="off" value=${title} onInput=${(event) => setTitle(event.target.value)} />
  <//>`;
}

function Delete() {
  const many = familyOf(current.value).filter((one) => !unused(one)).length;
  return html`<${Dialog} name="delete" title="Delete this conversation?" submit="Delete" danger=${true} onSubmit=${guarded(remove)}>
    <p>Its messages, pictures and memory go${many > 1 ? `, in all ${many} versions` : ""}. Saved files stay.</p>
  <//>`;
}

function Key() {
  const [key, setKey] = useState("");
  const [wrong, setWrong] = useState("");
  const place = useRef(null);
  useEffect(() => { place.current.focus(); }, []);
  const use = async (event) => {
    event.preventDefault();
    try {
      await unlock(key);
      server.giveKey();
    } catch (error) {
      setWrong(error.status === 401 ? "This is no key of this server." : error.message);
    }
  };
  return html`<main class="locked"><form class="card stack" onSubmit=${use}>
    <h1>mmkv</h1><p>This server asks for an API key. Your tabs of this page share it, and it goes with the last one.</p>
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
  return html`<details class="menu" ref=${place} onKeyDown=${(event) => { if (event.key === "Escape") place.current.open = false; }}>
    <summary class="button plain icon" aria-label="More" title="More"><${Icon} name="more" /></summary>
    <div class="card" role="group" aria-label="This conversation">
      <button type="button" class="plain" disabled=${busy.value || !record.value} onClick=${pick(() => { dialog.value = "rename"; })}>Rename</button>
      <button type="button" class="plain" onClick=${pick(guarded(copy))} disabled=${busy.value || !record.value}>Fork</button>
      <button type="button" class="plain" onClick=${pick(guarded(() => exported("md")))}>Export as Markdown</button>
      <button type="button" class="plain" onClick=${pick(guarded(() => exported("json")))}>Export as JSON</button>
      ${canSave() && html`<button type="button" class="plain" disabled=${busy.value || !record.value?.turns} onClick=${pick(() => { dialog.value = "save"; })}>Save on the server</button>`}
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
    ${dialog.value === "rename" && html`<${Rename} />`}
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

server.shareKey((key) => unlock(key).catch(() => {}), forgetKey);
render(html`<${App} />`, document.getElementById("app"));
guarded(start)();
