// Tokens a second while an answer is written, one line a method, beside the target alone.
import { element, svg } from "./element.js";

const HEIGHT = 132;
const EDGE = { top: 10, right: 8, bottom: 20, left: 34 };
const ROUNDS = 6; // over which a speed is taken
const APART = 0.02; // seconds between two points at least: rounds may arrive together
const FEWEST = 4; // points of a line
const POINTS = 80; // kept of an answer

// The speed so far, from when rounds came and how many tokens each brought.
export class Speed {
  constructor(points = []) {
    this.points = points; // [seconds, tokens a second]
    this.rounds = [];
  }

  round(seconds, tokens) {
    this.rounds.push([seconds, tokens]);
    if (this.rounds.length > ROUNDS + 1) this.rounds.shift();
    const [[from], ...rest] = this.rounds;
    const took = seconds - from;
    if (!rest.length || took < APART || seconds - (this.points.at(-1)?.[0] ?? -1) < APART) return;
    const written = rest.reduce((sum, [, count]) => sum + count, 0);
    this.points.push([seconds, written / took].map((x) => Math.round(100 * x) / 100));
    if (this.points.length > 2 * POINTS) this.points = this.points.filter((_, i) => i % 2);
  }
}

export class Chart {
  constructor() {
    this.picture = svg("svg", { role: "img" });
    this.key = element("figcaption");
    this.root = element("figure", { class: "chart" }, this.picture, this.key);
  }

  // lines: [{name, points, overall, seconds}], target: tokens a second without drafts
  draw(lines, target) {
    this.last = [lines, target];
    const width = Math.max(240, this.root.clientWidth);
    const drawn = lines.map(shown);
    const longest = Math.max(0.1, ...drawn.flatMap((points) => points.map(([seconds]) => seconds)));
    const highest = nice(1.1 * Math.max(target, ...drawn.flatMap((points) => points.map(([, rate]) => rate))));
    const x = (seconds) => EDGE.left + (seconds / longest) * (width - EDGE.left - EDGE.right);
    const y = (rate) => HEIGHT - EDGE.bottom - (rate / highest) * (HEIGHT - EDGE.top - EDGE.bottom);
    const made = [];
    for (const rate of [0, highest / 2, highest]) {
      made.push(svg("path", { class: "grid", d: `M${EDGE.left} ${y(rate)}H${width - EDGE.right}` }));
      made.push(svg("text", { x: EDGE.left - 6, y: y(rate) + 3.5, "text-anchor": "end" }, short(rate)));
    }
    made.push(svg("text", { x: width - EDGE.right, y: HEIGHT - 5, "text-anchor": "end" }, `${longest.toFixed(1)} s`));
    made.push(svg("text", { x: EDGE.left, y: HEIGHT - 5 }, "0"));
    made.push(svg("path", { class: "alone", d: `M${EDGE.left} ${y(target)}H${width - EDGE.right}` }));
    for (const [i, points] of drawn.entries()) {
      const places = points.map(([seconds, rate]) => `${x(seconds).toFixed(1)} ${y(rate).toFixed(1)}`);
      if (places.length > 1) made.push(svg("path", { class: `line line-${i}`, d: `M${places.join("L")}` }));
    }
    this.picture.setAttribute("viewBox", `0 0 ${width} ${HEIGHT}`);
    this.picture.replaceChildren(...made);
    const told = lines.map((line, i) => [`line-${i}`, line.name, line.overall]);
    told.push(["alone", "target only", target]);
    const words = told.map(([kind, name, rate]) => [kind, rate ? `${name} ${short(rate)}` : name]);
    const key = words.map(([kind, text]) => element("span", { class: kind }, text));
    this.key.replaceChildren("tokens a second: ", ...key);
    this.picture.setAttribute("aria-label", `tokens a second: ${words.map(([, text]) => text).join(", ")}`);
  }

  redraw() {
    if (this.last) this.draw(...this.last);
  }
}

// An answer of few rounds has hardly a course: its overall speed stands for it.
function shown({ points, overall, seconds }) {
  if (points.length >= FEWEST || !overall) return points;
  return [0, seconds].map((at) => [at, overall]);
}

const short = (rate) => (rate >= 20 || Number.isInteger(rate) ? String(Math.round(rate)) : rate.toFixed(1));

function nice(value) {
  const unit = 10 ** Math.floor(Math.log10(value));
  return [1, 1.2, 1.6, 2, 2.4, 3, 4, 5, 6, 8, 10].find((times) => times * unit >= value) * unit;
}
