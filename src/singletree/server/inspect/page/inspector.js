document.getElementById("app").textContent = "The page of the inspector is not built."
