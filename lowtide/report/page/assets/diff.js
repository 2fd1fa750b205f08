// The page of two steps beside each other.

const PAIR = { A: "--state", B: "--activations" };

function shownFigure(key, amount) {
  if (amount === null) return "\u2013";
  if (key.endsWith("seconds")) return seconds(amount);
  return key === "overhead" || key === "bound" ? percent(Math.abs(amount), 2) : bytes(amount);
}

function changed(key, before, after) {
  if (before === null || after === null) return "";
  if (key === "overhead" || key === "bound") return `${after < before ? MINUS : "+"}${Math.abs(100 * (after - before)).toFixed(2)} points`;
  return before === after ? "same" : before ? signed(after / before - 1) : "new";
}

function pairRows(rows, show) {
  const most = Math.max(1, ...rows.flatMap(([, before, after]) => [before, after]));
  const line = (name, amount) => make("div", { style: { display: "flex", alignItems: "center", gap: ".4rem" } }, make("span", { class: "hint", style: { width: ".8rem" } }, name), make("div", { style: { flex: "1" } }, stack({ [name]: amount }, most, PAIR)));
  return make("table", { class: "rows" }, make("tbody", {}, ...rows.map(([name, before, after]) => make("tr", {}, make("td", { class: "name" }, name), make("td", { class: "wide" }, line("A", before), line("B", after)), make("td", { class: "n optional" }, show(before)), make("td", { class: "n" }, show(after)), make("td", { class: "n" }, changed("", before, after))))));
}

function fateBar(fates, most) { return stack(fates, most, FATE); }

begin((data, main) => {
  const peak = data.figures.predicted_peak, time = data.figures.predicted_seconds;
  const words = (before, after, less, more) => before === null || after === null || before === after ? "as before" : `${percent(Math.abs(after / before - 1))} ${after < before ? less : more}`;
  const rows = Object.entries(data.figures).filter(([, [before, after]]) => before !== null || after !== null);
  main.append(make("div", { class: "hero" }, make("p", { class: "target mono" }, `A  ${data.names[0]}`), make("p", { class: "target mono" }, `B  ${data.names[1]}`),
    make("h1", {}, make("em", {}, unbroken(bytes(peak[1]))), ` after ${unbroken(bytes(peak[0]))}: ${words(peak[0], peak[1], "less", "more")}`, time[0] && time[1] ? `, ${words(time[0], time[1], "quicker", "slower")}` : ""),
    make("p", { class: "facts" }, ...(data.causes.length ? data.causes : ["nothing that they were made from differs"]).map(cause => make("span", { class: "pill" }, cause)))));
  main.append(section("numbers", "Numbers", "In numbers", "What was predicted for both.", make("div", { class: "card" }, make("table", { class: "rows" },
    make("thead", {}, make("tr", {}, make("th", {}, ""), make("th", { class: "n" }, "A"), make("th", { class: "n" }, "B"), make("th", { class: "n" }, "change"))),
    make("tbody", {}, ...rows.map(([key, [before, after]]) => make("tr", {}, make("td", {}, data.figure_names[key]), make("td", { class: "n" }, figure(`figures.${key}.0`, before, shownFigure(key, before))), make("td", { class: "n" }, figure(`figures.${key}.1`, after, shownFigure(key, after))), make("td", { class: "n" }, changed(key, before, after)))))))));
  if (data.moved.length) {
    const most = Math.max(1, ...data.moved.flatMap(one => [one.before, one.after].map(fates => Object.values(fates).reduce((sum, part) => sum + part, 0))));
    main.append(section("moved", "Moved", "What moved", "What the backward needs, and how each comes to have it: identical modules are one row.", make("div", { class: "card" }, make("table", { class: "rows" }, make("tbody", {}, ...data.moved.slice(0, 40).map(one => make("tr", { "data-module": one.module },
      make("td", {}, make("div", { class: "name mono" }, one.module || "(top level)", one.count > 1 ? make("span", { class: "times" }, `${TIMES}${one.count}`) : null), make("div", { class: "under" }, one.why)),
      make("td", { class: "wide" }, make("div", { style: { marginBottom: "2px" } }, fateBar(one.before, most)), fateBar(one.after, most)),
      make("td", { class: "under optional" }, make("div", {}, `A ${Object.entries(one.before).map(([fate, part]) => `${fate} ${bytes(part)}`).join(", ") || "nothing"}`), make("div", {}, `B ${Object.entries(one.after).map(([fate, part]) => `${fate} ${bytes(part)}`).join(", ") || "nothing"}`)),
      make("td", { class: "n", "data-value": String(one.bytes) }, bytes(one.bytes))))),), legendOf(Object.keys(FATE), FATE))));
  }
  const categories = Object.entries(data.categories).filter(([, [before, after]]) => before || after).map(([name, [before, after]]) => [name, before, after]);
  if (categories.length) main.append(section("peak", "Peak", "At the peak", `A: ${data.peak_at[0]}. B: ${data.peak_at[1]}.`, make("div", { class: "card" }, pairRows(categories, amount => amount ? bytes(amount) : "\u2013")), data.modules.length ? make("div", { class: "card" }, make("h3", {}, "By module"), treeTable(data.modules, { names: ["A", "B"], tones: PAIR, show: bytes, what: "both" }), legendOf(["A", "B"], PAIR)) : null));
  if (data.nanoseconds.length) main.append(section("time", "Time", "Where the seconds go", "Of one step, by module.", make("div", { class: "card" }, treeTable(data.nanoseconds, { names: ["A", "B"], tones: PAIR, show: amount => seconds(amount / 1e9), what: "both" }), legendOf(["A", "B"], PAIR))));
  window.lowtide = { data };
});
