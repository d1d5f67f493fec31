// @ts-check
// Where the page is: everything that can be chosen stands in the address, so that it can be sent, and gone back to.

import { useEffect, useState } from "./vendor/preact.js";

const watchers = new Set();

/** The keys that follow a link, by the link's `rel`. */
export const LINK_KEYS = { prev: "[", next: "]", "list-prev": "p", "list-next": "n", up: "u" };

/** The address's parts and choices: `#/run/5/iteration/3?tab=groups` is ["run", "5", "iteration", "3"] and {tab: "groups"}. */
export function readRoute() {
  const [where, query = ""] = location.hash.replace(/^#\/?/, "").split("?", 2);
  return { parts: where.split("/").filter(Boolean).map(decodePart), query: Object.fromEntries(new URLSearchParams(query)) };
}

function decodePart(part) {
  try {
    return decodeURIComponent(part);
  } catch {
    return part;
  }
}

/** An address inside of the page. */
export function href(parts, query = {}) {
  const given = Object.entries(query).filter(([, value]) => value !== undefined && value !== null && value !== "" && value !== false);
  const asked = new URLSearchParams(given.map(([name, value]) => [name, value === true ? "1" : String(value)]));
  return `#/${parts.map(encodeURIComponent).join("/")}${given.length ? `?${asked}` : ""}`;
}

export function go(address, { replace = false } = {}) {
  if (replace) history.replaceState(null, "", address);
  else history.pushState(null, "", address);
  tellWatchers();
}

function tellWatchers() {
  for (const watcher of watchers) watcher();
}

addEventListener("popstate", tellWatchers);
addEventListener("hashchange", tellWatchers);

export function useRoute() {
  const [route, setRoute] = useState(readRoute);
  useEffect(() => {
    const watcher = () => setRoute(readRoute());
    watchers.add(watcher);
    watcher();
    return () => watchers.delete(watcher);
  }, []);
  return route;
}

/** A choice that stands in the address, and how to change it; what equals its default is left out. */
export function useChoice(name, usual = "") {
  const { query } = useRoute();
  const set = (value, how = { replace: true }) => {
    const { parts, query: now } = readRoute();
    go(href(parts, { ...now, [name]: value === usual ? undefined : value }), how);
  };
  return [query[name] ?? usual, set];
}
