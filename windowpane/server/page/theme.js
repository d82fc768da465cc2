// Runs before the first paint, so that the page never flashes in the other theme.
try {
  const chosen = localStorage.getItem("windowpane-theme");
  if (chosen === "light" || chosen === "dark") document.documentElement.dataset.theme = chosen;
} catch {
  // Storage can be forbidden: then the system's preference holds.
}
