// One conversation with one method: its text by origin, and what it took.
import { element } from "./element.js";
import { Method } from "./method.js";
import { stream } from "./stream.js";

export class Lane {
  constructor(menu, preferred) {
    this.menu = menu;
    this.method = new Method(menu, preferred);
    this.talk = element("div", { class: "talk", tabIndex: 0, "aria-label": "conversation" });
    this.figures = new Figures(menu.target_seconds_per_token);
    this.root = element("section", { class: "lane" }, this.method.root, this.talk, this.figures.root);
    this.clear();
  }

  clear() {
    this.messages = [];
    this.talk.replaceChildren(element("p", { class: "empty" }, "No messages yet."));
    this.figures.reset();
  }

  // Says something and writes the answer as it comes. Returns what it took, or null if it failed.
  async ask(text, settings, signal) {
    this.talk.querySelector(".empty")?.remove();
    this.talk.append(element("p", { class: "message user" }, text));
    const answer = new Answer();
    this.talk.append(answer.root);
    this.figures.begin();
    const messages = [...this.messages, { role: "user", content: text }];
    const body = { ...settings, model: this.menu.model, messages, speculation: this.method.request };
    try {
      await stream(body, signal, (chunk) => {
        for (const choice of chunk.choices) {
          if (!choice.trace) continue;
          answer.add(choice.trace);
          this.figures.round(choice.trace);
        }
        if (chunk.metrics) this.figures.end(chunk.metrics, chunk.usage);
      });
      this.messages = [...messages, { role: "assistant", content: answer.content }];
      return this.figures.outcome;
    } catch (error) {
      const stopped = error.name === "AbortError";
      answer.root.append(element("p", { class: "error" }, stopped ? "stopped" : error.message));
      this.figures.fail();
      return null;
    } finally {
      answer.root.classList.remove("writing");
    }
  }
}

class Answer {
  constructor() {
    this.content = "";
    this.channels = {};
    this.why = new Map();
    this.held = []; // blank text that is shown only if something follows
    this.root = element("div", { class: "message writing" });
  }

  add(trace) {
    for (const relaxed of trace.relaxed) this.why.set(relaxed.token, relaxed);
    for (const { text, origin, channel, token } of trace.spans) {
      const span = element("span", { class: `token ${origin}` }, text);
      if (origin === "relaxed") this.explain(span, this.why.get(token));
      if (channel === "content") this.content += text;
      if (!this.channels[channel]) this.held = []; // nor is it shown at the beginning
      if (!text.trim()) {
        this.held.push(span);
        continue;
      }
      if (!this.channels[channel]) span.textContent = text.trimStart();
      this.place(channel).append(...this.held.splice(0), span);
    }
  }

  place(channel) {
    if (!this.channels[channel]) {
      const thinking = channel === "reasoning";
      const box = element("div", { class: thinking ? "thinking" : "answer" });
      if (thinking) box.append(element("span", { class: "name" }, "thinking"));
      this.root.append(box);
      this.channels[channel] = box;
    }
    return this.channels[channel];
  }

  explain(span, why) {
    if (!why) return;
    span.tabIndex = 0;
    span.dataset.why = why.why || "the rule accepts it";
    span.dataset.instead = why.instead ?? "";
    span.setAttribute("aria-describedby", "tip");
  }
}

const ROWS = { tokens: "tokens", passes: "tokens per target pass", accepted: "draft tokens accepted", seconds: "seconds", saved: "seconds saved" };

class Figures {
  constructor(targetSeconds) {
    this.targetSeconds = targetSeconds; // for a token, without drafts
    this.fields = {};
    const list = element("dl");
    for (const [name, title] of Object.entries(ROWS)) {
      this.fields[name] = element("dd", { "data-figure": name }, "–");
      list.append(element("div", {}, element("dt", {}, title), this.fields[name]));
    }
    this.fields.saved.title = "against the target alone, at the speed measured when the server started";
    this.bars = element("div", { class: "bars", role: "img" });
    const caption = element("figcaption", {}, "draft tokens accepted in a round → rounds");
    this.root = element("div", { class: "figures" }, list, element("figure", { class: "histogram" }, this.bars, caption));
    this.reset();
  }

  reset() {
    this.counts = [];
    this.tokens = this.passes = this.drafted = this.accepted = 0;
    this.outcome = null;
    for (const field of Object.values(this.fields)) field.textContent = "–";
    this.bars.replaceChildren();
  }

  begin() {
    this.reset();
    this.began = performance.now();
  }

  round({ tokens, drafted, accepted }) {
    this.tokens += tokens;
    this.passes += drafted ? 1 : tokens;
    this.drafted += drafted;
    this.accepted += accepted;
    if (drafted) {
      while (this.counts.length <= drafted) this.counts.push(0);
      this.counts[accepted] += 1;
    }
    this.show((performance.now() - this.began) / 1000);
  }

  end(metrics, usage) {
    const told = metrics.speculative_decoding;
    const seconds = metrics.generation_time_ms / 1000;
    this.passes = told.num_target_passes;
    this.show(seconds);
    this.outcome = { seconds, tokens: usage.completion_tokens, verifier: told.verifier, relaxed: told.relaxed_tokens };
  }

  fail() {
    this.outcome = null;
  }

  show(seconds) {
    const saved = this.tokens * this.targetSeconds - seconds;
    this.fields.tokens.textContent = this.tokens;
    this.fields.passes.textContent = this.passes ? (this.tokens / this.passes).toFixed(2) : "–";
    this.fields.accepted.textContent = this.drafted ? `${Math.round((100 * this.accepted) / this.drafted)} %` : "–";
    this.fields.seconds.textContent = seconds.toFixed(2);
    this.fields.saved.textContent = `${saved < 0 ? "−" : ""}${Math.abs(saved).toFixed(2)}`;
    this.draw();
  }

  draw() {
    const most = Math.max(1, ...this.counts);
    while (this.bars.children.length < this.counts.length) {
      this.bars.append(element("div", {}, element("i"), String(this.bars.children.length)));
    }
    this.counts.forEach((count, i) => {
      const bar = this.bars.children[i];
      bar.title = `${i} accepted: ${count} rounds`;
      bar.firstChild.style.height = `${Math.round((70 * count) / most)}%`;
    });
    const counts = this.counts.map((count, i) => `${i}: ${count}`).join(", ");
    this.bars.setAttribute("aria-label", `rounds by draft tokens accepted: ${counts}`);
  }
}
