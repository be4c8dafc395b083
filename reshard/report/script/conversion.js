// What becomes of each leaf in a conversion: the tree before and the tree after, with what decided
// it, or why nothing did.

const UNDECIDED = ["missing", "unexpected", "mismatch", "ambiguous", "undecided"];
const ORIGINS = { path: "k1", map: "k0", structure: "k3", record: "k4", initial: "k5" };
const MEANINGS = {
  path: "Equal paths, after the standard conversions of layers and containers.",
  map: "A rule of the map file.",
  structure: "Only the order in which modules of one class are defined. Check these pairs.",
  record: "The record of the conversion from the other API.",
  initial: "The model's own initial value, as --init asked.",
  zeros: "Zeros, as the other API stores nothing here.",
  dropped: "Left out, as --drop asked.",
  missing: "The model needs this leaf, and the checkpoint has none for it.",
  unexpected: "The checkpoint has this leaf, and the model has no place for it.",
  mismatch: "The shapes or dtypes of the two leaves differ.",
  ambiguous: "Several leaves may be its counterpart.",
  undecided: "Neither names nor classes identify its counterpart.",
};
const OPEN = 200; // leaves of a tree up to which all of it is open at first
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
  return { root: level(folders[0]), leaves };
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
  const rows = data.rows.map(([told, from, to]) => {
    const [origin, operation, problem] = data.told[told];
    return { from, to, origin, operation, problem };
  });
  const open = rows.filter(({ origin }) => UNDECIDED.includes(origin)).length;
  const node = section(
    "conversion",
    open ? `${counted(open, "leaf is", "leaves are")} not decided` : "What becomes of each leaf",
    "The source's tree and the model's, each leaf with what decided: its path, the map, or structure, " +
      "which is the order of modules of one class. Click a leaf to see it in the other tree.",
  );
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
    for (let inner of level.levels) {
      if (!inner.rows.some(kept)) continue;
      let name = inner.key;
      while (!inner.leaves.length && inner.levels.length === 1) {
        inner.filled = true;
        [inner] = inner.levels;
        name += `/${inner.key}`;
      }
      if (inner.levels.length || inner.leaves.length > 1) drawLevel(level.list, inner, name);
      else {
        inner.filled = true;
        drawLeaf(level.list, inner.leaves[0], `${name}/${inner.leaves[0].key}`);
      }
    }
    for (const leaf of level.leaves) if (leaf.rows.some(kept)) drawLeaf(level.list, leaf, leaf.key);
  }
  function drawLeaf(list, leaf, name) {
    const press = () => chooseRows(leaf);
    leaf.button = el("button", { type: "button", class: "path", click: press }, name);
    list.append(el("li", null, leaf.button, " ", ...counts(leaf.rows).map(([origin]) => badge(origin))));
  }
  function drawLevel(list, level, name) {
    const own = level.rows.filter(kept);
    const wrong = own.some(({ origin }) => UNDECIDED.includes(origin));
    level.list = el("ul");
    level.filled = false;
    const summary = el("summary", null, el("span", { class: "path" }, `${name}/`), " ");
    summary.append(...counts(own).flatMap(([origin, count]) => [badge(origin, count), " "]));
    level.details = el("details", { toggle: () => level.details.open && fill(level) }, summary, level.list);
    list.append(el("li", null, level.details));
    if (level.total <= OPEN || (wrong && own.length <= OPEN)) show(level);
  }
  function show(level) {
    if (level.above) show(level.above);
    if (level.details) level.details.open = true;
    fill(level);
  }
  function chooseRows(leaf) {
    for (const old of node.querySelectorAll(".chosen-leaf")) old.classList.remove("chosen-leaf");
    about.textContent = leaf.rows.map(words).join("; ");
    leaf.button.classList.add("chosen-leaf");
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
    for (const tree of Object.values(trees)) tree.draw();
    draw(kept);
  };
  node.append(filters("Decided by", names, press), about, el("div", { class: "trees" }, ...panes), body);
}
