// @ts-check
// Light and dark: what the machine says, unless a person chose; paper is light.

import { useEffect, useState } from "./vendor/preact.js";

const DARK = matchMedia("(prefers-color-scheme: dark)");
const themeListeners = new Set();
let chosen = readChosen();
let prints = false;

function readChosen() {
  try {
    return localStorage.getItem("agentrl-theme") || "";
  } catch {
    return ""; // a file opened from disk may have no such storage
  }
}

function themeNow() {
  if (prints) return "light";
  return chosen || (DARK.matches ? "dark" : "light");
}

export function applyTheme() {
  document.documentElement.dataset.theme = themeNow();
  for (const listener of themeListeners) listener();
}

export function toggleTheme() {
  chosen = themeNow() === "dark" ? "light" : "dark";
  try {
    localStorage.setItem("agentrl-theme", chosen);
  } catch {
    // it lasts as long as the page
  }
  applyTheme();
}

function setPrints(now) {
  prints = now;
  applyTheme();
}

DARK.addEventListener("change", applyTheme);
addEventListener("beforeprint", () => setPrints(true));
addEventListener("afterprint", () => setPrints(false));

export function useTheme() {
  const [theme, setTheme] = useState(themeNow);
  useEffect(() => {
    const listener = () => setTheme(themeNow());
    themeListeners.add(listener);
    return () => themeListeners.delete(listener);
  }, []);
  return theme;
}
