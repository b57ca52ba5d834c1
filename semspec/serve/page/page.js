// The page: a conversation, the methods that answer, a composer, and a tip that says why a token was relaxed.
import { Chat } from "./chat.js";
import { button, copy, element, flash } from "./element.js";
import { asMarkdown, linkTo, linked, save, setting, store, stored } from "./keep.js";
import { Method } from "./method.js";

const $ = (id) => document.getElementById(id);
let menu;
let chat;
let methods = [];
let stopping = null;
let viewing = false; // a chat from a link
let oneQuestion = false;
let plain = false; // the model goes on from a text
let seed = 0;

const WAITING = {
  loading: "The model is being loaded. This page goes on by itself; you can write your message meanwhile.",
  draining: "The server is shutting down.",
  failed: "The server has failed; its log says why.",
};

function wait(state, text = WAITING[state] ?? state) {
  $("model").textContent = state;
  if ($("wait").textContent !== text) $("wait").textContent = text; // or it would be read out again and again
}

async function start() {
  for (;;) {
    try {
      const health = await (await fetch("/health")).json();
      wait(health.status);
      if (health.status === "ready") break;
    } catch {
      wait("the server cannot be reached", "The server cannot be reached. This page tries again every second.");
    }
    await new Promise((resolve) => setTimeout(resolve, 700));
  }
  const response = await fetch("/v1/methods");
  if (!response.ok) {
    wait("no access", "This server needs an API key; reload the page and give it as the password.");
    return;
  }
  menu = await response.json();
  const pace = (1000 * menu.target_seconds_per_token).toFixed(1);
  const only = menu.allow_lossy ? "" : " · lossless rules only";
  const vain = menu.busy ? ", timed on a busy machine" : "";
  $("model").textContent = `${menu.model} · target only ${pace} ms a token${vain}${only}`;
  $("model").title = menu.busy;
  document.title = `${menu.model} · semspec`;
  $("thinking").parentElement.hidden = !menu.thinks;
  $("longest").max = menu.max_new_tokens;
  $("longest").value = Math.min(Number($("longest").value), menu.max_new_tokens);
  methods = [new Method(menu, menu.default.verifier, "Method"), new Method(menu, other(), "Second method")];
  chat = new Chat({ talk: $("talk"), turns: $("turns"), latest: $("latest"), menu, actions: ACTIONS, changed: keep });
  arrange();
  await suggest();
  $("remember").checked = !oneQuestion;
  const shared = await linked();
  $("wait").hidden = true;
  $("send").disabled = false;
  show(shared ?? stored(menu.model), Boolean(shared));
}

// What to show beside the default: a lossy rule where one is allowed, else the target only.
function other() {
  const lossy = menu.verifiers.find((rule) => rule.allowed && !rule.lossless);
  return lossy ? lossy.name : "none";
}

function show(kept, fromLink) {
  viewing = fromLink;
  $("shared").hidden = !viewing;
  $("composer").hidden = viewing;
  $("system").value = kept?.system ?? "";
  chat.load(kept?.turns ?? []);
  settle();
}

const current = () => ({ system: $("system").value, turns: chat.turns.map((turn) => turn.data) });

function keep() {
  if (chat && !viewing) store(menu.model, current());
}

// After any change of what is on the screen.
function settle() {
  $("empty").hidden = chat.turns.length > 0;
  for (const id of ["save", "clear"]) $(id).disabled = !chat.turns.length || Boolean(stopping) || viewing;
  for (const turn of chat.turns) turn.root.classList.toggle("latest", turn === chat.turns.at(-1) && !viewing);
  document.body.classList.toggle("busy", Boolean(stopping));
  $("send").hidden = Boolean(stopping);
  $("stop").hidden = !stopping;
  $("compare").disabled = Boolean(stopping);
}

async function suggest() {
  const told = await (await fetch(`/v1/examples?seed=${seed++ % 1000}`)).json();
  oneQuestion = told.one_question;
  plain = !told.chat;
  $("system").parentElement.hidden = plain;
  $("empty").querySelector("h2").textContent = plain ? "Begin a text" : "Ask something";
  $("prompt").placeholder = plain ? "Begin a text. Enter sends, Esc stops." : "Ask something. Enter sends, Esc stops.";
  $("about").textContent = told.about;
  $("examples").replaceChildren(...told.examples.map((text) => button(text, "Ask this", () => send(text), "example")));
  $("others").hidden = !oneQuestion || plain;
}

function arrange() {
  const shown = $("compare").checked ? methods : methods.slice(0, 1);
  methods[0].root.querySelector("legend").textContent = shown.length > 1 ? "First method" : "Method";
  $("methods").replaceChildren(...shown.map((method) => method.root));
}

async function send(text) {
  if (!text || stopping || viewing || !chat) return;
  const settings = { temperature: Number($("temperature").value), max_tokens: Number($("longest").value) };
  if ($("seed").value !== "") settings.seed = Number($("seed").value);
  if ($("thinking").value !== "") settings.max_thinking_tokens = Number($("thinking").value);
  stopping = new AbortController();
  $("empty").hidden = true;
  $("status").textContent = "";
  const asked = {
    methods: $("compare").checked ? methods : methods.slice(0, 1),
    settings,
    system: plain ? "" : $("system").value.trim(),
    plain,
    remember: $("remember").checked,
  };
  const running = chat.ask(text, asked, stopping.signal);
  settle();
  const turn = await running;
  stopping = null;
  settle();
  keep();
  const { note, figures } = turn.answers[0].data;
  const took = `${figures.tokens} tokens in ${figures.seconds.toFixed(1)} s`;
  $("status").textContent = turn.verdict.textContent || note || took;
  // On a phone that would open the keyboard.
  if (matchMedia("(pointer: fine)").matches) $("prompt").focus({ preventScroll: true });
}

// The same question again, with the methods and settings that are chosen now; where tokens are drawn, with other noise.
function again(turn) {
  if (stopping || turn !== chat.turns.at(-1)) return;
  if (Number($("temperature").value) > 0 && $("seed").value !== "") $("seed").value = Number($("seed").value) + 1;
  chat.remove(turn);
  send(turn.question);
}

async function share(turn, from) {
  const link = await linkTo({ ...current(), turns: [turn.data] });
  if (link) copy(link, from);
  else flash(from, "too long, save it as a file");
}

function file(turns) {
  save(`semspec-${new Date().toISOString().slice(0, 10)}.md`, asMarkdown({ ...current(), turns }, menu.model));
}

const ACTIONS = [
  { text: "ask again", help: "The same question, with the methods and settings chosen now", act: again, last: true },
  { text: "copy link", help: "A link that holds this question and its answers", act: share },
  { text: "save", help: "This question and its answers as a Markdown file", act: (turn) => file([turn.data]) },
];

function tell(target) {
  const tip = $("tip");
  const token = target instanceof Element ? target.closest(".token[data-why]") : null;
  tip.hidden = !token;
  if (!token) return;
  tip.replaceChildren("relaxed: ", token.dataset.why);
  if (token.dataset.instead) {
    const instead = element("b", {}, JSON.stringify(token.dataset.instead));
    tip.append(element("br"), "the target would have written ", instead);
  }
  const place = token.getBoundingClientRect();
  const left = Math.min(Math.max(8, place.left), innerWidth - tip.offsetWidth - 8);
  const above = place.top - tip.offsetHeight - 6;
  tip.style.left = `${left}px`;
  tip.style.top = `${above > 4 ? above : place.bottom + 6}px`;
}

function submit() {
  const text = $("prompt").value.trim();
  if (!text || stopping || !chat) return;
  $("prompt").value = "";
  send(text);
}

$("composer").addEventListener("submit", (event) => {
  event.preventDefault();
  submit();
});
$("prompt").addEventListener("keydown", (event) => {
  if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
  event.preventDefault();
  submit();
});
document.addEventListener("keydown", (event) => {
  if (event.key !== "Escape") return;
  tell(null);
  stopping?.abort();
});
$("stop").onclick = () => stopping?.abort();
$("compare").onchange = arrange;
$("system").onchange = keep;
$("others").onclick = suggest;
$("save").onclick = () => file(current().turns);
$("clear").onclick = async () => {
  chat.load([]);
  keep();
  await suggest();
  settle();
  $("prompt").focus();
};
$("adopt").onclick = () => {
  history.replaceState(null, "", "/");
  show(current(), false);
  keep();
};
$("dismiss").onclick = () => {
  history.replaceState(null, "", "/");
  show(stored(menu.model), false);
};
$("fold").onclick = () => {
  const open = $("panel").classList.toggle("open");
  $("fold").setAttribute("aria-expanded", String(open));
};
$("theme").onclick = () => {
  const dark = matchMedia("(prefers-color-scheme: dark)").matches;
  const now = document.documentElement.dataset.theme ?? (dark ? "dark" : "light");
  document.documentElement.dataset.theme = setting("theme", now === "dark" ? "light" : "dark");
};
if (["light", "dark"].includes(setting("theme"))) document.documentElement.dataset.theme = setting("theme");
for (const kind of ["mouseover", "focusin"]) document.addEventListener(kind, (event) => tell(event.target));
document.addEventListener("focusout", () => tell(null));
$("talk").addEventListener("scroll", () => tell(document.activeElement)); // a token may be scrolled to by its focus
addEventListener("pagehide", keep); // an answer that is being written is kept as far as it is
addEventListener("hashchange", () => location.reload());
start();
