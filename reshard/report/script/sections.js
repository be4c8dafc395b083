// Sections about all leaves, and about a diff.

function drawLoads() {
  const known = arrays.filter((leaf) => leaf.load !== null && leaf.nbytes !== null);
  const fact = document.getElementById("fact-amplification");
  const total = known.reduce((sum, leaf) => sum + leaf.nbytes, 0);
  if (fact && data.sides[0] === "saved" && total) {
    const decoded = known.reduce((sum, leaf) => sum + leaf.nbytes * leaf.load[0], 0);
    const ratio = decoded / total;
    const exact = "exactly the bytes that it needs";
    fact.querySelector("strong").textContent = ratio < 1.005 ? exact : `${times(ratio)} times the bytes that it needs`;
    const rest = arrays.length - known.length;
    const words = "On the saved mesh.";
    fact.append(el("p", null, words + (rest ? ` The ${counted(rest, "array")} without a mesh: ${UNKNOWN}.` : "")));
  }
  if (!known.length || data.kind === "coverage") return;
  const groups = new Map();
  for (const leaf of known) {
    const group = groups.get(leaf.layout) || { leaf, count: 0, nbytes: 0, alike: true };
    group.count += 1;
    group.alike = group.alike && leaf.face === group.leaf.face;
    group.nbytes += leaf.nbytes;
    groups.set(leaf.layout, group);
  }
  const waste = ({ leaf, nbytes }) => (Math.max(...leaf.load) - 1) * nbytes;
  const rows = [...groups.values()].filter((group) => waste(group) > 0).sort((a, b) => waste(b) - waste(a));
  const node = section(
    "loads",
    "Read amplification",
    "A restore decodes whole chunks. For each device, it decodes every stored chunk that the device's " +
      "shard touches. Filled: bytes that the device keeps. Hatched: bytes that it decodes and drops.",
  );
  if (!rows.length) {
    node.append(el("p", { class: "good-news" }, "No device decodes more bytes than it keeps."));
    return;
  }
  const largest = Math.max(...rows.map((row) => Math.max(...row.leaf.load) * row.nbytes));
  const picture = (label, needed, decoded, scale, height) => {
    const [kept, all] = [needed * scale, decoded * scale];
    const over = svg("rect", { class: "over", width: all, height: height - 1, fill: "url(#hatch)" });
    const back = svg("rect", { class: "decoded", width: all, height: height - 1 });
    const size = { width: Math.max(kept, all) + 2, height };
    const view = { class: "bar", viewBox: `0 0 ${size.width} ${height}`, ...size, role: "img", "aria-label": label };
    return svg("svg", view, back, over, svg("rect", { class: "kept", width: kept, height: height - 1 }));
  };
  const bar = (row, i) => {
    const decoded = row.nbytes * row.leaf.load[i];
    const label = `${data.sides[i]}: decodes ${bytes(decoded)}, needs ${bytes(row.nbytes)}`;
    return picture(label, row.nbytes, decoded, 240 / largest, 12);
  };
  const decodes = data.sides.map((_, i) => known.reduce((sum, leaf) => sum + leaf.nbytes * leaf.load[i], 0));
  for (const [i, decoded] of decodes.entries()) {
    const words = `decodes ${bytes(decoded)}, needs ${bytes(total)}: ${times(decoded / total)} times`;
    const [name, label] = [el("b", null, `${data.sides[i]} `), `${data.sides[i]}: ${words}`];
    const whole = picture(label, total, decoded, 520 / Math.max(...decodes, total), 22);
    node.append(el("figure", { class: "total" }, el("figcaption", null, name, words), whole));
  }
  const columns = [
    {
      title: "leaves of one layout",
      value: (row) => row.leaf.path,
      cell: ({ leaf, count, alike }) => [
        chooser(leaf, alike ? leaf.face : leaf.path),
        count < 2 ? "" : alike ? ` ${count} leaves` : ` and ${count - 1} more`,
      ],
    },
    { title: "bytes", right: true, value: (row) => row.nbytes, cell: (row) => bytes(row.nbytes) },
    ...data.sides.flatMap((side, i) => [
      { title: side, right: true, value: (row) => row.leaf.load[i], cell: (row) => times(row.leaf.load[i]) },
    ]),
    {
      title: data.sides.join(", "),
      value: waste,
      cell: (row) => el("div", { class: "bars" }, ...data.sides.map((_, i) => bar(row, i))),
    },
  ];
  node.append(table("Read amplification by layout", columns, rows, 12).node);
  const rest = groups.size - rows.length;
  if (rest) node.append(el("p", { class: "note" }, `${counted(rest, "other layout decodes", "other layouts decode")} nothing extra.`));
}

function chooser(leaf, name = leaf.path) {
  const press = () => {
    choose(leaf);
    document.getElementById("meshes").scrollIntoView({ block: "start" });
  };
  return el("button", { type: "button", class: "path", click: press }, broken(name));
}

function drawDevices() {
  const sides = data.held.map((held, i) => [data.sides[i], held]).filter(([, held]) => held.length);
  if (!sides.length) return;
  const rest = arrays.filter((leaf) => leaf.side.mesh === null);
  const size = bytes(rest.reduce((sum, leaf) => sum + (leaf.nbytes || 0), 0));
  const without = counted(rest.length, "array without a mesh", "arrays without a mesh");
  const left = rest.length ? ` ${without}, ${size}, ${rest.length === 1 ? "is" : "are"} left out.` : "";
  const node = section("devices", "Bytes per device", `All devices of a mesh hold the same number of bytes.${left}`);
  const names = ["params", "optimizer state", "other"];
  const rows = sides.flatMap(([side, held]) => held.map(([mesh, parts]) => ({ side, mesh, parts })));
  const sum = (parts) => parts.reduce((a, b) => a + b, 0);
  const largest = Math.max(...rows.map((row) => sum(row.parts)), 1);
  const stack = (row) => {
    let x = 0;
    const rects = row.parts.map((part, i) => {
      const width = (part / largest) * 240;
      x += width;
      return svg("rect", { class: `part p${i}`, x: x - width, width, height: 14 });
    });
    const label = names.map((name, i) => `${name} ${bytes(row.parts[i])}`).join(", ");
    return svg("svg", { class: "bar", viewBox: "0 0 242 15", width: 242, height: 15, role: "img", "aria-label": label }, ...rects);
  };
  const columns = [
    { title: "mesh", value: (row) => `${row.side} ${row.mesh}` },
    ...names.map((title, i) => ({
      title,
      right: true,
      value: (row) => row.parts[i],
      cell: (row) => [el("span", { class: `swatch p${i}` }), bytes(row.parts[i])],
    })),
    { title: "all", right: true, value: (row) => sum(row.parts), cell: (row) => bytes(sum(row.parts)) },
    { title: "", value: (row) => sum(row.parts), cell: stack },
  ].filter((column) => !names.includes(column.title) || rows.some((row) => column.value(row)));
  node.append(table("Bytes per device", columns, rows).node);
  const found = arrays.filter((leaf) => replicated(leaf, leaf.side));
  if (!found.length) return;
  node.append(el("h3", null, `Replicated: every device holds all of ${counted(found.length, "leaf", "leaves")}`));
  const alike = new Map(); // leaves of folded levels
  for (const leaf of found) {
    const row = alike.get(leaf.face) || { leaf, count: 0, nbytes: 0 };
    alike.set(leaf.face, { leaf: row.leaf, count: row.count + 1, nbytes: row.nbytes + leaf.nbytes });
  }
  const whole = [...alike.values()].sort((a, b) => b.nbytes - a.nbytes);
  const all = (row) => row.nbytes * row.leaf.side.mesh.devices;
  const held = [
    { title: "path", value: (row) => row.leaf.path, cell: (row) => chooser(row.leaf, row.leaf.face) },
    { title: "leaves", right: true, value: (row) => row.count },
    { title: "bytes of a device", right: true, value: (row) => row.nbytes, cell: (row) => bytes(row.nbytes) },
    { title: "on all devices", right: true, value: all, cell: (row) => bytes(all(row)) },
  ];
  node.append(table("Replicated leaves", held, whole, 10).node);
}

function histogram(bins, title) {
  const box = el("figure", null, el("figcaption", null, el("b", null, title)));
  if (!bins.length) {
    box.append(el("p", { class: "note" }, "No finite difference other than 0."));
    return box;
  }
  const [low, high] = [bins[0][0], bins.at(-1)[0]];
  const most = Math.max(...bins.map(([, count]) => count));
  const wide = Math.max(Math.min(360 / (high - low + 1), 40), 1);
  const width = wide * (high - low + 1);
  const power = (k) => (2 ** k).toExponential(0);
  const bars = bins.map(([k, count]) => {
    const height = Math.max((count / most) * 120, 1);
    const place = { x: (k - low) * wide, y: 120 - height, width: Math.max(wide - 1, 0.5), height };
    return svg("rect", { class: "kept", ...place }, svg("title", null, `${power(k)} to ${power(k + 1)}: ${count}`));
  });
  const text = `${title}: ${bins.map(([k, count]) => `${count} from ${power(k)}`).join(", ")}`;
  const label = (x, y, anchor, words) => svg("text", { class: "tick", x, y, "text-anchor": anchor }, words);
  const axes = [
    svg("line", { class: "axis", x1: 0, x2: width, y1: 120, y2: 120 }),
    svg("line", { class: "axis", x1: 0, x2: 0, y1: 0, y2: 120 }),
    label(0, 134, "start", power(low)),
    label(Math.max(width, 120), 134, "end", power(high + 1)),
    label(-4, 10, "end", String(most)),
    label(-4, 120, "end", "0"),
  ];
  const margin = 12 + 7 * String(most).length;
  const size = { width: Math.max(width, 120) + margin + 2, height: 140 };
  const view = { class: "array", viewBox: `${-margin} -1 ${size.width} ${size.height}`, ...size };
  box.append(svg("svg", { ...view, role: "img", "aria-label": text }, ...bars, ...axes));
  const all = bins.reduce((sum, [, count]) => sum + count, 0);
  box.append(el("p", { class: "note" }, `${counted(all, "element")}. Each bar is a power of two. Its height is the number of elements.`));
  return box;
}

let showDifference = () => {};

function drawDiff() {
  if (!data.differences) return;
  const rows = data.differences.map(
    ([what, folder, key, a, b, count, size, abs, rel, bins, apart, alike]) => ({
      what, path: pathOf([folder, key]), a, b, count, size, abs, rel, bins, apart, alike,
    }),
  );
  const measured = rows.filter((row) => row.count !== null);
  const chart =
    measured.length || rows.some((row) => row.what === "values")
      ? section("histograms", "How large the differences are", null, beside)
      : null;
  const shown = el("div", { class: "side" });
  const title = el("p", { class: "chosen" });
  if (chart) chart.append(title, shown);
  const names = ["|A - B|", "|A - B| / |B|"];
  const show = (name, pair, of) => {
    const sum = (value) => of.reduce((total, row) => total + (value(row) || 0), 0);
    const [apart, alike] = [sum((row) => row.apart), sum((row) => row.alike)];
    const words = [];
    if (apart) words.push(`${apart} are NaN or infinite in A or B`);
    if (alike) words.push(`${alike} are 0 in one and -0 in the other`);
    const total = counted(sum((row) => row.count), "element");
    const verb = total === "1 element" ? "differs" : "differ";
    title.replaceChildren(
      ...broken(name),
      words.length ? el("span", { class: "note" }, ` · ${total} ${verb}: ${words.join(", ")}.`) : "",
    );
    shown.replaceChildren(...pair.map((bins, i) => histogram(bins, names[i])));
  };
  if (measured.length) show("All elements that differ", data.histograms, measured);
  else title.textContent = `The sizes are ${UNKNOWN}: arrays were compared by recorded digests.`;
  const node = section("differences", "What differs");
  const counts = new Map();
  for (const { what } of rows) counts.set(what, (counts.get(what) || 0) + 1);
  const size = (value) => (typeof value === "string" ? Infinity : value);
  const number = (value) => (typeof value === "number" ? value.toPrecision(4) : value);
  showDifference = (path) => {
    const row = rows.find((each) => each.path === path && each.bins);
    if (!row) return;
    show(row.path, row.bins, [row]);
    chart.scrollIntoView({ block: "nearest" });
  };
  const open = (row) => {
    if (!row.bins) return el("span", { class: "path" }, broken(row.path));
    const press = () => showDifference(row.path);
    return el("button", { type: "button", class: "path", click: press }, broken(row.path));
  };
  const counting = (title, value) =>
    rows.some(value)
      ? [{ title, right: true, value, cell: (row) => value(row) || "–" }]
      : [];
  const columns = [
    { title: "what", value: (row) => row.what },
    { title: "path", value: (row) => row.path, cell: open },
    { title: "A: its first difference", value: (row) => row.a, cell: (row) => row.a ?? "–" },
    { title: "B: the same place", value: (row) => row.b, cell: (row) => row.b ?? "–" },
  ];
  if (rows.some((row) => row.count !== null)) {
    columns.push(
      { title: "elements that differ", right: true, value: (row) => row.count, cell: (row) => (row.count === null ? "–" : `${row.count} of ${row.size}`) },
      { title: "max |A - B|", right: true, value: (row) => size(row.abs), cell: (row) => number(row.abs ?? "–") },
      { title: "max |A - B| / |B|", right: true, value: (row) => size(row.rel), cell: (row) => number(row.rel ?? "–") },
      ...counting("NaN or inf", (row) => row.apart),
      ...counting("0 and -0", (row) => row.alike),
    );
  }
  const { node: body, draw } = table("Differences", columns, rows);
  const press = (name) => draw((row) => name === null || row.what === name);
  if (!rows.length) node.append(el("p", null, "No difference was found."));
  else node.append(filters("What differs", [...counts].map(([name, n]) => [name, String(n)]), press), body);
}

function drawTable() {
  if (!leaves.length) return;
  const node = section("leaves", "All leaves");
  const both = (leaf, text) => {
    const texts = leaf.sides.map(text);
    return texts.length === 2 ? changed(...texts) : texts[0];
  };
  const spec = (side) => (side.mesh === null ? side.device || "no mesh" : specText(side.spec));
  const coloured = (leaf, text) => [el("span", { class: `swatch ${colours.get(layoutName(leaf)).of}` }), text];
  const size = (leaf) => (leaf.shape === null && !isDiff ? "–" : bytes(leaf.nbytes));
  const path = { title: "path", value: (leaf) => leaf.order, cell: (leaf) => (isDiff ? broken(leaf.path) : chooser(leaf)) };
  const amount = { title: "bytes", right: true, value: (leaf) => leaf.nbytes, cell: size };
  const columns = isDiff ? [
    path,
    amount,
    { title: "what", value: layoutName, cell: (leaf) => coloured(leaf, layoutName(leaf)) },
  ] : [
    path,
    { title: "shape", value: (leaf) => (leaf.shape === null ? "" : dims(leaf.shape)) },
    { title: "dtype", value: (leaf) => leaf.dtype },
    amount,
    {
      title: "spec",
      value: (leaf) => (leaf.shape === null ? "" : both(leaf, spec)),
      cell: (leaf) => {
        if (leaf.shape === null) return "–";
        const whole = layoutName(leaf) === "replicated";
        return [...coloured(leaf, both(leaf, spec)), whole ? el("b", null, " replicated") : ""];
      },
    },
    { title: "chunks", value: (leaf) => (leaf.shape === null ? "" : both(leaf, (side) => dims(side.chunk))) },
    {
      title: "load",
      right: true,
      value: (leaf) => (leaf.load ? leaf.load[0] : null),
      cell: (leaf) => (leaf.shape === null ? "–" : leaf.load ? leaf.load.map(times).join(" → ") : UNKNOWN),
    },
  ];
  if (!isDiff && leaves.some((leaf) => leaf.source)) columns.push({ title: "spec by", value: (leaf) => leaf.source });
  if (leaves.some((leaf) => leaf.moved !== null))
    columns.push({ title: "copied", value: (leaf) => (leaf.moved ? "verbatim" : "rewritten") });
  const { node: body, draw } = table("All leaves", columns, leaves);
  state.updates.push(draw);
  node.append(body);
}

drawConversion();
drawMap();
drawMeshes();
drawLoads();
drawDevices();
drawDiff();
drawTable();
sections.dataset.drawn = "";
