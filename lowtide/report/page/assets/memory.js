// The memory curve: a program's bytes over time, stacked by category, beside another program's outline.

class Track {  // one program over time, from its columns
  constructor(data, step) {
    this.data = data;
    this.step = step;
    this.count = data.points.bytes.length;
    this.total = Float64Array.from(data.points.bytes);
    this.time = new Float64Array(this.count + 1);  // of compute, when each point begins
    let now = 0;
    for (let point = 0; point < this.count; point++) {
      this.time[point] = now;
      if (!(point in data.points.engine)) now = Math.max(now, data.points.end[point]);
    }
    this.time[this.count] = Math.max(now, data.seconds);
    this.names = STACK.filter(name => name in data.categories);
    this.columns = this.names.map(name => {
      const column = new Float64Array(this.count), { at, bytes: amounts } = data.categories[name];
      for (let row = 0; row < at.length; row++) column.fill(amounts[row], at[row], at[row + 1] ?? this.count);
      return column;
    });
    this.high = Math.max(data.peak, data.points.bytes[data.at]);
  }
  at(time) {  // the point that is there at a time
    let low = 0, high = this.count;
    while (low < high) {
      const middle = (low + high) >> 1;
      if (this.time[middle] <= time) low = middle + 1; else high = middle;
    }
    return Math.max(0, low - 1);
  }
  highest(from, to) {  // of the points in a stretch of time the one with the most bytes
    let found = this.at(from);
    for (let point = found + 1; point < this.count && this.time[point] < to; point++) if (this.total[point] > this.total[found]) found = point;
    return found;
  }
  op(point) {  // the op that runs at a point, or ran last
    for (let one = point; one >= 0; one--) {
      const kind = this.data.points.kind[one];
      if (kind === "run" || kind === "again") return { op: this.data.points.subject[one], again: kind === "again", point: one };
    }
    return null;
  }
  describe(op) {
    const { ops, strings } = this.step;
    return { name: ops.name[op], target: plain(strings[ops.target[op]]), module: strings[ops.module[op]], source: strings[ops.source[op]], phase: strings[ops.phase[op]] };
  }
  value(number) {
    const { values, strings } = this.step;
    return { name: values.name[number], category: strings[values.category[number]], type: strings[values.type[number]], bytes: values.bytes[number] };
  }
  largest(point, count) {  // the largest boxes that are there
    const { first, last, bytes: amounts } = this.data.boxes, found = [];
    for (let box = 0; box < first.length; box++) {
      if (first[box] <= point && point < last[box] && (found.length < count || amounts[box] > amounts[found.at(-1)])) {
        found.push(box);
        found.sort((a, b) => amounts[b] - amounts[a]);
        if (found.length > count) found.pop();
      }
    }
    return found;
  }
  boxName(box) {
    const { value, op } = this.data.boxes;
    return value[box] >= 0 ? this.value(value[box]).name : `inside ${this.step.ops.name[op[box]]}`;
  }
}

function memoryChart(tracks, numbers, view) {
  const state = { shown: tracks.plan, other: tracks.eager };
  const limits = [numbers.budget ?? 0, tracks.plan.high, tracks.eager.high];
  const top = () => 1.06 * Math.max(...limits);
  const chart = new Chart("Memory over one step", width => width < 560 ? 300 : 400, {
    paint(context, width, height) {
      const left = MARGIN.left, right = width - MARGIN.right, tall = height - MARGIN.top - MARGIN.bottom, base = MARGIN.top + tall;
      const high = top(), y = amount => base - amount / high * tall;
      axes(context, width, height, view, { high, phases: state.shown.data.phases });
      context.save();
      context.beginPath();
      context.rect(left, 0, right - left, height);
      context.clip();
      const columns = sample(state.shown, view, left, right);
      bands(context, state.shown, columns, left, y, base);
      outline(context, state.other, sample(state.other, view, left, right), left, y);
      limit(context, left, right, y, numbers, state);
      context.restore();
    },
    mark(context, width, height) { crosshair(context, view, width, height, this.brush); },
  });
  timed(chart, view, (event, time) => {
    view.point(time);
    tip.show(event.clientX, event.clientY, ...memoryTip(state, time));
  });
  view.on(what => what === "range" ? chart.draw() : chart.overlay());
  return {
    element: chart.element,
    show(name) {
      state.shown = tracks[name];
      state.other = tracks[name === "plan" ? "eager" : "plan"];
      chart.draw();
    },
  };
}

function sample(track, view, left, right) {  // for each column of pixels its highest point
  const found = new Int32Array(Math.max(1, Math.ceil(right - left))), step = (view.high - view.low) / found.length;
  for (let column = 0; column < found.length; column++) {
    const from = view.low + column * step;
    found[column] = from > track.time[track.count] ? -1 : track.highest(from, from + step);
  }
  return found;
}

function bands(context, track, columns, left, y, base) {
  const sums = track.names.map(() => new Float64Array(columns.length));
  columns.forEach((point, column) => {
    let sum = 0;
    track.names.forEach((_, band) => { sum += point < 0 ? 0 : track.columns[band][point]; sums[band][column] = sum; });
  });
  const last = columns.findIndex(point => point < 0), width = last < 0 ? columns.length : last;
  for (let band = track.names.length - 1; band >= 0; band--) {
    context.beginPath();
    context.moveTo(left, base);
    for (let column = 0; column < width; column++) {
      const height = y(sums[band][column]);
      context.lineTo(left + column, height);
      context.lineTo(left + column + 1, height);
    }
    context.lineTo(left + width, base);
    context.closePath();
    context.fillStyle = colour(CATEGORY[track.names[band]]);
    context.fill();
    context.strokeStyle = colour("--card");
    context.lineWidth = band === track.names.length - 1 ? 0.5 : 1;
    context.stroke();
  }
  names(context, track, sums, width, left, y, base);
}

function names(context, track, sums, width, left, y, base) {  // of bands that have room for them
  context.textAlign = "left";
  context.textBaseline = "middle";
  track.names.forEach((name, band) => {
    const room = context.measureText(name).width + 14;
    let best = 0, at = -1;
    for (let from = 0; from + room < width; from += 6) {
      let low = base, high = 0;
      for (let column = from; column < from + room; column += 3) {
        low = Math.min(low, band ? y(sums[band - 1][column]) : base);
        high = Math.max(high, y(sums[band][column]));
      }
      if (low - high > best) { best = low - high; at = from; }
    }
    if (best < 17) return;
    const middle = at + Math.round(room / 2);
    const height = ((band ? y(sums[band - 1][middle]) : base) + y(sums[band][middle])) / 2;
    context.fillStyle = dark(colour(CATEGORY[name])) ? "#fff" : "#1a1a1a";
    context.fillText(name, left + at + 7, height);
  });
}

function dark(hex) {
  const number = parseInt(hex.slice(1), 16), [red, green, blue] = [number >> 16 & 255, number >> 8 & 255, number & 255];
  return 0.299 * red + 0.587 * green + 0.114 * blue < 140;
}

function outline(context, track, columns, left, y) {
  context.beginPath();
  let peak = -1, started = false;
  columns.forEach((point, column) => {
    if (point < 0) return;
    if (peak < 0 || track.total[point] > track.total[columns[peak]]) peak = column;
    const height = y(track.total[point]);
    if (started) context.lineTo(left + column, height); else context.moveTo(left + column, height);
    context.lineTo(left + column + 1, height);
    started = true;
  });
  context.strokeStyle = colour("--ink");
  context.lineWidth = 1.6;
  context.lineJoin = "round";
  context.stroke();
  if (peak >= 0) {
    const text = `${track.data.name} ${shortBytes(track.total[columns[peak]])}`, room = context.measureText(text).width;
    context.fillStyle = colour("--ink");
    context.textAlign = "left";
    context.textBaseline = "bottom";
    const x = Math.min(Math.max(left + 4, left + peak - room / 2), left + columns.length - room - 6);
    halo(context, text, x, Math.max(MARGIN.top + 12, y(track.total[columns[peak]]) - 4));
  }
}

function limit(context, left, right, y, numbers, state) {
  if (numbers.budget === null) return;
  const height = Math.round(y(numbers.budget)) + 0.5;
  context.strokeStyle = context.fillStyle = colour("--bad");
  context.lineWidth = 1.5;
  context.setLineDash([7, 4]);
  context.beginPath();
  context.moveTo(left, height);
  context.lineTo(right, height);
  context.stroke();
  context.setLineDash([]);
  context.textAlign = "right";
  context.textBaseline = "bottom";
  halo(context, `budget ${shortBytes(numbers.budget)}`, right - 6, height - 4);
}

function memoryTip(state, time) {
  const track = state.shown, point = track.at(time), ran = track.op(point), rows = [];
  const kind = track.data.points.kind[point];
  const head = [];
  if (ran) {
    const op = track.describe(ran.op);
    head.push(make("div", { class: "head" }, `${op.target}${ran.again ? ", made again" : ""}`));
    head.push(make("div", { class: "where" }, [op.module || "(top level)", op.source, op.phase].filter(Boolean).join(" \u00b7 ")));
  }
  if (kind === "send" || kind === "fetch" || kind === "wait") {
    const words = { send: "begins to send", fetch: "begins to fetch", wait: "waits for" }[kind];
    head.push(make("div", { class: "where" }, `${words} ${track.value(track.data.points.subject[point]).name}`));
  }
  track.names.map((name, band) => [name, track.columns[band][point]]).reverse().forEach(([name, amount]) => {
    if (amount) rows.push(make("tr", {}, make("td", {}, swatch(CATEGORY[name]), ` ${name}`), make("td", {}, bytes(amount))));
  });
  rows.push(make("tr", { class: "sum" }, make("td", {}, `${track.data.name}, in use`), make("td", { id: "tip-total", "data-value": String(track.total[point]) }, bytes(track.total[point]))));
  if (time <= state.other.time[state.other.count]) {
    rows.push(make("tr", {}, make("td", {}, `${state.other.data.name}, at this time`), make("td", {}, bytes(state.other.total[state.other.at(time)]))));
  }
  const large = track.largest(point, 3).map(box => `${track.boxName(box)} ${bytes(track.data.boxes.bytes[box])}`);
  return [...head, make("table", {}, ...rows), make("div", { class: "more" }, `at ${seconds(time)}; largest: ${large.join(", ")}`)];
}
