// The page of one step and its plan.

function tracksOf(data) {
  const found = {};
  for (const step of data.steps) for (const one of step.tracks) found[one.name] = new Track(one, step);
  return found;
}

function hero(data) {
  const { numbers, heading, summary } = data, less = numbers.saved, key = name => `numbers.${name}`;
  const time = numbers.overhead <= 0.00005 ? "with nothing computed twice" : `for ${percent(numbers.overhead, 1)} more time`;
  const keeps = { bitwise: "every bit is eager\u2019s", rounding: "the same up to rounding", lossy: "other numbers than eager\u2019s" }[heading.exactness];
  const boxes = [
    ["plan\u2019s peak", figure(key("predicted_peak"), numbers.predicted_peak, bytes(numbers.predicted_peak)), numbers.budget === null ? "no budget was given" : ["within ", figure(key("budget"), numbers.budget, bytes(numbers.budget))]],
    ["eager\u2019s peak", figure(key("eager_peak"), numbers.eager_peak, bytes(numbers.eager_peak)), ["of it ", figure(key("persistent"), numbers.persistent, bytes(numbers.persistent)), " persist"]],
    ["more time", figure(key("overhead"), numbers.overhead, percent(Math.abs(numbers.overhead), 2)), ["no plan can do with less than ", figure(key("bound"), numbers.bound, percent(Math.abs(numbers.bound), 2))]],
    ["computed again", whole(summary.recomputed.reduce((sum, item) => sum + item.count, 0)), ["runs; a step takes ", figure(key("predicted_seconds"), numbers.predicted_seconds, seconds(numbers.predicted_seconds))]],
  ];
  return make("div", { class: "hero" },
    make("p", { class: "target mono" }, heading.target),
    make("h1", {}, make("em", {}, unbroken(bytes(numbers.predicted_peak))), less > 0.0005 ? ` instead of ${unbroken(bytes(numbers.eager_peak))}, ${time}` : ` at the peak, ${time}`),
    make("p", { class: "facts" }, ...[heading.optimizer, `${whole(numbers.ops)} ops`, keeps, heading.costs, `planned in ${seconds(numbers.planning_seconds)}`].map(fact => make("span", {}, fact))),
    make("div", { class: "figures" }, ...boxes.map(([name, number, note]) => make("div", { class: "figure" }, make("div", { class: "name" }, name), make("div", { class: "number" }, number), make("div", { class: "note" }, ...[note].flat())))));
}

function memorySection(data, tracks) {
  const view = new View(Math.max(tracks.plan.time.at(-1), tracks.eager.time.at(-1)));
  const memory = memoryChart(tracks, data.numbers, view);
  const all = make("button", { type: "button", class: "plain", id: "all", disabled: true, onclick: () => view.show(0, view.end) }, "whole step");
  view.on(() => { all.disabled = view.whole; });
  const peak = make("button", { type: "button", class: "plain", onclick: () => { const at = tracks.plan.time[tracks.plan.data.at], wide = view.end / 16; view.show(at - wide / 2, at + wide / 2); } }, "to the peak");
  const tools = make("div", { class: "tools" },
    choice("What is stacked", { plan: "plan", eager: "eager" }, "plan", name => memory.show(name)),
    make("span", { class: "hint push" }, "drag or pinch to zoom, arrows to move"),
    make("button", { type: "button", class: "plain", "aria-label": "Zoom in", onclick: () => view.zoom(0.5) }, "+"),
    make("button", { type: "button", class: "plain", "aria-label": "Zoom out", onclick: () => view.zoom(2) }, MINUS), peak, all);
  const names = STACK.filter(name => tracks.plan.names.includes(name) || tracks.eager.names.includes(name));
  const legend = legendOf(names, CATEGORY);
  legend.append(make("span", { class: "key" }, make("span", { class: "swatch line" }), "the other one, as a line"));
  if (data.numbers.budget !== null) legend.append(make("span", { class: "key" }, make("span", { class: "swatch dash" }), "budget"));
  const cards = [make("div", { class: "card" }, tools, memory.element, legend)];
  if (tracks.plan.data.arena) {
    const lanes = lanesChart(tracks.plan, view);
    cards.push(make("div", { class: "card", id: "arena" },
      make("h3", {}, `The arena: one block of ${bytes(tracks.plan.data.arena)}, shared by ${whole(lanes.count)} boxes`),
      lanes.element,
      make("div", { class: "legend" }, make("span", {}, "Each box is a value: its bytes high, its life wide. Boxes above one another at one time share the block."),
        make("span", {}, "\u21bb and stripes: made again."), make("span", {}, "A dark left edge: in place, on the bytes of the value before it."))));
  } else {
    cards.push(make("div", { class: "card" }, make("p", { class: "hint" }, "This plan has no arena: its values are allocated one by one.")));
  }
  data.view = view;
  return section("memory", "Memory", "Memory", "The bytes in use over one step, by what they hold. The line is the other program: what eager holds, while the plan is stacked.", ...cards);
}

function adviceSection(data) {
  if (!data.advice.length) return null;
  const now = data.numbers;
  const cards = data.advice.map((one, number) => {
    const gain = make("div", { class: "gain" });
    const quicker = one.saved_seconds / (one.seconds + one.saved_seconds);
    if (Math.abs(quicker) >= 0.0005) gain.append(make("span", { class: `pill ${quicker > 0 ? "good" : "bad"}` }, `${percent(Math.abs(quicker))} ${quicker > 0 ? "quicker" : "slower"}`));
    if (one.saved_bytes) gain.append(make("span", { class: `pill ${one.saved_bytes > 0 ? "good" : "bad"}` }, `${bytes(Math.abs(one.saved_bytes))} ${one.saved_bytes > 0 ? "less" : "more"}`));
    if (!one.exact) gain.append(make("span", { class: "pill" }, "up to rounding"));
    return make("div", { class: "card advice", "data-advice": String(number) }, make("span", { class: "rank" }, String(number + 1)), make("div", { class: "what" }, one.what), gain,
      make("div", { class: "how" }, make("span", { class: "mono" }, one.how)), make("div", { class: "hint" }, `then ${seconds(one.seconds)} and ${bytes(one.peak)}; now ${seconds(now.predicted_seconds)} and ${bytes(now.predicted_peak)}`));
  });
  return section("advice", "Advice", "What would help most", "Each change was planned, not guessed: these are the numbers of the new plans, ranked by the time and memory that they save together.", make("div", { class: "cards" }, ...cards));
}

function frontierSection(data) {
  if (!data.frontier) return null;
  return section("frontier", "Frontier", "Time against memory", "Each circle is a plan that was found, the other marks are what published methods do: less memory costs more time. In the grey region no plan can be, by a proof; between it and the circles nobody knows yet.",
    make("div", { class: "card" }, frontierPlot(data), frontierLegend(data.frontier)));
}

function peakSection(data) {
  const host = make("div", { class: "two" });
  const show = name => {
    const peak = data.peaks[name], at = peak.peak_at;
    const rows = Object.entries(peak.categories).filter(([, amount]) => amount).map(([category, amount]) => [category, amount, percent(amount / peak.predicted_peak), `peaks.${name}.categories.${category}`]);
    host.replaceChildren(
      make("div", { class: "card" }, make("h3", {}, figure(`peaks.${name}.predicted_peak`, peak.predicted_peak, bytes(peak.predicted_peak)), " by category"), bars(rows, CATEGORY, bytes),
        make("p", { class: "hint", style: { marginTop: ".6rem" } }, `Reached in the ${at.phase}: ${plain(at.target)}${at.module ? ` of ${at.module}` : ""}${at.source ? `, ${at.source}` : ""}.`)),
      make("div", { class: "card" }, make("h3", {}, "Largest values"), valuesTable(peak.largest)));
  };
  show("plan");
  return section("peak", "Peak", "At the peak", "What is there when the most bytes are in use. Values that are alike in identical layers are one row.",
    make("div", { class: "tools" }, choice("Whose peak", { plan: "plan", eager: "eager" }, "plan", show)), host);
}

function fatesSection(data) {
  if (!data.fates.length) return null;
  const sums = {};
  for (const branch of data.fates) for (const [name, amount] of Object.entries(branch.categories)) sums[name] = (sums[name] ?? 0) + amount;
  const all = Object.values(sums).reduce((sum, amount) => sum + amount, 0), names = data.fate_names.filter(name => sums[name]);
  const words = names.map(name => `${bytes(sums[name])} ${name}`).join(", ");
  const rewrites = data.summary.rewrites.filter(one => one.exactness !== "bitwise" || ["offload", "homes", "chunks"].includes(one.name));
  const card = make("div", { class: "card" }, treeTable(data.fates, { names, tones: FATE, show: bytes, what: "all" }), legendOf(names, FATE));
  const more = rewrites.length ? make("p", { class: "hint", style: { marginTop: ".6rem" } }, `The step was rewritten before it was planned: ${rewrites.map(one => `${one.name}${one.setting === null ? "" : ` ${one.setting}`} (${one.exactness})`).join(", ")}.`) : null;
  if (more) card.append(more);
  return section("kept", "Kept", "Kept, or made again", `Of ${bytes(all)} that the backward needs: ${words}. Identical layers are one row, open one to look inside.`, card);
}

function secondsSection(data) {
  const host = make("div", { class: "two" });
  const show = name => {
    const spent = data.seconds[name], names = Object.keys(SPENT);
    const rows = spent.targets.slice(0, 12), most = Math.max(1e-12, ...rows.map(row => row.seconds));
    const ops = make("table", { class: "rows" }, make("thead", {}, make("tr", {}, make("th", {}, "op"), make("th", { class: "wide optional" }, ""), make("th", { class: "n" }, "runs"), make("th", { class: "n" }, "time"))), make("tbody", {}, ...rows.map(row => make("tr", {},
      make("td", { class: "name mono" }, plain(row.target)), make("td", { class: "wide optional" }, stack({ time: row.seconds * 1e9 }, most * 1e9, { time: "--accent" })),
      make("td", { class: "n" }, whole(row.count), row.again ? make("span", { class: "times" }, `${whole(row.again)} again`) : null), make("td", { class: "n", "data-value": String(row.seconds) }, seconds(row.seconds))))));
    host.replaceChildren(make("div", { class: "card" }, make("h3", {}, "By module"), treeTable(spent.nanoseconds, { names, tones: SPENT, show: amount => seconds(amount / 1e9), what: "time", columns: [] }), legendOf(names.filter(one => spent.nanoseconds.some(branch => branch.categories[one])), SPENT)),
      make("div", { class: "card" }, make("h3", {}, "By kind of op"), ops));
  };
  show("plan");
  return section("time", "Time", "Where the seconds go", "The time of one step as it is predicted from its ops; what is computed again stands by itself.",
    make("div", { class: "tools" }, choice("Whose time", { plan: "plan", eager: "eager" }, "plan", show)), host);
}

function meteredSection(data) {
  const n = data.numbers;
  const pair = (title, predicted, real, show, keys) => {
    const most = Math.max(predicted, real ?? 0), meter = (amount, kind) => make("div", { class: `meter ${kind}`, style: { width: `${100 * (amount ?? most) / most}%` } });
    const off = real === null ? "no step was run" : `the prediction is off by ${signed(predicted / real - 1, 2)}`;
    return make("div", { class: "card pair" }, make("h3", {}, title), make("div", { class: "duo" },
      make("span", {}, "predicted"), meter(predicted, ""), figure(keys[0], predicted, show(predicted)),
      make("span", {}, "metered"), meter(real, real === null ? "none" : "real"), real === null ? make("span", {}, "\u2013") : figure(keys[1], real, show(real))), make("div", { class: "off" }, off));
  };
  return section("metered", "Metered", "Predicted and metered", "What was said before a step ran, and what the allocator and the clock saw when it did.", make("div", { class: "pairs" },
    pair("Peak of the plan", n.predicted_peak, n.metered_peak, bytes, ["numbers.predicted_peak", "numbers.metered_peak"]),
    pair("Peak of eager", n.eager_peak, n.eager_metered_peak, bytes, ["numbers.eager_peak", "numbers.eager_metered_peak"]),
    pair("Step of the plan", n.predicted_seconds, n.metered_seconds, seconds, ["numbers.predicted_seconds", "numbers.metered_seconds"]),
    pair("Step of eager", n.eager_seconds, n.eager_metered_seconds, seconds, ["numbers.eager_seconds", "numbers.eager_metered_seconds"])));
}

function notesSection(data) {
  if (!data.notes.length) return null;
  return section("notes", "Notes", "Notes", "What to know about these numbers.", make("ul", { class: "notes" }, ...data.notes.map(note => make("li", {}, note))));
}

begin((data, main) => {
  const tracks = tracksOf(data);
  main.append(...[hero(data), memorySection(data, tracks), adviceSection(data), frontierSection(data), peakSection(data), fatesSection(data), secondsSection(data), meteredSection(data), notesSection(data)].filter(Boolean));
  window.lowtide = { data, tracks };
});
