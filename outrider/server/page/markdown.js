// The Markdown that models write, as elements of the page: paragraphs, headings, lists, code, tables, quotes, emphasis.
//
// Elements are made here, and what a model wrote enters them through `put(parent, from, to)` alone, which adds that part
// of the text as text nodes. Nothing is parsed as HTML, links stay text, and a text that is not finished shows as well.
const FENCE = /^\s*(`{3,}|~{3,})\s*([\w+#.-]*)[^`]*$/, ITEM = /^(\s*)([-*+•]|\d{1,9}[.)])(?:\s+|$)/, HEADING = /^ {0,3}(#{1,6})\s+/;
const RULE = /^ {0,3}([-*_])(?: *\1){2,} *$/, QUOTE = /^ {0,3}> ?/, DIVIDER = /^\s*\|?\s*:?-+:?\s*(?:\|\s*:?-+:?\s*)*\|?\s*$/;
const INLINE = [
  [/(`+)(?!`)(.+?)(?<!`)\1(?!`)/dy, "code", 2], [/\*\*(?=\S)(.*?\S)\*\*(?!\*)/dy, "strong", 1],
  [/\*(?=[^\s*])(.*?[^\s*])\*(?!\*)/dy, "em", 1], [/(?<!\w)__(?=\S)(.*?\S)__(?!\w)/dy, "strong", 1],
  [/(?<!\w)_(?=[^\s_])(.*?[^\s_])_(?!\w)/dy, "em", 1], [/~~(?=\S)(.*?\S)~~/dy, "del", 1],
];

function markdown(text, put) {
  const all = [];
  for (let from = 0; from <= text.length;) {
    const found = text.indexOf("\n", from), to = found < 0 ? text.length : found;
    all.push({from, to}); from = to + 1;
  }
  const fragment = document.createDocumentFragment();
  const written = line => text.slice(line.from, line.to), isBlank = line => !written(line).trim();
  const cut = (line, n) => ({from: Math.min(line.from + n, line.to), to: line.to});
  const indent = line => written(line).match(/^\s*/)[0].length;
  const make = (parent, name) => parent.appendChild(document.createElement(name));

  function inline(parent, from, to) {
    let plain = from;
    const flush = end => { if (end > plain) put(parent, plain, end); };
    for (let at = from; at < to; at++) {
      if (text[at] === "\\" && at + 1 < to && /[\\`*_{}[\]()#+.!|>~-]/.test(text[at + 1])) { flush(at); plain = ++at; continue; }
      if (!"`*_~".includes(text[at])) continue;
      for (const [pattern, name, group] of INLINE) {
        pattern.lastIndex = at;
        const found = pattern.exec(text.slice(0, to));
        if (!found) continue;
        const element = document.createElement(name), [start, end] = found.indices[group];
        flush(at); parent.append(element);
        if (name === "code") put(element, start, end); else inline(element, start, end);
        plain = at + found[0].length; at = plain - 1;
        break;
      }
    }
    flush(to);
  }
  const lines = (parent, rows) => rows.forEach((line, i) => { if (i) make(parent, "br"); inline(parent, line.from + indent(line), line.to); });

  function fence(parent, rows, i) {
    const [, marks, language] = written(rows[i]).match(FENCE), depth = indent(rows[i]), code = make(make(parent, "pre"), "code"), first = i + 1;
    if (language) code.title = language;
    const isEnd = line => { const own = written(line).trim(); return own.startsWith(marks) && !own.replaceAll(marks[0], ""); };
    for (i++; i < rows.length && !isEnd(rows[i]); i++) {
      const line = cut(rows[i], Math.min(depth, indent(rows[i])));
      if (i > first) code.append("\n");
      put(code, line.from, line.to);
    }
    return i + 1;
  }
  function list(parent, rows, i) {
    const [, before, mark] = written(rows[i]).match(ITEM), isOrdered = /\d/.test(mark), element = make(parent, isOrdered ? "ol" : "ul");
    if (isOrdered) element.start = parseInt(mark);
    while (i < rows.length) {
      const found = written(rows[i]).match(ITEM);
      if (!found || /\d/.test(found[2]) !== isOrdered || found[1].length > before.length + 1 || found[1].length < before.length) break;
      const own = [cut(rows[i], found[0].length)], depth = Math.min(found[0].length, found[1].length + found[2].length + 1);
      for (i++; i < rows.length; i++) {
        const next = rows.slice(i).find(line => !isBlank(line));  // behind empty lines an item goes on if it is indented
        if (!next || indent(next) <= found[1].length && (isBlank(rows[i]) || begins(next))) break;
        own.push(cut(rows[i], Math.min(depth, indent(rows[i]))));
      }
      blocks(make(element, "li"), own, true);
      while (i < rows.length && isBlank(rows[i]) && rows.slice(i).find(line => !isBlank(line)) && ITEM.test(written(rows.slice(i).find(line => !isBlank(line))))) i++;
    }
    return i;
  }
  function table(parent, rows, i) {
    const element = make(parent, "table"), isRow = line => written(line).includes("|");
    for (let row = 0; i < rows.length && isRow(rows[i]); i++, row++) {
      if (row === 1) continue;  // the line that divides the head from the rest
      const tr = make(element, "tr"), {from, to} = rows[i], text = written(rows[i]), edges = [];
      for (let at = 0; at < text.length; at++) if (text[at] === "|" && text[at - 1] !== "\\") edges.push(at);
      const bounds = [...(text.trimStart()[0] === "|" ? [] : [-1]), ...edges, ...(text.trimEnd().endsWith("|") ? [] : [to - from])];
      for (let cell = 0; cell + 1 < bounds.length; cell++) {
        const own = text.slice(bounds[cell] + 1, bounds[cell + 1]), start = from + bounds[cell] + 1 + (own.length - own.trimStart().length);
        inline(make(tr, row ? "td" : "th"), start, start + own.trim().length);
      }
    }
    return i;
  }
  const isTable = (rows, i) => written(rows[i]).includes("|") && i + 1 < rows.length && written(rows[i + 1]).includes("|") && DIVIDER.test(written(rows[i + 1]));
  const begins = line => [FENCE, ITEM, HEADING, RULE, QUOTE].some(pattern => pattern.test(written(line)));

  function blocks(parent, rows, isTight = false) {
    for (let i = 0; i < rows.length;) {
      const own = written(rows[i]), begin = i;
      if (!own.trim()) i++;
      else if (FENCE.test(own)) i = fence(parent, rows, i);
      else if (RULE.test(own)) { make(parent, "hr"); i++; }
      else if (HEADING.test(own)) {
        const [marks, level] = own.match(HEADING);
        inline(make(parent, "h" + Math.min(level.length + 2, 6)), rows[i].from + marks.length, rows[i].to); i++;
      } else if (QUOTE.test(own)) {
        while (i < rows.length && QUOTE.test(written(rows[i]))) i++;
        blocks(make(parent, "blockquote"), rows.slice(begin, i).map(line => cut(line, written(line).match(QUOTE)[0].length)));
      } else if (ITEM.test(own)) i = list(parent, rows, i);
      else if (isTable(rows, i)) i = table(parent, rows, i);
      else {
        for (i++; i < rows.length && !isBlank(rows[i]) && !begins(rows[i]) && !isTable(rows, i);) i++;
        lines(isTight && begin === 0 ? parent : make(parent, "p"), rows.slice(begin, i));
      }
    }
  }
  blocks(fragment, all);
  return fragment;
}
