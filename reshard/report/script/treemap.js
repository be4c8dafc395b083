// Where the bytes are.

// Rectangles in which children have areas by their bytes, near to squares (Bruls, Huizing and
// van Wijk, "Squarified treemaps", 2000).
function squarified(children, x, y, w, h) {
  const total = children.reduce((sum, child) => sum + child.nbytes, 0);
  const scale = total ? (w * h) / total : 0;
  const placed = [];
  let rest = children;
  while (rest.length) {
    const short = Math.min(w, h);
    const worst = (area, least, largest) =>
      Math.max((short * short * largest) / (area * area), (area * area) / (short * short * least));
    let end = 1;
    let area = rest[0].nbytes * scale;
    for (; end < rest.length; end += 1) {
      const next = rest[end].nbytes * scale;
      const [large, small] = [rest[0].nbytes * scale, rest[end - 1].nbytes * scale];
      if (worst(area + next, next, large) > worst(area, small, large)) break;
      area += next;
    }
    const thick = short ? area / short : 0;
    let along = 0;
    for (const child of rest.slice(0, end)) {
      const long = thick ? (child.nbytes * scale) / thick : 0;
      placed.push([child, w < h ? [x + along, y, long, thick] : [x, y + along, thick, long]]);
      along += long;
    }
    if (w < h) [y, h] = [y + thick, h - thick];
    else [x, w] = [x + thick, w - thick];
    rest = rest.slice(end);
  }
  return placed;
}

// The children of a group. Alike levels are one child.
function inside(group) {
  if (!group.children) return [];
  const alike = (child) => child.fold && child.fold.first;
  return group.children.filter((child) => !alike(child) || alike(child) === child).map((child) => child.fold || child);
}
// A list to choose one of several alike levels.
function picker(label, members, chosen, pick) {
  const options = members.map((member, i) => el("option", { value: i, selected: member === chosen ? "" : null }, member.key));
  const change = (event) => pick(members[Number(event.currentTarget.value)]);
  return el("select", { "aria-label": label, title: label, change }, ...options);
}

function drawMap() {
  sections.append(beside);
  if (!arrays.some((leaf) => leaf.nbytes)) return;
  const node = section(
    "map",
    "Where the bytes are",
    "Each rectangle is a leaf. Its area shows its bytes, its colour " +
      (isDiff ? "the largest |A - B| in it" : "its partition spec") +
      ". Click a group to open it, or a leaf to show it. Or use the arrow keys, Enter and Escape.",
    beside,
  );
  const names = [...colours].map(([name, { total, of }]) => [name, bytes(total), of]);
  const found = el("span", { class: "count", role: "status" });
  const search = el("input", {
    type: "search",
    id: "search",
    placeholder: "params/**/kernel",
    spellcheck: "false",
    input: (event) => {
      state.query = event.currentTarget.value.trim();
      update();
    },
  });
  const legend = filters(isDiff ? "What differs" : "Partition specs", names, (name) => {
    state.spec = name;
    update();
  });
  const label = el("label", { for: "search" }, "Search by glob or text");
  node.append(el("div", { class: "tools" }, label, search, found), legend);
  const crumbs = el("nav", { class: "crumbs", "aria-label": "Shown group" });
  const about = el("p", { class: "about", "aria-live": "off" });
  const picture = svg("svg", { class: "treemap", role: "group", "aria-label": "Treemap by bytes" });
  node.append(crumbs, picture, about);

  let cells = [];
  const describeCell = ({ item }) => {
    about.textContent = item.children
      ? `${item.path || "all"}: ${counted(item.count, "leaf", "leaves")}, ${bytes(item.nbytes)}`
      : describe(item);
  };
  function describe(leaf) {
    if (isDiff) return `${leaf.path}: ${bytes(leaf.nbytes)} · ${layoutName(leaf)}`;
    const chunks = leaf.sides.map((side) => dims(side.chunk));
    const words = [`${leaf.path}: ${leaf.dtype || ""} ${dims(leaf.shape)}`.trim()];
    words.push(bytes(leaf.nbytes), layoutName(leaf));
    words.push(`chunks ${chunks.length === 2 ? changed(...chunks) : chunks[0]}`);
    return words.join(" · ");
  }
  const at = (event) => {
    const group = event.target.closest("g.cell");
    return group ? cells[Number(group.getAttribute("data-cell"))] : null;
  };
  function go(folder) {
    state.root = folder;
    redraw(isShown());
    const first = picture.querySelector("g.cell");
    if (first) first.focus({ preventScroll: true });
  }
  function act({ item }) {
    if (item.children) return go(item.first || item);
    choose(item);
    mark();
  }
  function mark() {
    const groups = [...picture.querySelectorAll("g.cell")];
    groups.forEach((group, i) => group.classList.toggle("chosen", cells[i].item === state.chosen));
  }
  picture.addEventListener("click", (event) => at(event) && act(at(event)));
  picture.addEventListener("mouseover", (event) => at(event) && describeCell(at(event)));
  picture.addEventListener("focusin", (event) => at(event) && describeCell(at(event)));
  picture.addEventListener("keydown", (event) => {
    const cell = at(event);
    if (!cell) return;
    const step = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1 }[event.key];
    if (step) focus(Math.min(Math.max(cells.indexOf(cell) + step, 0), cells.length - 1));
    else if (event.key === "Enter" || event.key === " ") act(cell);
    else if (event.key === "Escape" && state.root.parent) go(state.root.parent);
    else return;
    event.preventDefault();
  });
  function focus(number) {
    for (const group of picture.querySelectorAll('g[tabindex="0"]')) group.setAttribute("tabindex", "-1");
    const group = picture.querySelector(`g[data-cell="${number}"]`);
    group.setAttribute("tabindex", "0");
    group.focus({ preventScroll: true });
  }

  function redraw(shown) {
    const hits = leaves.filter(shown);
    const live = new Set(); // groups with a leaf that is found, and the names of the leaves and groups
    for (const leaf of hits) {
      live.add(leaf.face);
      for (let above = leaf.parent; above && !live.has(above); above = above.parent) live.add(above).add(above.face);
    }
    const width = Math.max(Math.floor(node.clientWidth), 280);
    const height = Math.round(Math.min(Math.max(width * 0.38, 280), 460));
    cells = [];
    const drawn = [];
    const cut = (text, w) => {
      const most = Math.floor((w - 8) / 6.6);
      return text.length <= most ? text : most < 3 ? "" : `${text.slice(0, most - 1)}…`;
    };
    function cell(item, kind, [x, y, w, h], text, second) {
      const name = item.children
        ? `${item.path || "all"}, group of ${counted(item.count, "leaf", "leaves")}, ${bytes(item.nbytes)}`
        : describe(item);
      const first = cells.length === 0 ? "0" : "-1";
      const marks = { class: `cell ${kind}`, role: "button", tabindex: first, "aria-label": name };
      const box = { x: x + 0.5, y: y + 0.5, width: Math.max(w - 1, 0.5), height: Math.max(h - 1, 0.5) };
      const lines = [];
      if (text && h >= 16) lines.push(svg("text", { x: x + 5, y: y + 13 }, cut(text, w)));
      if (second && h >= 34) lines.push(svg("text", { x: x + 5, y: y + 28, class: "second" }, cut(second, w)));
      drawn.push(svg("g", { ...marks, "data-cell": cells.length }, svg("rect", box), ...lines));
      cells.push({ item });
    }
    function place(item, box, depth, name, times) {
      const [x, y, w, h] = box;
      if (!item.children) {
        const { of } = colours.get(layoutName(item));
        const dim = (times > 1 ? live.has(item.face) : shown(item)) ? "" : " dim";
        const size = `${times > 1 ? `${times} x ` : ""}${bytes(item.nbytes)}`;
        cell(item, `leaf ${of}${dim}`, box, item.key, size);
        return;
      }
      const tight = w < 14 || h < 14;
      // A group that is too small for its leaves has the colour of most of its bytes.
      const most = tight ? [...item.by].sort((a, b) => b[1] - a[1])[0][0] : "";
      const dim = live.has(times > 1 || item.members ? item.face : item) ? "" : " dim";
      const folded = times * (item.members ? item.members.length : 1);
      if (depth) cell(item, (tight ? `leaf ${most}` : "group") + dim, box, h >= 30 && w >= 40 ? name : "");
      if (tight) return;
      const top = depth && h >= 30 && w >= 40 ? 17 : depth ? 2 : 0;
      const side = depth ? 2 : 0;
      const children = inside(item).filter((child) => child.nbytes);
      children.sort((a, b) => b.nbytes - a.nbytes);
      const inner = [x + side, y + top, w - 2 * side, h - top - side];
      for (const [child, where] of squarified(children, ...inner)) {
        if (where[2] * where[3] < 6) continue;
        const [inner, name] = single(child);
        place(inner, where, depth + 1, name, folded);
      }
    }
    place(state.root, [0, 0, width, height], 0, "", 1);
    picture.setAttribute("viewBox", `0 0 ${width} ${height}`);
    picture.replaceChildren(...drawn);
    mark();
    const above = [];
    for (let folder = state.root; folder; folder = folder.parent) above.unshift(folder);
    crumbs.replaceChildren(
      ...above.flatMap((folder) => {
        const current = folder === state.root;
        const press = () => go(folder);
        const marks = { type: "button", "aria-current": current ? "true" : null, click: press };
        const button = el("button", marks, folder.key);
        if (!folder.fold) return [button];
        const { members, key } = folder.fold;
        return [button, picker(key, members, folder, go)];
      }),
      el("span", { class: "count" }, ` ${bytes(state.root.nbytes)}`),
    );
    const sum = hits.reduce((total, leaf) => total + (leaf.nbytes || 0), 0);
    const all = hits.length === leaves.length;
    found.textContent = all ? "" : `${counted(hits.length, "leaf", "leaves")}, ${bytes(sum)}`;
  }
  // A group with one child takes no level of its own.
  function single(item) {
    let name = item.key;
    for (let [only, ...more] = inside(item); only && only.children && !more.length; [only, ...more] = inside(item)) {
      if (item.members) break;
      item = only;
      name += `/${item.key}`;
    }
    return [item, name];
  }
  redraw(() => true);
  state.updates.push(redraw);
  let width = node.clientWidth;
  new ResizeObserver(() => {
    if (node.clientWidth === width) return;
    width = node.clientWidth;
    redraw(isShown());
  }).observe(node);
}
