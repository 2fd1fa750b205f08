// Canvases that know their size and the theme, one shared stretch of time, and axes.

class View {  // the stretch of time that charts show together
  constructor(end) {
    this.end = end;
    this.low = 0;
    this.high = end;
    this.cursor = null;
    this.listeners = [];
  }
  on(listener) { this.listeners.push(listener); }
  tell(what) { for (const listener of this.listeners) listener(what); }
  show(low, high) {
    const least = this.end * 1e-6;
    const width = Math.min(this.end, Math.max(least, high - low));
    this.low = Math.min(Math.max(0, low), this.end - width);
    this.high = this.low + width;
    this.tell("range");
  }
  zoom(factor, around = (this.low + this.high) / 2) {
    this.show(around - (around - this.low) * factor, around + (this.high - around) * factor);
  }
  move(part) {
    const by = part * (this.high - this.low);
    this.show(this.low + by, this.high + by);
  }
  point(cursor) {
    this.cursor = cursor;
    this.tell("cursor");
  }
  get whole() { return this.low <= 0 && this.high >= this.end; }
}

const MARGIN = { left: 66, right: 14, top: 26, bottom: 26 };

class Chart {  // a canvas; `paint(context, width, height)` draws what stays, `mark` what follows the cursor
  constructor(label, height, { paint, mark = () => {} }) {
    this.paint = paint;
    this.mark = mark;
    this.height = height;
    this.canvas = make("canvas", { role: "img", "aria-label": label, tabindex: "0" });
    this.element = make("div", { class: "chart" }, this.canvas);
    this.picture = document.createElement("canvas");
    new ResizeObserver(() => this.draw()).observe(this.element);
    onTheme(() => this.draw());
  }
  get tall() { return typeof this.height === "function" ? this.height(this.element.clientWidth) : this.height; }
  draw() {
    const width = this.element.clientWidth;
    if (!width) return;
    const height = this.tall, ratio = window.devicePixelRatio || 1;
    for (const canvas of [this.canvas, this.picture]) {
      canvas.width = Math.round(width * ratio);
      canvas.height = Math.round(height * ratio);
    }
    this.canvas.style.height = `${height}px`;
    const context = this.picture.getContext("2d");
    context.setTransform(ratio, 0, 0, ratio, 0, 0);
    context.font = "12px system-ui, sans-serif";
    this.paint(context, width, height);
    this.overlay();
  }
  overlay() {
    const ratio = window.devicePixelRatio || 1, context = this.canvas.getContext("2d");
    context.setTransform(1, 0, 0, 1, 0, 0);
    context.clearRect(0, 0, this.canvas.width, this.canvas.height);
    context.drawImage(this.picture, 0, 0);
    context.setTransform(ratio, 0, 0, ratio, 0, 0);
    context.font = "12px system-ui, sans-serif";
    this.mark(context, this.element.clientWidth, this.tall);
  }
}

// Drag to zoom, pinch or ctrl and wheel to zoom, arrows to move, double click for all of it; hovering points.
function timed(chart, view, hover) {
  const canvas = chart.canvas, fingers = new Map();
  let from = null, gap = 0;
  const time = x => {
    const width = chart.element.clientWidth - MARGIN.left - MARGIN.right;
    return view.low + Math.min(1, Math.max(0, (x - MARGIN.left) / width)) * (view.high - view.low);
  };
  const at = event => event.clientX - canvas.getBoundingClientRect().left;
  const spread = () => { const [a, b] = [...fingers.values()]; return Math.abs(a - b); };
  canvas.addEventListener("pointerdown", event => {
    fingers.set(event.pointerId, at(event));
    if (fingers.size === 2) { gap = spread(); from = null; chart.brush = null; }
    else if (event.pointerType === "mouse" && event.button === 0) { from = at(event); canvas.setPointerCapture(event.pointerId); }
    else hover(event, time(at(event)));
  });
  canvas.addEventListener("pointermove", event => {
    const x = at(event);
    if (fingers.has(event.pointerId)) fingers.set(event.pointerId, x);
    if (fingers.size === 2) {
      const now = spread();
      const [a, b] = [...fingers.values()];
      if (now > 4 && gap > 4) view.zoom(gap / now, time((a + b) / 2));
      gap = now;
      return;
    }
    if (from !== null && Math.abs(x - from) > 4) {
      chart.brush = [Math.min(from, x), Math.max(from, x)];
      tip.hide();
      chart.overlay();
      return;
    }
    hover(event, time(x));
  });
  const release = event => {
    fingers.delete(event.pointerId);
    if (chart.brush) {
      const [a, b] = chart.brush;
      chart.brush = null;
      view.show(time(a), time(b));
    }
    from = null;
  };
  canvas.addEventListener("pointerup", release);
  canvas.addEventListener("pointercancel", release);
  canvas.addEventListener("pointerleave", () => { if (from === null) { view.point(null); tip.hide(); } });
  canvas.addEventListener("dblclick", () => view.show(0, view.end));
  canvas.addEventListener("wheel", event => {
    if (!event.ctrlKey && !event.metaKey && !event.shiftKey) return;
    event.preventDefault();
    const way = event.deltaY || event.deltaX;
    if (event.shiftKey) view.move(Math.sign(way) * 0.1);
    else view.zoom(Math.exp(way * 0.0025), time(at(event)));
  }, { passive: false });
  canvas.addEventListener("keydown", event => {
    const act = { ArrowLeft: () => view.move(-0.2), ArrowRight: () => view.move(0.2), "+": () => view.zoom(0.5), "-": () => view.zoom(2), "0": () => view.show(0, view.end) }[event.key];
    if (act) { event.preventDefault(); act(); }
  });
}

function ticks(low, high, count, bases = [1, 2, 5, 10]) {
  const rough = (high - low) / Math.max(1, count), power = 10 ** Math.floor(Math.log10(rough || 1));
  const step = power * (bases.find(base => base * power >= rough) ?? 10), found = [];
  for (let tick = Math.ceil(low / step - 1e-9) * step; tick <= high + step * 1e-9; tick += step) found.push(tick);
  return found;
}

function byteTicks(high, count) {
  let unit = 1;
  while (high / unit >= 1000) unit *= 1024;
  return ticks(0, high / unit, count).map(tick => tick * unit);
}

function shortBytes(amount) {
  return bytes(amount).replace(/\.00(?= )/, "").replace(/(\.\d)0(?= )/, "$1");
}

function timeTicks(view, width) {
  return ticks(view.low, view.high, Math.max(2, Math.floor(width / 110)));
}

function shownTime(tick, view) {
  const span = view.high - view.low, [scale, unit] = view.end >= 1 ? [1, "s"] : view.end >= 1e-3 ? [1e3, "ms"] : [1e6, "\u00b5s"];
  const digits = Math.max(0, Math.min(6, -Math.floor(Math.log10(span * scale / 8))));
  return `${(tick * scale).toFixed(digits)} ${unit}`;
}

function axes(context, width, height, view, { high, phases = [], label = shortBytes, tall = height - MARGIN.top - MARGIN.bottom }) {
  const left = MARGIN.left, right = width - MARGIN.right, base = MARGIN.top + tall;
  context.strokeStyle = colour("--line");
  context.fillStyle = colour("--soft");
  context.lineWidth = 1;
  context.textAlign = "right";
  context.textBaseline = "middle";
  for (const tick of byteTicks(high, tall / 52)) {
    const y = Math.round(base - tick / high * tall) + 0.5;
    context.beginPath();
    context.moveTo(left, y);
    context.lineTo(right, y);
    context.stroke();
    context.fillText(label(tick), left - 8, y);
  }
  context.textBaseline = "top";
  for (const tick of timeTicks(view, right - left)) {
    const x = left + (tick - view.low) / (view.high - view.low) * (right - left);
    const text = shownTime(tick, view), half = context.measureText(text).width / 2;
    context.textAlign = "center";
    context.fillText(text, Math.min(Math.max(x, left + half - 10), right - half), base + 8);
  }
  for (const phase of phases) {
    const scale = time => left + (time - view.low) / (view.high - view.low) * (right - left);
    const from = Math.max(left, scale(phase.begin)), to = Math.min(right, scale(phase.end));
    if (to <= left || from >= right) continue;
    if (phase.begin > view.low) {
      context.strokeStyle = colour("--faint");
      context.setLineDash([2, 3]);
      context.beginPath();
      context.moveTo(Math.round(from) + 0.5, 6);
      context.lineTo(Math.round(from) + 0.5, base);
      context.stroke();
      context.setLineDash([]);
    }
    context.fillStyle = colour("--soft");
    context.textAlign = "left";
    if (context.measureText(phase.phase).width + 8 < to - from) context.fillText(phase.phase, from + 5, 7);
  }
}

function crosshair(context, view, width, height, brush) {
  const left = MARGIN.left, right = width - MARGIN.right;
  if (view.cursor !== null && view.cursor >= view.low && view.cursor <= view.high) {
    const x = left + (view.cursor - view.low) / (view.high - view.low) * (right - left);
    context.strokeStyle = colour("--ink");
    context.globalAlpha = 0.55;
    context.beginPath();
    context.moveTo(x, MARGIN.top - 6);
    context.lineTo(x, height - MARGIN.bottom);
    context.stroke();
    context.globalAlpha = 1;
  }
  if (brush) {
    context.fillStyle = colour("--accent");
    context.globalAlpha = 0.18;
    context.fillRect(brush[0], MARGIN.top, brush[1] - brush[0], height - MARGIN.top - MARGIN.bottom);
    context.globalAlpha = 1;
  }
}
