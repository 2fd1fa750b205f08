// The arena: addresses against time, each value a box.

function lanesChart(track, view) {
  const { boxes } = track.data, arena = track.data.arena;
  const inside = [];
  for (let box = 0; box < boxes.first.length; box++) if (boxes.offset[box] >= 0) inside.push(box);
  const over = new Set(boxes.over), again = new Set();
  const category = box => boxes.value[box] >= 0 ? track.value(boxes.value[box]).category : "temporaries inside ops";
  const kinds = inside.map(category);
  inside.forEach(box => { if (track.data.points.kind[boxes.first[box]] === "again") again.add(box); });
  const chart = new Chart("The arena over one step", width => width < 560 ? 280 : 360, {
    paint(context, width, height) {
      const left = MARGIN.left, right = width - MARGIN.right, tall = height - MARGIN.top - MARGIN.bottom, base = MARGIN.top + tall;
      const x = time => left + (time - view.low) / (view.high - view.low) * (right - left);
      context.fillStyle = colour("--wash");
      context.fillRect(left, MARGIN.top, right - left, tall);
      axes(context, width, height, view, { high: arena, phases: track.data.phases });
      context.save();
      context.beginPath();
      context.rect(left, MARGIN.top, right - left, tall);
      context.clip();
      const named = [];
      for (const kind of new Set(kinds)) {
        context.fillStyle = colour(CATEGORY[kind]);
        inside.forEach((box, number) => {
          if (kinds[number] !== kind) return;
          const from = x(track.time[boxes.first[box]]), to = x(track.time[boxes.last[box]]);
          if (to < left || from > right) return;
          const low = base - boxes.offset[box] / arena * tall, size = boxes.bytes[box] / arena * tall;
          const wide = Math.max(to - from, 0.4), deep = Math.max(size, 0.4);
          context.fillRect(from, low - deep, wide, deep);
          if (wide > 3 && deep > 3) named.push([box, from, low - deep, wide, deep, kind]);
        });
      }
      edges(context, named, over, again, left, track);
      context.restore();
    },
    mark(context, width, height) { crosshair(context, view, width, height, this.brush); },
  });
  timed(chart, view, (event, time) => {
    view.point(time);
    const rect = chart.canvas.getBoundingClientRect(), tall = rect.height - MARGIN.top - MARGIN.bottom;
    const address = (1 - (event.clientY - rect.top - MARGIN.top) / tall) * arena, point = track.at(time);
    const found = inside.find(box => boxes.first[box] <= point && point < boxes.last[box] && boxes.offset[box] <= address && address < boxes.offset[box] + boxes.bytes[box]);
    tip.show(event.clientX, event.clientY, ...laneTip(track, found, time, address, over, again));
  });
  view.on(what => what === "range" ? chart.draw() : chart.overlay());
  return { element: chart.element, count: inside.length };
}

function edges(context, named, over, again, left, track) {
  context.textBaseline = "middle";
  context.textAlign = "left";
  context.font = "11px system-ui, sans-serif";
  context.lineWidth = 0.7;
  for (const [box, from, top, wide, deep, kind] of named) {
    context.strokeStyle = colour("--card");
    context.strokeRect(from, top, wide, deep);
    if (again.has(box) && wide > 5) hatch(context, from, top, wide, deep);
    if (over.has(box)) {
      context.fillStyle = colour("--ink");
      context.fillRect(from, top, Math.min(2, wide), deep);
    }
    if (deep < 13 || wide < 34) continue;
    const begin = Math.max(from, left) + 5, room = from + wide - begin - 4;
    let text = (again.has(box) ? "\u21bb " : "") + track.boxName(box);
    while (text.length > 3 && context.measureText(text).width > room) text = `${text.slice(0, -2)}\u2026`;
    if (text.length <= 3) continue;
    context.fillStyle = dark(colour(CATEGORY[kind])) ? "#fff" : "#1a1a1a";
    context.fillText(text, begin, top + deep / 2);
  }
}

function hatch(context, from, top, wide, deep) {
  context.save();
  context.beginPath();
  context.rect(from, top, wide, deep);
  context.clip();
  context.strokeStyle = colour("--card");
  context.globalAlpha = 0.45;
  context.beginPath();
  for (let x = from - deep; x < from + wide; x += 7) {
    context.moveTo(x, top + deep);
    context.lineTo(x + deep, top);
  }
  context.stroke();
  context.restore();
}

function laneTip(track, box, time, address, over, again) {
  if (box === undefined) return [make("div", { class: "head" }, "free"), make("div", { class: "where" }, `address ${bytes(Math.max(0, address))}, at ${seconds(time)}`)];
  const { value, op, first, last, bytes: amounts, offset } = track.data.boxes, known = value[box] >= 0 ? track.value(value[box]) : null;
  const lines = [make("div", { class: "head" }, track.boxName(box))];
  if (known) lines.push(make("div", { class: "where" }, `${known.category} \u00b7 ${known.type}`));
  if (op[box] >= 0) {
    const made = track.describe(op[box]);
    lines.push(make("div", { class: "where" }, `${known ? "made by" : "inside"} ${made.target} \u00b7 ${made.module || "(top level)"}${made.source ? ` \u00b7 ${made.source}` : ""}`));
  }
  if (over.has(box)) lines.push(make("div", { class: "where" }, "in place: it took the bytes of the value before it"));
  if (again.has(box)) lines.push(make("div", { class: "where" }, "made again"));
  lines.push(make("div", { class: "more" }, `${bytes(amounts[box])} at address ${bytes(offset[box])}, from ${seconds(track.time[first[box]])} to ${seconds(track.time[last[box]])}`));
  return lines;
}
