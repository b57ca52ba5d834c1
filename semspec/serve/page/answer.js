// One answer by one method: its text by origin, as it comes, and what it took.
import { Speed } from "./chart.js";
import { button, copy, element } from "./element.js";
import { EMPTY, Figures, count } from "./figures.js";
import { textOf } from "./keep.js";
import { Markdown, Piece } from "./markdown.js";
import { stream } from "./stream.js";

const CHANNELS = ["reasoning", "content"];

export class Answer {
  // data, as it is stored: method, spans, state, note, figures, points
  constructor(data) {
    this.data = { spans: [], state: "writing", note: "", points: [], ...data };
    this.data.figures = { ...EMPTY, counts: [], ...data.figures };
    this.speed = new Speed(this.data.points);
    this.figures = new Figures();
    this.parts = {};
    this.body = element("div", { class: "text" });
    this.note = element("p", { class: "note" });
    this.root = element("section", { class: "answer" }, this.head(), this.body, this.note, this.figures.root);
  }

  head() {
    const { title, name, own, lossless } = this.data.method;
    const kind = element("span", { class: `badge${lossless ? "" : " lossy"}` }, lossless ? "lossless" : "lossy");
    const take = button("copy", "Copy the answer as written, without its thinking", () => copy(this.content, take));
    const words = element("span", { class: "by", title: name }, title, own ? element("small", {}, ` ${own}`) : "");
    return element("header", {}, words, kind, take);
  }

  text(channel) {
    return textOf(this.data.spans, channel);
  }

  get content() {
    return this.text("content").trim();
  }

  get rate() {
    const { tokens, seconds } = this.data.figures;
    return seconds ? tokens / seconds : 0;
  }

  // Asks, and follows the answer to its end. Every change calls `changed`.
  async ask(body, signal, changed) {
    const began = performance.now();
    const now = () => (performance.now() - began) / 1000;
    const { data } = this;
    let first = null;
    try {
      await stream(body, signal, (chunk) => {
        for (const choice of chunk.choices) {
          if (choice.finish_reason) data.state = choice.finish_reason === "stop" ? "done" : choice.finish_reason;
          if (!choice.trace) continue;
          first ??= now();
          this.add(choice.trace);
          count(data.figures, choice.trace, now());
          this.speed.round(now() - first, choice.trace.tokens);
        }
        if (chunk.metrics) this.conclude(chunk.metrics);
        changed();
      });
      const where = `${this.content ? "" : "inside its thinking "}at ${body.max_tokens} tokens`;
      if (data.state === "length") data.note = `Cut off ${where}: allow a longer answer and ask again.`;
    } catch (error) {
      data.state = error.name === "AbortError" ? "stopped" : "failed";
      data.note = data.state === "stopped" ? "Stopped." : error.message;
    }
    data.points = this.speed.points;
    changed();
  }

  add(trace) {
    const why = new Map(trace.relaxed.map((relaxed) => [relaxed.token, relaxed]));
    for (const { text, origin, channel, token } of trace.spans) {
      const span = { text, origin, channel };
      const last = this.data.spans.at(-1);
      if (origin === "relaxed") {
        span.why = why.get(token)?.why || "the rule accepts it";
        span.instead = why.get(token)?.instead;
      } else if (last?.origin === origin && last.channel === channel) {
        last.text += text;
        continue;
      }
      this.data.spans.push(span);
    }
  }

  conclude({ generation_time_ms: took, speculative_decoding: told }) {
    const { figures } = this.data;
    figures.seconds = took / 1000;
    figures.passes = told.num_target_passes;
    figures.relaxed = told.relaxed_tokens;
  }

  show(target) {
    const { spans, state, note, figures } = this.data;
    for (const channel of CHANNELS) {
      const text = this.text(channel);
      if (text.trim()) this.part(channel).update(this.piece(text, spans, channel));
    }
    this.root.classList.toggle("writing", state === "writing");
    this.note.textContent = note;
    this.note.classList.toggle("error", state === "failed");
    this.figures.show(figures, target);
  }

  piece(text, spans, channel) {
    const owners = [];
    spans.forEach((span, i) => {
      if (span.channel === channel) for (let n = span.text.length; n > 0; n -= 1) owners.push(i);
    });
    return new Piece(text, owners);
  }

  part(channel) {
    if (!this.parts[channel]) {
      const box = element("div", { class: "markdown" });
      const thinking = element("details", { class: "thinking", open: true }, element("summary", {}, "thinking"), box);
      this.body.append(channel === "reasoning" ? thinking : box);
      this.parts[channel] = new Markdown(box, (piece) => this.leaf(piece));
    }
    return this.parts[channel];
  }

  // Plain text as one element per run of tokens with the same origin.
  leaf({ text, owners }) {
    const nodes = [];
    for (let from = 0, to = 0; from < text.length; from = to) {
      while (to < text.length && owners[to] === owners[from]) to += 1;
      nodes.push(this.token(this.data.spans[owners[from]], text.slice(from, to)));
    }
    return nodes;
  }

  token({ origin, why, instead }, text) {
    const made = element("span", { class: `token ${origin}` }, text);
    if (origin === "relaxed") {
      made.tabIndex = 0;
      made.dataset.why = why;
      made.dataset.instead = instead ?? "";
      made.setAttribute("aria-describedby", "tip");
    }
    return made;
  }
}
