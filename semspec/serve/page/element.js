// Elements by description. Text is always set as text, so nothing a model writes can become markup.
export function element(tag, properties = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(properties)) {
    if (name === "class") made.className = value;
    else if (name in made) made[name] = value;
    else made.setAttribute(name, value);
  }
  made.append(...children);
  return made;
}

export function svg(tag, properties = {}, ...children) {
  const made = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(properties)) made.setAttribute(name, value);
  made.append(...children);
  return made;
}

export function button(text, help, onclick, kind = "quiet") {
  return element("button", { type: "button", class: kind, title: help, onclick }, text);
}

// Puts a text on the clipboard, and says so on the button. Without a secure context there is the older way only.
export async function copy(text, from) {
  try {
    await navigator.clipboard.writeText(text);
  } catch {
    const field = element("textarea", { value: text, class: "hidden" });
    document.body.append(field);
    field.select();
    document.execCommand("copy");
    field.remove();
  }
  flash(from, "copied");
}

export function flash(on, word) {
  if (on.dataset.flash) return;
  const before = on.textContent;
  on.dataset.flash = on.textContent = word;
  setTimeout(() => {
    on.textContent = before;
    delete on.dataset.flash;
  }, 1200);
}
