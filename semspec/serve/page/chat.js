// The conversation: turns, what the model gets to see of them, and the place on the screen.
import { Answer } from "./answer.js";
import { Turn } from "./turn.js";

const NEAR = 60; // pixels from the end at which the view follows it

export class Chat {
  // talk scrolls and holds the turns; changed is called when there is something to keep
  constructor({ talk, turns, latest, menu, actions, changed }) {
    Object.assign(this, { talk, place: turns, latest, menu, actions, changed });
    this.turns = [];
    this.target = 1 / menu.target_seconds_per_token; // tokens a second of the target alone, the latest that is known
    this.following = true;
    this.drawing = 0;
    this.before = 0; // where the view was: a reader who scrolls up is above it, text that comes leaves it where it is
    talk.addEventListener("scroll", () => {
      if (this.distance() < NEAR) this.following = true;
      else if (talk.scrollTop < this.before) this.following = false;
      this.before = talk.scrollTop;
      this.latest.hidden = this.following;
    });
    latest.onclick = () => this.follow();
    const watch = new ResizeObserver(() => requestAnimationFrame(() => this.resized()));
    for (const place of [talk, turns]) watch.observe(place);
  }

  resized() {
    if (this.width !== this.talk.clientWidth) for (const turn of this.turns) turn.chart.redraw();
    this.width = this.talk.clientWidth;
    this.keepUp();
  }

  distance() {
    return this.talk.scrollHeight - this.talk.scrollTop - this.talk.clientHeight;
  }

  follow() {
    this.following = true;
    this.keepUp();
  }

  keepUp() {
    if (this.following && this.turns.length) {
      this.talk.scrollTop = this.talk.scrollHeight;
      this.before = this.talk.scrollTop; // perhaps further up, where an earlier turn was folded: nobody has scrolled
    }
    this.latest.hidden = this.following;
  }

  load(turns) {
    this.turns = turns.map((data) => new Turn(data, this.actions));
    this.place.replaceChildren(...this.turns.map((turn) => turn.root));
    for (const turn of this.turns) turn.show(this.target);
    this.follow();
  }

  // Asks all methods one after the other, so that neither slows the other down; all of them see the same history.
  // A model without a chat template goes on from the text instead.
  async ask(question, { methods, settings, system, remember, plain }, signal) {
    const before = remember ? this.turns.flatMap((turn) => turn.messages) : [];
    const prompt = system ? [{ role: "system", content: system }] : [];
    const messages = [...prompt, ...before, { role: "user", content: question }];
    const said = plain ? { prompt: messages.map(({ content }) => content).join("") } : { messages };
    const turn = new Turn({ question }, this.actions);
    for (const former of this.turns) former.detail.open = false;
    turn.detail.open = !matchMedia("(max-width: 60rem)").matches; // on a phone it would hide the answer
    this.turns.push(turn);
    this.place.append(turn.root);
    this.follow();
    for (const method of methods) {
      if (signal.aborted) break;
      const answer = turn.add(new Answer({ method: method.description }));
      const body = { ...settings, model: this.menu.model, ...said, speculation: method.request };
      await answer.ask(body, signal, () => this.draw(turn));
      this.learn(answer);
      this.draw(turn, true);
      this.changed();
    }
    return turn;
  }

  remove(turn) {
    this.turns = this.turns.filter((other) => other !== turn);
    turn.root.remove();
  }

  // What the target alone does now says more than what it did when the server started.
  learn({ data, rate }) {
    if (!data.figures.drafted && data.state !== "failed" && data.figures.tokens >= 16) this.target = rate;
  }

  // At most once a frame, however fast rounds come.
  draw(turn, now = false) {
    const paint = () => {
      this.drawing = 0;
      turn.show(this.target);
      this.keepUp();
    };
    if (now) {
      cancelAnimationFrame(this.drawing);
      paint();
    } else this.drawing ||= requestAnimationFrame(paint);
  }
}
