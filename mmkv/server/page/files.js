// Files that go in, pictures and videos, and the conversation as a file that comes out.

import { coming, current, draft, focusText, model, queue, send, shownTitle, stored, toServer } from "./chat.js";
import * as server from "./client.js";

let count = 0;

// What a file is, by its first bytes.
const BEGINNINGS = {
  PNG: /^\x89PNG/, JPEG: /^\xff\xd8\xff/, GIF: /^GIF8/, WEBP: /^RIFF....WEBP/s, BMP: /^BM/, TIFF: /^(II\*\0|MM\0\*)/,
  AVIF: /^....ftyp(avis|.*avif)/s, HEIF: /^....ftyp(hei[cmsx]|hev[cx]|mif1)/s, SVG: /^\s*<(svg|\?xml)/,
  video: /^(....(ftyp|moov|mdat)|\x1a\x45\xdf\xa3|RIFF....AVI )/s,
};

async function kindOf(file) {
  const head = String.fromCharCode(...new Uint8Array(await file.slice(0, 32).arrayBuffer()));
  return Object.keys(BEGINNINGS).find((kind) => BEGINNINGS[kind].test(head));
}

// Refuses what the server would refuse, before it is sent.
async function checked(file) {
  const able = model.value.mmkv, kind = await kindOf(file);
  if (!file.size) throw new Error(`${file.name} is empty`);
  if (!kind) throw new Error(`${file.name} is neither a picture nor a video`);
  if (kind === "video" && !able.videos) throw new Error(`${file.name} is a video, and this model watches none`);
  if (kind !== "video" && !able.picture_formats.includes(kind)) {
    const how = kind === "HEIF" ? " to JPEG, or install pillow-heif on the server" : "";
    throw new Error(`${file.name} is a ${kind.replace("HEIF", "HEIC")} picture; this server reads ${able.picture_formats.join(", ")}: convert it${how}`);
  }
  const url = await server.dataUrl(file);
  if (kind !== "video" && kind !== "HEIF") { // which few browsers show
    const image = new Image();
    image.src = url;
    await image.decode().catch(() => { throw new Error(`${file.name} is a damaged ${kind} picture; get another copy`); });
  }
  return { key: ++count, kind: kind === "video" ? kind : "image", url, name: file.name, size: file.size };
}

export async function addFiles(given) {
  if (!model.value?.mmkv.images) throw new Error("this model reads no pictures");
  const wrong = [];
  const added = (async () => {
    for (const file of given) {
      try {
        const one = await checked(file);
        queue.value = [...queue.value, one];
      } catch (error) {
        wrong.push(error.message);
      }
    }
  })();
  coming.files = Promise.all([coming.files, added]); // a message waits for them
  await added;
  focusText();
  if (wrong.length) throw new Error(`Not added: ${wrong.join("; ")}`);
}

// One click on the empty page: the bundled picture, and a question about it.
export const EXAMPLE = "what is at row 2, column 3?";

export async function tryExample() {
  const found = await fetch("scene.png");
  await addFiles([new File([await found.blob()], "scene.png")]);
  draft.value = EXAMPLE;
  await send();
}

// --- export -----------------------------------------------------------------------------------

export async function exported(form) {
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
