// Light, dark, or as the system prefers: a classic script for the head, so that no page flashes.
// Each click on a button with data-theme-switch takes the next one; the button says which it is.
(() => {
  const NAME = "mmkv-theme";
  const ALL = ["system", "light", "dark"];
  const root = document.documentElement;
  let now = "system";
  try {
    const kept = localStorage.getItem(NAME);
    if (ALL.includes(kept)) now = kept;
  } catch { /* a page from a file may have no storage */ }

  function show() {
    if (now === "system") delete root.dataset.theme;
    else root.dataset.theme = now;
    for (const button of document.querySelectorAll("[data-theme-switch]")) {
      button.setAttribute("aria-label", `Colours: ${now}`);
      button.title = `Colours: ${now}`;
      button.dataset.themeSwitch = now;
    }
  }

  document.addEventListener("click", (event) => {
    if (!event.target.closest?.("[data-theme-switch]")) return;
    now = ALL[(ALL.indexOf(now) + 1) % ALL.length];
    try {
      if (now === "system") localStorage.removeItem(NAME);
      else localStorage.setItem(NAME, now);
    } catch { /* it lasts as long as the page */ }
    show();
  });
  document.addEventListener("DOMContentLoaded", show);
  show();
})();
