// Markdown as elements. A piece is a text and, for each of its characters, the token it belongs to; `leaf` turns a
// piece of plain text into nodes. Nothing is loaded: an image is shown as a link, and only web and mail addresses are
// links.
import { button, copy, element } from "./element.js";

const DEEPEST = 6; // lists and quotes in one another; what is deeper is plain text
const FENCE = /^ {0,3}(`{3,}|~{3,})([^`]*)$/;
const HEADING = /^ {0,3}(#{1,6}) +/;
const LINE = /^ {0,3}([-*_])( *\1){2,} *$/;
const QUOTE = /^ {0,3}> ?/;
const ITEM = /^( {0,12})([-*+]|\d{1,9}[.)])( +|$)/;
const INLINE = /\\[\\`*_{}#+.!|~>-]|`+|\*\*|\*|__|_|~~|!?\[|https?:\/\//g;
const MARKS = { "**": "strong", __: "strong", "*": "em", _: "em", "~~": "del" };

export class Piece {
  constructor(text = "", owners = []) {
    this.text = text;
    this.owners = owners;
  }

  slice(from, to = this.text.length) {
    return new Piece(this.text.slice(from, to), this.owners.slice(from, to));
  }

  trimmed() {
    const start = this.text.length - this.text.trimStart().length;
    return this.slice(start, Math.max(start, this.text.trimEnd().length));
  }

  lines() {
    const found = [];
    let at = 0;
    for (const line of this.text.split("\n")) {
      found.push(this.slice(at, at + line.length));
      at += line.length + 1;
    }
    return found;
  }

  static joined(pieces) {
    const owners = [];
    for (const [i, piece] of pieces.entries()) {
      if (i) owners.push(piece.owners[0] ?? owners.at(-1)); // the end of a line
      for (const owner of piece.owners) owners.push(owner);
    }
    return new Piece(pieces.map((piece) => piece.text).join("\n"), owners);
  }
}

// Text that grows: blocks before the last one stay as they were drawn.
export class Markdown {
  constructor(root, leaf) {
    Object.assign(this, { root, leaf, drawn: [] });
  }

  update(piece) {
    const blocks = parse(piece.lines(), 0);
    const kept = blocks.findIndex((block, i) => i === blocks.length - 1 || this.drawn[i] !== key(block));
    while (this.root.children.length > Math.max(0, kept)) this.root.lastChild.remove();
    for (const block of blocks.slice(Math.max(0, kept))) this.root.append(build(block, this.leaf));
    this.drawn = blocks.map(key);
  }
}

const key = (block) => `${block.kind}:${block.lines.map((line) => line.text).join("\n")}`;

function parse(lines, depth) {
  const blocks = [];
  let i = 0;
  const take = (kind, count, more = {}) => {
    blocks.push({ kind, lines: lines.slice(i, i + count), depth, ...more });
    i += count;
  };
  while (i < lines.length) {
    const { text } = lines[i];
    const fence = FENCE.exec(text);
    if (!text.trim()) i += 1;
    else if (fence) {
      const end = lines.findIndex((line, at) => at > i && ends(line.text.trim(), fence[1]));
      take("code", (end < 0 ? lines.length : end + 1) - i, { language: fence[2].trim().slice(0, 30), closed: end > 0 });
    } else if (HEADING.test(text)) take("heading", 1);
    else if (LINE.test(text)) take("line", 1);
    else if (table(lines, i)) take("table", span(lines, i, (line) => line.text.includes("|")));
    else if (depth < DEEPEST && QUOTE.test(text)) take("quote", span(lines, i, (line) => QUOTE.test(line.text)));
    else if (depth < DEEPEST && ITEM.test(text)) take("list", list(lines, i));
    else take("text", span(lines, i, (line, at) => line.text.trim() && (at === i || !begins(lines, at, depth))));
  }
  return blocks;
}

const ends = (text, fence) => text.startsWith(fence) && !text.replaceAll(fence[0], "");

function span(lines, start, belongs) {
  let end = start;
  while (end < lines.length && belongs(lines[end], end)) end += 1;
  return end - start;
}

function begins(lines, i, depth) {
  const { text } = lines[i];
  const nested = depth < DEEPEST && (QUOTE.test(text) || ITEM.test(text));
  return nested || FENCE.test(text) || HEADING.test(text) || LINE.test(text) || table(lines, i);
}

// An item goes on over lines that are indented, or that follow it without a blank line.
function list(lines, start) {
  const ordered = /\d/.test(ITEM.exec(lines[start].text)[2]);
  return span(lines, start, ({ text }, at) => {
    if (at === start || /^ {2,}\S/.test(text)) return true;
    const item = ITEM.exec(text);
    if (item) return /\d/.test(item[2]) === ordered && !LINE.test(text);
    if (text.trim()) return lines[at - 1].text.trim() && !begins(lines, at, 0);
    return /^ {2,}\S/.test(lines[at + 1]?.text ?? "") || ITEM.test(lines[at + 1]?.text ?? "");
  });
}

const cells = (line) => line.text.trim().replace(/^\||\|$/g, "").split("|");

function table(lines, i) {
  if (!lines[i].text.includes("|") || !lines[i + 1]?.text.includes("-")) return false;
  const rule = cells(lines[i + 1]);
  return rule.length === cells(lines[i]).length && rule.every((cell) => /^:?-+:?$/.test(cell.trim()));
}

function build(block, leaf) {
  const { kind, lines, depth } = block;
  const nested = (inner) => parse(inner, depth + 1).map((part) => build(part, leaf));
  if (kind === "line") return element("hr");
  if (kind === "code") return code(block, leaf);
  if (kind === "heading") {
    const level = HEADING.exec(lines[0].text);
    const tag = `h${Math.min(6, level[1].length + 2)}`; // below the page's own
    return element(tag, {}, ...inline(lines[0].slice(level[0].length).trimmed(), leaf));
  }
  if (kind === "quote") {
    return element("blockquote", {}, ...nested(lines.map((line) => line.slice(QUOTE.exec(line.text)[0].length))));
  }
  if (kind === "list") return items(lines, nested);
  if (kind === "table") return rows(lines, leaf);
  return element("p", {}, ...inline(Piece.joined(lines).trimmed(), leaf));
}

function code({ lines, language, closed }, leaf) {
  const content = Piece.joined(lines.slice(1, closed ? -1 : undefined));
  const take = button("copy", "Copy this code", () => copy(content.text, take));
  const head = element("div", { class: "code-head" }, element("span", {}, language || "code"), take);
  const body = element("pre", { tabIndex: 0 }, element("code", {}, ...leaf(content)));
  return element("div", { class: "code" }, head, body);
}

function items(lines, nested) {
  const first = ITEM.exec(lines[0].text);
  const ordered = /\d/.test(first[2]);
  const made = element(ordered ? "ol" : "ul");
  if (ordered) made.start = parseInt(first[2], 10);
  let item = [];
  let indent = 0;
  const close = () => {
    if (!item.length) return;
    const children = nested(item);
    const alone = children.length && children[0].tagName === "P"; // its words, without a paragraph's margins
    if (alone) children.splice(0, 1, ...children[0].childNodes);
    made.append(element("li", {}, ...children));
  };
  for (const line of lines) {
    const marker = ITEM.exec(line.text);
    if (marker && marker[1].length <= first[1].length + 1) {
      close();
      indent = marker[0].length;
      item = [line.slice(marker[0].length)];
    } else item.push(line.slice(Math.min(indent, line.text.length - line.text.trimStart().length)));
  }
  close();
  return made;
}

function rows(lines, leaf) {
  const made = lines.flatMap((line, i) => {
    if (i === 1) return [];
    const row = element("tr");
    let at = 0;
    const raw = line.text.split("|");
    raw.forEach((text, column) => {
      const outer = (column === 0 || column === raw.length - 1) && !text.trim();
      const inner = line.slice(at, at + text.length).trimmed();
      at += text.length + 1;
      if (!outer) row.append(element(i ? "td" : "th", {}, ...inline(inner, leaf)));
    });
    return [row];
  });
  return element("div", { class: "wide", tabIndex: 0 }, element("table", {}, ...made));
}

// A mark without its partner is text; that none follows is remembered, so that no text takes long.
function inline(piece, leaf, depth = 0) {
  const { text } = piece;
  const nodes = [];
  const absent = new Set();
  let plain = 0;
  let at = 0;
  const put = (from, to, ...made) => {
    if (from > plain) nodes.push(...leaf(piece.slice(plain, from)));
    nodes.push(...made);
    plain = at = to;
  };
  while (at < text.length) {
    INLINE.lastIndex = at;
    const found = INLINE.exec(text);
    if (!found) break;
    const [mark] = found;
    const start = found.index;
    const inside = start + mark.length;
    at = inside;
    if (absent.has(mark)) continue;
    if (mark[0] === "\\") put(start, inside, ...leaf(piece.slice(start + 1, inside)));
    else if (mark[0] === "`") {
      const end = partner(text, mark, inside, (i) => text[i - 1] !== "`" && text[i + mark.length] !== "`");
      if (end < 0) absent.add(mark);
      else put(start, end + mark.length, element("code", {}, ...leaf(piece.slice(inside, end))));
    } else if (MARKS[mark]) {
      if (depth >= DEEPEST || !opens(text, start, inside, mark)) continue;
      const end = partner(text, mark, inside + 1, (i) => closes(text, i, mark));
      if (end < 0) absent.add(mark);
      else {
        const children = inline(piece.slice(inside, end), leaf, depth + 1);
        put(start, end + mark.length, element(MARKS[mark], {}, ...children));
      }
    } else if (mark.endsWith("[")) {
      const end = text.indexOf("](", inside);
      if (end < 0) absent.add("[").add("![");
      const close = end < 0 ? -1 : text.indexOf(")", end);
      if (close < 0 || text.slice(inside, end).includes("[")) continue;
      const made = link(text.slice(end + 2, close), leaf(piece.slice(inside, end)));
      if (made) put(start, close + 1, made);
    } else {
      const [address] = /^[^\s<>"'`)\]*]+/.exec(text.slice(start, start + 2000));
      const end = start + address.replace(/[.,;:!?]+$/, "").length;
      const made = link(text.slice(start, end), leaf(piece.slice(start, end)));
      if (made) put(start, end, made);
    }
  }
  put(text.length, text.length);
  return nodes;
}

function partner(text, mark, from, fits) {
  for (let i = text.indexOf(mark, from); i >= 0; i = text.indexOf(mark, i + mark.length)) if (fits(i)) return i;
  return -1;
}

const word = (sign) => sign !== undefined && /[\p{L}\p{N}_]/u.test(sign);

function opens(text, start, inside, mark) {
  if (!text[inside]?.trim()) return false;
  return mark[0] !== "_" || !word(text[start - 1]);
}

function closes(text, i, mark) {
  if (!text[i - 1].trim() || (mark === "*" && (text[i - 1] === "*" || text[i + 1] === "*"))) return false;
  return mark[0] !== "_" || !word(text[i + mark.length]);
}

function link(address, children) {
  try {
    const { protocol, href } = new URL(address);
    if (!["http:", "https:", "mailto:"].includes(protocol)) return null;
    return element("a", { href, title: href, target: "_blank", rel: "noopener noreferrer nofollow" }, ...children);
  } catch {
    return null;
  }
}
