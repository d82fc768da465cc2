// Numbers as people like to read them. Bytes as `windowpane plan` prints them.

const UNITS = ["KiB", "MiB", "GiB", "TiB"];
const whole = new Intl.NumberFormat("en-US", { maximumFractionDigits: 0 });

const short = new Intl.NumberFormat("en-US", { notation: "compact", maximumSignificantDigits: 3 });

export const count = (value) => whole.format(value);
export const compact = (value) => short.format(value);

export function bytes(size) {
  if (size < 1024) return `${size} B`;
  let value = size / 1024;
  let unit = 0;
  while (value.toFixed(2) >= 1024 && unit < UNITS.length - 1) {
    value /= 1024;
    unit += 1;
  }
  return `${value.toFixed(2)} ${UNITS[unit]}`;
}

// Three digits that matter: 0.42, 7.1, 38, 1,204.
export function rate(value) {
  if (value === 0 || value >= 100) return count(value);
  return value.toFixed(value < 1 ? 2 : value < 10 ? 1 : 0);
}

export function percent(share) {
  const value = 100 * share;
  if (value > 0 && value < 0.1) return "< 0.1 %";
  return `${value === 0 || value >= 99.95 ? value.toFixed(0) : value.toFixed(1)} %`;
}

export function milliseconds(value) {
  if (value < 1000) return `${value < 10 ? value.toFixed(1) : value.toFixed(0)} ms`;
  return `${(value / 1000).toFixed(value < 10_000 ? 2 : 1)} s`;
}

export function age(seconds) {
  if (seconds < 60) return `${seconds.toFixed(0)} s`;
  const minutes = Math.floor(seconds / 60);
  return minutes < 60 ? `${minutes} min` : `${Math.floor(minutes / 60)} h ${minutes % 60} min`;
}

export const plural = (number, one, many = `${one}s`) => `${count(number)} ${number === 1 ? one : many}`;
