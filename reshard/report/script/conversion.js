// A conversion: the trees before and after, each leaf with the rule that decided it, or the reason
// why it is undecided.

const UNDECIDED = ["missing", "unexpected", "mismatch", "ambiguous", "undecided"];
const ORIGINS = { path: "k1", map: "k0", structure: "k3", record: "k4", initial: "k5" };
const MEANINGS = {
  path: "Equal paths, after the standard conversions of layers and containers.",
  map: "A rule of the map file.",
  structure: "Only the order in which modules of one class are defined. Check these pairs.",
  record: "The record of the conversion from the other API.",
  initial: "The model's own initial value, as --init asked.",
  zeros: "Zeros, because the other API stores no such leaf.",
  dropped: "Left out, as --drop asked.",
  missing: "The model needs this leaf, and the checkpoint has none for it.",
  unexpected: "The checkpoint has this leaf, and the model has no place for it.",
  mismatch: "The shapes or dtypes of the two leaves differ.",
  ambiguous: "Several leaves may be its counterpart.",
  undecided: "Neither names nor classes identify its counterpart.",
};
const OPEN = 200; // trees of up to so many leaves are open at first
const originKind = (origin) => (UNDECIDED.includes(origin) ? "glare" : ORIGINS[origin] || "grey");

// The levels of a tree; a leaf is its key and the rows that it is in.
function levelsOf(rows, side) {
  const made = new Map();
  const leaves = new Map();
  const level = (folder) => {
    if (!made.has(folder)) {
      const above = folder.parent ? level(folder.parent) : null;
      const own = { key: folder.key, above, levels: [], leaves: [], rows: [] };
      made.set(folder, own);
      if (above) above.levels.push(own);
    }
    return made.get(folder);
  };
  for (const row of rows) {
    for (const [folder, key] of row[side]) {
      const path = pathOf([folder, key]);
      if (!leaves.has(path)) {
        const leaf = { path, key, rows: [], level: level(folders[folder]) };
        leaves.set(path, leaf);
        leaf.level.leaves.push(leaf);
      }
      leaves.get(path).rows.push(row);
      for (let above = leaves.get(path).level; above; above = above.above) above.rows.push(row);
    }
  }
  for (const [key, numbers] of data.row_folds[side]) {
    const fold = { key, members: numbers.map((number) => made.get(folders[number])) };
    for (const member of fold.members) member.fold = fold;
  }
  return { root: level(folders[0]), leaves };
}

// A map rule from one leaf to another, by the paths in their models. If both are in alike levels with
// one number, the rule is for all of these levels. Optimizer state follows its parameters.
function ruleOf(leaves) {
  const levels = leaves.map(({ level }) => {
    const found = [];
    for (let above = level; above.above; above = above.above) found.unshift(above);
    return found;
  });
  if (leaves.some(({ path }) => /(^|\/)opt(_state|imizer)\//.test(path))) return null;
  const folded = levels.map((found) => found.find((level) => level.fold));
  const numbers = folded.map((level) => level && level.key.match(/\d+$/)[0]);
  const general = numbers[0] !== undefined && numbers[0] === numbers[1];
  const pattern = (text) => text.replace(/[\\^$.|?*+()[\]{}]/g, "\\$&");
  const replacement = (text) => text.replace(/\\/g, "\\\\").replace(/[{}]/g, "$&$&");
  const [from, to] = [[pattern, "(\\d+)"], [replacement, "\\1"]].map(([literal, number], side) => {
    const key = (level) =>
      general && level === folded[side] ? literal(level.key.replace(/\d+$/, "")) + number : literal(level.key);
    const keys = [...levels[side].map(key), literal(leaves[side].key)];
    if (keys[0] === "model") keys.shift(); // beside its optimizer
    if (keys[0] !== "params" && keys.length > 1 && keys.at(-1) === "value") keys.pop(); // of a variable of NNX
    return keys.join("/");
  });
  const toml = (text) => (/['\p{C}]/u.test(text) ? JSON.stringify(text) : `'${text}'`);
  return `[[rule]]\nfrom = ${toml(`^${from}$`)}\nto = ${toml(to)}\n`;
}

function counts(rows) {
  const found = new Map();
  for (const { origin } of rows) found.set(origin, (found.get(origin) || 0) + 1);
  return [...found].sort(([a], [b]) => UNDECIDED.includes(b) - UNDECIDED.includes(a));
}
function badge(origin, count) {
  const wrong = UNDECIDED.includes(origin);
  const text = count === undefined ? origin : `${count} ${origin}`;
  const swatch = el("span", { class: `swatch ${originKind(origin)}` });
  const about = { class: wrong ? "origin mark" : "origin", title: MEANINGS[origin] };
  return el("span", about, swatch, wrong ? `▲ ${text}` : text);
}

function drawConversion() {
  if (!data.rows) return;
  const rows = data.rows.map(([verdict, from, to]) => {
    const [origin, operation, problem] = data.verdicts[verdict];
    return { from, to, origin, operation, problem };
  });
  const open = rows.filter(({ origin }) => UNDECIDED.includes(origin)).length;
  const node = section(
    "conversion",
    open ? `${counted(open, "leaf is", "leaves are")} undecided` : "What becomes of each leaf",
    "The trees of the source and of the model. Each leaf names the rule that decided it; point at a name " +
      "for its meaning. Click a leaf to find it in the other tree." +
      (open ? " Click an undecided leaf in both trees to get the map rule for it." : ""),
  );
  const rule = el("div", { class: "rule", "aria-live": "polite" });
  const picked = {};
  const about = el("p", { class: "about", role: "status" });
  let kept = () => true;
  const trees = { from: levelsOf(rows, "from"), to: levelsOf(rows, "to") };
  const texts = (places) => places.map(pathOf).join(" + ");
  const words = ({ from, to, origin, operation, problem }) => {
    const pair = [texts(from), texts(to)].filter(Boolean).join(" → ");
    const how = [operation, UNDECIDED.includes(origin) ? origin : `by ${origin}`, problem];
    return `${pair} · ${how.filter(Boolean).join(" · ")}`;
  };

  function fill(level) {
    if (level.filled) return;
    level.filled = true;
    for (const inner of level.levels) {
      if (inner.fold ? inner.fold.members[0] === inner : inner.rows.some(kept)) drawInner(level.list, inner);
    }
    for (const leaf of level.leaves) if (leaf.rows.some(kept)) drawLeaf(level.list, leaf, leaf.key);
  }
  // A level, in one line with levels that hold nothing else. Alike levels are one.
  function drawInner(list, inner) {
    const names = [];
    while (!inner.fold && !inner.leaves.length && inner.levels.length && inner.levels.every((each) => each.fold === inner.levels[0].fold && (each.fold || inner.levels.length === 1))) {
      inner.filled = true;
      names.push(inner.key);
      [inner] = inner.levels;
    }
    names.push(inner.fold ? inner.fold.key : inner.key);
    const name = names.join("/");
    if (inner.fold) drawFold(list, inner.fold, name);
    else if (inner.levels.length || inner.leaves.length > 1) drawLevel(list, inner, name);
    else {
      inner.filled = true;
      drawLeaf(list, inner.leaves[0], `${name}/${inner.leaves[0].key}`);
    }
  }
  function drawLeaf(list, leaf, name) {
    const press = () => chooseRows(leaf);
    leaf.button = el("button", { type: "button", class: "path", click: press }, name);
    list.append(el("li", null, leaf.button, " ", ...counts(leaf.rows).map(([origin]) => badge(origin))));
  }
  function drawDetails(list, rows, name, total, draw, more) {
    const own = rows.filter(kept);
    if (!own.length) return null;
    const wrong = own.some(({ origin }) => UNDECIDED.includes(origin));
    const summary = el("summary", null, el("span", { class: "path" }, `${name}/`), " ", more);
    summary.append(...counts(own).flatMap(([origin, count]) => [badge(origin, count), " "]));
    const inner = el("ul");
    const details = el("details", { toggle: () => details.open && draw() }, summary, inner);
    list.append(el("li", null, details));
    return { list: inner, details, open: total <= OPEN || (wrong && own.length <= OPEN) };
  }
  function drawLevel(list, level, name) {
    const drawn = drawDetails(list, level.rows, name, level.total, () => fill(level), null);
    Object.assign(level, drawn, { filled: false });
    if (drawn && drawn.open) show(level);
  }
  function drawFold(list, fold, name) {
    const pick = (member) => {
      fold.shown = member;
      fold.select.value = fold.members.indexOf(member);
      fold.list.replaceChildren();
      Object.assign(member, { list: fold.list, filled: false });
      fill(member);
    };
    fold.pick = pick;
    fold.select = picker(fold.key, fold.members, fold.members[0], pick);
    const rows = fold.members.flatMap((member) => member.rows);
    const drawn = drawDetails(list, rows, name, fold.members[0].total, () => fold.shown || pick(fold.members[0]), fold.select);
    Object.assign(fold, drawn, { shown: null });
    if (drawn && drawn.open) show(fold.members[0]);
  }
  function show(level) {
    if (level.above) show(level.above);
    const { fold } = level;
    if (fold && fold.shown !== level) fold.pick(level);
    const { details } = fold || level;
    if (details) details.open = true;
    fill(level);
  }
  function chooseRows(leaf) {
    for (const old of node.querySelectorAll(".chosen-leaf")) old.classList.remove("chosen-leaf");
    about.textContent = leaf.rows.map(words).join("; ");
    const side = trees.from.leaves.get(leaf.path) === leaf ? "from" : "to";
    const isOpen = leaf.rows.every(({ origin }) => UNDECIDED.includes(origin));
    if (isOpen) picked[side] = leaf;
    else [picked.from, picked.to] = [];
    offerRule();
    for (const chosen of new Set([leaf, picked.from, picked.to])) if (chosen) chosen.button.classList.add("chosen-leaf");
    for (const side of ["from", "to"]) {
      for (const place of leaf.rows.flatMap((row) => row[side])) {
        const other = trees[side].leaves.get(pathOf(place));
        if (!other || !other.rows.some(kept)) continue;
        show(other.level);
        other.button.classList.add("chosen-leaf");
        if (other === leaf) continue;
        const pane = other.button.closest(".pane");
        pane.scrollTop += other.button.getBoundingClientRect().top - pane.getBoundingClientRect().top - 80;
      }
    }
  }
  function offerRule() {
    const { from, to } = picked;
    if (!from && !to) return rule.replaceChildren();
    if (!from || !to) return rule.replaceChildren(el("p", { class: "note" }, `Now click its counterpart in the ${from ? "model" : "source"}.`));
    const text = ruleOf([from, to]);
    if (text === null) return rule.replaceChildren(el("p", { class: "note" }, "Optimizer state follows its parameters: click the parameters."));
    const code = el("pre", { tabindex: "0" }, text);
    const copy = () => {
      getSelection().selectAllChildren(code);
      document.execCommand("copy"); // the only clipboard that all browsers give a page of a file
    };
    const press = el("button", { type: "button", click: copy }, "Copy");
    rule.replaceChildren(el("p", { class: "note" }, "For your map file (--map): ", press), code);
  }

  const panes = [];
  for (const [side, title] of [["from", "Source"], ["to", "Model"]]) {
    const list = el("ul", { class: "tree" });
    const box = { class: "pane", tabindex: "0", role: "region", "aria-label": `Tree of the ${title.toLowerCase()}` };
    panes.push(el("div", null, el("h3", null, title), el("div", box, list)));
    trees[side].draw = () => {
      const { root } = trees[side];
      list.replaceChildren();
      Object.assign(root, { list, filled: false });
      const total = root.rows.filter(kept).length;
      const mark = (level) => {
        Object.assign(level, { total, details: null });
        if (level.fold) Object.assign(level.fold, { shown: null, details: null });
        level.levels.forEach(mark);
      };
      mark(root);
      fill(root);
    };
    trees[side].draw();
  }
  const columns = [
    { title: "from", kind: "tree", value: (row) => texts(row.from) || "–", cell: (row) => broken(texts(row.from) || "–") },
    { title: "to", kind: "tree", value: (row) => texts(row.to) || "–", cell: (row) => broken(texts(row.to) || "–") },
    { title: "operation", value: (row) => row.operation || "" },
    { title: "decided by", value: (row) => row.origin, cell: (row) => badge(row.origin) },
  ];
  const openFirst = [...rows].sort((a, b) => UNDECIDED.includes(b.origin) - UNDECIDED.includes(a.origin));
  const { node: body, draw } = table("Map of the conversion", columns, openFirst, 12);
  const names = counts(rows).map(([name, n]) => [name, String(n), originKind(name)]);
  const press = (name) => {
    kept = (row) => name === null || row.origin === name;
    about.textContent = "";
    [picked.from, picked.to] = [];
    offerRule();
    for (const tree of Object.values(trees)) tree.draw();
    draw(kept);
  };
  node.append(filters("Decided by", names, press), about, rule, el("div", { class: "trees" }, ...panes), body);
}
