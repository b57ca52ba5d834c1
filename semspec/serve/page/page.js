// The page: one or two lanes, a composer, and a tip that says why a relaxed token was accepted.
import { element } from "./element.js";
import { Lane } from "./lane.js";

const $ = (id) => document.getElementById(id);
const EXAMPLES = [
  "Mia has 4 bags with 6 pens each. Tom has 5 more pens than Mia. How many pens does Tom have?",
  "Ana has 12 books. Ben has 3 times as many books as Ana. How many books do Ana and Ben have together?",
];
let lanes = [];
let menu;
let stopping = null;
let shown = 0;

async function start() {
  for (;;) {
    try {
      const health = await (await fetch("/health")).json();
      $("model").textContent = health.status;
      if (health.status === "ready") break;
    } catch {
      $("model").textContent = "the server cannot be reached";
    }
    await new Promise((resolve) => setTimeout(resolve, 700));
  }
  const response = await fetch("/v1/methods");
  if (!response.ok) {
    $("model").textContent = "this server needs an API key; reload the page and give it as the password";
    return;
  }
  menu = await response.json();
  const kind = menu.allow_lossy ? "lossy rules allowed" : "lossless rules only";
  const pace = (1000 * menu.target_seconds_per_token).toFixed(1);
  $("model").textContent = `${menu.model} · ${kind} · target alone ${pace} ms a token`;
  lanes = [new Lane(menu, menu.default.verifier), new Lane(menu, other())];
  arrange();
}

// What to show beside the default: a loose rule where one is allowed, else the target alone.
function other() {
  const loose = menu.verifiers.find((rule) => rule.allowed && !rule.lossless);
  return loose ? loose.name : "none";
}

function arrange() {
  $("lanes").replaceChildren(...lanes.slice(0, $("compare").checked ? 2 : 1).map((lane) => lane.root));
  $("comparison").textContent = "";
}

async function send() {
  const text = $("prompt").value.trim();
  if (!text || stopping || !menu) return;
  $("prompt").value = "";
  stopping = new AbortController();
  busy(true);
  const settings = { temperature: Number($("temperature").value), max_tokens: Number($("longest").value) };
  if ($("seed").value !== "") settings.seed = Number($("seed").value);
  const outcomes = [];
  // One after the other, so that neither slows the other down.
  for (const lane of lanes.slice(0, $("compare").checked ? 2 : 1)) {
    if (stopping.signal.aborted) break;
    outcomes.push(await lane.ask(text, settings, stopping.signal));
  }
  stopping = null;
  busy(false);
  compare(outcomes);
  $("prompt").focus();
}

function compare(outcomes) {
  if (outcomes.length < 2 || outcomes.includes(null)) return;
  const [one, two] = outcomes;
  const rates = outcomes.map((o) => o.tokens / o.seconds);
  const [fast, slow] = rates[0] >= rates[1] ? [one, two] : [two, one];
  const times = (Math.max(...rates) / Math.min(...rates)).toFixed(2);
  const titles = lanes.map((lane) => lane.method.name.textContent);
  const name = (outcome) => titles[outcome === one ? 0 : 1];
  const relaxed = fast.relaxed ? `, with ${fast.relaxed} of ${fast.tokens} tokens relaxed` : "";
  $("comparison").textContent = `${name(fast)} wrote ${times}× as many tokens a second as ${name(slow)}${relaxed}.`;
}

function busy(on) {
  $("send").hidden = on;
  $("stop").hidden = !on;
  for (const id of ["compare", "clear"]) $(id).disabled = on;
  if (on) $("comparison").textContent = "";
}

function tell(target) {
  const tip = $("tip");
  const token = target instanceof Element ? target.closest(".token[data-why]") : null;
  tip.hidden = !token;
  if (!token) return;
  tip.replaceChildren("relaxed: ", token.dataset.why);
  if (token.dataset.instead) {
    tip.append(element("br"), "the target would have written ", element("b", {}, JSON.stringify(token.dataset.instead)));
  }
  const place = token.getBoundingClientRect();
  const left = Math.min(Math.max(8, place.left), innerWidth - tip.offsetWidth - 8);
  const above = place.top - tip.offsetHeight - 6;
  tip.style.left = `${left}px`;
  tip.style.top = `${above > 4 ? above : place.bottom + 6}px`;
}

$("composer").addEventListener("submit", (event) => {
  event.preventDefault();
  send();
});
$("prompt").addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
    event.preventDefault();
    send();
  }
});
document.addEventListener("keydown", (event) => {
  if (event.key !== "Escape") return;
  tell(null);
  stopping?.abort();
});
$("stop").onclick = () => stopping?.abort();
$("compare").onchange = arrange;
$("clear").onclick = () => {
  for (const lane of lanes) lane.clear();
  $("comparison").textContent = "";
  $("prompt").focus();
};
$("example").onclick = () => {
  $("prompt").value = EXAMPLES[shown++ % EXAMPLES.length];
  $("prompt").focus();
};
$("theme").onclick = () => {
  const dark = matchMedia("(prefers-color-scheme: dark)").matches;
  const now = document.documentElement.dataset.theme ?? (dark ? "dark" : "light");
  localStorage.theme = document.documentElement.dataset.theme = now === "dark" ? "light" : "dark";
};
if (localStorage.theme) document.documentElement.dataset.theme = localStorage.theme;
for (const kind of ["mouseover", "focusin"]) document.addEventListener(kind, (event) => tell(event.target));
document.addEventListener("focusout", () => tell(null));
start();
