// Tables that you can sort, and buttons that filter.

const natural = new Intl.Collator("en", { numeric: true }).compare;

function table(name, columns, rows, most = ROWS) {
  let sorted = null;
  let up = true;
  let limit = most;
  let shown = rows;
  const body = el("tbody");
  const heads = columns.map((column) => {
    const press = () => {
      up = sorted === column ? !up : !column.right;
      sorted = column;
      draw();
    };
    const button = el("button", { type: "button", click: press }, column.title);
    return el("th", { scope: "col", class: column.right ? "right" : null }, button);
  });
  const more = el("button", {
    type: "button",
    class: "more",
    click: () => {
      limit = Infinity;
      draw();
    },
  });
  const count = el("p", { class: "count", role: "status" });
  function draw(kept) {
    if (kept) shown = rows.filter(kept);
    const order = [...shown];
    if (sorted) {
      const value = (row) => sorted.value(row);
      const low = (x) => (x === null || x === undefined ? 1 : 0);
      order.sort((a, b) => {
        const [x, y] = [value(a), value(b)];
        if (low(x) || low(y)) return low(x) - low(y);
        const way = typeof x === "string" ? natural(x, y) : x - y;
        return way * (up ? 1 : -1);
      });
    }
    columns.forEach((column, i) => {
      const way = column !== sorted ? "none" : up ? "ascending" : "descending";
      heads[i].setAttribute("aria-sort", way);
    });
    let before = null;
    const drawn = order.slice(0, limit).map((row) => {
      const cells = columns.map((column) => {
        const content = column.cell ? column.cell(row, sorted ? null : before) : column.value(row);
        const unknown = content === null || content === undefined || content === UNKNOWN;
        const kind = [column.right ? "right" : "", unknown ? "unknown" : "", column.kind || ""];
        return el("td", { class: kind.join(" ").trim() || null }, unknown ? UNKNOWN : content);
      });
      before = row;
      return el("tr", null, ...cells);
    });
    body.replaceChildren(...drawn);
    more.hidden = order.length <= limit;
    more.textContent = `Show all ${order.length} rows`;
    const first = order.length > limit ? `, the first ${limit} shown` : "";
    count.textContent = `${order.length} of ${rows.length} rows${first}`;
    count.hidden = rows.length <= 12 && order.length === rows.length;
  }
  const head = el("thead", null, el("tr", null, ...heads));
  const whole = el("table", null, el("caption", { class: "hidden" }, name), head, body);
  draw();
  const scroll = { class: "scroll", tabindex: "0", role: "region", "aria-label": name };
  return { node: el("div", { class: "table" }, el("div", scroll, whole), count, more), draw };
}

function filters(label, names, press) {
  const buttons = names.map(([name, text, kind]) =>
    el(
      "button",
      {
        type: "button",
        class: "chip",
        "aria-pressed": "false",
        click: (event) => {
          const on = event.currentTarget.getAttribute("aria-pressed") === "false";
          for (const button of buttons) button.setAttribute("aria-pressed", "false");
          event.currentTarget.setAttribute("aria-pressed", String(on));
          press(on ? name : null);
        },
      },
      kind ? el("span", { class: `swatch ${kind}` }) : null,
      el("span", { class: "name" }, name),
      el("span", { class: "much" }, text),
    ),
  );
  return el("div", { class: "chips", role: "group", "aria-label": label }, ...buttons);
}
