"""What singletree costs, measured, beside its peers where they are installed: ``make bench``."""

import sys
from pathlib import Path

# Harnesses, engines and stores are installed and driven as in their tests.
sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))
