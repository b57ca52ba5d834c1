// What an answer took: a row of figures, and how many draft tokens its rounds accepted.
import { element } from "./element.js";

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
    const caption = element("figcaption", {}, "rounds by draft tokens accepted");
    this.histogram = element("figure", { class: "histogram" }, this.bars, caption);
    this.root = element("div", { class: "figures" }, list);
  }

  // target: tokens a second without drafts
  show(figures, target) {
    const { tokens, seconds, passes, drafted, accepted, counts } = figures;
    const rate = seconds ? tokens / seconds : 0;
    const texts = {
      tokens,
      seconds: seconds.toFixed(2),
      rate: rate ? rate.toFixed(1) : "–",
      times: rate && target ? `${(rate / target).toFixed(2)}×` : "–",
      passes: passes ? (tokens / passes).toFixed(2) : "–",
      accepted: drafted ? `${Math.round((100 * accepted) / drafted)} %` : "–",
    };
    for (const [name, text] of Object.entries(texts)) this.fields[name].textContent = text;
    this.draw(counts);
  }

  draw(counts) {
    const most = Math.max(1, ...counts);
    this.histogram.hidden = !counts.length;
    while (this.bars.children.length < counts.length) {
      this.bars.append(element("div", {}, element("i"), String(this.bars.children.length)));
    }
    counts.forEach((count, i) => {
      const bar = this.bars.children[i];
      bar.title = `${i} accepted: ${count} rounds`;
      bar.firstChild.style.height = `${Math.round((70 * count) / most)}%`;
    });
    const list = counts.map((count, i) => `${i}: ${count}`).join(", ");
    this.bars.setAttribute("aria-label", `rounds by draft tokens accepted: ${list}`);
  }
}
