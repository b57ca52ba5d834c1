// Choosing a method: a rule, its own options, and how drafts are made. Everything comes from /v1/methods.
import { element } from "./element.js";

let made = 0;

export class Method {
  constructor(menu, preferred) {
    this.menu = menu;
    this.name = element("span");
    this.badge = element("span", { class: "badge" });
    this.about = element("p", { class: "about" });
    this.options = element("div", { class: "options" });
    this.rule = element("select", { "aria-label": "verifier", onchange: () => this.choose() });
    for (const rule of menu.verifiers) {
      const label = rule.name + (rule.allowed ? "" : " (needs --allow-lossy)");
      this.rule.append(element("option", { value: rule.name, disabled: !rule.allowed }, label));
    }
    this.rule.value = preferred;
    this.root = element(
      "details",
      { class: "method" },
      element("summary", {}, this.name, this.badge),
      this.rule,
      this.about,
      this.options,
    );
    this.choose();
  }

  get chosen() {
    return this.menu.verifiers.find((rule) => rule.name === this.rule.value);
  }

  choose() {
    const rule = this.chosen;
    this.values = {};
    this.about.textContent = rule.about;
    this.badge.textContent = rule.lossless ? "lossless" : "lossy";
    this.badge.classList.toggle("lossy", !rule.lossless);
    this.options.replaceChildren();
    if (rule.drafts) {
      const length = this.menu.default.num_draft_tokens;
      const initial = typeof length === "number" ? length : rule.num_draft_tokens;
      this.number({ name: "num_draft_tokens", type: "int", default: initial }, "draft length", 1, 24);
      this.choice("drafter", this.menu.drafters, this.menu.default.drafter);
    }
    for (const option of rule.options) {
      if (option.type === "int") this.number(option, option.name, 0, Math.max(16, 2 * option.default));
      else if (option.type === "float") this.number(option, option.name, 0, Math.max(1, 2 * option.default));
      else if (option.type === "bool") this.choice(option.name, ["true", "false"], String(option.default), JSON.parse);
      else this.text(option);
    }
    this.title();
  }

  set(name, value, initial) {
    if (value === initial) delete this.values[name];
    else this.values[name] = value;
    this.title();
  }

  title() {
    const own = Object.entries(this.values).map(([name, value]) => `${name} ${value}`);
    this.name.textContent = [this.rule.value, ...own].join(" · ");
  }

  number(option, label, low, high) {
    const id = `option-${++made}`;
    const step = option.type === "int" ? 1 : 0.01;
    const change = (input) => () => {
      const value = Number(input.value);
      if (input.value === "" || !Number.isFinite(value)) return;
      slider.value = field.value = input.value;
      this.set(option.name, value, option.default);
    };
    const slider = element("input", { type: "range", min: low, max: high, step, id });
    const field = element("input", { type: "number", step: option.type === "int" ? 1 : "any", "aria-label": label });
    slider.value = field.value = option.default;
    slider.oninput = change(slider);
    field.onchange = change(field);
    this.options.append(element("label", { htmlFor: id }, label), slider, field);
  }

  choice(name, values, initial, read = String) {
    const id = `option-${++made}`;
    const select = element("select", { id, class: "wide" });
    for (const value of values) select.append(element("option", { value }, value));
    select.value = initial;
    select.onchange = () => this.set(name, read(select.value), read(initial));
    this.options.append(element("label", { htmlFor: id }, name), select);
  }

  text(option) {
    const id = `option-${++made}`;
    const input = element("input", { id, class: "wide", value: option.default });
    input.onchange = () => this.set(option.name, input.value, option.default);
    this.options.append(element("label", { htmlFor: id }, option.name), input);
  }

  // What a request says about speculation.
  get request() {
    return { verifier: this.rule.value, ...this.values, trace: true };
  }
}
