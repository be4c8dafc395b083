// The leaves of the document with their layouts, meshes and colours, and the filter.

const meshes = data.meshes.map(({ name, axes, ids }) => ({
  name,
  axes,
  ids,
  sizes: Object.fromEntries(axes),
  devices: product(axes.map(([, size]) => size)),
}));
const placed = ([mesh, spec, chunk, device]) => ({ mesh: mesh === null ? null : meshes[mesh], spec, chunk, device });
const layouts = data.layouts.map(([shape, nbytes, dtype, load, moved, source, sides]) => ({
  ...{ shape, nbytes, dtype, load, moved, source },
  sides: sides.map(placed),
}));
const folders = [{ path: "", key: "all", parent: null, children: [], by: new Map(), nbytes: 0, count: 0 }];
for (const [parent, key] of data.folders) {
  const above = folders[parent];
  const path = parent ? `${above.path}/${key}` : key;
  const own = { path, key, points: points(plainKey(key)), parent: above };
  folders.push({ ...own, children: [], by: new Map(), nbytes: 0, count: 0 });
  above.children.push(folders.at(-1));
}
// Levels that differ only in a number are one, `layer_{0..49}`, with the contents of the first.
for (const [key, numbers] of data.folds || []) {
  const members = numbers.map((number) => folders[number]);
  const [{ parent }] = members;
  const fold = { key, path: parent.path ? `${parent.path}/${key}` : key, parent, members };
  for (const member of members) member.fold = fold;
}
// Paths with the common names of such levels.
for (const folder of folders) {
  const own = folder.fold ? folder.fold.key : folder.key;
  folder.face = folder.parent === null ? "" : `${folder.parent.face}${own}/`;
}
const pathOf = ([folder, key]) => (folder ? `${folders[folder].path}/${key}` : key);
const leaves = data.leaves.map(([folder, key, layout], order) => {
  const parent = folders[folder];
  const leaf = { ...layouts[layout], key, parent, order, layout: layouts[layout] };
  leaf.path = pathOf([folder, key]);
  leaf.face = `${parent.face}${key}`;
  leaf.points = points(plainKey(key));
  leaf.side = leaf.sides.at(-1);
  parent.children.push(leaf);
  for (let above = parent; above; above = above.parent) {
    above.nbytes += leaf.nbytes || 0;
    above.count += 1;
  }
  return leaf;
});
for (const { fold } of folders) {
  if (!fold || fold.children) continue;
  const [first, ...others] = fold.members;
  const sum = (value) => fold.members.reduce((total, member) => total + value(member), 0);
  Object.assign(fold, { first, others, children: first.children, by: first.by, face: first.face });
  Object.assign(fold, { nbytes: sum((each) => each.nbytes), count: sum((each) => each.count) });
}
const isDiff = data.kind === "diff";
const arrays = leaves.filter((leaf) => leaf.shape !== null || isDiff);

const partsOf = ({ shape }, { mesh, spec }) =>
  shape.map((_, dim) => product((spec[dim] || []).map((axis) => mesh.sizes[axis] || 1)));
const WHOLE = { bad: "glare", warn: "amber" }[data.replicated] || "grey"; // of replicated leaves
const replicated = (leaf, side) =>
  side.mesh !== null && side.mesh.devices > 1 && product(partsOf(leaf, side)) === 1;

function layoutName(leaf) {
  if (isDiff) return leaf.source;
  if (leaf.shape === null) return "no array";
  if (leaf.side.mesh === null) return leaf.side.device ? "on one device" : "no mesh";
  return replicated(leaf, leaf.side) ? "replicated" : specText(leaf.side.spec);
}

// Elements decoded per element needed along a dimension, as whole chunks are decoded.
function dimension(size, chunk, shard) {
  let decoded = 0;
  for (let start = 0; start < size; start += shard) decoded += covered(size, chunk, start, shard)[1];
  return size ? decoded / size : 1;
}
function covered(size, chunk, start, shard) {
  const first = Math.floor(start / chunk) * chunk;
  const stop = Math.min(Math.ceil(Math.min(start + shard, size) / chunk) * chunk, size);
  return [first, stop - first];
}
function amplification(leaf, chunk) {
  if (leaf.side.mesh === null || chunk === null) return null;
  const parts = partsOf(leaf, leaf.side);
  const all = leaf.shape.map((size, dim) =>
    dimension(size, chunk[dim], Math.max(Math.ceil(size / parts[dim]), 1)),
  );
  return leaf.shape.includes(0) ? 1 : product(all);
}
for (const layout of layouts) {
  if (layout.load || layout.shape === null) continue;
  const own = amplification({ ...layout, side: layout.sides.at(-1) }, layout.sides.at(-1).chunk);
  layout.load = own === null ? null : [own];
}
for (const leaf of leaves) leaf.load = leaf.layout.load;

const colours = new Map();
{
  const total = new Map();
  for (const leaf of arrays)
    total.set(layoutName(leaf), (total.get(layoutName(leaf)) || 0) + (leaf.nbytes || 0));
  const plain = { replicated: WHOLE, "on one device": "grey", "no mesh": "grey" };
  const differences = { added: "k1", removed: "k5", moved: "k0", "other shape or type": "k2" };
  const sizes = ["up to 1e-6", "up to 0.001", "up to 1", "over 1, NaN or infinite"];
  sizes.forEach((name, i) => (differences[name] = `d${i}`));
  const names = [...total.keys()].sort((a, b) => total.get(b) - total.get(a));
  let next = 0;
  for (const name of names) {
    const own = isDiff ? differences[name] || "grey" : plain[name];
    colours.set(name, { total: total.get(name), of: own || (next < COLOURS ? `k${next++}` : "grey") });
  }
  for (const leaf of arrays) {
    const { of } = colours.get(layoutName(leaf));
    for (let above = leaf.parent; above; above = above.parent)
      above.by.set(of, (above.by.get(of) || 0) + (leaf.nbytes || 0));
  }
}

const state = { query: "", spec: null, root: folders[0], chosen: null, updates: [] };

function isShown() {
  const matches = matcher(state.query);
  const { spec } = state;
  const isOf = (leaf) => spec === null || layoutName(leaf) === spec;
  return (leaf) => matches(leaf) && isOf(leaf);
}
function update() {
  const shown = isShown();
  for (const redraw of state.updates) redraw(shown);
}
function choose(leaf) {
  state.chosen = leaf;
  if (isDiff) showDifference(leaf.path);
  else drawLeaf();
}

const sections = document.getElementById("sections");
const beside = el("div", { id: "explore" }); // the treemap, and the chosen leaf next to it
function section(id, title, note, within = sections) {
  const node = el("section", { id, "aria-labelledby": `${id}-title` });
  node.append(el("h2", { id: `${id}-title` }, title));
  if (note) node.append(el("p", { class: "note" }, note));
  within.append(node);
  return node;
}
