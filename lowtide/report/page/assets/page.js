// What every page needs: its document, elements made without markup, numbers as the terminal shows them, and the theme.

const MINUS = "\u2212", TIMES = "\u00d7";
const UNITS = ["KiB", "MiB", "GiB", "TiB", "PiB"];

async function unpack() {
  const text = document.getElementById("document").textContent.trim();
  const packed = Uint8Array.from(atob(text), letter => letter.charCodeAt(0));
  const stream = new Blob([packed]).stream().pipeThrough(new DecompressionStream("gzip"));
  return JSON.parse(await new Response(stream).text());
}

// An element; strings become text, never markup.
function make(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (name === "style") Object.assign(element.style, value);
    else if (value === true) element.setAttribute(name, "");
    else if (value !== false && value !== null && value !== undefined) element.setAttribute(name, value);
  }
  element.append(...children.flat().filter(child => child !== null && child !== undefined));
  return element;
}

function drawn(tag, attributes = {}, ...children) {
  const element = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  element.append(...children);
  return element;
}

function bytes(amount) {
  if (Math.abs(amount) < 1024) return `${Math.round(amount)} B`;
  let number = amount / 1024, unit = UNITS[0];
  for (const larger of UNITS.slice(1)) {
    if (Math.abs(number) < 999.995) break;
    number /= 1024;
    unit = larger;
  }
  return `${number.toFixed(2)} ${unit}`;
}

function seconds(amount) {
  if (amount >= 100) return `${amount.toFixed(0)} s`;
  if (amount >= 1) return `${amount.toFixed(2)} s`;
  if (amount >= 1e-3) return `${(amount * 1e3).toFixed(1)} ms`;
  return `${(amount * 1e6).toFixed(0)} \u00b5s`;
}

function percent(part, digits = 1) {
  return `${(100 * part).toFixed(digits)}%`;
}

function signed(part, digits = 1) {
  return `${part < 0 ? MINUS : "+"}${percent(Math.abs(part), digits)}`;
}

function unbroken(text) {
  return text.replaceAll(" ", "\u00a0");
}

// Text that stays readable on whatever is under it.
function halo(context, text, x, y) {
  const fill = context.fillStyle;
  context.lineJoin = "round";
  context.lineWidth = 4;
  context.strokeStyle = colour("--card");
  context.strokeText(text, x, y);
  context.fillStyle = fill;
  context.fillText(text, x, y);
}

function whole(number) {
  return number.toLocaleString("en-US");
}

function plain(target) {
  return target.replace(/\.default$/, "");
}

// A number on the page that is one of the document's: its name there and its exact value go with it.
function figure(key, value, shown) {
  return make("span", { "data-key": key, "data-value": String(value) }, shown);
}

const palette = new Map();  // of the theme; to ask the browser for each box of a chart takes too long
function colour(name) {
  if (!palette.has(name)) palette.set(name, getComputedStyle(document.documentElement).getPropertyValue(name).trim());
  return palette.get(name);
}

const CATEGORY = {
  "parameters": "--parameters", "gradients": "--gradients", "optimizer state": "--state", "buffers": "--buffers",
  "batch": "--batch", "constants": "--constants", "activations": "--activations",
  "activation gradients": "--backward", "scalars": "--constants", "temporaries inside ops": "--temporaries",
  "saved generator states": "--saved", "storages kept empty": "--emptied", "gaps in the arena": "--emptied",
};
const STACK = [  // from the bottom of a curve to its top: what persists first
  "parameters", "optimizer state", "buffers", "batch", "constants", "scalars", "storages kept empty", "gradients",
  "activations", "activation gradients", "temporaries inside ops", "saved generator states",
];
const FATE = { "kept": "--kept", "kept narrow": "--narrow", "recomputed": "--again", "offloaded": "--away", "split": "--split", "not needed": "--gone" };
const SPENT = { "forward": "--forward", "backward": "--backward", "update": "--update", "recomputed": "--again", "waiting for copies": "--waiting" };

function swatch(variable) {
  return make("span", { class: "swatch", style: { background: `var(${variable})` } });
}

function section(id, short, title, lead, ...content) {
  document.getElementById("sections").append(make("a", { href: `#${id}` }, short));
  return make("section", { id }, make("h2", {}, title), make("p", { class: "lead" }, lead), ...content);
}

const themed = [];  // called when the theme changes
function onTheme(redraw) {
  themed.push(redraw);
}

function startTheme() {
  const system = window.matchMedia("(prefers-color-scheme: dark)");
  let chosen = null;
  try { chosen = localStorage.getItem("lowtide-theme"); } catch { chosen = null; }
  const apply = () => {
    document.documentElement.dataset.theme = chosen ?? (system.matches ? "dark" : "light");
    palette.clear();
    for (const redraw of themed) redraw();
  };
  system.addEventListener("change", apply);
  document.getElementById("theme").addEventListener("click", () => {
    chosen = document.documentElement.dataset.theme === "dark" ? "light" : "dark";
    try { localStorage.setItem("lowtide-theme", chosen); } catch { /* a file may have no storage */ }
    apply();
  });
  apply();
}

const tip = {
  element: document.getElementById("tip"),
  show(x, y, ...content) {
    this.element.replaceChildren(...content.flat().filter(Boolean));
    this.element.hidden = false;
    const box = this.element.getBoundingClientRect();
    const left = x + 18 + box.width > window.innerWidth - 8 ? x - 18 - box.width : x + 18;
    const top = Math.min(Math.max(8, y - box.height / 3), window.innerHeight - box.height - 8);
    this.element.style.left = `${Math.max(8, left)}px`;
    this.element.style.top = `${Math.max(8, top)}px`;
  },
  hide() { this.element.hidden = true; },
};

function choice(label, options, chosen, change) {
  const group = make("div", { class: "choice", role: "group", "aria-label": label });
  const press = name => {
    for (const button of group.children) button.setAttribute("aria-pressed", String(button.dataset.name === name));
  };
  for (const [name, shown] of Object.entries(options)) {
    group.append(make("button", { type: "button", "data-name": name, onclick: () => { press(name); change(name); } }, shown));
  }
  press(chosen);
  return group;
}

async function begin(show) {
  startTheme();
  const main = document.getElementById("page");
  try {
    const data = await unpack();
    main.replaceChildren();
    show(data, main);
    main.append(make("footer", {}, `Made by ${data.made_by}. Everything on this page is in this file; it asks no server for anything.`));
    document.documentElement.dataset.ready = "true";
  } catch (error) {
    main.replaceChildren(make("p", { class: "hero" }, `This page can't be shown: ${error.message}. It needs a browser of 2023 or later.`));
    throw error;
  }
}
