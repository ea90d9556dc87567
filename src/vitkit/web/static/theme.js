// Before anything is drawn: the theme that was chosen, if any. Otherwise the system's.
(() => {
  try {
    const chosen = localStorage.getItem("vitkit-theme");
    if (chosen === "light" || chosen === "dark") document.documentElement.dataset.theme = chosen;
  } catch { /* no storage: the system's theme */ }
})();
