// One leaf on its meshes: the part that each device holds, and the chunks that a device decodes.

let leafNode = null;
let readsNode = null;
let device = 0; // its place in the mesh

function idsOf(mesh, leaf, side, index) {
  if (mesh.ids === false) return null;
  const fixed = {};
  leaf.shape.forEach((_, dim) => {
    let rest = index[dim];
    for (const axis of [...(side.spec[dim] || [])].reverse()) {
      fixed[axis] = rest % mesh.sizes[axis];
      rest = Math.floor(rest / mesh.sizes[axis]);
    }
  });
  let places = [0];
  for (const [axis, size] of mesh.axes) {
    const own = axis in fixed ? [fixed[axis]] : [...Array(Math.min(size, 64)).keys()];
    places = places.flatMap((place) => own.map((at) => place * size + at)).slice(0, 64);
  }
  return places.map((place) => (mesh.ids ? mesh.ids[place] : place));
}
function runs(ids) {
  const found = [];
  for (const id of [...ids].sort((a, b) => a - b)) {
    if (found.length && found.at(-1)[1] === id - 1) found.at(-1)[1] = id;
    else found.push([id, id]);
  }
  return found.map(([a, b]) => (a === b ? `${a}` : `${a}-${b}`)).join(",");
}
function shardOf(leaf, side, number) {
  const at = {};
  for (const [axis, size] of [...side.mesh.axes].reverse()) {
    at[axis] = number % size;
    number = Math.floor(number / size);
  }
  return leaf.shape.map((_, dim) =>
    (side.spec[dim] || []).reduce((index, axis) => index * side.mesh.sizes[axis] + at[axis], 0),
  );
}

// The last two dimensions of a leaf as rows and columns, and the size of their picture.
function plane(leaf, most) {
  const rank = leaf.shape.length;
  const [rows, columns] = [rank > 1 ? leaf.shape[rank - 2] : 1, rank ? leaf.shape[rank - 1] : 1];
  const ratio = Math.min(Math.max((rows || 1) / (columns || 1), 1 / 4), 0.5);
  const [width, height] = [most, Math.max(rank > 1 ? most * ratio : 44, 36)];
  return { rank, rows, columns, width, height, x: width / (columns || 1), y: height / (rows || 1) };
}
function lines(of, chunk, { rank, rows, columns, width, height, x, y }) {
  const drawn = [];
  const step = [rank > 1 ? chunk[rank - 2] : 1, rank ? chunk[rank - 1] : 1];
  let fine = false;
  const each = (size, part, line) => {
    if (size / part > 64) fine = true;
    else for (let at = part; at < size; at += part) drawn.push(svg("line", { class: of, ...line(at) }));
  };
  each(columns, step[1], (at) => ({ x1: at * x, x2: at * x, y1: 0, y2: height }));
  each(rows, step[0], (at) => ({ x1: 0, x2: width, y1: at * y, y2: at * y }));
  return [drawn, fine];
}
const frame = ({ width, height }, label, ...content) => {
  const view = { viewBox: `-1 -1 ${width + 2} ${height + 2}`, width: width + 2, height: height + 2 };
  return svg("svg", { class: "array", role: "img", "aria-label": label, ...view }, ...content);
};

function meshPicture(leaf, side, title) {
  const box = el("figure", null, el("figcaption", null, el("b", null, title)));
  const say = (text) => box.append(el("p", { class: "note" }, text));
  if (side.mesh === null) {
    say(side.device ? `Saved from ${side.device}, without a mesh.` : `No mesh: the devices that hold this leaf are ${UNKNOWN}.`);
    return box;
  }
  const parts = partsOf(leaf, side);
  const shard = leaf.shape.map((size, dim) => Math.ceil(size / parts[dim]));
  const count = product(parts);
  const copies = side.mesh.devices / count;
  const whole = count === 1 && side.mesh.devices > 1;
  box.firstChild.append(` ${side.mesh.name} · ${specText(side.spec)}`);
  const leading = parts.slice(0, -2);
  const multiples = product(leading);
  const flat = plane(leaf, multiples > 1 ? 150 : 330);
  const [cuts, fine] = side.chunk === null ? [[], false] : lines("chunk", side.chunk, flat);
  const [down, across] = [flat.rank > 1 ? parts.at(-2) : 1, flat.rank ? parts.at(-1) : 1];
  const pictures = el("div", { class: "multiples" });
  for (let number = 0; number < Math.min(multiples, 6); number += 1) {
    const lead = [];
    let rest = number;
    for (const size of [...leading].reverse()) {
      lead.unshift(rest % size);
      rest = Math.floor(rest / size);
    }
    const drawn = [];
    const names = [];
    const every = [Math.ceil(down / BANDS), Math.ceil(across / BANDS)];
    for (let i = 0; i < down; i += every[0]) {
      for (let j = 0; j < across; j += every[1]) {
        const w = (Math.min(every[1], across - j) * flat.width) / across;
        const h = (Math.min(every[0], down - i) * flat.height) / down;
        const [x, y] = [(j * flat.width) / across, (i * flat.height) / down];
        const kind = whole ? WHOLE : (i / every[0] + j / every[1]) % 2 ? "odd" : "even";
        drawn.push(svg("rect", { class: `shard ${kind}`, x, y, width: w, height: h }));
        const index = [...lead, ...(flat.rank > 1 ? [i] : []), ...(flat.rank ? [j] : [])];
        const ids = every[0] * every[1] > 1 ? null : idsOf(side.mesh, leaf, side, index);
        const text = ids === null ? "" : runs(ids) + (copies > ids.length ? ",…" : "");
        if (text && text.length * 7 + 4 <= w && h >= 14) {
          const middle = { class: `ids ${kind}`, x: x + w / 2, y: y + h / 2 + 4, "text-anchor": "middle" };
          const wide = text.length * 7 + 4;
          const plate = { x: x + (w - wide) / 2, y: y + h / 2 - 7, width: wide, height: 14 };
          names.push(svg("rect", { class: `plate ${kind}`, ...plate }), svg("text", middle, text));
        }
      }
    }
    const label = `${title}: ${counted(count, "shard")} of ${dims(shard)} on ${side.mesh.name}`;
    const cutout = cuts.map((line) => line.cloneNode());
    const one = el("div", null, frame(flat, label, ...drawn, ...cutout, ...names));
    if (leading.length) {
      const ranges = lead.map((at, dim) => `${at * shard[dim]}:${(at + 1) * shard[dim]}`);
      one.append(el("p", { class: "note" }, `[${ranges.join(", ")}, :, :]`));
    }
    pictures.append(one);
  }
  box.append(pictures);
  if (multiples > 6) say(`And ${multiples - 6} more along the leading axes.`);
  if (Math.max(down, across) > BANDS) say("Too many shards to draw: each band is several shards.");
  if (side.mesh.ids === false) say(`Device ids: ${UNKNOWN}.`);
  const each = whole ? `Each of ${side.mesh.devices} devices holds all of it` : `${counted(count, "shard")} of ${dims(shard)}`;
  const again = !whole && copies > 1 ? `, each on ${copies} devices` : "";
  const chunks = side.chunk === null ? `chunks ${UNKNOWN}` : `chunks of ${dims(side.chunk)} (dashed)`;
  say(`${each}${again}; ${chunks}${fine ? ", too many to draw" : ""}`);
  return box;
}

function readPicture(leaf, chunk, title, load) {
  const box = el("figure", null, el("figcaption", null, el("b", null, title)));
  const { side } = leaf;
  if (side.mesh === null || chunk === null) {
    box.append(el("p", { class: "note" }, `The bytes that a device decodes are ${UNKNOWN}.`));
    return box;
  }
  const parts = partsOf(leaf, side);
  const index = shardOf(leaf, side, device);
  const spans = leaf.shape.map((size, dim) => {
    const shard = Math.ceil(size / parts[dim]);
    const start = index[dim] * shard;
    return { start, kept: shard, decoded: covered(size, chunk[dim], start, shard) };
  });
  const flat = plane(leaf, 330);
  const [cuts, fine] = lines("chunk", chunk, flat);
  const whole = { start: 0, kept: 1, decoded: [0, 1] };
  const [row, column] = [flat.rank > 1 ? spans.at(-2) : whole, flat.rank ? spans.at(-1) : whole];
  const area = (kind, x, y, w, h) =>
    svg("rect", { class: kind, x: x * flat.x, y: y * flat.y, width: w * flat.x, height: h * flat.y });
  const decoded = [column.decoded[0], row.decoded[0], column.decoded[1], row.decoded[1]];
  const waste = area("decoded", ...decoded);
  const over = area("over", ...decoded);
  over.setAttribute("fill", "url(#hatch)");
  const own = product(spans.map((span) => (span.kept ? span.decoded[1] / span.kept : 1)));
  const empty = leaf.shape.includes(0);
  const label = `${title}: the device at place ${device} decodes ${times(empty ? 1 : own)} times the bytes that it keeps`;
  const back = svg("rect", { class: "paper", width: flat.width, height: flat.height });
  const kept = area("kept", column.start, row.start, column.kept, row.kept);
  box.append(frame(flat, label, back, waste, over, kept, ...cuts));
  const grid = `Chunks of ${dims(chunk)}${fine ? ", too many to draw" : ""}`;
  box.append(
    el(
      "p",
      { class: "note" },
      `This device decodes ${times(empty ? 1 : own)} times the bytes that it keeps, all devices ${times(load)} times. ${grid}.`,
    ),
  );
  return box;
}

function drawLeaf() {
  const leaf = state.chosen;
  if (!leafNode || !leaf) return;
  const alike = arrays.filter((other) => other.layout === leaf.layout).length - 1;
  const about = [`${leaf.dtype || ""} ${dims(leaf.shape)}`.trim(), bytes(leaf.nbytes)];
  if (alike) about.push(`${counted(alike, "other leaf", "other leaves")} of the same shape, spec and chunks`);
  const titles = data.sides.map((side) => side[0].toUpperCase() + side.slice(1));
  const parts = [
    el("p", { class: "chosen" }, el("code", { id: "chosen" }, leaf.path), ` ${about.join(" · ")}`),
    ...leaf.sides.map((side, i) => meshPicture(leaf, side, titles[i])),
  ];
  const reads = [];
  const loads = leaf.load || leaf.sides.map(() => null);
  if (leaf.side.mesh !== null && leaf.sides.some((side) => side.chunk !== null)) {
    const most = leaf.side.mesh.devices - 1;
    device = Math.min(device, most);
    const { ids } = leaf.side.mesh;
    const id = ids === false ? "" : `, id ${ids ? ids[device] : device},`;
    const input = el("input", {
      type: "number",
      id: "device",
      min: 0,
      max: most,
      value: device,
      change: (event) => {
        device = Math.min(Math.max(Math.floor(Number(event.currentTarget.value)) || 0, 0), most);
        drawLeaf();
        document.getElementById("device").focus();
      },
    });
    reads.push(
      el("h3", null, "Bytes that one device reads of ", el("code", null, leaf.path)),
      el(
        "p",
        { class: "note" },
        el("label", { for: "device" }, "The device at place "),
        input,
        ` of ${leaf.side.mesh.name}${id} keeps its shard (filled) and decodes whole chunks (hatched).`,
      ),
      el(
        "div",
        { class: "side" },
        ...leaf.sides.map((side, i) => readPicture(leaf, side.chunk, titles[i], loads[i])),
      ),
    );
  }
  leafNode.replaceChildren(...parts);
  readsNode.replaceChildren(...reads);
}

function drawMeshes() {
  if (!arrays.length || isDiff) return;
  const title = data.sides.length > 1 ? "One leaf on both meshes" : "One leaf on its mesh";
  const node = section("meshes", title, null, beside);
  leafNode = el("div", { "aria-live": "polite" });
  readsNode = el("div", { id: "reads" });
  node.append(leafNode);
  beside.append(readsNode);
  const waste = (leaf) => (leaf.load ? leaf.load[0] - 1 : 0) * (leaf.nbytes || 0);
  const by = (value) => arrays.reduce((best, leaf) => (value(leaf) > value(best) ? leaf : best));
  const most = by(waste);
  choose(waste(most) > 0 ? most : by((leaf) => leaf.nbytes || 0));
}
