// Keeping a chat: in this browser, in a link, in a file. What is read back is hostile until checked.
import { element } from "./element.js";

const LONGEST_LINK = 30_000;
const ORIGINS = ["draft", "relaxed", "target"];
const STATES = ["done", "length", "stopped", "failed"];
const COUNTS = ["tokens", "passes", "drafted", "accepted", "relaxed", "seconds"];
const place = (model) => `semspec.chat.${model}`;

// A browser may forbid storage; then nothing is kept.
export function setting(name, value) {
  try {
    if (value !== undefined) localStorage.setItem(name, value);
    return localStorage.getItem(name);
  } catch {
    return value ?? null;
  }
}

export function store(model, chat) {
  try {
    if (chat.turns.length || chat.system) localStorage.setItem(place(model), JSON.stringify(chat));
    else localStorage.removeItem(place(model));
  } catch {
    if (chat.turns.length > 1) store(model, { ...chat, turns: chat.turns.slice(1) }); // no room: the oldest goes
  }
}

export function stored(model) {
  try {
    return checked(JSON.parse(localStorage.getItem(place(model))));
  } catch {
    return null;
  }
}

// A link holds the chat itself, behind the #, which is never sent to a server.
export async function linkTo(chat) {
  const packed = await through(new CompressionStream("deflate-raw"), new TextEncoder().encode(JSON.stringify(chat)));
  let text = "";
  for (const byte of packed) text += String.fromCharCode(byte);
  const code = btoa(text).replaceAll("+", "-").replaceAll("/", "_").replace(/=+$/, "");
  return code.length > LONGEST_LINK ? null : `${location.origin}/#chat=${code}`;
}

export async function linked() {
  const code = /^#chat=([\w-]+)$/.exec(location.hash)?.[1];
  if (!code || code.length > LONGEST_LINK) return null;
  try {
    const bytes = Uint8Array.from(atob(code.replaceAll("-", "+").replaceAll("_", "/")), (sign) => sign.charCodeAt(0));
    return checked(JSON.parse(new TextDecoder().decode(await through(new DecompressionStream("deflate-raw"), bytes))));
  } catch {
    return null;
  }
}

async function through(transform, bytes) {
  return new Uint8Array(await new Response(new Blob([bytes]).stream().pipeThrough(transform)).arrayBuffer());
}

export function save(name, text) {
  const address = URL.createObjectURL(new Blob([text], { type: "text/markdown" }));
  const anchor = element("a", { href: address, download: name });
  anchor.click();
  setTimeout(() => URL.revokeObjectURL(address), 1000);
}

export const textOf = (spans, channel) =>
  spans.filter((span) => span.channel === channel).map((span) => span.text).join("");

export function asMarkdown(chat, model) {
  const parts = [`# ${model}`, chat.system && `System prompt: ${chat.system}`];
  for (const { question, answers } of chat.turns) {
    parts.push(`## ${question}`);
    for (const { method, spans, figures, note } of answers) {
      const text = (channel) => textOf(spans, channel).trim();
      const thoughts = text("reasoning");
      const took = `${figures.tokens} tokens, ${figures.seconds.toFixed(2)} s, ${figures.relaxed} relaxed`;
      parts.push(`**${method.title} (${method.name})**${method.own && `, ${method.own}`}: ${took}`);
      parts.push(thoughts && thoughts.replace(/^/gm, "> "), text("content"), note && `(${note})`);
    }
  }
  return `${parts.filter(Boolean).join("\n\n")}\n`;
}

// A chat of the right shape, or null.
function checked(chat) {
  const text = (value) => (typeof value === "string" ? value : "");
  const number = (value) => (Number.isFinite(value) && value >= 0 ? value : 0);
  const list = (value) => (Array.isArray(value) ? value.slice(0, 10_000) : []);
  if (!chat || !Array.isArray(chat.turns)) return null;
  const span = ({ text: words, origin, channel, why, instead }) => ({
    text: text(words),
    origin: ORIGINS.includes(origin) ? origin : "target",
    channel: channel === "reasoning" ? "reasoning" : "content",
    why: text(why),
    instead: text(instead),
  });
  const answer = ({ method, spans, state, note, figures, points }) => ({
    method: {
      name: text(method?.name),
      title: text(method?.title),
      own: text(method?.own),
      lossless: method?.lossless === true,
    },
    spans: list(spans).map(span),
    state: STATES.includes(state) ? state : "stopped",
    note: text(note),
    figures: {
      ...Object.fromEntries(COUNTS.map((name) => [name, number(figures?.[name])])),
      counts: list(figures?.counts).slice(0, 600).map(number),
    },
    points: list(points).filter(Array.isArray).map(([seconds, rate]) => [number(seconds), number(rate)]),
  });
  const turn = ({ question, answers }) => ({
    question: text(question),
    answers: list(answers).slice(0, 2).map(answer),
  });
  return { system: text(chat.system), turns: list(chat.turns).map(turn) };
}
