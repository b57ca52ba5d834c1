// What an answer took: a row of figures, and how many draft tokens its rounds accepted.
import { element } from "./element.js";

const MOST_BARS = 20; // as many as a phone has room for, each with a number under it,
const MOST_WIDE_BARS = 12; // and where these have three digits

const ROWS = {
  tokens: "tokens",
  seconds: "seconds",
  rate: "tokens a second",
  times: "times the target",
  passes: "tokens per target pass",
  accepted: "draft tokens accepted",
};

export const EMPTY = { tokens: 0, passes: 0, drafted: 0, accepted: 0, relaxed: 0, seconds: 0, counts: [] };

export function count(figures, { tokens, drafted, accepted }, seconds) {
  figures.tokens += tokens;
  figures.passes += drafted ? 1 : tokens;
  figures.drafted += drafted;
  figures.accepted += accepted;
  figures.seconds = seconds;
  if (!drafted) return;
  while (figures.counts.length <= drafted) figures.counts.push(0);
  figures.counts[accepted] += 1;
}

export class Figures {
  constructor() {
    this.fields = {};
    const list = element("dl");
    for (const [name, title] of Object.entries(ROWS)) {
      this.fields[name] = element("dd", { "data-figure": name }, "–");
      list.append(element("div", {}, element("dt", {}, title), this.fields[name]));
    }
    this.bars = element("div", { class: "bars", role: "img" });
    this.caption = element("figcaption");
    this.histogram = element("figure", { class: "histogram" }, this.bars, this.caption);
    this.root = element("div", { class: "figures" }, list);
  }

  // target: tokens a second without drafts; an answer without any is the target's alone, whatever slows it down
  show(figures, target) {
    const { tokens, seconds, passes, drafted, accepted, counts } = figures;
    const rate = seconds ? tokens / seconds : 0;
    const texts = {
      tokens,
      seconds: seconds.toFixed(2),
      rate: rate ? rate.toFixed(1) : "–",
      times: rate && !drafted ? "1.00×" : rate && target ? `${(rate / target).toFixed(2)}×` : "–",
      passes: passes ? (tokens / passes).toFixed(2) : "–",
      accepted: drafted ? `${Math.round((100 * accepted) / drafted)} %` : "–",
    };
    for (const [name, text] of Object.entries(texts)) this.fields[name].textContent = text;
    this.draw(counts);
  }

  // Long drafts have more numbers than there is room for: after 0, a bar is then several of them.
  draw(counts) {
    const room = counts.length > 100 ? MOST_WIDE_BARS : MOST_BARS;
    const wide = Math.max(1, Math.ceil((counts.length - 1) / (room - 1)));
    const starts = counts.map((_, i) => i).filter((i) => i === 0 || (i - 1) % wide === 0);
    const heights = starts.map((from) => sum(counts.slice(from, from ? from + wide : 1)));
    const most = Math.max(1, ...heights);
    this.histogram.hidden = !counts.length;
    this.caption.textContent = `rounds by draft tokens accepted${wide > 1 ? `: 0, then ${wide} numbers a bar` : ""}`;
    this.bars.replaceChildren(...starts.map((from, i) => bar(from, from ? wide : 1, heights[i], most)));
    const list = counts.map((count, i) => `${i}: ${count}`).join(", ");
    this.bars.setAttribute("aria-label", `rounds by draft tokens accepted: ${list}`);
  }
}

const sum = (counts) => counts.reduce((total, count) => total + count, 0);

function bar(from, wide, count, most) {
  const made = element("div", {}, element("i"), String(from));
  made.title = `${wide > 1 ? `${from} to ${from + wide - 1}` : from} accepted: ${count} rounds`;
  made.firstChild.style.height = `${Math.round((70 * count) / most)}%`;
  return made;
}
