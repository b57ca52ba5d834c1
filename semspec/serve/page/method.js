// Choosing a method: a rule, its own options, and how drafts are made. Everything comes from /v1/methods.
import { element } from "./element.js";

let made = 0;
const GROUPS = [
  ["Lossless", (rule) => rule.lossless],
  ["Lossy, token by token", (rule) => !rule.lossless && !rule.control && rule.unit === "token"],
  ["Lossy, whole reasoning steps", (rule) => !rule.lossless && !rule.control && rule.unit === "step"],
  ["Controls, to compare with", (rule) => rule.control],
];

export class Method {
  constructor(menu, preferred, legend) {
    this.menu = menu;
    this.badge = element("span", { class: "badge" });
    this.about = element("span");
    this.main = element("div", { class: "options" });
    this.rest = element("div", { class: "options" });
    this.more = element("details", { class: "more" }, element("summary", {}, "More options"), this.rest);
    this.rule = element("select", { class: "rule", "aria-label": "verifier", onchange: () => this.choose() });
    for (const [name, belongs] of GROUPS) {
      const group = element("optgroup", { label: name });
      for (const rule of menu.verifiers.filter(belongs)) group.append(this.choice(rule));
      if (group.children.length) this.rule.append(group);
    }
    this.rule.value = preferred;
    this.root = element(
      "fieldset",
      { class: "method" },
      element("legend", {}, legend),
      this.rule,
      element("p", { class: "about" }, this.badge, this.about),
      element("div", { class: "foldable" }, this.main, this.more),
    );
    this.choose();
  }

  choice(rule) {
    const draftless = rule.unit === "step" && !this.menu.has_draft_model;
    const missing = !rule.allowed ? ", needs --allow-lossy" : draftless ? ", needs a draft model" : "";
    const label = rule.title === rule.name ? rule.name : `${rule.title} (${rule.name})`;
    return element("option", { value: rule.name, disabled: Boolean(missing) }, label + missing);
  }

  get chosen() {
    return this.menu.verifiers.find((rule) => rule.name === this.rule.value);
  }

  choose() {
    const rule = this.chosen;
    this.values = {};
    this.labels = {};
    this.about.textContent = rule.about && ` ${rule.about[0].toUpperCase()}${rule.about.slice(1)}.`;
    this.badge.textContent = rule.lossless ? "lossless" : "lossy";
    this.badge.classList.toggle("lossy", !rule.lossless);
    this.main.replaceChildren();
    this.rest.replaceChildren();
    if (rule.drafts) {
      const { draft_lengths: words, drafters, default: own } = this.menu;
      const unset = String(own.num_draft_tokens ?? rule.num_draft_tokens);
      const main = rule.unit === "token";
      this.add({ name: "num_draft_tokens", label: "draft length", unset, words, main });
      this.add({ name: "drafter", label: "who drafts", choices: drafters, default: own.drafter });
    }
    for (const option of rule.options) this.add(option);
    this.more.hidden = !this.rest.children.length;
  }

  add(option) {
    const id = `option-${++made}`;
    const field = this.field(option, id);
    const box = element("div", { class: "option" }, element("label", { htmlFor: id }, option.label), ...field);
    this.labels[option.name] = option.label;
    (option.main ? this.main : this.rest).append(box);
  }

  field(option, id) {
    if (option.choices) return [this.select(option, id, option.choices, String)];
    if (option.type === "bool") return [this.select(option, id, ["true", "false"], (text) => text === "true")];
    if (option.unset !== undefined) return this.unset(option, id);
    return option.type === "str" ? [this.text(option, id)] : this.number(option, id);
  }

  set(name, value, initial) {
    if (value === initial) delete this.values[name];
    else this.values[name] = value;
  }

  select(option, id, values, read) {
    const names = { true: "yes", false: "no" };
    const choices = values.map((value) => element("option", { value }, names[value] ?? value));
    const made = element("select", { id }, ...choices);
    made.value = String(option.default);
    made.onchange = () => this.set(option.name, read(made.value), option.default);
    return made;
  }

  // Empty, it means what its placeholder says.
  unset(option, id) {
    const made = element("input", { id, placeholder: option.unset, autocomplete: "off" });
    made.onchange = () => {
      const text = made.value.trim();
      const value = text === "" ? undefined : Number.isFinite(Number(text)) ? Number(text) : text;
      this.set(option.name, value, undefined);
    };
    if (!option.words) return [made];
    made.setAttribute("list", `${id}-words`);
    const words = option.words.map((value) => element("option", { value }));
    return [made, element("datalist", { id: `${id}-words` }, ...words)];
  }

  text(option, id) {
    const made = element("input", { id, value: option.default, class: "long" });
    made.onchange = () => this.set(option.name, made.value, option.default);
    return made;
  }

  number(option, id) {
    const whole = option.type === "int";
    const high = Math.max(whole ? 16 : 1, 2 * option.default);
    const range = { type: "range", min: 0, max: high, step: whole ? 1 : 0.01 };
    const slider = element("input", { ...range, "aria-label": `${option.label}, slider` });
    const field = element("input", { type: "number", step: whole ? 1 : "any", id });
    slider.value = field.value = option.default;
    const take = (input) => () => {
      const value = Number(input.value);
      if (input.value === "" || !Number.isFinite(value)) return;
      slider.value = field.value = input.value;
      this.set(option.name, value, option.default);
    };
    slider.oninput = take(slider);
    field.onchange = take(field);
    return [slider, field];
  }

  // How an answer says what wrote it.
  get description() {
    const own = Object.entries(this.values).map(([name, value]) => `${this.labels[name]} ${value}`);
    const { name, title, lossless } = this.chosen;
    return { name, title, own: own.join(", "), lossless };
  }

  // What a request says about speculation.
  get request() {
    return { verifier: this.rule.value, ...this.values, trace: true };
  }
}
