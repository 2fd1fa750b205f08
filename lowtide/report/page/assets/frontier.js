// The frontier: time against peak, what published methods do, and where no plan can be.

const SHAPES = [
  (x, y) => `M${x - 4} ${y - 4}h8v8h-8z`,
  (x, y) => `M${x} ${y - 5}l5 9h-10z`,
  (x, y) => `M${x} ${y - 5.5}l5.5 5.5-5.5 5.5-5.5-5.5z`,
  (x, y) => `M${x - 5} ${y - 4}h10l-5 9z`,
  (x, y) => `M${x - 4.5} ${y - 4.5}l9 9m0-9l-9 9`,
  (x, y) => `M${x - 5} ${y}h10m-5-5v10`,
  (x, y) => `M${x - 4} ${y}a4 4 0 1 0 8 0a4 4 0 1 0-8 0`,
  (x, y) => `M${x - 5} ${y + 3}h10m-10-6h10`,
];
const toneOf = number => TONES[(number + 3 * Math.floor(number / SHAPES.length)) % TONES.length];
const TONES = ["--gradients", "--activations", "--update", "--backward", "--saved", "--parameters", "--state", "--temporaries"];

function frontierPlot(data) {
  const host = make("div", {});
  const render = () => host.replaceChildren(frontierSvg(data, Math.max(300, host.clientWidth || 900)));
  new ResizeObserver(render).observe(host);
  return host;
}

function frontierSvg({ frontier, numbers, summary }, width) {
  const narrow = width < 560, height = narrow ? 300 : 380, margin = { left: 54, right: 18, top: 22, bottom: 46 };
  const rows = frontier.rows, classics = Object.entries(frontier.classics).map(([name, points]) => [name, points.filter(Boolean)]).filter(([, points]) => points.length);
  const eager = frontier.eager_peak;
  const low = Math.min(...rows.map(row => row.predicted_peak)) * 0.97, high = Math.max(eager, ...rows.map(row => row.predicted_peak)) * 1.02;
  const every = rows.map(row => row.overhead), rest = [...every.slice(1), ...classics.flatMap(([, points]) => points.slice(1).map(point => point.overhead))];
  const most = Math.max(...every, numbers.overhead, 0.005), usual = Math.max(...rest, numbers.overhead, 0.005);
  const top = 1.1 * (most <= 3 * usual ? Math.max(most, usual) : 1.2 * usual);
  const x = amount => margin.left + (amount - low) / (high - low) * (width - margin.left - margin.right);
  const y = overhead => height - margin.bottom - Math.min(overhead, top) / top * (height - margin.top - margin.bottom);
  const base = height - margin.bottom;
  const svg = drawn("svg", { class: "plot", viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": "Overhead against peak" });
  const text = (x, y, words, attributes = {}) => svg.append(drawn("text", { x, y, ...attributes }, document.createTextNode(words)));
  for (const tick of ticks(0, top, 5)) {
    svg.append(drawn("line", { x1: margin.left, x2: width - margin.right, y1: y(tick), y2: y(tick), stroke: "var(--line)" }));
    text(margin.left - 8, y(tick) + 4, percent(tick, tick && top < 0.05 ? 1 : 0), { "text-anchor": "end" });
  }
  let unit = 1;
  while (high / unit >= 1000) unit *= 1024;
  for (const tick of ticks(low / unit, high / unit, Math.max(3, Math.floor(width / 130)))) {
    svg.append(drawn("line", { x1: x(tick * unit), x2: x(tick * unit), y1: base, y2: base + 5, stroke: "var(--faint)" }));
    text(x(tick * unit), base + 19, shortBytes(tick * unit), { "text-anchor": "middle" });
  }
  text((margin.left + width - margin.right) / 2, height - 6, "peak of the whole step", { "text-anchor": "middle" });
  text(4, 12, "more time than without recomputation");
  forbidden(svg, frontier, summary.least_bound, { x, y, low, base, margin });
  const steps = [...rows].sort((a, b) => a.predicted_peak - b.predicted_peak);
  let path = "";
  steps.forEach((row, number) => { path += `${number ? "L" : "M"}${x(row.predicted_peak)} ${y(row.overhead)}`; });
  svg.append(drawn("path", { d: path, fill: "none", stroke: "var(--accent)", "stroke-width": 2.2, "stroke-linejoin": "round" }));
  classics.forEach(([name, points], number) => {
    const tone = toneOf(number), shape = SHAPES[number % SHAPES.length];
    for (const point of points) {
      if (point.overhead > top) continue;
      const mark = drawn("path", { d: shape(x(point.predicted_peak), y(point.overhead)), fill: number % SHAPES.length > 3 ? "none" : `var(${tone})`, stroke: `var(${tone})`, "stroke-width": 1.8, "data-classic": name });
      hovering(mark, name, point);
      svg.append(mark);
    }
  });
  rows.forEach(row => {
    const mark = drawn("circle", { cx: x(row.predicted_peak), cy: y(row.overhead), r: 4, fill: "var(--card)", stroke: "var(--accent)", "stroke-width": 2.2, "data-point": row.budget });
    hovering(mark, "lowtide", row);
    svg.append(mark);
  });
  if (numbers.budget !== null) {
    svg.append(drawn("line", { x1: x(numbers.budget), x2: x(numbers.budget), y1: margin.top, y2: base, stroke: "var(--bad)", "stroke-dasharray": "6 4", "stroke-width": 1.5 }));
    text(x(numbers.budget) + 5, margin.top + 10, "budget", { style: "fill: var(--bad)" });
  }
  const peak = x(eager);
  svg.append(drawn("path", { d: `M${peak - 6} ${y(0) - 6}l12 12m0-12l-12 12`, stroke: "var(--ink)", "stroke-width": 2.4 }));
  text(peak, y(0) - 13, "eager", { "text-anchor": peak > width - 60 ? "end" : "middle", class: "strong" });
  const own = [x(numbers.predicted_peak), y(numbers.overhead)];
  svg.append(drawn("circle", { cx: own[0], cy: own[1], r: 7.5, fill: "var(--accent)", stroke: "var(--card)", "stroke-width": 2.5, id: "chosen" }));
  text(own[0] + (own[0] > width - 130 ? -13 : 13), own[1] - 9, "this plan", { class: "strong", "text-anchor": own[0] > width - 130 ? "end" : "start" });
  return svg;
}

// What no plan can do: none has a peak below the least bound, and none within a budget is quicker than that budget's
// bound, which holds for all smaller peaks, too.
function forbidden(svg, frontier, least, { x, y, low, base, margin }) {
  const rows = [...frontier.rows].sort((a, b) => a.budget - b.budget), edge = Math.max(low, Math.min(least, rows[0].budget));
  let path = `M${x(low)} ${base}V${edge > low ? margin.top : y(rows[0].bound)}H${x(edge)}`;
  for (const row of rows) path += `V${y(row.bound)}H${x(row.budget)}`;
  svg.append(drawn("path", { d: `${path}V${base}Z`, fill: "var(--gone)", opacity: 0.55, id: "forbidden" }));
  svg.append(drawn("text", { x: x(low) + 6, y: base - 8, style: "font-style: italic" }, document.createTextNode("no plan can be in here")));
}

function hovering(mark, name, point) {
  const show = event => tip.show(event.clientX, event.clientY,
    make("div", { class: "head" }, name),
    make("div", { class: "where" }, `peak ${bytes(point.predicted_peak)}, ${percent(point.overhead, 2)} more time`),
    make("div", { class: "where" }, `within a budget of ${bytes(point.budget)}; the bound is ${percent(point.bound, 2)}`));
  mark.addEventListener("pointermove", show);
  mark.addEventListener("pointerleave", () => tip.hide());
}

function frontierLegend(frontier) {
  const legend = make("div", { class: "legend" },
    make("span", { class: "key" }, make("span", { class: "swatch", style: { background: "var(--card)", border: "2.5px solid var(--accent)", borderRadius: "50%" } }), "lowtide"),
    make("span", { class: "key" }, swatch("--gone"), "no plan can be here"));
  Object.entries(frontier.classics).filter(([, points]) => points.some(Boolean)).forEach(([name], number) => {
    const tone = toneOf(number), icon = drawn("svg", { width: 14, height: 14, viewBox: "0 0 14 14" },
      drawn("path", { d: SHAPES[number % SHAPES.length](7, 7), fill: number % SHAPES.length > 3 ? "none" : `var(${tone})`, stroke: `var(${tone})`, "stroke-width": 1.8 }));
    legend.append(make("span", { class: "key" }, icon, name));
  });
  return legend;
}
