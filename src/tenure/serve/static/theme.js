// Runs before the first paint, so that no page flashes in the wrong colours.
"use strict";
{
  let chosen = null;
  try {
    chosen = localStorage.getItem("tenure.theme");
  } catch {
    // Storage may be forbidden; the page then follows the system.
  }
  if (chosen === "light" || chosen === "dark") document.documentElement.dataset.theme = chosen;
}
