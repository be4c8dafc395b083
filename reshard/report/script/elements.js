// Elements and formats of numbers. Names in a document are untrusted: they become text and values of
// attributes that hold text, never markup.

const data = JSON.parse(document.getElementById("data").textContent);
const UNKNOWN = "not known";
const COLOURS = 7; // specs with a colour of their own
const ROWS = 100; // of a table at first
const BANDS = 32; // parts of a dimension that are drawn

function fill(node, attributes, children) {
  for (const [name, value] of Object.entries(attributes || {})) {
    if (typeof value === "function") node.addEventListener(name, value);
    else if (value !== null && value !== undefined) node.setAttribute(name, value);
  }
  node.append(...children.flat().filter((child) => child !== null && child !== undefined));
  return node;
}
const el = (tag, attributes, ...children) =>
  fill(document.createElement(tag), attributes, children);
const svg = (tag, attributes, ...children) =>
  fill(document.createElementNS("http://www.w3.org/2000/svg", tag), attributes, children);

// A path whose lines may break after each `/`.
const broken = (path) => path.split(/(?<=\/)/).flatMap((key, i) => (i ? [el("wbr"), key] : [key]));

// Two digits, halves rounded to even as in Python.
const fixed = (x) =>
  (((x * 100) % 1) * 2 === 1 && (x * 8) % 1 === 0 ? (2 * Math.round(x * 50)) / 100 : x).toFixed(2);
function bytes(count) {
  if (count === null || count === undefined) return UNKNOWN;
  for (const unit of ["B", "KiB", "MiB", "GiB", "TiB"]) {
    if (count < 1024 || unit === "TiB") return `${unit === "B" ? count.toFixed(0) : fixed(count)} ${unit}`;
    count /= 1024;
  }
}
const product = (numbers) => numbers.reduce((a, b) => a * b, 1);
const counted = (n, noun, several) => `${n} ${n === 1 ? noun : several || noun + "s"}`;
const dims = (shape) => (shape === null ? UNKNOWN : shape.length ? shape.join("x") : "()");
const times = (number) => (number === null ? UNKNOWN : fixed(number));
const changed = (a, b) => (a === b ? b : `${a} → ${b}`);

function specText(spec) {
  const entries = spec.map((axes) =>
    axes.length === 0 ? "None" : axes.length === 1 ? `'${axes[0]}'` : `('${axes.join("', '")}')`,
  );
  while (entries.at(-1) === "None") entries.pop();
  return `P(${entries.join(", ")})`;
}
