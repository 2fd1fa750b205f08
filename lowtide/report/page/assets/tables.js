// Tables: modules as a tree in which identical ones are one row, values, and bars that carry their parts.

function stack(parts, most, tones) {
  const sum = Object.values(parts).reduce((all, part) => all + part, 0);
  const bar = make("div", { class: "stack", style: { width: `${Math.max(0.5, 100 * sum / Math.max(1, most))}%` } });
  for (const [name, part] of Object.entries(parts)) {
    if (part > 0) bar.append(make("i", { title: name, style: { width: `${100 * part / sum}%`, background: `var(${tones[name]})` } }));
  }
  return bar;
}

// `columns`: the parts that get a column of their own, where the screen has room for them.
function treeTable(branches, { names, tones, show, what, columns = names, opened = 0.12 }) {
  const size = branch => branch.bytes, whole = branches.reduce((sum, branch) => sum + size(branch), 0);
  const most = Math.max(1, ...branches.map(size));
  const used = columns.filter(name => branches.some(branch => branch.categories[name]));
  const body = make("tbody", {});
  const table = make("table", { class: "rows tree" },
    make("thead", {}, make("tr", {}, make("th", {}, "module"), make("th", { class: "wide" }, ""), ...used.map(name => make("th", { class: "n optional" }, name)), make("th", { class: "n" }, what))), body);
  const add = (branch, depth, above, parent) => {
    const path = branch.module, label = above && path.startsWith(`${above}.`) ? path.slice(above.length + 1) : path;
    const children = branch.parts, row = make("tr", { "data-module": path });
    const fold = make("button", { type: "button", class: "fold", "aria-label": "Open or close", disabled: !children.length }, children.length ? "\u25b8" : "");
    row.append(
      make("td", { class: "name", style: { paddingLeft: `${depth * 1.05}rem` } }, fold, make("span", { class: "mono" }, label), branch.count > 1 ? make("span", { class: "times" }, `${TIMES}${branch.count}`) : null),
      make("td", { class: "wide" }, stack(Object.fromEntries(names.map(name => [name, branch.categories[name] ?? 0])), most, tones)),
      ...used.map(name => make("td", { class: "n optional" }, branch.categories[name] ? show(branch.categories[name]) : "")),
      make("td", { class: "n", "data-value": String(size(branch)) }, show(size(branch))));
    if (parent) parent.after(row); else body.append(row);
    let rows = null;
    const close = () => { for (const one of rows ?? []) { one.close(); one.row.remove(); } rows = null; fold.textContent = children.length ? "\u25b8" : ""; };
    const open = () => {
      rows = [];
      let last = row;
      for (const child of children) { const made = add(child, depth + 1, path, last); rows.push(made); last = made.last(); }
      fold.textContent = "\u25be";
    };
    fold.addEventListener("click", () => rows ? close() : open());
    if (children.length && depth < 1 && size(branch) > opened * whole) open();
    return { row, close, last: () => rows?.length ? rows.at(-1).last() : row };
  };
  const sorted = [...branches].sort((a, b) => size(b) - size(a)), first = sorted.slice(0, 14);
  first.forEach(branch => add(branch, 0, "", null));
  if (sorted.length > first.length) {
    const rest = make("tr", {}, make("td", { colspan: String(3 + used.length) }, make("button", { type: "button", class: "plain", onclick: () => { rest.remove(); sorted.slice(14).forEach(branch => add(branch, 0, "", null)); } }, `${whole(sorted.length - 14)} smaller ones`)));
    body.append(rest);
  }
  return make("div", { class: "scroll" }, table);
}

function legendOf(names, tones) {
  return make("div", { class: "legend" }, ...names.map(name => make("span", { class: "key" }, swatch(tones[name]), name)));
}

function bars(rows, tones, show) {  // rows of [name, amount]
  const most = Math.max(1, ...rows.map(([, amount]) => amount));
  return make("table", { class: "rows" }, make("tbody", {}, ...rows.map(([name, amount, share, key]) => make("tr", {},
    make("td", {}, tones[name] ? swatch(tones[name]) : null, ` ${name}`),
    make("td", { class: "wide optional" }, stack({ [name]: amount }, most, { [name]: tones[name] ?? "--accent" })),
    make("td", { class: "n" }, key ? figure(key, amount, show(amount)) : show(amount)),
    make("td", { class: "n optional" }, share)))));
}

function valuesTable(largest) {
  const body = make("tbody", {});
  const fill = count => {
    body.replaceChildren(...largest.slice(0, count).map(item => make("tr", {},
      make("td", {}, make("div", { class: "name" }, swatch(CATEGORY[item.category] ?? "--saved"), " ", make("span", { class: "mono" }, item.name), item.count > 1 ? make("span", { class: "times" }, `${TIMES}${item.count}`) : null),
        make("div", { class: "under" }, [item.dtype ? `${item.dtype}[${item.shape.join("x")}]` : "", item.category].filter(Boolean).join(" \u00b7 "))),
      make("td", { class: "optional" }, make("div", { class: "name mono" }, item.module || "(top level)"), make("div", { class: "under" }, item.source || "there before the step")),
      make("td", { class: "n", "data-value": String(item.bytes) }, bytes(item.bytes)))));
    if (largest.length > count) body.append(make("tr", {}, make("td", { colspan: "3" }, make("button", { type: "button", class: "plain", onclick: () => fill(largest.length) }, `${largest.length - count} more`))));
  };
  fill(8);
  return make("table", { class: "rows" }, make("thead", {}, make("tr", {}, make("th", {}, "value"), make("th", { class: "optional" }, "made in"), make("th", { class: "n" }, "all"))), body);
}
