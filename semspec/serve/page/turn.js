// A question with the answers of one or two methods, and how these compare.
import { Answer } from "./answer.js";
import { Chart } from "./chart.js";
import { button, element } from "./element.js";

const ALIKE = 1.05; // times as fast: less than this is the machine's doing

export class Turn {
  // actions: what the page does with a turn; called with it and the button
  constructor({ question, answers = [] }, actions) {
    this.question = question;
    this.answers = [];
    this.beside = element("div", { class: "answers" });
    this.verdict = element("p", { class: "verdict", role: "status" });
    this.chart = new Chart();
    this.drafts = element("div", { class: "drafts" });
    const title = element("summary", {}, "speed and drafts");
    this.detail = element("details", { class: "detail" }, title, this.chart.root, this.drafts);
    this.detail.ontoggle = () => this.chart.redraw();
    this.tools = element("div", { class: "tools" });
    for (const { text, help, act, last } of actions) {
      const made = button(text, help, () => act(this, made), last ? "quiet last" : "quiet");
      this.tools.append(made);
    }
    this.root = element(
      "article",
      { class: "turn" },
      element("p", { class: "question" }, question),
      this.beside,
      this.verdict,
      this.detail,
      this.tools,
    );
    for (const data of answers) this.add(new Answer(data));
  }

  add(answer) {
    this.answers.push(answer);
    this.beside.append(answer.root);
    this.drafts.append(answer.figures.histogram);
    return answer;
  }

  show(target) {
    for (const answer of this.answers) answer.show(target);
    this.verdict.textContent = this.compared();
    const lines = this.answers.map(({ data, speed, rate }) => {
      return { name: data.method.title, points: speed.points, overall: rate, seconds: data.figures.seconds };
    });
    if (this.detail.open) this.chart.draw(lines, target);
    else this.chart.last = [lines, target];
  }

  // The messages that a later question comes after; a question without an answer is left out.
  get messages() {
    const [answer] = this.answers;
    if (!answer || answer.data.state === "failed") return [];
    return [
      { role: "user", content: this.question },
      { role: "assistant", content: answer.content },
    ];
  }

  compared() {
    if (this.answers.length < 2 || this.answers.some(({ data }) => !["done", "length"].includes(data.state))) return "";
    return `${agreement(...this.answers)} ${pace(...this.answers)}`;
  }

  get data() {
    const kept = ({ data }) => ({ ...data, state: data.state === "writing" ? "stopped" : data.state });
    return { question: this.question, answers: this.answers.map(kept) };
  }
}

// Whether two answers agree: in their text, in what follows the thinking, or in the number that they end with.
export function agreement(one, two) {
  if (one.content === two.content) {
    const same = one.text("reasoning") === two.text("reasoning");
    return same ? "The same text, letter for letter." : "The same answer, after other thoughts.";
  }
  const last = ({ content }) => content.match(/-?\d[\d,]*(\.\d+)?/g)?.at(-1).replaceAll(",", "");
  const [first, second] = [last(one), last(two)];
  if (!first || !second) return "Different answers.";
  if (first === second) return `Different words, the same number: ${first}.`;
  return `Different answers: ${first} and ${second}.`;
}

function pace(one, two) {
  const [fast, slow] = one.rate >= two.rate ? [one, two] : [two, one];
  const [name, other] = [fast, slow].map(({ data }) => data.method.name);
  const lossy = [one, two].filter(({ data }) => data.figures.relaxed); // why they may differ, whichever was faster
  const told = lossy.map(({ data: { method, figures } }) => `${method.name} relaxed ${figures.relaxed} of ${figures.tokens} tokens`);
  const times = fast.rate / slow.rate;
  const faster = `${name} wrote ${times.toFixed(2)}× as many tokens a second as ${other}`;
  const equal = `${name} and ${other} wrote about as many tokens a second`; // nobody is the winner by a hundredth
  return [times < ALIKE ? equal : faster, ...told].join("; ") + ".";
}
